//! Divides all existing pods and containers into Synchronize messages of limited size (NRI 1.7).

use prost::Message;

use crate::api;
use crate::io::Snapshot;

/// Size to which one message is filled.
const CHUNK_BYTES: usize = 1 << 20;

/// Maximum size of an object, with space for the envelope.
const OBJECT_BYTES_MAX: usize = crate::message::DATA_BYTES_MAX - 4096;

/// The messages: pods before containers, `more` set in all but the last; there is always at least one.
///
/// # Errors
/// An object that is too large for a message, by name.
pub(crate) fn chunks(snapshot: Snapshot) -> Result<Vec<api::SynchronizeRequest>, String> {
    let mut chunks = Vec::new();
    let mut chunk = api::SynchronizeRequest::default();
    let mut bytes = 0;
    let mut room = |length: usize, chunk: &mut api::SynchronizeRequest, what: &str| {
        if length > OBJECT_BYTES_MAX {
            return Err(format!("{what} has {length} bytes, more than a message may have"));
        }
        // The key and the length before each object.
        let length = length + 8;
        if bytes > 0 && bytes + length > CHUNK_BYTES {
            chunks.push(api::SynchronizeRequest { more: true, ..std::mem::take(chunk) });
            bytes = 0;
        }
        bytes += length;
        Ok(())
    };
    for pod in snapshot.pods {
        room(pod.encoded_len(), &mut chunk, &format!("pod {}/{}", pod.namespace, pod.name))?;
        chunk.pods.push(pod);
    }
    for container in snapshot.containers {
        let what = format!("container {} of pod {:.13}", container.name, container.pod_sandbox_id);
        room(container.encoded_len(), &mut chunk, &what)?;
        chunk.containers.push(container);
    }
    chunks.push(chunk);
    Ok(chunks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(pods: usize, containers: usize, bytes: usize) -> Snapshot {
        let annotations = [("k".to_owned(), "x".repeat(bytes))];
        let pod = |n| api::PodSandbox {
            id: format!("p{n}"),
            annotations: annotations.clone().into(),
            ..api::PodSandbox::default()
        };
        let container = |n| api::Container {
            id: format!("c{n}"),
            annotations: annotations.clone().into(),
            ..api::Container::default()
        };
        Snapshot { pods: (0..pods).map(pod).collect(), containers: (0..containers).map(container).collect() }
    }

    #[test]
    fn nothing_is_one_message() {
        assert_eq!(chunks(Snapshot::default()).unwrap(), [api::SynchronizeRequest::default()]);
    }

    /// NRI-R20: 500 pods, 5000 containers, 2 kB of annotations each.
    #[test]
    fn synchronize_chunks_contain_all_objects_once_in_order() {
        let chunks = chunks(snapshot(500, 5000, 2000)).unwrap();
        assert!(chunks.len() > 5);
        assert!(chunks.iter().all(|chunk| chunk.encoded_len() <= CHUNK_BYTES + 100));
        let (last, others) = chunks.split_last().unwrap();
        assert!(!last.more && others.iter().all(|chunk| chunk.more));
        let pods: Vec<_> = chunks.iter().flat_map(|chunk| &chunk.pods).map(|pod| pod.id.clone()).collect();
        assert_eq!(pods, (0..500).map(|n| format!("p{n}")).collect::<Vec<_>>());
        assert_eq!(chunks.iter().map(|chunk| chunk.containers.len()).sum::<usize>(), 5000);
    }

    #[test]
    fn an_object_that_fits_in_no_message_is_named() {
        let error = chunks(snapshot(0, 1, 5 << 20)).unwrap_err();
        assert!(error.contains("container  of pod"), "{error}");
        assert!(chunks(snapshot(1, 1, 3 << 20)).unwrap().len() == 2);
    }
}
