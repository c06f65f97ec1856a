//! Tests the options of an overlay with the real kernel: names with all separators, relative layers, and the order of
//! layers. The test needs root and OverlayFS, and fails without them. It is the only test in this file because it
//! changes the working directory.

use std::ffi::CStr;
use std::fs;
use std::path::{Path, PathBuf};

use coracle_sandbox::plan::{
    self, CgroupMount, ContainerPlan, Files, Process, ProcessPlan, Root, Scheduling, Waits,
};
use coracle_wire::{Op, Text, VERSION, walk};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

fn plan_of(root: Root) -> ContainerPlan {
    let file = PathBuf::from("/dev/null");
    ContainerPlan {
        root,
        cgroup_joins: vec![],
        has_cgroup_namespace: false,
        cgroup_mount: CgroupMount::None,
        mounts: vec![],
        image_volumes: vec![],
        files: Files { hosts: file.clone(), host_name: file.clone(), resolv_conf: file },
        shm: "/dev/shm".into(),
        has_kcore: false,
        devices: vec![],
        scheduling: Scheduling::default(),
        masked_paths: vec![],
        readonly_paths: vec![],
        privileged: false,
        user_namespace: None,
        is_cgroup_mount_writable: false,
        without_mounts: Vec::new(),
        namespaces: Vec::new(),
        sysctls: Vec::new(),
        own_namespaces: plan::PodNamespaces { network: false, ipc: false, uts: false },
    }
}

fn text(text: Text<'_>) -> &CStr {
    text.as_cstr().expect("a whole text")
}

#[test]
fn layers_with_special_characters_are_mounted_in_order_as_root() {
    let scratch = std::env::temp_dir().join(format!("coracle-overlay-{}", std::process::id()));
    let (layers, pod) = (scratch.join("layers"), scratch.join("pod a,b:c\\d"));
    let lowers = ["top:1,2", "below\\it"];
    for lower in lowers {
        fs::create_dir_all(layers.join(lower)).unwrap();
        fs::write(layers.join(lower).join("who"), lower).unwrap();
        fs::write(layers.join(lower).join(lower), "").unwrap();
    }
    for name in ["upper", "work", "root"] {
        fs::create_dir_all(pod.join(name)).unwrap();
    }
    let root = Root {
        layers_directory: layers,
        lowers: lowers.map(String::from).to_vec(),
        upper: pod.join("upper"),
        work: pod.join("work"),
        mountpoint: pod.join("root"),
        read_only: false,
        label: None,
    };
    let process = Process { arguments: vec!["/true".into()], ..Process::default() };
    let process = ProcessPlan { process, ..ProcessPlan::default() };
    let record = plan::container(&plan_of(root), &process, VERSION, Waits::Never).unwrap().bytes;
    let overlay = walk(&record).unwrap().flatten().find_map(|op| match op {
        Op::Overlay { directory, options, target } => Some((text(directory), text(options), text(target))),
        _ => None,
    });
    let (directory, options, target) = overlay.expect("a container has an overlay");

    // The child changes its directory in the same way.
    std::env::set_current_dir(directory.to_str().unwrap()).unwrap();
    let kind = Some("overlay");
    mount(kind, target, kind, MsFlags::empty(), Some(options)).expect("mount overlay: this test needs root");
    let seen = look(Path::new(target.to_str().unwrap()), &pod.join("upper"));
    umount2(target, MntFlags::MNT_DETACH).unwrap();
    std::env::set_current_dir("/").unwrap();
    fs::remove_dir_all(&scratch).unwrap();
    assert_eq!(seen.unwrap(), ("top:1,2".to_string(), true, true));
}

/// Returns which layer is on top, whether the lower one is visible, and whether writes go to the upper directory.
fn look(root: &Path, upper: &Path) -> std::io::Result<(String, bool, bool)> {
    let top = fs::read_to_string(root.join("who"))?;
    fs::write(root.join("written"), "")?;
    Ok((top, root.join("below\\it").exists(), upper.join("written").exists()))
}
