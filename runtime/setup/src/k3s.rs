//! What k3s needs to use coracle. k3s reads `/etc/rancher/k3s/config.yaml`, then `config.yaml.d/*.yaml` beside it by name, and its
//! command line last; a later value replaces an earlier one. So a drop-in of coracle's own sets the endpoint, and no file of k3s or
//! of the user is changed.
//!
//! Source: k3s v1.33 and v1.34, pkg/configfilearg and pkg/cli/cmds, and the unit that its installer writes.

use crate::host::{Host, Problem};
use crate::kubelet::{self, Given};
use crate::old_images;
use crate::own::{Origin, origin};
use crate::plan::{OwnFile, Wanted};
use crate::unit::{self, Unit};

/// Units of k3s' installer: a server, which runs pods too, and an agent.
const UNITS: [&str; 2] = ["k3s.service", "k3s-agent.service"];
/// Paths of the program, which the installer chooses.
const PROGRAMS: [&str; 3] = ["/usr/local/bin/k3s", "/opt/bin/k3s", "/usr/bin/k3s"];
/// The configuration, unless K3S_CONFIG_FILE or `--config` names another one.
const CONFIG: &str = "/etc/rancher/k3s/config.yaml";
/// Name of coracle's drop-in.
const DROP_IN: &str = "50-coracle.yaml";
/// Path of coracle's configuration for k3s.
const OWN_CONFIG: &str = "/etc/coracle/conf.d/k3s.toml";
/// Directory of k3s' data, unless `data-dir` names another one.
const DATA: &str = "/var/lib/rancher/k3s";
/// File of k3s that it writes at each start with the runtime that it uses.
const DEFAULTS: &str = "00-k3s-defaults.conf";

/// Paths of all files that coracle may have written for k3s.
pub(crate) fn paths() -> Vec<String> {
    let units = UNITS.iter().map(|unit| kubelet::order(unit).path);
    let others = [format!("{CONFIG}.d/{DROP_IN}"), OWN_CONFIG.to_owned(), kubelet::CRICTL.to_owned()];
    units.chain(others).collect()
}

/// The options of k3s in the order of their priority, the highest last.
struct Options(Vec<(String, Given)>);

impl Options {
    fn all(&self, name: &str) -> impl DoubleEndedIterator<Item = &Given> {
        self.0.iter().filter(move |(known, _)| known == name).map(|(_, given)| given)
    }

    fn last(&self, name: &str) -> Option<&Given> {
        self.all(name).next_back()
    }

    fn is_on(&self, name: &str) -> Option<&Given> {
        // The words that Go's strconv.ParseBool takes for false.
        self.last(name)
            .filter(|given| !matches!(given.value.as_str(), "0" | "f" | "F" | "false" | "FALSE" | "False"))
    }

    /// Adds the options of a command line.
    fn add_words(&mut self, line: &[(String, String)]) {
        self.0.extend(unit::options(line).map(|(name, value, place)| {
            let given = Given { value: value.to_owned(), place: place.to_owned() };
            (long(name.trim_start_matches('-')).to_owned(), given)
        }));
    }

    /// The last value of a flag of the kubelet (`kubelet-arg`).
    fn kubelet(&self, flag: &str) -> Option<Given> {
        let mut values = self.all("kubelet-arg").filter_map(|given| {
            let (name, value) = given.value.trim_start_matches("--").split_once('=')?;
            (name == flag).then(|| Given { value: value.to_owned(), place: given.place.clone() })
        });
        values.next_back()
    }

    /// Adds the options of a configuration file.
    fn read(&mut self, host: &Host, path: &str) -> Result<(), Problem> {
        let fail = |error| kubelet::invalid(path, error);
        let Some(root) = kubelet::yaml(host, path)? else { return Ok(()) };
        for (key, node) in root.map().map_err(fail)? {
            // A plus sign appends to the values of the files before.
            let name = long(key.strip_suffix('+').unwrap_or(key));
            let single = std::slice::from_ref(node);
            for item in if node.is_sequence() { node.list().map_err(fail)? } else { single } {
                // Structured values are for parts of k3s that do not concern the runtime.
                if let Ok(value) = item.text() {
                    let place = format!("{path}:{}", item.line);
                    self.0.push((name.to_owned(), Given { value: value.to_owned(), place }));
                }
            }
        }
        Ok(())
    }
}

