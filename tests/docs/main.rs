//! Every shell line of the pages for users is run by a test: on a node of its own here, or in a guest with systemd
//! (`tests/inside/systemd/pages.rs`). `rules.toml` says how; a line without a rule is a failure, and so is a rule
//! without a line. Runs as root.
#![forbid(unsafe_code)]

mod extract;
mod groups;
mod images;
mod line_runner;
mod pages;
mod walk;
