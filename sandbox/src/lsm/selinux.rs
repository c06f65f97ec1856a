//! SELinux: finds the types for containers in the node's policy, and computes the labels of a container's processes and
//! files. The policy is the distribution's; its file `lxc_contexts` names the types (lxc_contexts(5) of libselinux),
//! and the kernel is asked whether it knows them.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::collect::ordered;
use crate::describe_io;

/// File to which a process writes the label that applies after its next exec.
pub(crate) const SELINUX_EXEC: &std::ffi::CStr = c"/proc/self/attr/exec";
/// File to which a process writes the label of keys that it creates until its next exec.
pub(crate) const SELINUX_KEYS: &std::ffi::CStr = c"/proc/self/attr/keycreate";

/// File to which a thread writes the label of files that it creates.
const FILE_CREATE: &str = "/proc/thread-self/attr/fscreate";

/// The type of privileged containers in container-selinux and the reference policy; it is not in `lxc_contexts`.
const PRIVILEGED_TYPE: &str = "spc_t";

/// Number of categories in MCS policies: c0 to c1023 (`mcs_num_cats` of the reference policy).
const CATEGORIES: u16 = 1024;

/// A security context: user, role, type and level.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// SELinux user of the context.
    pub user: String,
    /// SELinux role of the context.
    pub role: String,
    /// SELinux type of the context.
    pub kind: String,
    /// Sensitivity and categories (MLS or MCS level); empty in a policy without levels.
    pub level: String,
}

/// The label in a container's request; empty parts default to the policy's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// SELinux user; empty: the policy's.
    pub user: String,
    /// SELinux role; empty: the policy's.
    pub role: String,
    /// SELinux type of the processes; empty: the policy's.
    pub kind: String,
    /// SELinux level of processes and files; empty: the pod's.
    pub level: String,
}

/// The labels of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels {
    /// Label of the container's processes; `None`: the runtime's label, subject to the policy's transitions at exec.
    pub process: Option<String>,
    /// Label of the container's files.
    pub file: String,
}

/// The reason why labels cannot be computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The requested context is not in the policy.
    Invalid(String),
    /// The kernel could not be queried.
    Kernel(String),
}

/// The container types of the active policy.
#[derive(Clone, Debug)]
pub struct Policy {
    selinuxfs: PathBuf,
    process: Context,
    file: Context,
    privileged: Option<Context>,
}

/// Whether SELinux is enabled: its file system is mounted (selinux(8)).
pub fn has_selinux() -> bool {
    Path::new("/sys/fs/selinux/enforce").exists()
}

impl Policy {
    /// Finds the container types of the policy that `/etc/selinux/config` names.
    ///
    /// # Errors
    /// The reason if there are no types: a file is missing or names no types, or the kernel's policy does not have a
    /// type.
    pub fn find() -> Result<Policy, String> {
        Policy::below(Path::new("/etc/selinux"), Path::new("/sys/fs/selinux"))
    }

    fn below(etc: &Path, selinuxfs: &Path) -> Result<Policy, String> {
        let read = |path: &Path| {
            fs::read_to_string(path).map_err(|error| format!("{}: {}", path.display(), describe_io(&error)))
        };
        let config = etc.join("config");
        let named = values(&read(&config)?);
        let policy =
            named.get("SELINUXTYPE").ok_or_else(|| format!("{}: no SELINUXTYPE", config.display()))?;
        let path = etc.join(policy).join("contexts/lxc_contexts");
        let contexts = values(&read(&path)?);
        let context = |key: &str| {
            let text = contexts.get(key).ok_or_else(|| format!("{}: no {key}", path.display()))?;
            text.parse::<Context>().map_err(|()| format!("{}: {key}: {text:?} is no context", path.display()))
        };
        let (process, file) = (context("process")?, context("file")?);
        let mut policy = Policy { selinuxfs: selinuxfs.to_path_buf(), process, file, privileged: None };
        for context in [&policy.process, &policy.file] {
            match policy.is_known(context) {
                Ok(true) => {}
                Ok(false) => {
                    return Err(format!(
                        "the policy in force does not know {context}, which {} names",
                        path.display()
                    ));
                }
                Err(error) => return Err(describe_io(&error)),
            }
        }
        let privileged = Context { kind: PRIVILEGED_TYPE.to_owned(), ..policy.process.clone() };
        if policy.is_known(&privileged).is_ok_and(|is_known| is_known) {
            policy.privileged = Some(privileged);
        }
        Ok(policy)
    }

