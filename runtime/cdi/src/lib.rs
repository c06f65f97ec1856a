//! Resolves CDI devices (Container Device Interface, specification 1.0): spec files of device vendors define
//! the edits of a container that a device requires in addition to its device node. The files are read for
//! each job, because vendor tools may rewrite them at any time; an invalid file affects only its own devices.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use coracle_job::{ContainerEdits, DeviceNumbers, EditedDevice, EditedMount, Failure, Hook, Hooks};
use coracle_sandbox::collect;
use coracle_sandbox::describe_io;

use coracle_registries::node_file;
use coracle_yaml::{self as yaml, Node, Problem};

/// Supported spec versions: edits of later versions would be ignored silently.
const VERSIONS: [&str; 10] =
    ["0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0"];
/// Names of edits that are not supported; a spec file with one of them is refused.
const REFUSED: [&str; 2] = ["intelRdt", "netDevices"];
/// Maximum number of files of one directory.
const FILES_MAX: usize = 1024;
/// Maximum number of bytes of the files of all directories, which are in memory together and take some ten times as much as trees.
/// The specs of a node with eight GPUs have 100 KiB.
const BYTES_MAX: usize = 4 << 20;

/// A parsed spec file.
struct Spec {
    path: PathBuf,
    /// `vendor/class` of the file's devices.
    kind: String,
    /// Edits of the file, which apply to every container with any of its devices; `None` if it has none.
    edits: Option<Node>,
    devices: Vec<(String, Option<Node>)>,
}

/// Merges the edits of the devices `names`. Later entries of `directories` have precedence.
///
/// # Errors
/// A name is malformed, or no valid file has the device.
pub fn run(names: &[String], directories: &[PathBuf]) -> Result<ContainerEdits, Failure> {
    let mut problems = Vec::new();
    let mut left = BYTES_MAX;
    let levels: Vec<Vec<Spec>> =
        directories.iter().map(|path| load_all(path, &mut left, &mut problems)).collect();
    for problem in &problems {
        eprintln!("cdi: {problem}");
    }
    let mut edits = ContainerEdits::default();
    // A file's own edits apply once, with the first of its devices.
    let mut used: BTreeMap<&Path, ()> = BTreeMap::new();
    for name in names {
        let (spec, device) = find(name, &levels, &problems)?;
        let failed = |problem: Problem| {
            Failure::invalid(format!("CDI device {name}: {}: {problem}", spec.path.display()))
        };
        if used.insert(&spec.path, ()).is_none() {
            apply(spec.edits.as_ref(), &mut edits).map_err(failed)?;
        }
        apply(device, &mut edits).map_err(failed)?;
    }
    Ok(edits)
}

fn find<'a>(
    name: &str,
    levels: &'a [Vec<Spec>],
    problems: &[String],
) -> Result<(&'a Spec, Option<&'a Node>), Failure> {
    let Some((kind, device)) = name.split_once('=').filter(|(kind, _)| kind.contains('/')) else {
        return Err(Failure::invalid(format!("CDI device {name:?} is not VENDOR/CLASS=NAME")));
    };
    for level in levels.iter().rev() {
        let specs = level.iter().filter(|spec| spec.kind == kind);
        let mut found = specs.flat_map(|spec| {
            let devices = spec.devices.iter().filter(|(known, _)| known == device);
            devices.map(move |(_, edits)| (spec, edits.as_ref()))
        });
        match (found.next(), found.next()) {
            (Some((one, _)), Some((other, _))) => {
                let (one, other) = (one.path.display(), other.path.display());
                return Err(Failure::invalid(format!(
                    "CDI device {name} is defined in {one} and in {other}"
                )));
            }
            (Some(found), None) => return Ok(found),
            (None, _) => {}
        }
    }
    // The text that other runtimes use and clients know.
    let cause = problems.first().map(|problem| format!(" ({problem})")).unwrap_or_default();
    Err(Failure::invalid(format!("unresolvable CDI devices {name}{cause}")))
}

