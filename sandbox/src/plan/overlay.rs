//! Options of an OverlayFS mount. All options must fit into one page, which is the limit of mount(2). Therefore lower
//! layers are given as short names relative to one directory: the daemon uses links of 26 bytes, whereas paths of 80
//! bytes would allow only 50 layers.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::path;
use super::record::c_string;
use super::request::Root;
use crate::Error;

/// Maximum length of the options in bytes: a page without the NUL. The limit is 4 KiB also on kernels with larger
/// pages, so that images behave in the same way.
const OPTIONS_BYTES_MAX: usize = 4095;

/// Options of the overlay of a container's root. `volatile` (Linux 5.10): otherwise the kernel writes the whole file
/// system of the upper directory to the disk when the overlay is unmounted, that is at the end of each container, and
/// at each fsync(2) in the container's writable layer. No container is started on the writable layer of an earlier
/// one, so nothing reads these files after a power cut.
pub(super) fn options(root: &Root) -> Result<CString, Error> {
    let mut options = lowers(&root.lowers)?;
    for (key, directory) in [(",upperdir=", &root.upper), (",workdir=", &root.work)] {
        path::host("root", directory)?;
        options.extend_from_slice(key.as_bytes());
        escape(directory.as_os_str().as_bytes(), &mut options);
    }
    options.extend_from_slice(b",volatile");
    label(root.label.as_deref(), &mut options);
    finish(root.lowers.len(), &options)
}

/// Options of a read-only overlay, for an image volume. `empty` is an additional lowest layer for an image with a
/// single layer.
pub(super) fn read_only_options(
    layers: &[String],
    empty: &Path,
    wanted: Option<&str>,
) -> Result<CString, Error> {
    path::host("empty directory", empty)?;
    let mut options = lowers(layers)?;
    options.push(b':');
    escape(empty.as_os_str().as_bytes(), &mut options);
    label(wanted, &mut options);
    finish(layers.len(), &options)
}

/// Adds the SELinux label of all files of the file system. The label is quoted, because a level contains commas, and
/// the kernel removes the quotes (security/selinux/hooks.c, `selinux_sb_eat_lsm_opts`).
pub(super) fn label(label: Option<&str>, options: &mut Vec<u8>) {
    if let Some(label) = label {
        options.extend_from_slice(format!(",context=\"{label}\"").as_bytes());
    }
}

fn lowers(lowers: &[String]) -> Result<Vec<u8>, Error> {
    if lowers.is_empty() {
        return Err(Error::invalid("root", "has no layer"));
    }
    let mut options = b"lowerdir=".to_vec();
    for (index, lower) in lowers.iter().enumerate() {
        let is_inside = lower.split('/').all(|part| !matches!(part, "" | "." | ".."));
        if !is_inside {
            return Err(Error::invalid(
                "layer",
                format!("{lower:?} is not a name below the layers' directory"),
            ));
        }
        if index > 0 {
            options.push(b':');
        }
        escape(lower.as_bytes(), &mut options);
    }
    Ok(options)
}

fn finish(layers: usize, options: &[u8]) -> Result<CString, Error> {
    if options.len() > OPTIONS_BYTES_MAX {
        let why = format!(
            "{} layers need {} bytes of mount options, the kernel takes {OPTIONS_BYTES_MAX}: the image has too many layers",
            layers,
            options.len()
        );
        return Err(Error::invalid("root", why));
    }
    c_string("root", options)
}

/// Escapes separators: in OverlayFS options `,` ends an option, `:` ends a layer, and `\` escapes the next character
/// (fs/overlayfs/params.c, `ovl_next_opt` and `ovl_unescape`).
fn escape(name: &[u8], into: &mut Vec<u8>) {
    for byte in name {
        if matches!(byte, b'\\' | b',' | b':') {
            into.push(b'\\');
        }
        into.push(*byte);
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn root(lowers: Vec<String>) -> Root {
        Root {
            layers_directory: PathBuf::from("/layers"),
            lowers,
            upper: PathBuf::from("/pods/a,b:c\\d/upper"),
            work: PathBuf::from("/pods/work"),
            mountpoint: PathBuf::from("/pods/root"),
            read_only: false,
            label: None,
        }
    }

    #[test]
    fn names_are_relative_and_separators_escaped() {
        let options = options(&root(vec!["top".into(), "sha256:1".into()])).unwrap();
        let expected = r"lowerdir=top:sha256\:1,upperdir=/pods/a\,b\:c\\d/upper,workdir=/pods/work,volatile";
        assert_eq!(options.to_str(), Ok(expected));
    }

    #[test]
    fn a_label_comes_last_and_keeps_its_commas() {
        let labelled = Root { label: Some("u:r:t:s0:c1,c2".into()), ..root(vec!["a".into()]) };
        let options = options(&labelled).unwrap();
        assert!(
            options.to_str().unwrap().ends_with(",workdir=/pods/work,volatile,context=\"u:r:t:s0:c1,c2\""),
            "{options:?}"
        );
        let image = read_only_options(&["a".into()], Path::new("/e"), labelled.label.as_deref()).unwrap();
        assert_eq!(image.to_str(), Ok("lowerdir=a:/e,context=\"u:r:t:s0:c1,c2\""));
    }

    #[test]
    fn mount_options_above_one_page_are_refused() {
        let fixed = options(&root(vec!["a".into()])).unwrap().as_bytes().len() - 1;
        let longest = "a".repeat(OPTIONS_BYTES_MAX - fixed);
        assert!(options(&root(vec![longest.clone()])).is_ok());
        let error = options(&root(vec![longest + "a"])).unwrap_err();
        assert!(error.to_string().contains("1 layers need 4096 bytes of mount options"), "{error}");
    }

    /// Number of layers that fit into the options with the daemon's links (`l/` and 24 digits) and the paths of a
    /// container below the default root. With names of 32 digits, as in builds before 0.1.0, it is 112.
    #[test]
    fn mount_options_have_space_for_137_layers() {
        let fit = |name: &str| {
            let directory = format!("/var/lib/coracle/pods/{}/containers/{}", "0".repeat(64), "0".repeat(64));
            let root = |count: usize| Root {
                upper: PathBuf::from(format!("{directory}/upper")),
                work: PathBuf::from(format!("{directory}/work")),
                ..root(vec![name.to_owned(); count])
            };
            (1..=256).take_while(|count| options(&root(*count)).is_ok()).count()
        };
        assert_eq!(fit(&format!("l/{}", "0".repeat(24))), 137);
        assert_eq!(fit(&"0".repeat(32)), 112);
        assert_eq!(fit(&"0".repeat(64)), 57, "whole names would not do");
    }

    #[test]
    fn layers_stay_below_their_directory() {
        for lowers in
            [vec![], vec![String::new()], vec!["/etc".into()], vec!["..".into()], vec!["a/../..".into()]]
        {
            assert!(options(&root(lowers.clone())).is_err(), "{lowers:?}");
        }
    }
}
