//! Ranges of archives that are made again from trees, also from trees that were damaged or that an image's author made to do harm.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use coracle_chunked::outline::Purpose;
use coracle_job::{Layer, Limits};
use coracle_manifest::digest_of;
use tar::{EntryType, Header};

use super::*;
use crate::store::Store;
use crate::unpack::Aside;

mod random;

/// A store with an unpacked layer.
struct Scratch {
    root: PathBuf,
    name: String,
}

impl Scratch {
    /// Unpacks an archive; its layer gets an outline.
    fn new(about: &str, archive: &[u8]) -> Self {
        Self::of(about, &[archive.to_vec()])
    }

    /// Unpacks the archives of an image, lowest first; the name is that of the last one.
    fn of(about: &str, archives: &[Vec<u8>]) -> Self {
        assert!(rustix::process::geteuid().is_root(), "unpacking changes owners: run as root");
        let root = std::env::temp_dir().join(format!("coracle-outline-{about}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let store = Store::open(&root).unwrap().with_outlines(Some(Purpose::Neighbours));
        let layer = |archive: &Vec<u8>| {
            let diff_id = digest_of(archive);
            let name = diff_id["sha256:".len()..].to_owned();
            Layer { diff_id: diff_id.clone(), chain_id: diff_id, name }
        };
        let layers: Vec<Layer> = archives.iter().map(layer).collect();
        let limits = Limits::default();
        let mut aside = Aside::new(&store, &layers, &limits);
        for (number, archive) in archives.iter().enumerate() {
            fs::write(root.join("blob"), archive).unwrap();
            aside.unpack(number, &root.join("blob"), &mut |_| {}).unwrap();
        }
        let ready = aside.complete().unwrap();
        aside.publish(&ready, []).unwrap();
        assert_eq!(fs::read_dir(root.join("images/parts")).unwrap().count(), 0, "nothing is left");
        let name = layers.last().unwrap().name.clone();
        Self { root, name }
    }

    fn find(&self) -> Option<Unpacked> {
        Layers::new(&self.root).find(&self.name)
    }

    fn tree(&self) -> PathBuf {
        self.root.join("layers").join(&self.name)
    }

    fn range(&self, begin: u64, end: u64) -> io::Result<Vec<u8>> {
        range(&Layers::new(&self.root), &self.name, begin, end).map(|(bytes, _)| bytes)
    }

    fn all(&self) -> io::Result<Vec<u8>> {
        self.range(0, self.find().ok_or(ErrorKind::NotFound)?.archive_bytes)
    }
}

/// A range of the archive of a layer, and the number of bytes of its outline that were read for it.
fn range(layers: &Layers, name: &str, begin: u64, end: u64) -> io::Result<(Vec<u8>, u64)> {
    let (mut archive, read) = layers.archive(layers.find(name).ok_or(ErrorKind::NotFound)?, begin)?;
    let mut bytes = Vec::new();
    archive.send(begin, end, &mut [0; 1000], &mut bytes)?;
    layers.keep(archive);
    Ok((bytes, read))
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn add(builder: &mut tar::Builder<Vec<u8>>, name: &str, kind: EntryType, mode: u32, content: &[u8]) {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(content.len() as u64);
    if kind.is_symlink() || kind.is_hard_link() {
        header.set_link_name("d/file").unwrap();
    }
    builder.append_data(&mut header, name, content).unwrap();
}

fn content() -> Vec<u8> {
    (0..50_000_u32).flat_map(u32::to_le_bytes).collect()
}

/// Entries of each kind; with bytes after the end of the archive.
fn archive() -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    add(&mut builder, "d", EntryType::Directory, 0o755, b"");
    add(&mut builder, "d/file", EntryType::Regular, 0o4755, &content());
    add(&mut builder, "d/empty", EntryType::Regular, 0o644, b"");
    add(&mut builder, "link", EntryType::Symlink, 0o777, b"");
    add(&mut builder, "twin", EntryType::Link, 0o755, b"");
    add(&mut builder, "fifo", EntryType::Fifo, 0o644, b"");
    add(&mut builder, "shadow", EntryType::Regular, 0, b"root:!::0:::::\n");
    add(&mut builder, "d/.wh.gone", EntryType::Regular, 0o644, b"");
    let name = "d/".to_owned() + &"long-".repeat(40);
    add(&mut builder, &name, EntryType::Regular, 0o644, &vec![0; 5000]);
    let mut archive = builder.into_inner().unwrap();
    archive.extend(b"after the end");
    archive
}

#[test]
fn any_range_of_an_archive_is_made_again_as_root() {
    let archive = archive();
    let layer = Scratch::new("ranges", &archive);
    assert!(layer.all().unwrap() == archive);
    let length = archive.len() as u64;
    for (begin, end) in [(0, 1), (511, 513), (1023, 1025), (1536, 200_000), (length - 5, length), (700, 700)]
    {
        let expected = &archive[begin as usize..end as usize];
        assert!(layer.range(begin, end).unwrap() == expected, "{begin} {end}");
    }
    // The process without capabilities could not read it in the tree.
    let outline = fs::read(layer.root.join("images/contents").join(&layer.name)).unwrap();
    assert!(outline.windows(6).any(|bytes| bytes == b"root:!"));
    assert!(!outline.windows(8).any(|bytes| bytes == &content()[8..16]), "it is in the tree");
}

#[test]
fn a_file_that_differs_from_the_archive_ends_the_answer_as_root() {
    let archive = archive();
    type Spoil = fn(&Path);
    let spoils: [(&str, Spoil); 7] = [
        ("a missing file", |path| fs::remove_file(path).unwrap()),
        ("a directory", |path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        }),
        ("a symbolic link", |path| {
            fs::rename(path, path.with_extension("real")).unwrap();
            symlink("file.real", path).unwrap();
        }),
        ("a FIFO", |path| {
            fs::remove_file(path).unwrap();
            nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRUSR).unwrap();
        }),
        ("a socket", |path| {
            fs::remove_file(path).unwrap();
            let kind = nix::sys::stat::SFlag::S_IFSOCK;
            nix::sys::stat::mknod(path, kind, nix::sys::stat::Mode::S_IRUSR, 0).unwrap();
        }),
        ("a shorter file", |path| {
            File::options().write(true).open(path).unwrap().set_len(100).unwrap();
        }),
        ("a link in the place of the directory", |path| {
            let directory = path.parent().unwrap();
            let aside = directory.with_extension("real");
            fs::rename(directory, &aside).unwrap();
            symlink(&aside, directory).unwrap();
        }),
    ];
    for (about, spoil) in spoils {
        let layer = Scratch::new("spoilt", &archive);
        spoil(&layer.tree().join("d/file"));
        assert!(layer.all().is_err(), "{about}");
        assert!(layer.range(0, 512).unwrap() == archive[..512], "{about}: the headers before it are there");
    }
    // A longer file, as a huge sparse one, is read up to the length in the archive.
    let layer = Scratch::new("longer", &archive);
    let file = File::options().write(true).open(layer.tree().join("d/file")).unwrap();
    file.set_len(1 << 40).unwrap();
    assert!(layer.all().unwrap() == archive);
    // Other content is sent: the neighbour compares it with its digest.
    file.write_all_at(b"x", 5).unwrap();
    let sent = layer.all().unwrap();
    assert!(sent != archive && sent.len() == archive.len());
}

