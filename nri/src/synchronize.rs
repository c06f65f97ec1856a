//! Divides all existing pods and containers into Synchronize messages of limited size (NRI 1.7).

use prost::Message;

use crate::api;
use crate::io::Snapshot;

/// Size in bytes up to which one message is filled.
const CHUNK_BYTES: usize = 1 << 20;

/// Maximum size of an object in bytes, which leaves space for the envelope.
const OBJECT_BYTES_MAX: usize = crate::message::DATA_BYTES_MAX - 4096;

/// Divides a snapshot into messages: pods before containers, `more` set in all messages except the last. There is at
/// least one message.
///
/// # Errors
/// The name of an object that is too large for a message.
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
    fn an_empty_node_is_sent_as_one_message() {
        assert_eq!(chunks(Snapshot::default()).unwrap(), [api::SynchronizeRequest::default()]);
    }

    /// Tests rule NRI-R20 with 500 pods and 5000 containers that have 2 kB of annotations each.
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
