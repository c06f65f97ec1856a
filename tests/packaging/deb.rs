//! The .deb in a chroot with an overlay on this machine's root, in a mount namespace, so that dpkg and its
//! scripts are real and the upper directory shows every file that an installation created or left. No systemd
//! runs there; the guests test the start of the unit (tests/qemu).

use std::path::Path;
use std::process::Command;

use coracle_tests::host;
use coracle_tests::node::binaries;

use crate::dist::stand_ins;
use crate::{Folder, release, run, said};

/// Files that a package manager writes for any package. Triggers of other packages (man-db's takes a minute)
/// are deferred.
const OF_DPKG: [&str; 5] =
    ["var/lib/dpkg/", "var/log/", "var/cache/", "var/lib/systemd/deb-systemd-", "etc/ld.so.cache"];

/// Runs the script in a chroot with PACKAGE in `/pkg`; prints the content of the upper directory where the
/// script calls `left`.
#[track_caller]
fn on_a_debian(folder: &Folder, package: &Path, script: &str) -> String {
    let outer = r#"
set -eu
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount -t proc proc "$1/root/proc"
mount --rbind /dev "$1/root/dev"
mount -t tmpfs tmpfs "$1/root/run"
mkdir "$1/root/run/pkg"
cp "$2" "$1/root/run/pkg/coracle.deb"
left() { (cd "$1/upper" && find . -not -type d -printf 'left %P\n'); }
inside() { chroot "$1/root" sh -euc "$3"; }
"#;
    let place = folder.path().join("debian");
    std::fs::create_dir(&place).expect("a folder");
    let mut steps = String::from(outer);
    for step in script.split("\n--\n") {
        steps.push_str(&format!("\ninside \"$1\" x '{step}'\necho ==\nleft \"$1\"\necho ==\n"));
    }
    let output = run(Command::new("unshare")
        .args(["--mount", "--propagation", "private", "bash", "-c", &steps, "bash"])
        .arg(&place)
        .arg(package)
        .env("DEBIAN_FRONTEND", "noninteractive"));
    assert!(output.status.success(), "{}", said(&output));
    said(&output)
}

/// The files of the upper directory after each step, without those of dpkg.
fn left(said: &str) -> Vec<Vec<String>> {
    let lists = said.split("==\n").skip(1).step_by(2);
    let files = |list: &str| {
        let names = list.lines().filter_map(|line| line.strip_prefix("left "));
        let mut names: Vec<String> = names
            .filter(|name| !OF_DPKG.iter().any(|own| name.starts_with(own)))
            .map(str::to_owned)
            .collect();
        names.sort();
        names
    };
    lists.map(files).collect()
}

fn package(folder: &Folder, programs: &Path) -> std::path::PathBuf {
    host::require_root();
    release(folder.path(), programs, 1_780_000_000);
    let mut entries =
        std::fs::read_dir(folder.path()).expect("a release").flatten().map(|entry| entry.path());
    entries.find(|path| path.extension().is_some_and(|kind| kind == "deb")).expect("a package")
}

#[test]
fn an_installed_package_works_and_a_purged_one_leaves_nothing() {
    let folder = Folder::new("deb");
    let script = "dpkg --no-triggers -i /run/pkg/coracle.deb
coracle version
coracle config check
test -x /usr/bin/coracle-worker -a -x /usr/bin/coracle-pod
test -L /etc/systemd/system/multi-user.target.wants/coracle.service
man --where coracle.toml >/dev/null || test -f /usr/share/man/man5/coracle.toml.5.gz
dpkg --verify coracle
--
mkdir -p /var/lib/coracle/images /run/coracle
echo x >/var/lib/coracle/images/blob
echo \"# mine\" >>/etc/coracle/config.toml
dpkg --no-triggers -i /run/pkg/coracle.deb
grep -q mine /etc/coracle/config.toml
--
dpkg --no-triggers -r coracle
test ! -e /run/coracle
--
dpkg --no-triggers -P coracle
test ! -e /etc/coracle -a ! -e /var/lib/coracle";
    let said = on_a_debian(&folder, &package(&folder, &binaries()), script);
    assert!(said.contains("coracle 0."), "{said}");
    let left = left(&said);
    for path in [
        "usr/bin/coracle",
        "etc/coracle/config.toml",
        "etc/crictl.yaml",
        "usr/lib/systemd/system/coracle.service",
    ] {
        assert!(left[0].iter().any(|file| file == path), "no {path}: {:?}", left[0]);
    }
    let removed = ["etc/coracle/config.toml", "etc/crictl.yaml", "var/lib/coracle/images/blob"];
    // Debian keeps the enabled state of a removed service.
    let kept: Vec<_> = left[2].iter().filter(|file| !file.starts_with("etc/systemd/")).collect();
    assert_eq!(kept, removed, "{said}");
    assert_eq!(left[3], Vec::<String>::new(), "{said}");
}

#[test]
fn a_crictl_yaml_of_the_users_own_is_left_alone() {
    let folder = Folder::new("crictl-yaml");
    let script = "echo \"runtime-endpoint: unix:///mine\" >/etc/crictl.yaml
dpkg --no-triggers -i /run/pkg/coracle.deb
grep -qx \"runtime-endpoint: unix:///mine\" /etc/crictl.yaml
--
dpkg --no-triggers -P coracle";
    let said = on_a_debian(&folder, &package(&folder, &stand_ins(&folder, "programs", 0o755)), script);
    assert_eq!(left(&said)[1], ["etc/crictl.yaml"], "{said}");
}
