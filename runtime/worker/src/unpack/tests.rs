//! Unpacks archives and checks the result on disk. Requires root because of owners, device nodes and trusted
//! extended attributes.

use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::PathBuf;

use coracle_decompress::decompress;
use coracle_filelist::{Reader, Verdict};
use coracle_job::FailureKind;
use coracle_manifest::digest_of;
use tar::EntryType;

use super::layer::clean;
use super::*;
use crate::store::Store;

pub(super) struct Scratch {
    root: PathBuf,
    store: Store,
}

impl Scratch {
    pub(super) fn new(about: &str) -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "unpacking makes device nodes and changes owners: run as root"
        );
        let root = std::env::temp_dir().join(format!("coracle-unpack-{about}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        Self { store: Store::open(&root).unwrap(), root }
    }

    /// Unpacks the archive as a layer above another one and returns its directory.
    pub(super) fn unpack(&self, archive: &[u8], limits: Limits) -> Result<PathBuf, Failure> {
        self.unpack_as(archive, &digest_of(&plain(archive)), &digest_of(b"a chain"), limits)
    }

    fn unpack_as(
        &self,
        archive: &[u8],
        diff_id: &str,
        chain_id: &str,
        limits: Limits,
    ) -> Result<PathBuf, Failure> {
        let digits = &diff_id["sha256:".len()..];
        let layer = Layer { diff_id: diff_id.into(), chain_id: chain_id.into(), name: digits[..32].into() };
        let blob = self.root.join("blob");
        std::fs::write(&blob, archive).unwrap();
        let layers = [layer];
        let mut aside = Aside::new(&self.store, &layers, &limits);
        aside.unpack(0, &blob, &mut |_| {})?;
        let ready = aside.complete()?;
        aside.publish(&ready, [])?;
        let (unpacked, list) = (self.store.layer(&layers[0].name), self.store.list(&layers[0].name));
        let verdict = coracle_filelist::check(&unpacked, &list, &mut Reader::new(0, &mut || ())).unwrap();
        assert_eq!(verdict, Verdict::Whole, "the list of the archive is that of its files");
        Ok(unpacked)
    }

    fn layers(&self) -> Vec<PathBuf> {
        std::fs::read_dir(self.root.join("layers")).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

fn plain(archive: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    // An archive that cannot be decompressed has the digest of the data before the error.
    let _ = decompress(archive).and_then(|mut reader| reader.read_to_end(&mut bytes));
    bytes
}

pub(super) type Builder = tar::Builder<Vec<u8>>;

/// Appends one entry; the name is written into the header directly, because the builder refuses invalid
/// names.
pub(super) fn add(builder: &mut Builder, kind: EntryType, name: &str, link: &str, mode: u32, content: &[u8]) {
    let mut header = tar::Header::new_gnu();
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(1000);
    header.set_gid(2000);
    header.set_mtime(86_400);
    header.set_size(content.len() as u64);
    if matches!(kind, EntryType::Char | EntryType::Block) {
        header.set_device_major(1).unwrap();
        header.set_device_minor(3).unwrap();
    }
    header.set_cksum();
    builder.append(&header, content).unwrap();
}

pub(super) fn archive(build: impl FnOnce(&mut Builder)) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    build(&mut builder);
    builder.into_inner().unwrap()
}

pub(super) fn file(builder: &mut Builder, name: &str, content: &[u8]) {
    add(builder, EntryType::Regular, name, "", 0o644, content);
}

#[test]
fn all_types_of_entries_are_unpacked_as_root() {
    let scratch = Scratch::new("kinds");
    let bytes = archive(|builder| {
        add(builder, EntryType::Directory, "bin/", "", 0o750, b"");
        add(builder, EntryType::Regular, "bin/su", "", 0o4755, b"program");
        add(builder, EntryType::Link, "bin/su2", "bin/su", 0o4711, b"");
        add(builder, EntryType::Symlink, "bin/link", "/bin/su", 0o777, b"");
        add(builder, EntryType::Char, "dev/null", "", 0o666, b"");
        add(builder, EntryType::Fifo, "run/pipe", "", 0o600, b"");
        file(builder, "etc/.wh.gone", b"");
        file(builder, "opt/.wh..wh..opq", b"");
    });
    let layer = scratch.unpack(&bytes, Limits::default()).unwrap();
    let status = |name: &str| layer.join(name).symlink_metadata().unwrap();
    assert_eq!(status("bin").permissions().mode() & 0o7777, 0o750);
    assert_eq!(status("bin").mtime(), 86_400, "set after its entries were created");
    let su = status("bin/su");
    assert_eq!(
        (su.permissions().mode() & 0o7777, su.uid(), su.gid(), su.nlink()),
        (0o4711, 1000, 2000, 2),
        "those of the hard link, which is later"
    );
    assert_eq!(std::fs::read_link(layer.join("bin/link")).unwrap(), PathBuf::from("/bin/su"));
    assert!(status("dev/null").file_type().is_char_device() && status("dev/null").rdev() == 0x103);
    assert!(status("run/pipe").file_type().is_fifo());
    assert!(status("etc/gone").file_type().is_char_device() && status("etc/gone").rdev() == 0);
    let mut opaque = [0; 1];
    rustix::fs::lgetxattr(layer.join("opt"), "trusted.overlay.opaque", &mut opaque).unwrap();
    assert_eq!(opaque, *b"y");
}

#[test]
fn the_compression_is_detected_by_its_magic_number_as_root() {
    let bytes = archive(|builder| file(builder, "a", b"content"));
    let gzip = |bytes: &[u8]| {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(bytes).unwrap();
        gzip.finish().unwrap()
    };
    let members = [gzip(&bytes[..1000]), gzip(b""), gzip(&bytes[1000..])].concat();
    let skippable = |magic: u8| [&[magic, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"any"].concat();
    let frame = zstd::encode_all(&bytes[..], 1).unwrap();
    let mut wide = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    wide.window_log(28).unwrap();
    wide.write_all(&bytes).unwrap();
    for (name, compressed) in [
        ("plain", bytes.clone()),
        ("gzip, three members", members.clone()),
        ("gzip and zeros", [&members[..], &[0; 1000]].concat()),
        ("gzip and garbage", [&members[..], b"\x1fgarbage"].concat()),
        ("zstd", frame.clone()),
        ("zstd after a skippable frame", [skippable(0x50), frame.clone(), skippable(0x5f)].concat()),
        ("zstd with a large window", wide.finish().unwrap()),
    ] {
        let scratch = Scratch::new("compressions");
        let layer = scratch
            .unpack(&compressed, Limits::default())
            .unwrap_or_else(|error| panic!("{name}: {error:?}"));
        assert_eq!(std::fs::read(layer.join("a")).unwrap(), b"content", "{name}");
        let mut read = Vec::new();
        decompress(OneByOne(&compressed)).unwrap().read_to_end(&mut read).unwrap();
        assert_eq!(read, bytes, "{name}");
    }
    for invalid in [[&members[..], &members[..20]].concat(), [&members[..], &[0x1f, 0x8b, 9]].concat()] {
        assert!(decompress(&invalid[..]).unwrap().read_to_end(&mut Vec::new()).is_err());
    }
}

/// An input that returns its bytes one by one, as a slow pipe does.
struct OneByOne<'a>(&'a [u8]);

impl Read for OneByOne<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let most = buffer.len().min(1);
        self.0.read(&mut buffer[..most])
    }
}