    /// Whether the kernel's policy has this context.
    fn is_known(&self, context: &Context) -> io::Result<bool> {
        let path = self.selinuxfs.join("context");
        let text = format!("{context}\0");
        match fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|mut file| file.write_all(text.as_bytes()))
        {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(nix::libc::EINVAL) => Ok(false),
            Err(error) => {
                Err(io::Error::new(error.kind(), format!("{}: {}", path.display(), describe_io(&error))))
            }
        }
    }

    /// A level of two categories for which `taken` is false; `None` if the policy has no levels or all pairs are taken.
    /// `random` returns random numbers.
    pub fn free_level(
        &self,
        mut random: impl FnMut() -> u32,
        taken: impl Fn(&str) -> bool,
    ) -> Option<String> {
        /// Maximum number of attempts to find a free level. With 110 pods and half a million pairs of categories, one
        /// attempt is nearly always sufficient.
        const TRIES_MAX: usize = 1000;
        let sensitivity = self.process.level.split(':').next().filter(|level| !level.is_empty())?;
        for _ in 0..TRIES_MAX {
            let number = random();
            let (one, two) = ((number as u16) % CATEGORIES, ((number >> 16) as u16) % CATEGORIES);
            let level = format!("{sensitivity}:c{},c{}", one.min(two), one.max(two));
            if one != two && !taken(&level) {
                return Some(level);
            }
        }
        None
    }

    /// Whether labels have a level, without which pods cannot be separated.
    pub fn has_levels(&self) -> bool {
        !self.process.level.is_empty()
    }

    /// The labels of a container in a pod with the level `level`. A requested level takes precedence over the pod's.
    /// Files get the requested level and user, but not the requested type, which is for processes. A privileged
    /// container gets the policy's type for privileged containers and no category, so that it can access the files of
    /// every pod.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] if the policy does not know the resulting label.
    pub fn labels(&self, options: &Options, level: &str, privileged: bool) -> Result<Labels, Refusal> {
        let first = |asked: &str, default: &str| (if asked.is_empty() { default } else { asked }).to_owned();
        let level = first(&options.level, level);
        let level = first(&level, &self.process.level);
        let process = match privileged {
            true => self.privileged.clone(),
            false => Some(Context {
                user: first(&options.user, &self.process.user),
                role: first(&options.role, &self.process.role),
                kind: first(&options.kind, &self.process.kind),
                level: level.clone(),
            }),
        };
        let file = Context { user: first(&options.user, &self.file.user), level, ..self.file.clone() };
        for context in process.iter().chain([&file]) {
            match self.is_known(context) {
                Ok(true) => {}
                Ok(false) => return Err(Refusal::Invalid(context.to_string())),
                Err(error) => return Err(Refusal::Kernel(describe_io(&error))),
            }
        }
        Ok(Labels { process: process.map(|context| context.to_string()), file: file.to_string() })
    }

    /// The label of the files that a pod's containers share.
    pub fn pod_file(&self, level: &str) -> String {
        let level = if level.is_empty() { &self.file.level } else { level };
        Context { level: level.to_owned(), ..self.file.clone() }.to_string()
    }

    /// The type of containers' processes.
    pub fn process_type(&self) -> &str {
        &self.process.kind
    }

    /// The type of containers' files.
    pub fn file_type(&self) -> &str {
        &self.file.kind
    }

    /// The type of privileged containers; `None` if the policy has none.
    pub fn privileged_type(&self) -> Option<&str> {
        self.privileged.as_ref().map(|context| context.kind.as_str())
    }
}

