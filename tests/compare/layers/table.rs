//! The hand-made cases: each kind of entry that some writer of archives makes, and those that none should.

use crate::archive::{Archive, End, Format, Member, Packing};

/// Name and layers.
type Case = (String, Vec<Archive>);

const CAPABILITY: &[u8] = b"\x01\0\0\x02\0\x0a\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    cases.extend(packings());
    cases.extend(ends());
    let one = |(name, members): (&str, Vec<Member>)| (name.to_owned(), vec![Archive::of(members)]);
    for list in [formats(), numbers(), names(), parents(), records(), sparse(), kinds(), repeated(), links()]
    {
        cases.extend(list.into_iter().map(one));
    }
    cases.extend(
        two_layers()
            .into_iter()
            .map(|(name, layers)| (name.to_owned(), layers.into_iter().map(Archive::of).collect::<Vec<_>>())),
    );
    cases
}

fn packings() -> Vec<Case> {
    let members = || vec![Member::directory("a"), Member::file("a/f", vec![b'x'; 3000])];
    let of = |packing: Packing| {
        let layer = Archive { packing, ..Archive::of(members()) };
        // gzip(1) warns of them.
        let has_rest = matches!(packing, Packing::GzipZeros | Packing::GzipGarbage);
        let word = if has_rest { "tolerated, " } else { "" };
        (format!("{word}packing {packing:?}"), vec![layer])
    };
    let mut cases: Vec<Case> = Packing::ALL.map(of).into();
    // Windows of 128, 512 and 576 MiB, 1 GiB, and the largest one.
    let windows = [0x88, 0x98, 0x99, 0xa0, 0xff].map(Packing::ZstdWindow);
    cases.extend(windows.map(of));
    cases
}

fn ends() -> Vec<Case> {
    let all = [
        End::TwoBlocks,
        End::OneBlock,
        End::Missing,
        End::Padded(10_240),
        End::Padded(1 << 20),
        End::Trailing,
    ];
    let of = |end: End| {
        (format!("end {end:?}"), vec![Archive { end, ..Archive::of(vec![Member::file("f", "x")]) }])
    };
    let empty = |end: End| {
        let word = if end == End::Missing { "tolerated, " } else { "" };
        (format!("{word}empty, end {end:?}"), vec![Archive { end, ..Archive::of(Vec::new()) }])
    };
    all.map(of).into_iter().chain(all.map(empty)).collect()
}

fn formats() -> Vec<(&'static str, Vec<Member>)> {
    let v7 = |member: Member| member.format(Format::V7);
    let long = "n".repeat(150);
    let deep = format!("{}/{}", "d".repeat(120), "e".repeat(120));
    vec![
        ("v7 directory", vec![v7(Member::new(0, "d/")), v7(Member::new(0, "d/f"))]),
        ("v7 file", vec![v7(Member { data: b"x".to_vec(), ..Member::new(0, "f") })]),
        ("type NUL with a slash in ustar", vec![Member::new(0, "d/"), Member::file("d/f", "x")]),
        ("type 0 with a slash", vec![Member::file("d/", "")]),
        ("type 0 with a slash and data", vec![Member::file("d/", "x")]),
        ("GNU directory", vec![Member::directory("d/").format(Format::Gnu)]),
        ("ustar prefix", vec![Member { prefix: b"pre/fix".to_vec(), ..Member::file("f", "x") }]),
        (
            "prefix of GNU is none",
            vec![Member { prefix: b"pre/fix".to_vec(), ..Member::file("f", "x").format(Format::Gnu) }],
        ),
        ("name of 100 bytes", vec![Member::file(&"n".repeat(100), "x")]),
        ("long name", vec![Member { long_name: Some(long.clone().into()), ..Member::file("short", "x") }]),
        (
            "long name twice",
            vec![
                Member { long_name: Some(b"first".to_vec()), ..Member::new(b'L', "././@LongLink") }.size(0),
                Member { long_name: Some(b"second".to_vec()), ..Member::file("short", "x") },
            ],
        ),
        (
            "long name with components",
            vec![Member { long_name: Some(deep.into()), ..Member::file("s", "x") }],
        ),
        ("long link", vec![Member { long_link: Some(long.clone().into()), ..Member::symlink("l", "short") }]),
        (
            "long name and PAX path",
            vec![Member { long_name: Some(b"gnu".to_vec()), ..Member::file("s", "x") }.pax("path", "pax")],
        ),
        ("component of 256 bytes", vec![Member::file("s", "x").pax("path", "n".repeat(256))]),
        ("path of 5000 bytes", vec![Member::file("s", "x").pax("path", "abcd/".repeat(1000))]),
        ("empty name", vec![Member::file("", "x")]),
        ("wrong checksum", vec![Member { patches: vec![(157, b"x".to_vec())], ..Member::file("f", "x") }]),
        ("magic of star", vec![Member { patches: vec![(508, b"tar\0".to_vec())], ..Member::file("f", "x") }]),
        ("unknown magic", vec![Member { patches: vec![(257, b"other".to_vec())], ..Member::file("f", "x") }]),
        (
            "version of ustar missing",
            vec![Member { patches: vec![(263, b"\0\0".to_vec())], ..Member::file("f", "x") }],
        ),
    ]
}

