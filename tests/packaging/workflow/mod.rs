//! The workflow of CI is run here: each line of each job in a bare Debian root, as the user that the runner has, in a fresh
//! clone of the last commit. `lines.toml` has each step, with the reason if it does not run; a step that is not in the
//! list is a failure, and so is an entry without a step. Runs as root, takes the network that downloads need, and half an
//! hour or more per job that builds: `make test-all PARTS=workflow`.

mod expand;
mod machine;
mod model;
mod table;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use coracle_tests::host;
use coracle_tests::page_rules::expect_in_order;

use self::machine::Machine;
use self::model::{Job, Pairs, Step, Work};
use self::table::{Act, Rule, Run};
use crate::{Folder, signatures, workspace};

const FILE: &str = ".github/workflows/ci.yml";

/// The jobs of the tests below; all jobs of the workflow.
const JOBS: [&[&str]; 5] = [&["check"], &["deny"], &["test"], &["parts"], &["cross", "dist", "release"]];

/// One job at a time: each uses all processors.
static ORDER: Mutex<()> = Mutex::new(());

fn workflow() -> String {
    let files = fs::read_dir(workspace().join(".github/workflows")).expect("workflows");
    let files: Vec<_> = files.flatten().map(|file| file.path()).collect();
    assert_eq!(files, [workspace().join(FILE)], "these tests read one workflow");
    fs::read_to_string(&files[0]).expect("a workflow")
}

fn jobs() -> Vec<Job> {
    model::jobs(&workflow()).unwrap_or_else(|problem| panic!("{FILE}: {problem}"))
}

/// The rule of each step of a job.
#[track_caller]
fn rules(job: &Job) -> Vec<Rule> {
    let entry = table::entry(&job.name);
    let rules = entry.unwrap_or_else(|| panic!("lines.toml does not have the job {}", job.name)).rules;
    let (listed, actual): (Vec<_>, Vec<_>) = (
        rules.iter().map(|rule| rule.text.as_str()).collect(),
        job.steps.iter().map(|step| step.work.text()).collect(),
    );
    assert_eq!(listed, actual, "the steps of the job {}: lines.toml and {FILE}", job.name);
    rules
}

/// A tag of an action can be moved to other code, a commit cannot. The comment names the version for readers.
#[test]
fn each_action_is_pinned_by_digest() {
    let mut count = 0;
    for (number, line) in (1..).zip(workflow().lines()) {
        let Some(action) = line.trim().trim_start_matches("- ").strip_prefix("uses: ") else { continue };
        let (_, version) =
            action.split_once('@').unwrap_or_else(|| panic!("{FILE}:{number}: no version: {line}"));
        let (digest, comment) =
            version.split_once(" # v").unwrap_or_else(|| panic!("{FILE}:{number}: {line}"));
        let is_digest = digest.len() == 40 && digest.chars().all(|digit| digit.is_ascii_hexdigit());
        assert!(is_digest && !comment.is_empty(), "{FILE}:{number}: {line}");
        count += 1;
    }
    assert!(count > 0, "no job uses an action");
}

#[test]
fn each_step_is_in_the_list_with_its_reason_if_it_does_not_run() {
    let jobs = jobs();
    for job in &jobs {
        for rule in rules(job) {
            if let Act::Not(reason) = rule.act {
                assert!(reason.split(' ').count() > 3, "{}, {}: no reason: {reason:?}", job.name, rule.text);
            }
        }
    }
    let names: BTreeSet<_> = jobs.iter().map(|job| job.name.as_str()).collect();
    let listed = table::names();
    assert_eq!(names, listed.iter().map(String::as_str).collect(), "jobs of lines.toml");
    assert_eq!(names, JOBS.concat().into_iter().collect(), "jobs that a test runs");
}

/// A release requires the success of these jobs, and each must be one that can succeed: it exists and needs no other
/// that does not.
#[test]
fn each_needed_job_exists_and_comes_before() {
    let jobs = jobs();
    for (at, job) in jobs.iter().enumerate() {
        for needed in &job.needs {
            assert!(jobs[..at].iter().any(|before| before.name == *needed), "{} needs {needed}", job.name);
        }
    }
    let release = jobs.iter().find(|job| job.name == "release").expect("a release");
    assert!(!release.needs.is_empty() && release.condition.is_some(), "releases are for tags that passed");
}

#[test]
fn each_make_names_a_target() {
    let makefile = fs::read_to_string(workspace().join("Makefile")).expect("the Makefile");
    let mut count = 0;
    for step in jobs().iter().flat_map(|job| &job.steps) {
        let Some((_, words)) = step.work.text().split_once("make ") else { continue };
        let target = words.split(' ').next().expect("a word");
        assert!(makefile.contains(&format!("\n{target}:")), "{FILE}:{}: make {target}", step.line);
        count += 1;
    }
    assert!(count > 0, "no step uses the Makefile");
}

/// A clean clone passes without root, where it leaves out more tests than as root.
#[test]
#[ignore = "builds the whole workspace from nothing, twice"]
fn check() {
    let [by_user, by_root] = [None, Some("root")].map(|user| left_out(&run_jobs(JOBS[0], user)));
    assert!(by_user > by_root, "{by_user} and {by_root} tests were left out");
}

/// The number of tests that `make check` left out.
fn left_out(said: &str) -> u32 {
    let number = said.lines().find_map(|line| line.split_once(" tests were left out"));
    number.map_or(0, |(number, _)| number.parse().expect("a number"))
}

