//! AppArmor: which profiles are loaded, and the default one, which no program is needed for (CRI 3.7).

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The profile of containers that ask for the runtime's default, or for nothing.
pub const APPARMOR_DEFAULT: &str = "coracle-default";

/// That profile as the kernel takes it: `sandbox/apparmor/coracle-default.profile`, compiled by `sandbox/apparmor/compile`.
const APPARMOR_DEFAULT_POLICY: &[u8] = include_bytes!("../../apparmor/coracle-default.bin");

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

    /// Loads [`APPARMOR_DEFAULT`], or replaces the profile of that name, also for processes that run under it.
    ///
    /// The kernel takes a policy in one write and unpacks 5 KB in well under a millisecond; nothing outside of the kernel takes
    /// part. Needs CAP_MAC_ADMIN in the host's policy namespace.
    ///
    /// # Errors
    /// What the kernel answers, with the path: `NotFound` where securityfs is not mounted, `PermissionDenied` for a daemon
    /// without the capability or in a policy namespace that may not be changed.
    pub fn load_default(&self) -> io::Result<()> {
        let path: PathBuf = self.sys.join("kernel/security/apparmor/.replace");
        let load = || fs::OpenOptions::new().write(true).open(&path)?.write(APPARMOR_DEFAULT_POLICY);
        match load() {
            Ok(length) if length == APPARMOR_DEFAULT_POLICY.len() => Ok(()),
            Ok(length) => Err(io::Error::other(format!("{}: took {length} bytes only", path.display()))),
            Err(error) => Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
        }
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

    #[test]
    fn the_default_profile_is_written_whole_or_the_error_names_the_file() {
        let folder = std::env::temp_dir().join(format!("coracle-lsm-load-{}", std::process::id()));
        let security = folder.join("kernel/security/apparmor");
        fs::create_dir_all(&security).unwrap();
        let apparmor = AppArmor { sys: &folder };
        let error = apparmor.load_default().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(error.to_string().contains("/apparmor/.replace: "), "{error}");
        fs::write(security.join(".replace"), "").unwrap();
        apparmor.load_default().unwrap();
        assert_eq!(fs::read(security.join(".replace")).unwrap(), APPARMOR_DEFAULT_POLICY);
        fs::remove_dir_all(&folder).unwrap();
    }

    /// The head that every kernel from 5.10 on reads (security/apparmor/policy_unpack.c, `verify_header`): a version that it
    /// knows, enforce mode, our profile's name and no namespace.
    #[test]
    fn the_compiled_profile_is_of_a_version_that_old_kernels_know() {
        let name =
            [b"\x04\x08\0profile\0\x07\x05\x10\0".as_slice(), APPARMOR_DEFAULT.as_bytes(), b"\0"].concat();
        let head = b"\x04\x08\0version\0\x02";
        let rest = APPARMOR_DEFAULT_POLICY.strip_prefix(head).unwrap();
        let (version, rest) = rest.split_at(4);
        let version = u32::from_le_bytes(version.try_into().unwrap());
        assert!((5..=7).contains(&(version & 0x3ff)), "{version:#x}");
        assert!(rest.starts_with(&name));
    }
}
