//! A chroot with an overlay on this machine's root, in a mount namespace: package managers and the scripts of
//! packages are real, and the upper directory shows every file that an installation created or left. No init
//! runs there; the guests test the start of the unit (tests/qemu).

use std::path::Path;
use std::process::Command;

use coracle_tests::host;

use crate::{Folder, run, said};

/// Files that a package manager writes for any package. Triggers of other packages (man-db's takes a minute)
/// are deferred.
const OF_MANAGERS: [&str; 8] = [
    "var/lib/dpkg/",
    "var/lib/apt/",
    "var/lib/dnf/",
    "var/log/",
    "var/cache/",
    "var/lib/systemd/deb-systemd-",
    "etc/ld.so.cache",
    "root/.rpmdb/",
];

const OUTER: &str = r#"
set -eu
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount -t proc proc "$1/root/proc"
mount --rbind /dev "$1/root/dev"
mount -t tmpfs tmpfs "$1/root/run"
mkdir "$1/root/run/pkg"
left() { (cd "$1/upper" && find . -not -type d -not -type c -printf 'left %P\n'); }
inside() { chroot "$1/root" sh -euc "$3"; }
"#;

/// The result of a script.
pub(crate) struct Visit {
    /// Both streams of the script, with the lists of files.
    pub(crate) said: String,
    /// The files of the upper directory after each step, without those of package managers.
    pub(crate) left: Vec<Vec<String>>,
}

/// Runs the steps of the script, which lines of `--` separate, with these files in `/run/pkg`.
#[track_caller]
pub(crate) fn visit(folder: &Folder, files: &[(&str, &Path)], script: &str) -> Visit {
    host::require_root();
    let place = folder.path().join("root");
    std::fs::create_dir(&place).expect("a folder");
    let mut steps = String::from(OUTER);
    for (name, path) in files {
        steps.push_str(&format!("cp '{}' \"$1/root/run/pkg/{name}\"\n", path.display()));
    }
    for step in script.split("\n--\n") {
        steps.push_str(&format!(
            "\ninside \"$1\" x '{step}'\necho \"== files\"\nleft \"$1\"\necho \"== files\"\n"
        ));
    }
    let output = run(Command::new("unshare")
        .args(["--mount", "--propagation", "private", "bash", "-c", &steps, "bash"])
        .arg(&place)
        .env("DEBIAN_FRONTEND", "noninteractive"));
    assert!(output.status.success(), "{}", said(&output));
    let said = said(&output);
    Visit { left: said.split("== files\n").skip(1).step_by(2).map(files_of).collect(), said }
}

fn files_of(list: &str) -> Vec<String> {
    let names = list.lines().filter_map(|line| line.strip_prefix("left "));
    let mut names: Vec<String> = names
        .filter(|name| !OF_MANAGERS.iter().any(|own| name.starts_with(own)))
        .map(str::to_owned)
        .collect();
    names.sort();
    names
}