#[test]
fn a_layer_without_a_whole_outline_is_not_offered_as_root() {
    let archive = archive();
    let layer = Scratch::new("damaged", &archive);
    let path = layer.root.join("images/contents").join(&layer.name);
    let outline = fs::read(&path).unwrap();
    let mut other = outline.clone();
    other[7] = 9;
    for (about, bytes) in [
        ("an empty file", &b""[..]),
        ("an index", b"coridx\0\x01 and more than its last bytes"),
        ("another version", &other),
        ("a shorter one", &outline[..outline.len() - 1]),
        ("one that is too long", &vec![0; BYTES_MAX as usize + 1]),
    ] {
        fs::write(&path, bytes).unwrap();
        assert!(layer.find().is_none(), "{about}");
    }
    // The outline of another layer, or one with damage: what is sent ends, or has another digest.
    let mut damaged = outline.clone();
    damaged[20] ^= 0xff;
    fs::write(&path, &damaged).unwrap();
    assert!(layer.all().map_or(true, |sent| sent != archive));
    fs::remove_file(&path).unwrap();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR).unwrap();
    assert!(layer.find().is_none(), "a FIFO");
    fs::remove_file(&path).unwrap();
    assert!(layer.find().is_none(), "nothing");
    fs::write(&path, &outline).unwrap();
    assert!(layer.find().is_some());
    fs::rename(layer.tree(), layer.root.join("layers/tmp-x")).unwrap();
    assert!(layer.find().is_none(), "the layer was removed");
}