/// The bit is inherited by directories that are made in a directory that has it.
#[test]
fn implied_directories_have_no_set_group_id_bit_as_root() {
    let scratch = Scratch::new("set-group-id");
    let archive = archive(|builder| {
        add(builder, EntryType::Directory, "shared/", "", 0o2755, b"");
        file(builder, "shared/implied/file", b"");
    });
    let layer = scratch.unpack(&archive, Limits::default()).unwrap();
    let mode = |path: &str| layer.join(path).metadata().unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode("shared"), mode("shared/implied")), (0o2755, 0o755));
}

/// Checks the behaviour of containerd, also if the layers are unpacked in another order.
#[test]
fn implied_directories_get_the_attributes_of_lower_layers_as_root() {
    let scratch = Scratch::new("implied");
    let archives = [
        archive(|builder| {
            pax(builder, "SCHILY.xattr.user.boat", b"small");
            add(builder, EntryType::Directory, "home/", "", 0o751, b"");
            add(builder, EntryType::Directory, "home/alice/", "", 0o2700, b"");
            add(builder, EntryType::Directory, "srv/", "", 0o700, b"");
            add(builder, EntryType::Directory, "gone/", "", 0o700, b"");
        }),
        archive(|builder| {
            file(builder, "srv/.wh.x", b"");
            file(builder, ".wh.gone", b"");
            file(builder, "new/deep/file", b"");
        }),
        archive(|builder| {
            file(builder, "home/alice/file", b"");
            file(builder, "srv/file", b"");
            file(builder, "gone/file", b"");
            file(builder, "later/file", b"");
            add(builder, EntryType::Directory, "later/", "", 0o711, b"");
            file(builder, "new/deep/other", b"");
        }),
    ];
    let layers: Vec<Layer> = archives
        .iter()
        .map(|archive| digest_of(archive))
        .map(|digest| Layer {
            chain_id: digest_of(digest.as_bytes()),
            name: digest[7..39].into(),
            diff_id: digest,
        })
        .collect();
    let (blob, limits) = (scratch.root.join("blob"), Limits::default());
    let mut aside = Aside::new(&scratch.store, &layers, &limits);
    for (number, ready) in [(2, vec![]), (0, vec![0]), (1, vec![0, 1, 2])] {
        std::fs::write(&blob, &archives[number]).unwrap();
        aside.unpack(number, &blob, &mut |_| {}).unwrap();
        assert_eq!(aside.complete().unwrap(), ready, "layers with implied directories wait for lower layers");
    }
    aside.publish(&[0, 1, 2], []).unwrap();
    let about = |number: usize, name: &str| {
        let about = scratch.store.layer(&layers[number].name).join(name).symlink_metadata().unwrap();
        (about.permissions().mode() & 0o7777, about.uid(), about.gid())
    };
    assert_eq!(about(2, "home"), (0o751, 1000, 2000));
    assert_eq!(about(2, "home/alice"), (0o2700, 1000, 2000));
    assert_eq!((about(1, "srv"), about(2, "srv")), ((0o700, 1000, 2000), (0o700, 1000, 2000)));
    assert_eq!(about(2, "gone"), (0o755, 0, 0), "directories that a layer in between removed are ignored");
    assert_eq!((about(1, "new"), about(2, "new/deep")), ((0o755, 0, 0), (0o755, 0, 0)));
    assert_eq!(about(2, "later"), (0o711, 1000, 2000), "its own entry has precedence");
    let home = scratch.store.layer(&layers[2].name).join("home");
    assert_eq!(home.metadata().unwrap().mtime(), 86_400);
    let mut value = [0; 8];
    let length = rustix::fs::lgetxattr(&home, "user.boat", &mut value).unwrap();
    assert_eq!(&value[..length], b"small");
}

