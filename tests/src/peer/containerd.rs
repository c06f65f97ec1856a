//! containerd, with runc: Debian's, or one of the 2.x releases, whichever the search path has.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{Import, PAUSE, Runtime, runc_version, tool, word_of};

/// Directory of the sockets of containerd's shims, independent of its configuration (containerd 1.6 and 2.x:
/// `defaults.DefaultStateDir`).
const SHIM_SOCKETS: &str = "/run/containerd/s";

pub(super) struct Containerd;

impl Runtime for Containerd {
    fn name(&self) -> &'static str {
        "containerd"
    }

    fn version(&self) -> String {
        format!("{} with runc {}", word_of("containerd", "--version", 2), runc_version())
    }

    fn monitor(&self) -> &'static str {
        "containerd-shim"
    }

    fn shared(&self) -> &'static [&'static str] {
        &[SHIM_SOCKETS, "/run/containerd", "/var/lib/cni/results", "/var/lib/cni"]
    }

    fn configure(&self, folder: &Path, _registry: Option<&str>) {
        fs::write(folder.join("config.toml"), configuration(folder)).expect("the peer's configuration");
    }

    fn daemon(&self, folder: &Path) -> Command {
        let mut command = Command::new(tool("containerd"));
        command.arg("--config").arg(folder.join("config.toml"));
        command
    }

    fn import(&self, folder: &Path) -> Import {
        let mut command = Command::new(tool("ctr"));
        command.arg("--address").arg(folder.join("cri.sock")).args([
            "--namespace",
            "k8s.io",
            "images",
            "import",
        ]);
        Import::Archive(command)
    }
}

/// Returns a configuration with its own directories and without NRI, whose socket has one path for all daemons; the rest are the defaults. containerd 2 converts this version of the configuration. AppArmor is disabled,
/// because this machine may not have it; the change of OOM scores is disabled, because the test environment
/// may not permit it.
fn configuration(folder: &Path) -> String {
    let plugins = tool("cni");
    let (folder, plugins) = (folder.display(), plugins.display());
    format!(
        r#"version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
address = "{folder}/cri.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
[plugins."io.containerd.nri.v1.nri"]
disable = true
[plugins."io.containerd.image-verifier.v1.bindir"]
bin_dir = "{folder}/verifiers"
per_verifier_timeout = "2s"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "{folder}/certs.d"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
Root = "{folder}/runc"
"#
    )
}