/// The layer is removed while a part of it is sent.
#[test]
fn a_layer_that_is_removed_meanwhile_ends_the_answer_as_root() {
    let archive = archive();
    let layer = Scratch::new("removed", &archive);
    let (layers, found) = (Layers::new(&layer.root), layer.find().unwrap());
    let end = found.archive_bytes;
    let (mut begun, _) = layers.archive(found, 0).unwrap();
    let mut client = Client { sent: 0, layer: &layer };
    let ended = begun.send(0, end, &mut [0; 1000], &mut client);
    assert!(ended.is_err() && client.sent < 10_000, "{}", client.sent);
}

/// A layer that was removed and pulled again has the same name and other files.
#[test]
fn a_layer_that_is_pulled_again_is_read_anew_as_root() {
    let archive = archive();
    let layer = Scratch::new("again", &archive);
    let layers = Layers::new(&layer.root);
    let (mut kept, _) = layers.archive(layer.find().unwrap(), 0).unwrap();
    kept.send(0, 1000, &mut [0; 1000], &mut Vec::new()).unwrap();
    layers.keep(kept);
    let removed = layer.root.join("layers/removed");
    fs::rename(layer.tree(), &removed).unwrap();
    let copied = std::process::Command::new("cp").arg("-a").args([&removed, &layer.tree()]).status();
    assert!(copied.unwrap().success());
    fs::remove_dir_all(&removed).unwrap();
    let found = layer.find().unwrap();
    let (end, bytes) = (found.archive_bytes, found.outline_bytes);
    let (mut again, read) = layers.archive(found, 1000).unwrap();
    let mut sent = Vec::new();
    again.send(1000, end, &mut [0; 1000], &mut sent).unwrap();
    assert!(read == bytes && sent == archive[1000..]);
}

/// A client after whose first bytes the layer is removed.
struct Client<'a> {
    sent: usize,
    layer: &'a Scratch,
}

