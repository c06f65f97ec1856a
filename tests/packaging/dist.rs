//! Releases are reproducible in different directories, at different times and with different umasks; and
//! their content.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use coracle_tests::node::binaries;

use crate::{EPOCH, Folder, release, run, said, triple, workspace};

/// Every format that `packaging/dist` makes by itself.
const ALL: &str = "tar deb rpm apk oci sbom convert";

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).expect("a folder").flatten().filter(|entry| entry.path().is_file());
    entries
        .map(|entry| {
            (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).expect("a file"))
        })
        .collect()
}

/// Small files instead of the programs, whose content does not matter here.
pub(crate) fn stand_ins(folder: &Folder, place: &str, mode: u32) -> std::path::PathBuf {
    for name in ["coracled", "coracle", "coracle-pod", "coracle-convert"] {
        let path = folder.write(&format!("{place}/{name}"), &format!("stands for {name}\n"));
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
    }
    folder.path().join(place)
}

#[test]
fn the_same_programs_give_the_same_bytes() {
    let folder = Folder::new("twice");
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    release(&one, &stand_ins(&folder, "here", 0o755), EPOCH, ALL, &[&triple()]);
    release(&two, &stand_ins(&folder, "there/and/deeper", 0o700), EPOCH, "", &[&triple()]);
    let (one, two) = (files(&one), files(&two));
    assert_eq!(one.keys().collect::<Vec<_>>(), two.keys().collect::<Vec<_>>());
    assert_eq!(one.len(), 8, "a file of each format, the sums: {:?}", one.keys());
    for (name, bytes) in &one {
        assert!(two[name] == *bytes, "{name} differs");
    }
    // The given time determines the result, and nothing else.
    let later = folder.path().join("later");
    release(&later, &folder.path().join("here"), EPOCH + 60, "tar", &[&triple()]);
    let later = files(&later);
    let archive = later.keys().find(|name| name.ends_with(".tar.gz")).expect("an archive");
    assert_ne!(later[archive], one[archive]);
}

#[test]
fn an_archive_holds_programs_pages_units_and_licences_of_root() {
    let folder = Folder::new("archive");
    let out = folder.path().join("out");
    release(&out, &stand_ins(&folder, "programs", 0o755), EPOCH, "tar", &[&triple()]);
    let sums = run(Command::new("sha256sum").args(["--check", "SHA256SUMS"]).current_dir(&out));
    assert!(sums.status.success(), "{}", said(&sums));
    let archive = files(&out).into_keys().find(|name| name.ends_with(".tar.gz")).expect("an archive");
    let listed = run(Command::new("tar").args(["-tvzf", &archive]).env("TZ", "UTC").current_dir(&out));
    let listed = said(&listed);
    for line in listed.lines() {
        assert!(line.contains(" 0/0 ") && line.contains(" 2026-05-28 20:26 "), "{line}");
    }
    for path in [
        "usr/bin/coracled",
        "usr/bin/coracle",
        "usr/bin/coracle-worker -> coracle",
        "usr/bin/coracle-pod",
        "usr/share/coracle/config.toml",
        "usr/lib/systemd/system/coracle.service",
        "usr/lib/tmpfiles.d/coracle.conf",
        "usr/share/coracle/openrc/coracle.initd",
        "usr/share/man/man1/coracle.1.gz",
        "usr/share/man/man1/coracle-image-pull.1.gz",
        "usr/share/man/man1/coracle-why.1.gz",
        "usr/share/man/man5/coracle.toml.5.gz",
        "usr/share/bash-completion/completions/coracle",
        "usr/share/doc/coracle/README.md",
        "usr/share/man/man8/coracled.8.gz",
        "usr/share/man/man8/coracle-pod.8.gz",
        "usr/share/licenses/coracle/LICENSE",
        "usr/share/licenses/coracle/licences.gz",
        "usr/lib/extension-release.d/extension-release.coracle",
    ] {
        assert!(listed.lines().any(|line| line.ends_with(&format!("/{path}"))), "no {path}:\n{listed}");
    }
}

