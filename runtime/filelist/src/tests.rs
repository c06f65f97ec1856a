//! Layers on the real file system that are changed after their list was written, and lists that are damaged.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, UNIX_EPOCH};

use rustix::fs::{FileType, Mode, XattrFlags};

use crate::{Crc, Reader, Sums, Verdict, check, check_tree, digest_of_tree, write};

/// A layer and the place of its list; removed on drop.
struct Layer {
    top: PathBuf,
    tree: PathBuf,
    list: PathBuf,
}

impl Layer {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let top = std::env::temp_dir().join(format!("coracle-filelist-{}-{number}", std::process::id()));
        let tree = top.join("tree");
        fs::create_dir_all(tree.join("d/implied/below")).unwrap();
        for name in ["file", "second"] {
            fs::write(tree.join(name), b"content").unwrap();
            fs::hard_link(tree.join(name), tree.join("d").join(name)).unwrap();
        }
        fs::write(tree.join("d/large"), noise(300_000)).unwrap();
        fs::write(tree.join("d/implied/below/empty"), b"").unwrap();
        symlink("file", tree.join("link")).unwrap();
        for name in ["file", "second", "d/large", "d"] {
            set_time(&tree.join(name));
        }
        Self { list: top.join("list"), tree, top }
    }

    /// A layer with its list.
    fn listed() -> Self {
        let layer = Self::new();
        layer.write(&Sums::default());
        layer
    }

    fn write(&self, sums: &Sums) {
        let into = File::create(&self.list).unwrap();
        let implied = [b"d/implied".to_vec(), b"d/implied/below".to_vec()];
        write(&self.tree, &implied, sums, &mut Reader::new(0, &mut || ()), into).unwrap();
    }

    fn check(&self) -> Verdict {
        check(&self.tree, &self.list, &mut Reader::new(0, &mut || ())).unwrap()
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.top);
    }
}

