//! What archives and CDI files of attackers make of the memory of workers, which other processes of a small node need. The rows of
//! docs/security.md, "Bounds of parsers", that are about these; a zstd frame, which may ask for a window of 512 MiB, is not among them.

use std::time::Duration;

use coracle_tests::cri::proto::CdiDevice;
use coracle_tests::host::{children, proc_value};
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{container, create, host_pod};
use serde_json::json;

/// Maximum anonymous memory of one worker process in KiB. Memory of files, such as the program, is not counted.
const KIB_MAX: u64 = 64 << 10;

/// Makes a call; returns its result, and the most anonymous memory in KiB that a worker or a process of it had.
fn peak_of<T: Send>(node: &Node, call: impl FnOnce() -> T + Send) -> (T, u64) {
    std::thread::scope(|scope| {
        let calling = scope.spawn(call);
        let mut peak = 0;
        while !calling.is_finished() {
            let workers = node.workers().into_iter().map(|worker| worker.pid);
            let all = workers.flat_map(|worker| children(worker).into_iter().chain([worker]));
            peak = all.filter_map(|pid| proc_value(pid, "status", "RssAnon")).fold(peak, u64::max);
            std::thread::sleep(Duration::from_millis(2));
        }
        (calling.join().expect("no panic"), peak)
    })
}

#[test]
fn what_an_archive_makes_of_a_worker_is_bounded() {
    let node = Node::start();
    let part = format!("{}/", "n".repeat(250));
    let path = |number: usize| format!("{}{number}", part.repeat(14));
    let of = |count: usize, make: &dyn Fn(usize) -> Entry| -> Vec<u8> {
        let entries: Vec<Entry> = (0..count).map(make).collect();
        let layer = Layer::new(&entries, Compression::Gzip);
        Image::probe(&node.probe(), "memory").plus(layer).oci_archive("example.test/memory:1")
    };
    let words = |count: usize| Image::probe(&node.probe(), "words").with("Cmd", json!(vec![""; count]));
    let links: Vec<Entry> = (0..20_000).map(|number| Entry::symlink(&path(number), &path(number))).collect();
    let attribute = vec![b'y'; 900_000];
    // The text of the refusal; none if the archive is imported.
    let cases: [(&str, Vec<u8>, Option<&str>); 9] = [
        ("one directory again and again", of(20_000, &|_| Entry::directory(&path(0), 0o755)), None),
        (
            "many directories",
            of(12_000, &|number| Entry::directory(&path(number), 0o755)),
            Some("directories"),
        ),
        ("implied directories", of(2_000, &|number| Entry::file(&format!("{}/x", path(number)), b"")), None),
        (
            "opaque directories",
            of(5_000, &|number| Entry::whiteout(&path(number), ".wh..opq")),
            Some("opaque directories"),
        ),
        (
            "attributes that are set later",
            of(100, &|number| Entry::directory(&number.to_string(), 0o755).xattr("security.x", &attribute)),
            Some("security attributes"),
        ),
        ("files without content", of(5_000, &|number| Entry::file(&format!("f/{number}"), b"")), None),
        (
            "hard links",
            of(5_000, &|number| match number {
                0 => Entry::file("f", b""),
                _ => Entry::hard_link(&format!("f{number}"), "f"),
            }),
            None,
        ),
        (
            "words of a configuration",
            words(1_300_000).oci_archive("example.test/memory:1"),
            Some("more than"),
        ),
        ("names of an archive", Layer::new(&links, Compression::Gzip).blob, Some("bytes of names")),
    ];
    for (name, archive, refusal) in cases {
        assert!(archive.len() < 16 << 20, "{name}: {} bytes", archive.len());
        let (imported, peak) = peak_of(&node, || node.try_import(&archive));
        match (&imported, refusal) {
            (Ok(_), None) => {}
            (Err(said), Some(why)) => assert!(said.contains(why), "{name}: {said}"),
            _ => panic!("{name}: {imported:?}"),
        }
        assert!((1..KIB_MAX).contains(&peak), "{name}: {peak} KiB");
    }
    node.stop();
}

/// Files of as many bytes as are read, which make as much as they can. Each is refused for its number of values.
#[test]
fn what_cdi_files_make_of_a_worker_is_bounded() {
    /// Maximum length of a file without its first lines, and number of such files that are read.
    const BYTES: usize = (1 << 20) - 200;
    const FILES: usize = 4;
    /// Maximum anonymous memory in KiB: the parser keeps the tokens of a list in brackets until its end.
    const CDI_KIB_MAX: u64 = 192 << 10;
    let folder = std::env::temp_dir().join(format!("coracle-cdi-memory-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a directory");
    let config = format!("[cdi]\nspec_dirs = [{folder:?}]\n");
    let node = Node::with(Options { config, ..Options::default() });
    let image = node.import_probe();
    let pod = host_pod("memory");
    let pod_id = node.run_pod(&pod);
    let mut devices = String::new();
    for number in 0.. {
        let device = format!("{{name: d{number}, containerEdits: {{}}}},");
        if devices.len() + device.len() > BYTES {
            break;
        }
        devices += &device;
    }
    let of = |word: &str| {
        let words = word.repeat(BYTES / word.len() - 50);
        format!("{{name: d0, containerEdits: {{env: [{words}]}}}}")
    };
    let cases = [("devices", devices), ("no text", of("\"\",")), ("letters", of("a,")), ("lists", of("[],"))];
    for (number, (what, devices)) in cases.into_iter().enumerate() {
        for number in 0..FILES {
            let text = format!("cdiVersion: 0.6.0\nkind: vendor.test/k{number}\ndevices: [{devices}]\n");
            std::fs::write(folder.join(format!("{number}.yaml")), text).expect("a file");
        }
        let mut config = container(&format!("c{number}"), &image, &["sleep", "forever"], &pod);
        config.cdi_devices.push(CdiDevice { name: "vendor.test/k0=d0".into() });
        let (created, peak) = peak_of(&node, || node.create_container(create(&pod_id, &config, &pod)));
        println!("{what}: {peak} KiB");
        let refused = created.expect_err(what);
        assert!(refused.message().contains("more than 8388608 bytes of values"), "{what}: {refused}");
        assert!((1..CDI_KIB_MAX).contains(&peak), "{what}: {peak} KiB");
    }
    node.remove_pod(&pod_id);
    node.stop();
    std::fs::remove_dir_all(folder).expect("ours");
}
