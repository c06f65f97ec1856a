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

/// The edit distance of two words in bytes, computed row by row. Two neighbours that are exchanged count as one edit.
fn edits(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let (mut before, mut last): (Vec<usize>, Vec<usize>) = (Vec::new(), (0..=b.len()).collect());
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let replaced = last[j] + usize::from(x != y);
            let mut edits = replaced.min(row[j] + 1).min(last[j + 1] + 1);
            if i > 0 && j > 0 && *x == b[j - 1] && a[i - 1] == *y {
                edits = edits.min(before[j - 1] + 1);
            }
            row.push(edits);
        }
        (before, last) = (last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::{edits, nearest};

    #[test]
    fn the_edit_distance_of_two_words_is_counted() {
        for (a, b, expected) in
            [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("root", "rot", 1), ("sevre", "serve", 1)]
        {
            assert_eq!((edits(a, b), edits(b, a)), (expected, expected), "{a} {b}");
        }
    }

    #[test]
    fn a_similar_key_or_the_missing_section_is_suggested() {
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
