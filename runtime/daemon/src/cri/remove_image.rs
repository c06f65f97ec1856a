//! RemoveImage (CRI 2.31): the whole image with all its names; one that is not there is success. Its disk is freed by
//! a worker afterwards.

use std::rc::Rc;

use coracle_base::error::Error;

use crate::daemon::Daemon;
use crate::rpc::v1;

use super::image_status::image_name;

/// Answers RemoveImage.
pub(crate) async fn remove_image(
    daemon: Rc<Daemon>,
    request: v1::RemoveImageRequest,
) -> Result<v1::RemoveImageResponse, Error> {
    daemon.images.remove(&image_name(request.image)?)?;
    Ok(v1::RemoveImageResponse {})
}