impl Options {
    /// Checks that no part contains a separator of contexts or mount options.
    ///
    /// # Errors
    /// The name of the invalid CRI field.
    pub fn check(&self) -> Result<(), &'static str> {
        let is_name = |text: &str| {
            text.len() <= 255
                && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-'))
        };
        let is_level = |text: &str| {
            text.len() <= 4096
                && text.bytes().all(|byte| {
                    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-' | b':' | b',')
                })
        };
        let parts = [
            ("user", is_name(&self.user)),
            ("role", is_name(&self.role)),
            ("type", is_name(&self.kind)),
            ("level", is_level(&self.level)),
        ];
        parts.iter().find(|(_, is_good)| !is_good).map_or(Ok(()), |(part, _)| Err(part))
    }
}

impl std::str::FromStr for Context {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.splitn(4, ':').map(str::to_owned);
        let mut part = || parts.next().filter(|part| !part.is_empty());
        let (user, role, kind) = (part().ok_or(())?, part().ok_or(())?, part().ok_or(())?);
        Ok(Context { user, role, kind, level: part().unwrap_or_default() })
    }
}

impl fmt::Display for Context {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}:{}", self.user, self.role, self.kind)?;
        if self.level.is_empty() { Ok(()) } else { write!(formatter, ":{}", self.level) }
    }
}

/// Parses lines `KEY = VALUE` and `KEY = "VALUE"`; comments begin with `#`.
fn values(text: &str) -> BTreeMap<String, String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    let pairs = lines.filter_map(|line| line.split_once('='));
    ordered(pairs.map(|(key, value)| (key.trim().to_owned(), value.trim().trim_matches('"').to_owned())))
}

