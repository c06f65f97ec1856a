//! Which images are pinned: a function of names and configuration, never of history (PIN-5 in CRI 2.33).

/// What the configuration pins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pins {
    patterns: Vec<Pattern>,
}

/// One entry of `pinned_images`, as CRI-O reads it (PIN-6).
#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    /// `registry.example/app:1`: the whole name.
    Exact(String),
    /// `registry.example/*`: names that begin so.
    Prefix(String),
    /// `*app*`: names that contain it.
    Keyword(String),
}

impl Pins {
    /// From patterns. An error names the pattern: a `*` may only end it, or stand at both ends.
    pub(crate) fn parse<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Result<Pins, String> {
        let patterns = patterns.into_iter().map(Pattern::parse).collect::<Result<_, _>>()?;
        Ok(Pins { patterns })
    }

    /// And this name, exactly.
    pub(super) fn with(mut self, name: Option<&str>) -> Pins {
        self.patterns.extend(name.map(|name| Pattern::Exact(name.to_ascii_lowercase())));
        self
    }

    /// Whether an image with these names is pinned: one name that matches pins the whole image.
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
                    return Err(format!("pattern {text:?}: `*` in front needs a word and `*` behind it"));
                }
            };
        if inner.is_empty() || inner.contains('*') {
            return Err(format!("pattern {text:?}: `*` only at the end, or at both ends of a word"));
        }
        Ok(make(inner.to_owned()))
    }

    /// `name` is in lower case.
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