/// The long name of an option.
fn long(name: &str) -> &str {
    match name {
        "d" => "data-dir",
        "c" => "config",
        name => name,
    }
}

/// Finds out what this node's k3s needs.
///
/// # Errors
/// A file cannot be read or is invalid.
pub(crate) fn collect(host: &Host, endpoint: &str, wanted: &mut Wanted) -> Result<(), Problem> {
    let mut units: Vec<(&str, Unit)> = Vec::new();
    for name in UNITS {
        units.extend(unit::read(host, name, kubelet::DROP_IN)?.map(|unit| (name, unit)));
    }
    if units.is_empty() && !PROGRAMS.iter().any(|program| host.is_file(program)) {
        wanted.refusals.push(format!("k3s is not installed: neither {} nor k3s.service exists", PROGRAMS[0]));
        return Ok(());
    }
    if units.is_empty() {
        wanted.notes.push("k3s has no unit of systemd: start coracle before k3s".to_owned());
    }
    let config = config_file(&units);
    if !config.value.starts_with('/') {
        wanted
            .refusals
            .push(format!("{}: the configuration {} is not an absolute path", config.place, config.value));
        return Ok(());
    }
    let options = options(host, &units, &config.value)?;
    refuse(&options, endpoint, wanted);
    let data = options.last("data-dir").cloned();
    let data = data.unwrap_or(Given { value: DATA.to_owned(), place: config.value.clone() });
    if !data.value.starts_with('/') || data.value.contains(char::is_control) {
        wanted.refusals.push(format!("{}: data-dir {:?} is not an absolute path", data.place, data.value));
        return Ok(());
    }
    let data = data.value.trim_end_matches('/');
    runtime_of_the_kubelet(host, &options, data, endpoint, wanted)?;
    for (name, _) in &units {
        wanted.files.push(kubelet::order(name));
    }
    let text = own_config(host, &options, data, wanted)?;
    wanted.files.push(OwnFile { path: OWN_CONFIG.to_owned(), text });
    kubelet::crictl(host, "k3s", endpoint, wanted)?;
    // The endpoint is last: k3s uses coracle only when everything else is there.
    let text = format!("container-runtime-endpoint: {endpoint:?}\n");
    wanted.files.push(OwnFile { path: format!("{}.d/{DROP_IN}", config.value), text });
    kubelet::running(host, "/run/k3s/containerd", wanted)?;
    old_images::collect(host, &format!("{data}/agent/containerd"), wanted);
    steps(&units, wanted);
    Ok(())
}

/// The configuration file, which the unit may name.
fn config_file(units: &[(&str, Unit)]) -> Given {
    let named = units.iter().find_map(|(_, unit)| {
        let from_environment =
            unit.environment.get("K3S_CONFIG_FILE").filter(|(value, _)| !value.is_empty()).cloned();
        let given = from_environment.or_else(|| unit.option(&["--config", "-c"]).pop());
        given.map(|(value, place)| Given { value, place })
    });
    named.unwrap_or(Given { value: CONFIG.to_owned(), place: CONFIG.to_owned() })
}

fn options(host: &Host, units: &[(&str, Unit)], config: &str) -> Result<Options, Problem> {
    let mut options = Options(Vec::new());
    options.read(host, config)?;
    let directory = format!("{config}.d");
    for name in host.list(&directory)? {
        let path = format!("{directory}/{name}");
        // k3s ignores the case of these endings.
        let lower = name.to_ascii_lowercase();
        let is_read = lower.ends_with(".yaml") || lower.ends_with(".yml");
        let is_own =
            name == DROP_IN && host.read(&path)?.is_some_and(|text| origin("k3s", &text) != Origin::Foreign);
        if is_read && !is_own {
            options.read(host, &path)?;
        }
    }
    for (_, unit) in units {
        options.add_words(&unit.command_line());
    }
    Ok(options)
}

