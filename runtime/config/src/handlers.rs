//! Section `[runtime_handlers]`: further names of this runtime, and defaults for the containers of pods that ask for one of
//! them. A default is written `"HANDLER=VALUE"`, and a handler may occur several times.

use super::value::Raw;

/// Names of runtime handlers and their defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuntimeHandlers {
    /// Names that all mean this runtime, in addition to the empty one.
    pub aliases: Vec<String>,
    /// Handler and name of a CDI device.
    pub cdi_devices: Vec<(String, String)>,
    /// Handler, name and value of an annotation.
    pub annotations: Vec<(String, (String, String))>,
    /// Handler and seccomp profile: `runtime/default`, or the path of a file.
    pub seccomp: Vec<(String, String)>,
    /// Names of handlers whose containers cannot gain privileges.
    pub no_new_privileges: Vec<String>,
    /// Handler, name and value of a file of cgroup v2.
    pub cgroup: Vec<(String, (String, String))>,
}

/// The seccomp profile of the runtime.
pub const RUNTIME_DEFAULT: &str = "runtime/default";

impl RuntimeHandlers {
    /// Names defaults of handlers that are not served.
    pub fn mistakes(&self) -> Vec<String> {
        let named = (self.cdi_devices.iter().map(|(handler, _)| ("cdi_devices", handler)))
            .chain(self.annotations.iter().map(|(handler, _)| ("annotations", handler)))
            .chain(self.seccomp.iter().map(|(handler, _)| ("seccomp", handler)))
            .chain(self.no_new_privileges.iter().map(|handler| ("no_new_privileges", handler)))
            .chain(self.cgroup.iter().map(|(handler, _)| ("cgroup", handler)));
        named
            .filter(|(_, handler)| !self.aliases.contains(handler))
            .map(|(key, handler)| {
                format!("runtime_handlers.{key}: {handler:?} is not in runtime_handlers.aliases")
            })
            .collect()
    }
}

/// Parses the defaults of one kind; `expected` says what a value is.
fn defaults<T>(
    raw: &Raw,
    expected: &str,
    value: impl Fn(&str) -> Option<T>,
) -> Result<Vec<(String, T)>, String> {
    let parsed = raw.texts()?.into_iter().map(|text| {
        let pair = text.split_once('=').and_then(|(handler, rest)| Some((handler.to_owned(), value(rest)?)));
        pair.ok_or_else(|| format!("expected \"HANDLER={expected}\", found {text:?}"))
    });
    parsed.collect()
}

/// Files that the resources of a request set; a default would replace them.
const OF_REQUESTS: [&str; 6] =
    ["memory.max", "memory.swap.max", "cpu.max", "cpu.weight", "cpuset.cpus", "cpuset.mems"];

/// The name and the value of a default, such as an annotation or a file of a cgroup.
type Pair = (String, String);

fn pair(text: &str) -> Option<Pair> {
    let (name, value) = text.split_once('=').filter(|(name, _)| !name.is_empty())?;
    Some((name.to_owned(), value.to_owned()))
}

impl Raw {
    pub(super) fn cdi_devices(&self) -> Result<Vec<(String, String)>, String> {
        let is_name = |name: &&str| {
            let parts = name.split_once('=').and_then(|(kind, device)| Some((kind.split_once('/')?, device)));
            parts.is_some_and(|((vendor, class), device)| {
                [vendor, class, device].iter().all(|part| !part.is_empty())
            })
        };
        defaults(self, "VENDOR/CLASS=DEVICE", |name| Some(name).filter(is_name).map(str::to_owned))
    }

    pub(super) fn annotations(&self) -> Result<Vec<(String, Pair)>, String> {
        defaults(self, "NAME=VALUE", pair)
    }

    pub(super) fn seccomp_profiles(&self) -> Result<Vec<(String, String)>, String> {
        let is_profile = |profile: &&str| *profile == RUNTIME_DEFAULT || profile.starts_with('/');
        defaults(self, "runtime/default, or an absolute path", |profile| {
            Some(profile).filter(is_profile).map(str::to_owned)
        })
    }

    pub(super) fn cgroup_files(&self) -> Result<Vec<(String, Pair)>, String> {
        let is_file = |name: &str| {
            name.contains('.')
                && !OF_REQUESTS.contains(&name)
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._".contains(&byte))
        };
        defaults(self, "FILE=VALUE, such as pids.max=200, of a file that requests do not set", |text| {
            pair(text).filter(|(name, _)| is_file(name))
        })
    }
}
