//! Device nodes of the node: created in a container and opened.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;

use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::trace::CAREFUL;
use crate::see::Outcome;

/// Name, whether it is a block device, major and minor: Documentation/admin-guide/devices.txt.
const DEVICES: [(&str, bool, u64, u64); 20] = [
    ("mem", false, 1, 1),
    ("port", false, 1, 4),
    ("kmsg", false, 1, 11),
    ("oldmem", false, 1, 12),
    ("tty1", false, 4, 1),
    ("ttyS0", false, 4, 64),
    ("console", false, 5, 1),
    ("uinput", false, 10, 223),
    ("fuse", false, 10, 229),
    ("kvm", false, 10, 232),
    ("loop-control", false, 10, 237),
    ("userfaultfd", false, 10, 126),
    ("vhost-net", false, 10, 238),
    ("sg0", false, 21, 0),
    ("ppp", false, 108, 0),
    ("loop0", true, 7, 0),
    ("sda", true, 8, 0),
    ("dm-0", true, 253, 0),
    ("vda", true, 254, 0),
    ("vdb", true, 252, 0),
];

/// Creates each node in each directory and opens it for reading and writing. Existing nodes are opened, too.
pub(crate) fn all(folders: &[&str]) -> Outcome {
    for folder in folders {
        for (name, is_block, major, minor) in DEVICES {
            let path = format!("{folder}/attack-{name}");
            let kind = if is_block { SFlag::S_IFBLK } else { SFlag::S_IFCHR };
            if let Err(errno) =
                mknod(path.as_str(), kind, Mode::from_bits_truncate(0o666), makedev(major, minor))
            {
                println!("held mknod {path}: {errno}");
                continue;
            }
            println!("saw mknod {path}");
            for (is_writing, way) in [(false, "reading"), (true, "writing")] {
                let mut options = fs::OpenOptions::new();
                let opened = options.read(!is_writing).write(is_writing).custom_flags(CAREFUL).open(&path);
                match opened {
                    Ok(_) => println!("GOT device {name} in {folder} for {way}"),
                    Err(error) => println!("held device {name} in {folder} for {way}: {error}"),
                }
            }
            let _ = fs::remove_file(&path);
        }
    }
    Ok(0)
}