fn numbers() -> Vec<(&'static str, Vec<Member>)> {
    let file = || Member::file("f", "x");
    let patched = |at: usize, bytes: &[u8]| Member { patches: vec![(at, bytes.to_vec())], ..file() };
    let mut cases = vec![
        ("setuid", vec![file().mode(0o4755)]),
        ("setgid", vec![file().mode(0o2755)]),
        ("sticky", vec![Member::directory("d").mode(0o1777)]),
        (
            "setgid directory with a file",
            vec![
                Member { gid: 55, ..Member::directory("d").mode(0o2775) },
                Member::file("d/f", "x"),
                Member::directory("d/e"),
            ],
        ),
        ("setuid and owner", vec![Member { uid: 1000, gid: 1000, ..file().mode(0o6755) }]),
        ("mode 0", vec![file().mode(0), Member::directory("d").mode(0), Member::file("d/f", "x")]),
        ("mode with the type's bits", vec![file().mode(0o100_644), Member::directory("d").mode(0o040_755)]),
        ("mode with another type's bits", vec![file().mode(0o040_644)]),
        ("mode 0177777", vec![file().mode(0o177_777)]),
        ("symlink mode", vec![Member::symlink("l", "f").mode(0o600), file()]),
        ("uid 65536", vec![Member { uid: 65_536, gid: 65_537, ..file() }]),
        ("uid 2000000", vec![Member { uid: 2_000_000, gid: 2_000_001, ..file() }]),
        ("uid 3000000 in base 256", vec![Member { uid: 3_000_000, gid: 3_000_001, ..file() }.base256()]),
        ("uid 4294967294", vec![Member { uid: 4_294_967_294, gid: 4_294_967_294, ..file() }.base256()]),
        ("uid 4294967295", vec![Member { uid: 4_294_967_295, ..file() }.base256()]),
        ("uid 4294967296", vec![Member { uid: 4_294_967_296, ..file() }.base256()]),
        ("uid 8589934591", vec![Member { uid: 8_589_934_591, ..file() }.base256()]),
        ("uid -1", vec![Member { uid: -1, ..file() }.base256()]),
        ("uid -2", vec![Member { uid: -2, gid: -2, ..file() }.base256()]),
        ("mtime 0", vec![file().mtime(0)]),
        ("mtime -1", vec![file().mtime(-1)]),
        ("mtime of 1901", vec![file().mtime(-2_147_483_648)]),
        ("mtime of 1800", vec![file().mtime(-5_364_662_400)]),
        ("mtime of 2100", vec![file().mtime(4_102_444_800)]),
        ("mtime of 2500", vec![file().mtime(16_725_225_600)]),
        ("mtime beyond 64 bits of nanoseconds", vec![file().mtime(1 << 40).base256()]),
        ("mtime of a directory", vec![Member::directory("d").mtime(5), Member::file("d/f", "x")]),
        ("mtime of a symlink", vec![Member::symlink("l", "x").mtime(5)]),
        ("mtime of 0 for a directory", vec![Member::directory("d").mtime(0), Member::file("d/f", "x")]),
        ("all in base 256", vec![Member { uid: 5, gid: 6, ..file() }.base256()]),
        ("number with spaces", vec![patched(108, b"   1750 ")]),
        ("number without an end", vec![patched(108, b"00001750")]),
        ("number that is empty", vec![patched(108, b"\0\0\0\0\0\0\0\0"), Member::directory("d")]),
        ("number that is none", vec![patched(108, b"hello\0\0\0")]),
        ("number with an 8", vec![patched(108, b"0000018\0")]),
        ("negative octal number", vec![patched(108, b"-000001\0")]),
        ("number with garbage after it", vec![patched(108, b"0000017x")]),
        ("negative size", vec![file().size(-1)]),
        ("mode in base 256 beyond 32 bits", vec![file().mode(1 << 33 | 0o644).base256()]),
        ("device numbers", vec![Member::device(b'3', "null", 1, 3), Member::device(b'4', "disk", 8, 1)]),
        ("device with a big minor", vec![Member::device(b'3', "c", 255, 1_048_575)]),
        ("device with a big major", vec![Member::device(b'3', "c", 4095, 1)]),
        ("device with a major beyond", vec![Member::device(b'3', "c", 4096, 1)]),
        ("device with a minor beyond", vec![Member::device(b'3', "c", 1, 1_048_576)]),
        ("device 0 0", vec![Member::device(b'3', "c", 0, 0)]),
        ("device 0 0 over a file", vec![Member::file("c", "x"), Member::device(b'3', "c", 0, 0)]),
        ("block device 0 0", vec![Member::device(b'4', "b", 0, 0)]),
        ("device in v7", vec![Member::device(b'3', "c", 1, 3).format(Format::V7)]),
        ("FIFO", vec![Member::new(b'6', "fifo").mode(0o622)]),
    ];
    for (name, kind) in [
        ("size of a hard link", b'1'),
        ("size of a symlink", b'2'),
        ("size of a device", b'3'),
        ("size of a directory", b'5'),
        ("size of a FIFO", b'6'),
    ] {
        let link = b"f".to_vec();
        cases.push((
            name,
            vec![file(), Member { link, ..Member::new(kind, "s") }.size(1000), Member::file("z", "z")],
        ));
    }
    cases
}

