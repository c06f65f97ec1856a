//! The .deb with the real dpkg and lintian.

use std::path::Path;
use std::process::Command;

use coracle_tests::node::binaries;

use crate::dist::stand_ins;
use crate::root::visit;
use crate::{Folder, package, packages, run, said};

#[test]
fn a_package_passes_lintian_and_works_and_a_purged_one_leaves_nothing() {
    let folder = Folder::new("deb");
    let (package, next) = packages(&folder, "deb", &binaries());
    passes_lintian(&package);
    let script = "dpkg --no-triggers -i /run/pkg/coracle.deb
coracle version
coracle config check
test -x /usr/bin/coracled -a -x /usr/bin/coracle-worker -a -x /usr/bin/coracle-pod
test -L /etc/systemd/system/multi-user.target.wants/coracle.service
man --where coracle.toml >/dev/null || test -f /usr/share/man/man5/coracle.toml.5.gz
dpkg --verify coracle
--
mkdir -p /var/lib/coracle/images /run/coracle
echo x >/var/lib/coracle/images/blob
echo \"# mine\" >>/etc/coracle/config.toml
dpkg --no-triggers --force-confold -i /run/pkg/next.deb
grep -q mine /etc/coracle/config.toml
grep -q \"new default\" /etc/coracle/config.toml.dpkg-dist
--
dpkg --no-triggers -r coracle
test ! -e /run/coracle
--
dpkg --no-triggers -P coracle
test ! -e /etc/coracle -a ! -e /var/lib/coracle";
    let done = visit(&folder, &[("coracle.deb", &package), ("next.deb", &next)], script);
    let (said, left) = (done.said, done.left);
    assert!(said.contains("coracle 0."), "{said}");
    assert!(
        said.contains("coracle: systemd does not run here, so nothing was started: /usr/share/doc"),
        "{said}"
    );
    for path in [
        "usr/bin/coracle",
        "etc/coracle/config.toml",
        "etc/crictl.yaml",
        "usr/lib/systemd/system/coracle.service",
        "usr/share/doc/coracle/licences.gz",
    ] {
        assert!(left[0].iter().any(|file| file == path), "no {path}: {:?}", left[0]);
    }
    let removed = [
        "etc/coracle/config.toml",
        "etc/coracle/config.toml.dpkg-dist",
        "etc/crictl.yaml",
        "var/lib/coracle/images/blob",
    ];
    // Debian keeps the enabled state of a removed service.
    let kept: Vec<_> = left[2].iter().filter(|file| !file.starts_with("etc/systemd/")).collect();
    assert_eq!(kept, removed, "{said}");
    assert_eq!(left[3], Vec::<String>::new(), "{said}");
}

/// The lines of the pages, without their questions. The package depends on nothing that has to be downloaded.
#[test]
fn apt_installs_removes_and_purges_a_package() {
    let folder = Folder::new("apt");
    let script = "cd /run/pkg
apt install --yes -o DPkg::Options::=--no-triggers ./coracle.deb
test -x /usr/bin/coracle -a -f /etc/coracle/config.toml
--
apt remove --yes -o DPkg::Options::=--no-triggers coracle
test ! -e /usr/bin/coracle -a -f /etc/coracle/config.toml
--
apt purge --yes -o DPkg::Options::=--no-triggers coracle";
    let package = package(&folder, "deb", &stand_ins(&folder, "programs", 0o755));
    let done = visit(&folder, &[("coracle.deb", &package)], script);
    assert!(done.said.contains("Setting up coracle"), "{}", done.said);
    assert!(done.left[0].iter().any(|file| file == "usr/bin/coracle"), "{:?}", done.left[0]);
    assert_eq!(done.left[2], Vec::<String>::new(), "{}", done.said);
}

#[test]
fn a_crictl_yaml_of_the_users_own_is_left_alone() {
    let folder = Folder::new("crictl-yaml");
    let script = "echo \"runtime-endpoint: unix:///mine\" >/etc/crictl.yaml
dpkg --no-triggers -i /run/pkg/coracle.deb
grep -qx \"runtime-endpoint: unix:///mine\" /etc/crictl.yaml
--
dpkg --no-triggers -P coracle";
    let package = package(&folder, "deb", &stand_ins(&folder, "programs", 0o755));
    let done = visit(&folder, &[("coracle.deb", &package)], script);
    assert_eq!(done.left[1], ["etc/crictl.yaml"], "{}", done.said);
}

/// Fails at an error or a warning.
#[track_caller]
fn passes_lintian(package: &Path) {
    let found = run(Command::new("lintian")
        .args(["--allow-root", "--tag-display-limit", "0", "--fail-on", "error,warning"])
        .arg(package));
    assert!(found.status.success(), "{}", said(&found));
}
