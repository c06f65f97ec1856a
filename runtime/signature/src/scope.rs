//! Which requirements apply to an image, and what has to be requested to judge them. The order is that of containers-policy.json(5):
//! the name with its tag or digest, its repository, the namespaces above it, its registry, `*.` and a domain of the registry, all of the
//! transport, the default.

use coracle_reference::Name;

use super::policy::{Policy, Requirement};

/// The rule that applies to an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule<'a> {
    /// The scope of the rule in the transport `docker`; `None`: the default of the policy.
    scope: Option<&'a str>,
    pub(crate) requirements: &'a [Requirement],
}

/// The requests that a judgement needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Signatures below the tag `sha256-….sig` of the platform's manifest.
    pub tag_of_member: bool,
    /// Signatures below the tag `sha256-….sig` of the named document.
    pub tag_of_top: bool,
    /// Referrers of the named document that are sigstore bundles.
    pub bundles: bool,
    /// Referrers of the same that are envelopes of notation.
    pub envelopes: bool,
}

impl Needs {
    /// The union of two sets of requests.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            tag_of_member: self.tag_of_member || other.tag_of_member,
            tag_of_top: self.tag_of_top || other.tag_of_top,
            bundles: self.bundles || other.bundles,
            envelopes: self.envelopes || other.envelopes,
        }
    }

    /// The requests in the order of their cost: tags, and then referrers, of which there may be many.
    pub fn steps(self) -> [Self; 2] {
        let tags = Self { bundles: false, envelopes: false, ..self };
        [tags, Self { tag_of_member: false, tag_of_top: false, ..self }]
    }

    /// Whether anything has to be requested.
    pub fn is_something(self) -> bool {
        self != Self::default()
    }
}

impl Policy {
    /// The rule that applies to an image; without a name it is the default.
    pub fn rule(&self, name: Option<&Name>) -> Rule<'_> {
        let found = name
            .map_or_else(Vec::new, scopes)
            .into_iter()
            .find_map(|wanted| self.scopes.iter().find(|(scope, _)| *scope == wanted));
        match found {
            Some((scope, requirements)) => Rule { scope: Some(scope), requirements },
            None => Rule { scope: None, requirements: &self.default },
        }
    }
}

impl Rule<'_> {
    /// Whether every image is accepted, so that nothing has to be requested or kept.
    pub fn accepts_anything(&self) -> bool {
        self.requirements.iter().all(|requirement| *requirement == Requirement::AcceptAnything)
    }

    /// The requests that are needed to judge an image. None, if the image is refused in any case.
    pub fn needs(&self) -> Needs {
        let mut needs = Needs::default();
        for requirement in self.requirements {
            match requirement {
                Requirement::AcceptAnything => {}
                Requirement::Reject | Requirement::Unsupported(..) => return Needs::default(),
                Requirement::Sigstore(_) => needs.tag_of_member = true,
                Requirement::Cosign(rule) => {
                    needs.tag_of_top = true;
                    needs.bundles |= rule.accepts_bundles();
                }
                Requirement::Notation(_) => needs.envelopes = true,
            }
        }
        needs
    }

    /// The requirements as text for users, one each: type, keys, and accepted names.
    pub fn explain(&self) -> Vec<String> {
        self.requirements.iter().map(Requirement::explain).collect()
    }
}

impl std::fmt::Display for Rule<'_> {
    /// The place of the rule in the policy.
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.scope {
            Some(scope) => write!(out, "transports.docker[{scope:?}]"),
            None => out.write_str("default"),
        }
    }
}

impl Requirement {
    /// The type in the policy.
    pub(crate) fn kind(&self) -> &str {
        match self {
            Self::AcceptAnything => "insecureAcceptAnything",
            Self::Reject => "reject",
            Self::Unsupported(kind, _) => kind,
            Self::Sigstore(_) => "sigstoreSigned",
            Self::Cosign(_) => "cosign",
            Self::Notation(_) => "notation",
        }
    }