fn names() -> Vec<(&'static str, Vec<Member>)> {
    let dir = || Member::directory("d");
    let file = |name: &str| Member::file(name, "x");
    vec![
        ("name ./", vec![Member::directory("./").mode(0o700), Member::directory("./d/"), file("./d/f")]),
        ("name .", vec![Member { uid: 7, ..Member::directory(".").mode(0o711) }]),
        ("name /", vec![Member { uid: 7, ..Member::directory("/").mode(0o711) }]),
        ("name . that is a file", vec![file(".")]),
        ("name . that is a symlink", vec![Member::symlink(".", "x"), file("f")]),
        ("name with //", vec![dir(), file("d//f")]),
        ("name with /./", vec![dir(), file("d/./f")]),
        ("name with .. inside", vec![dir(), file("d/../f")]),
        ("name with .. of a missing parent", vec![file("no/../f")]),
        ("name that begins with ..", vec![file("../f")]),
        ("name that begins with /..", vec![file("/../f")]),
        ("name that ends with ..", vec![dir(), Member::directory("d/..")]),
        ("absolute name", vec![dir(), file("/d/f")]),
        ("absolute name //", vec![file("//f")]),
        ("name with a slash at the end", vec![Member::symlink("l/", "d"), dir()]),
        ("name with spaces and controls", vec![file(" a\tb\nc\r\x07 ")]),
        ("name of UTF-8", vec![file("größe-日本")]),
        ("name that is not UTF-8", vec![Member::new(b'0', b"a\xff\xfeb")]),
        ("name that is not UTF-8 by PAX", vec![file("s").pax("path", b"a\xff\xfeb")]),
        ("name with a backslash and a colon", vec![file("a\\b:c,d")]),
        ("name with a NUL by PAX", vec![file("s").pax("path", b"a\0b")]),
        ("name with a NUL by GNU", vec![Member { long_name: Some(b"a\0b".to_vec()), ..file("s") }]),
        ("name ...", vec![file("..."), file("..a")]),
    ]
}

fn parents() -> Vec<(&'static str, Vec<Member>)> {
    let file = |name: &str| Member::file(name, "x");
    vec![
        ("missing parents", vec![file("a/b/c/f")]),
        (
            "missing parents, later made",
            vec![file("a/b/f"), Member { uid: 5, ..Member::directory("a").mode(0o700) }],
        ),
        ("parent is a file", vec![file("a"), file("a/f")]),
        ("parent is a FIFO", vec![Member::new(b'6', "a"), file("a/f")]),
        ("parent is a symlink", vec![Member::directory("d"), Member::symlink("l", "d"), file("l/f")]),
        (
            "parent is an absolute symlink",
            vec![Member::directory("d"), Member::symlink("l", "/d"), file("l/f")],
        ),
        ("parent is a dangling symlink", vec![Member::symlink("l", "to/there"), file("l/f")]),
        ("parent is a dangling absolute symlink", vec![Member::symlink("l", "/to/there"), file("l/f")]),
        (
            "parent is a symlink with ..",
            vec![Member::directory("d"), Member::symlink("d/l", "../e"), file("d/l/f")],
        ),
        ("parent is a symlink out of the root", vec![Member::symlink("l", "../../../e"), file("l/f")]),
        ("parent is a symlink to itself", vec![Member::symlink("l", "l"), file("l/f")]),
        ("parent is a symlink to a file", vec![file("t"), Member::symlink("l", "t"), file("l/f")]),
        (
            "parent is a chain of symlinks",
            vec![
                Member::symlink("a", "b"),
                Member::symlink("b", "c"),
                Member::symlink("c", "d/e"),
                file("a/f"),
            ],
        ),
        (
            "directory over a symlink to a directory",
            vec![
                Member::directory("d"),
                Member::symlink("l", "d"),
                Member::directory("l").mode(0o700),
                file("l/f"),
            ],
        ),
        (
            "directory over a dangling symlink",
            vec![Member::symlink("l", "no"), Member::directory("l"), file("l/f")],
        ),
        (
            "directory with a slash over a symlink",
            vec![Member::directory("d"), Member::symlink("l", "d"), Member::directory("l/").mode(0o700)],
        ),
    ]
}

