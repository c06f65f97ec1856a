//! ImageFsInfo (CRI 2.32): the file system and disk usage of images. The kubelet uses only the first entry, calls statfs on its
//! mountpoint, and calls ImageFsInfo every 10 s; `container_filesystems` is empty, because writable layers are on the same file
//! system.

use std::rc::Rc;
use std::time::UNIX_EPOCH;

use coracle_base::error::Error;

use crate::daemon::Daemon;
use crate::rpc::v1;

/// Handles ImageFsInfo.
pub(crate) async fn image_fs_info(
    daemon: Rc<Daemon>,
    _: v1::ImageFsInfoRequest,
) -> Result<v1::ImageFsInfoResponse, Error> {
    let usage = daemon.images.usage().await;
    // The time may be before 1970 on a board without a clock; clients treat 0 as an error.
    let nanoseconds = usage.at.duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos().max(1));
    let images = v1::FilesystemUsage {
        timestamp: i64::try_from(nanoseconds).unwrap_or(i64::MAX),
        fs_id: Some(v1::FilesystemIdentifier { mountpoint: usage.directory.to_string_lossy().into_owned() }),
        used_bytes: Some(v1::UInt64Value { value: usage.used_bytes }),
        inodes_used: Some(v1::UInt64Value { value: usage.inodes_used }),
    };
    Ok(v1::ImageFsInfoResponse { image_filesystems: vec![images], container_filesystems: Vec::new() })
}
