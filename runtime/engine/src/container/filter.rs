//! Compiles seccomp profiles, and logs rules that have no effect.

use coracle_base::error::Error;
use coracle_base::log;
use coracle_sandbox::{plan, seccomp};

/// Maximum number of names in one log line.
const NAMES_MAX: usize = 16;

/// Compiles `profile`, which the log calls `name`. Unknown names of system calls are not an error, as in runc
/// and libseccomp, because a profile may be newer than the runtime; but they are logged, because a denied
/// call would otherwise be allowed unnoticed.
///
/// # Errors
/// `InvalidArgument` if the program is longer than the kernel permits.
pub fn compile_filter(name: &str, profile: &seccomp::Profile) -> Result<plan::Seccomp, Error> {
    if let Some(calls) = unknown(profile) {
        log::warn!("seccomp profile has rules about unknown system calls, ignored"; profile = name, calls = calls);
    }
    Ok(seccomp::compile(profile)?)
}

/// The text for the log with the unknown system calls of a profile; `None` if there are none.
fn unknown(profile: &seccomp::Profile) -> Option<String> {
    let names: Vec<&str> = profile.unknown_names().collect();
    let listed = names.iter().take(NAMES_MAX).copied().collect::<Vec<_>>().join(",");
    match names.len().saturating_sub(NAMES_MAX) {
        _ if names.is_empty() => None,
        0 => Some(listed),
        more => Some(format!("{listed} and {more} more")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_are_listed_up_to_a_bound() {
        let parse = |names: &[String]| {
            let calls = serde_json::json!([{"names": names, "action": "SCMP_ACT_ERRNO"}]);
            let profile = serde_json::json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": calls});
            seccomp::parse(profile.to_string().as_bytes(), 0, "6.1").unwrap()
        };
        assert_eq!(unknown(&parse(&["read".to_owned(), "set_tls".to_owned()])), None);
        assert_eq!(unknown(&parse(&["read".to_owned(), "reed".to_owned()])).as_deref(), Some("reed"));
        let many: Vec<String> = (0..20).map(|number| format!("call{number}")).collect();
        assert!(unknown(&parse(&many)).unwrap().ends_with("call15 and 4 more"));
    }
}
