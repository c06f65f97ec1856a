//! Determines which images are pinned. The result depends only on the images' names and the configuration
//! (PIN-5 in CRI 2.33).

/// The configured pins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pins {
    patterns: Vec<Pattern>,
}

/// One entry of `pinned_images`, with the semantics of CRI-O (PIN-6).
#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    /// Pattern without `*`, for example `registry.example/app:1`: matches the complete name.
    Exact(String),
    /// Pattern such as `registry.example/*`: matches names with this prefix.
    Prefix(String),
    /// Pattern such as `*app*`: matches names that contain this text.
    Keyword(String),
}

impl Pins {
    /// Parses patterns. The error names the invalid pattern: `*` is allowed at the end, or at both ends.
    pub(crate) fn parse<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Result<Pins, String> {
        let patterns = patterns.into_iter().map(Pattern::parse).collect::<Result<_, _>>()?;
        Ok(Pins { patterns })
    }

    /// Returns the pins with an additional exact name.
    pub(super) fn with(mut self, name: Option<&str>) -> Pins {
        self.patterns.extend(name.map(|name| Pattern::Exact(name.to_ascii_lowercase())));
        self
    }

    /// Whether an image with these names is pinned: one matching name is sufficient.
    pub(crate) fn is_pinned<'a>(&self, names: impl IntoIterator<Item = &'a String>) -> bool {
        names.into_iter().any(|name| {
            let name = name.to_ascii_lowercase();
            self.patterns.iter().any(|pattern| pattern.matches(&name))
        })
    }
}

impl Pattern {
    fn parse(text: &str) -> Result<Pattern, String> {
        let lower = text.to_ascii_lowercase();
        let (inner, make): (_, fn(String) -> Pattern) =
            match (lower.strip_prefix('*'), lower.strip_suffix('*')) {
                (Some(rest), Some(_)) if rest.len() > 1 => (&rest[..rest.len() - 1], Pattern::Keyword),
                (None, Some(prefix)) => (prefix, Pattern::Prefix),
                (None, None) => (lower.as_str(), Pattern::Exact),
                (Some(_), _) => {
                    return Err(format!(
                        "pattern {text:?}: a leading `*` must be followed by a word and `*`"
                    ));
                }
            };
        if inner.is_empty() || inner.contains('*') {
            return Err(format!("pattern {text:?}: `*` is allowed only at the end, or at both ends"));
        }
        Ok(make(inner.to_owned()))
    }

    /// Whether the pattern matches `name`, which is in lower case.
    fn matches(&self, name: &str) -> bool {
        match self {
            Self::Exact(exact) => name == exact,
            Self::Prefix(prefix) => name.starts_with(prefix.as_str()),
            Self::Keyword(word) => name.contains(word.as_str()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Pins;

    #[test]
    fn patterns_match_as_in_cri_o() {
        let name = "registry.example/team/app:1".to_owned();
        let cases = [
            ("registry.example/team/app:1", true),
            ("REGISTRY.example/team/app:1", true),
            ("registry.example/team/app", false),
            ("registry.example/*", true),
            ("other.example/*", false),
            ("*team*", true),
            ("*other*", false),
        ];
        for (pattern, expected) in cases {
            let pins = Pins::parse([pattern]).unwrap();
            assert_eq!(pins.is_pinned([&name]), expected, "{pattern}");
            assert!(!pins.is_pinned([]), "{pattern}");
        }
        assert!(!Pins::default().is_pinned([&name]));
    }

    #[test]
    fn malformed_patterns_are_errors_that_name_them() {
        for pattern in ["", "*", "**", "*a", "a*b", "a**", "*a*b*"] {
            assert!(Pins::parse([pattern]).unwrap_err().contains(&format!("{pattern:?}")), "{pattern}");
        }
    }
}
