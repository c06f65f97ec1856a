//! A file system whose directory root may not enter, but other users may, like an NFS export with root_squash: a minimal
//! FUSE server.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};

use crate::fuse::{self, ACCESS, DIRECTORY, GETATTR, LOOKUP, ROOT, Requests};

/// A mounted file system with an empty root directory. It is unmounted on drop.
pub struct SquashedFs {
    path: PathBuf,
    server: Option<JoinHandle<()>>,
}

impl SquashedFs {
    /// Mounts the file system on `path`, which is created.
    pub fn mount(path: &Path) -> SquashedFs {
        let device = fuse::mount_on(path, "squashed", true);
        let server = std::thread::spawn(move || {
            let mut requests = Requests::new();
            while let Ok(request) = requests.next(&device) {
                let Some(request) = request else { continue };
                let answer = match request.opcode {
                    GETATTR => Some(Ok(fuse::attributes_answer(0, &fuse::attributes(ROOT, DIRECTORY, 0)))),
                    LOOKUP => Some(Err(Errno::ENOENT)),
                    ACCESS if request.uid == 0 => Some(Err(Errno::EACCES)),
                    ACCESS => Some(Ok(Vec::new())),
                    opcode => fuse::usual(opcode),
                };
                if let Some(answer) = answer {
                    fuse::reply(&device, request.unique, answer);
                }
            }
        });
        SquashedFs { path: path.to_owned(), server: Some(server) }
    }
}

impl Drop for SquashedFs {
    fn drop(&mut self) {
        // Aborts the connection, which ends the server: containers may still have the file system mounted.
        let _ = umount2(&self.path, MntFlags::MNT_FORCE | MntFlags::MNT_DETACH);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}
