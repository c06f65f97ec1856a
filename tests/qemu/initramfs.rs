//! A newc archive (Documentation/driver-api/early-userspace/buffer-format.rst) with everything that a guest
//! needs before its disk is mounted: busybox, a script, and kernel modules in the order in which they can be
//! loaded.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// An archive that is built in memory.
#[derive(Default)]
pub(crate) struct Initramfs {
    bytes: Vec<u8>,
    inode: u32,
}

impl Initramfs {
    pub(crate) fn directory(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    pub(crate) fn program(&mut self, name: &str, content: &[u8]) {
        self.entry(name, 0o100_755, content);
    }

    /// Ends the archive and returns it.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.inode += 1;
        let (inode, size, length) = (self.inode, content.len(), name.len() + 1);
        // Magic number, then thirteen numbers: owner, time, device and checksum are 0.
        let head = format!(
            "070701{inode:08x}{mode:08x}{0:08x}{0:08x}{1:08x}{0:08x}{size:08x}{0:08x}{0:08x}{0:08x}{0:08x}{length:08x}{0:08x}",
            0, 1
        );
        self.bytes.extend(head.as_bytes());
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// The files of the modules `wanted` in a kernel's directory, each after its dependencies; built-in ones are
/// omitted.
pub(crate) fn modules(kernel: &Path, wanted: &[&str]) -> Vec<PathBuf> {
    let mut known = BTreeMap::new();
    collect(kernel, &mut known);
    let mut ordered = Vec::new();
    for name in wanted {
        add(name, &known, &mut ordered);
    }
    ordered
}

fn add(name: &str, known: &BTreeMap<String, PathBuf>, ordered: &mut Vec<PathBuf>) {
    let Some(path) = known.get(name) else { return };
    if ordered.contains(path) {
        return;
    }
    let bytes = fs::read(path).expect("a module");
    // A string of the section .modinfo.
    let depends = find(&bytes, b"\0depends=").map(|start| {
        let rest = &bytes[start..];
        String::from_utf8_lossy(&rest[..rest.iter().position(|byte| *byte == 0).unwrap_or(0)]).into_owned()
    });
    for one in depends.unwrap_or_default().split(',').filter(|one| !one.is_empty()) {
        add(&one.replace('-', "_"), known, ordered);
    }
    ordered.push(path.clone());
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what).map(|start| start + what.len())
}

fn collect(folder: &Path, known: &mut BTreeMap<String, PathBuf>) {
    for entry in fs::read_dir(folder).expect("a kernel's modules").flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, known);
        } else if let Some(name) = path.file_name().and_then(|name| name.to_str())
            && let Some(name) = name.strip_suffix(".ko")
        {
            known.insert(name.replace('-', "_"), path);
        }
    }
}
