//! A file system that stops responding, like NFS without its server: a minimal FUSE server. All requests wait
//! in the kernel until the server responds again; then requests that were made before are answered, too.

use std::collections::VecDeque;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};

use crate::fuse::{self, DIRECTORY, GETATTR, INIT, LOOKUP, ROOT, Requests};

/// A mounted file system with an empty root directory. On drop it is unmounted, and waiting processes receive
/// errors.
pub struct MuteFs {
    path: PathBuf,
    answers: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
}

impl MuteFs {
    /// Mounts the file system on `path`, which is created. The server responds until [`MuteFs::fall_silent`].
    pub fn mount(path: &Path) -> MuteFs {
        let device = fuse::mount_on(path, "mute", false);
        let (answers, over) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(false)));
        let server = {
            let (answers, over) = (Arc::clone(&answers), Arc::clone(&over));
            std::thread::spawn(move || serve(&device, &answers, &over))
        };
        MuteFs { path: path.to_owned(), answers, over, server: Some(server) }
    }

    /// The mount point of the file system.
    pub fn path(&self) -> String {
        self.path.display().to_string()
    }

    /// Lets the server stop responding.
    pub fn fall_silent(&self) {
        self.answers.store(false, Ordering::Relaxed);
    }

    /// Lets the server answer waiting and further requests.
    pub fn answer(&self) {
        self.answers.store(true, Ordering::Relaxed);
    }
}

impl Drop for MuteFs {
    fn drop(&mut self) {
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
        self.over.store(true, Ordering::Relaxed);
        if let Some(server) = self.server.take() {
            let _ = server.join(); // closes the device, which aborts the connection
        }
    }
}

fn serve(device: &File, answers: &AtomicBool, over: &AtomicBool) {
    let mut waiting = VecDeque::new();
    let mut requests = Requests::new();
    while !over.load(Ordering::Relaxed) {
        match requests.next(device) {
            Ok(Some(request)) => waiting.push_back((request.opcode, request.unique)),
            Ok(None) => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => return, // unmounted
        }
        // Requests of the mount itself are always answered.
        while let Some((opcode, unique)) = waiting.front().copied() {
            if opcode != INIT && !answers.load(Ordering::Relaxed) {
                break;
            }
            waiting.pop_front();
            let answer = match opcode {
                // The kernel keeps no attributes.
                GETATTR => Some(Ok(fuse::attributes_answer(0, &fuse::attributes(ROOT, DIRECTORY, 0)))),
                LOOKUP => Some(Err(Errno::ENOENT)),
                _ => fuse::usual(opcode),
            };
            if let Some(answer) = answer {
                fuse::reply(device, unique, answer);
            }
        }
    }
}
