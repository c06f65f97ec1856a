//! The jobs and steps of a workflow file of GitHub Actions, as far as this project's files use the syntax. An unknown key
//! is an error: a key that is ignored here would change what runs there.

use coracle_yaml::{Node, Problem, parse};

/// Names with their values.
pub(crate) type Pairs = Vec<(String, String)>;

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) name: String,
    /// The image in which the steps run, as root; without one they run on the runner as its user.
    pub(crate) container: Option<String>,
    pub(crate) environment: Pairs,
    /// The combinations of the matrix: one that is empty if the job has none.
    pub(crate) matrix: Vec<Pairs>,
    pub(crate) needs: Vec<String>,
    pub(crate) condition: Option<String>,
    pub(crate) steps: Vec<Step>,
}

#[derive(Debug)]
pub(crate) struct Step {
    /// Line of the file, counted from 1.
    pub(crate) line: usize,
    pub(crate) work: Work,
    pub(crate) environment: Pairs,
    pub(crate) condition: Option<String>,
}

#[derive(Debug)]
pub(crate) enum Work {
    /// A script of the shell.
    Run(String),
    /// An action without its version, and its parameters.
    Uses(String, Pairs),
}

impl Work {
    /// The text that names the step in the table: the script or the action.
    pub(crate) fn text(&self) -> &str {
        match self {
            Work::Run(text) | Work::Uses(text, _) => text,
        }
    }
}

/// Reads the jobs of a file, in its order.
///
/// # Errors
/// Invalid YAML, an unknown key, or a value of another type, with its line.
pub(crate) fn jobs(text: &str) -> Result<Vec<Job>, Problem> {
    let root = parse(text)?;
    known(&root, &["name", "on", "permissions", "env", "jobs"])?;
    let shared = pairs(find(&root, "env")?)?;
    let jobs = find(&root, "jobs")?.ok_or_else(|| root.problem("no jobs"))?;
    jobs.map()?.iter().map(|(name, node)| job(name, node, &shared)).collect()
}

fn job(name: &str, node: &Node, shared: &[(String, String)]) -> Result<Job, Problem> {
    known(
        node,
        &[
            "name",
            "runs-on",
            "needs",
            "if",
            "permissions",
            "timeout-minutes",
            "continue-on-error",
            "strategy",
            "container",
            "env",
            "steps",
        ],
    )?;
    let container = find(node, "container")?;
    if let Some(container) = container {
        known(container, &["image", "options", "volumes"])?;
    }
    let image = container.map(|container| scalar(container, "image")).transpose()?.flatten();
    let steps = find(node, "steps")?.ok_or_else(|| node.problem("no steps"))?;
    Ok(Job {
        name: name.to_owned(),
        container: image,
        environment: [shared, &pairs(find(node, "env")?)?].concat(),
        matrix: matrix(find(node, "strategy")?)?,
        needs: find(node, "needs")?.map_or(Ok(Vec::new()), one_or_more)?,
        condition: scalar(node, "if")?,
        steps: steps.list()?.iter().map(step).collect::<Result<_, _>>()?,
    })
}

fn step(node: &Node) -> Result<Step, Problem> {
    known(node, &["name", "id", "if", "env", "run", "uses", "with"])?;
    let work = match (scalar(node, "run")?, scalar(node, "uses")?) {
        (Some(script), None) => Work::Run(script.trim_end().to_owned()),
        (None, Some(action)) => {
            let name = action.split('@').next().unwrap_or_default();
            Work::Uses(name.to_owned(), pairs(find(node, "with")?)?)
        }
        _ => return Err(node.problem("a step has one of run and uses")),
    };
    let environment = pairs(find(node, "env")?)?;
    Ok(Step { line: node.line, work, environment, condition: scalar(node, "if")? })
}

/// All combinations of the lists of a matrix.
fn matrix(strategy: Option<&Node>) -> Result<Vec<Pairs>, Problem> {
    let mut combinations = vec![Pairs::new()];
    let Some(strategy) = strategy else { return Ok(combinations) };
    known(strategy, &["fail-fast", "matrix"])?;
    for (name, values) in find(strategy, "matrix")?.map_or(Ok(&[][..]), Node::map)? {
        let values = one_or_more(values)?;
        let with = |before: &Pairs, value: &String| [&before[..], &[(name.clone(), value.clone())]].concat();
        combinations = combinations
            .iter()
            .flat_map(|before| values.iter().map(move |value| with(before, value)))
            .collect();
    }
    Ok(combinations)
}

fn known(node: &Node, keys: &[&str]) -> Result<(), Problem> {
    let unknown = node.map()?.iter().find(|(key, _)| !keys.contains(&key.as_str()));
    unknown
        .map_or(Ok(()), |(key, value)| Err(value.problem(&format!("{key}: this program does not know it"))))
}

fn find<'a>(node: &'a Node, key: &str) -> Result<Option<&'a Node>, Problem> {
    Ok(node.map()?.iter().find(|(name, _)| name == key).map(|(_, value)| value))
}

fn scalar(node: &Node, key: &str) -> Result<Option<String>, Problem> {
    find(node, key)?.map(|value| value.text().map(str::to_owned)).transpose()
}

fn one_or_more(node: &Node) -> Result<Vec<String>, Problem> {
    if !node.is_sequence() {
        return Ok(vec![node.text()?.to_owned()]);
    }
    node.list()?.iter().map(|item| item.text().map(str::to_owned)).collect()
}

fn pairs(node: Option<&Node>) -> Result<Pairs, Problem> {
    let entries = node.map_or(Ok(&[][..]), Node::map)?;
    entries.iter().map(|(key, value)| Ok((key.clone(), value.text()?.to_owned()))).collect()
}
