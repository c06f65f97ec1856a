//! Parses profiles in the JSON format of the OCI runtime specification (LinuxSeccomp, with Docker's additions
//! `archMap`, `includes` and `excludes`).

use serde::Deserialize;
use serde_json::Value;

use super::{Action, Architecture, Compare, Condition, Known, Profile, Rule};
use crate::Error;
use crate::capability::bit;
use crate::probe::kernel_version;

/// Maximum size of a profile in bytes; Docker's default profile has 14 KiB.
const FILE_BYTES_MAX: usize = 1 << 20;
/// Maximum number of conditions of one rule: two for each argument.
const CONDITIONS_MAX: usize = 12;
/// Default error number of an action (EPERM).
const ERRNO_DEFAULT: u16 = 1;
/// Largest error number that a filter can return (linux/err.h, MAX_ERRNO).
const ERRNO_MAX: u32 = 4095;

/// The `errno` of a call that the kernel does not have (ENOSYS).
const ERRNO_MISSING: u16 = 38;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    default_action: String,
    default_errno_ret: Option<u32>,
    #[serde(default, deserialize_with = "or_null")]
    architectures: Vec<String>,
    #[serde(default, deserialize_with = "or_null")]
    arch_map: Vec<ArchMap>,
    #[serde(default, deserialize_with = "or_null")]
    flags: Vec<String>,
    #[serde(default, deserialize_with = "or_null")]
    listener_path: String,
    #[serde(default, deserialize_with = "or_null")]
    syscalls: Vec<Syscall>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ArchMap {
    architecture: String,
    #[serde(default, deserialize_with = "or_null")]
    sub_architectures: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Syscall {
    #[serde(default, deserialize_with = "or_null")]
    name: String,
    #[serde(default, deserialize_with = "or_null")]
    names: Vec<String>,
    action: String,
    errno_ret: Option<u32>,
    #[serde(default, deserialize_with = "or_null")]
    args: Vec<Argument>,
    #[serde(default, deserialize_with = "or_null")]
    includes: Filter,
    #[serde(default, deserialize_with = "or_null")]
    excludes: Filter,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Argument {
    #[serde(default, deserialize_with = "or_null")]
    index: u8,
    #[serde(default, deserialize_with = "or_null")]
    value: u64,
    #[serde(default, deserialize_with = "or_null")]
    value_two: u64,
    op: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Filter {
    #[serde(default, deserialize_with = "or_null")]
    caps: Vec<String>,
    #[serde(default, deserialize_with = "or_null")]
    arches: Vec<String>,
    #[serde(default, deserialize_with = "or_null")]
    min_kernel: Option<String>,
}

/// Reads a field; `null` is its default, because Go writes an empty list so.
fn or_null<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Option::deserialize(from).map(Option::unwrap_or_default)
}

/// Parses a profile for a container with these capabilities on a kernel with this release (`6.1.0-18-amd64`).
///
/// # Errors
/// [`Error::Invalid`], naming the field.
pub fn parse(text: &[u8], capabilities: u64, release: &str) -> Result<Profile, Error> {
    if text.len() > FILE_BYTES_MAX {
        return Err(invalid("", format!("the profile is longer than {FILE_BYTES_MAX} bytes")));
    }
    let mut value = serde_json::from_slice(text).map_err(damaged)?;
    name_as_usual(&mut value);
    let file = File::deserialize(value).map_err(damaged)?;
    if !file.listener_path.is_empty() {
        return Err(invalid("listenerPath", "no agent is asked about calls".to_owned()));
    }
    let default = action("defaultAction", &file.default_action, file.default_errno_ret)?;
    let mut rules = Vec::new();
    for (index, call) in file.syscalls.into_iter().enumerate() {
        if applies(&call, capabilities, release) {
            rules.extend(rules_of(&format!("syscalls[{index}]"), call)?);
        }
    }
    let flags = file.flags.iter().try_fold(0, |flags, name| Ok(flags | flag(name)?))?;
    // Programs detect calls that are newer than the profile by ENOSYS, and use older ones (runc: patchbpf). A tracer
    // handles them itself.
    let unknown = match default {
        Action::Allow | Action::Log | Action::Trace(_) => default,
        Action::KillProcess | Action::KillThread | Action::Trap | Action::Errno(_) => {
            Action::Errno(ERRNO_MISSING)
        }
    };
    Ok(Profile {
        default,
        unknown,
        known: Known::Named,
        architectures: architectures(&file.architectures, &file.arch_map)?,
        rules,
        flags,
    })
}

fn damaged(error: serde_json::Error) -> Error {
    invalid("", format!("the profile is damaged: {error}"))
}

/// Gives members the names that this module reads: Go compares them without case.
fn name_as_usual(value: &mut Value) {
    const NAMES: [&str; 23] = [
        "defaultAction",
        "defaultErrnoRet",
        "architectures",
        "archMap",
        "architecture",
        "subArchitectures",
        "flags",
        "listenerPath",
        "syscalls",
        "name",
        "names",
        "action",
        "errnoRet",
        "args",
        "index",
        "value",
        "valueTwo",
        "op",
        "includes",
        "excludes",
        "caps",
        "arches",
        "minKernel",
    ];
    match value {
        Value::Array(items) => items.iter_mut().for_each(name_as_usual),
        Value::Object(members) => {
            for (name, mut member) in std::mem::take(members) {
                name_as_usual(&mut member);
                let usual = NAMES.into_iter().find(|usual| usual.eq_ignore_ascii_case(&name));
                members.insert(usual.map_or(name, str::to_owned), member);
            }
        }
        _ => {}
    }
}

fn invalid(field: &str, why: String) -> Error {
    let field = if field.is_empty() { "seccomp".to_owned() } else { format!("seccomp: {field}") };
    Error::invalid(field, why)
}

fn action(field: &str, name: &str, data: Option<u32>) -> Result<Action, Error> {
    let data = match data {
        None => ERRNO_DEFAULT,
        Some(data) if data <= ERRNO_MAX => data as u16,
        Some(data) => return Err(invalid(field, format!("{data} is no errno"))),
    };
    Ok(match name {
        "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => Action::KillThread,
        "SCMP_ACT_KILL_PROCESS" => Action::KillProcess,
        "SCMP_ACT_TRAP" => Action::Trap,
        "SCMP_ACT_ERRNO" => Action::Errno(data),
        "SCMP_ACT_TRACE" => Action::Trace(data),
        "SCMP_ACT_LOG" => Action::Log,
        "SCMP_ACT_ALLOW" => Action::Allow,
        "SCMP_ACT_NOTIFY" => return Err(invalid(field, "no agent is asked about calls".to_owned())),
        other => return Err(invalid(field, format!("{other:?} is no action"))),
    })
}

/// The rule, or one for each condition if two are about one argument, as runc does (`matchCall` in
/// libcontainer/seccomp/seccomp_linux.go): then one that holds suffices.
fn rules_of(field: &str, call: Syscall) -> Result<Vec<Rule>, Error> {
    let action = action(&format!("{field}.action"), &call.action, call.errno_ret)?;
    let mut names = call.names;
    names.extend(Some(call.name).filter(|name| !name.is_empty()));
    let arguments = call.args;
    if arguments.len() > CONDITIONS_MAX {
        return Err(invalid(field, format!("{} conditions, at most {CONDITIONS_MAX}", arguments.len())));
    }
    let conditions: Vec<Condition> =
        arguments.iter().map(|argument| condition(field, argument)).collect::<Result<_, _>>()?;
    let about = |index| arguments.iter().filter(|argument| argument.index == index).count();
    Ok(match (0..6).any(|index| about(index) > 1) {
        false => vec![Rule { names, conditions, action }],
        true => {
            let alone = |condition| Rule { names: names.clone(), conditions: vec![condition], action };
            conditions.into_iter().map(alone).collect()
        }
    })
}

fn condition(field: &str, argument: &Argument) -> Result<Condition, Error> {
    if argument.index > 5 {
        return Err(invalid(field, format!("argument {} of a call, which has six", argument.index)));
    }
    let (compare, value) = match argument.op.as_str() {
        "SCMP_CMP_NE" => (Compare::NotEqual, argument.value),
        "SCMP_CMP_LT" => (Compare::Less, argument.value),
        "SCMP_CMP_LE" => (Compare::LessOrEqual, argument.value),
        "SCMP_CMP_EQ" => (Compare::Equal, argument.value),
        "SCMP_CMP_GE" => (Compare::GreaterOrEqual, argument.value),
        "SCMP_CMP_GT" => (Compare::Greater, argument.value),
        "SCMP_CMP_MASKED_EQ" => (Compare::Masked { mask: argument.value }, argument.value_two),
        other => return Err(invalid(field, format!("{other:?} is no comparison"))),
    };
    Ok(Condition { argument: argument.index, compare, value })
}

/// Whether the rule applies to this container on this kernel.
fn applies(call: &Syscall, capabilities: u64, release: &str) -> bool {
    let has = |name: &String| bit(name).is_some_and(|bit| capabilities & bit != 0);
    let here = Architecture::HERE[0].go_name();
    let is_new = |wanted: &String| kernel_version(release) >= kernel_version(wanted);
    let Filter { caps, arches, min_kernel } = &call.includes;
    let includes = caps.iter().all(has)
        && (arches.is_empty() || arches.iter().any(|arch| arch == here))
        && min_kernel.as_ref().is_none_or(is_new);
    let Filter { caps, arches, min_kernel } = &call.excludes;
    let excludes = caps.iter().any(has)
        || arches.iter().any(|arch| arch == here)
        || min_kernel.as_ref().is_some_and(is_new);
    includes && !excludes
}

fn flag(name: &str) -> Result<u32, Error> {
    Ok(match name {
        // The process has one thread, so there is nothing to synchronize.
        "SECCOMP_FILTER_FLAG_TSYNC" => 0,
        "SECCOMP_FILTER_FLAG_LOG" => 2,
        "SECCOMP_FILTER_FLAG_SPEC_ALLOW" => 4,
        other => return Err(invalid("flags", format!("{other:?} is not known"))),
    })
}

/// The native architecture, and compatible ones that the file lists.
fn architectures(named: &[String], map: &[ArchMap]) -> Result<Vec<Architecture>, Error> {
    let native = Architecture::HERE[0];
    let mut all = vec![native];
    let of_map = map
        .iter()
        .filter(|entry| known(&entry.architecture) == Some(native))
        .flat_map(|entry| &entry.sub_architectures);
    for name in named.iter().chain(of_map) {
        match known(name) {
            Some(architecture)
                if Architecture::HERE.contains(&architecture) && !all.contains(&architecture) =>
            {
                all.push(architecture);
            }
            // An architecture of another machine, or the native one.
            _ if name.starts_with("SCMP_ARCH_") => {}
            _ => return Err(invalid("architectures", format!("{name:?} is no architecture"))),
        }
    }
    Ok(all)
}

fn known(name: &str) -> Option<Architecture> {
    Some(match name {
        "SCMP_ARCH_X86_64" => Architecture::X86_64,
        "SCMP_ARCH_X86" => Architecture::X86,
        "SCMP_ARCH_X32" => Architecture::X32,
        "SCMP_ARCH_AARCH64" => Architecture::Aarch64,
        "SCMP_ARCH_ARM" => Architecture::Arm,
        "SCMP_ARCH_RISCV64" => Architecture::Riscv64,
        _ => return None,
    })
}
