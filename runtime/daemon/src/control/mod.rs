//! The control socket, `--state/control.sock`: what `coracle image …` says to the running daemon beside the CRI. Only root
//! may connect; client and daemon come from the same file, so the words may change with a release.
//!
//! ```text
//!   client: one Request, one line of JSON ──>
//!                                         <── daemon: Answers, one line of JSON each; the last is `end`
//! ```
//!
//! An operation that was begun is finished when its client goes away: an import is not undone by a closed terminal.

pub(crate) mod client;
mod server;

pub(crate) use server::Server;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Longest line either way: thousands of paths, or an image with every name it may have.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Where the socket is.
pub(crate) fn socket(state: &Path) -> PathBuf {
    state.join("control.sock")
}

/// What a client wants.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Request {
    /// Import these archives, absolute paths, in order.
    Import { files: Vec<PathBuf> },
    /// All images.
    List {},
    /// The pulls under way.
    Pulling {},
    /// Where these would be asked for.
    Explain { names: Vec<String> },
    /// Remove the images of these names or ids; those that are pinned only by force.
    Remove {
        names: Vec<String>,
        #[serde(default)]
        force: bool,
    },
    /// Pin these, until they are unpinned.
    Pin { names: Vec<String> },
    /// Take pins by hand back.
    Unpin { names: Vec<String> },
    /// Write the images of these names or ids into this file, an absolute path.
    Export { names: Vec<String>, file: PathBuf },
    /// Look at every part of every image, and mend or drop what is broken.
    Check {
        #[serde(default)]
        repair: bool,
    },
}

/// What it gets.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// An image, listed or imported.
    Image { id: String, tags: Vec<String>, digests: Vec<String>, size_bytes: u64, pinned: bool },
    /// A pull under way: bytes, layers, bytes a second, and how long it may still take.
    Pulling {
        name: String,
        bytes_done: u64,
        bytes_total: u64,
        layers_done: u32,
        layers_total: u32,
        rate: u64,
        left_s: Option<u64>,
        since_s: u64,
    },
    /// The endpoints of this name, in normal form, follow.
    Explained { name: String },
    /// One of them; no secret is in it.
    Endpoint { url: String, source: String, credentials: String, tls: String, proxy: String },
    /// No image of this name is there any more.
    Removed { name: String },
    /// The image of this name is pinned by hand now.
    Pinned { name: String },
    /// It is not any more.
    Unpinned { name: String },
    /// The archive is there.
    Exported { file: PathBuf },
    /// This image is whole, after these parts of it were mended.
    Whole { name: String, mended: Vec<String> },
    /// One part of the request did not work; the others are tried.
    Failed { message: String },
    /// That was all.
    End {},
}

#[cfg(test)]
mod tests {
    use super::{Answer, Request};

    #[test]
    fn words_read_as_they_are_written() {
        for (text, expected) in [
            (r#"{"import":{"files":["/a.tar"]}}"#, Request::Import { files: vec!["/a.tar".into()] }),
            (r#"{"list":{}}"#, Request::List {}),
            (r#"{"pulling":{}}"#, Request::Pulling {}),
            (r#"{"explain":{"names":["app"]}}"#, Request::Explain { names: vec!["app".into()] }),
            (
                r#"{"remove":{"names":["app"],"force":true}}"#,
                Request::Remove { names: vec!["app".into()], force: true },
            ),
            (r#"{"pin":{"names":["app"]}}"#, Request::Pin { names: vec!["app".into()] }),
            (r#"{"unpin":{"names":["app"]}}"#, Request::Unpin { names: vec!["app".into()] }),
        ] {
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), expected);
            assert_eq!(serde_json::to_string(&expected).unwrap(), text);
        }
        assert_eq!(serde_json::to_string(&Answer::End {}).unwrap(), r#"{"end":{}}"#);
        for text in ["", "{}", "[]", r#"{"exports":{}}"#, r#"{"list":{"x":1}}"#, &"[".repeat(100_000)] {
            assert!(serde_json::from_str::<Request>(text).is_err());
        }
    }
}
