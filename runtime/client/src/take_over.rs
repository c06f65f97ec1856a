//! The words of `coracle image take-over`, which imports the images of the containerd that the node used before.

use std::path::{Path, PathBuf};

use coracle_control::Request;

use crate::Typed;
use crate::image::absolute;

/// Root directories of containerd: its own default, and that of the one inside k3s.
const STORES: [&str; 2] = ["/var/lib/containerd", "/var/lib/rancher/k3s/agent/containerd"];
/// The metadata below a root directory.
const METADATA: &str = "io.containerd.metadata.v1.bolt/meta.db";
/// Namespace of the images of a kubelet's containerd.
const NAMESPACE: &str = "k8s.io";

/// The request for a command line.
///
/// # Errors
/// One line about the words: an option is missing or invalid.
pub(crate) fn request(command: &Typed) -> Result<Request, String> {
    let store = match command.value("--from") {
        Some("") => return Err("image take-over: --from is empty".to_owned()),
        // The daemon has another working directory.
        Some(store) => absolute("image take-over", store)?,
        None => only(STORES.map(Path::new).into_iter().filter(|store| store.join(METADATA).exists()))?,
    };
    Ok(Request::TakeOver {
        store,
        namespace: command.value("--namespace").unwrap_or(NAMESPACE).to_owned(),
        dry_run: command.flags.contains(&"--dry-run"),
    })
}

fn only<'a>(mut found: impl Iterator<Item = &'a Path>) -> Result<PathBuf, String> {
    match (found.next(), found.next()) {
        (Some(store), None) => Ok(store.to_owned()),
        (None, _) => {
            let stores = STORES.join(" nor ");
            Err(format!(
                "image take-over: neither {stores} is the root directory of a containerd: name it with --from"
            ))
        }
        (Some(one), Some(other)) => {
            let (one, other) = (one.display(), other.display());
            Err(format!("image take-over: there are {one} and {other}: choose one with --from"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_store_is_found_or_must_be_named() {
        let error = only([].into_iter()).unwrap_err();
        assert!(error.contains("neither /var/lib/containerd nor /var/lib/rancher"), "{error}");
        assert_eq!(only([Path::new("/a")].into_iter()), Ok("/a".into()));
        let error = only([Path::new("/a"), Path::new("/b")].into_iter()).unwrap_err();
        assert!(error.contains("/a and /b: choose one"), "{error}");
    }

    #[test]
    fn arguments_become_a_request() {
        let values = vec![("--from", "/x".to_owned()), ("--namespace", "moby".to_owned())];
        let command = Typed { name: "take-over", values, flags: vec!["--dry-run"], ..Typed::default() };
        let expected = Request::TakeOver { store: "/x".into(), namespace: "moby".into(), dry_run: true };
        assert_eq!(request(&command), Ok(expected));
        let command = Typed { values: vec![("--from", "x".to_owned())], ..Typed::default() };
        let Ok(Request::TakeOver { store, namespace, dry_run }) = request(&command) else {
            panic!("a request")
        };
        assert!(store.is_absolute() && namespace == "k8s.io" && !dry_run);
        assert!(request(&Typed { values: vec![("--from", String::new())], ..Typed::default() }).is_err());
    }
}
