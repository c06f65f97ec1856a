//! Downloads what is read as a whole: manifests, configs, tables of contents.

use std::time::Instant;

use coracle_job::{Failure, FailureKind, Timeouts};

use super::connection::Connection;
use coracle_fetch::{Floor, Get, Head, RequestFailure};

/// Minimum rate in bytes per second of a neighbour that has all of what it sends: that of a poor wireless network.
pub(super) const NEIGHBOUR_RATE_MIN: u32 = 256 << 10;

/// Whether an answer begins like an HTML page, which no manifest and no config does.
fn is_html(bytes: &[u8]) -> bool {
    bytes.trim_ascii_start().first() == Some(&b'<')
}

/// Requests a document of at most `bytes_max` bytes. If `is_right` is false of the answer, it is refused.
pub(super) fn read_document(
    connection: &Connection,
    get: Get,
    bytes_max: u64,
    is_right: impl Fn(&Head) -> bool,
) -> Result<(Head, Vec<u8>), RequestFailure> {
    let mut bytes = Vec::new();
    let head = append_document(connection, get, bytes_max, is_right, &mut bytes)?;
    Ok((head, bytes))
}

/// [`read_document`], which appends what it reads to `bytes`, also before a failure, unless the answer is too long. Together they are at
/// most `bytes_max` bytes.
pub(super) fn append_document(
    connection: &Connection,
    get: Get,
    bytes_max: u64,
    is_right: impl Fn(&Head) -> bool,
    bytes: &mut Vec<u8>,
) -> Result<Head, RequestFailure> {
    // A range begins with any byte.
    let (what, is_whole) = (get.what.clone(), get.end.is_none());
    let (head, mut body) = connection.get(get)?;
    if !is_right(&head) {
        return Err(Failure::invalid(format!(
            "{}: {what}: not the range that was requested",
            connection.name()
        ))
        .into());
    }
    let rate = if connection.is_neighbour() { NEIGHBOUR_RATE_MIN.into() } else { 0 };
    let timeouts = connection.timeouts();
    let rate_bytes_min = timeouts.rate_bytes_min.max(rate);
    let mut floor = Floor::new(&Timeouts { rate_bytes_min, ..*timeouts });
    let (begin, mut buffer) = (bytes.len(), vec![0; 16 << 10]);
    let name = format!("{}: {what}", connection.name());
    let cut_off = |why: String| Failure::new(FailureKind::Unavailable, format!("{name}: {why}"));
    loop {
        let count = body.read(&mut buffer, &name)?;
        if count == 0 {
            break;
        }
        if is_whole && bytes.len() == begin && is_html(&buffer[..count]) {
            return Err(RequestFailure::of_page(&name));
        }
        bytes.extend_from_slice(&buffer[..count]);
        if bytes.len() as u64 > bytes_max {
            bytes.truncate(begin);
            return Err(Failure::invalid(format!("{what}: longer than {bytes_max} bytes")).into());
        }
        floor.passed(count, Instant::now()).map_err(cut_off)?;
    }
    let count = (bytes.len() - begin) as u64;
    match head.length.is_none_or(|promised| promised == count) {
        true => Ok(head),
        false => Err(cut_off(format!("ended after {count} bytes")).into()),
    }
}
