//! Unpacks a layer's archive into a directory in the format of overlayfs (OCI image specification 1.1, "Image
//! Layer Filesystem Changeset").
//!
//! ```text
//! blob ─► confined: decompress ─► hash, count ─► confined: tar entries ─► layers/tmp-… ─► the hash is the
//! diff ID ─► layers/NAME
//! ```
//! The entries are those that Go's archive/tar finds ([`coracle_tar`]), and their effect is that of containerd 2.4
//! (pkg/archive):
//!
//! | entry | result |
//! |---|---|
//! | `.wh.NAME` | character device 0:0 named NAME; not created if this layer has its own NAME, which already hides the lower layers, or is the lowest |
//! | `.wh..wh..opq` | `trusted.overlay.opaque=y` on its directory |
//! | file, directory, link, device, FIFO | the same; a later entry replaces an earlier one, but a directory keeps its entries |
//! | hard link | the same; its attributes replace those of its target |
//! | the root directory | ignored, with its attributes |
//! | extended attribute | set, except `trusted.*`; `user.*` only on files and directories |
//! | GNU sparse file, contiguous file (refused by containerd) | file; the former with its holes |
//! | GNU directory with a list, GNU label (refused by containerd) | directory; ignored |
//! | another type | refused |
//!
//! `..` in a name is removed before links are resolved, and does not leave the layer.
//!
//! The archive is untrusted. It is decompressed by a process without access to any file, and parsed by
//! another one that can access only the new directory ([`crate::jail`]); the worker between them computes the
//! digest. Names and links are resolved within the layer, the number of unpacked
//! bytes, holes, entries and bytes of metadata is limited, and the layer is published only after the whole
//! archive has been verified.

#[cfg(test)]
mod archive_tests;
mod aside;
mod layer;
mod outline;
mod parents;
#[cfg(test)]
mod tests;
mod tree;

use std::fs::File;
use std::path::Path;

use coracle_chunked::outline::Purpose;
use coracle_job::{Failure, Layer, Limits};

use crate::failure::io_failure;
use crate::jail::confined;
use layer::at;
use tree::Tree;

pub(crate) use aside::{Aside, VerifiedLayer};
pub(crate) use layer::TOO_LONG;
pub(crate) use layer::{Unpacked, broken, unpack_to};

/// Unpacks `blob`, a file or a pipe, into an empty directory and verifies that it is `layer`. The attributes of directories
/// without an entry of their own must be copied from lower layers ([`parents::copy_attributes`]). `outline` gets the outline of
/// the archive.
pub(crate) fn unpack_verified(
    directory: &Path,
    blob: File,
    layer: &Layer,
    limits: &Limits,
    outline: Option<(&File, Purpose)>,
    pulse: &mut (dyn FnMut(u64) + Send),
) -> Result<Unpacked, Failure> {
    let (unpacked, digest) = confined::unpack(directory, blob, limits, layer.is_lowest(), outline, pulse)?;
    if digest != layer.diff_id {
        let text =
            format!("its content has digest {digest}, but the image config requires {}", layer.diff_id);
        return Err(Failure::invalid(text));
    }
    let tree = Tree::new(directory).map_err(|errno| io_failure("open", directory, &errno.into()))?;
    for path in &unpacked.opaque {
        tree.mark_opaque(path).map_err(|errno| at(&String::from_utf8_lossy(path), errno))?;
    }
    for attribute in &unpacked.security {
        let shown = String::from_utf8_lossy(&attribute.path);
        tree.set_security(attribute).map_err(|errno| at(&shown, errno))?;
    }
    Ok(unpacked)
}
