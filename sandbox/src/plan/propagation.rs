//! Checks whether a volume supports the requested mount propagation, which depends on the mount of its source.

use std::path::Path;

use coracle_wire::Propagation;

use crate::{Error, mountinfo};

/// Checks that mounts propagate between the host and a bind mount of `source`, given the text of the host's
/// /proc/self/mountinfo: HOST_TO_CONTAINER needs a shared or slave mount, BIDIRECTIONAL a shared one.
///
/// # Errors
/// [`Error::Invalid`] with the text that other runtimes use (CRI 3.11).
pub fn check_propagation(mountinfo: &str, source: &Path, propagation: Propagation) -> Result<(), Error> {
    if propagation == Propagation::Private {
        return Ok(());
    }
    // The deepest mount that contains the source; of several on one mount point the last is on top.
    let holder = mountinfo::lines(mountinfo)
        .filter(|line| source.starts_with(&line.mount))
        .max_by_key(|line| line.mount.components().count());
    let field = format!("path {}", source.display());
    let Some(holder) = holder else {
        return Err(Error::invalid(field, "is on no mount"));
    };
    let (is_fine, needed) = match propagation {
        Propagation::Private => (true, "any"),
        Propagation::Slave => (holder.is_shared || holder.is_slave, "shared or slave"),
        Propagation::Shared => (holder.is_shared, "shared"),
    };
    if is_fine {
        return Ok(());
    }
    Err(Error::invalid(
        field,
        format!("is mounted on {} but it is not a {needed} mount", holder.mount.display()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "1 0 0:1 / / rw - ext4 /dev/vda rw\n\
        2 1 0:2 / /shared rw shared:1 - tmpfs none rw\n\
        3 1 0:3 / /slave rw master:1 - tmpfs none rw\n\
        4 2 0:4 / /shared/private rw - tmpfs none rw\n\
        5 1 0:5 / /twice rw shared:9 - tmpfs none rw\n\
        6 1 0:6 / /twice rw - tmpfs none rw\n";

    #[test]
    fn propagation_is_checked_against_the_mount_of_the_source() {
        let table = [
            ("/data", Propagation::Private, None),
            (
                "/data",
                Propagation::Slave,
                Some("path /data: is mounted on / but it is not a shared or slave mount"),
            ),
            ("/data", Propagation::Shared, Some("path /data: is mounted on / but it is not a shared mount")),
            ("/shared", Propagation::Shared, None),
            ("/shared/x", Propagation::Slave, None),
            (
                "/sharedx",
                Propagation::Slave,
                Some("path /sharedx: is mounted on / but it is not a shared or slave mount"),
            ),
            ("/slave/x", Propagation::Slave, None),
            (
                "/slave",
                Propagation::Shared,
                Some("path /slave: is mounted on /slave but it is not a shared mount"),
            ),
            (
                "/shared/private/x",
                Propagation::Shared,
                Some("path /shared/private/x: is mounted on /shared/private but it is not a shared mount"),
            ),
            (
                "/twice",
                Propagation::Shared,
                Some("path /twice: is mounted on /twice but it is not a shared mount"),
            ),
        ];
        for (source, propagation, expected) in table {
            let outcome =
                check_propagation(MOUNTS, Path::new(source), propagation).map_err(|error| error.to_string());
            assert_eq!(outcome.err().as_deref(), expected, "{source} {propagation:?}");
        }
        assert!(check_propagation("", Path::new("/x"), Propagation::Slave).is_err());
    }
}