/// Adds what k3s refuses or what would use another runtime.
fn refuse(options: &Options, endpoint: &str, wanted: &mut Wanted) {
    let mut refuse = |given: &Given, text: &str| wanted.refusals.push(format!("{}: {text}", given.place));
    if let Some(given) = options.is_on("embedded-registry") {
        refuse(
            given,
            "embedded-registry needs k3s' own containerd: k3s does not start with it and another runtime",
        );
    }
    if let Some(given) = options.is_on("docker") {
        refuse(given, "docker selects cri-dockerd: remove it first");
    }
    if let Some(given) = options.is_on("rootless") {
        refuse(given, "rootless: coracle runs pods as root only");
    }
    for given in options.all("container-runtime-endpoint").filter(|given| !given.value.is_empty()) {
        if !kubelet::is_same_endpoint(&given.value, endpoint) {
            refuse(
                given,
                &format!("container-runtime-endpoint is {}, not {endpoint}: remove it first", given.value),
            );
        }
    }
    let same = options
        .all("container-runtime-endpoint")
        .filter(|given| kubelet::is_same_endpoint(&given.value, endpoint));
    wanted.notes.extend(same.map(|given| {
        format!("{}: names coracle's endpoint, too; `disable` does not remove it", given.place)
    }));
    if let Some(given) = options.is_on("disable-agent") {
        wanted.notes.push(format!("{}: disable-agent: this server runs no pods", given.place));
    }
}

/// Refuses an endpoint that the user gives to the kubelet inside k3s, which would replace the one of k3s.
fn runtime_of_the_kubelet(
    host: &Host,
    options: &Options,
    data: &str,
    endpoint: &str,
    wanted: &mut Wanted,
) -> Result<(), Problem> {
    let directory = format!("{data}/agent/etc/kubelet.conf.d");
    let in_files = kubelet::in_directory(host, &directory, DEFAULTS, "containerRuntimeEndpoint")?;
    for given in options.kubelet("container-runtime-endpoint").into_iter().chain(in_files) {
        kubelet::refuse_other(&given, endpoint, wanted);
    }
    Ok(())
}

/// The text of coracle's configuration for k3s: its network, registries and images.
fn own_config(host: &Host, options: &Options, data: &str, wanted: &mut Wanted) -> Result<String, Problem> {
    let directory = |path: &str| kubelet::toml(&format!("{data}/{path}"));
    let registries =
        options.last("private-registry").map_or("/etc/rancher/k3s/registries.yaml", |given| &given.value);
    let own = "/etc/coracle/registries.yaml";
    if host.is_file(own) && registries != own {
        wanted.notes.push(format!("{own}: no longer used: coracle reads k3s' {registries}"));
    }
    let mut text = format!(
        "[cni]\nconf_dir = {}\nbin_dirs = [{}, {}]\n\n[registry]\nconfig = {}\n\n[image]\nimport_dir = {}\n",
        directory("agent/etc/cni/net.d"),
        directory("data/cni"),
        directory("data/current/bin"),
        kubelet::toml(registries),
        directory("agent/images"),
    );
    let in_files =
        kubelet::in_directory(host, &format!("{data}/agent/etc/kubelet.conf.d"), "", "cgroupDriver")?;
    let driver = options.kubelet("cgroup-driver").or(in_files);
    text.push_str(&kubelet::cgroup_driver(driver.as_ref(), wanted));
    text.push_str(&kubelet::cadvisor(host, wanted)?);
    Ok(text)
}

fn steps(units: &[(&str, Unit)], wanted: &mut Wanted) {
    let take_over = old_images::step(wanted);
    let mut add = |step: &str| wanted.steps.push(step.to_owned());
    add("kubectl drain NODE --ignore-daemonsets   # unless the node is new");
    add("k3s-killall.sh   # stops k3s and the pods of its containerd");
    if units.is_empty() {
        add("restart coracle");
        take_over.iter().for_each(|step| add(step));
        add("start k3s");
        return;
    }
    add("systemctl daemon-reload");
    add("systemctl enable coracle && systemctl restart coracle");
    take_over.iter().for_each(|step| add(step));
    for (name, _) in units {
        add(&format!("systemctl restart {}", name.trim_end_matches(".service")));
    }
    add("kubectl uncordon NODE");
}

/// The operator's commands after `disable`.
pub(crate) fn steps_back(host: &Host) -> Vec<String> {
    let mut steps = vec![
        "kubectl drain NODE --ignore-daemonsets".to_owned(),
        "crictl rmp --all --force".to_owned(),
        "systemctl daemon-reload".to_owned(),
        "systemctl disable --now coracle".to_owned(),
    ];
    for unit in UNITS {
        if matches!(unit::read(host, unit, kubelet::DROP_IN), Ok(Some(_))) {
            steps.push(format!("systemctl restart {}", unit.trim_end_matches(".service")));
        }
    }
    steps
}
