//! Exec: returns the URL for a command's streams. The command starts when a client connects.
//!
//! Steps: this module validates IDs, streams and command → `streaming` stores the request with a token → reply.

use std::rc::Rc;

use coracle_base::error::Error;
use coracle_engine::streams::{Wanted, require_running};

use super::pod_config::invalid;
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn exec(daemon: Rc<Daemon>, request: v1::ExecRequest) -> Result<v1::ExecResponse, Error> {
    if request.cmd.is_empty() || request.cmd.iter().any(|word| word.contains('\0')) {
        return Err(invalid("cmd", "is empty or holds a NUL"));
    }
    let wanted = wanted(request.stdin, request.stdout, request.stderr, request.tty)?;
    let container = daemon.pods.container(&request.container_id)?;
    require_running(&container)?;
    let request = coracle_streaming::Request::Exec { container, command: request.cmd, wanted };
    Ok(v1::ExecResponse { url: daemon.streams.url(request)? })
}

/// Validates the streams of an Exec or Attach request (streaming 6.2).
pub(super) fn wanted(stdin: bool, stdout: bool, stderr: bool, tty: bool) -> Result<Wanted, Error> {
    if tty && stderr {
        return Err(invalid("stderr", "a terminal has one output: tty and stderr exclude each other"));
    }
    if !(stdin || stdout || stderr) {
        return Err(invalid("stdin, stdout, stderr", "one of them must be set"));
    }
    Ok(Wanted { stdin, stdout, stderr, tty })
}
