//! ExecSync (CRI 2.20). A non-zero exit code is not an error; a timeout is DEADLINE_EXCEEDED after all
//! processes of the command were killed; a command that cannot be executed is an error with the cause. The
//! command is killed if its caller disconnects. The first 7 MiB of each stream are returned with OK, as other
//! runtimes return the first 16 MiB; an error while reading the output is an error of the call.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use coracle_base::error::Error;
use coracle_engine::exec::ExecOutput;
use coracle_engine::output::{Block, Output};
use prost::encoding::{self, WireType};
use send_wrapper::SendWrapper;
use tonic::Response;

use super::pod_config::{invalid, missing};
use crate::daemon::Daemon;
use crate::rpc::{Pieces, v1};

pub(crate) async fn exec_sync(
    daemon: Rc<Daemon>,
    request: v1::ExecSyncRequest,
) -> Result<Response<v1::ExecSyncResponse>, Error> {
    if request.cmd.is_empty() {
        return Err(missing("cmd"));
    }
    if request.cmd.iter().any(|word| word.contains('\0')) {
        return Err(invalid("cmd", "holds a NUL"));
    }
    // A timeout that is not positive is none, as in containerd.
    let timeout = u64::try_from(request.timeout).unwrap_or(0);
    let container = daemon.pods.container(&request.container_id)?;
    let output = container.exec_sync(request.cmd, Duration::from_secs(timeout)).await?;
    let ExecOutput { stdout, stderr, exit_code } = output;
    if stdout.is_small() && stderr.is_small() {
        let (stdout, stderr) = (stdout.into_bytes(), stderr.into_bytes());
        return Ok(Response::new(v1::ExecSyncResponse { stdout, stderr, exit_code }));
    }
    let mut response = Response::new(v1::ExecSyncResponse::default());
    response.extensions_mut().insert(Pieces::new(encode(stdout, stderr, exit_code)));
    Ok(response)
}

/// Tag of the field `stdout` in ExecSyncResponse; `stderr` and `exit_code` follow.
const STDOUT: u32 = 1;
const STDERR: u32 = 2;
const EXIT_CODE: u32 = 3;

/// Encodes the response without copying the blocks of the output.
fn encode(stdout: Output, stderr: Output, exit_code: i32) -> Vec<Bytes> {
    let mut pieces = Vec::new();
    for (tag, output) in [(STDOUT, stdout), (STDERR, stderr)] {
        if output.kept_bytes() == 0 {
            continue;
        }
        let mut head = Vec::new();
        encoding::encode_key(tag, WireType::LengthDelimited, &mut head);
        encoding::encode_varint(output.kept_bytes() as u64, &mut head);
        pieces.push(head.into());
        let blocks = output.into_blocks().into_iter();
        pieces.extend(blocks.map(|block| Bytes::from_owner(Owned(SendWrapper::new(block)))));
    }
    if exit_code != 0 {
        let mut last = Vec::new();
        encoding::int32::encode(EXIT_CODE, &exit_code, &mut last);
        pieces.push(last.into());
    }
    pieces
}

/// A block of output as the owner of [`Bytes`].
struct Owned(SendWrapper<Block>);

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        Block::as_ref(&self.0)
    }
}