#[test]
fn a_layer_that_loses_its_outline_late_keeps_its_index_as_root() {
    let scratch = Scratch::new("late");
    let store = scratch.store.with_outlines(Some(Purpose::Neighbours));
    let archives = [
        archive(|builder| add(builder, EntryType::Directory, "home/", "", 0o700, b"")),
        // The directory gets the owner and the mode of the lower layer, after which neighbours' files below it cannot be read.
        archive(|builder| file(builder, "home/file", b"1")),
    ];
    let layers = archives.each_ref().map(|archive| {
        let diff_id = digest_of(archive);
        Layer { chain_id: digest_of(diff_id.as_bytes()), name: diff_id[7..39].into(), diff_id }
    });
    let (blob, limits) = (scratch.root.join("blob"), Limits::default());
    let mut aside = Aside::new(&store, &layers, &limits);
    for (number, layer) in layers.iter().enumerate() {
        std::fs::write(&blob, &archives[number]).unwrap();
        let index = scratch.root.join(format!("index-{number}"));
        std::fs::write(&index, b"index").unwrap();
        let opened = File::open(&blob).unwrap();
        let unpacked = VerifiedLayer::unpack(&store, layer, &limits, opened, &mut |_| {}).unwrap();
        assert_eq!(unpacked.needs_index(), number == 1, "only the second one has an implied directory");
        aside.add(number, unpacked.with_index(Some((index, store.place_of_index(&layer.name)))));
    }
    let ready = aside.complete().unwrap();
    aside.publish(&ready, []).unwrap();
    let kept = layers.each_ref().map(|layer| std::fs::read(store.index(&layer.name)).unwrap() == b"index");
    assert_eq!(kept, [false, true], "which layers have their index, and not an outline in its place");
    let left = std::fs::read_dir(scratch.root.join("images/parts")).unwrap().count();
    assert_eq!(left, 0);
}

