//! One blob, from the first byte to its name in the store: downloaded into a part that outlives failures, verified,
//! published. The next try, also that of another worker or after a reboot, goes on where the part ends.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind};
use sha2::{Digest, Sha256};
use ureq::Body;
use ureq::http::{Response, StatusCode};

use super::endpoint::Connection;
use super::manifest::Descriptor;
use crate::failure::{failure, invalid, io_failure};
use crate::image_config::digest_text;
use crate::store::Store;

/// A link slower than this over [`FLOOR_WINDOW`] is as good as none: another endpoint, or the next try, may do better.
const FLOOR_BYTES: u64 = 60 << 10;
const FLOOR_WINDOW: Duration = Duration::from_secs(60);

/// One read and write.
const BUFFER_BYTES: usize = 64 << 10;

/// Tries at one endpoint while each of them brings bytes.
const TRIES_MAX: u32 = 5;

/// Downloads the blob where it is not in the store yet; `progress` hears of the bytes that are on disk.
pub(super) fn fetch(
    connection: &mut Connection<'_>,
    store: &Store,
    blob: &Descriptor,
    progress: &mut dyn FnMut(u64),
) -> Result<(), Failure> {
    let path = store.blob(&blob.digest)?;
    if path.exists() {
        progress(blob.size);
        return Ok(());
    }
    let part = store.part(&blob.digest)?;
    let _lock = lock(&part)?;
    if path.exists() {
        // Another pull of the same layer was first; what the lock was on may be a new, empty part.
        if length(&part) == 0 {
            let _ = std::fs::remove_file(&part);
        }
        progress(blob.size);
        return Ok(());
    }
    let mut tries = 0;
    loop {
        tries += 1;
        let before = length(&part);
        match download(connection, &part, blob, progress) {
            Ok(()) => break,
            // Cut off, but it got on: from where it stopped. Without new bytes another try would be a loop.
            Err(error)
                if error.kind == FailureKind::Unavailable && tries < TRIES_MAX && length(&part) > before => {}
            Err(error) => return Err(error),
        }
    }
    verify(&part, blob)?;
    store.publish(&part, &path)
}

/// Waits for other workers that fetch the same blob. The name may have passed to a new file meanwhile.
fn lock(part: &Path) -> Result<File, Failure> {
    loop {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(part);
        let file = file.map_err(|error| io_failure("open", part, &error))?;
        file.lock().map_err(|error| io_failure("lock", part, &error))?;
        let inode =
            |metadata: std::io::Result<std::fs::Metadata>| metadata.map(|metadata| metadata.ino()).ok();
        if inode(file.metadata()) == inode(part.metadata()) {
            return Ok(file);
        }
    }
}

fn length(part: &Path) -> u64 {
    part.metadata().map_or(0, |metadata| metadata.len())
}

fn download(
    connection: &mut Connection<'_>,
    part: &Path,
    blob: &Descriptor,
    progress: &mut dyn FnMut(u64),
) -> Result<(), Failure> {
    let mut file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(part);
    let file = file.as_mut().map_err(|error| io_failure("open", part, error))?;
    let mut offset = length(part);
    if offset > blob.size {
        truncate(file, part)?; // another blob's bytes, or a lie: from the start
        offset = 0;
    }
    if offset == blob.size {
        return Ok(());
    }
    let what = format!("blobs/{}", blob.digest);
    let response = match connection.get(&what, "*/*", offset) {
        // It will not go on where we stopped (416, or an answer to a range that makes no sense): from the start.
        Err(error) if offset > 0 && error.kind == FailureKind::Invalid => {
            truncate(file, part)?;
            offset = 0;
            connection.get(&what, "*/*", 0)?
        }
        answer => answer?,
    };
    if offset > 0 && response.status() != StatusCode::PARTIAL_CONTENT {
        truncate(file, part)?; // the endpoint sends it all again
        offset = 0;
    }
    file.seek(SeekFrom::Start(offset)).map_err(|error| io_failure("seek", part, &error))?;
    let name = connection.name().to_owned();
    copy(response, file, part, blob, offset, &name, progress)
}

fn copy(
    mut response: Response<Body>,
    file: &mut File,
    part: &Path,
    blob: &Descriptor,
    mut offset: u64,
    endpoint: &str,
    progress: &mut dyn FnMut(u64),
) -> Result<(), Failure> {
    let mut body = response.body_mut().as_reader();
    let mut buffer = vec![0; BUFFER_BYTES];
    let (mut window_from, mut window_begun) = (offset, Instant::now());
    let cut_off =
        |why: String| failure(FailureKind::Unavailable, format!("{endpoint}: blob {}: {why}", blob.digest));
    loop {
        let count = body.read(&mut buffer).map_err(|error| cut_off(error.to_string()))?;
        if count == 0 {
            break;
        }
        offset += count as u64;
        if offset > blob.size {
            truncate(file, part)?;
            return Err(invalid(format!(
                "blob {}: it is longer than the {} bytes of its manifest",
                blob.digest, blob.size
            )));
        }
        file.write_all(&buffer[..count]).map_err(|error| io_failure("write", part, &error))?;
        progress(offset);
        if window_begun.elapsed() > FLOOR_WINDOW {
            if offset - window_from < FLOOR_BYTES {
                return Err(cut_off(format!(
                    "less than {FLOOR_BYTES} bytes in {} s",
                    FLOOR_WINDOW.as_secs()
                )));
            }
            (window_from, window_begun) = (offset, Instant::now());
        }
    }
    match offset == blob.size {
        true => Ok(()),
        false => Err(cut_off(format!("ended after {offset} of {} bytes", blob.size))),
    }
}

fn truncate(file: &File, part: &Path) -> Result<(), Failure> {
    file.set_len(0).map_err(|error| io_failure("truncate", part, &error))
}

/// Reads the whole part back: what an earlier worker left is not trusted more than what the network sent.
fn verify(part: &Path, blob: &Descriptor) -> Result<(), Failure> {
    let mut file = File::open(part).map_err(|error| io_failure("open", part, &error))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match file.read(&mut buffer).map_err(|error| io_failure("read", part, &error))? {
            0 => break,
            count => hash.update(&buffer[..count]),
        }
    }
    let digest = digest_text(&hash.finalize());
    if digest == blob.digest {
        return Ok(());
    }
    // Gone, or the next try would verify the same bytes again.
    std::fs::remove_file(part).map_err(|error| io_failure("remove", part, &error))?;
    Err(invalid(format!("blob {}: its content has digest {digest}", blob.digest)))
}
