//! Times as they come in requests.

use std::time::Duration;

use jiff::Timestamp;
use longhaul::request::Span;

use crate::problem::Problem;

/// A query parameter that is a span of time.
pub(crate) fn span(name: &str, text: Option<&str>) -> Result<Option<Duration>, Problem> {
    text.map(|text| Span::parse(text).map(|span| span.0).map_err(|why| Problem::parameter(name, why))).transpose()
}

/// A stored time as JSON has it.
pub(crate) fn timestamp(micros: i64) -> Timestamp {
    Timestamp::from_microsecond(micros).unwrap_or(if micros < 0 { Timestamp::MIN } else { Timestamp::MAX })
}
