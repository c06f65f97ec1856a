//! Filters of list calls by labels; the table of pods and containers finds IDs and their prefixes. Of all filters: all conditions in a filter must match; without a filter, or with an empty one, every object matches
//! (CRI 2.0).

use std::collections::HashMap;

use coracle_engine::spec::Pairs;

/// Whether an object with these labels has all pairs of the label selector.
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
