//! The software bill of materials: against the programs, which have paths of sources in their messages, and
//! against Cargo.lock.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use coracle_tests::node::binaries;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{EPOCH, Folder, release, workspace};

const PROGRAMS: [&str; 3] = ["coracled", "coracle", "coracle-pod"];

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("no list: {value}"))
}

/// `NAME-VERSION` of every crate of a registry whose path is in the program.
fn crates_in(program: &Path) -> BTreeSet<String> {
    let bytes = std::fs::read(program).expect("a program");
    let text = String::from_utf8_lossy(&bytes);
    let paths = text.split("registry/src/").skip(1);
    paths.filter_map(|path| Some(path.split('/').nth(1)?.to_owned())).collect()
}

#[test]
fn the_sbom_has_exactly_the_crates_of_the_programs() {
    let folder = Folder::new("sbom");
    let out = folder.path().join("out");
    let triple = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    release(&out, &binaries(), EPOCH, "sbom", &[&triple]);
    let name = format!("coracle-{}-{triple}.cdx.json", env!("CARGO_PKG_VERSION"));
    let bom: Value = serde_json::from_slice(&std::fs::read(out.join(name)).expect("an SBOM")).expect("JSON");
    assert_eq!((text(&bom["bomFormat"]), text(&bom["specVersion"])), ("CycloneDX", "1.5"));

    let components: BTreeMap<String, &Value> = list(&bom["components"])
        .iter()
        .map(|each| (format!("{}-{}", text(&each["name"]), text(&each["version"])), each))
        .collect();
    assert_eq!(components.len(), list(&bom["components"]).len(), "one is there twice");
    for program in PROGRAMS {
        let inside = crates_in(&binaries().join(program));
        let missing: Vec<_> = inside.iter().filter(|one| !components.contains_key(*one)).collect();
        assert!(missing.is_empty(), "{program} has {missing:?}");
    }
    assert!(!crates_in(&binaries().join("coracle")).is_empty(), "the programs name no sources");
    for (name, component) in &components {
        for absent in ["serde_derive-", "tonic-build-", "cc-1", "windows", "unicase-"] {
            assert!(!name.starts_with(absent), "{name}");
        }
        assert!(!text(&component["licenses"][0]["expression"]).contains('/'), "{component}");
    }
    sums_are_those_of_cargo_and_of_the_programs(&bom, &components);
    references_are_of_components(&bom);
}

fn sums_are_those_of_cargo_and_of_the_programs(bom: &Value, components: &BTreeMap<String, &Value>) {
    let lock = std::fs::read_to_string(workspace().join("Cargo.lock")).expect("Cargo.lock");
    let lock: toml::Table = lock.parse().expect("TOML");
    let mut compared = 0;
    for package in lock["package"].as_array().expect("packages") {
        let of = |key: &str| package.get(key).and_then(toml::Value::as_str);
        let name = format!("{}-{}", of("name").expect("a name"), of("version").expect("a version"));
        let Some(component) = components.get(&name) else { continue };
        assert_eq!(component["hashes"][0]["content"].as_str(), of("checksum"), "{name}");
        compared += 1;
    }
    // All but Rust's library and musl, which are not of cargo.
    assert_eq!(compared + 2, components.len());
    let programs = list(&bom["metadata"]["component"]["components"]);
    assert_eq!(programs.len(), PROGRAMS.len());
    for (program, name) in programs.iter().zip(PROGRAMS) {
        let bytes = std::fs::read(binaries().join(name)).expect("a program");
        let sum: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(text(&program["hashes"][0]["content"]), sum, "{name}");
    }
}

fn references_are_of_components(bom: &Value) {
    let mut known: BTreeSet<&str> =
        list(&bom["components"]).iter().map(|each| text(&each["bom-ref"])).collect();
    known.insert(text(&bom["metadata"]["component"]["bom-ref"]));
    let mut sources = BTreeSet::new();
    for each in list(&bom["dependencies"]) {
        assert!(sources.insert(text(&each["ref"])), "{} is there twice", each["ref"]);
        for one in std::iter::once(&each["ref"]).chain(list(&each["dependsOn"])) {
            assert!(known.contains(text(one)), "{one} is no component");
        }
    }
}