fn load_all(directory: &Path, left: &mut usize, problems: &mut Vec<String>) -> Vec<Spec> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let is_spec = |path: &PathBuf| {
        path.extension().is_some_and(|end| ["json", "yaml", "yml"].iter().any(|known| end == *known))
    };
    let mut paths: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(is_spec).take(FILES_MAX).collect();
    collect::sort(&mut paths);
    let mut specs = Vec::new();
    for path in paths {
        let read = node_file::read(&path).map_err(|error| describe_io(&error));
        let parsed = read.and_then(|bytes| {
            let rest = left.checked_sub(bytes.len());
            *left =
                rest.ok_or_else(|| format!("not read: all CDI specs have more than {BYTES_MAX} bytes"))?;
            parse(path.clone(), &String::from_utf8_lossy(&bytes)).map_err(|problem| problem.to_string())
        });
        match parsed {
            Ok(spec) => specs.push(spec),
            Err(problem) => problems.push(format!("{}: {problem}", path.display())),
        }
    }
    specs
}

fn parse(path: PathBuf, text: &str) -> Result<Spec, Problem> {
    let root = yaml::parse(text)?;
    let mut spec = Spec { path, kind: String::new(), edits: None, devices: Vec::new() };
    let mut version = String::new();
    for (key, value) in root.map()? {
        match key.as_str() {
            "cdiVersion" => version = value.text()?.to_owned(),
            "kind" => spec.kind = value.text()?.to_owned(),
            "containerEdits" => spec.edits = Some(value.clone()),
            "devices" => spec.devices = value.list()?.iter().map(device).collect::<Result<_, _>>()?,
            _ => {}
        }
    }
    if !VERSIONS.contains(&version.as_str()) {
        return Err(root.problem(&format!(
            "cdiVersion {version:?} is not supported; supported: {}",
            VERSIONS.join(", ")
        )));
    }
    if !spec.kind.contains('/') {
        return Err(root.problem(&format!("kind {:?} is not VENDOR/CLASS", spec.kind)));
    }
    Ok(spec)
}

fn device(node: &Node) -> Result<(String, Option<Node>), Problem> {
    let (mut name, mut edits) = (String::new(), None);
    for (key, value) in node.map()? {
        match key.as_str() {
            "name" => name = value.text()?.to_owned(),
            "containerEdits" => edits = Some(value.clone()),
            _ => {}
        }
    }
    if name.is_empty() { Err(node.problem("a device without a name")) } else { Ok((name, edits)) }
}

fn apply(node: Option<&Node>, edits: &mut ContainerEdits) -> Result<(), Problem> {
    let Some(node) = node else { return Ok(()) };
    for (key, value) in node.map()? {
        match key.as_str() {
            "env" => {
                for variable in value.list()? {
                    let text = variable.text()?;
                    let Some((name, content)) = text.split_once('=').filter(|(name, _)| !name.is_empty())
                    else {
                        return Err(variable.problem(&format!("{text:?} is not NAME=VALUE")));
                    };
                    edits.environment.push((name.to_owned(), content.to_owned()));
                }
            }
            "deviceNodes" => {
                for device in value.list()? {
                    edits.devices.push(device_node(device)?);
                }
            }
            "mounts" => {
                for mount in value.list()? {
                    edits.mounts.push(edited_mount(mount)?);
                }
            }
            "additionalGids" => {
                for gid in value.list()? {
                    // CDI's library ignores root's group, too.
                    edits.groups.extend(Some(gid.number()?).filter(|number| *number != 0));
                }
            }
            "hooks" => {
                for hook in value.list()? {
                    add_hook(hook, &mut edits.hooks)?;
                }
            }
            refused if REFUSED.contains(&refused) => {
                return Err(value.problem(&format!("{refused} are not supported by this version of coracle")));
            }
            _ => {}
        }
    }
    Ok(())
}

