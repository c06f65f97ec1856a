//! Why this exists.
fn main() {}
