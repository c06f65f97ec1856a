//! The cases: `cases/NAME.toml`.
//!
//! ```text
//! about = "…"                 one line for the output
//! image = { User = "…" }      the configuration of its image, as in a Dockerfile
//! base = "program"            an image of tests/workloads/serve.go alone, in place of the Debian layer
//! containerd = "…"            why it does not run with containerd
//! left_out = "…"              a variant that does not run, and why
//!
//! [pods.NAME]                 static pods; those with `later = true` start with a step
//! code = 0                    exit code of each container at the pod's end
//! spec = '''…'''              the pod's spec; IMAGE stands for the image, SHARED_FOLDER for a directory of the node
//!
//! [[steps]]                   `on`: the pod, if it is not the first; `container`: if it is not `main`
//! run = "…"                   a shell line in the container, repeated until it succeeds and prints `says`
//! get = "PORT/PATH"           a page of the pod's address, until it has `says`
//! ask = "NAME"                until an answer to a DNS question is `says`; from the first such step to the end of the case, a
//!                             client outside of the node asks it five times a second, always from one port
//! restart = "POD"             its container is stopped: it ends with `code` and logs `says`, and the kubelet starts it again
//! start, stop = "POD"         for pods with `later`, and for the end of a pod before the last step
//! ```

use std::fs;
use std::path::Path;

use coracle_tests::request;
use serde_json::Value;

/// A workload: its image, its pods, and the steps that test it.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) about: String,
    pub(crate) image: Value,
    /// Whether the image has only the program of `serve.go`.
    pub(crate) is_program: bool,
    pub(crate) pods: Vec<Pod>,
    pub(crate) steps: Vec<Step>,
    /// A variant that does not run, with its reason.
    pub(crate) left_out: Option<String>,
    without_containerd: Option<String>,
}

/// A static pod.
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) code: i32,
    pub(crate) is_later: bool,
    spec: String,
}

/// A step, on a pod.
pub(crate) struct Step {
    pub(crate) action: Action,
    pub(crate) on: String,
    pub(crate) container: String,
    /// The expected text.
    pub(crate) says: String,
    /// The expected exit code of a restart.
    pub(crate) code: i32,
}

/// Kinds of steps, with their texts.
pub(crate) enum Action {
    Run(String),
    Get(String),
    Ask(String),
    Restart,
    Start,
    Stop,
}

/// All cases, by name.
pub(crate) fn all() -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads/cases");
    let entries = fs::read_dir(folder).expect("the directory of cases");
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths.iter().map(|path| Case::read(path)).collect()
}

impl Case {
    fn read(path: &Path) -> Case {
        let text = fs::read_to_string(path).expect("a file");
        let file: Value = toml::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let word = |key: &str| file.get(key).and_then(Value::as_str).map(str::to_owned);
        let pods: Vec<Pod> =
            file["pods"].as_object().expect("pods").iter().map(|(name, pod)| Pod::of(name, pod)).collect();
        let first = pods.first().expect("at least one pod").name.clone();
        let steps =
            file["steps"].as_array().expect("steps").iter().map(|step| Step::of(step, &first)).collect();
        Case {
            name: path.file_stem().expect("a name").to_string_lossy().into_owned(),
            about: word("about").expect("about"),
            image: file.get("image").cloned().unwrap_or_else(|| serde_json::json!({})),
            is_program: word("base").as_deref() == Some("program"),
            pods,
            steps,
            left_out: word("left_out"),
            without_containerd: word("containerd"),
        }
    }

    /// The name of its image.
    pub(crate) fn image_name(&self) -> String {
        format!("localhost/workload-{}:1", self.name)
    }

    /// The reason why it does not run with this runtime.
    pub(crate) fn not_with(&self, runtime: &str) -> Option<&str> {
        self.without_containerd.as_deref().filter(|_| runtime == "containerd")
    }

    /// The pod of this name.
    pub(crate) fn pod(&self, name: &str) -> &Pod {
        self.pods
            .iter()
            .find(|pod| pod.name == name)
            .unwrap_or_else(|| panic!("{}: no pod {name}", self.name))
    }

    /// The number of restarts that its steps cause in a pod.
    pub(crate) fn restarts(&self, pod: &str) -> usize {
        self.steps.iter().filter(|step| step.on == pod && matches!(step.action, Action::Restart)).count()
    }
}

impl Pod {
    fn of(name: &str, value: &Value) -> Pod {
        Pod {
            name: name.to_owned(),
            code: value["code"].as_i64().unwrap_or(0) as i32,
            is_later: value["later"].as_bool().unwrap_or(false),
            spec: value["spec"].as_str().expect("a spec").to_owned(),
        }
    }

    /// The manifest for the kubelet. Each start is another pod: the UID of a static pod is a digest of its manifest.
    pub(crate) fn manifest(&self, image: &str, shared: &Path) -> String {
        let spec: String = self.spec.lines().map(|line| format!("  {line}\n")).collect();
        let spec = spec.replace("IMAGE", image).replace("SHARED_FOLDER", &shared.display().to_string());
        let (name, start) = (&self.name, request::fresh());
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default, annotations: {{start: \"{start}\"}}}}\n\
             spec:\n{spec}"
        )
    }
}

impl Step {
    fn of(value: &Value, first: &str) -> Step {
        let word = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let named = ["restart", "start", "stop"].iter().find_map(|key| word(key));
        let action = match () {
            () if word("run").is_some() => Action::Run(word("run").unwrap_or_default()),
            () if word("get").is_some() => Action::Get(word("get").unwrap_or_default()),
            () if word("ask").is_some() => Action::Ask(word("ask").unwrap_or_default()),
            () if word("restart").is_some() => Action::Restart,
            () if word("start").is_some() => Action::Start,
            () if word("stop").is_some() => Action::Stop,
            () => panic!("{value}: what does this step do?"),
        };
        Step {
            action,
            on: named.or_else(|| word("on")).unwrap_or_else(|| first.to_owned()),
            container: word("container").unwrap_or_else(|| "main".into()),
            says: word("says").unwrap_or_default(),
            code: value["code"].as_i64().unwrap_or(0) as i32,
        }
    }
}