fn records() -> Vec<(&'static str, Vec<Member>)> {
    let file = || Member::file("f", "content");
    let raw = |body: &[u8]| vec![Member { data: body.to_vec(), ..Member::new(b'x', "pax") }, file()];
    vec![
        ("PAX path", vec![file().pax("path", "by/pax")]),
        ("PAX path with a slash", vec![Member::new(b'0', "f").pax("path", "by-pax/")]),
        ("PAX path empty", vec![file().pax("path", "")]),
        ("PAX path twice", vec![file().pax("path", "one").pax("path", "two")]),
        ("PAX path then empty", vec![file().pax("path", "one").pax("path", "")]),
        ("PAX linkpath", vec![Member::symlink("l", "header").pax("linkpath", "by-pax")]),
        ("PAX linkpath empty", vec![Member::symlink("l", "header").pax("linkpath", "")]),
        ("PAX linkpath of a hard link", vec![file(), Member::hard_link("h", "no").pax("linkpath", "f")]),
        ("PAX size", vec![file().size(0).pax("size", "7"), Member::file("z", "z")]),
        ("PAX size of a directory", vec![Member::directory("d").pax("size", "512"), Member::file("z", "z")]),
        ("PAX size empty", vec![file().pax("size", "")]),
        ("PAX size negative", vec![file().pax("size", "-1")]),
        ("PAX size no number", vec![file().pax("size", "x")]),
        ("PAX size with a plus", vec![file().pax("size", "+7")]),
        ("PAX size in hex", vec![file().pax("size", "0x7")]),
        ("PAX uid and gid", vec![file().pax("uid", "1234567").pax("gid", "7654321")]),
        ("PAX uid negative", vec![file().pax("uid", "-1")]),
        ("PAX uid -2", vec![file().pax("uid", "-2")]),
        ("PAX uid beyond 32 bits", vec![file().pax("uid", "4294967296")]),
        ("PAX uid empty", vec![Member { uid: 9, ..file() }.pax("uid", "")]),
        ("PAX uid no number", vec![file().pax("uid", "root")]),
        ("PAX uname alone", vec![file().pax("uname", "alice").pax("gname", "crew")]),
        ("PAX mtime", vec![file().pax("mtime", "1600000000.123456789")]),
        ("PAX mtime with many digits", vec![file().pax("mtime", "1600000000.1234567899999")]),
        ("PAX mtime with one digit", vec![file().pax("mtime", "1600000000.5")]),
        ("PAX mtime with a bare dot", vec![file().pax("mtime", "1600000000.")]),
        ("PAX mtime that begins with a dot", vec![file().pax("mtime", ".5")]),
        ("PAX mtime negative", vec![file().pax("mtime", "-1.5")]),
        ("PAX mtime -0.5", vec![file().pax("mtime", "-0.5")]),
        ("PAX mtime in exponents", vec![file().pax("mtime", "1e9")]),
        ("PAX mtime empty", vec![file().pax("mtime", "")]),
        ("PAX mtime no number", vec![file().pax("mtime", "now")]),
        ("PAX mtime of a directory", vec![Member::directory("d").pax("mtime", "1600000000.25")]),
        ("PAX mtime of a symlink", vec![Member::symlink("l", "x").pax("mtime", "1600000000.25")]),
        ("PAX mtime of 9999", vec![file().pax("mtime", "253402300799")]),
        ("PAX atime after mtime", vec![file().pax("mtime", "1600000000.25").pax("atime", "1700000000.75")]),
        ("PAX atime no number", vec![file().pax("atime", "x")]),
        ("PAX ctime no number", vec![file().pax("ctime", "x")]),
        ("PAX comment with a line break", vec![file().pax("comment", "a\nb")]),
        ("PAX unknown key", vec![file().pax("VENDOR.key", "x")]),
        ("PAX hdrcharset", vec![file().pax("hdrcharset", "BINARY")]),
        ("PAX empty key", vec![file().pax("", "x")]),
        ("PAX key with a NUL", vec![file().pax("a\0b", "x")]),
        ("PAX xattr user", vec![file().pax("SCHILY.xattr.user.a", "value").pax("SCHILY.xattr.user.b", "")]),
        ("PAX xattr twice", vec![file().pax("SCHILY.xattr.user.a", "1").pax("SCHILY.xattr.user.a", "2")]),
        ("PAX xattr binary", vec![file().pax("SCHILY.xattr.user.a", b"\x00\x0a\xff=")]),
        ("PAX xattr with = in its name", vec![file().pax("SCHILY.xattr.user.a=b", "c")]),
        ("PAX xattr without a name", vec![file().pax("SCHILY.xattr.", "c")]),
        ("PAX xattr of an unknown class", vec![file().pax("SCHILY.xattr.other.a", "c")]),
        ("PAX xattr user of a symlink", vec![Member::symlink("l", "x").pax("SCHILY.xattr.user.a", "c")]),
        ("PAX xattr user of a FIFO", vec![Member::new(b'6', "p").pax("SCHILY.xattr.user.a", "c")]),
        ("PAX xattr user of a device", vec![Member::device(b'3', "c", 1, 3).pax("SCHILY.xattr.user.a", "c")]),
        ("PAX xattr user of a directory", vec![Member::directory("d").pax("SCHILY.xattr.user.a", "c")]),
        (
            "PAX xattr user of a hard link",
            vec![file(), Member::hard_link("h", "f").pax("SCHILY.xattr.user.a", "c")],
        ),
        ("PAX xattr of 5000 bytes", vec![file().pax("SCHILY.xattr.user.a", "x".repeat(5000))]),
        (
            "PAX xattr name of 300 bytes",
            vec![file().pax(&format!("SCHILY.xattr.user.{}", "n".repeat(300)), "x")],
        ),
        (
            "PAX xattr capability",
            vec![file().mode(0o755).pax("SCHILY.xattr.security.capability", CAPABILITY)],
        ),
        (
            "PAX xattr capability and owner",
            vec![
                Member { uid: 1000, ..file().mode(0o755) }
                    .pax("SCHILY.xattr.security.capability", CAPABILITY),
            ],
        ),
        ("PAX xattr capability that is none", vec![file().pax("SCHILY.xattr.security.capability", "x")]),
        (
            "PAX xattr capability of a directory",
            vec![Member::directory("d").pax("SCHILY.xattr.security.capability", CAPABILITY)],
        ),
        ("PAX xattr security.ima", vec![file().pax("SCHILY.xattr.security.ima", "x")]),
        ("PAX xattr security.other", vec![file().pax("SCHILY.xattr.security.other", "x")]),
        ("PAX xattr selinux", vec![file().pax("SCHILY.xattr.security.selinux", "u:r:t:s0")]),
        ("PAX xattr trusted", vec![file().pax("SCHILY.xattr.trusted.a", "x")]),
        (
            "PAX xattr trusted.overlay.opaque",
            vec![Member::directory("d").pax("SCHILY.xattr.trusted.overlay.opaque", "y")],
        ),
        (
            "PAX xattr user.overlay.opaque",
            vec![Member::directory("d").pax("SCHILY.xattr.user.overlay.opaque", "y")],
        ),
        ("PAX xattr system.posix_acl", vec![file().pax("SCHILY.xattr.system.posix_acl_access", "x")]),
        ("PAX LIBARCHIVE.xattr", vec![file().pax("LIBARCHIVE.xattr.user.a", "dmFsdWU=")]),
        ("PAX SCHILY.acl", vec![file().pax("SCHILY.acl.access", "user::rw-,group::r--,other::r--")]),
        (
            "PAX SCHILY.dev",
            vec![Member::device(b'3', "c", 1, 3).pax("SCHILY.devmajor", "5").pax("SCHILY.devminor", "6")],
        ),
        (
            "PAX two headers",
            vec![
                Member { data: b"11 path=ab\n".to_vec(), ..Member::new(b'x', "pax") },
                file().pax("mtime", "1600000000.5"),
            ],
        ),
        (
            "PAX header alone at the end",
            vec![file(), Member { data: b"11 path=ab\n".to_vec(), ..Member::new(b'x', "p") }],
        ),
        ("PAX header empty", raw(b"")),
        ("PAX record without a line break", raw(b"11 path=abc")),
        ("PAX record too long", raw(b"99 path=ab\n")),
        ("PAX record too short", raw(b"5 path=ab\n")),
        ("PAX record of length 0", raw(b"0 path=ab\n")),
        ("PAX record without =", raw(b"11 path ab\n")),
        ("PAX record with a negative length", raw(b"-9 path=ab\n")),
        ("PAX record with leading zeros", raw(b"013 path=abc\n")),
        ("PAX record with a plus", raw(b"+12 path=abc\n")),
        ("PAX record with leading spaces", raw(b" 13 path=abcd\n")),
        ("PAX records with a NUL at the end", raw(b"11 path=ab\n\0\0\0")),
        (
            "PAX header then GNU long name",
            vec![
                Member { data: b"11 path=ab\n".to_vec(), ..Member::new(b'x', "pax") },
                Member { long_name: Some(b"gnu".to_vec()), ..file() },
            ],
        ),
        (
            "GNU long name then PAX header",
            vec![
                Member { data: b"gnu\0".to_vec(), ..Member::new(b'L', "././@LongLink").format(Format::Gnu) },
                file().pax("mtime", "1600000000.5"),
            ],
        ),
        ("global PAX header", vec![Member { global: vec![("comment".into(), b"x".to_vec())], ..file() }]),
        ("global PAX path", vec![Member { global: vec![("path".into(), b"g".to_vec())], ..file() }]),
        (
            "global PAX mtime",
            vec![
                Member { global: vec![("mtime".into(), b"1600000000.5".to_vec())], ..file() },
                Member::file("z", "z"),
            ],
        ),
        ("global PAX uid", vec![Member { global: vec![("uid".into(), b"77".to_vec())], ..file() }]),
        (
            "global PAX header between PAX header and file",
            vec![
                Member { data: b"11 path=ab\n".to_vec(), ..Member::new(b'x', "pax") },
                Member { global: vec![("comment".into(), b"x".to_vec())], ..file() },
            ],
        ),
        ("type X", vec![Member { data: b"11 path=ab\n".to_vec(), ..Member::new(b'X', "pax") }, file()]),
    ]
}

