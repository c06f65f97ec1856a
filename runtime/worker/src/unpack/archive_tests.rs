//! Archives that approximate readers unpack otherwise than Go's archive/tar and containerd do: the trees were compared with
//! containerd's. The rules of the format itself are tested in `coracle_tar`.

use super::tests::{Builder, Scratch, add, archive, file, pax, records, xattr};
use super::*;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use tar::EntryType;

fn mode(path: &Path) -> u32 {
    path.symlink_metadata().unwrap().permissions().mode() & 0o7777
}

#[test]
fn capabilities_with_the_byte_of_a_line_break_are_set_as_root() {
    let scratch = Scratch::new("capabilities");
    let capability = [1, 0, 0, 2, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x0a, 0, 0, 0, 0, 0];
    let bytes = archive(|builder| {
        pax(builder, "SCHILY.xattr.security.capability", &capability);
        add(builder, EntryType::Regular, "tool", "", 0o755, b"x");
    });
    let layer = scratch.unpack(&bytes, Limits::default()).unwrap();
    assert_eq!(xattr(&layer.join("tool"), "security.capability").as_deref(), Some(&capability[..]));
}

/// A comment hid the name of a whiteout in it, and a link with a size the file after it.
#[test]
fn no_record_and_no_size_hides_another_entry_as_root() {
    let scratch = Scratch::new("hidden");
    let bytes = archive(|builder| {
        pax(builder, "comment", b"x\n22 path=etc/.wh.passwd\n");
        file(builder, "var/.wh.a", b"");
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(EntryType::Symlink);
        header.set_path("link").unwrap();
        header.set_link_name("target").unwrap();
        header.set_size(1024);
        header.set_cksum();
        builder.get_mut().extend_from_slice(header.as_bytes());
        file(builder, "file", b"content");
    });
    let layer = scratch.unpack(&bytes, Limits::default()).unwrap();
    assert!(!layer.join("etc").exists());
    assert!(layer.join("var/a").symlink_metadata().unwrap().file_type().is_char_device());
    assert_eq!(std::fs::read(layer.join("file")).unwrap(), b"content");
}

#[test]
fn sparse_files_have_holes_as_root() {
    const MIB: u64 = 1 << 20;
    let scratch = Scratch::new("sparse");
    let map = format!("0,2,{},1,{},0", 3 * MIB, 5 * MIB);
    let size = (5 * MIB).to_string();
    let mut body = format!("3\n{}\n", map.replace(',', "\n")).into_bytes();
    body.resize(512, 0);
    body.extend_from_slice(b"abc");
    let pairs: Vec<&str> = map.split(',').collect();
    let keys = ["GNU.sparse.offset", "GNU.sparse.numbytes"];
    let bytes = archive(|builder: &mut Builder| {
        let mut zero = vec![("GNU.sparse.size", size.as_bytes()), ("GNU.sparse.numblocks", b"3")];
        zero.extend(pairs.iter().enumerate().map(|(at, value)| (keys[at % 2], value.as_bytes())));
        records(builder, &zero);
        file(builder, "zero", b"abc");
        records(
            builder,
            &[
                ("GNU.sparse.size", size.as_bytes()),
                ("GNU.sparse.numblocks", b"3"),
                ("GNU.sparse.map", map.as_bytes()),
                ("GNU.sparse.name", b"first"),
            ],
        );
        file(builder, "GNUSparseFile.0/first", b"abc");
        records(
            builder,
            &[
                ("GNU.sparse.major", b"1"),
                ("GNU.sparse.minor", b"0"),
                ("GNU.sparse.realsize", size.as_bytes()),
                ("GNU.sparse.name", b"second"),
            ],
        );
        file(builder, "GNUSparseFile.0/second", &body);
    });
    let layer = scratch.unpack(&bytes, Limits::default()).unwrap();
    for name in ["zero", "first", "second"] {
        let content = std::fs::read(layer.join(name)).unwrap();
        assert_eq!(content.len() as u64, 5 * MIB, "{name}");
        let ends = (&content[..2], content[3 * MIB as usize]);
        assert_eq!(ends, (&b"ab"[..], b'c'), "{name}");
        assert_eq!(content.iter().filter(|byte| **byte != 0).count(), 3, "{name}");
        let about = layer.join(name).metadata().unwrap();
        assert!(about.blocks() * 512 < MIB, "{name} has no holes: {} blocks", about.blocks());
    }
    assert!(!layer.join("GNUSparseFile.0").exists());
    let small = Limits { layer_bytes_max: MIB, ..Limits::default() };
    let scratch = Scratch::new("sparse-limit");
    assert!(scratch.unpack(&bytes, small).unwrap_err().message.contains(TOO_LONG));
}