#[test]
#[ignore = "builds a program of the registry"]
fn deny() {
    run_jobs(JOBS[1], None);
}

#[test]
#[ignore = "installs and builds what all suites need"]
fn test() {
    run_jobs(JOBS[2], None);
}

#[test]
#[ignore = "installs and builds what a suite needs"]
fn parts() {
    run_jobs(JOBS[3], None);
}

#[test]
#[ignore = "builds the programs of all targets"]
fn dist_and_release() {
    run_jobs(JOBS[4], None);
}

/// Runs jobs in this order and returns their output; a later one finds the artifacts of those before. `user` replaces that
/// of the runner.
#[track_caller]
fn run_jobs(names: &[&str], user: Option<&'static str>) -> String {
    host::require_root();
    let _order = ORDER.lock().unwrap_or_else(PoisonError::into_inner);
    let jobs = jobs();
    let artifacts = Folder::new("workflow-artifacts");
    let secrets = secrets(&artifacts);
    let run = |name: &&str| {
        let job = jobs.iter().find(|job| job.name == *name).unwrap_or_else(|| panic!("no job {name}"));
        run_job(job, user, artifacts.path(), &secrets)
    };
    names.iter().map(run).collect()
}

/// Keys for the secrets of the repository.
fn secrets(folder: &Folder) -> Pairs {
    let [rpm, apk] = [signatures::rpm_key(folder, "secret-rpm"), signatures::apk_key(folder, "secret-apk")];
    [("secrets.RPM_SIGNING_KEY", rpm), ("secrets.APK_SIGNING_KEY", apk)]
        .map(|(name, path)| (name.to_owned(), fs::read_to_string(path).expect("a key")))
        .to_vec()
}

#[track_caller]
fn run_job(job: &Job, user: Option<&'static str>, artifacts: &Path, secrets: &Pairs) -> String {
    let only = table::entry(&job.name).and_then(|entry| entry.only);
    let is_chosen = |values: &Pairs| {
        only.as_ref().is_none_or(|only| values.iter().any(|(name, value)| format!("{name}={value}") == *only))
    };
    let values = job.matrix.iter().find(|values| is_chosen(values)).expect("`only` is of the matrix");
    let matrix = values.iter().map(|(name, value)| (format!("matrix.{name}"), value.clone()));
    let known: Pairs = matrix.chain(secrets.clone()).chain(of_github()).collect();
    let value = |name: &str| known.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());

    let rules = rules(job);
    if rules.iter().all(|rule| matches!(rule.act, Act::Not(_))) {
        return String::new();
    }
    let folder = Folder::new(&format!("workflow-{}", job.name));
    let user = user.unwrap_or(if job.container.is_some() { "container" } else { "runner" });
    let mut machine = Machine::new(&folder, user);
    let mut output = String::new();
    for (step, rule) in job.steps.iter().zip(rules) {
        let holds = |condition: &String| expand::holds(condition, &value).expect("a condition");
        let Act::Run(run) = rule.act else { continue };
        if !step.condition.as_ref().is_none_or(holds) {
            continue;
        }
        let start = Instant::now();
        println!("== {} as {user}: {}", job.name, step.work.text());
        output += &run_step(&mut machine, job, step, &run, artifacts, &value).unwrap_or_else(|problem| {
            panic!("{FILE}:{}: {} as {user}: {}\n{problem}", step.line, job.name, step.work.text())
        });
        println!("== {} s", start.elapsed().as_secs());
    }
    output
}

/// The values of a push of this version's tag.
fn of_github() -> Pairs {
    [
        ("github.ref", concat!("refs/tags/v", env!("CARGO_PKG_VERSION"))),
        ("github.repository", "owner/coracle"),
        ("github.repository_owner", "owner"),
        ("github.server_url", "https://github.com"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec()
}

fn run_step(
    machine: &mut Machine,
    job: &Job,
    step: &Step,
    run: &Run,
    artifacts: &Path,
    value: &dyn Fn(&str) -> Option<String>,
) -> Result<String, String> {
    match &step.work {
        Work::Run(line) => {
            let mut environment = Pairs::new();
            for (name, text) in job.environment.iter().chain(&step.environment) {
                environment.push((name.clone(), expand::expand(text, value)?));
            }
            let line = expand::expand(line, value)?;
            let script = if run.frame.is_empty() { line } else { run.frame.replace("LINE", &line) };
            let output = machine.run(&script, &environment, run.until.as_deref(), run.minutes)?;
            expect_in_order(&output, &run.says, step.work.text());
            Ok(output)
        }
        Work::Uses(action, with) => use_action(machine, action, with, artifacts).map(|()| String::new()),
    }
}

/// Does what an action does.
fn use_action(machine: &Machine, action: &str, with: &Pairs, artifacts: &Path) -> Result<(), String> {
    let parameter = |wanted: &str| {
        let found = with.iter().find(|(name, _)| name == wanted);
        found.map(|(_, value)| value.clone()).ok_or_else(|| format!("{action} has no {wanted}"))
    };
    let clone = machine.outside(&machine.clone_path());
    match action {
        // The machine is made with its clone.
        "actions/checkout" => {}
        "actions/upload-artifact" => {
            machine::copy(&clone.join(parameter("path")?), &artifacts.join(parameter("name")?));
        }
        "actions/download-artifact" => machine::copy(&artifacts.join(parameter("name")?), &clone),
        _ => return Err(format!("this program cannot do what {action} does")),
    }
    Ok(())
}
