//! The .rpm with the real rpm and dnf, as Debian packages them, in a chroot; and what it says of itself.

use std::path::Path;
use std::process::Command;

use coracle_tests::node::binaries;

use crate::dist::stand_ins;
use crate::root::visit;
use crate::{Folder, package, packages, run, said};

/// The package is installed without a check of dependencies, because Debian's rpm has an empty database: no package provides /bin/sh.
#[test]
fn an_upgraded_package_keeps_the_configuration_and_a_removed_one_leaves_only_that() {
    let folder = Folder::new("rpm");
    let (package, next) = packages(&folder, "rpm", &binaries());
    let script = "rpm --install --nodeps /run/pkg/coracle.rpm
coracle version
coracle config check
rpm --verify coracle
--
mkdir -p /var/lib/coracle /run/coracle
echo x >/var/lib/coracle/blob
echo \"# mine\" >>/etc/coracle/config.toml
rpm --upgrade --nodeps /run/pkg/next.rpm
grep -q mine /etc/coracle/config.toml
grep -q \"new default\" /etc/coracle/config.toml.rpmnew
test \"$(rpm --query coracle)\" = \"coracle-9.0.0-1.$(uname -m)\"
--
rpm --erase coracle
test ! -e /run/coracle -a ! -e /usr/share/coracle
grep -q mine /etc/coracle/config.toml.rpmsave";
    let done = visit(&folder, &[("coracle.rpm", &package), ("next.rpm", &next)], script);
    let (said, left) = (done.said, done.left);
    for path in [
        "usr/bin/coracle",
        "usr/bin/coracle-worker",
        "etc/coracle/config.toml",
        "etc/crictl.yaml",
        "usr/lib/systemd/system/coracle.service",
        "usr/share/licenses/coracle/LICENSE",
        "usr/share/zsh/site-functions/_coracle",
    ] {
        assert!(left[0].iter().any(|file| file == path), "no {path}: {:?}", left[0]);
    }
    let kept = ["etc/coracle/config.toml.rpmnew", "etc/coracle/config.toml.rpmsave", "var/lib/coracle/blob"];
    assert_eq!(left[2], kept, "{said}");
}

/// No repository is asked: dnf gets the file of the release, as the page says.
#[test]
fn dnf_installs_the_file_of_a_release_and_an_upgrade_and_removes_the_package() {
    let folder = Folder::new("dnf");
    let (package, next) = packages(&folder, "rpm", &stand_ins(&folder, "programs", 0o755));
    let name = |path: &Path| path.file_name().expect("a file").to_str().expect("text").to_owned();
    let (ours, later) = (name(&package), name(&next));
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(ours, format!("coracle-{version}-1.{}.rpm", std::env::consts::ARCH));
    let script = format!(
        "cd /run/pkg
dnf install --assumeyes --disablerepo=* ./{ours}
test -x /usr/bin/coracle
test \"$(rpm --query coracle)\" = \"{}\"
--
echo \"# mine\" >>/etc/coracle/config.toml
dnf install --assumeyes --disablerepo=* /run/pkg/{later}
test \"$(rpm --query coracle)\" = \"{}\"
grep -q mine /etc/coracle/config.toml
--
dnf remove --assumeyes --disablerepo=* coracle
test ! -e /usr/bin/coracle -a ! -e /usr/share/coracle",
        ours.trim_end_matches(".rpm"),
        later.trim_end_matches(".rpm"),
    );
    let done = visit(&folder, &[(&ours, &package), (&later, &next)], &script);
    let [first, .., last] = &done.left[..] else { panic!("three steps: {}", done.said) };
    assert!(first.iter().any(|file| file == "usr/lib/systemd/system/coracle.service"), "{first:?}");
    let kept = ["etc/coracle/config.toml.rpmnew", "etc/coracle/config.toml.rpmsave"];
    assert_eq!(last[..], kept, "{}", done.said);
}

/// A directory of the system in the package would conflict with the package `filesystem`, which has other
/// modes for some. A program in the package needs nothing but /bin/sh for the scripts.
#[test]
fn the_package_owns_only_its_directories_and_needs_only_a_shell() {
    let folder = Folder::new("rpm-content");
    let package = package(&folder, "rpm", &stand_ins(&folder, "programs", 0o755));
    // rpm makes a database even for a question about a file: not in root's home.
    let rpm = || {
        let mut command = Command::new("rpm");
        command.arg("--dbpath").arg(folder.path().join("database"));
        command
    };
    let query = |what: &[&str]| {
        let output = run(rpm().args(["--query", "--package"]).args(what).arg(&package));
        assert!(output.status.success(), "{}", said(&output));
        String::from_utf8(output.stdout).expect("text")
    };
    let listed = query(&["--queryformat", "[%{FILEMODES:perms} %{FILEUSERNAME} %{FILENAMES}\n]"]);
    for line in listed.lines() {
        assert!(line.contains(" root /"), "{line}");
        assert!(!line.starts_with('d') || line.ends_with("/coracle") || line.ends_with("/conf.d"), "{line}");
    }
    assert_eq!(query(&["--configfiles"]).trim(), "/etc/coracle/config.toml");
    for need in query(&["--requires"]).lines() {
        assert!(need == "/bin/sh" || need.starts_with("rpmlib("), "{need}");
    }
    let checked = run(rpm().args(["--checksig", "--nosignature"]).arg(&package));
    assert!(said(&checked).contains("digests OK"), "{}", said(&checked));
}
