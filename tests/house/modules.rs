//! Checks imports between the files of one crate, which cargo does not check. A cycle of files must be read
//! and changed together, so it must be small; a crate above a maximum size should be split, and so should a type that is
//! passed to most functions and has many fields.
//!
//! An import is a path in a `use` line or in code that starts with `crate`, `self`, `super`, a module of
//! the file or an imported name. A re-export (`pub use`) is not an import of its file: its users import from the file to which it
//! refers. Tests are excluded, and so are method calls, which name no file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::{short, without_tests};

/// Maximum number of files of a cycle.
const CYCLE_FILES_MAX: usize = 3;

/// Maximum number of lines of a crate without tests.
const CRATE_LINES_MAX: usize = 12_000;

/// Maximum number of fields of a type in [`SHARED`].
const SHARED_FIELDS_MAX: usize = 8;

/// The types that most functions of their crate get, each with its file: a function that gets many things needs few of
/// them.
const SHARED: [(&str, &str); 9] = [
    ("Container", "runtime/engine/src/pod.rs"),
    ("Daemon", "runtime/daemon/src/daemon.rs"),
    ("Dispatcher", "nri/src/dispatch.rs"),
    ("Engine", "runtime/engine/src/table.rs"),
    ("Images", "runtime/images/src/lib.rs"),
    ("Network", "runtime/network/src/lib.rs"),
    ("Node", "runtime/engine/src/node.rs"),
    ("Pod", "runtime/engine/src/pod.rs"),
    ("Pods", "runtime/engine/src/table.rs"),
];

/// The path of a module within its crate; empty for the crate itself.
type Module = Vec<String>;

/// One file with its imports and re-exports.
struct File {
    path: PathBuf,
    code: String,
    /// The targets of its re-exports.
    exports: BTreeMap<String, Vec<String>>,
    imports: Vec<Vec<String>>,
}

type Crate = BTreeMap<Module, File>;

/// The `src` directories of the crates, except test programs.
fn sources() -> Vec<PathBuf> {
    let manifests = crate::files("Cargo.toml").into_iter().filter(|path| !short(path).starts_with("tests/"));
    manifests.map(|path| path.with_file_name("src")).filter(|path| path.is_dir()).collect()
}

/// All files of a crate except tests.
fn read(source: &Path) -> Crate {
    let mut found = Vec::new();
    crate::walk(source, ".rs", &mut found);
    let mut modules = Crate::new();
    for path in found {
        let inner = path.strip_prefix(source).expect("below it").with_extension("");
        let mut module: Module = inner.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        // The simulated node is a part of tests, too: no program is built with it.
        if module.iter().any(|part| part.ends_with("tests") || part == "simulation") {
            continue;
        }
        if matches!(module.last().map(String::as_str), Some("mod" | "lib" | "main")) {
            module.pop();
        }
        let text = without_tests(&fs::read_to_string(&path).expect("a source file"));
        let code: String = text
            .lines()
            .map(|line| line.split("//").next().unwrap_or_default())
            .collect::<Vec<_>>()
            .join("\n");
        modules.insert(module, File { path, code, exports: BTreeMap::new(), imports: Vec::new() });
    }
    let known: BTreeSet<Module> = modules.keys().cloned().collect();
    for (module, file) in &mut modules {
        (file.exports, file.imports) = paths(&file.code, module, &known);
    }
    modules
}

/// The re-exports of a file, and the paths in its other code, relative to the crate.
fn paths(
    code: &str,
    module: &Module,
    known: &BTreeSet<Module>,
) -> (BTreeMap<String, Vec<String>>, Vec<Vec<String>>) {
    let (mut exports, mut imports) = (BTreeMap::new(), Vec::new());
    let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut rest = String::new();
    let mut lines = code.lines();
    while let Some(line) = lines.next() {
        let words = line.trim_start();
        let is_public = words.starts_with("pub");
        let after =
            match words.strip_prefix("pub").map(|rest| rest.trim_start_matches(|c| c != ' ').trim_start()) {
                Some(after) => after,
                None => words,
            };
        let Some(tree) = after.strip_prefix("use ") else {
            rest.push_str(line);
            rest.push('\n');
            continue;
        };
        let mut tree = tree.to_owned();
        while !tree.contains(';') {
            tree.push_str(lines.next().expect("the end of a use line"));
        }
        let mut leaves = Vec::new();
        expand(&mut Vec::new(), tree.split(';').next().unwrap_or_default(), &mut leaves);
        for (path, name) in leaves {
            let Some(path) = from_crate(&path, module, known) else { continue };
            names.insert(name.clone(), path.clone());
            match is_public {
                true => drop(exports.insert(name, path)),
                false => imports.push(path),
            }
        }
    }
    for path in inline(&rest) {
        // `layout::find` after `use crate::cgroup::layout`.
        let of_import = names.get(&path[0]).map(|start| [&start[..], &path[1..]].concat());
        imports.extend(of_import.or_else(|| from_crate(&path, module, known)));
    }
    // A re-export that the file uses itself is an import, too.
    let is_used =
        |name: &str| rest.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == name);
    imports.extend(exports.iter().filter(|(name, _)| is_used(name)).map(|(_, path)| path.clone()));
    (exports, imports)
}

