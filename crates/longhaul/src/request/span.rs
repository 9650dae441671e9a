//! Spans of time as they come in requests.

use std::time::Duration;

use jiff::SignedDuration;
use serde::{Deserialize, Deserializer};

/// A span of time, like `30s`, `5m` or `1h 30m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

/// The longest that is taken, so that no sum overflows.
const LONGEST: Duration = Duration::from_secs(10 * 366 * 86_400);

impl Span {
    /// Reads it; says what is wrong with it otherwise.
    pub fn parse(text: &str) -> Result<Self, String> {
        let days = text.strip_suffix('d').and_then(|days| days.trim().parse::<u32>().ok());
        let span = match days {
            Some(days) => Ok(Duration::from_secs(u64::from(days) * 86_400)),
            None => text
                .parse::<SignedDuration>()
                .map_err(|_| ())
                .and_then(|span| Duration::try_from(span).map_err(|_| ())),
        };
        match span {
            Ok(span) if span <= LONGEST => Ok(Self(span)),
            Ok(_) => Err("is more than ten years".to_owned()),
            Err(()) => Err("is not a time; write it like \"30s\", \"5m\" or \"1h 30m\"".to_owned()),
        }
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_as_people_write_them() {
        for (text, seconds) in [("30s", 30), ("5m", 300), ("1h 30m", 5_400), ("24h", 86_400), ("7d", 604_800)] {
            assert_eq!(Span::parse(text), Ok(Span(Duration::from_secs(seconds))), "{text}");
        }
        for wrong in ["", "5", "-5s", "soon", "99999999999h", "4000d"] {
            assert!(Span::parse(wrong).is_err(), "{wrong}");
        }
    }
}
