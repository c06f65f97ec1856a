//! Man pages as readers of man pages take them: mandoc finds no mistake in them, and each is in every package.

use std::fs;
use std::process::Command;

use crate::dist::stand_ins;
use crate::{Folder, package, run, said, workspace};

/// The pages have no date: a release has one, and packages must not differ from day to day.
const NO_DATE: &str = "WARNING: missing date, using \"\": TH";

#[test]
fn mandoc_finds_no_mistake_in_a_page() {
    let mut count = 0;
    for entry in fs::read_dir(workspace().join("packaging/man")).expect("pages").flatten() {
        // One that consists of a reference to another, which is found by its path below /usr/share/man.
        if fs::read_to_string(entry.path()).expect("a page").starts_with(".so man8/coracle-pod.8") {
            continue;
        }
        let lint = run(Command::new("mandoc").args(["-T", "lint", "-W", "warning"]).arg(entry.path()));
        let text = said(&lint);
        let found: Vec<_> = text.lines().filter(|line| !line.contains(NO_DATE)).collect();
        assert!(found.is_empty(), "{found:#?}");
        count += 1;
    }
    assert!(count > 30, "{count} pages");
    // A page with a mistake is noticed.
    let folder = Folder::new("man");
    let bad = folder.write("bad.1", ".TH BAD 1 2026-01-01\n.SH NAME\nbad \\- x\n.NOSUCHMACRO\n");
    let lint = run(Command::new("mandoc").args(["-T", "lint", "-W", "warning"]).arg(bad));
    assert!(!lint.status.success(), "{}", said(&lint));
}

#[test]
fn each_page_is_in_each_package() {
    let folder = Folder::new("man-packages");
    let mut pages = Vec::new();
    for entry in fs::read_dir(workspace().join("packaging/man")).expect("pages").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let section = name.rsplit('.').next().expect("a section").to_owned();
        pages.push(format!("usr/share/man/man{section}/{name}.gz"));
    }
    for (format, list) in
        [("deb", "dpkg-deb --contents"), ("rpm", "rpm --query --list --package"), ("apk", "tar -tzf")]
    {
        let package = package(&folder, format, &stand_ins(&folder, "programs", 0o755));
        let script = format!("{list} {} 2>/dev/null", package.display());
        let listed = said(&run(Command::new("sh").args(["-c", &script]).env("HOME", folder.path())));
        for page in &pages {
            assert!(
                listed.lines().any(|line| line.ends_with(page.as_str())),
                "{format}: no {page}: {listed}"
            );
        }
    }
}
