//! Programs of others: plugins of networks, OCI hooks, and verifiers of images. They are run by processes that end after them and never by the daemon,
//! with a time limit, limits of what they print, and the process attributes that the daemon was started with.
//!
//! | module | does |
//! |---|---|
//! | `hook` | executes an OCI hook |
//! | `program` | executes one program, in bounded time and memory |
//! | `verifiers` | asks all programs of a directory whether an image may be pulled |
#![forbid(unsafe_code)]

mod hook;
mod program;
mod verifiers;

pub use hook::run as run_hook;
pub use program::{Call, End, Ended, SUBCOMMAND, become_program, one_line, run};
pub use verifiers::{
    CHECK_SUBCOMMAND, Candidate, Descriptor, VERIFY_SUBCOMMAND, Verifiers, check, explain, verify,
};
