//! The recipes for OpenWrt, Buildroot and Yocto, as far as they can run without those build systems: what they
//! install is in the archive of a release, and their version is that of the workspace.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::dist::stand_ins;
use crate::{EPOCH, Folder, release, run, said, triple, workspace};

fn read(path: &str) -> String {
    fs::read_to_string(workspace().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The archive of a release, unpacked; returns its directory.
fn unpacked(folder: &Folder) -> std::path::PathBuf {
    let out = folder.path().join("out");
    release(&out, &stand_ins(folder, "programs", 0o755), EPOCH, "tar", &[&triple()]);
    let name = format!("coracle-{}-{}", env!("CARGO_PKG_VERSION"), triple());
    let output = run(Command::new("tar")
        .arg("-C")
        .arg(folder.path())
        .arg("-xzf")
        .arg(out.join(format!("{name}.tar.gz"))));
    assert!(output.status.success(), "{}", said(&output));
    folder.path().join(name)
}

/// The words of a text that begin with this prefix, without it and up to a character that ends a path.
fn words<'a>(text: &'a str, prefix: &str) -> Vec<&'a str> {
    let ends = |c: char| c.is_whitespace() || "'\");\\".contains(c);
    text.split(prefix).skip(1).map(|rest| rest.split(ends).next().unwrap_or_default()).collect()
}

fn are_files(archive: &Path, paths: &[&str], recipe: &str) {
    assert!(!paths.is_empty(), "{recipe} installs nothing");
    for path in paths {
        let names = if path.ends_with("$program") {
            ["coracled", "coracle", "coracle-pod"].map(|name| path.replace("$program", name)).to_vec()
        } else {
            vec![(*path).to_owned()]
        };
        for name in names {
            assert!(archive.join(&name).is_file(), "{recipe}: no {name} in the archive");
        }
    }
}

#[test]
fn recipes_install_files_of_the_archive_and_have_its_version() {
    let folder = Folder::new("recipes");
    let archive = unpacked(&folder);
    let version = env!("CARGO_PKG_VERSION");
    let buildroot = read("packaging/buildroot/package/coracle/coracle.mk");
    are_files(&archive, &words(&buildroot, "$(@D)/"), "Buildroot");
    assert!(buildroot.contains(&format!("CORACLE_VERSION = {version}\n")));
    let openwrt = read("packaging/openwrt/coracle/Makefile");
    are_files(&archive, &words(&openwrt, "$(PKG_BUILD_DIR)/"), "OpenWrt");
    assert!(openwrt.contains(&format!("PKG_VERSION:={version}\n")));
    let recipe = format!("packaging/yocto/meta-coracle/recipes-containers/coracle/coracle_{version}.bb");
    let yocto = read(&recipe);
    are_files(&archive, &words(&yocto, "${S}/"), "Yocto");
    for place in [&buildroot, &openwrt, &yocto] {
        assert!(place.contains("usr/share/licenses/coracle/LICENSE"));
        // Without the worker no pod starts.
        let makes_link = |line: &str| {
            let is_link = line.contains("ln -s") || line.contains("$(LN)");
            is_link && line.contains(" coracle ") && line.ends_with("/coracle-worker")
        };
        assert!(place.lines().any(makes_link), "{place}");
    }
    let sum = run(Command::new("md5sum").arg(workspace().join("LICENSE")));
    let sum = said(&sum);
    assert!(yocto.contains(&format!("md5={}\"", sum.split(' ').next().expect("a sum"))), "{sum}");
}

/// OpenWrt's own files, as far as the package uses them: the variables, and a BuildPackage that only installs.
const RULES: &str = "ARCH:=$(shell uname -m)\nINSTALL_DIR:=install -d -m0755\nINSTALL_BIN:=install -m0755\n\
                     LN:=ln -sf\nINSTALL_CONF:=install -m0600\n";
const PACKAGE: &str = "define BuildPackage\nall:\n\t$(call Package/$(1)/install,$(DESTDIR))\nendef\n";

#[test]
fn the_openwrt_package_installs_and_its_script_names_the_daemon_to_procd() {
    let folder = Folder::new("openwrt");
    unpacked(&folder);
    folder.write("top/rules.mk", RULES);
    folder.write("top/package.mk", PACKAGE);
    let (top, root) = (folder.path().join("top"), folder.path().join("root"));
    let made = run(Command::new("make")
        .arg("-C")
        .arg(workspace().join("packaging/openwrt/coracle"))
        .arg(format!("TOPDIR={}", top.display()))
        .arg(format!("INCLUDE_DIR={}", top.display()))
        .arg(format!("BUILD_DIR={}", folder.path().display()))
        .arg(format!("DESTDIR={}", root.display()))
        .env_remove("MAKEFLAGS"));
    assert!(made.status.success(), "{}", said(&made));
    for name in [
        "usr/bin/coracled",
        "usr/bin/coracle",
        "usr/bin/coracle-worker",
        "usr/bin/coracle-pod",
        "etc/coracle/config.toml",
    ] {
        assert!(root.join(name).is_file(), "no {name}");
    }

    // procd's functions print; the daemon's program and the directory are not there.
    let script = r#"
for name in open_instance close_instance set_param send_signal; do
  eval "procd_$name() { echo $name \"\$@\"; }"
done
. "$1"
mkdir() { echo mkdir "$@"; }
chmod() { :; }
eval "$(sed -n '/^start_service/,/^}/p' "$1" | sed 's#/usr/bin/coracle config check#true#')"
start_service
reload_service"#;
    let init = root.join("etc/init.d/coracle");
    let said = said(&run(Command::new("busybox").args(["sh", "-euc", script, "sh"]).arg(init)));
    for line in [
        "open_instance\n",
        "set_param command /usr/bin/coracled\n",
        "set_param respawn 3600 5 0\n",
        "close_instance\n",
        "send_signal coracle\n",
    ] {
        assert!(said.contains(line), "no {line:?}: {said}");
    }
}