fn noise(bytes: u32) -> Vec<u8> {
    (0..bytes).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn set_time(path: &Path) {
    File::open(path).unwrap().set_modified(UNIX_EPOCH + Duration::from_secs(1_577_836_800)).unwrap();
}

/// Exchanges names of two files in one of their directories.
fn swap_links(tree: &Path) {
    fs::rename(tree.join("d/file"), tree.join("x")).unwrap();
    fs::rename(tree.join("d/second"), tree.join("d/file")).unwrap();
    fs::rename(tree.join("x"), tree.join("d/second")).unwrap();
    set_time(&tree.join("d"));
}

#[test]
fn every_attribute_is_compared_as_root() {
    assert_eq!(Layer::listed().check(), Verdict::Whole);
    let set = |path: PathBuf, name: &str, value: &[u8]| {
        rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
    };
    let capability = [1, 0, 0, 2, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let now = |path: PathBuf| File::open(path).unwrap().set_modified(UNIX_EPOCH).unwrap();
    let change = |path: PathBuf, bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        set_time(&path);
    };
    let mut flipped = noise(300_000);
    flipped[299_999] ^= 1;
    type Change<'a> = &'a dyn Fn(&Path);
    let cases: [(Change<'_>, &str); 16] = [
        (&|tree| set(tree.join("file"), "security.capability", &capability), "attribute security.capability"),
        (
            &|tree| set(tree.join("d"), "trusted.overlay.opaque", b"y"),
            "/d: has another extended attribute trusted",
        ),
        (&|tree| set(tree.join("link"), "security.x", b""), "/link: has another extended attribute"),
        (&|tree| now(tree.join("second")), "second: has another modification time"),
        (&|tree| now(tree.join("d")), "/d: has another modification time"),
        (&|tree| now(tree.join("d/implied")), ""),
        (&|tree| change(tree.join("file"), b"cOntent"), "file: has other content"),
        (&|tree| change(tree.join("d/large"), &flipped), "/d/large: has other content"),
        (&|tree| change(tree.join("d/large"), b"short"), "/d/large: 5 bytes instead of 300000"),
        (&|tree| fs::write(tree.join("d/implied/more"), b"").unwrap(), "/d/implied: has other entries"),
        (
            &|tree| {
                fs::remove_dir_all(tree.join("d/implied")).unwrap();
                set_time(&tree.join("d"));
            },
            "/d/implied: no such file",
        ),
        (&|tree| fs::remove_file(tree.join("d/implied/below/empty")).unwrap(), "below/empty: no such file"),
        (
            &|tree| {
                fs::remove_file(tree.join("link")).unwrap();
                symlink("else", tree.join("link")).unwrap();
            },
            "/link: has another link target",
        ),
        (
            &|tree| rustix::fs::chmod(tree.join("d/large"), Mode::from_raw_mode(0o600)).unwrap(),
            "/d/large: mode and owner 100600, 0:0 instead of 100644, 0:0",
        ),
        (
            &|tree| {
                fs::remove_file(tree.join("file")).unwrap();
                change(tree.join("file"), b"content");
            },
            "file: has other hard links",
        ),
        (&swap_links, "has other hard links"),
    ];
    for (change, expected) in cases {
        let layer = Layer::listed();
        change(&layer.tree);
        match layer.check() {
            Verdict::Damaged(why) => {
                assert!(!expected.is_empty() && why.contains(expected), "{expected:?}: {why:?}")
            }
            verdict => assert_eq!((verdict, expected), (Verdict::Whole, "")),
        }
    }
}

#[test]
fn whiteouts_have_no_time_as_root() {
    let layer = Layer::new();
    let open = rustix::fs::open(&layer.tree, rustix::fs::OFlags::PATH, Mode::empty()).unwrap();
    rustix::fs::mknodat(&open, "gone", FileType::CharacterDevice, Mode::empty(), 0).unwrap();
    layer.write(&Sums::default());
    let time = rustix::fs::Timespec { tv_sec: 1, tv_nsec: 0 };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(&open, "gone", &times, rustix::fs::AtFlags::empty()).unwrap();
    assert_eq!(layer.check(), Verdict::Whole);
}

/// A list that cannot be read was taken for a missing one.
#[test]
fn a_damaged_list_is_never_believed_as_root() {
    let layer = Layer::listed();
    let whole = fs::read(&layer.list).unwrap();
    for at in 0..whole.len() {
        fs::write(&layer.list, &whole[..at]).unwrap();
        assert!(matches!(layer.check(), Verdict::ListDamaged(_)), "cut off at {at}: {:?}", layer.check());
        let mut flipped = whole.clone();
        flipped[at] ^= 0x10;
        fs::write(&layer.list, flipped).unwrap();
        assert!(matches!(layer.check(), Verdict::ListDamaged(_)), "flipped at {at}: {:?}", layer.check());
    }
    fs::write(&layer.list, [&whole[..], b"x"].concat()).unwrap();
    assert_eq!(layer.check(), Verdict::ListDamaged("bytes after its end".to_owned()));
    fs::remove_file(&layer.list).unwrap();
    symlink("list", &layer.list).unwrap();
    assert!(matches!(layer.check(), Verdict::ListDamaged(_)), "a link");
    fs::remove_file(&layer.list).unwrap();
    fs::create_dir(&layer.list).unwrap();
    assert!(matches!(layer.check(), Verdict::ListDamaged(_)), "a directory");
    fs::remove_dir(&layer.list).unwrap();
    assert_eq!(layer.check(), Verdict::Readable, "no list");
    fs::remove_dir_all(&layer.tree).unwrap();
    assert_eq!(layer.check(), Verdict::Gone);
}

/// The digest of a tree depends on all but times, also of a tree that a link leads to.
#[test]
fn the_digest_of_a_tree_is_that_of_another_copy_only_as_root() {
    let (one, other) = (Layer::new(), Layer::new());
    let link = other.top.join("to-tree");
    symlink(&other.tree, &link).unwrap();
    let digest = digest_of_tree(&one.tree, &mut Reader::new(0, &mut || ())).unwrap();
    let verdict = || check_tree(&link, &digest, &mut Reader::new(0, &mut || ())).unwrap();
    File::open(other.tree.join("second")).unwrap().set_modified(UNIX_EPOCH).unwrap();
    assert_eq!(verdict(), Verdict::Whole);
    fs::write(other.tree.join("second"), b"cOntent").unwrap();
    assert!(matches!(verdict(), Verdict::Damaged(why) if why.contains("not the tree")));
    fs::remove_dir_all(&other.tree).unwrap();
    assert!(matches!(verdict(), Verdict::Damaged(why) if why.starts_with("/: no such file")));
}

/// The checksums of the archive are the truth, also if the tree has been damaged since it was written.
#[test]
fn known_checksums_are_used_and_others_are_computed_as_root() {
    let layer = Layer::new();
    let inode = |name: &str| layer.tree.join(name).symlink_metadata().unwrap().ino();
    let mut sum = Crc::new();
    sum.update(b"content");
    // The inode was used before by another file; a sum that is not known is computed.
    let sums = [(inode("file"), 9, sum.sum()), (inode("file"), 2, u32::MAX)];
    layer.write(&Sums::new(sums.to_vec()));
    assert_eq!(layer.check(), Verdict::Whole);
    fs::write(layer.tree.join("file"), b"CONTENT").unwrap();
    set_time(&layer.tree.join("file"));
    layer.write(&Sums::new(sums.to_vec()));
    assert!(matches!(layer.check(), Verdict::Damaged(why) if why.contains("file: has other content")));
}

#[test]
fn trees_deeper_than_the_longest_path_get_no_list() {
    let layer = Layer::new();
    let name = CString::new([b'n'; 200]).unwrap();
    let mut open = rustix::fs::open(&layer.tree, rustix::fs::OFlags::PATH, Mode::empty()).unwrap();
    for _ in 0..30 {
        rustix::fs::mkdirat(&open, &name, Mode::from_raw_mode(0o755)).unwrap();
        open = rustix::fs::openat(&open, &name, rustix::fs::OFlags::PATH, Mode::empty()).unwrap();
    }
    let error =
        write(&layer.tree, &[], &Sums::default(), &mut Reader::new(0, &mut || ()), Vec::new()).unwrap_err();
    assert_eq!(error.error.raw_os_error(), Some(rustix::io::Errno::NAMETOOLONG.raw_os_error()));
    assert_eq!(layer.check(), Verdict::Readable);
}

#[test]
fn the_rate_is_bounded_and_the_reader_is_alive_as_root() {
    let layer = Layer::new();
    let (begun, mut pulses) = (Instant::now(), 0);
    let mut pulse = || pulses += 1;
    let mut reader = Reader::new(1_000_000, &mut pulse);
    let verdict = check(&layer.tree, &layer.list, &mut reader).unwrap();
    assert_eq!((verdict, reader.bytes()), (Verdict::Readable, 300_000 + 2 * 7));
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(280) && took < Duration::from_secs(10), "{took:?}");
    assert!(pulses >= 7, "{pulses}");
}

/// A layer that is replaced while it is checked is not damaged.
#[test]
fn a_layer_that_is_removed_meanwhile_is_gone_as_root() {
    let layer = Layer::listed();
    let (tree, away) = (layer.tree.clone(), layer.top.join("away"));
    let mut pulse = || {
        let _ = fs::rename(&tree, &away);
        let _ = fs::remove_dir_all(&away);
    };
    let verdict = check(&layer.tree, &layer.list, &mut Reader::new(0, &mut pulse)).unwrap();
    assert_eq!(verdict, Verdict::Gone);
}

#[test]
fn names_of_any_bytes_are_kept_as_root() {
    let layer = Layer::new();
    let name = std::ffi::OsStr::from_bytes(b"\xff\n\x01");
    fs::create_dir(layer.tree.join(name)).unwrap();
    fs::write(layer.tree.join(name).join(name), b"1").unwrap();
    layer.write(&Sums::default());
    assert_eq!(layer.check(), Verdict::Whole);
    fs::write(layer.tree.join(name).join(name), b"12").unwrap();
    assert!(matches!(layer.check(), Verdict::Damaged(_)));
}
