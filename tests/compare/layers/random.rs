//! Random layers. Names come from a small pool, so that entries meet each other.

use coracle_tests::random::Random;

use crate::archive::{Archive, End, Format, Member, Packing};

/// One to five layers.
pub(super) fn layers(random: &mut Random) -> Vec<Archive> {
    let count = 1 + random.below(5).min(random.below(5));
    (0..count).map(|_| layer(random)).collect()
}

fn layer(random: &mut Random) -> Archive {
    let count = 1 + random.below(9);
    let mut members: Vec<Member> = Vec::new();
    for _ in 0..count {
        let member = member(random);
        if members.iter().all(|other| !is_in_the_table(other, &member)) {
            members.push(member);
        }
    }
    let end = match random.below(20) {
        0 => End::OneBlock,
        1 => End::Missing,
        2 => End::Padded(10_240),
        3 => End::Trailing,
        _ => End::TwoBlocks,
    };
    let packing = match random.below(4) {
        0 => pick(random, &Packing::ALL),
        _ => Packing::Gzip,
    };
    // What only one of the two unpacks is in the table.
    let packing = match packing {
        Packing::GzipZeros | Packing::GzipGarbage => Packing::GzipMembers,
        other => other,
    };
    Archive { end, packing, ..Archive::of(members) }
}

/// Whether two entries of one layer meet in a way of which the table has all forms, and in which containerd is known to differ: a
/// whiteout of what the layer has itself, and a directory that something else replaces.
fn is_in_the_table(one: &Member, other: &Member) -> bool {
    let (first, second) = (Target::of(one), Target::of(other));
    let is_within = |path: &[String], folder: &[String]| path.starts_with(folder);
    let hides = |whiteout: &Target, other: &Target| {
        whiteout.is_whiteout
            && (is_within(&other.path, &whiteout.path)
                || other.is_whiteout && is_within(&whiteout.path, &other.path))
    };
    let is_directory = |member: &Member| member.kind == b'5';
    hides(&first, &second)
        || hides(&second, &first)
        || is_directory(one)
            && is_within(&first.path, &second.path)
            && !is_directory(other)
            && !second.is_whiteout
        || is_directory(other)
            && is_within(&second.path, &first.path)
            && !is_directory(one)
            && !first.is_whiteout
}

/// Subject of an entry.
struct Target {
    path: Vec<String>,
    is_whiteout: bool,
}

impl Target {
    fn of(member: &Member) -> Target {
        let by_pax = |key: &str| {
            let found = member.records.iter().rfind(|(other, value)| other == key && !value.is_empty());
            found.map(|(_, value)| value)
        };
        let long = member.long_name.as_ref();
        let name = by_pax("GNU.sparse.name").or(by_pax("path")).or(long).unwrap_or(&member.name);
        let mut path: Vec<String> = Vec::new();
        for part in String::from_utf8_lossy(name).split('/') {
            match part {
                "" | "." => {}
                ".." => drop(path.pop()),
                part => path.push(part.to_owned()),
            }
        }
        let hidden = path.last().and_then(|last| last.strip_prefix(".wh.")).map(str::to_owned);
        let is_whiteout = hidden.as_ref().is_some_and(|hidden| hidden != ".wh..opq");
        if let Some(hidden) = hidden {
            path.pop();
            path.extend(is_whiteout.then_some(hidden));
        }
        Target { path, is_whiteout }
    }
}

fn pick<T: Copy>(random: &mut Random, list: &[T]) -> T {
    list[random.below(list.len() as u64) as usize]
}

fn is(random: &mut Random, one_in: u64) -> bool {
    random.below(one_in) == 0
}

fn path(random: &mut Random) -> String {
    const NAMES: [&str; 4] = ["a", "b", "c", "d"];
    let depth = 1 + random.below(3).min(random.below(3));
    (0..depth).map(|_| pick(random, &NAMES)).collect::<Vec<_>>().join("/")
}

/// A path, in a form that writers use.
fn name(random: &mut Random) -> String {
    let path = path(random);
    match random.below(24) {
        0 => format!("./{path}"),
        1 => format!("/{path}"),
        2 => path.replace('/', "//"),
        3 => path.replace('/', "/./"),
        4 => format!("c/../{path}"),
        5 => format!("../{path}"),
        6 => format!("{path}/ü"),
        _ => path,
    }
}

fn member(random: &mut Random) -> Member {
    let name = name(random);
    let (folder, last) = match name.rsplit_once('/') {
        Some((folder, last)) => (format!("{folder}/"), last.to_owned()),
        None => (String::new(), name.clone()),
    };
    let member = match random.below(100) {
        0..30 => file(random, &name),
        30..52 => {
            let slash = if is(random, 2) { "/" } else { "" };
            Member::directory(&format!("{name}{slash}"))
        }
        52..64 => Member::symlink(&name, &target(random)),
        64..74 => {
            let member = Member::hard_link(&name, &self::name(random));
            return long(random, member);
        }
        74..83 => return Member::file(&format!("{folder}.wh.{last}"), ""),
        83..88 => return Member::file(&format!("{name}/.wh..wh..opq"), ""),
        88..90 => Member::new(b'6', &name),
        90..92 => {
            let kind = pick(random, b"34");
            Member::device(kind, &name, 1 + random.below(300) as i64, random.below(3000) as i64)
        }
        92..94 => Member::new(0, &name),
        94 => Member::new(pick(random, b"7DV"), &name),
        95..98 => sparse(random, &name),
        _ => Member::directory("./"),
    };
    let member = attributes(random, member);
    long(random, member)
}

