//! What a node of kubeadm needs to use coracle. kubeadm keeps the runtime's endpoint in its own files, from which it configures the
//! kubelet at each upgrade, so the value in these files is changed. A drop-in of the kubelet's unit could not replace it:
//! EnvironmentFile wins over Environment, ExecStart would be frozen, and kubeadm itself would still contact the old runtime.
//!
//! | kubeadm | place of the endpoint |
//! |---|---|
//! | 1.33 and earlier | `--container-runtime-endpoint` in kubeadm-flags.env, and an annotation of the Node |
//! | 1.34 and later | `containerRuntimeEndpoint` in instance-config.yaml, which kubeadm merges into config.yaml; the kubelet reads the latter |
//!
//! An upgrade from 1.33 to 1.34 reads the flag to write instance-config.yaml.
//!
//! Source: Kubernetes v1.33 and v1.34, cmd/kubeadm/app/phases/kubelet and cmd/kubeadm/app/phases/upgrade/postupgrade.go; KEP-4656.

use coracle_yaml::Node;

use crate::host::{Host, Problem};
use crate::kubelet::{self, Given};
use crate::old_images;
use crate::plan::{OwnFile, Setting, Wanted};
use crate::record::Edit;
use crate::unit;

/// The kubelet's unit in the packages of Kubernetes.
const UNIT: &str = "kubelet.service";
/// Paths of the program.
const PROGRAMS: [&str; 3] = ["/usr/bin/kubeadm", "/usr/local/bin/kubeadm", "/opt/bin/kubeadm"];
/// The kubelet's configuration, unless `--config` names another one.
const CONFIG: &str = "/var/lib/kubelet/config.yaml";
/// The part of the configuration that is this node's own.
const INSTANCE: &str = "/var/lib/kubelet/instance-config.yaml";
/// The kubelet's flags.
const FLAGS: &str = "/var/lib/kubelet/kubeadm-flags.env";
/// The variable in [`FLAGS`].
const VARIABLE: &str = "KUBELET_KUBEADM_ARGS=";
/// The kubelet's flag for the endpoint.
const FLAG: &str = "--container-runtime-endpoint";
/// The key for the endpoint in the kubelet's configuration.
const KEY: &str = "containerRuntimeEndpoint";
/// Path of coracle's configuration for the kubelet.
const OWN_CONFIG: &str = "/etc/coracle/conf.d/kubeadm.toml";

/// Paths of all files that coracle may have written for kubeadm.
pub(crate) fn paths() -> Vec<String> {
    vec![kubelet::order(UNIT).path, OWN_CONFIG.to_owned(), kubelet::CRICTL.to_owned()]
}

/// Finds out what this node's kubelet needs.
///
/// # Errors
/// A file cannot be read or is invalid.
pub(crate) fn collect(host: &Host, endpoint: &str, wanted: &mut Wanted) -> Result<(), Problem> {
    let unit = unit::read(host, UNIT, kubelet::DROP_IN)?;
    let is_joined = host.exists(CONFIG) || host.exists(FLAGS);
    if !is_joined && !PROGRAMS.iter().any(|program| host.is_file(program)) {
        wanted
            .refusals
            .push(format!("kubeadm is not installed: neither {} nor {CONFIG} exists", PROGRAMS[0]));
        return Ok(());
    }
    let unit = unit.unwrap_or_else(|| {
        wanted.notes.push(format!("there is no {UNIT}: start coracle before the kubelet"));
        unit::Unit::default()
    });
    let config = unit.option(&["--config"]).pop().map_or(CONFIG.to_owned(), |(path, _)| path);
    let mut driver = None;
    if is_joined && let Some(root) = settings(host, &config, endpoint, wanted)? {
        driver = kubelet::scalar(&config, &root, "cgroupDriver")?;
    }
    for (directory, _) in unit.option(&["--config-dir"]) {
        driver = kubelet::in_directory(host, &directory, "", "cgroupDriver")?.or(driver);
        if let Some(given) = kubelet::in_directory(host, &directory, "", KEY)? {
            kubelet::refuse_other(&given, endpoint, wanted);
        }
    }
    for (value, place) in unit.option(&[FLAG]).into_iter().filter(|(_, place)| place != FLAGS) {
        kubelet::refuse_other(&Given { value, place }, endpoint, wanted);
    }
    let flag = unit.option(&["--cgroup-driver"]).pop().map(|(value, place)| Given { value, place });
    let driver = flag.or(driver);
    let text = kubelet::cgroup_driver(driver.as_ref(), wanted) + &kubelet::cadvisor(host, wanted)?;
    if !text.is_empty() {
        wanted.files.push(OwnFile { path: OWN_CONFIG.to_owned(), text });
    }
    if !unit.path.is_empty() {
        wanted.files.push(kubelet::order(UNIT));
    }
    kubelet::crictl(host, "kubeadm", endpoint, wanted)?;
    kubelet::running(host, "/run/containerd", wanted)?;
    old_images::collect(host, &old_images::root_of_containerd(host), wanted);
    steps(host, endpoint, is_joined, wanted)
}

