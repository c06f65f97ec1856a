//! ListImages and its stream (CRI 2.28): all images, or the one that the filter names. Answered from memory; a kubelet calls it
//! every 30 s.

use std::rc::Rc;

use coracle_base::error::Error;
use coracle_images::View;
use smol::stream::Stream;

use crate::daemon::Daemon;
use crate::rpc::v1;

/// Handles ListImages. A filter for an unknown image or an invalid name returns an empty list.
pub(crate) async fn list_images(
    daemon: Rc<Daemon>,
    request: v1::ListImagesRequest,
) -> Result<v1::ListImagesResponse, Error> {
    Ok(v1::ListImagesResponse { images: matching(&daemon, request.filter) })
}

/// Handles the streaming variant of ListImages, with messages of limited size.
pub(crate) async fn stream_images(
    daemon: Rc<Daemon>,
    request: v1::StreamImagesRequest,
) -> Result<impl Stream<Item = Result<v1::StreamImagesResponse, Error>>, Error> {
    Ok(super::chunks(matching(&daemon, request.filter), |images| v1::StreamImagesResponse { images }))
}

fn matching(daemon: &Daemon, filter: Option<v1::ImageFilter>) -> Vec<v1::Image> {
    let name = filter.and_then(|filter| filter.image).map_or_else(String::new, |image| image.image);
    let views = if name.is_empty() {
        daemon.images.list()
    } else {
        daemon.images.find(&name).ok().flatten().into_iter().collect()
    };
    views.into_iter().map(image).collect()
}

/// Converts an image for lists and statuses.
pub(super) fn image(view: View) -> v1::Image {
    let (uid, username) = user(&view.user);
    v1::Image {
        id: view.id.to_string(),
        repo_tags: view.tags,
        repo_digests: view.digests,
        size: view.size_bytes,
        uid: uid.map(|value| v1::Int64Value { value }),
        username,
        spec: Some(v1::ImageSpec { image: view.id.to_string(), ..v1::ImageSpec::default() }),
        pinned: view.pinned,
    }
}

/// Converts the field `User` of an image config (CRI 2.27) to a user ID or name. The kubelet uses it to check runAsNonRoot, so
/// names are not resolved, and the group is removed.
fn user(user: &str) -> (Option<i64>, String) {
    let name = user.split(':').next().unwrap_or_default();
    match name.parse() {
        Ok(uid) => (Some(uid), String::new()),
        Err(_) => (None, name.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::user;

    #[test]
    fn the_user_of_an_image_is_reported_as_critest_expects() {
        let cases = [
            ("", None, ""),
            ("1002", Some(1002), ""),
            ("www-data", None, "www-data"),
            ("1003:GROUP", Some(1003), ""),
            ("www-data:GROUP", None, "www-data"),
            ("0", Some(0), ""),
            // A number that is no ID, as containerd says it.
            ("-1", Some(-1), ""),
            ("+5:x", Some(5), ""),
            ("99999999999999999999", None, "99999999999999999999"),
            (":7", None, ""),
        ];
        for (text, uid, username) in cases {
            assert_eq!(user(text), (uid, username.to_owned()), "{text:?}");
        }
    }
}
