//! Timestamps as text, for container logs, which the monitor writes without a heap, and for the daemon's own log; and the
//! only conversions between days and dates.

/// Length in bytes of a timestamp such as `1970-01-01T00:00:00.000000000Z`.
pub const TIMESTAMP_BYTES: usize = 30;

/// Formats a time, given in nanoseconds since 1970-01-01T00:00:00Z, as RFC 3339 in UTC with nanoseconds.
pub fn timestamp(time_ns: i64) -> [u8; TIMESTAMP_BYTES] {
    let mut text = *b"0000-00-00T00:00:00.000000000Z";
    let seconds = time_ns.div_euclid(1_000_000_000);
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = date(days);
    let fields = [
        (0, 4, year),
        (5, 2, month),
        (8, 2, day),
        (11, 2, second / 3600),
        (14, 2, second / 60 % 60),
        (17, 2, second % 60),
        (20, 9, time_ns.rem_euclid(1_000_000_000)),
    ];
    for (at, width, mut value) in fields {
        for digit in text[at..at + width].iter_mut().rev() {
            *digit = b'0' + (value % 10).unsigned_abs() as u8;
            value /= 10;
        }
    }
    text
}

/// Converts days since 1970-01-01 to year, month and day of the Gregorian calendar. Internally years start in March, so
/// that the leap day is the last day of a year; 400 years have 146 097 days.
fn date(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468; // from 0000-03-01 to 1970-01-01
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

/// Converts a date of the Gregorian calendar to days since 1970-01-01; the inverse of the dates in [`timestamp`].
pub fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_dates_are_inverse() {
        for day in (-1_000_000..1_000_000).step_by(7) {
            let (year, month, day_of_month) = date(day);
            assert_eq!(days(year, month, day_of_month), day, "{year}-{month}-{day_of_month}");
        }
    }

    #[test]
    fn dates_agree_with_the_calendar() {
        let cases = [
            (-1, (1969, 12, 31)),
            (0, (1970, 1, 1)),
            (59, (1970, 3, 1)),
            (11_016, (2000, 2, 29)),
            (11_017, (2000, 3, 1)),
            (47_540, (2100, 2, 28)), // 2100 is no leap year
            (47_541, (2100, 3, 1)),
        ];
        for (days, expected) in cases {
            assert_eq!(date(days), expected, "{days}");
        }
    }

    #[test]
    fn timestamps_have_nanoseconds_before_and_after_1970() {
        let cases = [
            (0, "1970-01-01T00:00:00.000000000Z"),
            (-1, "1969-12-31T23:59:59.999999999Z"),
            (1_700_000_000_012_345_678, "2023-11-14T22:13:20.012345678Z"),
            (i64::MAX, "2262-04-11T23:47:16.854775807Z"),
            (i64::MIN, "1677-09-21T00:12:43.145224192Z"),
        ];
        for (time_ns, expected) in cases {
            assert_eq!(core::str::from_utf8(&timestamp(time_ns)), Ok(expected));
        }
    }
}
