//! How long to wait before the next try.

use std::time::Duration;

use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimeParser;
use reqwest::header::{HeaderMap, RETRY_AFTER};

use super::Retries;

/// How long the provider wants to be left alone: `retry-after-ms`, or `Retry-After` in seconds or as
/// a date.
pub(super) fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
    let number = |text: &str| text.parse::<f64>().ok();
    if let Some(milliseconds) = text("retry-after-ms").and_then(number) {
        return seconds(milliseconds / 1_000.0);
    }
    let told = text(RETRY_AFTER.as_str())?;
    if let Some(told) = number(told) {
        return seconds(told);
    }
    let date = DateTimeParser::new().relaxed_weekday(true).parse_timestamp(told).ok()?;
    // A date that has passed means now.
    Some(Duration::try_from(date.duration_since(now)).unwrap_or_default())
}

fn seconds(number: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(number.max(0.0)).ok()
}

/// A pause after this many tries, by chance between nothing and a bound that doubles with each.
pub(super) fn back_off(retries: &Retries, tried: u32) -> Duration {
    let bound = retries.pause.saturating_mul(1_u32.checked_shl(tried.saturating_sub(1)).unwrap_or(u32::MAX));
    bound.min(retries.max_pause).mul_f64(rand::random_range(0.0..=1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(name: &'static str, value: &str) -> Option<Duration> {
        let now: Timestamp = "2026-11-17T08:49:37Z".parse().expect("a time");
        let headers = [(name.parse().expect("a name"), value.parse().expect("a value"))].into_iter().collect();
        retry_after(&headers, now)
    }

    #[test]
    fn the_providers_wish_is_read_in_each_form() {
        let seconds = |number| Some(Duration::from_secs_f64(number));
        assert_eq!(waits("retry-after", "7"), seconds(7.0));
        assert_eq!(waits("retry-after", "0.5"), seconds(0.5));
        assert_eq!(waits("retry-after", "-1"), seconds(0.0));
        assert_eq!(waits("retry-after-ms", "250"), seconds(0.25));
        assert_eq!(waits("retry-after", "Tue, 17 Nov 2026 08:50:07 GMT"), seconds(30.0));
        assert_eq!(waits("retry-after", "Tue, 17 Nov 2026 08:00:00 GMT"), seconds(0.0));
        for nonsense in ["soon", "", "NaN", "1e300", "inf"] {
            assert!(waits("retry-after", nonsense).is_none_or(|wait| wait.is_zero()), "{nonsense}");
        }
    }

    #[test]
    fn pauses_stay_below_a_bound_that_doubles_up_to_the_longest() {
        let retries =
            Retries { pause: Duration::from_secs(1), max_pause: Duration::from_secs(5), ..Retries::default() };
        for (tried, bound) in [(1, 1), (2, 2), (3, 4), (4, 5), (40, 5), (u32::MAX, 5)] {
            for _ in 0..100 {
                assert!(back_off(&retries, tried) <= Duration::from_secs(bound));
            }
        }
    }
}