#[test]
fn later_entries_replace_earlier_ones_of_any_type_as_root() {
    let scratch = Scratch::new("replace");
    let bytes = archive(|builder| {
        file(builder, "x/inner", b"1");
        file(builder, "x2", b"a file");
        add(builder, EntryType::Symlink, "x", "/etc", 0o777, b"");
        add(builder, EntryType::Directory, "x2", "", 0o755, b"");
        file(builder, "x2/below", b"2");
        add(builder, EntryType::Directory, "y/", "", 0o755, b"");
        add(builder, EntryType::Directory, "y/z/", "", 0o755, b"");
        file(builder, "y", b"3");
    });
    let layer = scratch.unpack(&bytes, Limits::default()).unwrap();
    assert!(layer.join("x").symlink_metadata().unwrap().is_symlink());
    assert_eq!(std::fs::read(layer.join("x2/below")).unwrap(), b"2");
}

#[test]
fn links_are_resolved_within_the_layer_as_root() {
    let scratch = Scratch::new("links");
    let outside = scratch.root.join("outside");
    std::fs::create_dir(&outside).unwrap();
    let bytes = archive(|builder| {
        add(builder, EntryType::Symlink, "abs", "/", 0o777, b"");
        add(builder, EntryType::Symlink, "up", "../../../../../../../..", 0o777, b"");
        file(builder, "abs/one", b"1");
        file(builder, "up/two", b"2");
    });
    let layer = scratch.unpack(&bytes, Limits::default()).unwrap();
    assert!(
        layer.join("one").is_file() && layer.join("two").is_file(),
        "both links end at the layer's own root"
    );
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
}

#[test]
fn malicious_archives_are_refused_and_leave_no_files_as_root() {
    let zeros = vec![0; 1 << 20];
    let small = Limits { layer_bytes_max: 1 << 16, layer_entries_max: 8, ..Limits::default() };
    let bomb = archive(|builder| file(builder, "zeros", &zeros));
    let cases: [(&str, Vec<u8>, &str); 9] = [
        (
            "hard link out",
            archive(|builder| add(builder, EntryType::Link, "a", "../../etc/passwd", 0, b"")),
            "no such file",
        ),
        (
            "unknown type",
            archive(|builder| add(builder, EntryType::new(b'Q'), "a", "", 0, b"")),
            "unknown type",
        ),
        (
            "a directory as hard link",
            archive(|builder| add(builder, EntryType::Link, "a", "b/..", 0, b"")),
            "directory",
        ),
        (
            "hard link to nothing",
            archive(|builder| add(builder, EntryType::Link, "a", "b", 0, b"")),
            "no such file",
        ),
        ("bomb", zstd::encode_all(&bomb[..], 1).unwrap(), "more bytes than the limit"),
        (
            "entries",
            archive(|builder| (0..9).for_each(|n| file(builder, &format!("f{n}"), b""))),
            "more than 8 entries",
        ),
        ("whiteout of nothing", archive(|builder| file(builder, "d/.wh.", b"")), "without a name"),
        ("truncated", archive(|builder| file(builder, "a", &zeros[..9000]))[..4096].to_vec(), "truncated"),
        ("no archive", vec![7; 2000], "archive:"),
    ];
    for (name, bytes, expected) in cases {
        let scratch = Scratch::new("hostile");
        let error = scratch.unpack(&bytes, small).expect_err(name);
        assert_eq!(error.kind, FailureKind::Invalid, "{name}: {error:?}");
        assert!(error.message.contains(expected), "{name}: expected {expected:?} in {error:?}");
        assert_eq!(scratch.layers(), Vec::<PathBuf>::new(), "{name}");
    }
}

#[test]
fn a_layer_with_a_wrong_digest_is_refused_as_root() {
    let scratch = Scratch::new("diff");
    let error = scratch.unpack_as(
        &archive(|builder| file(builder, "a", b"")),
        &digest_of(b"other"),
        &digest_of(b"a chain"),
        Limits::default(),
    );
    assert!(error.unwrap_err().message.contains("the image config requires"));
    assert_eq!(scratch.layers(), Vec::<PathBuf>::new());
}

