//! ImageStatus (CRI 2.29): the image with a name or ID, if it exists. Answered from memory, except for the verbose info.

use std::collections::HashMap;
use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_images::{ImageId, Images};

use crate::daemon::Daemon;
use crate::rpc::v1;

use super::list_images::image;

/// Handles ImageStatus. For a missing image the answer contains no image.
pub(crate) async fn image_status(
    daemon: Rc<Daemon>,
    request: v1::ImageStatusRequest,
) -> Result<v1::ImageStatusResponse, Error> {
    let name = image_name(request.image)?;
    let Some(view) = daemon.images.find(&name)? else { return Ok(v1::ImageStatusResponse::default()) };
    let info = if request.verbose { info(&daemon.images, &view.id)? } else { HashMap::new() };
    Ok(v1::ImageStatusResponse { image: Some(image(view)), info })
}

/// The name in a request's ImageSpec, which is required.
pub(super) fn image_name(spec: Option<v1::ImageSpec>) -> Result<String, Error> {
    let name = spec.map_or_else(String::new, |spec| spec.image);
    if name.is_empty() { Err(Error::new(Kind::InvalidArgument, "image.image: is empty")) } else { Ok(name) }
}

/// The verbose info that `crictl inspecti` prints. The config document is validated as JSON and returned unchanged.
fn info(images: &Images, id: &ImageId) -> Result<HashMap<String, String>, Error> {
    let (config, chain_id) = images.config(id)?;
    serde_json::from_str::<serde::de::IgnoredAny>(&config)
        .map_err(|error| Error::new(Kind::Internal, format!("config of image {id}: {error}")))?;
    let chain_id = serde_json::Value::from(chain_id);
    Ok(HashMap::from([("info".to_owned(), format!(r#"{{"chainID":{chain_id},"imageSpec":{config}}}"#))]))
}

#[cfg(test)]
mod tests {
    use super::{image_name, info};
    use crate::rpc::v1;
    use coracle_base::error::Kind;
    use coracle_base::reactor;
    use coracle_base::testdir::TestDir;
    use coracle_base::workers::Workers;
    use coracle_images::{Images, Options};
    use coracle_job::{Limits, Registries};

    #[test]
    fn verbose_info_is_json_with_the_config_in_it() {
        let dir = TestDir::new("status");
        reactor::run(async {
            let workers = Workers::new("/nowhere".into());
            let root = dir.path().join("root");
            let options = Options {
                root,
                additional_stores: Vec::new(),
                keep_blobs: true,
                partial_pulls: true,
                limits: Limits::default(),
                registries: Registries::default(),
            };
            let images = Images::open(options, workers).unwrap();
            let info = info(&images, &images.list()[0].id).unwrap();
            let json: serde_json::Value = serde_json::from_str(&info["info"]).unwrap();
            assert_eq!(json["chainID"], "");
            assert_eq!(json["imageSpec"]["os"], "linux");
        });
    }

    #[test]
    fn a_request_must_name_an_image() {
        for spec in [None, Some(v1::ImageSpec::default())] {
            assert_eq!(image_name(spec).unwrap_err().kind(), Kind::InvalidArgument);
        }
    }
}
