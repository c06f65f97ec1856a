//! What k3s needs to use coracle. k3s reads `/etc/rancher/k3s/config.yaml`, then `config.yaml.d/*.yaml` beside it by name, and its
//! command line last; a later value replaces an earlier one. So a drop-in of coracle's own sets the endpoint, and no file of k3s or
//! of the user is changed.
//!
//! Source: k3s v1.33 and v1.34, pkg/configfilearg and pkg/cli/cmds, pkg/agent/config (the directories of the network), and the unit
//! or the service of OpenRC that its installer writes.

use crate::host::{Host, Problem};
use crate::kubelet::{self, Given};
use crate::old_images;
use crate::own::{Origin, origin};
use crate::plan::{OwnFile, Wanted};
use crate::unit::{self, Unit};

/// Services of k3s' installer: a server, which runs pods too, and an agent.
const SERVICES: [&str; 2] = ["k3s", "k3s-agent"];
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
    let units = SERVICES.iter().map(|name| kubelet::order(&format!("{name}.service")).path);
    let others = [format!("{CONFIG}.d/{DROP_IN}"), OWN_CONFIG.to_owned(), kubelet::CRICTL.to_owned()];
    units.chain(others).collect()
}

/// A service that starts k3s.
struct Service {
    name: &'static str,
    unit: Unit,
    /// Whether the service is a unit of systemd; otherwise it is one of OpenRC.
    is_systemd: bool,
}

impl Service {
    /// The services of this node.
    fn all(host: &Host) -> Result<Vec<Service>, Problem> {
        let mut services = Vec::new();
        for name in SERVICES {
            match unit::read(host, &format!("{name}.service"), kubelet::DROP_IN)? {
                Some(unit) => services.push(Service { name, unit, is_systemd: true }),
                None => services.extend(unit::openrc(host, name)?.map(|unit| Service {
                    name,
                    unit,
                    is_systemd: false,
                })),
            }
        }
        Ok(services)
    }

    /// The operator's command that starts, stops or restarts the service.
    fn command(&self, verb: &str) -> String {
        match self.is_systemd {
            true => format!("systemctl {verb} {}", self.name),
            false => format!("rc-service {} {verb}", self.name),
        }
    }
}

/// The options of k3s in the order of their priority, the highest last.
#[derive(Default)]
struct Options {
    given: Vec<(String, Given)>,
    /// Number of options that have a lower priority than those in coracle's drop-in.
    below_own: usize,
}

