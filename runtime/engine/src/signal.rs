//! Conversion of signals: the CRI's enum (whose numbers are not the kernel's) and the image config's
//! `StopSignal` (with or without `SIG`, a number, `RTMIN+n`, `RTMAX-n`). The kernel's numbers are equal on
//! x86_64, arm64, arm and riscv64.

/// Number of SIGTERM, the default stop signal.
pub const SIGTERM: i32 = 15;

/// First real-time signal for programs; libc reserves the two below.
const SIGRTMIN: i32 = 34;
const SIGRTMAX: i32 = 64;

/// Names and kernel numbers of the signals, in the order of the CRI's enum `Signal`, 1 to 34.
const NAMES: [(&str, i32); 34] = [
    ("ABRT", 6),
    ("ALRM", 14),
    ("BUS", 7),
    ("CHLD", 17),
    ("CLD", 17),
    ("CONT", 18),
    ("FPE", 8),
    ("HUP", 1),
    ("ILL", 4),
    ("INT", 2),
    ("IO", 29),
    ("IOT", 6),
    ("KILL", 9),
    ("PIPE", 13),
    ("POLL", 29),
    ("PROF", 27),
    ("PWR", 30),
    ("QUIT", 3),
    ("SEGV", 11),
    ("STKFLT", 16),
    ("STOP", 19),
    ("SYS", 31),
    ("TERM", 15),
    ("TRAP", 5),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("USR1", 10),
    ("USR2", 12),
    ("VTALRM", 26),
    ("WINCH", 28),
    ("XCPU", 24),
    ("XFSZ", 25),
];

/// The CRI's number of SIGRTMIN. RTMINPLUSn and RTMAXMINUSn follow in ascending order, then SIGRTMAX.
const CRI_RTMIN: i32 = 35;
const CRI_RTMAX: i32 = 65;

/// Converts a CRI signal number to the kernel's; `None` for 0 (runtime default) and invalid numbers.
pub(crate) fn of_cri(number: i32) -> Option<i32> {
    match number {
        1..CRI_RTMIN => NAMES.get(usize::try_from(number - 1).ok()?).map(|(_, signal)| *signal),
        CRI_RTMIN..=CRI_RTMAX => Some(SIGRTMIN + number - CRI_RTMIN),
        _ => None,
    }
}

/// Converts a kernel signal number to the CRI's: if a signal has two names, the first one of the enum; 0 if
/// the CRI has none.
pub fn to_cri(signal: i32) -> i32 {
    if (SIGRTMIN..=SIGRTMAX).contains(&signal) {
        return CRI_RTMIN + signal - SIGRTMIN;
    }
    let index = NAMES.iter().position(|(_, number)| *number == signal);
    index.and_then(|index| i32::try_from(index + 1).ok()).unwrap_or(0)
}

/// Parses an image's `StopSignal` to the kernel's number; `None` if it is not a signal.
pub fn parse(text: &str) -> Option<i32> {
    if let Ok(number) = text.parse::<i32>() {
        return (1..=SIGRTMAX).contains(&number).then_some(number);
    }
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    if let Some((_, signal)) = NAMES.iter().find(|(known, _)| *known == name) {
        return Some(*signal);
    }
    let offset = |rest: &str, sign: char| match rest {
        "" => Some(0),
        rest => rest.strip_prefix(sign)?.parse::<i32>().ok().filter(|offset| (0..=30).contains(offset)),
    };
    if let Some(rest) = name.strip_prefix("RTMIN") {
        return offset(rest, '+').map(|offset| SIGRTMIN + offset);
    }
    name.strip_prefix("RTMAX").and_then(|rest| offset(rest, '-')).map(|offset| SIGRTMAX - offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cri_signal_has_a_number_and_comes_back_as_the_same_signal() {
        for number in 1..=CRI_RTMAX {
            let signal = of_cri(number).unwrap();
            assert_eq!(of_cri(to_cri(signal)), Some(signal), "{number}");
        }
        assert_eq!([of_cri(0), of_cri(66), of_cri(-1)], [None; 3]);
        assert_eq!((of_cri(23), of_cri(35), of_cri(65), to_cri(15)), (Some(15), Some(34), Some(64), 23));
    }

    #[test]
    fn names_of_image_configs_are_read_in_every_form() {
        for (text, expected) in [
            ("SIGTERM", Some(15)),
            ("term", Some(15)),
            ("9", Some(9)),
            ("SIGRTMIN+3", Some(37)),
            ("RTMAX-1", Some(63)),
            ("RTMIN", Some(34)),
            ("0", None),
            ("65", None),
            ("RTMIN+31", None),
            ("RTMIN-1", None),
            ("SIGNOPE", None),
            ("", None),
        ] {
            assert_eq!(parse(text), expected, "{text:?}");
        }
    }
}
