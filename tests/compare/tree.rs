//! What a container would see of its image: the layers as overlayfs merges them, and every attribute of every entry.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coracle_tests::layer::digest;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// The attributes of one entry, by their names.
pub(crate) type Entry = BTreeMap<&'static str, String>;

/// All entries, by their paths as a reader can print them.
pub(crate) type Tree = BTreeMap<String, Entry>;

/// Reads the merged tree of layers, topmost first. `folder`: a directory for the mount point.
pub(crate) fn read(layers: &[PathBuf], folder: &Path) -> Tree {
    let (place, empty) = (folder.join("merged"), folder.join("empty"));
    fs::create_dir_all(&place).expect("a mount point");
    fs::create_dir_all(&empty).expect("an empty directory");
    // overlayfs takes no single layer. Below all others, the empty directory adds nothing.
    let lower: Vec<String> =
        layers.iter().chain([&empty]).map(|path| path.display().to_string().replace(':', "\\:")).collect();
    let options = format!("lowerdir={}", lower.join(":"));
    let flags = MsFlags::MS_RDONLY | MsFlags::MS_NOATIME;
    mount(Some("overlay"), &place, Some("overlay"), flags, Some(options.as_str())).expect("the layers mount");
    let mounted = Mounted(&place);
    let mut reader = Reader { root: &place, tree: Tree::new(), inodes: BTreeMap::new() };
    reader.folder(Path::new(""));
    reader.finish();
    drop(mounted);
    reader.tree
}

struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        // Fails only if it is gone.
        let _ = umount2(self.0, MntFlags::MNT_DETACH);
    }
}

struct Reader<'a> {
    root: &'a Path,
    tree: Tree,
    /// The paths of each inode that has several.
    inodes: BTreeMap<(u64, u64), Vec<String>>,
}

impl Reader<'_> {
    fn folder(&mut self, path: &Path) {
        self.entry(path);
        let mut names: Vec<_> = fs::read_dir(self.root.join(path))
            .expect("a directory")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        names.sort_unstable();
        for name in names {
            let path = path.join(name);
            match fs::symlink_metadata(self.root.join(&path)) {
                Ok(data) if data.is_dir() => self.folder(&path),
                Ok(_) => self.entry(&path),
                // overlayfs lists whiteouts of directories that only one layer has.
                Err(error) => {
                    let entry = Entry::from([("type", format!("listed only: {error}"))]);
                    self.tree.insert(shown(path.as_os_str().as_bytes()), entry);
                }
            }
        }
    }

    fn entry(&mut self, path: &Path) {
        let full = self.root.join(path);
        let data = fs::symlink_metadata(&full).expect("an entry");
        let shown = shown(path.as_os_str().as_bytes());
        let mut entry = Entry::new();
        entry.insert("type", kind(&data).to_owned());
        entry.insert("mode", format!("{:04o}", data.mode() & 0o7777));
        entry.insert("owner", format!("{}:{}", data.uid(), data.gid()));
        // The root directory's is that of the unpacking.
        if !shown.is_empty() {
            entry.insert("mtime", time(&data));
        }
        entry.insert("xattrs", xattrs(&full));
        if data.file_type().is_char_device() || data.file_type().is_block_device() {
            entry.insert("device", format!("{:#x}", data.rdev()));
        }
        if data.is_symlink() {
            let target = fs::read_link(&full).expect("a link");
            entry.insert("target", self::shown(target.as_os_str().as_bytes()));
        }
        if data.is_file() {
            entry.insert("size", data.len().to_string());
            entry.insert("content", content(&full, data.len()));
        }
        if !data.is_dir() {
            self.inodes.entry((data.dev(), data.ino())).or_default().push(shown.clone());
        }
        self.tree.insert(shown, entry);
    }

    fn finish(&mut self) {
        for paths in self.inodes.values().filter(|paths| paths.len() > 1) {
            for path in paths {
                let entry = self.tree.get_mut(path).expect("an entry of the tree");
                entry.insert("hard links", paths.join(" "));
            }
        }
    }
}

fn kind(data: &Metadata) -> &'static str {
    let kind = data.file_type();
    match () {
        () if kind.is_dir() => "directory",
        () if kind.is_file() => "file",
        () if kind.is_symlink() => "symlink",
        () if kind.is_fifo() => "FIFO",
        () if kind.is_char_device() => "character device",
        () if kind.is_block_device() => "block device",
        () => "socket",
    }
}

/// The time of the last modification; that of something made just now has no number.
fn time(data: &Metadata) -> String {
    const JUST_NOW: Duration = Duration::from_secs(600);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock after 1970");
    let since = now.as_secs() as i64 - data.mtime();
    match since.unsigned_abs() < JUST_NOW.as_secs() {
        true => "now".to_owned(),
        false => format!("{}.{:09}", data.mtime(), data.mtime_nsec()),
    }
}

fn xattrs(path: &Path) -> String {
    let mut names = vec![0; 64 << 10];
    let length = rustix::fs::llistxattr(path, &mut names[..]).expect("a list of attributes");
    let names = &names[..length];
    let mut found: Vec<String> = names
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| {
            let mut value = vec![0; 64 << 10];
            let length = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..]);
            format!("{}={}", shown(name), shown(&value[..length.unwrap_or(0)]))
        })
        .collect();
    found.sort_unstable();
    found.join(" ")
}

/// The digest of a file's content, and what is in a short one.
fn content(path: &Path, length: u64) -> String {
    const LONG: u64 = 64 << 20;
    const SHORT: usize = 24;
    if length > LONG {
        return "more than is read".to_owned();
    }
    let bytes = fs::read(path).expect("a file");
    match bytes.len() <= SHORT {
        true => shown(&bytes),
        false => digest(&bytes),
    }
}

/// Bytes as text without line breaks.
pub(crate) fn shown(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}