/// Adds the endpoint in each file of kubeadm that has one, or in the kubelet's configuration if none has. Returns the latter; `None`
/// if there is none.
fn settings(host: &Host, config: &str, endpoint: &str, wanted: &mut Wanted) -> Result<Option<Node>, Problem> {
    let flags = host.read(FLAGS)?.map(|text| in_flags(&text, endpoint)).transpose();
    let flags = flags.map_err(|error| Problem(format!("{FLAGS}: {error}")))?.flatten();
    // kubeadm 1.33 leaves the key empty, and the flag has the value.
    let is_in_flags_only = flags.is_some() && !host.exists(INSTANCE);
    wanted.settings.extend(flags);
    let mut add = |path: &str, needs_key: bool| {
        let Some(text) = host.read(path)? else { return Ok(None) };
        let root = kubelet::parse(path, &text)?;
        let is_set = kubelet::scalar(path, &root, KEY)?.is_some();
        if is_set || needs_key {
            wanted.settings.push(in_yaml(path, &text, &root, endpoint)?);
        }
        Ok(Some(root))
    };
    add(INSTANCE, true)?;
    add(config, !is_in_flags_only)
}

/// The setting in the text of kubeadm-flags.env; `None` if it has no such flag.
fn in_flags(text: &str, endpoint: &str) -> Result<Option<Setting>, String> {
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with(VARIABLE)).collect();
    let [line] = lines.as_slice() else {
        return if lines.is_empty() { Ok(None) } else { Err(format!("{VARIABLE} occurs several times")) };
    };
    let mut places = line.match_indices(FLAG);
    let Some((at, _)) = places.next() else { return Ok(None) };
    if places.next().is_some() {
        return Err(format!("{FLAG} occurs several times"));
    }
    let (before, rest) = line.split_at(at + FLAG.len());
    let Some(rest) = rest.strip_prefix('=') else {
        return Err(format!("{FLAG} and its value are not joined by an equals sign, as kubeadm writes them"));
    };
    let end = rest
        .find(|letter: char| letter.is_whitespace() || matches!(letter, '"' | '\''))
        .unwrap_or(rest.len());
    let (value, behind) = rest.split_at(end);
    if kubelet::is_same_endpoint(value, endpoint) {
        return Ok(Some(Setting { path: FLAGS.to_owned(), edit: None }));
    }
    let (before, after) = (Some((*line).to_owned()), format!("{before}={endpoint}{behind}"));
    Ok(Some(Setting { path: FLAGS.to_owned(), edit: Some(Edit { path: FLAGS.to_owned(), before, after }) }))
}

