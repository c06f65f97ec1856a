//! RemoveImage (CRI 2.31): removes the image with all its names; a missing one is not an error. A worker
//! frees the disk space afterwards.

use std::rc::Rc;

use coracle_base::error::Error;

use crate::daemon::Daemon;
use crate::rpc::v1;

use super::image_status::image_name;

/// Handles RemoveImage.
pub(crate) async fn remove_image(
    daemon: Rc<Daemon>,
    request: v1::RemoveImageRequest,
) -> Result<v1::RemoveImageResponse, Error> {
    daemon.images.remove(&image_name(request.image)?)?;
    Ok(v1::RemoveImageResponse {})
}
