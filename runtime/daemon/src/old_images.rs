//! Lists the images of the containerd that a node used before, for `coracle k3s enable --dry-run` and `coracle kubeadm enable
//! --dry-run`, which run without a daemon. A worker reads containerd's store, as for `coracle image take-over`.

use std::path::Path;
use std::process::{Command, Stdio};

use coracle_base::error::describe_io;
use coracle_base::workers::PROGRAM;
use coracle_job::{Answer, ContainerdImage, Job, ListContainerdJob, Outcome, read_message, write_message};
use coracle_setup::OldImage;

use crate::daemon::program;
use coracle_config::Config;

/// Namespace of the images of a kubelet's containerd.
const NAMESPACE: &str = "k8s.io";

/// Lists the images in the store of a containerd. Blocks until the worker ends, so the daemon must not call it.
///
/// # Errors
/// One line: the worker could not be started or read the store.
pub(crate) fn list(config: &Config, store: &Path) -> Result<Vec<OldImage>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("the worker: {error}");
    // The worker starts in the directory, which it may not be able to find by its path.
    let job = Job::ListContainerd(ListContainerdJob { store: ".".into(), namespace: NAMESPACE.to_owned() });
    let child = Command::new(program(config, PROGRAM))
        .current_dir(store)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = child.map_err(|error| failed(&describe_io(&error)))?;
    // Dropped at once: the job is followed by the end of the file.
    let written = child.stdin.take().map(|mut stdin| write_message(&mut stdin, &job));
    let answer = child.stdout.take().map(|mut stdout| {
        loop {
            match read_message::<Answer>(&mut stdout) {
                Ok(Some(Answer::Progress(_) | Answer::Waiting(_))) => {}
                Ok(Some(last)) => return Ok(last),
                Ok(None) => return Err("it ended without an answer".to_owned()),
                Err(error) => return Err(error.to_string()),
            }
        }
    });
    child.wait().map_err(|error| failed(&describe_io(&error)))?;
    match (answer, written) {
        (Some(Ok(Answer::Done(Outcome::ContainerdImages(images)))), _) => {
            Ok(images.into_iter().map(one).collect())
        }
        (Some(Ok(Answer::Failed(failure))), _) => Err(failure.message),
        (Some(Err(why)), Some(Ok(()))) => Err(failed(&why)),
        (_, Some(Err(error))) => Err(failed(&describe_io(&error.into()))),
        _ => Err(failed(&"unexpected answer")),
    }
}

fn one(image: ContainerdImage) -> OldImage {
    let tag = image.names.iter().find(|name| !name.contains('@') && !name.starts_with("sha256:"));
    let name = tag.or(image.names.first()).unwrap_or(&image.digest).clone();
    OldImage { name, size_bytes: image.found.map(|found| found.size_bytes) }
}
