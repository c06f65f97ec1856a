//! Looks up a path in an image without mounting it: in the merged view of its layers (OCI image
//! specification, "Layer": whiteouts and opaque directories, in the format of OverlayFS), with links resolved
//! within the image.

use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

/// Maximum number of symbolic links of a look-up, as in the kernel (path_resolution(7)).
const LINKS_MAX: usize = 40;
/// OverlayFS' attribute of an opaque directory (fs/overlayfs/overlayfs.h).
const OPAQUE: &str = "trusted.overlay.opaque";

/// A merged directory: the directory of each layer that has it, highest first.
type Merged = Vec<PathBuf>;

/// The type of a name in a merged directory.
enum Found {
    Nothing,
    Directory(Merged),
    Link(PathBuf),
    File,
}

/// Whether `path` exists in the image with these `layers`, highest first.
///
/// # Errors
/// A layer cannot be read, or there is a loop of links.
pub(crate) fn exists(layers: Vec<PathBuf>, path: &str) -> io::Result<bool> {
    let mut above = vec![layers];
    let mut rest: VecDeque<PathBuf> = VecDeque::from([PathBuf::from(path)]);
    let mut links = 0;
    while let Some(part) = rest.pop_front() {
        let mut components = part.components();
        let Some(component) = components.next() else { continue };
        rest.push_front(components.as_path().to_owned());
        match component {
            Component::CurDir | Component::Prefix(_) => {}
            Component::RootDir => above.truncate(1),
            // The parent of the root is the root.
            Component::ParentDir => above.truncate(above.len().saturating_sub(1).max(1)),
            Component::Normal(name) => {
                match find(above.last().map_or(&[][..], Vec::as_slice), Path::new(name))? {
                    Found::Nothing => return Ok(false),
                    Found::Directory(merged) => above.push(merged),
                    // A file has no entries.
                    Found::File => return Ok(rest.iter().all(|part| part.as_os_str().is_empty())),
                    Found::Link(target) => {
                        links += 1;
                        if links > LINKS_MAX {
                            return Err(io::Error::other("too many levels of symbolic links"));
                        }
                        rest.push_front(target);
                    }
                }
            }
        }
    }
    Ok(true)
}

fn find(directory: &[PathBuf], name: &Path) -> io::Result<Found> {
    let mut merged = Merged::new();
    for part in directory {
        let path = part.join(name);
        let about = match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            about => about?,
        };
        let kind = about.file_type();
        if kind.is_dir() {
            let is_opaque = has_attribute(&path)?;
            merged.push(path);
            if is_opaque {
                break;
            }
        } else if !merged.is_empty() || (kind.is_char_device() && about.rdev() == 0) {
            // A whiteout, or a file that a higher directory replaces: lower layers are hidden.
            break;
        } else if kind.is_symlink() {
            return Ok(Found::Link(std::fs::read_link(&path)?));
        } else {
            return Ok(Found::File);
        }
    }
    Ok(if merged.is_empty() { Found::Nothing } else { Found::Directory(merged) })
}

fn has_attribute(path: &Path) -> io::Result<bool> {
    let mut value = [0; 1];
    match rustix::fs::lgetxattr(path, OPAQUE, &mut value[..]) {
        Ok(length) => Ok(length == 1 && value == *b"y"),
        Err(rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP) => Ok(false),
        // Longer than a value of this attribute can be.
        Err(rustix::io::Errno::RANGE) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use coracle_base::testdir::TestDir;

    #[test]
    fn links_are_resolved_within_the_image_and_the_parent_of_the_root_is_the_root() {
        let folder = TestDir::new("merged");
        let (top, low) = (folder.path().join("top"), folder.path().join("low"));
        fs::create_dir_all(top.join("etc/app")).unwrap();
        fs::create_dir_all(low.join("etc")).unwrap();
        fs::create_dir_all(low.join("usr/bin")).unwrap();
        fs::write(low.join("etc/low"), "x").unwrap();
        fs::write(low.join("etc/app"), "hidden by the directory above").unwrap();
        fs::write(low.join("usr/bin/run"), "x").unwrap();
        symlink("usr/bin", low.join("bin")).unwrap();
        symlink("/usr/../bin/run", top.join("etc/absolute")).unwrap();
        symlink("../../../..", top.join("etc/up")).unwrap();
        symlink("round", top.join("round")).unwrap();
        for (path, expected) in [
            ("", true),
            ("/", true),
            ("etc/low", true),
            ("etc/app", true),
            ("etc/app/x", false),
            ("bin/run", true),
            ("bin/run/", true),
            ("bin/run/x", false),
            ("bin/other", false),
            ("etc/absolute", true),
            ("etc/up/usr/bin/run", true),
            ("../../usr", true),
            ("nothing", false),
        ] {
            assert_eq!(exists(vec![top.clone(), low.clone()], path).unwrap(), expected, "{path:?}");
        }
        assert!(exists(vec![top, low], "round/x").is_err());
    }
}
