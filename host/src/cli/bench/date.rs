//! Dates as reports write them.

use std::time::{SystemTime, UNIX_EPOCH};

/// The present second, UTC.
pub(super) fn now() -> String {
    // A clock before 1970 is not set; the report then says 1970.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    utc(since.as_secs())
}

/// `seconds` since 1970 in the Gregorian calendar, as 2026-01-31T12:00:00Z.
fn utc(seconds: u64) -> String {
    let (mut days, rest) = (seconds / 86_400, seconds % 86_400);
    let leap = |year: u64| (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let months = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= months[month] {
        days -= months[month];
        month += 1;
    }
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year}-{:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn seconds_become_dates() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_827_696, "2000-02-29T12:34:56Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), date);
        }
    }
}