fn sparse() -> Vec<(&'static str, Vec<Member>)> {
    let file = |data: &[u8]| Member::new(b'0', "GNUSparseFile.0/f").with(data);
    let version = |member: Member, major: &str, minor: &str| {
        member.pax("GNU.sparse.major", major).pax("GNU.sparse.minor", minor)
    };
    // Content at 4096, of 10000 bytes.
    let map = |text: &str| {
        let mut data = text.as_bytes().to_vec();
        data.resize(512, 0);
        data.extend_from_slice(b"hello");
        data
    };
    let old = |entries: &[(u64, u64)], real: u64, data: &[u8]| {
        let mut patches = Vec::new();
        for (index, (offset, length)) in entries.iter().enumerate() {
            patches.push((386 + 24 * index, format!("{offset:011o}\0{length:011o}\0").into_bytes()));
        }
        patches.push((483, format!("{real:011o}\0").into_bytes()));
        Member { patches, ..Member::new(b'S', "f").with(data).format(Format::Gnu) }
    };
    let sparse10 = |text: &str| {
        version(file(&map(text)), "1", "0").pax("GNU.sparse.name", "f").pax("GNU.sparse.realsize", "10000")
    };
    vec![
        (
            "sparse 0.0",
            vec![
                file(b"hello")
                    .pax("GNU.sparse.size", "10000")
                    .pax("GNU.sparse.numblocks", "1")
                    .pax("GNU.sparse.offset", "4096")
                    .pax("GNU.sparse.numbytes", "5"),
            ],
        ),
        (
            "sparse 0.1",
            vec![
                file(b"hello")
                    .pax("GNU.sparse.size", "10000")
                    .pax("GNU.sparse.numblocks", "1")
                    .pax("GNU.sparse.name", "f")
                    .pax("GNU.sparse.map", "4096,5"),
            ],
        ),
        (
            "sparse 0.1 with an odd map",
            vec![
                file(b"hello")
                    .pax("GNU.sparse.size", "10000")
                    .pax("GNU.sparse.numblocks", "1")
                    .pax("GNU.sparse.map", "4096,5,6"),
            ],
        ),
        ("sparse 1.0", vec![sparse10("1\n4096\n5\n")]),
        ("sparse 1.0 with two pieces and a hole at the end", vec![sparse10("2\n100\n2\n4096\n3\n")]),
        ("sparse 1.0 with an empty map", vec![sparse10("0\n")]),
        ("sparse 1.0 with overlapping pieces", vec![sparse10("2\n0\n3\n2\n2\n")]),
        ("sparse 1.0 in wrong order", vec![sparse10("2\n100\n3\n0\n2\n")]),
        ("sparse 1.0 beyond the size", vec![sparse10("1\n9999\n5\n")]),
        ("sparse 1.0 with too few bytes", vec![sparse10("1\n4096\n500\n")]),
        ("sparse 1.0 without a number", vec![sparse10("x\n4096\n5\n")]),
        (
            "sparse 1.0 without a real size",
            vec![version(file(&map("1\n4096\n5\n")), "1", "0").pax("GNU.sparse.name", "f")],
        ),
        ("sparse 2.0", vec![version(file(b"hello"), "2", "0").pax("GNU.sparse.name", "f")]),
        (
            "sparse 1.0 of a directory",
            vec![version(Member::directory("d"), "1", "0").pax("GNU.sparse.name", "f")],
        ),
        ("GNU type S", vec![old(&[(4096, 5)], 10_000, b"hello")]),
        ("GNU type S with two pieces", vec![old(&[(0, 2), (4096, 3)], 10_000, b"hello")]),
        ("GNU type S without pieces", vec![old(&[], 10_000, b"")]),
        ("GNU type S with a zero piece at the end", vec![old(&[(0, 5), (10_000, 0)], 10_000, b"hello")]),
        ("sparse of GNU beyond the size", vec![old(&[(9999, 5)], 10_000, b"hello")]),
        ("sparse of GNU in ustar", vec![old(&[(4096, 5)], 10_000, b"hello").format(Format::Ustar)]),
    ]
}