fn file(random: &mut Random, name: &str) -> Member {
    let length = match random.below(10) {
        0 => 0,
        1 => 512,
        2 => random.below(20_000),
        _ => random.below(20),
    };
    let byte = b'a' + random.below(26) as u8;
    Member::file(name, vec![byte; length as usize])
}

fn target(random: &mut Random) -> String {
    let path = path(random);
    match random.below(6) {
        0 => format!("/{path}"),
        1 => format!("../{path}"),
        2 => format!("../../../{path}"),
        3 => "nowhere".to_owned(),
        _ => path,
    }
}

fn sparse(random: &mut Random, name: &str) -> Member {
    let (offset, real) = (random.below(9000), 10_000);
    let mut map = format!("1\n{offset}\n5\n").into_bytes();
    map.resize(512, 0);
    let member = Member::new(b'0', "GNUSparseFile.0/s");
    match random.below(3) {
        0 => member
            .with(b"hello")
            .pax("GNU.sparse.size", real.to_string())
            .pax("GNU.sparse.numblocks", "1")
            .pax("GNU.sparse.name", name)
            .pax("GNU.sparse.map", format!("{offset},5")),
        1 => Member::new(b'0', name)
            .with(b"hello")
            .pax("GNU.sparse.size", real.to_string())
            .pax("GNU.sparse.numblocks", "1")
            .pax("GNU.sparse.offset", offset.to_string())
            .pax("GNU.sparse.numbytes", "5"),
        _ => member
            .with(&[&map[..], b"hello"].concat())
            .pax("GNU.sparse.major", "1")
            .pax("GNU.sparse.minor", "0")
            .pax("GNU.sparse.name", name)
            .pax("GNU.sparse.realsize", real.to_string()),
    }
}

fn attributes(random: &mut Random, mut member: Member) -> Member {
    const MODES: [i64; 10] = [0, 0o600, 0o644, 0o755, 0o777, 0o1777, 0o2755, 0o4755, 0o7777, 0o100_644];
    const OWNERS: [i64; 7] = [0, 0, 1, 1000, 65_534, 65_536, 2_000_000];
    const TIMES: [i64; 8] =
        [0, 1, 1_000_000_000, 1_700_000_000, 2_147_483_647, 2_147_483_648, 4_102_444_800, -1];
    if is(random, 2) {
        member.mode = pick(random, &MODES);
    }
    if is(random, 2) {
        member.uid = pick(random, &OWNERS);
        member.gid = pick(random, &OWNERS);
    }
    if is(random, 2) {
        member.mtime = pick(random, &TIMES);
    }
    if is(random, 8) {
        member.has_base256 = true;
        member.format = Format::Gnu;
    }
    if is(random, 6) {
        member.format = pick(random, &[Format::Gnu, Format::Ustar]);
    }
    records(random, member)
}

fn records(random: &mut Random, mut member: Member) -> Member {
    const CAPABILITY: &[u8] = b"\x01\0\0\x02\0\x0a\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    for _ in 0..random.below(6).saturating_sub(3) {
        member = match random.below(10) {
            0 => member.pax("mtime", format!("{}.{}", random.below(1 << 33), random.below(1 << 34))),
            1 => member.pax("uid", random.below(1 << 32).to_string()),
            2 => member.pax("gid", random.below(1 << 32).to_string()),
            3 => member.pax("mtime", format!("-{}.{}", random.below(1 << 31), random.below(1000))),
            4 if member.kind == b'0' => member.pax("SCHILY.xattr.security.capability", CAPABILITY),
            5 | 6 if matches!(member.kind, b'0' | b'5') => {
                let key = format!("SCHILY.xattr.user.{}", pick(random, &["x", "y.z", "ü"]));
                member.pax(&key, pick(random, &["", "value", "a\nb=c\0d"]))
            }
            7 => member.pax(pick(random, &["comment", "uname", "LIBARCHIVE.creationtime"]), "x\ny"),
            8 => member.pax(pick(random, &["path", "linkpath", "uid", "mtime"]), ""),
            _ => member.pax("SCHILY.xattr.trusted.x", "x"),
        };
    }
    if is(random, 30) {
        member.global.push(("comment".to_owned(), b"x".to_vec()));
    }
    member
}

/// Moves the names into a long form, sometimes.
fn long(random: &mut Random, mut member: Member) -> Member {
    match random.below(16) {
        0 => {
            member.long_name = Some(std::mem::replace(&mut member.name, b"short".to_vec()));
        }
        1 if !member.link.is_empty() => {
            member.long_link = Some(std::mem::replace(&mut member.link, b"short".to_vec()));
        }
        2 if !member.records.iter().any(|(key, _)| key.starts_with("GNU.") || key == "path") => {
            let name = std::mem::replace(&mut member.name, b"short".to_vec());
            member = member.pax("path", name);
        }
        3 if !member.link.is_empty() => {
            let link = std::mem::replace(&mut member.link, b"short".to_vec());
            member = member.pax("linkpath", link);
        }
        _ => {}
    }
    member
}