impl Write for Client<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.sent += bytes.len();
        if self.sent > 5000 {
            let _ = fs::remove_dir_all(self.layer.tree());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn ranges_in_their_order_read_the_outline_once_as_root() {
    let archive = archive();
    let layer = Scratch::new("order", &archive);
    let (layers, length) = (Layers::new(&layer.root), archive.len() as u64);
    let outline_bytes = layer.find().unwrap().outline_bytes;
    let expect = |(begin, end): (u64, u64), outline_bytes: u64| {
        let (bytes, read) = range(&layers, &layer.name, begin, end).unwrap();
        assert!(bytes == archive[begin as usize..end as usize], "{begin} {end}");
        assert_eq!(read, outline_bytes, "{begin} {end}");
    };
    expect((0, 100), outline_bytes);
    // The second one begins in the block of the first, others within one file.
    for range in [(100, 200), (1030, 1100), (2000, 50_000), (50_000, 50_001), (60_000, length - 1)] {
        expect(range, 0);
    }
    expect((1030, 1100), outline_bytes);
    expect((length - 1, length), 0);
    // Another client, which is slower.
    expect((1100, 1200), 0);
    expect((0, length), outline_bytes);
}

#[test]
fn many_clients_get_their_ranges_as_root() {
    let archive = archive();
    let layer = Scratch::new("many", &archive);
    let layers = Layers::new(&layer.root);
    std::thread::scope(|scope| {
        for client in 0..BEGUN_MAX as u64 + 8 {
            let (layers, layer, archive) = (&layers, &layer, &archive);
            scope.spawn(move || {
                let mut begin = client * 10;
                while begin < archive.len() as u64 {
                    let end = (begin + 9000 + client).min(archive.len() as u64);
                    let (bytes, _) = range(layers, &layer.name, begin, end).unwrap();
                    assert!(bytes == archive[begin as usize..end as usize], "{client}: {begin}");
                    begin = end + 700;
                }
            });
        }
    });
    assert!(layers.lock().len() <= BEGUN_MAX, "the others are closed");
}

/// Each header and each short file would wait for the clock by itself.
#[test]
fn short_files_are_sent_together_as_root() {
    use std::net::{TcpListener, TcpStream};

    use coracle_site::{Nonces, pace::Rate};

    const RATE: u32 = 4_000_000;
    let mut builder = tar::Builder::new(Vec::new());
    for number in 0..2000 {
        add(&mut builder, &format!("file-{number}"), EntryType::Regular, 0o644, b"a short file");
    }
    let archive = builder.into_inner().unwrap();
    let layer = Scratch::new("together", &archive);
    let service = super::super::answer::Service {
        shelf: super::super::content::Shelf::new(&layer.root.join("images"), &[]),
        layers: Layers::new(&layer.root),
        id: "node".to_owned(),
        key: None,
        nonces: Nonces::new().unwrap(),
        rate: Rate::new(RATE),
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (server, address) = listener.accept().unwrap();
    let mut place = coracle_site::slots::Slots::new().admit(server, address.ip());
    let begun = std::time::Instant::now();
    let serving = std::thread::spawn(move || super::super::answer::serve(&service, &mut place));
    let target = format!("/v2/a/archives/sha256:{}", layer.name);
    write!(client, "GET {target} HTTP/1.1\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).unwrap();
    let took = begun.elapsed();
    assert!(answer.ends_with(&archive), "{} bytes of {}", answer.len(), archive.len());
    serving.join().unwrap().unwrap();
    // Not faster than the rate, except for the last piece.
    let least = (archive.len() as f64 - f64::from(RATE) / 8.0) / f64::from(RATE);
    assert!(took.as_secs_f64() >= least, "{took:?}");
    // Some 6000 waits of a millisecond are more.
    assert!(took.as_secs_f64() < least + 3.0, "{took:?}");
}

/// The tree lacks the content of an entry that a later one has replaced.
#[test]
fn an_archive_with_a_path_twice_has_no_outline_as_root() {
    let mut builder = tar::Builder::new(Vec::new());
    add(&mut builder, "file", EntryType::Regular, 0o644, b"first");
    add(&mut builder, "file", EntryType::Regular, 0o644, b"second");
    let layer = Scratch::new("twice", &builder.into_inner().unwrap());
    assert!(layer.find().is_none());
    assert_eq!(fs::read_dir(layer.root.join("images/contents")).unwrap().count(), 0);
}

#[test]
fn a_sparse_file_is_made_again_as_root() {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::GNUSparse);
    header.set_path("sparse").unwrap();
    header.set_mode(0o644);
    header.set_size(1000);
    let gnu = header.as_gnu_mut().unwrap();
    gnu.realsize = *b"00000100000\0";
    for (number, offset, length) in
        [(0, b"00000000000\0", b"00000000750\0"), (1, b"00000040000\0", b"00000001000\0")]
    {
        gnu.sparse[number].offset = *offset;
        gnu.sparse[number].numbytes = *length;
    }
    header.set_cksum();
    let mut archive = header.as_bytes().to_vec();
    archive.extend(&content()[..1000]);
    archive.extend([0; 24 + 1024]);
    let layer = Scratch::new("sparse", &archive);
    let about = fs::metadata(layer.tree().join("sparse")).unwrap();
    assert_eq!((about.len(), about.permissions().mode() & 0o777), (0o100_000, 0o644));
    assert!(layer.all().unwrap() == archive);
    let mut file = File::open(layer.tree().join("sparse")).unwrap();
    let mut begin = [0; 8];
    file.read_exact(&mut begin).unwrap();
    assert_eq!(begin, content()[..8]);
}

/// An entry with its owner.
fn owned(
    builder: &mut tar::Builder<Vec<u8>>,
    name: &str,
    kind: EntryType,
    (uid, mode): (u64, u32),
    data: &[u8],
) {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_uid(uid);
    header.set_gid(uid);
    header.set_mode(mode);
    header.set_size(data.len() as u64);
    if kind.is_hard_link() {
        header.set_link_name("a").unwrap();
    }
    builder.append_data(&mut header, name, data).unwrap();
}

/// user::rw-, user:7:r--, group::---, mask::r--, other::---
const LIST: [u8; 44] = [
    2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 7, 0, 0, 0, 4, 0, 0, 0, 255, 255, 255, 255, 16,
    0, 4, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255,
];

/// Text by which the tests detect file content in an outline.
const TEXT: &[u8] = b"the content of a file";

/// A layer of these entries. Whatever they are, a process without capabilities makes its archive again, or it is not offered.
fn of_entries(about: &str, entries: &dyn Fn(&mut tar::Builder<Vec<u8>>)) -> (Scratch, Option<Vec<u8>>) {
    let mut builder = tar::Builder::new(Vec::new());
    entries(&mut builder);
    let archive = builder.into_inner().unwrap();
    let layer = Scratch::new(about, &archive);
    let outline = fs::read(layer.root.join("images/contents").join(&layer.name)).ok();
    if outline.is_some() {
        let made = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                coracle_sandbox::jail::keep_capabilities(&[]).unwrap();
                layer.all()
            });
            thread.join().unwrap()
        });
        assert!(made.is_ok_and(|made| made == archive), "{about}");
    }
    (layer, outline)
}

