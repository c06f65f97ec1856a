//! Tests named network namespaces with the real kernel. They need root and fail without it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use coracle_sandbox::netns;

#[test]
fn a_namespace_is_pinned_found_and_released_as_root() {
    let directory = std::env::temp_dir().join(format!("coracle-netns-{}", std::process::id()));
    let path = directory.join("run/netns/pod");
    assert!(!netns::exists(&path));
    netns::unpin(&path).expect("letting go of nothing is success");

    netns::pin(std::process::id(), &path).expect("pin: this test needs root");
    assert!(netns::exists(&path));
    let inode = |path: &Path| fs::metadata(path).unwrap().ino();
    assert_eq!(inode(&path), inode(Path::new("/proc/self/ns/net")));
    netns::pin(std::process::id(), &path).expect("pinning again ends in the same state");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert_eq!(mounts.lines().filter(|line| line.contains(path.to_str().unwrap())).count(), 1);

    netns::unpin(&path).unwrap();
    assert!(!path.exists() && !netns::exists(&path));
    // A file without a mount is left after a reboot.
    fs::write(&path, "").unwrap();
    assert!(!netns::exists(&path));
    netns::unpin(&path).unwrap();
    assert!(!path.exists());

    let error = netns::pin(u32::MAX, &path).unwrap_err().to_string();
    assert!(error.contains("/proc/4294967295/ns/net on "), "{error}");
    netns::unpin(&path).unwrap();
    fs::remove_dir_all(&directory).unwrap();
}