fn kinds() -> Vec<(&'static str, Vec<Member>)> {
    let with_file = |member: Member| vec![member, Member::file("z", "z")];
    let mut cases = Vec::new();
    for (name, kind) in [
        ("GNU type 7", b'7'),
        ("type 8", b'8'),
        ("type 9", b'9'),
        ("type A", b'A'),
        ("GNU type D", b'D'),
        ("type M", b'M'),
        ("type N", b'N'),
        ("GNU type V", b'V'),
        ("type Z", b'Z'),
        ("type space", b' '),
        ("type 255", 0xff),
    ] {
        cases.push((name, with_file(Member::new(kind, "odd").with(b"data"))));
    }
    cases.push(("type x alone", vec![Member::new(b'x', "odd")]));
    cases.push((
        "type g alone",
        vec![Member { data: b"13 comment=x\n".to_vec(), ..Member::new(b'g', "odd") }],
    ));
    cases
        .push(("type K alone", vec![Member::new(b'K', "././@LongLink").with(b"link\0").format(Format::Gnu)]));
    cases
}

fn repeated() -> Vec<(&'static str, Vec<Member>)> {
    let first =
        |kind: u8| Member { uid: 1, link: link_of(kind), ..Member::new(kind, "e").mtime(1_600_000_000) };
    let second = |kind: u8| Member { gid: 2, link: link_of(kind), ..Member::new(kind, "e").mode(0o711) };
    vec![
        ("file twice", vec![Member::file("e", "one"), Member::file("e", "two two")]),
        ("file, then a shorter one", vec![Member::file("e", "one one"), Member::file("e", "2")]),
        (
            "file with a hard link, then another",
            vec![Member::file("e", "one"), Member::hard_link("h", "e"), Member::file("e", "two")],
        ),
        (
            "file with an attribute, then without",
            vec![Member::file("e", "one").pax("SCHILY.xattr.user.a", "x"), Member::file("e", "two")],
        ),
        ("directory twice", vec![first(b'5'), Member::file("e/f", "x"), second(b'5')]),
        (
            "directory with an attribute, then without",
            vec![Member::directory("e").pax("SCHILY.xattr.user.a", "x"), Member::directory("e")],
        ),
        ("symlink twice", vec![first(b'2'), second(b'2')]),
        ("FIFO twice", vec![first(b'6'), second(b'6')]),
        ("device twice", vec![first(b'3'), second(b'3')]),
        ("directory replaced, file over a directory", vec![first(b'5'), Member::file("e", "x")]),
        (
            "directory replaced, file over a directory with entries",
            vec![first(b'5'), Member::file("e/f", "x"), Member::file("e", "x")],
        ),
        ("directory over a file", vec![Member::file("e", "x"), second(b'5'), Member::file("e/f", "x")]),
        ("directory replaced, symlink over a directory", vec![first(b'5'), second(b'2')]),
        (
            "directory replaced, symlink over a directory with entries",
            vec![first(b'5'), Member::file("e/f", "x"), second(b'2')],
        ),
        ("symlink over a file", vec![Member::file("e", "x"), second(b'2')]),
        (
            "file over a symlink to a file",
            vec![Member::file("f", "x"), Member::symlink("e", "f"), Member::file("e", "y")],
        ),
        (
            "file over a symlink to a directory",
            vec![Member::directory("d"), Member::symlink("e", "d"), Member::file("e", "y")],
        ),
        ("file over a FIFO", vec![first(b'6'), Member::file("e", "x")]),
        ("directory over a FIFO", vec![first(b'6'), second(b'5')]),
        (
            "times of a directory whose entry is replaced",
            vec![Member::directory("d").mtime(5), Member::file("d/f", "x"), Member::file("d/f", "y")],
        ),
        (
            "directory replaced, by a symlink",
            vec![Member::directory("d").mtime(5), Member::directory("t").mtime(6), Member::symlink("d", "t")],
        ),
    ]
}

fn link_of(kind: u8) -> Vec<u8> {
    if kind == b'2' { b"target".to_vec() } else { Vec::new() }
}

