//! Suggestions ("did you mean"): finds the valid word with the smallest edit distance.

/// Maximum length in bytes of a compared word: the algorithm is quadratic, and longer words are not typing
/// errors.
const WORD_BYTES_MAX: usize = 64;

/// The candidate with the smallest edit distance to `word`, if the distance is at most a third of the word's length, or the
/// candidate whose last part is `word`; otherwise `None`.
pub(crate) fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str> + Clone) -> Option<&'a str> {
    if word.len() > WORD_BYTES_MAX {
        return None;
    }
    let close = candidates.clone().map(|candidate| (edits(word, candidate), candidate)).min();
    match close {
        Some((distance, candidate)) if distance <= (word.len() / 3).max(1) => Some(candidate),
        // A correct name in the wrong section: `port` for `streaming.port`.
        _ => {
            let tail = word.rsplit('.').next()?;
            candidates.into_iter().find(|candidate| candidate.rsplit('.').next() == Some(tail))
        }
    }
}

/// The edit distance of two words in bytes (Levenshtein), computed row by row.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::{edits, nearest};

    #[test]
    fn edits_are_counted() {
        for (a, b, expected) in [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("root", "rot", 1)] {
            assert_eq!((edits(a, b), edits(b, a)), (expected, expected), "{a} {b}");
        }
    }

    #[test]
    fn near_words_and_lost_sections() {
        let known = ["root", "state", "streaming.port", "cni.bin_dirs"];
        let cases = [
            ("rooot", Some("root")),
            ("cni.bin_dir", Some("cni.bin_dirs")),
            ("port", Some("streaming.port")),
            ("zzzzzz", None),
        ];
        for (word, expected) in cases {
            assert_eq!(nearest(word, known.into_iter()), expected, "{word}");
        }
        assert_eq!(nearest(&"x".repeat(1000), known.into_iter()), None);
    }
}
