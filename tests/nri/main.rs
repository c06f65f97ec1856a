//! NRI: plugins made by hand and plugins of the public Go library, against a real daemon. Each rule of the specification
//! has a test named after it: S for pods, C for containers, R for robustness; rules about merging alone are unit tests of
//! `nri/`. `tests/house` checks that none is missing.

mod pods;