#[test]
fn the_last_of_several_entries_of_a_directory_counts_as_root() {
    let scratch = Scratch::new("directories");
    let bytes = archive(|builder| {
        for (mode, time) in [(0o755, "1.5"), (0o1777, "2.25")] {
            for name in ["tmp/", "link/d/"] {
                pax(builder, "mtime", time.as_bytes());
                add(builder, EntryType::Directory, name, "", mode, b"");
            }
            if mode == 0o755 {
                file(builder, "tmp/file", b"");
                add(builder, EntryType::Symlink, "link", "real", 0o777, b"");
                file(builder, "real/d/file", b"");
            }
        }
    });
    let layer = scratch.unpack(&bytes, Limits::default()).unwrap();
    for name in ["tmp", "real/d"] {
        let about = layer.join(name).metadata().unwrap();
        assert_eq!((mode(&layer.join(name)), about.uid()), (0o1777, 1000), "{name}");
        assert_eq!((about.mtime(), about.mtime_nsec()), (2, 250_000_000), "{name}");
    }
    assert!(layer.join("tmp/file").exists());
}

#[test]
fn times_have_fractions_and_the_archive_may_be_old_as_root() {
    let scratch = Scratch::new("times");
    let bytes = archive(|builder| {
        records(builder, &[("mtime", b"1700000000.123456789"), ("atime", b"1700000001")]);
        file(builder, "new", b"");
        pax(builder, "mtime", b"-5");
        file(builder, "old", b"");
        // In the format of v7 a slash at the end makes a directory.
        let mut header = tar::Header::new_old();
        header.set_path("empty/").unwrap();
        header.as_mut_bytes()[156] = 0;
        header.set_mode(0o750);
        header.set_cksum();
        builder.append(&header, &b""[..]).unwrap();
    });
    let layer = scratch.unpack(&bytes, Limits::default()).unwrap();
    let about = layer.join("new").metadata().unwrap();
    assert_eq!(
        (about.mtime(), about.mtime_nsec(), about.atime()),
        (1_700_000_000, 123_456_789, 1_700_000_001)
    );
    assert_eq!(layer.join("old").metadata().unwrap().mtime(), 0);
    assert!(layer.join("empty").is_dir() && mode(&layer.join("empty")) == 0o750);
}