/// Calls `make`; files that this thread creates during the call get `label`.
///
/// # Errors
/// The error of `make`; the kernel refuses the label or its reset.
pub fn labelling_files<T, E: From<io::Error>>(
    label: Option<&str>,
    make: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let Some(label) = label else { return make() };
    let set = |label: &str| {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("{FILE_CREATE}: {label}: {}", describe_io(&error)))
        };
        fs::write(FILE_CREATE, label).map_err(named)
    };
    set(label)?;
    let made = make();
    // An empty write resets it (security/selinux/hooks.c, `selinux_setprocattr`: a lone NUL or newline).
    let reset = set("\n");
    let made = made?;
    reset?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXTS: &str = "process = \"system_u:system_r:container_t:s0\"\n# a comment\nfile = \"system_u:object_r:container_file_t:s0\"\n";

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("coracle-selinux-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("etc/default/contexts")).unwrap();
        fs::create_dir_all(folder.join("fs")).unwrap();
        folder
    }

    fn found(folder: &Path) -> Result<Policy, String> {
        Policy::below(&folder.join("etc"), &folder.join("fs"))
    }

    fn policy(name: &str) -> (PathBuf, Policy) {
        let folder = folder(name);
        fs::write(folder.join("etc/config"), "# which\nSELINUX=enforcing\nSELINUXTYPE=default\n").unwrap();
        fs::write(folder.join("etc/default/contexts/lxc_contexts"), CONTEXTS).unwrap();
        // A file takes any context: this stands for a kernel that knows them all.
        fs::write(folder.join("fs/context"), "").unwrap();
        let policy = found(&folder).unwrap();
        (folder, policy)
    }

    #[test]
    fn a_policy_without_container_types_says_what_is_missing() {
        let folder = folder("missing");
        assert!(found(&folder).unwrap_err().contains("etc/config: "));
        fs::write(folder.join("etc/config"), "SELINUX=enforcing\n").unwrap();
        assert!(found(&folder).unwrap_err().contains("no SELINUXTYPE"));
        fs::write(folder.join("etc/config"), "SELINUXTYPE=default\n").unwrap();
        assert!(found(&folder).unwrap_err().contains("lxc_contexts: "));
        let contexts = folder.join("etc/default/contexts/lxc_contexts");
        fs::write(&contexts, "process = \"system_u:system_r:container_t:s0\"\n").unwrap();
        assert!(found(&folder).unwrap_err().ends_with("lxc_contexts: no file"));
        fs::write(&contexts, "process = \"container_t\"\nfile = \"a:b:c\"\n").unwrap();
        assert!(found(&folder).unwrap_err().contains("\"container_t\" is no context"));
        fs::write(&contexts, CONTEXTS).unwrap();
        assert!(found(&folder).unwrap_err().contains("fs/context: "), "the kernel cannot be asked");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn labels_follow_the_policy_and_the_requested_options() {
        let (folder, policy) = policy("labels");
        let (process, file) =
            ("system_u:system_r:container_t:s0:c1,c2", "system_u:object_r:container_file_t:s0:c1,c2");
        let cases = [
            (Options::default(), process, file),
            (
                Options { kind: "web_t".into(), ..Options::default() },
                "system_u:system_r:web_t:s0:c1,c2",
                file,
            ),
            (
                Options {
                    level: "s0:c7".into(),
                    user: "staff_u".into(),
                    role: "staff_r".into(),
                    ..Options::default()
                },
                "staff_u:staff_r:container_t:s0:c7",
                "staff_u:object_r:container_file_t:s0:c7",
            ),
        ];
        for (options, process, file) in cases {
            let labels = policy.labels(&options, "s0:c1,c2", false).unwrap();
            assert_eq!(
                (labels.process.as_deref(), labels.file.as_str()),
                (Some(process), file),
                "{options:?}"
            );
        }
        let labels = policy.labels(&Options::default(), "s0:c1,c2", true).unwrap();
        assert_eq!(
            (labels.process.as_deref(), labels.file.as_str()),
            (Some("system_u:system_r:spc_t:s0"), file)
        );
        assert_eq!(policy.pod_file("s0:c1,c2"), file);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_free_level_has_two_different_categories_that_no_container_has() {
        let (folder, policy) = policy("levels");
        let mut numbers = [0x0005_0005, 0x0001_0002, 0x0403_0009].into_iter();
        // The first has one category twice, the second is taken, the third wraps around.
        let level = policy.free_level(|| numbers.next().unwrap(), |level| level == "s0:c1,c2");
        assert_eq!(level.as_deref(), Some("s0:c3,c9"));
        assert_eq!(policy.free_level(|| 0x0001_0002, |_| true), None);
        let plain = Policy { process: Context { level: String::new(), ..policy.process.clone() }, ..policy };
        assert_eq!(plain.free_level(|| 0x0001_0002, |_| false), None, "a policy without levels");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn selinux_label_parts_with_separators_are_refused() {
        assert_eq!(Options::default().check(), Ok(()));
        let good = Options {
            user: "system_u".into(),
            role: "r".into(),
            kind: "spc_t".into(),
            level: "s0-s1:c0.c9,c11".into(),
        };
        assert_eq!(good.check(), Ok(()));
        for text in ["a:b", "a,b", "a\"", "a b", "a\0", "a\n", "ä"] {
            assert_eq!(Options { user: text.into(), ..Options::default() }.check(), Err("user"), "{text:?}");
            assert_eq!(Options { role: text.into(), ..Options::default() }.check(), Err("role"), "{text:?}");
            assert_eq!(Options { kind: text.into(), ..Options::default() }.check(), Err("type"), "{text:?}");
        }
        for text in ["s0\"", "s0 ", "s0\0", "s0\n", "s0="] {
            assert_eq!(
                Options { level: text.into(), ..Options::default() }.check(),
                Err("level"),
                "{text:?}"
            );
        }
    }
}
