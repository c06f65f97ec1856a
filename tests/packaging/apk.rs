//! The .apk by its format, since Debian 12 has no apk: three gzip members at most, of which without a
//! signature the first is the control segment and the second the data; its scripts in a chroot, with busybox's shell as on Alpine.

use std::collections::BTreeMap;
use std::io::{Cursor, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use coracle_tests::node::binaries;
use flate2::bufread::GzDecoder;
use sha2::{Digest, Sha256};

use crate::dist::stand_ins;
use crate::root::visit;
use crate::{Folder, package, run, said};

/// A segment: its compressed bytes, and the archive in them.
pub(crate) struct Segment {
    pub(crate) packed: Vec<u8>,
    pub(crate) archive: Vec<u8>,
}

impl Segment {
    /// SHA-256 of the compressed bytes in hexadecimal.
    pub(crate) fn digest(&self) -> String {
        Sha256::digest(&self.packed).iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The segments of a package; the error is about damaged ones.
pub(crate) fn segments(package: &Path) -> Result<Vec<Segment>, String> {
    let bytes = std::fs::read(package).expect("a package");
    let mut rest = &bytes[..];
    let mut all = Vec::new();
    while !rest.is_empty() {
        let mut decoder = GzDecoder::new(Cursor::new(rest));
        let mut archive = Vec::new();
        decoder.read_to_end(&mut archive).map_err(|error| error.to_string())?;
        let used = decoder.into_inner().position() as usize;
        all.push(Segment { packed: rest[..used].to_vec(), archive });
        rest = &rest[used..];
    }
    Ok(all)
}

/// The entries of a segment: name, and type, mode, content and the pax header with apk's checksum.
fn entries(segment: &Segment) -> BTreeMap<String, (bool, u32, Vec<u8>, Option<String>)> {
    let mut archive = tar::Archive::new(&segment.archive[..]);
    let mut found = BTreeMap::new();
    for entry in archive.entries().expect("an archive") {
        let mut entry = entry.expect("an entry");
        let pax = entry.pax_extensions().expect("headers");
        let sum = pax.into_iter().flatten().flatten().find_map(|header| {
            let is_sum = header.key() == Ok("APK-TOOLS.checksum.SHA1");
            is_sum.then(|| header.value().expect("text").to_owned())
        });
        let (header, name) = (entry.header().clone(), entry.path().expect("a name").display().to_string());
        assert_eq!((header.uid().ok(), header.gid().ok()), (Some(0), Some(0)), "{name}");
        let mut content = Vec::new();
        entry.read_to_end(&mut content).expect("content");
        let is_file = header.entry_type().is_file();
        found.insert(name, (is_file, header.mode().expect("a mode"), content, sum));
    }
    found
}

fn sha1(content: &[u8]) -> String {
    use std::io::Write;
    let mut program =
        Command::new("sha1sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sha1sum");
    program.stdin.take().expect("a pipe").write_all(content).expect("its input");
    let output = program.wait_with_output().expect("its output");
    String::from_utf8_lossy(&output.stdout).split(' ').next().expect("a sum").to_owned()
}

#[test]
fn control_data_and_checksums_are_as_apk_reads_them() {
    let folder = Folder::new("apk");
    let package = package(&folder, "apk", &stand_ins(&folder, "programs", 0o755));
    let segments = segments(&package).expect("gzip");
    assert_eq!(segments.len(), 2, "control and data: not signed (signatures.rs)");
    let control = entries(&segments[0]);
    let info = String::from_utf8(control[".PKGINFO"].2.clone()).expect("text");
    let value = |key: &str| {
        let found = info.lines().find_map(|line| line.strip_prefix(&format!("{key} = ")));
        found.unwrap_or_else(|| panic!("no {key}: {info}")).to_owned()
    };
    assert_eq!(value("pkgname"), "coracle");
    assert_eq!(value("pkgver"), format!("{}-r0", env!("CARGO_PKG_VERSION")));
    assert_eq!(value("arch"), std::env::consts::ARCH);
    assert_eq!(value("datahash"), segments[1].digest());
    assert!(info.lines().all(|line| line.starts_with('#') || line.contains(" = ")), "{info}");
    let scripts = [".post-deinstall", ".post-install", ".post-upgrade", ".pre-deinstall"];
    assert!(scripts.iter().all(|name| control[*name].1 & 0o111 != 0), "{:?}", control.keys());

    let data = entries(&segments[1]);
    for (name, (is_file, _, content, sum)) in &data {
        assert!(!is_file || sum.as_deref() == Some(&sha1(content)), "{name}: {sum:?}");
    }
    let modes =
        [("etc/init.d/coracle", 0o755), ("etc/conf.d/coracle", 0o644), ("etc/coracle/config.toml", 0o644)];
    for (name, mode) in modes {
        assert_eq!(data[name].1, mode, "{name}");
    }
    assert!(data.keys().any(|name| name.trim_end_matches('/') == "etc/coracle/conf.d"), "{:?}", data.keys());
    assert!(!data.keys().any(|name| name.contains("systemd")), "{:?}", data.keys());
}

/// apk keeps a changed file below /etc by itself; what the scripts do is ours.
#[test]
fn scripts_of_the_apk_run_in_busybox_and_leave_only_images() {
    let folder = Folder::new("apk-scripts");
    let package = package(&folder, "apk", &binaries());
    let control = folder.path().join("control.tar");
    std::fs::write(&control, &segments(&package).expect("gzip")[0].archive).expect("a file");
    let script = "tar -C / -xzf /run/pkg/coracle.apk --warning=no-unknown-keyword
mkdir /run/control
tar -C /run/control -xf /run/pkg/control.tar
rm -f /.PKGINFO /.p*-*
coracle version
busybox sh -e /run/control/.post-install 0.1.0-r0
busybox sh -e /run/control/.post-upgrade 0.1.1-r0 0.1.0-r0
busybox sh -n /etc/init.d/coracle
grep -q coracle.sock /etc/crictl.yaml
--
mkdir -p /var/lib/coracle /run/coracle
echo x >/var/lib/coracle/blob
busybox sh -e /run/control/.pre-deinstall 0.1.0-r0
tar -tzf /run/pkg/coracle.apk --warning=no-unknown-keyword | grep coracle | grep -v /$ | (cd / && xargs rm)
busybox sh -e /run/control/.post-deinstall 0.1.0-r0
test ! -e /run/coracle";
    let done = visit(&folder, &[("coracle.apk", &package), ("control.tar", &control)], script);
    assert!(done.said.contains("rc-update add coracle"), "{}", done.said);
    assert_eq!(done.left[1], ["var/lib/coracle/blob"], "{}", done.said);
    // Only gzip and tar: as a check that the whole package is one stream for them.
    let listed = run(Command::new("tar").arg("-tzf").arg(&package));
    assert!(listed.status.success(), "{}", said(&listed));
}
