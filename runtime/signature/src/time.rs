//! Times of certificates and signatures, in seconds since 1970, and the time of the node. A board without a clock begins in 1970: no
//! certificate can be judged then, unless the node's configuration has a minimum time.

/// A clock before this time (2024-01-01) was never set.
const SET_SINCE: u64 = 1_704_067_200;

/// The time by which certificates and signatures are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock(Option<u64>);

impl Clock {
    /// The later one of the node's time and a minimum, both in seconds since 1970; the minimum may be absent.
    pub fn new(node: u64, minimum: Option<u64>) -> Self {
        let time = minimum.map_or(node, |minimum| minimum.max(node));
        Self(Some(time).filter(|time| *time >= SET_SINCE))
    }

    /// The time by which certificates and expiries are judged.
    ///
    /// # Errors
    /// The clock was never set, and there is no minimum.
    pub(crate) fn now(self) -> Result<u64, String> {
        self.0.ok_or_else(|| {
            "the clock of this node is not set, so no certificate can be verified: set it, or image.policy.minimum_time"
                .to_owned()
        })
    }
}

/// Parses a time of RFC 3339, such as `2026-01-31T12:00:00Z`; returns seconds since 1970. Fractions of seconds are ignored.
///
/// # Errors
/// The text is not such a time, or is before 1970.
pub fn parse_time(text: &str) -> Result<u64, String> {
    time(text).ok_or_else(|| format!("{text:?} is not a time such as 2026-01-31T12:00:00Z"))
}

fn time(text: &str) -> Option<u64> {
    let (date, rest) = text.split_at_checked(10)?;
    let rest = rest.strip_prefix(['T', 't', ' '])?;
    let (clock, rest) = rest.split_at_checked(8)?;
    let zone = rest.trim_start_matches(|letter: char| letter == '.' || letter.is_ascii_digit());
    let is_plain = zone.len() == rest.len() || rest.starts_with('.');
    let offset = match zone {
        "Z" | "z" => 0,
        _ => {
            let (sign, zone) = zone.split_at_checked(1)?;
            let (hours, minutes) = zone.split_once(':')?;
            let minutes = i64::from(number(hours, 23)?) * 60 + i64::from(number(minutes, 59)?);
            if sign == "-" { -minutes } else { Some(minutes).filter(|_| sign == "+")? }
        }
    };
    let date: Vec<&str> = date.split('-').collect();
    let clock: Vec<&str> = clock.split(':').collect();
    let ([year, month, day], [hour, minute, second]) = (&date[..], &clock[..]) else { return None };
    let year = year.parse().ok().filter(|_| year.bytes().all(|byte| byte.is_ascii_digit()) && is_plain)?;
    let local = seconds(
        year,
        [number(month, 12)?, number(day, 31)?, number(hour, 23)?, number(minute, 59)?, number(second, 60)?],
    )?;
    u64::try_from(local - offset * 60).ok()
}

/// A number of two digits.
fn number(text: &str, max: u8) -> Option<u8> {
    let is_number = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| is_number && *number <= max)
}

/// Seconds since 1970 of a year, and month, day, hour, minute, second in UTC (Howard Hinnant's `days_from_civil`).
fn seconds(year: i64, [month, day, hour, minute, second]: [u8; 5]) -> Option<i64> {
    if month == 0 || day == 0 {
        return None;
    }
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let month_from_march = (i64::from(month) + 9) % 12;
    let day_of_year = (153 * month_from_march + 2) / 5 + i64::from(day) - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    let days = era * 146_097 + day_of_era - 719_468;
    Some(days * 86_400 + i64::from(hour) * 3600 + i64::from(minute) * 60 + i64::from(second))
}

/// The date of a time, as text for users: `2026-01-31`.
pub(crate) fn date(time: u64) -> String {
    let days = i64::try_from(time / 86_400).unwrap_or(0) + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_written() {
        for (text, expected) in [
            ("1970-01-01T00:00:00Z", Some(0)),
            ("2024-01-01T00:00:00Z", Some(SET_SINCE)),
            ("2024-02-29T12:34:56.789Z", Some(1_709_210_096)),
            ("2024-02-29T13:34:56+01:00", Some(1_709_210_096)),
            ("2024-02-29T07:34:56-05:00", Some(1_709_210_096)),
            ("1969-12-31T23:59:59Z", None),
            ("2024-13-01T00:00:00Z", None),
            ("2024-00-01T00:00:00Z", None),
            ("2024-01-01", None),
            ("2024-01-01T00:00:00", None),
            ("2024-01-01T00:00:007Z", None),
            ("2024-01-01T00:00:00*01:00", None),
            ("ä024-01-01T00:00:00Z", None),
        ] {
            assert_eq!(time(text), expected, "{text}");
        }
        assert_eq!(date(1_709_210_096), "2024-02-29");
        assert_eq!(date(0), "1970-01-01");
    }

    #[test]
    fn a_clock_that_was_never_set_is_not_believed() {
        assert!(Clock::new(100, None).now().unwrap_err().contains("minimum_time"));
        assert_eq!(Clock::new(100, Some(SET_SINCE)).now(), Ok(SET_SINCE));
        assert_eq!(Clock::new(SET_SINCE + 5, Some(SET_SINCE)).now(), Ok(SET_SINCE + 5));
    }
}
