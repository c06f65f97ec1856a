//! Security modules of the kernel, as far as containers depend on them: AppArmor's profiles (CRI section 3.7), and whether
//! SELinux labels would be expected (section 3.8).

use std::fs;
use std::path::Path;

/// The profile for containers that ask for the runtime's default: used where the node has loaded one of this name.
pub const APPARMOR_DEFAULT: &str = "coracle-default";

/// Where a process sets the profile that its next exec brings into force (apparmor(7), Linux 5.1).
pub(crate) const APPARMOR_EXEC: &std::ffi::CStr = c"/proc/self/attr/apparmor/exec";

/// The kernel's AppArmor, where it is on.
#[derive(Clone, Copy, Debug)]
pub struct AppArmor<'a> {
    sys: &'a Path,
}

/// Looks for AppArmor.
pub fn apparmor() -> Option<AppArmor<'static>> {
    AppArmor::below(Path::new("/sys"))
}

/// Whether SELinux is on: its file system is mounted where it is (selinux(8)).
pub fn has_selinux() -> bool {
    Path::new("/sys/fs/selinux/enforce").exists()
}

impl<'a> AppArmor<'a> {
    fn below(sys: &'a Path) -> Option<Self> {
        let enabled = fs::read_to_string(sys.join("module/apparmor/parameters/enabled")).ok()?;
        enabled.starts_with('Y').then_some(Self { sys })
    }

    /// Whether a profile of this name is loaded, in whatever mode.
    pub fn is_loaded(&self, name: &str) -> bool {
        let profiles = fs::read_to_string(self.sys.join("kernel/security/apparmor/profiles"));
        // `NAME (MODE)`; a name may hold spaces.
        let names = |text: &str| {
            text.lines().any(|line| line.rsplit_once(" (").is_some_and(|(known, _)| known == name))
        };
        profiles.is_ok_and(|text| names(&text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_by_name() {
        let folder = std::env::temp_dir().join(format!("coracle-lsm-{}", std::process::id()));
        assert!(AppArmor::below(&folder).is_none());
        let write = |path: &str, text: &str| {
            let path = folder.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("module/apparmor/parameters/enabled", "N\n");
        assert!(AppArmor::below(&folder).is_none());
        write("module/apparmor/parameters/enabled", "Y\n");
        write("kernel/security/apparmor/profiles", "web server (enforce)\ncoracle-default (complain)\n");
        let apparmor = AppArmor::below(&folder).unwrap();
        let table = [("web server", true), ("web", false), (APPARMOR_DEFAULT, true), ("", false)];
        for (name, expected) in table {
            assert_eq!(apparmor.is_loaded(name), expected, "{name:?}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
