//! A node of its own for each test, its client, and images made in memory: what `make demo` uses of the tests' common parts.
//! `coracle_tests` has the others, and names these as its own. A crate of its own, because `make demo` is to answer soon on a
//! machine where nothing is built yet: what other tests need, as zstd's library in C, is no dependency of it.
#![forbid(unsafe_code)]

mod config;
pub mod cri;
pub mod host;
pub mod image;
pub mod layer;
pub mod node;
pub mod request;