fn links() -> Vec<(&'static str, Vec<Member>)> {
    let file = || Member::file("f", "x");
    vec![
        ("hard link", vec![file(), Member::hard_link("h", "f")]),
        ("hard link with ./", vec![file(), Member::hard_link("./h", "./f")]),
        ("hard link with /", vec![file(), Member::hard_link("/h", "/f")]),
        ("hard link with ..", vec![file(), Member::hard_link("h", "../f")]),
        ("hard link with .. inside", vec![file(), Member::directory("d"), Member::hard_link("h", "d/../f")]),
        ("hard link with a slash at the end", vec![file(), Member::hard_link("h", "f/")]),
        ("hard link with a dot at the end", vec![file(), Member::hard_link("h", "f/.")]),
        ("hard link with dots at the end", vec![Member::file("d/f", "x"), Member::hard_link("h", "d/..")]),
        (
            "hard link to a symlink with a slash at the end",
            vec![file(), Member::symlink("l", "f"), Member::hard_link("h", "l/").mode(0o600)],
        ),
        (
            "hard link with .. after a file",
            vec![file(), Member::file("g", "y"), Member::hard_link("h", "f/../g")],
        ),
        ("hard link to nothing", vec![Member::hard_link("h", "no")]),
        ("hard link to an empty name", vec![Member::hard_link("h", "")]),
        ("hard link to a later file", vec![Member::hard_link("h", "f"), file()]),
        ("hard link to itself", vec![file(), Member::hard_link("f", "f")]),
        ("hard link to itself that is missing", vec![Member::hard_link("f", "f")]),
        ("hard link to a directory", vec![Member::directory("d"), Member::hard_link("h", "d")]),
        ("hard link to a symlink", vec![file(), Member::symlink("l", "f"), Member::hard_link("h", "l")]),
        ("hard link to a dangling symlink", vec![Member::symlink("l", "no"), Member::hard_link("h", "l")]),
        (
            "hard link through a symlink",
            vec![
                Member::directory("d"),
                Member::file("d/f", "x"),
                Member::symlink("l", "d"),
                Member::hard_link("h", "l/f"),
            ],
        ),
        ("hard link to a FIFO", vec![Member::new(b'6', "p"), Member::hard_link("h", "p")]),
        ("hard link to a device", vec![Member::device(b'3', "c", 1, 3), Member::hard_link("h", "c")]),
        ("hard link to a hard link", vec![file(), Member::hard_link("g", "f"), Member::hard_link("h", "g")]),
        ("hard link over a file", vec![file(), Member::file("h", "y"), Member::hard_link("h", "f")]),
        ("hard link over a directory", vec![file(), Member::directory("h"), Member::hard_link("h", "f")]),
        (
            "hard link of another owner",
            vec![file(), Member { uid: 5, gid: 6, ..Member::hard_link("h", "f") }],
        ),
        ("hard link of another mode", vec![file(), Member::hard_link("h", "f").mode(0o600)]),
        ("hard link of another time", vec![file(), Member::hard_link("h", "f").mtime(5)]),
        (
            "hard link that exists on the node",
            vec![Member::file("etc/passwd", "x"), Member::hard_link("h", "etc/passwd").mode(0o600)],
        ),
        ("hard link in a missing parent", vec![file(), Member::hard_link("a/b/h", "f")]),
        ("symlink without a target", vec![Member::symlink("l", "")]),
        ("symlink of 4095 bytes", vec![Member::symlink("l", "s").pax("linkpath", "x".repeat(4095))]),
        ("symlink of 4096 bytes", vec![Member::symlink("l", "s").pax("linkpath", "x".repeat(4096))]),
        (
            "symlink with odd targets",
            vec![Member::symlink("a", "//x/.././y/"), Member::symlink("b", "../../..")],
        ),
        (
            "symlink with a size and data",
            vec![Member { data: b"data".to_vec(), ..Member::symlink("l", "x") }, file()],
        ),
        ("whiteout of an own name, one layer", vec![Member::file("a", "x"), Member::file(".wh.a", "")]),
        ("name of a whiteout of this layer", vec![Member::file(".wh.a", ""), Member::file("a", "x")]),
        ("whiteout of nothing", vec![Member::file(".wh.a", "")]),
        ("whiteout of nothing in a directory", vec![Member::file("b/.wh.a", "")]),
        ("whiteout of nothing in a new directory", vec![Member::directory("b"), Member::file("b/.wh.a", "")]),
        ("whiteout without a name", vec![Member::file(".wh.", "")]),
        ("whiteout of .", vec![Member::file(".wh..", ""), Member::file("f", "x")]),
        ("whiteout of ..", vec![Member::directory("d"), Member::file("d/.wh...", "")]),
        ("whiteout as a directory", vec![Member::directory(".wh.a")]),
        (
            "whiteout as a directory with entries",
            vec![Member::directory(".wh.a"), Member::file(".wh.a/f", "x")],
        ),
        ("whiteout as a symlink", vec![Member::symlink(".wh.a", "x")]),
        ("whiteout as a hard link", vec![Member::file("f", "x"), Member::hard_link(".wh.a", "f")]),
        ("whiteout with data", vec![Member::file(".wh.a", "data"), Member::file("f", "x")]),
        ("opaque root", vec![Member::file(".wh..wh..opq", ""), Member::file("f", "x")]),
        ("opaque directory that is missing", vec![Member::file("d/.wh..wh..opq", "")]),
        (
            "files of AUFS",
            vec![
                Member::directory(".wh..wh.plnk"),
                Member::file(".wh..wh.plnk/1.2", "x"),
                Member::file(".wh..wh.aufs", ""),
            ],
        ),
        (
            "hard link to a file of AUFS",
            vec![
                Member::directory(".wh..wh.plnk"),
                Member::file(".wh..wh.plnk/1.2", "x"),
                Member::hard_link("h", ".wh..wh.plnk/1.2"),
            ],
        ),
    ]
}

