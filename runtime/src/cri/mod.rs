//! One file per RPC.

pub(crate) mod image_fs_info;
pub(crate) mod image_status;
pub(crate) mod list_images;
pub(crate) mod pull_image;
pub(crate) mod remove_image;
pub(crate) mod version;
