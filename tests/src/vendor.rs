//! A vendor's CDI device with a mounted library, and hooks that find it as those of NVIDIA's toolkit do: by the root in `config.json`
//! of the bundle, which the state on standard input names.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Name of the device.
pub const DEVICE: &str = "hooks.test/library=all";

/// Leaves a link `said-by-POINT` in the container's root. Its content says what the hook has found: the working directory, the
/// library, the device `null` and the kind of file system at `/proc`. With a second argument the hook reads the root in the
/// container's mount namespace.
const HOOK: &str = r#"#!/bin/sh
set -e
state=$(cat)
word() { printf '%s' "$1" | sed -n "s/.*$2\":\"\{0,1\}\([^\",}]*\).*/\1/p"; }
bundle=$(word "$state" '"bundle')
pid=$(word "$state" '"pid')
root=$(word "$(cat "$bundle/config.json")" '"root":{"path')
case $root in /*) ;; *) root=$bundle/$root ;; esac
in=${2:+nsenter --mount=/proc/$pid/ns/mnt}
where=elsewhere
[ . -ef "$bundle" ] && where=bundle
[ . -ef "$root" ] && where=root
library=$($in cat "$root/opt/library" || true)
null=$($in stat -c %t:%T "$root/dev/null" || true)
proc=$($in stat -f -c %T "$root/proc" || true)
$in ln -s "in the $where: $library, null $null, $proc" "$root/said-by-$1"
"#;

/// Writes the device to a directory of CDI spec files, with its library and its hooks in `folder`. `is_entering`: whether the hook of
/// the runtime's namespaces enters the container's mount namespace, outside of which runc's mounts are not.
pub fn write(specs: &Path, folder: &Path, is_entering: bool) {
    let (hook, library) = (folder.join("vendor-hook"), folder.join("vendor-library"));
    fs::write(&hook, HOOK).expect("a hook");
    fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).expect("ours");
    fs::write(&library, "of the vendor").expect("a library");
    let (hook, library) = (hook.display(), library.display());
    let entering = if is_entering { ", entering" } else { "" };
    let text = format!(
        "cdiVersion: 0.6.0
kind: hooks.test/library
devices:
- name: all
  containerEdits:
    mounts: [{{hostPath: {library}, containerPath: /opt/library, options: [ro, bind]}}]
    hooks:
    - {{hookName: createRuntime, path: {hook}, args: [hook, createRuntime{entering}]}}
    - {{hookName: createContainer, path: {hook}, args: [hook, createContainer]}}
"
    );
    fs::create_dir_all(specs).expect("a directory");
    fs::write(specs.join("hooks.test.yaml"), text).expect("a file");
}
