//! Removes values that could be secret from the daemon's configuration. The module does no I/O.

/// Parts of the names of keys whose values are hidden.
const SECRET: [&str; 6] = ["password", "secret", "token", "auth", "credential", "private"];

/// Text in place of a secret value.
const HIDDEN: &str = "(hidden)";

/// Returns the text with hidden values of suspicious keys, and without user names and passwords in URLs. If a
/// value may continue on the next lines, the lines up to the next key or table are hidden.
pub(super) fn secrets(text: &str) -> String {
    let mut shown = String::new();
    let mut hides = false;
    let mut until: Option<&str> = None;
    for line in text.lines() {
        // Within a text of several lines nothing is a key.
        if let Some(end) = until {
            until = until.filter(|_| !line.contains(end));
            if !hides {
                shown.push_str(&without_user(line));
                shown.push('\n');
            }
            continue;
        }
        until = ["\"\"\"", "'''"].into_iter().find(|quotes| line.matches(quotes).count() == 1);
        let trimmed = line.trim_start();
        let key = trimmed.split_once('=').map(|(key, _)| key.trim().to_lowercase());
        let begins = trimmed.starts_with('[') || key.as_ref().is_some_and(|key| is_key(key));
        if begins {
            hides = key.as_ref().is_some_and(|key| SECRET.iter().any(|word| key.contains(word)));
            if hides {
                shown.push_str(line.split_once('=').map_or("", |(key, _)| key));
                shown.push_str(&format!("= \"{HIDDEN}\"\n"));
                continue;
            }
        }
        if !hides {
            shown.push_str(&without_user(line));
            shown.push('\n');
        }
    }
    shown
}

/// Whether this is a key of TOML and not a part of a value.
fn is_key(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|letter| letter.is_alphanumeric() || "._-\"' ".contains(letter))
}

/// Hides the user in URLs: `https://me:word@host` → `https://(hidden)@host`.
fn without_user(line: &str) -> String {
    let mut shown = String::new();
    let mut rest = line;
    while let Some((before, behind)) = rest.split_once("://") {
        shown.push_str(before);
        shown.push_str("://");
        let end = behind.find(['/', '"', '\'', ' ', ',']).unwrap_or(behind.len());
        rest = behind;
        if let Some(at) = behind[..end].rfind('@') {
            shown.push_str(HIDDEN);
            rest = &behind[at..];
        }
    }
    shown + rest
}

#[cfg(test)]
mod tests {
    use super::secrets;

    #[test]
    fn no_secret_is_shown() {
        let text = "root = \"/r\"\n[nri]\npassword = \"one\"\nproxy = \"http://me:two@proxy:3128/x\", \"https://three@b\"\n\
                    auth_token = [\n  \"four\",\n  \"five\"\n]\nlevel = \"x\"\n\"api.secret\" = '''\nsix = 1\n'''\nlast = 1\n";
        let shown = secrets(text);
        for word in ["one", "two", "three", "four", "five", "six", "me:"] {
            assert!(!shown.contains(word), "{word}: {shown}");
        }
        for word in [
            "root = \"/r\"",
            "[nri]",
            "level = \"x\"",
            "http://(hidden)@proxy:3128/x",
            "https://(hidden)@b",
            "last = 1",
        ] {
            assert!(shown.contains(word), "{word}: {shown}");
        }
    }
}