fn has(outline: &[u8], text: &[u8]) -> bool {
    outline.windows(text.len()).any(|bytes| bytes == text)
}

#[test]
fn a_path_through_a_link_is_that_without_it_as_root() {
    let (_layer, outline) = of_entries("through-a-link", &|builder| {
        let mut header = Header::new_ustar();
        header.set_entry_type(EntryType::Symlink);
        header.set_size(0);
        header.set_link_name("usr/lib").unwrap();
        builder.append_data(&mut header, "lib", &b""[..]).unwrap();
        add(builder, "lib/x", EntryType::Regular, 0o644, TEXT);
        add(builder, "lib/deep/y", EntryType::Regular, 0o644, TEXT);
    });
    let outline = outline.unwrap();
    assert!(!has(&outline, TEXT) && has(&outline, b"usr/lib/x") && has(&outline, b"deep/y"));
}

#[test]
fn content_that_is_not_visible_is_in_the_outline_as_root() {
    let (_layer, outline) = of_entries("hidden", &|builder| {
        owned(builder, "d", EntryType::Directory, (5, 0o700), b"");
        owned(builder, "d/below/file", EntryType::Regular, (0, 0o644), TEXT);
    });
    assert!(has(&outline.unwrap(), TEXT), "in a directory of another user");
    let (_layer, outline) = of_entries("owner", &|builder| {
        owned(builder, "d", EntryType::Directory, (0, 0o700), b"");
        owned(builder, "d/file", EntryType::Regular, (5, 0o644), TEXT);
    });
    assert!(!has(&outline.unwrap(), TEXT), "in a directory of root");
    let (_layer, outline) = of_entries("unset", &|builder| {
        owned(builder, "d", EntryType::Directory, (u64::from(u32::MAX), 0o001), b"");
        owned(builder, "d/file", EntryType::Regular, (5, 0o644), TEXT);
        owned(builder, "file", EntryType::Regular, (u64::from(u32::MAX), 0o004), TEXT);
    });
    assert!(outline.is_none_or(|outline| has(&outline, TEXT)), "an owner that is not set");
}

#[test]
fn a_layer_whose_content_is_hidden_later_has_no_outline_as_root() {
    let (_layer, outline) = of_entries("closed", &|builder| {
        owned(builder, "d/file", EntryType::Regular, (0, 0o644), TEXT);
        owned(builder, "d", EntryType::Directory, (5, 0o700), b"");
    });
    assert!(outline.is_none(), "a directory that is closed after its file");
    let (_layer, outline) = of_entries("hard-link", &|builder| {
        owned(builder, "a", EntryType::Regular, (0, 0o644), TEXT);
        owned(builder, "b", EntryType::Link, (5, 0o600), b"");
    });
    assert!(outline.is_none(), "a hard link with another owner");
    let (_layer, outline) = of_entries("same-hard-link", &|builder| {
        owned(builder, "a", EntryType::Regular, (0, 0o644), TEXT);
        owned(builder, "b", EntryType::Link, (0, 0o644), b"");
    });
    assert!(outline.is_some(), "a hard link as others");
    let (_layer, outline) = of_entries("list", &|builder| {
        let records = [("SCHILY.xattr.system.posix_acl_access", &LIST[..])];
        builder.append_pax_extensions(records).unwrap();
        owned(builder, "a", EntryType::Regular, (5, 0o644), TEXT);
    });
    assert!(outline.is_none(), "an access control list");
}

/// A directory without an entry gets the attributes of that of a lower layer.
#[test]
fn a_layer_below_a_closed_directory_of_a_lower_one_has_no_outline_as_root() {
    for (mode, is_offered) in [(0o700, false), (0o755, true)] {
        let mut lower = tar::Builder::new(Vec::new());
        owned(&mut lower, "d", EntryType::Directory, (5, mode), b"");
        let mut upper = tar::Builder::new(Vec::new());
        owned(&mut upper, "d/file", EntryType::Regular, (0, 0o644), TEXT);
        let archives = [lower.into_inner().unwrap(), upper.into_inner().unwrap()];
        let scratch = Scratch::of(&format!("implied-{mode:o}"), &archives);
        assert_eq!(scratch.find().is_some(), is_offered, "{mode:o}");
    }
}