impl Options {
    fn all(&self, name: &str) -> impl DoubleEndedIterator<Item = &Given> {
        self.given.iter().filter(move |(known, _)| known == name).map(|(_, given)| given)
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
        self.given.extend(unit::options(line).map(|(name, value, place)| {
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
                    self.given.push((name.to_owned(), Given { value: value.to_owned(), place }));
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
    let services = Service::all(host)?;
    if services.is_empty() && !PROGRAMS.iter().any(|program| host.is_file(program)) {
        wanted.refusals.push(format!("k3s is not installed: neither {} nor k3s.service exists", PROGRAMS[0]));
        return Ok(());
    }
    if services.is_empty() {
        wanted.notes.push(
            "k3s has neither a unit of systemd nor a service of OpenRC: start coracle before k3s".to_owned(),
        );
    }
    let config = config_file(&services);
    if !config.value.starts_with('/') {
        wanted
            .refusals
            .push(format!("{}: the configuration {} is not an absolute path", config.place, config.value));
        return Ok(());
    }
    let options = options(host, &services, &config.value)?;
    refuse(&options, endpoint, wanted);
    let data = options.last("data-dir").cloned();
    let data = data.unwrap_or(Given { value: DATA.to_owned(), place: config.value.clone() });
    if !data.value.starts_with('/') || data.value.contains(char::is_control) {
        wanted.refusals.push(format!("{}: data-dir {:?} is not an absolute path", data.place, data.value));
        return Ok(());
    }
    let data = data.value.trim_end_matches('/');
    runtime_of_the_kubelet(host, &options, data, endpoint, wanted)?;
    for service in services.iter().filter(|service| service.is_systemd) {
        wanted.files.push(kubelet::order(&format!("{}.service", service.name)));
    }
    let is_agent = services.iter().any(|service| service.name == SERVICES[1]);
    let text = own_config(host, &options, data, is_agent, wanted)?;
    wanted.files.push(OwnFile { path: OWN_CONFIG.to_owned(), text });
    kubelet::crictl(host, "k3s", endpoint, wanted)?;
    // The endpoint is last: k3s uses coracle only when everything else is there.
    let text = format!("container-runtime-endpoint: {endpoint:?}\n");
    wanted.files.push(OwnFile { path: format!("{}.d/{DROP_IN}", config.value), text });
    kubelet::running(host, "/run/k3s/containerd", wanted)?;
    old_images::collect(host, &format!("{data}/agent/containerd"), wanted);
    steps(&services, wanted);
    Ok(())
}

/// The configuration file, which the service may name.
fn config_file(services: &[Service]) -> Given {
    let named = services.iter().find_map(|Service { unit, .. }| {
        let from_environment =
            unit.environment.get("K3S_CONFIG_FILE").filter(|(value, _)| !value.is_empty()).cloned();
        let given = from_environment.or_else(|| unit.option(&["--config", "-c"]).pop());
        given.map(|(value, place)| Given { value, place })
    });
    named.unwrap_or(Given { value: CONFIG.to_owned(), place: CONFIG.to_owned() })
}

fn options(host: &Host, services: &[Service], config: &str) -> Result<Options, Problem> {
    let mut options = Options::default();
    // An environment variable counts only if neither a file nor the command line has the option.
    let variables = services.iter().filter_map(|service| service.unit.environment.get("K3S_DATA_DIR"));
    for (value, place) in variables.filter(|(value, _)| !value.is_empty()) {
        let given = Given { value: value.clone(), place: format!("{place}: K3S_DATA_DIR") };
        options.given.push(("data-dir".to_owned(), given));
    }
    options.read(host, config)?;
    options.below_own = options.given.len();
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
        if name.as_str() < DROP_IN {
            options.below_own = options.given.len();
        }
    }
    for service in services {
        options.add_words(&service.unit.command_line());
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
    // Without its own endpoint for images, the kubelet pulls them through that of the runtime.
    for name in ["container-runtime-endpoint", "image-service-endpoint"] {
        for given in options.all(name).filter(|given| !given.value.is_empty()) {
            if !kubelet::is_same_endpoint(&given.value, endpoint) {
                refuse(given, &format!("{name} is {}, not {endpoint}: remove it first", given.value));
            }
        }
    }
    let above_own = options.given.iter().skip(options.below_own);
    for (_, given) in
        above_own.filter(|(name, given)| name == "container-runtime-endpoint" && given.value.is_empty())
    {
        refuse(
            given,
            &format!(
                "container-runtime-endpoint is empty, and k3s reads it after {DROP_IN}: remove it first"
            ),
        );
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
    let images = kubelet::in_directory(host, &directory, DEFAULTS, "imageServiceEndpoint")?;
    let given = [
        options.kubelet("container-runtime-endpoint"),
        in_files,
        options.kubelet("image-service-endpoint"),
        images,
    ];
    for given in given.into_iter().flatten() {
        kubelet::refuse_other(&given, endpoint, wanted);
    }
    Ok(())
}

/// The part of coracle's configuration about k3s' network. With `flannel-backend: none` k3s writes no list, and its containerd uses
/// the directories that are coracle's defaults, too. The option is the server's: an agent's own files do not show it, but those of
/// another network do once the agent has started; a list that was there before may be of another program.
fn network(
    host: &Host,
    options: &Options,
    data: &str,
    is_agent: bool,
    wanted: &mut Wanted,
) -> Result<String, Problem> {
    let of_k3s = format!("{data}/agent/etc/cni/net.d");
    let has_list = |directory: &str| -> Result<bool, Problem> {
        let is_list = |name: &String| name.ends_with(".conflist") || name.ends_with(".conf");
        Ok(host.list(directory)?.iter().any(is_list))
    };
    let is_off = options.last("flannel-backend").is_some_and(|given| given.value == "none");
    // An agent that has started with flannel has its list, which it writes after this file.
    let is_without =
        is_agent && host.is_file(&format!("{data}/agent/etc/crictl.yaml")) && !has_list(&of_k3s)?;
    if is_off || (is_without && has_list("/etc/cni/net.d")?) {
        wanted.notes.push(
            "k3s' flannel is off: coracle uses the network in /etc/cni/net.d, with /opt/cni/bin".to_owned(),
        );
        return Ok(String::new());
    }
    if is_agent && !has_list(&of_k3s)? {
        wanted.notes.push(
            "an agent does not know its server's flannel-backend: with none, repeat `coracle k3s enable` once the network is in /etc/cni/net.d".to_owned(),
        );
    }
    let [lists, first, second] = ["agent/etc/cni/net.d", "data/cni", "data/current/bin"]
        .map(|path| kubelet::toml(&format!("{data}/{path}")));
    Ok(format!("[cni]\nconf_dir = {lists}\nbin_dirs = [{first}, {second}]\n\n"))
}

/// The text of coracle's configuration for k3s: its network, registries and images.
fn own_config(
    host: &Host,
    options: &Options,
    data: &str,
    is_agent: bool,
    wanted: &mut Wanted,
) -> Result<String, Problem> {
    let directory = |path: &str| kubelet::toml(&format!("{data}/{path}"));
    let registries =
        options.last("private-registry").map_or("/etc/rancher/k3s/registries.yaml", |given| &given.value);
    let own = "/etc/coracle/registries.yaml";
    if host.is_file(own) && registries != own {
        wanted.notes.push(format!("{own}: no longer used: coracle reads k3s' {registries}"));
    }
    // k3s does not start with an invalid one.
    if registries.starts_with('/') {
        kubelet::yaml(host, registries)?;
    }
    let mut text = network(host, options, data, is_agent, wanted)?;
    text.push_str(&format!("[registry]\nconfig = {}\n", kubelet::toml(registries)));
    if options.is_on("disable-default-registry-endpoint").is_some() {
        text.push_str("default_endpoint = false\n");
    }
    text.push_str(&format!("\n[image]\nimport_dir = {}\n", directory("agent/images")));
    let in_files =
        kubelet::in_directory(host, &format!("{data}/agent/etc/kubelet.conf.d"), "", "cgroupDriver")?;
    let driver = options.kubelet("cgroup-driver").or(in_files);
    text.push_str(&kubelet::cgroup_driver(driver.as_ref(), wanted));
    text.push_str(&kubelet::cadvisor(host, wanted)?);
    Ok(text)
}

/// The commands of a node's init system for coracle: to start it with the node, and to end it for good; `None`: it has none.
fn of_coracle(services: &[Service]) -> Option<[&'static str; 2]> {
    let is_systemd = services.first().map(|service| service.is_systemd)?;
    Some(match is_systemd {
        true => ["systemctl enable coracle && systemctl restart coracle", "systemctl disable --now coracle"],
        false => [
            "rc-update add coracle && rc-service coracle restart",
            "rc-service coracle stop && rc-update del coracle",
        ],
    })
}

/// Whether the operator has to tell systemd that units have changed.
fn reload(services: &[Service]) -> Option<String> {
    services.iter().any(|service| service.is_systemd).then(|| "systemctl daemon-reload".to_owned())
}

fn steps(services: &[Service], wanted: &mut Wanted) {
    let take_over = old_images::step(wanted);
    let [start, _] = of_coracle(services).unwrap_or(["restart coracle", ""]);
    wanted.steps.extend([
        "kubectl drain NODE --ignore-daemonsets   # unless the node is new".to_owned(),
        "k3s-killall.sh   # stops k3s and the pods of its containerd".to_owned(),
    ]);
    wanted.steps.extend(reload(services));
    wanted.steps.push(start.to_owned());
    wanted.steps.extend(take_over);
    if services.is_empty() {
        wanted.steps.push("start k3s".to_owned());
        return;
    }
    wanted.steps.extend(services.iter().map(|service| service.command("restart")));
    wanted.steps.push("kubectl uncordon NODE".to_owned());
}

/// The operator's commands after `disable`. k3s stops before the pods are removed: its kubelet would make those of DaemonSets and
/// the static ones again at once, and they would run on without a runtime.
pub(crate) fn steps_back(host: &Host) -> Vec<String> {
    let services = Service::all(host).unwrap_or_default();
    let commands = |verb: &str| -> Vec<String> {
        match services.is_empty() {
            true => vec![format!("{verb} k3s")],
            false => services.iter().map(|service| service.command(verb)).collect(),
        }
    };
    let [_, end] = of_coracle(&services).unwrap_or(["", "stop coracle"]);
    let mut steps = vec!["kubectl drain NODE --ignore-daemonsets".to_owned()];
    steps.extend(commands("stop"));
    steps.push("crictl rmp --all --force".to_owned());
    steps.extend(reload(&services));
    steps.push(end.to_owned());
    steps.extend(commands("start"));
    steps.push("kubectl uncordon NODE".to_owned());
    steps
}