/// The leaves of a use tree, each with its new name.
fn expand(prefix: &mut Vec<String>, tree: &str, leaves: &mut Vec<(Vec<String>, String)>) {
    let tree = tree.trim();
    if let Some(inner) = tree.strip_prefix('{').and_then(|inner| inner.strip_suffix('}')) {
        let mut depth = 0;
        let parts = inner.split(|c| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            c == ',' && depth == 0
        });
        parts.filter(|part| !part.trim().is_empty()).for_each(|part| expand(prefix, part, leaves));
        return;
    }
    if let Some((first, more)) = tree.split_once("::") {
        prefix.push(first.trim().to_owned());
        expand(prefix, more, leaves);
        prefix.pop();
        return;
    }
    let (last, name) = tree.split_once(" as ").unwrap_or((tree, tree));
    let mut path = prefix.clone();
    if last != "self" {
        path.push(last.trim().to_owned());
    }
    let name =
        if name == "self" { prefix.last().cloned().unwrap_or_default() } else { name.trim().to_owned() };
    leaves.push((path, name));
}

/// Paths in code: names separated by `::`.
fn inline(code: &str) -> Vec<Vec<String>> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let words = code.split(|c| !is_name(c)).filter(|word| word.contains("::") && !word.starts_with(':'));
    words.map(|word| word.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect()).collect()
}

/// A path relative to the crate; `None` if it refers to another crate.
fn from_crate(path: &[String], module: &Module, known: &BTreeSet<Module>) -> Option<Vec<String>> {
    let (first, more) = path.split_first()?;
    let mut start = match first.as_str() {
        "crate" => Module::new(),
        "self" => module.clone(),
        "super" => module[..module.len().checked_sub(1)?].to_vec(),
        name => {
            let child: Module = module.iter().cloned().chain([name.to_owned()]).collect();
            known.contains(&child).then_some(child)?
        }
    };
    for part in more {
        match part.as_str() {
            "super" => drop(start.pop()),
            "self" => {}
            name => start.push(name.to_owned()),
        }
    }
    Some(start)
}

/// The file to which a path refers, through re-exports.
fn target(crate_: &Crate, path: &[String]) -> Option<Module> {
    let mut path = path.to_vec();
    // The maximum length of a chain of re-exports.
    for _ in 0..8 {
        let length = (0..=path.len()).rev().find(|length| crate_.contains_key(&path[..*length]))?;
        let file = &crate_[&path[..length]];
        match path.get(length).and_then(|name| file.exports.get(name)) {
            Some(further) if further[..] != path[..] => path.clone_from(further),
            _ => return Some(path[..length].to_vec()),
        }
    }
    None
}

/// Sets of several files that reach each other by imports.
fn cycles(crate_: &Crate) -> Vec<BTreeSet<&Module>> {
    let arrows: BTreeMap<&Module, BTreeSet<Module>> = crate_
        .iter()
        .map(|(module, file)| {
            let targets = file.imports.iter().filter_map(|path| target(crate_, path));
            (module, targets.filter(|other| other != module).collect())
        })
        .collect();
    let reached = |from: &Module| -> BTreeSet<Module> {
        let mut reached = BTreeSet::new();
        let mut open: Vec<Module> = arrows[from].iter().cloned().collect();
        while let Some(next) = open.pop() {
            if reached.insert(next.clone()) {
                open.extend(arrows[&next].iter().cloned());
            }
        }
        reached
    };
    let all: BTreeMap<&Module, BTreeSet<Module>> =
        crate_.keys().map(|module| (module, reached(module))).collect();
    let mut cycles: Vec<BTreeSet<&Module>> = Vec::new();
    for (module, beyond) in &all {
        let is_known = cycles.iter().any(|cycle| cycle.contains(module));
        if beyond.contains(*module) && !is_known {
            cycles.push(
                beyond
                    .iter()
                    .filter(|other| all[other].contains(*module))
                    .map(|m| all.get_key_value(m).map_or(*module, |(key, _)| *key))
                    .collect(),
            );
        }
    }
    cycles
}

