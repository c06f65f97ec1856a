//! NRI: plugins made by hand and plugins of the public Go library, against a real daemon. Each rule of the specification
//! has a test named after it: S for pods, C for containers, R for robustness; rules about merging alone are unit tests of
//! `nri/`. `tests/house` checks that none is missing.

mod adjust;
mod attributes;
mod containers;
mod go;
mod hooks;
mod pods;
mod robust;
mod updates;

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use coracle_tests::cri::proto::{PodSandboxConfig, RunPodSandboxResponse};
use coracle_tests::node::{Node, Options};
use coracle_tests::nri::{Answer, Handler, Heard, api};
use coracle_tests::request;

/// A plugin's wish for one container's annotations.
fn annotations(pairs: &[(&str, &str)]) -> api::ContainerAdjustment {
    let annotations: BTreeMap<_, _> =
        pairs.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
    api::ContainerAdjustment { annotations: annotations.into_iter().collect(), ..Default::default() }
}

/// A node whose plugins have these settings.
fn node(settings: &str) -> Node {
    Node::with(Options { config: format!("[nri]\n{settings}\n"), ..Options::default() })
}

/// A plugin that changes nothing.
fn quiet() -> Handler {
    Box::new(|_, _| Answer::empty())
}

/// A plugin that answers one method in this way, and the others as usual.
fn answers(method: &'static str, mut answer: impl FnMut(&Heard) -> Answer + Send + 'static) -> Handler {
    Box::new(move |_, heard| if heard.method == method { answer(heard) } else { Answer::empty() })
}

/// A plugin that blocks in one method, notifies the test, and continues with the answer that the test sends.
fn standing(method: &'static str) -> (Handler, Receiver<Heard>, Sender<Answer>) {
    let (stands, standing) = channel();
    let (go_on, answer) = channel::<Answer>();
    let handler = answers(method, move |heard| {
        stands.send(heard.clone()).expect("the test waits");
        answer.recv_timeout(Duration::from_secs(20)).unwrap_or(Answer::Silence)
    });
    (handler, standing, go_on)
}

/// How long a test waits for a plugin to stand.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `act`, which calls the daemon, in another thread.
fn meanwhile<T: Send + 'static>(
    node: &Node,
    act: impl FnOnce(&coracle_tests::cri::Cri) -> T + Send + 'static,
) -> std::thread::JoinHandle<T> {
    let cri = node.another();
    std::thread::spawn(move || act(&cri))
}

/// RunPodSandbox in another thread.
fn running(
    node: &Node,
    pod: &PodSandboxConfig,
) -> std::thread::JoinHandle<Result<RunPodSandboxResponse, tonic::Status>> {
    let pod = pod.clone();
    meanwhile(node, move |cri| cri.run_pod_sandbox(request::run(&pod)))
}

/// The error of something that a plugin was to refuse.
#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, tonic::Status>) -> String {
    result.expect_err("a plugin refuses it").message().to_owned()
}