#[test]
fn names_are_normalised_and_too_long_ones_refused() {
    for (name, expected) in [
        ("./a//b/./c/", "a/b/c"),
        ("/etc/passwd", "etc/passwd"),
        ("./", ""),
        ("a/../b", "b"),
        ("..", ""),
        ("../../a/../../b", "b"),
    ] {
        assert_eq!(clean(name.as_bytes()).expect("it is short"), expected.as_bytes(), "{name}");
    }
    assert!(clean(&[b'x'; 256]).is_err() && clean(&[b'/'; 5000]).is_err() && clean(b"a\0b").is_err());
}

#[test]
fn a_whiteout_hides_entries_of_lower_layers_only_as_root() {
    let scratch = Scratch::new("whiteouts");
    let bytes = archive(|builder| {
        file(builder, "a/file", b"mine");
        file(builder, "a/.wh.file", b"");
        add(builder, EntryType::Directory, "a/folder/", "", 0o755, b"");
        file(builder, "a/.wh.folder", b"");
        file(builder, "a/.wh.later", b"");
        file(builder, "a/later", b"mine");
        file(builder, "a/.wh.tree", b"");
        file(builder, "a/tree/leaf", b"mine");
        file(builder, "a/.wh.box", b"");
        add(builder, EntryType::Directory, "a/box/", "", 0o700, b"");
        file(builder, "gone/.wh..wh..opq", b"");
        add(builder, EntryType::Symlink, "gone", "/a", 0o777, b"");
        file(builder, ".wh.other", b"");
    });
    let layer = scratch.unpack(&bytes, Limits::default()).unwrap();
    for name in ["a/file", "a/later", "a/tree/leaf"] {
        assert_eq!(std::fs::read(layer.join(name)).unwrap(), b"mine", "{name}");
    }
    let is_opaque = |name: &str| crate::users::is_opaque(&layer.join(name)).unwrap();
    for (name, expected) in [("a/folder", true), ("a/tree", true), ("a/box", true), ("a", false), ("", false)]
    {
        assert_eq!(is_opaque(name), expected, "{name}");
    }
    assert!(layer.join("other").symlink_metadata().unwrap().file_type().is_char_device());
}

/// Regression: `ls` in a container showed the name that a whiteout of the lowest layer should hide, in a directory that only
/// this layer has.
#[test]
fn the_lowest_layer_has_no_whiteouts_as_root() {
    let scratch = Scratch::new("lowest");
    let bytes = archive(|builder| {
        file(builder, "a/.wh.gone", b"");
        file(builder, ".wh.gone", b"");
        file(builder, "a/file", b"mine");
        file(builder, "a/.wh.file", b"");
    });
    let digest = digest_of(&bytes);
    let layer = scratch.unpack_as(&bytes, &digest, &digest, Limits::default()).unwrap();
    let names = |path: &Path| -> Vec<_> {
        std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    };
    assert_eq!((names(&layer), names(&layer.join("a"))), (vec!["a".into()], vec!["file".into()]));
}

/// Appends a PAX header with one record, which applies to the next entry.
pub(super) fn pax(builder: &mut Builder, key: &str, value: &[u8]) {
    records(builder, &[(key, value)]);
}

/// Appends a PAX header, which applies to the next entry.
pub(super) fn records(builder: &mut Builder, records: &[(&str, &[u8])]) {
    let mut body = Vec::new();
    for (key, value) in records {
        let rest = [b" ", key.as_bytes(), b"=", value, b"\n"].concat();
        let length = (rest.len()..).find(|length| *length == rest.len() + length.to_string().len());
        body.extend_from_slice(length.unwrap().to_string().as_bytes());
        body.extend_from_slice(&rest);
    }
    add(builder, EntryType::XHeader, "pax", "", 0o644, &body);
}

/// An extended attribute of a file in a layer.
pub(super) fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = [0; 64];
    let length = rustix::fs::lgetxattr(path, name, &mut value[..]).ok()?;
    Some(value[..length].to_vec())
}

