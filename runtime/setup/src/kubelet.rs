//! What k3s and kubeadm have in common: the kubelet's configuration files (KubeletConfiguration, kubelet.config.k8s.io/v1beta1), the
//! runtime that the node used before, and the files that coracle writes for both.

use coracle_yaml::Node;

use crate::host::{Host, Problem};
use crate::plan::{OwnFile, Wanted};
use crate::unit;

/// Name of coracle's drop-in in a directory of a unit's drop-ins.
pub(crate) const DROP_IN: &str = "50-coracle.conf";
/// Path of crictl's configuration.
pub(crate) const CRICTL: &str = "/etc/crictl.yaml";
/// The socket on which cAdvisor expects containerd.
const CADVISOR_SOCKET: &str = "unix:///run/containerd/containerd.sock";
/// Directories in which distributions, and containerd's own archives, install programs.
const PROGRAM_DIRECTORIES: [&str; 5] =
    ["/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/opt/containerd/bin"];

/// A value and where it is: `FILE:LINE`, or the file alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Given {
    /// Value of the setting.
    pub(crate) value: String,
    /// File and line of the setting, for messages.
    pub(crate) place: String,
}

/// Parses a YAML file of the node; `None` if there is none.
///
/// # Errors
/// The file cannot be read or is not YAML; the error has its line.
pub(crate) fn yaml(host: &Host, path: &str) -> Result<Option<Node>, Problem> {
    host.read(path)?.map(|text| parse(path, &text)).transpose()
}

/// Parses the text of a YAML file of the node.
///
/// # Errors
/// The text is not YAML, or not a map; the error has its line.
pub(crate) fn parse(path: &str, text: &str) -> Result<Node, Problem> {
    let parsed = coracle_yaml::parse(text).and_then(|node| node.map().map(drop).map(|()| node));
    parsed.map_err(|error| invalid(path, error))
}

/// The problem of a YAML file of the node, with its line.
pub(crate) fn invalid(path: &str, error: coracle_yaml::Problem) -> Problem {
    Problem(format!("{path}:{}: {}", error.line, error.text))
}

/// The scalar value of a key of a file; `None` if it is absent or empty.
///
/// # Errors
/// The value is not a scalar.
pub(crate) fn scalar(path: &str, root: &Node, key: &str) -> Result<Option<Given>, Problem> {
    let fail =
        |error: coracle_yaml::Problem| Problem(format!("{path}:{}: {key}: {}", error.line, error.text));
    let Some((_, node)) = root.map().map_err(fail)?.iter().find(|(name, _)| name == key) else {
        return Ok(None);
    };
    let value = node.text().map_err(fail)?.to_owned();
    Ok(Some(Given { value, place: format!("{path}:{}", node.line) }).filter(|given| !given.value.is_empty()))
}

/// The last value of a key in a directory of the kubelet's drop-ins (`--config-dir`), which it merges by name; the file `except` is
/// ignored.
///
/// # Errors
/// A file cannot be read or is invalid.
pub(crate) fn in_directory(
    host: &Host,
    directory: &str,
    except: &str,
    key: &str,
) -> Result<Option<Given>, Problem> {
    let mut found = None;
    for name in host.list(directory)?.iter().filter(|name| name.ends_with(".conf") && *name != except) {
        let path = format!("{directory}/{name}");
        if let Some(root) = yaml(host, &path)? {
            found = scalar(&path, &root, key)?.or(found);
        }
    }
    Ok(found)
}

/// Whether two endpoints are the same socket: with and without `unix://`, and below /run or /var/run.
pub(crate) fn is_same_endpoint(one: &str, other: &str) -> bool {
    let path = |endpoint: &str| {
        let path = endpoint.trim_start_matches("unix://").to_owned();
        path.strip_prefix("/var").filter(|rest| rest.starts_with("/run/")).map(str::to_owned).unwrap_or(path)
    };
    path(one) == path(other)
}

/// A string of TOML, in double quotes.
pub(crate) fn toml(text: &str) -> String {
    let mut quoted = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            letter if letter.is_control() => quoted.push_str(&format!("\\u{:04X}", u32::from(letter))),
            letter => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted
}

/// Refuses an endpoint that is given to the kubelet and would replace coracle's.
pub(crate) fn refuse_other(given: &Given, endpoint: &str, wanted: &mut Wanted) {
    if !is_same_endpoint(&given.value, endpoint) {
        wanted.refusals.push(format!(
            "{}: the kubelet's runtime endpoint is {}, not {endpoint}: remove it first",
            given.place, given.value
        ));
    }
}

