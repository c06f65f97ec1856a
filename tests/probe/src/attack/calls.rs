//! Calls that RuntimeDefault is there to refuse, made so that the kernel itself would answer something else.

use nix::libc::{self, c_long};

use super::raw;
use crate::see::Outcome;

/// Name, number and the first two arguments; everything else is null. The kernel answers EINVAL, EFAULT, EBADF or
/// EOPNOTSUPP to each, or succeeds without effect, where it checks arguments first.
const CALLS: [(&str, c_long, c_long, c_long); 30] = [
    ("io_uring_setup", libc::SYS_io_uring_setup, 0, 0),
    ("io_uring_enter", libc::SYS_io_uring_enter, -1, 0),
    ("io_uring_register", libc::SYS_io_uring_register, -1, 0),
    ("bpf", libc::SYS_bpf, 9999, 0),
    ("userfaultfd", libc::SYS_userfaultfd, 0xff, 0),
    ("perf_event_open", libc::SYS_perf_event_open, 0, 0),
    ("keyctl", libc::SYS_keyctl, 9999, 0),
    ("add_key", libc::SYS_add_key, 0, 0),
    ("request_key", libc::SYS_request_key, 0, 0),
    ("open_by_handle_at", libc::SYS_open_by_handle_at, -1, 0),
    ("kexec_load", libc::SYS_kexec_load, 0, 0),
    ("init_module", libc::SYS_init_module, 0, 0),
    ("finit_module", libc::SYS_finit_module, -1, 0),
    ("delete_module", libc::SYS_delete_module, 0, 0),
    ("mount", libc::SYS_mount, 0, 0),
    ("umount2", libc::SYS_umount2, 0, 0),
    ("pivot_root", libc::SYS_pivot_root, 0, 0),
    ("open_tree", libc::SYS_open_tree, -1, 0),
    ("move_mount", libc::SYS_move_mount, -1, 0),
    ("fsopen", libc::SYS_fsopen, 0, 0),
    ("fsconfig", libc::SYS_fsconfig, -1, 0),
    ("mount_setattr", libc::SYS_mount_setattr, -1, 0),
    ("setns", libc::SYS_setns, -1, 0),
    ("unshare", libc::SYS_unshare, 0x1000_0000, 0),
    ("swapon", libc::SYS_swapon, 0, 0),
    ("quotactl", libc::SYS_quotactl, -1, 0),
    ("fanotify_init", libc::SYS_fanotify_init, 0xffff, 0),
    ("syslog", libc::SYS_syslog, 3, 0),
    ("lookup_dcookie", libc::SYS_lookup_dcookie, 0, 0),
    ("move_pages", libc::SYS_move_pages, 0, 0),
];

/// Families of sockets that no container needs: AF_ALG (CVE-2026-31431), AF_VSOCK.
const FAMILIES: [(&str, c_long); 2] = [("AF_ALG", 38), ("AF_VSOCK", 40)];

/// `saw call NAME ERRNO` for each.
pub(crate) fn all() -> Outcome {
    for (name, number, first, second) in CALLS {
        let said = raw::harmless(number, first, second);
        println!("saw call {name} {}", said.map_or_else(|errno| format!("{errno:?}"), |_| "done".into()));
    }
    for (name, family) in FAMILIES {
        let said = raw::harmless(libc::SYS_socket, family, c_long::from(libc::SOCK_SEQPACKET));
        println!("saw call {name} {}", said.map_or_else(|errno| format!("{errno:?}"), |_| "done".into()));
    }
    Ok(0)
}
