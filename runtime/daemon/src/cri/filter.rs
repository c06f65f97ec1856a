//! Filters of list calls: everything given must match; no filter, or an empty one, is everything (CRI 2.0).

use std::collections::HashMap;

use coracle_engine::spec::Pairs;

/// An id filter: a prefix, since crictl users type 13 digits. Empty matches all.
pub(crate) fn matches_id(id: &impl std::fmt::Display, filter: &str) -> bool {
    filter.is_empty() || id.to_string().starts_with(filter)
}

/// A label selector: every pair must be there.
pub(crate) fn matches_labels(labels: &Pairs, selector: &HashMap<String, String>) -> bool {
    selector.iter().all(|(name, value)| labels.iter().any(|(known, has)| known == name && has == value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pairs_of_a_selector_must_match() {
        let labels: Pairs = vec![("a".into(), "1".into()), ("b".into(), "2".into())];
        let selector = |pairs: &[(&str, &str)]| {
            pairs
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect::<HashMap<_, _>>()
        };
        for (pairs, expected) in [
            (&[][..], true),
            (&[("a", "1")], true),
            (&[("a", "1"), ("b", "2")], true),
            (&[("a", "1"), ("b", "3")], false),
            (&[("c", "1")], false),
        ] {
            assert_eq!(matches_labels(&labels, &selector(pairs)), expected, "{pairs:?}");
        }
    }
}