/// `tar -C / --strip-components=1 -xzf` as in packaging/README.md, in a chroot whose /bin and /lib are links
/// into /usr and which has an existing configuration. Regression: an archive with an entry `lib/` replaced
/// the link /lib by a directory, after which no dynamically linked program of the chroot started.
#[test]
fn an_archive_unpacked_on_a_usr_merged_root_keeps_links_modes_and_configuration() {
    coracle_tests::host::require_root();
    let folder = Folder::new("usr-merged");
    let out = folder.path().join("out");
    release(&out, &stand_ins(&folder, "programs", 0o755), EPOCH, "tar", &[&triple()]);
    let archive = files(&out).into_keys().find(|name| name.ends_with(".tar.gz")).expect("an archive");
    let script = r##"
set -eu
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
root=$1/root
mkdir -p "$root/etc/coracle"
echo "# mine" >"$root/etc/coracle/config.toml"
chmod 0700 "$root/etc/coracle"
cp "$2" "$root/tmp/archive.tar.gz"
state() { (cd "$root" && stat --format "%n %F %a %Y" /dev/null bin lib sbin etc etc/coracle usr usr/bin usr/lib usr/share); }
state >"$1/before"
chroot "$root" tar -C / --strip-components=1 -xzf /tmp/archive.tar.gz
state >"$1/after"
# New files change the time of the directories that they are in, and nothing else.
diff <(sed "s/ [0-9]*$//" "$1/before") <(sed "s/ [0-9]*$//" "$1/after")
chroot "$root" ls /usr/bin/coracle /usr/lib/systemd/system/coracle.service
grep -x "# mine" "$root/etc/coracle/config.toml"
"##;
    let place = folder.path().join("root");
    fs::create_dir(&place).expect("a folder");
    let output = run(Command::new("unshare")
        .args(["--mount", "--propagation", "private", "bash", "-c", script, "bash"])
        .arg(&place)
        .arg(out.join(archive)));
    assert!(output.status.success(), "{}", said(&output));
}

/// The targets of a page's links to other files.
fn links(page: &str) -> impl Iterator<Item = &str> {
    let targets = page.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    targets.filter(|target| !target.is_empty() && !target.contains(':'))
}

/// Pages are installed without the sources: of a link to a file that is not installed only the text stays. `coracle check`
/// names the pages of its own installation.
#[test]
fn installed_pages_lead_to_installed_pages() {
    let folder = Folder::new("pages");
    let tree = folder.path().join("tree");
    let laid = run(Command::new(workspace().join("packaging/tree"))
        .arg(triple())
        .arg(&tree)
        .env("CORACLE_PROGRAMS", binaries())
        .current_dir(workspace()));
    assert!(laid.status.success(), "{}", said(&laid));
    let place = tree.join("usr/share/doc/coracle");
    let mut count = 0;
    for (name, bytes) in files(&place).into_iter().filter(|(name, _)| name.ends_with(".md")) {
        let page = String::from_utf8(bytes).expect("a page is text");
        for target in links(&page) {
            assert!(place.join(target).exists(), "{name}: {target}");
            count += 1;
        }
        assert!(!page.contains("](notes/") && !page.contains("[notes/"), "{name}");
    }
    assert!(count > 100, "{count} links");
    assert!(files(&place)["security.md"].starts_with(b"# Security\n"), "the page itself is whole");

    let config = folder.write("config.toml", "");
    let program = tree.join("usr/bin/coracle");
    let checked = run(Command::new(program).args(["check", "--json", "--config"]).arg(config));
    let report: serde_json::Value = serde_json::from_slice(&checked.stdout).expect("JSON");
    for need in report["needs"].as_array().expect("needs") {
        let page = Path::new(need["page"].as_str().expect("a page"));
        assert!(page.starts_with(&place) && page.is_file(), "{need}");
    }
}
