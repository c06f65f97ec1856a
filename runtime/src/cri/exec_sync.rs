//! ExecSync (CRI section 2.20). A non-zero exit is not an error; a timeout is DEADLINE_EXCEEDED and the command's whole
//! tree is dead by then; a command that cannot be exec'ed is an error with the cause in its text. The command ends with
//! its caller.

use std::rc::Rc;
use std::time::Duration;

use super::pod_config::{invalid, missing};
use crate::daemon::Daemon;
use crate::error::Error;
use crate::rpc::v1;

pub(crate) async fn exec_sync(
    daemon: Rc<Daemon>,
    request: v1::ExecSyncRequest,
) -> Result<v1::ExecSyncResponse, Error> {
    if request.cmd.is_empty() {
        return Err(missing("cmd"));
    }
    if request.cmd.iter().any(|word| word.contains('\0')) {
        return Err(invalid("cmd", "holds a NUL"));
    }
    let timeout = u64::try_from(request.timeout).map_err(|_| invalid("timeout", "is negative"))?;
    let container = daemon.pods.container(&request.container_id)?;
    let output = daemon.pods.exec_sync(container, request.cmd, Duration::from_secs(timeout)).await?;
    Ok(v1::ExecSyncResponse { stdout: output.stdout, stderr: output.stderr, exit_code: output.exit_code })
}