fn add_hook(node: &Node, hooks: &mut Hooks) -> Result<(), Problem> {
    let (mut hook, mut point) = (Hook::default(), "");
    for (key, value) in node.map()? {
        let texts = |value: &Node| -> Result<Vec<String>, Problem> {
            value.list()?.iter().map(|one| Ok(one.text()?.to_owned())).collect()
        };
        match key.as_str() {
            "hookName" => point = value.text()?,
            "path" => value.text()?.clone_into(&mut hook.path),
            "args" => hook.arguments = texts(value)?,
            "env" => hook.environment = texts(value)?,
            "timeout" => hook.timeout_s = value.number()?,
            _ => {}
        }
    }
    if !hook.path.starts_with('/') {
        return Err(node.problem("a hook without an absolute path"));
    }
    let hooks = match point {
        "prestart" => &mut hooks.prestart,
        "createRuntime" => &mut hooks.create_runtime,
        "createContainer" => &mut hooks.create_container,
        "startContainer" => &mut hooks.start_container,
        "poststart" => &mut hooks.poststart,
        "poststop" => &mut hooks.poststop,
        other => return Err(node.problem(&format!("{other:?} is not a hook name"))),
    };
    hooks.push(hook);
    Ok(())
}

fn device_node(node: &Node) -> Result<EditedDevice, Problem> {
    let mut device = EditedDevice::default();
    let (mut is_block, mut major, mut minor) = (None, 0, 0);
    for (key, value) in node.map()? {
        match key.as_str() {
            "path" => device.path = value.text()?.to_owned(),
            "hostPath" => device.host_path = value.text()?.to_owned(),
            "permissions" => device.permissions = value.text()?.to_owned(),
            "type" => match value.text()? {
                "" => {}
                "b" => is_block = Some(true),
                "c" | "u" => is_block = Some(false),
                other => return Err(value.problem(&format!("type {other:?} of a device is not b, c or u"))),
            },
            // Null is as good as absent.
            "major" | "minor" | "fileMode" | "uid" | "gid" if value.text()?.is_empty() => {}
            "major" => major = value.number()?,
            "minor" => minor = value.number()?,
            // Some tools write the kind of the file, too.
            "fileMode" => device.mode = Some(value.number()? & 0o7777),
            "uid" => device.uid = Some(value.number()?),
            "gid" => device.gid = Some(value.number()?),
            // A misspelt `permissions` would otherwise permit everything.
            other => return Err(value.problem(&format!("a device has no field {other:?}"))),
        }
    }
    if device.host_path.is_empty() {
        device.host_path.clone_from(&device.path);
    }
    if !device.host_path.starts_with('/') {
        return Err(node.problem(&format!("host path {:?} of a device is not absolute", device.host_path)));
    }
    // As in CDI's own library, a device without both is looked up on the host: 0 is no major number.
    device.numbers = is_block.filter(|_| major != 0).map(|is_block| DeviceNumbers { is_block, major, minor });
    if device.permissions.is_empty() {
        device.permissions = "rwm".to_owned();
    }
    match device.path.starts_with('/') && device.permissions.bytes().all(|byte| b"rwm".contains(&byte)) {
        true => Ok(device),
        false => Err(node.problem("a device needs an absolute path and permissions of the letters rwm")),
    }
}

