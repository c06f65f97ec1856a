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

/// The directory of the workspace.
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

/// The lines of all pages with their position and rule; `None` for lines whose program no test can have.
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
    let (mut missing, mut not_run) = (Vec::new(), Vec::new());
    // Of each page: run on nodes, in a guest, elsewhere, not run.
    let mut counts: BTreeMap<String, [usize; 4]> = BTreeMap::new();
    for (page, line, rule) in ruled(&rules) {
        let index = match rule.map(|rule| &rule.act) {
            Some(Act::Run { .. }) => 0,
            Some(Act::Guest(_)) => 1,
            Some(Act::Elsewhere { .. }) => 2,
            None if is_absent(&line) => {
                not_run.push(format!("{page}:{}: {}", line.number, line.text));
                3
            }
            None => {
                missing.push(format!("{page}:{}: {}", line.number, line.text));
                continue;
            }
        };
        counts.entry(page).or_default()[index] += 1;
    }
    println!("on nodes, in a guest, elsewhere, not run: {counts:#?}\n{}", not_run.join("\n"));
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

/// A group without a test would run none of its lines.
#[test]
fn each_scene_has_a_test() {
    let sources = ["groups.rs", "images.rs", "walk.rs"].map(|name| read(&format!("tests/docs/{name}")));
    for rule in all() {
        let Act::Run { group, .. } = &rule.act else { continue };
        let call = format!("\"{group}\"");
        assert!(sources.iter().any(|source| source.contains(&call)), "{}: {group}", rule.line);
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

/// The cells of each row of the table with this heading in all sections of a page.
fn rows<'a>(page: &'a str, heading: &'a str) -> impl Iterator<Item = Vec<&'a str>> {
    let mut is_inside = false;
    let rows = page.lines().filter(move |line| {
        is_inside = line.starts_with('|') && (is_inside || *line == heading);
        is_inside && *line != heading && !line.starts_with("|---")
    });
    rows.map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
}

#[test]
fn each_symptom_has_a_command_a_cause_and_a_cure() {
    let page = read("docs/troubleshooting.md");
    let mut symptoms = BTreeSet::new();
    for row in rows(&page, "| symptom | command | cause | cure |") {
        assert!(row.len() == 4 && row.iter().all(|cell| cell.len() > 2), "{row:?}");
        let is_page = row[1].starts_with('[');
        assert!(is_page || row[1].starts_with('`'), "a command or a page: {row:?}");
        assert!(symptoms.insert(row[0].to_owned()), "twice: {}", row[0]);
    }
    assert!(symptoms.len() >= 30, "{} symptoms", symptoms.len());
    let all = page.lines().filter(|line| line.starts_with("| ")).count();
    assert_eq!(all, symptoms.len() + 4, "rows outside of the four tables");
}

/// Words that operators of other runtimes search for, and the page that answers: most are about what coracle does not have, and
/// the answer has the reason and what to do instead.
const ASKED_FOR: [(&str, &str); 16] = [
    ("gVisor", "docs/faq.md"),
    ("Kata", "docs/faq.md"),
    ("WebAssembly", "docs/faq.md"),
    ("Rootless", "docs/faq.md"),
    ("Spegel", "docs/faq.md"),
    ("cosign", "docs/faq.md"),
    ("additional image store", "docs/faq.md"),
    ("Lazy pulls", "docs/faq.md"),
    ("Encrypted images", "docs/faq.md"),
    ("OpenTelemetry", "docs/faq.md"),
    ("Checkpoints", "docs/faq.md"),
    ("armv7", "docs/faq.md"),
    ("RISC-V", "docs/faq.md"),
    ("nerdctl", "docs/faq.md"),
    ("embedded-registry", "docs/install-k3s.md"),
    ("runtimeClassName", "docs/gpus.md"),
];

#[test]
fn what_operators_ask_for_has_an_answer() {
    for (word, page) in ASKED_FOR {
        assert!(read(page).contains(word), "{page} says nothing about {word}");
    }
    let page = read("docs/faq.md");
    let (_, absent) = page.split_once("## Not supported\n").expect("the section");
    for answer in absent.split("\n\n").skip(1).filter(|paragraph| paragraph.starts_with("**")) {
        let (question, reason) = answer.split_once("?** ").unwrap_or_else(|| panic!("no question: {answer}"));
        let is_no = reason.starts_with("No") || reason.starts_with("Not yet");
        assert!(is_no && reason.len() > 50, "{question}: a plain answer with its reason: {reason}");
    }
}

/// The texts that a function of a source file selects: `=> "TEXT"`.
fn selected(source: &str, function: &str) -> Vec<String> {
    let text = read(source);
    let (_, body) = text.split_once(function).unwrap_or_else(|| panic!("{source} lacks {function}"));
    let body = body.split("\n}\n").next().unwrap_or_default();
    body.split("=> \"").skip(1).filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())).collect()
}

/// Jobs of workers and outcomes of pulls, as docs/metrics.md lists them.
#[test]
fn values_of_labels_are_listed() {
    let page = read("docs/metrics.md");
    for (metric, source, function) in [
        ("coracle_worker_runs_total", "runtime/base/src/workers/mod.rs", "fn name(job: &Job)"),
        ("coracle_image_pulls_total", "runtime/images/src/pull.rs", "fn outcome_of("),
    ] {
        let row = page.lines().find(|line| line.starts_with(&format!("| {metric} |"))).expect("its row");
        let listed: Vec<&str> = row.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
        let values = selected(source, function);
        assert!(values.len() > 8, "{values:?}");
        for value in values {
            assert!(listed.contains(&value.as_str()), "{metric}: {value} is not in docs/metrics.md");
        }
    }
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