#[test]
fn no_cycle_of_files_is_large() {
    let mut large = Vec::new();
    for source in sources() {
        let crate_ = read(&source);
        for cycle in cycles(&crate_).into_iter().filter(|cycle| cycle.len() > CYCLE_FILES_MAX) {
            let files: Vec<String> = cycle.iter().map(|module| short(&crate_[*module].path)).collect();
            large.push(files);
        }
    }
    assert!(large.is_empty(), "more than {CYCLE_FILES_MAX} files import each other: {large:#?}");
}

/// Number of fields of a struct in rustfmt's layout; `None` if the text does not have it.
fn fields(text: &str, name: &str) -> Option<usize> {
    let is_head = |line: &&str| {
        let after = line.split_once("struct ").map_or("", |(_, after)| after);
        line.ends_with('{') && after.split([' ', '<']).next() == Some(name)
    };
    let mut lines = text.lines();
    lines.find(is_head)?;
    let is_field = |line: &str| {
        let inner = line.strip_prefix("    ").unwrap_or_default();
        !inner.starts_with([' ', '/', '#', '}']) && inner.contains(':')
    };
    Some(lines.take_while(|line| *line != "}").filter(|line| is_field(line)).count())
}

#[test]
fn no_shared_type_has_many_fields() {
    assert_eq!(
        fields(
            "/// A: b\nstruct A<'a> {\n    /// C: d\n    c: E,\n    pub f: G,\n}\nstruct H {\n    i: J,\n}\n",
            "A"
        ),
        Some(2)
    );
    let mut large = Vec::new();
    for (name, path) in SHARED {
        let text = fs::read_to_string(crate::root().join(path)).expect("a source file");
        let fields = fields(&text, name).unwrap_or_else(|| panic!("{path} has no {name}"));
        if fields > SHARED_FIELDS_MAX {
            large.push((name, fields));
        }
    }
    assert!(large.is_empty(), "more than {SHARED_FIELDS_MAX} fields: {large:?}");
}

#[test]
fn no_crate_is_large() {
    let mut large = Vec::new();
    for source in sources() {
        let files = read(&source).into_values();
        let lines: usize = files
            .map(|file| {
                without_tests(&fs::read_to_string(&file.path).expect("a source file")).lines().count()
            })
            .sum();
        if lines > CRATE_LINES_MAX {
            large.push((short(&source), lines));
        }
    }
    assert!(large.is_empty(), "more than {CRATE_LINES_MAX} lines: {large:?}");
}

#[test]
fn imports_are_found_in_use_lines_in_code_and_through_names_and_re_exports() {
    let files = [
        ("", "mod a;\nmod b;\npub use b::Item;\n"),
        ("a", "use crate::b;\nfn f() { b::inner::call(); super::c::call() }\n"),
        ("b", "pub mod inner;\npub struct Item;\n"),
        ("b/inner", "use crate::{\n    Item,\n    a::f as g,\n};\n"),
        ("c", "fn call() { other::crate_::call() }\n"),
    ];
    let module = |name: &str| -> Module {
        name.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect()
    };
    let known: BTreeSet<Module> = files.iter().map(|(name, _)| module(name)).collect();
    let crate_: Crate = files
        .iter()
        .map(|(name, code)| {
            let (exports, imports) = paths(code, &module(name), &known);
            (module(name), File { path: PathBuf::from(name), code: (*code).to_owned(), exports, imports })
        })
        .collect();
    let targets = |name: &str| -> BTreeSet<String> {
        let found = crate_[&module(name)].imports.iter().filter_map(|path| target(&crate_, path));
        found.map(|target| target.join("/")).collect()
    };
    assert_eq!(targets("a"), ["b", "b/inner", "c"].map(str::to_owned).into());
    assert_eq!(targets("b/inner"), ["a", "b"].map(str::to_owned).into());
    assert_eq!(targets("c"), BTreeSet::new());
    let cycles: Vec<Vec<String>> =
        cycles(&crate_).into_iter().map(|cycle| cycle.into_iter().map(|m| m.join("/")).collect()).collect();
    assert_eq!(cycles, [["a", "b/inner"]]);
}
