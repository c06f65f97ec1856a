//! The pages, their lines and the rules of these: completeness in both directions, and rules that refer to files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use coracle_tests::page_rules::{Act, Rule, absent, all};

use crate::extract::{self, Group, Kind, Line};

/// The pages for users of nodes. Those for developers of coracle itself are not among them.
pub(crate) const PAGES: [&str; 20] = [
    "README.md",
    "docs/install-k3s.md",
    "docs/install-kubelet.md",
    "docs/install-packages.md",
    "docs/upgrade.md",
    "docs/migration.md",
    "docs/production.md",
    "docs/troubleshooting.md",
    "docs/commands.md",
    "docs/gpus.md",
    "docs/cni.md",
    "docs/registries.md",
    "docs/faq.md",
    "docs/metrics.md",
    "docs/check.md",
    "docs/images.md",
    "docs/config.md",
    "docs/kernel.md",
    "docs/glossary.md",
    "packaging/README.md",
];

/// The workspace.
pub(crate) fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace")
}

pub(crate) fn read(name: &str) -> String {
    fs::read_to_string(workspace().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The first rule for a line; rules with a row come before those without one.
pub(crate) fn rule_of<'a>(rules: &'a [Rule], page: &str, line: &Line) -> Option<&'a Rule> {
    let fits = |rule: &&Rule| rule.page == page && rule.line == line.text && line.row.contains(&rule.row);
    let with_row = rules.iter().filter(|rule| !rule.row.is_empty()).find(fits);
    with_row.or_else(|| rules.iter().filter(|rule| rule.row.is_empty()).find(fits))
}

/// The lines of all pages with their place and rule; `None` for lines whose program no test can have.
pub(crate) fn ruled(rules: &[Rule]) -> Vec<(String, Line, Option<&Rule>)> {
    let lines = PAGES
        .iter()
        .flat_map(|page| extract::lines(&read(page)).into_iter().map(move |line| (page.to_string(), line)));
    lines.map(|(page, line)| (page.clone(), line.clone(), rule_of(rules, &page, &line))).collect()
}

fn is_absent(line: &Line) -> bool {
    let program = line.text.split(' ').next().unwrap_or_default();
    absent().iter().any(|(name, _)| name == program)
}

#[test]
fn each_shell_line_of_the_pages_has_a_rule() {
    let rules = all();
    let mut missing = Vec::new();
    // Of each page: run on nodes, in a guest, elsewhere, not run.
    let mut counts: BTreeMap<String, [usize; 4]> = BTreeMap::new();
    for (page, line, rule) in ruled(&rules) {
        let index = match rule.map(|rule| &rule.act) {
            Some(Act::Run { .. }) => 0,
            Some(Act::Guest(_)) => 1,
            Some(Act::Elsewhere { .. }) => 2,
            None if is_absent(&line) => 3,
            None => {
                missing.push(format!("{page}:{}: {}", line.number, line.text));
                continue;
            }
        };
        counts.entry(page).or_default()[index] += 1;
    }
    println!("on nodes, in a guest, elsewhere, not run: {counts:#?}");
    assert!(missing.is_empty(), "add a rule to tests/docs/rules.toml:\n{}", missing.join("\n"));
}

#[test]
fn each_rule_is_that_of_a_line() {
    let rules = all();
    let name = |rule: &Rule| format!("{}: {} {}", rule.page, rule.row, rule.line);
    let used: BTreeSet<_> = ruled(&rules).iter().filter_map(|(.., rule)| rule.map(name)).collect();
    let rest: Vec<_> = rules.iter().map(name).filter(|name| !used.contains(name)).collect();
    assert!(rest.is_empty(), "rules of lines that no page has:\n{}", rest.join("\n"));
    let names: BTreeSet<_> = rules.iter().map(name).collect();
    assert_eq!(names.len(), rules.len(), "two rules for one line");
    let lines: Vec<_> = PAGES.iter().flat_map(|page| extract::lines(&read(page))).collect();
    for (program, _) in absent() {
        let is_there = lines.iter().any(|line| line.text.split(' ').next() == Some(&program));
        assert!(is_there, "no page has the program {program}");
    }
}

/// A scene without a test would run none of its lines.
#[test]
fn each_scene_has_a_test() {
    let sources = ["scenes.rs", "images.rs", "walk.rs"].map(|name| read(&format!("tests/docs/{name}")));
    for rule in all() {
        let Act::Run { scene, .. } = &rule.act else { continue };
        let call = format!("\"{scene}\"");
        assert!(sources.iter().any(|source| source.contains(&call)), "{}: {scene}", rule.line);
    }
}

#[test]
fn tests_that_rules_name_have_the_text_of_the_rule() {
    for rule in all() {
        if let Act::Elsewhere { file, text } = &rule.act {
            assert!(read(file).contains(text.as_str()), "{}: {file} lacks {text:?}", rule.line);
        }
    }
}

/// The guest's test runs the lines by their rules; here is only checked that it exists and is run.
#[test]
fn the_guest_runs_the_lines_that_need_systemd() {
    assert!(all().iter().any(|rule| matches!(rule.act, Act::Guest(_))));
    assert!(read("tests/inside/systemd/pages.rs").contains("page_rules::all()"));
    assert!(read("tests/qemu/systemd.rs").contains("CORACLE_TESTS=systemd::"));
}

/// Symptoms of the table that other programs print, or that are no quotation.
const OF_OTHERS: [&str; 6] = [
    "CPU limits do not hold",
    "unauthorized",
    "denied",
    "toomanyrequests",
    "no space left on device",
    "/app",
];

/// Users search the page for the error that they see.
#[test]
fn quoted_symptoms_are_texts_of_the_programs() {
    let mut sources = Vec::new();
    for folder in ["runtime", "sandbox", "nri"] {
        sources_below(&workspace().join(folder), &mut sources);
    }
    let page = read("docs/troubleshooting.md");
    let cells = page.lines().filter_map(|line| line.strip_prefix("| "));
    let symptoms = cells.filter_map(|line| line.split(" | ").next());
    let mut count = 0;
    for quoted in symptoms.flat_map(|cell| cell.split('"').skip(1).step_by(2)) {
        for part in quoted.split('…').flat_map(|part| part.split("; ")).flat_map(|part| part.split(": ")) {
            let is_of_others = OF_OTHERS.contains(&part) || part.trim().is_empty();
            let is_there = sources.iter().any(|source| source.contains(part.trim()));
            assert!(is_of_others || is_there, "no program says {part:?} of docs/troubleshooting.md");
            count += 1;
        }
    }
    assert!(count > 15, "{count} symptoms");
}

fn sources_below(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources_below(&path, found);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            found.push(fs::read_to_string(path).expect("a source"));
        }
    }
}

/// The code blocks of this kind in all pages.
pub(crate) fn blocks(kind: Kind) -> Vec<(&'static str, Group)> {
    let groups =
        PAGES.iter().flat_map(|page| extract::groups(&read(page)).into_iter().map(|group| (*page, group)));
    groups.filter(|(_, group)| group.kind == kind).collect()
}
