//! Joins the engine's spans with traces of other programs, by OpenTelemetry.

use std::collections::HashMap;

use longhaul::trace::TraceLink;
use opentelemetry::Context;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::TraceContextExt;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

const TRACEPARENT: &str = "traceparent";

/// See the module.
pub(super) struct Link;

impl TraceLink for Link {
    fn adopt(&self, span: &Span, traceparent: &str) {
        let carrier = HashMap::from([(TRACEPARENT.to_owned(), traceparent.to_owned())]);
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &carrier);
        if parent.span().span_context().is_valid()
            && let Err(error) = span.set_parent(parent)
        {
            tracing::debug!(%error, "a span could not be made part of its trace");
        }
    }

    fn traceparent(&self, span: &Span) -> Option<String> {
        let mut carrier = HashMap::new();
        TraceContextPropagator::new().inject_context(&span.context(), &mut carrier);
        carrier.remove(TRACEPARENT)
    }
}
