//! Images.
mod builtin;
mod index;
mod pins;
mod reference;
pub(crate) use index::ImageId;
