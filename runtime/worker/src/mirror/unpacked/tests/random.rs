//! Archives of random entries: through symbolic links, below directories of other users, with hard links of other owners, access control
//! lists, holes and long names. Whatever they have, a process without capabilities makes each archive again byte for byte, or does not
//! offer its layer; and each chunk of an outline is found in the tree, from which a pull takes it.

use std::collections::BTreeSet;

use coracle_chunked::index;
use sha2::{Digest as _, Sha256};

use super::*;

/// Number of images and of their layers.
const IMAGES: u64 = 24;
const LAYERS: u64 = 6;
/// Minimum number of layers with an outline, and without one: otherwise the entries show nothing.
const OFFERED_MIN: usize = 40;
const OTHERS_MIN: usize = 20;

/// Pseudo-random numbers (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
    }

    /// Whether an event of this probability in percent happens.
    fn is(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.below(255) as u8 + 1).collect()
    }

    fn content(&mut self) -> Vec<u8> {
        match self.below(8) {
            0 => Vec::new(),
            1 => vec![0; self.below(5000)],
            2 => {
                let length = self.below(300_000);
                self.bytes(length)
            }
            // Short runs of zeros and of others, at all offsets from the blocks.
            3 => {
                (0..20).flat_map(|_| [vec![0; self.below(3000)], vec![7; self.below(300)]].concat()).collect()
            }
            // Exactly blocks.
            4 => {
                let blocks = self.below(4);
                self.bytes(512 * blocks)
            }
            _ => {
                let length = self.below(2000);
                self.bytes(length)
            }
        }
    }
}

/// An archive that grows.
struct Archive<'a> {
    random: &'a mut Random,
    builder: tar::Builder<Vec<u8>>,
    /// Paths of directories and of links to directories, and of files.
    directories: Vec<String>,
    files: Vec<String>,
    /// Directories that are no links.
    closable: Vec<String>,
    names: usize,
}

