//! The first line of files that coracle writes into directories of others: it names the command that wrote the file and has a sum
//! of the other lines, so that a file that was changed since is recognized without a record. The sum detects changes by people and
//! programs; it is no protection against attackers, who can write such a line, too.

/// The origin of an existing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The file is exactly as the program's `enable` wrote it.
    Own,
    /// The program's `enable` wrote the file, and it was changed since.
    Changed,
    /// Another program or a user wrote the file.
    Foreign,
}

fn start(program: &str) -> String {
    format!(
        "# Written by `coracle {program} enable`; `coracle {program} disable` removes it unless it was changed. Sum: "
    )
}

/// FNV-1a with 64 bits: small, and the same in each release.
fn sum(text: &str) -> u64 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    text.bytes().fold(OFFSET, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(PRIME))
}

/// Puts the first line before the text of a file.
pub(crate) fn sealed(program: &str, text: &str) -> String {
    format!("{}{:016x}\n{text}", start(program), sum(text))
}

/// Finds out who wrote a file with this text.
pub(crate) fn origin(program: &str, text: &str) -> Origin {
    let Some(rest) = text.strip_prefix(&start(program)) else { return Origin::Foreign };
    match rest.split_once('\n') {
        Some((written, body)) if written == format!("{:016x}", sum(body)) => Origin::Own,
        _ => Origin::Changed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_of_an_own_file_is_recognized() {
        let text = sealed("k3s", "a: 1\nb: 2\n");
        assert_eq!(origin("k3s", &text), Origin::Own);
        assert_eq!(origin("kubeadm", &text), Origin::Foreign);
        assert_eq!(origin("k3s", "a: 1\n"), Origin::Foreign);
        assert_eq!(origin("k3s", ""), Origin::Foreign);
        let first = text.find("Sum: ").unwrap() + 5;
        for at in first..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            assert_eq!(origin("k3s", &String::from_utf8(bytes).unwrap()), Origin::Changed, "byte {at}");
        }
        for end in first..text.len() {
            assert_eq!(origin("k3s", &text[..end]), Origin::Changed, "cut at {end}");
        }
        assert_eq!(origin("k3s", &(text + "c: 3\n")), Origin::Changed);
    }
}