#[test]
fn extended_attributes_are_set_on_all_types_except_those_of_overlayfs_as_root() {
    let scratch = Scratch::new("xattrs");
    let bytes = archive(|builder| {
        for (kind, name) in
            [(EntryType::Regular, "file"), (EntryType::Directory, "folder"), (EntryType::Symlink, "link")]
        {
            // User attributes are set on files and directories only.
            records(
                builder,
                &[
                    ("SCHILY.xattr.security.boat", b"small\nand\0round"),
                    ("SCHILY.xattr.user.boat", b""),
                    ("SCHILY.xattr.trusted.boat", b"x"),
                    ("SCHILY.xattr.trusted.overlay.redirect", b"/etc"),
                ],
            );
            add(builder, kind, name, if kind == EntryType::Symlink { "/etc/passwd" } else { "" }, 0o600, b"");
        }
        pax(builder, "SCHILY.xattr.security.boat", b"removed");
        file(builder, "folder/twice", b"");
        add(builder, EntryType::Symlink, "folder/twice", "file", 0o777, b"");
    });
    let layer = scratch.unpack(&bytes, Limits::default()).unwrap();
    for name in ["file", "folder", "link"] {
        let get = |key: &str| xattr(&layer.join(name), key);
        assert_eq!(get("security.boat").as_deref(), Some(&b"small\nand\0round"[..]), "{name}");
        assert_eq!(get("user.boat"), (name != "link").then(Vec::new), "{name}");
        assert_eq!((get("trusted.boat"), get("trusted.overlay.redirect")), (None, None), "{name}");
    }
    assert_eq!(xattr(&layer.join("folder/twice"), "security.boat"), None);
}

#[test]
fn archives_above_the_limits_are_refused_and_leave_no_files_as_root() {
    let many = |count: usize, make: &dyn Fn(&mut Builder, usize)| {
        archive(|builder| (0..count).for_each(|number| make(builder, number)))
    };
    let deep = format!("{}f", "d/".repeat(2040));
    let small = Limits { layer_entries_max: 5000, ..Limits::default() };
    let cases: [(&str, Vec<u8>, &str); 5] = [
        (
            "a header of 4 MiB",
            archive(|builder| pax(builder, "comment", &vec![b'x'; 4 << 20])),
            "metadata of an entry is too long",
        ),
        (
            "headers without end",
            many(3000, &|builder, _| add(builder, EntryType::GNULongName, "x", "", 0, &[b'n'; 1000])),
            "archive:",
        ),
        (
            "an attribute that no file system takes",
            archive(|builder| {
                pax(builder, "SCHILY.xattr.user.big", &vec![b'x'; 1 << 19]);
                file(builder, "a", b"");
            }),
            "entry",
        ),
        (
            "files without end",
            many(5001, &|builder, number| file(builder, &number.to_string(), b"")),
            "more than",
        ),
        (
            "a link to itself",
            archive(|builder| {
                add(builder, EntryType::Symlink, "loop", "loop", 0o777, b"");
                file(builder, "loop/x", b"");
            }),
            "entry",
        ),
    ];
    for (name, bytes, expected) in cases {
        let scratch = Scratch::new("floods");
        let error = scratch.unpack(&bytes, small).expect_err(name);
        assert!(error.message.contains(expected), "{name}: expected {expected:?} in {error:?}");
        assert_eq!(scratch.layers(), Vec::<PathBuf>::new(), "{name}");
    }
    // The maximum depth of a path can be unpacked and removed.
    let scratch = Scratch::new("deep");
    let bytes = archive(|builder| {
        pax(builder, "path", deep.as_bytes());
        file(builder, "short", b"deep");
    });
    let layer = scratch.unpack(&bytes, small).unwrap();
    assert!(layer.join("d/d/d/d").is_dir());
    coracle_trees::remove::run(std::slice::from_ref(&layer)).unwrap();
    assert!(!layer.exists());
}

/// Runs the seeds and findings of the fuzz target.
#[test]
fn the_corpus_of_the_fuzz_target_causes_no_panic_as_root() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fuzz/corpus/layer");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).expect("a corpus").flatten() {
        let input = std::fs::read(entry.path()).expect("a file");
        let scratch = Scratch::new("corpus");
        // Either refused or unpacked, but always within the layer.
        let _ = scratch.unpack(&input[1..], Limits::default());
        let outside = std::fs::read_dir(&scratch.root).expect("it lists").count();
        assert_eq!(outside, 3, "images, layers and the blob: {:?}", entry.path());
        count += 1;
    }
    assert!(count >= 6);
}
