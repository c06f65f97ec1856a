//! Answers about pods, containers and the daemon itself. All answers except the metrics are computed from memory.

use std::rc::Rc;

use coracle_base::error::Error;
use coracle_base::reactor::Slice;
use coracle_base::waits;
use coracle_control::{Answer, Container, Layer, Memory, Pod, Stats, Swap};
use coracle_engine::state;
use coracle_sandbox::collect::{self, ordered};

use crate::cri;
use crate::daemon::Daemon;
use crate::metrics;

/// All pod sandboxes, oldest first.
pub(super) async fn pods(daemon: &Daemon) -> Vec<Answer> {
    let mut pods = daemon.pods.every_pod();
    collect::sort_by_key(&mut pods, |pod| pod.record().created_at_ns);
    each(pods, |pod| {
        let record = pod.record();
        let spec = &record.spec;
        Some(Answer::Pod(Pod {
            id: pod.id.to_string(),
            name: spec.name.name.clone(),
            namespace: spec.name.namespace.clone(),
            uid: spec.name.uid.clone(),
            attempt: spec.name.attempt,
            state: record.state.name().to_owned(),
            created_at_ns: record.created_at_ns,
            runtime_handler: spec.runtime_handler.clone(),
            addresses: record.addresses.clone(),
            labels: ordered(spec.labels.iter().cloned()),
            annotations: ordered(spec.annotations.iter().cloned()),
        }))
    })
    .await
}

/// The answers about objects; others use the thread in between.
async fn each<T>(objects: Vec<T>, answer: impl Fn(&T) -> Option<Answer>) -> Vec<Answer> {
    let mut answers = Vec::with_capacity(objects.len());
    let mut slice = Slice::new();
    for object in objects {
        answers.extend(answer(&object));
        slice.share().await;
    }
    answers
}

/// All listed containers, oldest first.
pub(super) async fn containers(daemon: &Daemon) -> Vec<Answer> {
    let mut containers = daemon.pods.containers();
    containers.reverse();
    each(containers, |container| {
        let (record, pod) = (container.record(), container.pod.record());
        let state = match &record.state {
            state::Container::Creating => "being created",
            state::Container::Created { .. } => "created",
            state::Container::Running { .. } => "running",
            state::Container::Exited { .. } | state::Container::Gone => "exited",
        };
        let ended = record.state.ended();
        let image = match record.spec.user_specified_image.as_str() {
            "" => record.spec.image.clone(),
            name => name.to_owned(),
        };
        Some(Answer::Container(Container {
            id: container.id.to_string(),
            pod_id: container.pod.id.to_string(),
            pod_name: pod.spec.name.name.clone(),
            namespace: pod.spec.name.namespace.clone(),
            name: record.spec.name.name.clone(),
            attempt: record.spec.name.attempt,
            image,
            user_specified_image: record.spec.user_specified_image.clone(),
            image_name: record.image.name.clone(),
            image_ref: record.image.reference.clone(),
            image_id: record.image.id.clone(),
            state: state.to_owned(),
            created_at_ns: record.created_at_ns,
            started_at_ns: record.state.started_at_ns(),
            finished_at_ns: ended.map_or(0, |ended| ended.finished_at_ns),
            exit_code: ended.map_or(0, state::Ended::exit_code),
            reason: ended.map_or("", state::Ended::reason).to_owned(),
            message: ended.map_or("", state::Ended::message).to_owned(),
            pid: container.pid(),
            log_path: record.log_path.clone(),
            labels: ordered(record.spec.labels.iter().cloned()),
            annotations: ordered(record.spec.annotations.iter().cloned()),
        }))
    })
    .await
}

/// The resource usage of all running containers. A container that exits during the call is omitted.
pub(super) async fn stats(daemon: &Daemon) -> Vec<Answer> {
    each(daemon.stats.containers(), |container| {
        let reading = daemon.stats.container(container)?;
        let (record, pod) = (container.record(), container.pod.record());
        let layer = daemon.stats.layer(container);
        Some(Answer::Stats(Stats {
            id: container.id.to_string(),
            name: record.spec.name.name.clone(),
            attempt: record.spec.name.attempt,
            pod_id: container.pod.id.to_string(),
            pod_name: pod.spec.name.name.clone(),
            namespace: pod.spec.name.namespace.clone(),
            labels: ordered(record.spec.labels.iter().cloned()),
            annotations: ordered(record.spec.annotations.iter().cloned()),
            at_ns: reading.at_ns,
            cpu_ns: reading.usage.cpu_ns,
            nanocores: reading.nanocores,
            memory: reading.usage.memory.map(|memory| Memory {
                working_set_bytes: memory.working_set_bytes,
                available_bytes: memory
                    .limit_bytes
                    .map(|limit| limit.saturating_sub(memory.working_set_bytes)),
                usage_bytes: memory.usage_bytes,
                rss_bytes: memory.rss_bytes,
                page_faults: memory.page_faults,
                major_page_faults: memory.major_page_faults,
            }),
            layer: layer.map(|layer| Layer {
                at_ns: layer.at_ns,
                directory: layer.directory,
                used_bytes: layer.usage.bytes,
                inodes: layer.usage.inodes,
            }),
            swap: reading.usage.swap.map(|swap| Swap {
                available_bytes: swap.limit_bytes.map(|limit| limit.saturating_sub(swap.usage_bytes)),
                usage_bytes: swap.usage_bytes,
            }),
        }))
    })
    .await
}

/// The waits of operations in progress, oldest first.
pub(super) fn waits() -> Vec<Answer> {
    let waits = waits::list().into_iter().map(|wait| Answer::Wait {
        pod: wait.pod,
        name: wait.name,
        what: wait.what,
        since_s: wait.since.as_secs(),
    });
    waits.collect()
}

/// The conditions of the RPC Status, which the kubelet receives.
///
/// # Errors
/// Those of Status.
pub(super) async fn conditions(daemon: &Rc<Daemon>) -> Result<Vec<Answer>, Error> {
    let conditions = cri::status::conditions(daemon).await?;
    let answers = conditions.into_iter().map(|(kind, is_true, reason, message)| Answer::Condition {
        kind,
        is_true,
        reason,
        message,
    });
    Ok(answers.collect())
}

/// All metrics in Prometheus' text format.
pub(super) async fn metrics(daemon: &Rc<Daemon>) -> Answer {
    Answer::Metrics { text: metrics::render(daemon).await }
}
