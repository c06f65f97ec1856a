//! PullImage (CRI 2.30). The pull is a task of the image service: if a caller disconnects, the pull continues for other
//! callers.

use std::rc::Rc;

use coracle_base::error::Error;
use coracle_images::Auth;
use coracle_job::AuthFields;

use crate::daemon::Daemon;
use crate::rpc::v1;

use super::image_status::image_name;

/// Handles PullImage; returns the image's ID. The pod configuration in the request has no effect.
pub(crate) async fn pull_image(
    daemon: Rc<Daemon>,
    request: v1::PullImageRequest,
) -> Result<v1::PullImageResponse, Error> {
    let name = image_name(request.image)?;
    let auth = request.auth.map_or_else(Auth::default, |auth| Auth {
        server_address: auth.server_address,
        fields: AuthFields {
            username: auth.username,
            password: auth.password,
            auth: auth.auth,
            identity_token: auth.identity_token,
            registry_token: auth.registry_token,
        },
    });
    let id = match daemon.images.arrived_at_start(&name).await {
        Some(id) => id,
        None => daemon.images.pull(&name, auth).await?,
    };
    Ok(v1::PullImageResponse { image_ref: id.to_string() })
}
