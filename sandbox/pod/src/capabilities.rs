//! The capability bounding set, which containers and the first process of a shared PID namespace reduce.

use coracle_sys::Errno;
use coracle_sys::process::{self, Control};

/// Drops all capabilities but those of the bit mask `keep` from the bounding set (capabilities(7)).
pub(crate) fn drop_bounding(keep: u64) -> Result<(), Errno> {
    for capability in (0..64).filter(|capability| keep >> capability & 1 == 0) {
        match process::control(Control::DropBounding(capability)) {
            // The kernel has no capability with this or a higher number.
            Err(Errno::EINVAL) => break,
            dropped => dropped?,
        }
    }
    Ok(())
}
