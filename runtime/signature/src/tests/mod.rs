//! Signatures are made by the `openssl` program, an implementation that has nothing in common with the code under test.

mod forgeries;
mod formats;
mod make;
mod policies;
