//! Images from the user's point of view: pulled from a real registry, imported from archives, listed,
//! removed; and malicious images and registries. Each test also ends without a running worker (`Node::stop`).
#![forbid(unsafe_code)]

mod additional;
mod answers;
mod bundles;
mod chunk_lengths;
mod commands;
mod convert;
mod credentials;
mod false_neighbours;
mod faults;
mod fetcher;
mod formats;
mod hostile;
mod import;
#[cfg(target_arch = "x86_64")]
mod injected;
mod jail;
mod layer_checks;
mod layers;
mod mirror;
mod neighbours;
mod outlines;
mod partial;
mod partial_attacks;
mod pins;
mod proxies;
mod pull;
mod registries;
mod serving;
mod signatures;
mod signers;
mod site_network;
mod stargz;
mod store;
mod take_over;
mod unpacking;
mod verifiers;

use coracle_tests::cri::proto::{Image, ImageStatusRequest, ListImagesRequest};
use coracle_tests::node::Node;
use coracle_tests::request::image_spec;

/// The images of ListImages, without the built-in sandbox image.
pub(crate) fn listed(node: &Node) -> Vec<Image> {
    let mut images = node.list_images(ListImagesRequest::default()).expect("list").images;
    images.retain(|image| !image.pinned);
    images
}

/// ImageStatus of any name.
pub(crate) fn find(node: &Node, name: &str) -> Option<Image> {
    let request = ImageStatusRequest { image: Some(image_spec(name)), verbose: false };
    node.image_status(request).expect("status").image
}