impl Archive<'_> {
    fn name(&mut self) -> String {
        let directories = std::mem::take(&mut self.directories);
        let parent = &directories[self.random.below(directories.len())];
        self.names += 1;
        let long = if self.random.is(10) { "long".repeat(1 + self.random.below(50)) } else { String::new() };
        // Directories that the archive has no entry of.
        let implied =
            if self.random.is(10) { format!("implied-{}/", self.random.below(3)) } else { String::new() };
        let name = format!("{parent}{implied}{}{long}", self.names);
        self.directories = directories;
        name
    }

    fn header(&mut self, kind: EntryType, mode: u32, size: usize) -> Header {
        let mut header = if self.random.is(50) { Header::new_gnu() } else { Header::new_ustar() };
        header.set_entry_type(kind);
        header.set_uid(self.random.of(&[0, 0, 5, 1000]));
        header.set_gid(self.random.of(&[0, 0, 5]));
        header.set_mode(mode);
        header.set_mtime(self.random.below(1 << 30) as u64);
        header.set_size(size as u64);
        header
    }

    /// Adds an entry, which a header of another type names if its path is too long.
    fn append(&mut self, mut header: Header, name: &str, content: &[u8]) {
        if header.as_ustar().is_some() && name.len() > 90 {
            self.builder.append_pax_extensions([("path", name.as_bytes())]).unwrap();
            header.set_path("short").unwrap();
            header.set_cksum();
            self.builder.append(&header, content).unwrap();
        } else {
            self.builder.append_data(&mut header, name, content).unwrap();
        }
    }

    fn directory(&mut self) {
        let name = self.name();
        let mode = self.random.of(&[0o755, 0o755, 0o700, 0o711, 0o2750, 0o1777, 0o644, 0]);
        let header = self.header(EntryType::Directory, mode, 0);
        self.append(header, &format!("{name}/"), b"");
        self.directories.push(format!("{name}/"));
        self.closable.push(format!("{name}/"));
    }

    fn file(&mut self) {
        let name = self.name();
        let content = self.random.content();
        let mode = self.random.of(&[0o644, 0o644, 0o4755, 0o600, 0o604, 0o440, 0o004, 0]);
        if self.random.is(10) {
            self.builder.append_pax_extensions([("SCHILY.xattr.user.note", &b"kept"[..])]).unwrap();
        }
        let header = self.header(EntryType::Regular, mode, content.len());
        self.append(header, &name, &content);
        self.files.push(name);
    }

    fn link(&mut self) {
        let name = self.name();
        let target = &self.directories[self.random.below(self.directories.len())];
        let target = match self.random.below(4) {
            // Later files make it a directory.
            0 => format!("/made-{}", self.random.below(5)),
            _ => format!("/{}", target.trim_end_matches('/')),
        };
        let mut header = self.header(EntryType::Symlink, 0o777, 0);
        if target.len() < 90 && name.len() < 90 {
            header.set_link_name(&target).unwrap();
            self.append(header, &name, b"");
            self.directories.push(format!("{name}/"));
        }
    }

    /// A hard link, whose mode is then that of its file.
    fn hard_link(&mut self, mode: u32) {
        let name = self.name();
        let Some(target) = self.files.get(self.random.below(self.files.len().max(1))).cloned() else {
            return;
        };
        let header = self.header(EntryType::Link, mode, 0);
        let records = [("path", name.as_bytes()), ("linkpath", target.as_bytes())];
        self.builder.append_pax_extensions(records).unwrap();
        self.append(header, "short", b"");
    }

    fn sparse(&mut self) {
        let name = self.name();
        if name.len() > 90 {
            return;
        }
        let pieces: Vec<usize> = (0..1 + self.random.below(4)).map(|_| 1 + self.random.below(3000)).collect();
        let length = pieces.iter().sum();
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::GNUSparse);
        header.set_mode(self.random.of(&[0o644, 0o600]));
        header.set_uid(self.random.of(&[0, 5]));
        header.set_gid(5);
        header.set_size(length as u64);
        header.set_path(&name).unwrap();
        let octal =
            |number: usize| -> [u8; 12] { format!("{number:011o}\0").into_bytes().try_into().unwrap() };
        let gnu = header.as_gnu_mut().unwrap();
        gnu.realsize = octal(200_000);
        for (number, (slot, length)) in gnu.sparse.iter_mut().zip(&pieces).enumerate() {
            (slot.offset, slot.numbytes) = (octal(number * 50_000), octal(*length));
        }
        header.set_cksum();
        let content = self.random.bytes(length);
        self.builder.append(&header, &content[..]).unwrap();
    }

    /// Adds what hides or replaces content which came before, of one kind for each archive: otherwise one would conceal the others.
    fn hide(&mut self, kind: usize) {
        match kind {
            0 => self.hard_link(0),
            1 => {
                let name = format!("list-{}", self.names);
                self.names += 1;
                let records = [("SCHILY.xattr.system.posix_acl_access", &LIST[..])];
                self.builder.append_pax_extensions(records).unwrap();
                owned(&mut self.builder, &name, EntryType::Regular, (5, 0o644), TEXT);
            }
            2 => {
                let Some(name) = self.closable.get(self.random.below(self.closable.len().max(1))).cloned()
                else {
                    return;
                };
                let header = self.header(EntryType::Directory, 0o700, 0);
                self.append(header, &name, b"");
            }
            _ => {
                let Some(name) = self.files.get(self.random.below(self.files.len().max(1))).cloned() else {
                    return;
                };
                let content = self.random.content();
                let header = self.header(EntryType::Regular, 0o644, content.len());
                self.append(header, &name, &content);
            }
        }
    }

    fn other(&mut self) {
        let name = self.name();
        match self.random.below(3) {
            0 => {
                let header = self.header(EntryType::Fifo, 0o644, 0);
                self.append(header, &name, b"");
            }
            1 => {
                let (parent, name) = name.rsplit_once('/').unwrap_or(("", &name));
                let slash = if parent.is_empty() { "" } else { "/" };
                let header = self.header(EntryType::Regular, 0o644, 0);
                self.append(header, &format!("{parent}{slash}.wh.{name}"), b"");
            }
            _ => {
                let header = self.header(EntryType::Directory, 0o755, 0);
                self.append(header, &format!("./{name}/"), b"");
            }
        }
    }
}

