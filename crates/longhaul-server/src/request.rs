//! Around every request: its id, its place in a trace, what is logged and counted of it.

use std::time::Instant;

use axum::extract::{FromRequestParts, MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use rand::RngExt as _;
use tracing::Instrument;

use crate::problem::Problem;
use crate::state::App;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// What a request is known by.
#[derive(Clone, Debug)]
pub(crate) struct RequestContext {
    /// The trace that what this request causes belongs to, as a W3C `traceparent`.
    pub(crate) traceparent: String,
}

impl FromRequestParts<App> for RequestContext {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Problem> {
        let context = parts.extensions.get::<Self>().cloned();
        context.ok_or_else(|| Problem::new("internal", "the request has no context"))
    }
}

/// A place in a trace: the caller's trace, or a new one, and an id for what this server does in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TraceContext {
    trace: u128,
    span: u64,
    flags: u8,
}

impl TraceContext {
    /// Goes on with the trace that the headers name. One that is malformed is as none, as W3C wants it.
    fn of(headers: &HeaderMap) -> Self {
        let given = headers.get(TRACEPARENT).and_then(|value| value.to_str().ok()).and_then(Self::parse);
        let mut random = rand::rng();
        let span = random.random_range(1..=u64::MAX);
        match given {
            Some(given) => Self { span, ..given },
            None => Self { trace: random.random_range(1..=u128::MAX), span, flags: 1 },
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let hex = |text: &str, len| {
            text.len() == len && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let more = parts.next().is_some();
        if !hex(version, 2) || version == "ff" || (version == "00" && more) {
            return None;
        }
        if !hex(trace, 32) || !hex(span, 16) || !hex(flags, 2) {
            return None;
        }
        let trace = u128::from_str_radix(trace, 16).ok().filter(|&id| id != 0)?;
        let span = u64::from_str_radix(span, 16).ok().filter(|&id| id != 0)?;
        Some(Self { trace, span, flags: u8::from_str_radix(flags, 16).ok()? })
    }

    fn to_header(self) -> String {
        format!("00-{:032x}-{:016x}-{:02x}", self.trace, self.span, self.flags)
    }
}

/// The request's own place in the caller's trace, or in a new one: as the program's telemetry has it, or made up
/// here where there is none, so that what the request causes can be told apart all the same.
fn traceparent(span: &tracing::Span, headers: &HeaderMap) -> String {
    if let Some(given) = headers.get(TRACEPARENT).and_then(|value| value.to_str().ok()) {
        longhaul::trace::adopt(span, given);
    }
    longhaul::trace::traceparent(span).unwrap_or_else(|| TraceContext::of(headers).to_header())
}

/// Gives every request its id and its place in a trace, and logs and counts it.
pub(crate) async fn accompany(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = request_id(request.headers());
    let method = request.method().clone();
    let route = request.extensions().get::<MatchedPath>().map_or("none", MatchedPath::as_str).to_owned();
    // The path without its query: that may carry a stream token.
    let span = tracing::info_span!("request", %method, path = request.uri().path(), request_id = ?id);
    let traceparent = traceparent(&span, request.headers());
    request.extensions_mut().insert(RequestContext { traceparent: traceparent.clone() });
    let mut response = next.run(request).instrument(span.clone()).await;
    let (status, took) = (response.status(), started.elapsed());
    span.in_scope(|| tracing::debug!(status = status.as_u16(), ms = took.as_secs_f64() * 1e3, "answered"));
    app.metrics().answered(&method, &route, status, took);
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, id);
    if let Ok(trace) = HeaderValue::from_str(&traceparent) {
        headers.insert(TRACEPARENT, trace);
    }
    response
}

/// The client's own id for its request, when it is short and plain, or a new one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let plain = |value: &&HeaderValue| {
        (1..=128).contains(&value.len()) && value.as_bytes().iter().all(|byte| byte.is_ascii_graphic())
    };
    headers.get(REQUEST_ID).filter(plain).cloned().unwrap_or_else(|| {
        let id = uuid::Uuid::now_v7().to_string();
        // Hexadecimal digits and dashes.
        HeaderValue::from_str(&id).unwrap_or_else(|_| HeaderValue::from_static("none"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(traceparent: &str) -> HeaderMap {
        HeaderMap::from_iter([(TRACEPARENT, HeaderValue::from_str(traceparent).expect("a header"))])
    }

    #[test]
    fn a_trace_goes_on_under_a_span_of_its_own() {
        let context = TraceContext::of(&headers("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"));
        assert_eq!(context.trace, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_ne!(context.span, 0x00f0_67aa_0ba9_02b7);
        assert_eq!(TraceContext::parse(&context.to_header()), Some(context));
    }

    #[test]
    fn a_malformed_trace_is_as_none() {
        for malformed in [
            "",
            "00-0-0-0",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        ] {
            assert_eq!(TraceContext::parse(malformed), None, "{malformed}");
        }
    }
}
