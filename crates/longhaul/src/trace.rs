//! The link between spans and a trace that goes on in other programs.
//!
//! The engine knows spans of `tracing` and texts of the form
//! [`traceparent`](https://www.w3.org/TR/trace-context/#traceparent-header), and no telemetry library. A
//! program that has one installs a [`TraceLink`]: the span of each run then belongs to the trace that the
//! task was submitted with, and steps pass that trace on ([`crate::StepContext::traceparent`]). Without a
//! link, the trace of the submit is passed on as it is.

use std::sync::OnceLock;

use tracing::Span;

/// Joins spans with traces of other programs.
pub trait TraceLink: Send + Sync {
    /// Makes the span part of the trace, below the span that `traceparent` names. Called before the span
    /// is first entered; a text that is no traceparent is ignored.
    fn adopt(&self, span: &Span, traceparent: &str);

    /// How the span is named to others; `None` when it is not traced.
    fn traceparent(&self, span: &Span) -> Option<String>;
}

static LINK: OnceLock<Box<dyn TraceLink>> = OnceLock::new();

/// Installs the link of this process. The first one stays: gives whether this was it.
pub fn install(link: impl TraceLink + 'static) -> bool {
    LINK.set(Box::new(link)).is_ok()
}

/// Makes the span part of a trace, if there is a link.
pub fn adopt(span: &Span, traceparent: &str) {
    if let Some(link) = LINK.get() {
        link.adopt(span, traceparent);
    }
}

/// How the span is named to others; `None` without a link, or when it is not traced.
pub fn traceparent(span: &Span) -> Option<String> {
    LINK.get()?.traceparent(span)
}