fn random_archive(random: &mut Random) -> Vec<u8> {
    // Half of the archives have nothing that is hidden later.
    let hiding = random.below(8);
    let entries = 5 + random.below(40);
    let builder = tar::Builder::new(Vec::new());
    let directories = vec![String::new()];
    let (files, closable) = Default::default();
    let mut archive = Archive { random, builder, directories, files, closable, names: 0 };
    for _ in 0..entries {
        if hiding < 4 && archive.random.is(10) {
            archive.hide(hiding);
            continue;
        }
        match archive.random.below(20) {
            0..4 => archive.directory(),
            4..7 => archive.link(),
            7..9 => archive.hard_link(0o644),
            9 => archive.sparse(),
            10 => archive.other(),
            _ => archive.file(),
        }
    }
    let mut bytes = archive.builder.into_inner().unwrap();
    match archive.random.below(3) {
        0 => bytes.extend(vec![0; 512 * archive.random.below(20)]),
        1 => bytes.extend(archive.random.content()),
        _ => {}
    }
    bytes
}

/// Makes an archive again as the process that serves does, in ranges of random lengths.
fn made_again(layers: &Layers, name: &str, length: u64, random: &mut Random) -> io::Result<Vec<u8>> {
    let (mut archive, mut buffer) = (Vec::new(), vec![0; 1 + random.below(5000)]);
    while (archive.len() as u64) < length {
        let begin = archive.len() as u64;
        let end = (begin + 1 + random.below(200_000) as u64).min(length);
        let layer = layers.find(name).ok_or(ErrorKind::NotFound)?;
        let (mut ranges, _) = layers.archive(layer, begin)?;
        ranges.send(begin, end, &mut buffer, &mut archive)?;
        layers.keep(ranges);
    }
    Ok(archive)
}

/// Number of chunks of an outline, each of which is in the tree, as its digest shows.
fn chunks_in_tree(outline: &[u8], tree: &Path, about: &str) -> usize {
    let root = open_directory(CWD, tree).unwrap();
    let mut count = 0;
    index::read(outline, &mut |found| {
        let path = String::from_utf8_lossy(found.path);
        let file =
            open_in_layer(&root, found.path).unwrap_or_else(|error| panic!("{about}: {path}: {error}"));
        let mut content = vec![0; found.size as usize];
        file.read_exact_at(&mut content, found.offset).unwrap();
        let digest =
            if content.iter().all(|byte| *byte == 0) { [0; 32] } else { Sha256::digest(&content).into() };
        // Zeros are a chunk of their own only in a long run.
        let is_right = [digest, Sha256::digest(&content).into()].map(|digest| index::prefix(&digest));
        assert!(is_right.contains(&found.prefix), "{about}: {path} at {}", found.offset);
        count += 1;
    })
    .unwrap();
    count
}

#[test]
fn any_archive_is_made_again_or_its_layer_is_not_offered_as_root() {
    let (mut offered, mut others, mut chunks) = (0, 0, 0);
    for image in 0..IMAGES {
        let mut random = Random((image + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let archives: BTreeSet<Vec<u8>> = (0..LAYERS).map(|_| random_archive(&mut random)).collect();
        let archives: Vec<Vec<u8>> = archives.into_iter().collect();
        let scratch = Scratch::of(&format!("random-{image}"), &archives);
        let layers = Layers::new(&scratch.root);
        for (number, archive) in archives.iter().enumerate() {
            let about = format!("layer {number} of image {image}");
            let name = &digest_of(archive)["sha256:".len()..];
            let Some(layer) = layers.find(name) else {
                others += 1;
                continue;
            };
            offered += 1;
            assert_eq!(layer.archive_bytes, archive.len() as u64, "{about}");
            let made = std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    coracle_sandbox::jail::keep_capabilities(&[]).unwrap();
                    made_again(&layers, name, archive.len() as u64, &mut random)
                });
                thread.join().unwrap()
            });
            let made = made.unwrap_or_else(|error| panic!("{about}: {error}"));
            let differs = made.iter().zip(archive).position(|(one, other)| one != other);
            assert!(made == *archive, "{about}: byte {differs:?} of {}", archive.len());
            let outline = fs::read(scratch.root.join("images/contents").join(name)).unwrap();
            chunks += chunks_in_tree(&outline, &scratch.root.join("layers").join(name), &about);
        }
    }
    assert!(offered >= OFFERED_MIN && others >= OTHERS_MIN, "{offered} {others}");
    assert!(chunks > 500, "{chunks}");
}
