//! Draws the plots of docs/performance.md from what a benchmark has measured, into `target/bench`. Rows that were not measured
//! in this checkout are those of the page. With `UPDATE=1` the test `house pictures` draws the page's own plots.

use std::fs;
use std::path::{Path, PathBuf};

use coracle_tests::pictures::{parts, plots};

use crate::guest;

/// The table of a benchmark.
#[derive(Clone, Copy)]
pub(crate) enum Source {
    /// `make bench`.
    Own,
    /// `make bench-peers`.
    Peers,
}

impl Source {
    /// The file with the rows of the last run.
    fn file(self) -> PathBuf {
        folder().join(match self {
            Source::Own => "bench.md",
            Source::Peers => "peers.md",
        })
    }

    /// The rows of the last runs; empty if there was none.
    fn rows(self) -> String {
        fs::read_to_string(self.file()).unwrap_or_default()
    }
}

/// Prints a row of a table, and keeps it for the plots; it replaces the row of an earlier run.
pub(crate) fn print(source: Source, row: &str) {
    println!("{row}");
    if guest::is_one() {
        return;
    }
    let name = |row: &str| row.split('|').nth(1).unwrap_or_default().trim().to_owned();
    let before = source.rows();
    let kept = before.lines().filter(|kept| name(kept) != name(row));
    let rows: String = kept.chain([row]).map(|row| format!("{row}\n")).collect();
    fs::create_dir_all(folder()).expect("a folder for the plots");
    fs::write(source.file(), rows).expect("the rows");
}

/// Draws the plots of the rows of the last runs, completed by those of the page.
pub(crate) fn draw() {
    if guest::is_one() {
        return;
    }
    let page = fs::read_to_string(workspace().join("docs/performance.md")).expect("the page");
    let (own, compared) = parts(&page);
    let drawn = plots(&(Source::Own.rows() + own), &(Source::Peers.rows() + compared));
    for (name, plot) in drawn {
        let path = folder().join(name);
        fs::write(&path, plot).expect("a plot");
        eprintln!("drawn: {}", path.display());
    }
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace")
}

fn folder() -> PathBuf {
    workspace().join("target/bench")
}