/// The setting in a file of YAML, whose tree is `root`. The edited text is parsed to make sure that nothing else changes.
fn in_yaml(path: &str, text: &str, root: &Node, endpoint: &str) -> Result<Setting, Problem> {
    let fail = |line: usize, text: &str| Problem(format!("{path}:{line}: {text}"));
    let invalid = |error| kubelet::invalid(path, error);
    let entries = root.map().map_err(invalid)?;
    let found = entries.iter().find(|(key, _)| key == KEY).map(|(_, node)| node);
    let value = found.map(|node| node.text().map_err(invalid)).transpose()?;
    if value.is_some_and(|value| kubelet::is_same_endpoint(value, endpoint)) {
        return Ok(Setting { path: path.to_owned(), edit: None });
    }
    let after = format!("{KEY}: {endpoint}");
    let mut lines: Vec<&str> = text.lines().collect();
    let before = match found {
        Some(node) => {
            let manual =
                || fail(node.line, &format!("{KEY} has an unusual form: set it to {endpoint} by hand"));
            let line = lines.get_mut(node.line.saturating_sub(1)).ok_or_else(manual)?;
            let before = std::mem::replace(line, &after);
            let is_usual = before.starts_with(&format!("{KEY}:"))
                && text.lines().filter(|line| *line == before).count() == 1;
            Some(is_usual.then(|| before.to_owned()).ok_or_else(manual)?)
        }
        None if text.is_empty() || text.ends_with('\n') => {
            lines.push(&after);
            None
        }
        None => return Err(fail(lines.len(), "the last line has no end")),
    };
    let edited = coracle_yaml::parse(&(lines.join("\n") + "\n")).map_err(invalid)?;
    let edited = edited.map().map_err(invalid)?;
    let others = |entries: &[(String, Node)]| -> Vec<String> {
        entries.iter().filter(|(key, _)| key != KEY).map(|entry| format!("{entry:?}")).collect()
    };
    let value = edited.iter().find(|(key, _)| key == KEY).map(|(_, node)| node.text());
    if value != Some(Ok(endpoint)) || others(edited) != others(entries) {
        return Err(fail(
            lines.len(),
            &format!("{KEY} cannot be set by changing one line: set it to {endpoint} by hand"),
        ));
    }
    Ok(Setting { path: path.to_owned(), edit: Some(Edit { path: path.to_owned(), before, after }) })
}

fn steps(host: &Host, endpoint: &str, is_joined: bool, wanted: &mut Wanted) -> Result<(), Problem> {
    let has_containerd = unit::enabled(host, "containerd.service")?;
    let take_over = old_images::step(wanted);
    let mut add = |step: &str| wanted.steps.push(step.to_owned());
    if is_joined {
        add("kubectl drain NODE --ignore-daemonsets");
        add("systemctl stop kubelet");
    }
    if has_containerd {
        add("systemctl disable --now containerd");
    }
    add("systemctl daemon-reload");
    add("systemctl enable coracle && systemctl restart coracle");
    take_over.iter().for_each(|step| add(step));
    if !is_joined {
        add(&format!("kubeadm init --cri-socket {endpoint}   # or kubeadm join"));
        return Ok(());
    }
    if !host.exists(INSTANCE) {
        add(&format!(
            "kubectl annotate node NODE --overwrite kubeadm.alpha.kubernetes.io/cri-socket={endpoint}"
        ));
    }
    add("reboot   # ends the pods of the old runtime; without them: systemctl start kubelet");
    add("kubectl uncordon NODE");
    Ok(())
}

