//! The running daemon's answers about its pods and containers, and about the waits of operations.

use std::path::Path;
use std::time::Duration;

use coracle_base::error::describe_io;
use coracle_control::{Answer, Container, Pod, Request};

use crate::ask::ask_within;

/// Time limit for the daemon's answers, which it computes from memory.
const DAEMON_PATIENCE: Duration = Duration::from_secs(2);

/// The answers of the running daemon.
#[derive(Debug, Default)]
pub(crate) struct Live {
    /// The reason why there is no answer; empty if there is one.
    pub(crate) silence: String,
    pub(crate) pods: Vec<Pod>,
    pub(crate) containers: Vec<Container>,
    pub(crate) waits: Vec<Wait>,
}

/// The wait of an operation.
#[derive(Debug)]
pub(crate) struct Wait {
    /// ID of the pod; empty if the wait is not for a pod.
    pub(crate) pod: String,
    pub(crate) what: String,
    pub(crate) since_s: u64,
}

impl Live {
    /// Requests the data from the daemon with this state directory.
    pub(crate) fn ask(state: &Path) -> Live {
        let mut live = Live::default();
        for request in [Request::Pods {}, Request::Containers {}, Request::Waits {}] {
            match ask_within(state, &request, DAEMON_PATIENCE) {
                Ok(answers) => answers.into_iter().for_each(|answer| live.take(answer)),
                Err(error) => {
                    live.silence = describe_io(&error);
                    break;
                }
            }
        }
        live
    }

    fn take(&mut self, answer: Answer) {
        match answer {
            Answer::Pod(pod) => self.pods.push(pod),
            Answer::Container(container) => self.containers.push(container),
            Answer::Wait { pod, name: _, what, since_s } => self.waits.push(Wait { pod, what, since_s }),
            _ => {}
        }
    }
}