    fn explain(&self) -> String {
        let names = |names: Vec<&str>| names.join(", ");
        match self {
            Self::AcceptAnything | Self::Reject => self.kind().to_owned(),
            Self::Unsupported(kind, why) => format!("{kind}: refused: {why}"),
            Self::Sigstore(rule) | Self::Cosign(rule) => {
                let keys = names(rule.keys.iter().map(|key| key.name.as_str()).collect());
                let logs = names(rule.logs.iter().map(|key| key.name.as_str()).collect());
                let log = if logs.is_empty() { String::new() } else { format!(", in a log of {logs}") };
                let bundles = match (self, rule.accepts_bundles()) {
                    (Self::Cosign(_), true) => " (not of bundles)",
                    (Self::Cosign(_), false) => ", no bundles",
                    _ => "",
                };
                let identity = &rule.identity;
                format!("{}: a signature of {keys}{log}, signedIdentity {identity:?}{bundles}", self.kind())
            }
            Self::Notation(roots) => {
                format!(
                    "notation: a signature of a certificate below {}",
                    names(roots.iter().map(|root| root.name.as_str()).collect())
                )
            }
        }
    }
}

/// The scopes that apply to an image, the first one first; the last one is that of all images.
fn scopes(name: &Name) -> Vec<String> {
    let mut scopes = Vec::new();
    if !name.is_bare() {
        scopes.push(name.to_string());
    }
    let repository = name.repository();
    let mut rest = repository.as_str();
    loop {
        scopes.push(rest.to_owned());
        match rest.rsplit_once('/') {
            Some((parent, _)) => rest = parent,
            None => break,
        }
    }
    let mut host = rest.split(':').next().unwrap_or_default();
    while let Some((_, domain)) = host.split_once('.') {
        scopes.push(format!("*.{domain}"));
        host = domain;
    }
    scopes.push(String::new());
    scopes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::parse;

    fn no_file(_: &str) -> Result<Vec<u8>, String> {
        Err("no such file".to_owned())
    }

    #[test]
    fn the_most_specific_scope_applies() {
        let reject = r#"[{"type":"reject"}]"#;
        let text = |scopes: &[&str]| {
            let scopes: Vec<String> = scopes.iter().map(|scope| format!("{scope:?}:{reject}")).collect();
            format!(r#"{{"default":{reject},"transports":{{"docker":{{{}}}}}}}"#, scopes.join(","))
        };
        let all = [
            "reg.a.io:5000/x/y:1",
            "reg.a.io:5000/x/y",
            "reg.a.io:5000/x",
            "reg.a.io:5000",
            "*.a.io",
            "*.io",
            "",
        ];
        let name = Name::parse("reg.a.io:5000/x/y:1").unwrap();
        for first in 0..=all.len() {
            let policy = parse(&text(&all[first..]), &no_file).unwrap();
            let expected =
                all.get(first).map_or("default".to_owned(), |scope| format!("transports.docker[{scope:?}]"));
            assert_eq!(policy.rule(Some(&name)).to_string(), expected);
            assert_eq!(policy.rule(None).to_string(), "default", "an image without a name");
        }
        for other in [
            "reg.a.io:5000/x/y:2",
            "a.io:5000/x/y",
            "reg.a.io/x/y:1",
            "*.reg.a.io",
            "x/y",
            "reg.a.io:5000/x/",
        ] {
            let policy = parse(&text(&[other]), &no_file).unwrap();
            assert_eq!(policy.rule(Some(&name)).to_string(), "default", "{other}");
        }
    }

    #[test]
    fn no_request_is_needed_where_the_verdict_is_certain() {
        let rule = |list: &str| {
            let policy = parse(&format!(r#"{{"default":{list}}}"#), &no_file).unwrap();
            let rule = policy.rule(Some(&Name::parse("a").unwrap()));
            (rule.needs().is_something(), rule.accepts_anything())
        };
        assert_eq!(rule(r#"[{"type":"insecureAcceptAnything"}]"#), (false, true));
        assert_eq!(rule(r#"[{"type":"insecureAcceptAnything"},{"type":"reject"}]"#), (false, false));
        assert_eq!(rule(r#"[{"type":"signedBy","keyType":"GPGKeys","keyPath":"/a"}]"#), (false, false));
    }
}