#[test]
fn parents_are_resolved_within_the_layer_as_root() {
    let scratch = Scratch::new("parents");
    let bytes = archive(|builder| {
        file(builder, "a/../../b", b"b");
        add(builder, EntryType::Link, "hard", "none/../a/../b", 0o600, b"");
        add(builder, EntryType::Symlink, "run", "/var/deep/run", 0o777, b"");
        file(builder, "run/f", b"f");
        add(builder, EntryType::Symlink, "up", "../../other/./x", 0o777, b"");
        file(builder, "up/sub/g", b"g");
        add(builder, EntryType::Link, "run/h", "up/sub/g", 0o640, b"");
        add(builder, EntryType::Symlink, "alias", "b", 0o777, b"");
        add(builder, EntryType::Link, "alias2", "alias", 0o640, b"");
        add(builder, EntryType::Directory, "./", "", 0o700, b"");
        add(builder, EntryType::Directory, "a/..", "", 0o700, b"");
    });
    let layer = scratch.unpack(&bytes, Limits::default()).unwrap();
    let read = |name: &str| std::fs::read(layer.join(name)).unwrap();
    assert_eq!((read("b"), read("hard"), read("var/deep/run/f")), (b"b".into(), b"b".into(), b"f".into()));
    assert_eq!((read("other/x/sub/g"), read("var/deep/run/h")), (b"g".into(), b"g".into()));
    assert!(layer.join("alias2").is_symlink(), "a link to the link");
    assert_eq!((mode(&layer.join("b")), mode(&layer.join("other/x/sub/g"))), (0o600, 0o640));
    assert!(!layer.join("a").exists() && mode(&layer) != 0o700, "the root's own attributes are ignored");
    let replaced = archive(|builder| {
        add(builder, EntryType::Symlink, "link", "real", 0o777, b"");
        file(builder, "link/d/.wh..wh..opq", b"");
        file(builder, "link/.wh..wh..opq", b"");
        pax(builder, "SCHILY.xattr.security.boat", b"old");
        file(builder, "real/f", b"");
        file(builder, "link/f", b"");
        file(builder, "link/d", b"");
        add(builder, EntryType::Directory, "link", "", 0o755, b"");
    });
    let scratch = Scratch::new("replaced");
    let layer = scratch.unpack(&replaced, Limits::default()).unwrap();
    let is_opaque = |name: &str| crate::users::is_opaque(&layer.join(name)).unwrap();
    assert!(is_opaque("real") && !is_opaque("link"), "the mark stays where the link led");
    assert!(layer.join("real/d").is_file() && xattr(&layer.join("real/f"), "security.boat").is_none());
    let endless = archive(|builder| {
        add(builder, EntryType::Symlink, "one", "two/x", 0o777, b"");
        add(builder, EntryType::Symlink, "two", "one/y", 0o777, b"");
        file(builder, "one/f", b"");
    });
    assert!(scratch.unpack(&endless, Limits::default()).unwrap_err().message.contains("one/f"));
}

/// Regression: the header of a hard link had no effect on its file, and a target with a slash at its end was refused.
#[test]
fn hard_links_give_their_attributes_to_their_files_as_root() {
    let scratch = Scratch::new("hard-links");
    let plain = |builder: &mut Builder, name: &str| file(builder, name, b"x");
    let link = |builder: &mut Builder, name: &str, target: &str| {
        pax(builder, "SCHILY.xattr.user.a", b"value");
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(EntryType::Link);
        header.set_path(name).unwrap();
        header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_mode(0o4750);
        header.set_uid(5);
        header.set_gid(6);
        header.set_mtime(7);
        header.set_size(0);
        header.set_cksum();
        builder.append(&header, &b""[..]).unwrap();
    };
    let bytes = archive(|builder| {
        plain(builder, "f");
        link(builder, "h", "f");
        plain(builder, "g");
        link(builder, "slash", "g/");
        add(builder, EntryType::Symlink, "to-g", "g", 0o777, b"");
        link(builder, "followed", "to-g//.");
        link(builder, "beside", "f/../g");
        link(builder, "not-followed", "to-g");
    });
    let layer = scratch.unpack(&bytes, Limits::default()).unwrap();
    for (name, links) in [("f", 2), ("h", 2), ("g", 4), ("slash", 4), ("followed", 4), ("beside", 4)] {
        let about = layer.join(name).symlink_metadata().unwrap();
        let found = (about.uid(), about.gid(), about.mode() & 0o7777, about.mtime(), about.nlink());
        assert_eq!(found, (5, 6, 0o4750, 7, links), "{name}");
        assert_eq!(xattr(&layer.join(name), "user.a").unwrap(), b"value", "{name}");
    }
    let about = layer.join("not-followed").symlink_metadata().unwrap();
    assert_eq!((about.is_symlink(), about.uid(), about.nlink()), (true, 5, 2));
    for target in ["f/x/", "no/", ".", "/", ".."] {
        let bytes = archive(|builder| {
            plain(builder, "f");
            link(builder, "h", target);
        });
        assert!(scratch.unpack(&bytes, Limits::default()).is_err(), "{target:?}");
    }
}