/// The part of coracle's drop-in that depends on the kubelet's cgroup driver: a runtime with another driver would be refused by a
/// kubelet before 1.31; a later one follows the runtime (KubeletCgroupDriverFromCRI), so this keeps the operator's choice.
pub(crate) fn cgroup_driver(driver: Option<&Given>, wanted: &mut Wanted) -> String {
    match driver.map(|given| given.value.as_str()) {
        None => String::new(),
        Some(driver @ ("systemd" | "cgroupfs")) => {
            format!("\n[cgroup]\n# The kubelet's driver.\ndriver = {}\n", toml(driver))
        }
        Some(other) => {
            let place = driver.map_or("", |given| &given.place);
            wanted
                .refusals
                .push(format!("{place}: cgroup driver {other:?}: coracle has systemd and cgroupfs"));
            String::new()
        }
    }
}

/// The part of coracle's drop-in for cAdvisor: where a program `containerd` is installed, coracle would leave containerd's socket
/// to it.
///
/// # Errors
/// A directory of units cannot be read.
pub(crate) fn cadvisor(host: &Host, wanted: &mut Wanted) -> Result<String, Problem> {
    let mut programs = PROGRAM_DIRECTORIES.iter().map(|directory| format!("{directory}/containerd"));
    let Some(program) = programs.find(|program| host.is_file(program)) else { return Ok(String::new()) };
    if unit::enabled(host, "containerd.service")? {
        wanted.notes.push(format!(
            "{program} is started at boot (containerd.service): while it runs, cAdvisor asks it, and finds no pods of coracle"
        ));
    }
    let text = format!(
        "\n[metrics]\n# cAdvisor's socket, although {program} exists.\ncontainerd_socket = {}\n",
        toml(CADVISOR_SOCKET)
    );
    Ok(text)
}

/// The drop-in that starts a unit after coracle.
pub(crate) fn order(unit: &str) -> OwnFile {
    OwnFile {
        path: format!("/etc/systemd/system/{unit}.d/{DROP_IN}"),
        text: "[Unit]\nAfter=coracle.service\nWants=coracle.service\n".to_owned(),
    }
}

/// Adds crictl's configuration, unless there is one of another program or a user.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn crictl(host: &Host, program: &str, endpoint: &str, wanted: &mut Wanted) -> Result<(), Problem> {
    let is_own = match host.read(CRICTL)? {
        None => true,
        Some(text) if crate::own::origin(program, &text) == crate::own::Origin::Foreign => {
            let configured = scalar(CRICTL, &parse(CRICTL, &text)?, "runtime-endpoint")?;
            let configured = configured.unwrap_or(Given { value: "none".into(), place: CRICTL.into() });
            if !is_same_endpoint(&configured.value, endpoint) {
                wanted.notes.push(format!(
                    "{}: crictl's endpoint is {}: call crictl --runtime-endpoint {endpoint}",
                    configured.place, configured.value
                ));
            }
            false
        }
        Some(_) => true,
    };
    if is_own {
        let text = format!("runtime-endpoint: {endpoint:?}\nimage-endpoint: {endpoint:?}\ntimeout: 30\n");
        wanted.files.push(OwnFile { path: CRICTL.to_owned(), text });
    }
    Ok(())
}

/// Notes that containers of a containerd seem to run, whose state directory is given.
///
/// # Errors
/// The directory cannot be read.
pub(crate) fn running(host: &Host, state: &str, wanted: &mut Wanted) -> Result<(), Problem> {
    let tasks = format!("{state}/io.containerd.runtime.v2.task/k8s.io");
    let count = host.list(&tasks)?.len();
    if count > 0 {
        wanted.notes.push(format!(
            "{tasks}: {count} containers of the old runtime run: drain the node first; they run on, without a kubelet, until they are killed or the machine reboots"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_compared_by_their_socket() {
        for (one, other, expected) in [
            ("unix:///run/a.sock", "/run/a.sock", true),
            ("unix:///var/run/a.sock", "unix:///run/a.sock", true),
            ("unix:///run/a.sock", "unix:///run/b.sock", false),
            ("/variety/a", "/iety/a", false),
            ("", "unix:///run/a.sock", false),
        ] {
            assert_eq!(is_same_endpoint(one, other), expected, "{one} {other}");
        }
    }

    #[test]
    fn strings_of_toml_are_quoted() {
        assert_eq!(toml("/a \"b\"\\\n"), "\"/a \\\"b\\\"\\\\\\u000A\"");
    }
}
