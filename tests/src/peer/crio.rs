//! CRI-O with conmon and runc: the programs `crio`, `conmon`, `runc` and `pinns` of the search path.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{Import, PAUSE, Runtime, runc_version, tool, word_of};

pub(super) struct Crio;

impl Runtime for Crio {
    fn name(&self) -> &'static str {
        "CRI-O"
    }

    fn version(&self) -> String {
        format!("{} with runc {}", word_of("crio", "version", 1), runc_version())
    }

    fn monitor(&self) -> &'static str {
        "conmon"
    }

    fn shared(&self) -> &'static [&'static str] {
        &[
            "/var/lib/containers/cache/blob-info-cache-v1.sqlite",
            "/var/lib/containers/cache",
            "/var/lib/containers",
            "/var/lib/cni/results",
            "/var/lib/cni",
        ]
    }

    fn configure(&self, folder: &Path, registry: Option<&str>) {
        let own = folder.join(".config/containers");
        fs::create_dir_all(&own).expect("a directory for the peer's registries");
        let registry = registry.expect("the images of CRI-O come from a registry");
        // The second is the registry under its own name, which images of the measurement of pulls have.
        let registries = format!(
            "[[registry]]\nprefix = \"localhost\"\nlocation = \"{registry}\"\ninsecure = true\n\
             [[registry]]\nprefix = \"{registry}\"\nlocation = \"{registry}\"\ninsecure = true\n"
        );
        fs::write(own.join("registries.conf"), registries).expect("the peer's registries");
        fs::write(own.join("policy.json"), r#"{"default": [{"type": "insecureAcceptAnything"}]}"#)
            .expect("the peer's policy");
        fs::write(folder.join("crio.conf"), configuration(folder)).expect("the peer's configuration");
    }

    fn daemon(&self, folder: &Path) -> Command {
        let mut command = Command::new(tool("crio"));
        command.arg("--config").arg(folder.join("crio.conf")).args(["--config-dir", ""]);
        // Its registries and its policy are in the home directory.
        command.env("HOME", folder);
        command
    }

    fn import(&self, _folder: &Path) -> Import {
        Import::Registry
    }
}

/// Returns a configuration with its own directories, cgroups by their files, conmon in the pod's cgroup so that it is counted there, no AppArmor profile, no NRI and no
/// hooks; the rest are the defaults.
fn configuration(folder: &Path) -> String {
    let [conmon, runc, pinns, plugins] =
        ["conmon", "runc", "pinns", "cni"].map(|name| tool(name).display().to_string());
    let folder = folder.display();
    format!(
        r#"[crio]
root = "{folder}/root"
runroot = "{folder}/state"
storage_driver = "overlay"
log_dir = "{folder}/logs"
version_file = "{folder}/version"
version_file_persist = "{folder}/version-persist"
clean_shutdown_file = "{folder}/clean"
[crio.api]
listen = "{folder}/cri.sock"
stream_address = "127.0.0.1"
stream_port = "0"
[crio.runtime]
default_runtime = "runc"
conmon = "{conmon}"
conmon_cgroup = "pod"
cgroup_manager = "cgroupfs"
pinns_path = "{pinns}"
namespaces_dir = "{folder}/namespaces"
container_exits_dir = "{folder}/exits"
container_attach_socket_dir = "{folder}/attach"
hooks_dir = []
apparmor_profile = "unconfined"
[crio.runtime.runtimes.runc]
runtime_path = "{runc}"
runtime_type = "oci"
runtime_root = "{folder}/runc"
monitor_path = "{conmon}"
monitor_cgroup = "pod"
[crio.image]
pause_image = "{PAUSE}"
pause_command = "/probe sleep 1000000"
signature_policy = "{folder}/.config/containers/policy.json"
signature_policy_dir = "{folder}/policies"
[crio.network]
network_dir = "{folder}/cni"
plugin_dirs = ["{plugins}"]
[crio.nri]
enable_nri = false
"#
    )
}
