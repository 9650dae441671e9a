//! Times and sizes as people write them: `5m`, `1h 30m`, `7d`; `4MiB`. The one place that reads them.

use std::time::Duration;

/// The longest time that may be named.
const LONGEST: Duration = Duration::from_secs(3_650 * 86_400);

/// What each unit of time is worth, in milliseconds.
const TIMES: [(&str, u64); 6] =
    [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000), ("w", 7 * 86_400_000)];

/// What each unit of size is worth.
const SIZES: [(&str, u64); 7] = [
    ("b", 1),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
];

/// How to write a time; the remedy of everything that is not one.
pub(crate) const TIME_HELP: &str = "write it like 30s, 5m, 24h, 7d or '1h 30m'";

/// A time: numbers with units, or a bare number of seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("'{text}' is not a time; {TIME_HELP}");
    let text = text.trim();
    if let Ok(seconds) = text.parse::<f64>() {
        let time = Duration::try_from_secs_f64(seconds).map_err(|_| bad())?;
        return if time > LONGEST { Err(too_long(text)) } else { Ok(time) };
    }
    let (mut rest, mut total) = (text, Duration::ZERO);
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
        let number: f64 = rest[..digits].parse().map_err(|_| bad())?;
        rest = rest[digits..].trim_start();
        let letters = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let (_, millis) = TIMES.iter().find(|(unit, _)| *unit == &rest[..letters]).ok_or_else(bad)?;
        rest = rest[letters..].trim_start();
        let part = Duration::try_from_secs_f64(number * *millis as f64 / 1_000.0).map_err(|_| too_long(text))?;
        total = total.checked_add(part).filter(|total| *total <= LONGEST).ok_or_else(|| too_long(text))?;
    }
    Ok(total)
}

fn too_long(text: &str) -> String {
    format!("'{text}' is more than ten years")
}

/// A time as the server reads it and people do too: `90s` is `1m 30s`. Exact to the millisecond.
pub(crate) fn show(time: Duration) -> String {
    let mut millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let mut parts = Vec::new();
    for (unit, worth) in [("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)] {
        let count = millis / worth;
        millis %= worth;
        if count > 0 {
            parts.push(format!("{count}{unit}"));
        }
    }
    if parts.is_empty() { "0s".to_owned() } else { parts.join(" ") }
}

/// A time in at most two units, for a place where little fits: `3d 4h`, `12s`, `0.4s`.
pub(crate) fn brief(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0 => format!("{:.1}s", time.as_secs_f64()),
        1..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m {}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h {}m", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{}d {}h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

/// A size: a number with a unit, or a bare number of bytes.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let bad = || format!("'{text}' is not a size; write it like 512KB, 4MiB or a number of bytes");
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().map_err(|_| bad())?;
    let unit = text[digits..].trim().to_ascii_lowercase();
    if unit.is_empty() {
        return Ok(number);
    }
    let (_, worth) = SIZES.iter().find(|(name, _)| *name == unit).ok_or_else(bad)?;
    number.checked_mul(*worth).ok_or_else(bad)
}

/// A size as people read it.
pub(crate) fn show_bytes(bytes: u64) -> String {
    let units = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.iter().find(|(_, worth)| bytes >= *worth) {
        Some((unit, worth)) if bytes.is_multiple_of(*worth) => format!("{}{unit}", bytes / worth),
        Some((unit, worth)) => format!("{:.1}{unit}", bytes as f64 / *worth as f64),
        None => format!("{bytes}B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_people_write_them() {
        let read = |text| duration(text).expect("a time").as_millis();
        assert_eq!(read("5m"), 300_000);
        assert_eq!(read("1h 30m"), 5_400_000);
        assert_eq!(read("1h30m"), 5_400_000);
        assert_eq!(read("7d"), 7 * 86_400_000);
        assert_eq!(read("2w"), 14 * 86_400_000);
        assert_eq!(read("0.5s"), 500);
        assert_eq!(read("250ms"), 250);
        assert_eq!(read("30"), 30_000);
        assert_eq!(read(" 15 s "), 15_000);
        for bad in ["", "m", "x5m", "5 parsecs", "-1s", "1h-", "5m5", "inf", "NaN", "99999999d", "1..5s"] {
            assert!(duration(bad).is_err(), "{bad} is {:?}", duration(bad));
        }
    }

    #[test]
    fn no_text_is_a_time_or_a_size_that_cannot_be_counted_with() {
        use longhaul_hostile::Judged;
        longhaul_hostile::check("units", 20_000, |text| {
            let text = String::from_utf8_lossy(text);
            let time = duration(&text);
            if let Ok(time) = time {
                assert!(time <= LONGEST && duration(&show(time)).is_ok() && !brief(time).is_empty());
            }
            let size = bytes(&text);
            if let Ok(size) = size {
                assert!(!show_bytes(size).is_empty());
            }
            if time.is_ok() || size.is_ok() { Judged::Accepted } else { Judged::Refused }
        });
    }

    #[test]
    fn a_time_shown_is_read_back_as_itself() {
        for millis in [0, 1, 999, 1_000, 61_001, 3_600_000, 90_061_007, 86_400_000 * 400] {
            let time = Duration::from_millis(millis);
            assert_eq!(duration(&show(time)), Ok(time), "{}", show(time));
        }
        assert_eq!(brief(Duration::from_secs(3_700)), "1h 1m");
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(bytes("512"), Ok(512));
        assert_eq!(bytes("4MiB"), Ok(4 << 20));
        assert_eq!(bytes("10 kb"), Ok(10_000));
        assert!(bytes("4 M").is_err() && bytes("").is_err() && bytes("-1").is_err());
        assert!(bytes("99999999999999GiB").is_err(), "too many to count");
        assert_eq!(bytes(&show_bytes(5 << 20)), Ok(5 << 20));
    }
}