fn edited_mount(node: &Node) -> Result<EditedMount, Problem> {
    let mut mount = EditedMount::default();
    for (key, value) in node.map()? {
        match key.as_str() {
            "hostPath" => mount.host_path = value.text()?.to_owned(),
            "containerPath" => mount.container_path = value.text()?.to_owned(),
            "options" => {
                for option in value.list()? {
                    match option.text()? {
                        "ro" => mount.is_read_only = true,
                        "noexec" | "nosuid" | "nodev" => mount.options.push(option.text()?.to_owned()),
                        "bind" | "rbind" | "rw" | "private" | "rprivate" | "exec" | "suid" | "dev" => {}
                        other => return Err(option.problem(&format!("option {other:?} is not supported"))),
                    }
                }
            }
            "type" if !matches!(value.text()?, "" | "none" | "bind") => {
                return Err(value.problem("only bind mounts are supported"));
            }
            _ => {}
        }
    }
    match [&mount.host_path, &mount.container_path].iter().all(|path| path.starts_with('/')) {
        true => Ok(mount),
        false => Err(node.problem("a mount needs absolute paths")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: &str = r#"
cdiVersion: "0.6.0"
kind: vendor.test/gpu
containerEdits:
  env: [ONCE=1]
devices:
  - name: zero
    containerEdits:
      env: ["A=b=c"]
      deviceNodes: [{path: /dev/gpu0, hostPath: /dev/zero, permissions: rw}, {path: /dev/null}]
      mounts: [{hostPath: /srv, containerPath: /lib/gpu, options: [ro, nosuid, bind]}]
      additionalGids: [0, 44]
  - name: hooked
    containerEdits: {hooks: [{hookName: createContainer, path: /bin/true, args: [true, "1"], timeout: 5}]}
  - name: late
    containerEdits: {hooks: [{hookName: afterwards, path: /bin/true}]}
"#;

    /// Finding S3: the number of files and the size of each were limited, but not what all of them have in memory.
    #[test]
    fn specs_beyond_the_limit_of_all_together_are_not_read() {
        let names: Vec<String> = (0..6).map(|number| format!("a/{number}.yaml")).collect();
        let long = format!("#{}\n{SPEC}", "x".repeat(1_000_000));
        let mut files: Vec<_> = names
            .iter()
            .map(|name| (name.as_str(), long.replace("test/gpu", &format!("test/{}", &name[2..3]))))
            .collect();
        files.push(("b/last.yaml", SPEC.to_owned()));
        let files: Vec<_> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
        assert!(with(&files, &["vendor.test/3=zero"]).is_ok());
        assert!(with(&files, &["vendor.test/gpu=zero"]).is_ok(), "a small file fits behind large ones");
        let error = with(&files, &["vendor.test/4=zero"]).unwrap_err();
        assert!(error.contains("4.yaml: not read: all CDI specs have more than 4194304 bytes"), "{error}");
    }

    /// Writes each text into the directory with the given number and resolves `names`.
    fn with(files: &[(&str, &str)], names: &[&str]) -> Result<ContainerEdits, String> {
        let folder = tempfile_folder();
        let mut directories = Vec::new();
        for (name, text) in files {
            let path = folder.join(name);
            let directory = path.parent().expect("a parent").to_owned();
            std::fs::create_dir_all(&directory).expect("a directory");
            std::fs::write(&path, text).expect("a file");
            if !directories.contains(&directory) {
                directories.push(directory);
            }
        }
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let edits = run(&names, &directories).map_err(|failure| failure.message);
        std::fs::remove_dir_all(&folder).expect("remove the test's directory");
        edits
    }

    fn tempfile_folder() -> PathBuf {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        std::env::temp_dir().join(format!("coracle-cdi-{}-{number}", std::process::id()))
    }

    #[test]
    fn edits_of_a_device_and_of_its_file_are_merged() {
        let broken = ("0/broken.json", "{ not even");
        let edits = with(&[broken, ("0/gpu.yaml", SPEC)], &["vendor.test/gpu=zero"]).unwrap();
        let pairs = [("ONCE", "1"), ("A", "b=c")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(edits.environment, pairs);
        assert_eq!(edits.groups, [44]);
        let devices: Vec<_> =
            edits.devices.iter().map(|one| [&*one.path, &one.host_path, &one.permissions]).collect();
        assert_eq!(devices, [["/dev/gpu0", "/dev/zero", "rw"], ["/dev/null", "/dev/null", "rwm"]]);
        assert!(edits.mounts[0].is_read_only && edits.mounts[0].options == ["nosuid"]);
        let twice = with(&[("0/gpu.yaml", SPEC)], &["vendor.test/gpu=zero", "vendor.test/gpu=zero"]).unwrap();
        assert_eq!(twice.environment.iter().filter(|(name, _)| name == "ONCE").count(), 1);
    }

    #[test]
    fn a_device_with_type_and_major_needs_no_node_on_the_host() {
        let numbers = |node: &str| {
            let text = SPEC.replace("{path: /dev/null}", node);
            with(&[("0/gpu.yaml", &text)], &["vendor.test/gpu=zero"]).map(|edits| edits.devices[1].numbers)
        };
        let block = DeviceNumbers { is_block: true, major: 7, minor: 200 };
        assert_eq!(numbers("{path: /dev/x, type: b, major: 7, minor: 200}"), Ok(Some(block)));
        let character = DeviceNumbers { is_block: false, major: 1, minor: 0 };
        assert_eq!(numbers("{path: /dev/x, type: u, major: 1}"), Ok(Some(character)));
        for incomplete in ["{path: /dev/null, type: c}", "{path: /dev/null, major: 1, minor: 3}"] {
            assert_eq!(numbers(incomplete), Ok(None), "{incomplete}");
        }
        assert!(numbers("{path: /dev/x, type: p}").unwrap_err().contains("type \"p\""));
        let negative = numbers("{path: /dev/x, type: c, major: -1}").unwrap_err();
        assert!(negative.contains("\"-1\" is not a number"), "{negative}");
    }

    #[test]
    fn an_unknown_field_of_a_device_is_refused() {
        let text = SPEC.replace("{path: /dev/null}", "{path: /dev/null, rights: r}");
        let refused = with(&[("0/gpu.yaml", &text)], &["vendor.test/gpu=zero"]).unwrap_err();
        assert!(refused.contains("a device has no field \"rights\""), "{refused}");
    }

    #[test]
    fn mode_and_owner_of_a_device_are_parsed() {
        let about = |node: &str| {
            let text = SPEC.replace("{path: /dev/null}", node);
            let edits = with(&[("0/gpu.yaml", &text)], &["vendor.test/gpu=zero"]).unwrap();
            let device = &edits.devices[1];
            (device.mode, device.uid, device.gid)
        };
        assert_eq!(about("{path: /dev/null}"), (None, None, None));
        assert_eq!(about("{path: /dev/null, fileMode: null, uid: ~, gid: }"), (None, None, None));
        // In decimal as in JSON, in octal, and with the kind of the file in it.
        for mode in ["432", "0660", "8624"] {
            let node = format!("{{path: /dev/null, fileMode: {mode}, uid: 0, gid: 44}}");
            assert_eq!(about(&node), (Some(0o660), Some(0), Some(44)), "{mode}");
        }
    }

    #[test]
    fn hooks_are_assigned_by_their_name() {
        let hooks = with(&[("0/gpu.yaml", SPEC)], &["vendor.test/gpu=hooked"]).unwrap().hooks;
        let hook = &hooks.create_container[0];
        assert_eq!(
            (hook.path.as_str(), &hook.arguments[..], hook.timeout_s),
            ("/bin/true", &["true".to_owned(), "1".to_owned()][..], 5)
        );
    }

    #[test]
    fn later_directories_have_precedence_and_conflicts_in_one_are_errors() {
        let other = SPEC.replace("A=b=c", "A=other");
        let edits = with(&[("0/gpu.yaml", SPEC), ("1/gpu.yaml", &other)], &["vendor.test/gpu=zero"]).unwrap();
        assert!(edits.environment.iter().any(|(name, value)| name == "A" && value == "other"));
        let error = with(&[("0/a.yaml", SPEC), ("0/b.yaml", &other)], &["vendor.test/gpu=zero"]).unwrap_err();
        assert!(error.contains("a.yaml and in") && error.contains("b.yaml"), "{error}");
    }

    #[test]
    fn errors_name_the_unsupported_value() {
        for (name, expected) in [
            ("vendor.test/gpu=absent", "unresolvable CDI devices vendor.test/gpu=absent"),
            ("gpu", "is not VENDOR/CLASS=NAME"),
            ("vendor.test/gpu=late", "gpu.yaml: line 16: \"afterwards\" is not a hook name"),
        ] {
            let error = with(&[("0/gpu.yaml", SPEC)], &[name]).unwrap_err();
            assert!(error.contains(expected), "expected {expected:?} in {error:?}");
        }
        let newer = SPEC.replace("0.6.0", "9.0.0");
        let error = with(&[("0/gpu.yaml", &newer)], &["vendor.test/gpu=zero"]).unwrap_err();
        assert!(error.contains("unresolvable") && error.contains("cdiVersion \"9.0.0\""), "{error}");
    }
}