/// The operator's commands after `disable`.
pub(crate) fn steps_back(host: &Host) -> Vec<String> {
    let mut steps = vec![
        "kubectl drain NODE --ignore-daemonsets",
        "systemctl stop kubelet",
        "crictl rmp --all --force",
        "systemctl daemon-reload",
        "systemctl disable --now coracle",
    ];
    if !host.exists(INSTANCE) && host.exists(FLAGS) {
        steps.push("kubectl annotate node NODE --overwrite kubeadm.alpha.kubernetes.io/cri-socket=ENDPOINT   # of the old runtime");
    }
    steps.extend([
        "systemctl enable --now containerd   # or the old runtime",
        "systemctl start kubelet",
        "kubectl uncordon NODE",
    ]);
    steps.into_iter().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = "unix:///run/coracle/coracle.sock";

    /// The setting in a text.
    fn of_text(text: &str) -> Result<Setting, Problem> {
        in_yaml("f", text, &kubelet::parse("f", text)?, OURS)
    }

    fn edit(setting: Setting) -> (Option<String>, String) {
        let edit = setting.edit.expect("an edit");
        (edit.before, edit.after)
    }

    #[test]
    fn the_flag_of_kubeadm_1_33_is_replaced() {
        for (line, after) in [
            (
                "KUBELET_KUBEADM_ARGS=\"--container-runtime-endpoint=unix:///var/run/containerd/containerd.sock --pod-infra-container-image=registry.k8s.io/pause:3.10\"",
                "KUBELET_KUBEADM_ARGS=\"--container-runtime-endpoint=unix:///run/coracle/coracle.sock --pod-infra-container-image=registry.k8s.io/pause:3.10\"",
            ),
            (
                "KUBELET_KUBEADM_ARGS=\"--node-ip=10.0.0.1 --container-runtime-endpoint=unix:///run/crio/crio.sock\"",
                "KUBELET_KUBEADM_ARGS=\"--node-ip=10.0.0.1 --container-runtime-endpoint=unix:///run/coracle/coracle.sock\"",
            ),
        ] {
            let setting = in_flags(&format!("{line}\n"), OURS).unwrap().unwrap();
            assert_eq!(edit(setting), (Some(line.to_owned()), after.to_owned()));
            assert_eq!(in_flags(after, OURS).unwrap().unwrap().edit, None);
        }
        assert_eq!(in_flags("KUBELET_KUBEADM_ARGS=\"\"\n", OURS).unwrap(), None);
        assert_eq!(in_flags("", OURS).unwrap(), None);
        for (text, expected) in [
            ("KUBELET_KUBEADM_ARGS=\"--container-runtime-endpoint unix:///a\"", "not joined"),
            (
                "KUBELET_KUBEADM_ARGS=\"--container-runtime-endpoint=a --container-runtime-endpoint=b\"",
                "several times",
            ),
            ("KUBELET_KUBEADM_ARGS=a\nKUBELET_KUBEADM_ARGS=b", "several times"),
        ] {
            assert!(in_flags(text, OURS).unwrap_err().contains(expected), "{text}");
        }
    }

    #[test]
    fn one_line_of_yaml_is_replaced_or_added() {
        let after = format!("{KEY}: {OURS}");
        let text = "a: 1\ncontainerRuntimeEndpoint: \"\" # none\nb:\n  containerRuntimeEndpoint: x\n";
        let setting = of_text(text).unwrap();
        assert_eq!(edit(setting), (Some("containerRuntimeEndpoint: \"\" # none".into()), after.clone()));
        assert_eq!(edit(of_text("a: 1\n").unwrap()), (None, after.clone()));
        assert_eq!(of_text(&format!("a: 1\n{after}\n")).unwrap().edit, None);
        for (text, line) in [
            ("{a: 1, containerRuntimeEndpoint: x}\n", 1),
            ("a: 1\ncontainerRuntimeEndpoint:\n  x\n", 3),
            ("a: 1\ncontainerRuntimeEndpoint: |\n  x\n", 3),
            ("a: 1\ncontainerRuntimeEndpoint: [x]\n", 2),
            ("a: [1\n", 2),
            ("a: 1\n---\nb: 2\n", 4),
            ("a: 1", 1),
        ] {
            let error = of_text(text).unwrap_err().0;
            assert!(error.starts_with(&format!("f:{line}: ")), "{text:?}: {error}");
        }
    }

    /// Any file is refused, or exactly one of its lines changes.
    #[test]
    fn damaged_files_are_refused_or_changed_in_one_line() {
        let text = "apiVersion: v1\ncgroupDriver: systemd\ncontainerRuntimeEndpoint: unix:///a\nlogging:\n  verbosity: 0\n";
        let mut changed = 0;
        for damaged in coracle_yaml::damaged::damaged(text, 20_000) {
            let Ok(Setting { edit: Some(edit), .. }) = of_text(&damaged) else { continue };
            changed += 1;
            if let Some(before) = edit.before {
                assert_eq!(damaged.lines().filter(|line| *line == before).count(), 1, "{damaged:?}");
            }
        }
        assert!(changed > 1000, "{changed}");
    }
}
