//! The request of `coracle image take-over`: imports the images of a containerd one after the other, with an answer
//! for each.

use std::path::Path;
use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_control::Answer;
use coracle_images::Images;
use coracle_job::ContainerdImage;
use smol::channel::Sender;

use super::answers::{failed, image, queue};

/// Imports all images of a namespace that are not known yet; `is_dry`: only says which. An image that cannot be
/// imported costs one answer; a full disk ends the request.
pub(super) async fn run(
    store: &Path,
    namespace: &str,
    is_dry: bool,
    images: &Rc<Images>,
    answers: &Sender<Answer>,
) {
    let listed = match store.is_absolute() {
        true => images.list_containerd(store, namespace).await,
        false => Err(Error::new(Kind::InvalidArgument, format!("{}: not an absolute path", store.display()))),
    };
    let listed = match listed {
        Ok(listed) => listed,
        Err(error) => return queue(answers, failed(&error.context("take over images"))).await,
    };
    for (index, one) in listed.iter().enumerate() {
        match take(store, one, is_dry, images).await {
            Ok(answer) => queue(answers, answer).await,
            Err(error) => {
                log::warn!("image of containerd not imported"; error = error);
                let is_full = error.kind() == Kind::ResourceExhausted;
                queue(answers, failed(&error)).await;
                let rest = listed.len() - index - 1;
                if is_full && rest > 0 {
                    let message = format!("take over images: {rest} more images were not tried");
                    return queue(answers, Answer::Failed { message }).await;
                }
            }
        }
    }
}

async fn take(
    store: &Path,
    one: &ContainerdImage,
    is_dry: bool,
    images: &Rc<Images>,
) -> Result<Answer, Error> {
    let named = |error: Error| error.context(format!("image {}", name(one)));
    let found = one.found.as_ref().map_err(|why| named(Error::new(Kind::NotFound, why.as_str())))?;
    let known = images.known(one).is_some();
    match known || is_dry {
        true => Ok(Answer::Found {
            id: found.id.clone(),
            names: one.names.clone(),
            size_bytes: found.size_bytes,
            known,
        }),
        false => images.import_from_containerd(store, one).await.map(image).map_err(named),
    }
}

/// The name of an image for messages: a tag if it has one.
fn name(one: &ContainerdImage) -> &str {
    let tag = one.names.iter().find(|name| !name.contains('@') && !name.starts_with("sha256:"));
    tag.or(one.names.first()).map_or(&one.digest, String::as_str)
}
