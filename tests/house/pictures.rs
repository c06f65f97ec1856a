//! The pictures of the documentation are those of their sources: `UPDATE=1 cargo test -p coracle-tests --test house pictures`
//! draws them.

use std::collections::BTreeMap;
use std::fs;

use coracle_tests::pictures::{overview, parts, plots};

use crate::root;

fn drawn() -> BTreeMap<&'static str, String> {
    let read =
        |path: &str| fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let page = read("docs/performance.md");
    let (own, compared) = parts(&page);
    let mut drawn = plots(own, compared);
    drawn.insert("overview.svg", overview(&read("docs/pictures/overview.txt")));
    drawn
}

#[test]
fn pictures_are_those_of_their_sources() {
    for (name, picture) in drawn() {
        let path = root().join("docs/pictures").join(name);
        if std::env::var_os("UPDATE").is_some() {
            fs::write(&path, &picture).expect("the picture");
        }
        let committed = fs::read_to_string(&path).unwrap_or_default();
        assert!(committed == picture, "{}: draw it again with UPDATE=1", path.display());
    }
}

/// The plots of a benchmark show its own rows, and those of the page only where it measured none.
#[test]
fn a_measured_row_is_drawn_instead_of_that_of_the_page() {
    let page = fs::read_to_string(root().join("docs/performance.md")).expect("the page");
    let (own, compared) = parts(&page);
    let measured = "| daemon idle PSS, after 1000 requests | 2 MB | 77.7 MB | - |\n";
    let (before, after) = (plots(own, compared), plots(&format!("{measured}{own}"), compared));
    for name in ["memory.svg", "pods.svg"] {
        assert!(after[name] != before[name], "{name}");
    }
    assert!(after["memory.svg"].contains("77.7 MB"), "{}", after["memory.svg"]);
    assert_eq!(after["start.svg"], before["start.svg"]);
}