fn two_layers() -> Vec<(&'static str, Vec<Vec<Member>>)> {
    let lower = || {
        vec![
            Member::directory("d").mode(0o750).mtime(1_500_000_000),
            Member { uid: 3, ..Member::file("d/f", "lower") },
            Member::file("d/g", "lower"),
            Member::directory("d/e"),
            Member::file("d/e/h", "lower"),
            Member::symlink("l", "d"),
            Member::file("f", "lower"),
            Member::hard_link("f2", "f"),
        ]
    };
    let over = |name: &'static str, members: Vec<Member>| (name, vec![lower(), members]);
    let whiteout = |name: &str| Member::file(name, "");
    vec![
        over("layer of a missing directory", vec![Member::file("d/n", "x")]),
        over("layer of a directory", vec![Member { uid: 9, ..Member::directory("d") }]),
        over("layer through a symlink", vec![Member::file("l/n", "x")]),
        over("layer with a directory over a symlink", vec![Member::directory("l"), Member::file("l/n", "x")]),
        over("layer with a symlink over a directory", vec![Member::symlink("d", "f")]),
        over("layer with a file over a directory", vec![Member::file("d", "x")]),
        over("layer with a directory over a file", vec![Member::directory("f"), Member::file("f/n", "x")]),
        over("tolerated, layer with a parent below a file", vec![Member::file("f/d/n", "x")]),
        over("layer with a parent that is a file", vec![Member::file("f/n", "x")]),
        over("layer with a hard link", vec![Member::hard_link("h", "f")]),
        over("layer with a hard link through a symlink", vec![Member::hard_link("h", "l/f")]),
        over("layer with a hard link to a symlink", vec![Member::hard_link("h", "l")]),
        over("layer with a hard link over its file", vec![Member::hard_link("f", "f2")]),
        over("whiteout", vec![whiteout("d/.wh.f")]),
        over("whiteout of a directory", vec![whiteout(".wh.d")]),
        over("whiteout of a symlink", vec![whiteout(".wh.l")]),
        over("whiteout through a symlink", vec![whiteout("l/.wh.f")]),
        over(
            "whiteout of an own name, whiteout, then the name",
            vec![whiteout(".wh.d"), Member::directory("d"), Member::file("d/n", "x")],
        ),
        over(
            "whiteout of an own name, name, then the whiteout",
            vec![Member::directory("d"), Member::file("d/n", "x"), whiteout(".wh.d")],
        ),
        over(
            "whiteout of an own name, whiteout, then the name as a file",
            vec![whiteout(".wh.d"), Member::file("d", "x")],
        ),
        over(
            "whiteout of an own name, whiteout, then an entry of a missing directory",
            vec![whiteout(".wh.d"), Member::file("d/n", "x")],
        ),
        over("whiteout of an own name, whiteout twice", vec![whiteout("d/.wh.f"), whiteout("d/.wh.f")]),
        over(
            "whiteout of an own name, whiteout below a whiteout",
            vec![whiteout(".wh.d"), whiteout("d/.wh.f")],
        ),
        over("whiteout below a missing name", vec![whiteout("no/.wh.f")]),
        over(
            "whiteout of an own name, whiteout and opaque",
            vec![whiteout(".wh.d"), whiteout("d/.wh..wh..opq")],
        ),
        over(
            "opaque first",
            vec![Member::directory("d"), whiteout("d/.wh..wh..opq"), Member::file("d/n", "x")],
        ),
        over(
            "opaque last",
            vec![Member::directory("d"), Member::file("d/n", "x"), whiteout("d/.wh..wh..opq")],
        ),
        over("opaque alone", vec![whiteout("d/.wh..wh..opq")]),
        over(
            "opaque before its directory",
            vec![whiteout("d/.wh..wh..opq"), Member::directory("d").mode(0o700)],
        ),
        over(
            "opaque in a directory of a directory",
            vec![whiteout("d/.wh..wh..opq"), Member::file("d/e/n", "x")],
        ),
        over(
            "opaque, then replaced",
            vec![whiteout("d/.wh..wh..opq"), Member::file("d", "x"), Member::directory("d")],
        ),
        over(
            "opaque and a hard link to what it hides",
            vec![whiteout("d/.wh..wh..opq"), Member::hard_link("h", "d/f")],
        ),
        over(
            "whiteout and a hard link to what it hides",
            vec![whiteout(".wh.f"), Member::hard_link("h", "f")],
        ),
        over("opaque through a symlink", vec![whiteout("l/.wh..wh..opq")]),
        over("opaque of a symlink's name", vec![Member::directory("l"), whiteout("l/.wh..wh..opq")]),
        over("device 0 0 as a whiteout", vec![Member::device(b'3', "f", 0, 0)]),
        over("root's attributes", vec![Member { uid: 7, gid: 8, ..Member::directory("./").mode(0o711) }]),
        over("empty layer", vec![]),
        (
            "three layers",
            vec![lower(), vec![whiteout(".wh.d")], vec![Member::directory("d"), Member::file("d/n", "x")]],
        ),
        ("the same layer twice", vec![lower(), lower()]),
        ("file, whiteout, file", vec![lower(), vec![whiteout(".wh.f")], vec![Member::file("f", "new")]]),
    ]
}
