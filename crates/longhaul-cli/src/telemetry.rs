//! Logs on stderr and, with an endpoint, traces by OTLP.
//!
//! Every line carries the fields of the spans it is in, so task, run and step, at whatever level lines are
//! wanted. Traces are sent in the background over HTTP; a collector that is away costs one warning and
//! the spans of that time, nothing else.

use std::io::IsTerminal;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::level_filters::LevelFilter;
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::filter::{EnvFilter, FilterExt, filter_fn};
use tracing_subscriber::fmt::format::JsonFields;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry};

mod flat;
mod link;
mod sender;

use flat::Flat;
use link::Link;
use sender::Sender;

/// How long one export may take.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the last spans may take at exit.
const LAST_WORDS: Duration = Duration::from_secs(6);
/// Where traces go below the endpoint.
const TRACES: &str = "/v1/traces";

/// How lines of the log look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// For eyes.
    Human,
    /// One object per line.
    Json,
}

/// What is logged and traced, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TelemetrySettings {
    pub(crate) form: Form,
    /// A level, or a filter like `info,longhaul=debug`.
    pub(crate) level: String,
    /// The address of an OTLP collector, like `http://127.0.0.1:4318`; without one nothing is traced.
    pub(crate) otlp_endpoint: Option<String>,
    /// What traces call this program.
    pub(crate) service_name: String,
}

impl TelemetrySettings {
    /// As the environment says; `get` gives its values.
    pub(crate) fn from_env(get: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name| get(name).filter(|value| !value.trim().is_empty());
        let form = match set("LONGHAUL_LOG_FORMAT").as_deref() {
            Some("json") => Form::Json,
            _ => Form::Human,
        };
        Self {
            form,
            level: set("LONGHAUL_LOG").unwrap_or_else(|| "warn".to_owned()),
            otlp_endpoint: set("LONGHAUL_OTLP_ENDPOINT").or_else(|| set("OTEL_EXPORTER_OTLP_ENDPOINT")),
            service_name: set("OTEL_SERVICE_NAME").unwrap_or_else(|| "longhaul".to_owned()),
        }
    }
}

/// Sends the last spans when it is dropped.
#[must_use = "traces are sent until this is dropped"]
pub(crate) struct Guard {
    provider: Option<SdkTracerProvider>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(provider) = &self.provider
            && let Err(error) = provider.shutdown_with_timeout(LAST_WORDS)
        {
            tracing::debug!(%error, "the last spans were not sent");
        }
    }
}

/// Begins to log, and to trace if there is where to.
pub(crate) fn init(settings: &TelemetrySettings) -> Guard {
    let (filter, bad_filter) = match EnvFilter::try_new(&settings.level) {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::new("warn"), Some(error)),
    };
    let filter = without_messages(filter, &settings.level);
    let provider = settings.otlp_endpoint.as_deref().map(|endpoint| provider(endpoint, &settings.service_name));
    let (provider, bad_endpoint) = match provider {
        Some(Ok(provider)) => (Some(provider), None),
        Some(Err(why)) => (None, Some(why)),
        None => (None, None),
    };
    let traces = provider.as_ref().map(|provider| {
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("longhaul"))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            // Nothing here asks for OpenTelemetry's own current context.
            .with_context_activation(false)
            // Only our own: what the libraries below do would drown it.
            .with_filter(filter_fn(is_ours).with_max_level_hint(LevelFilter::INFO))
    });
    if provider.is_some() {
        longhaul::trace::install(Link);
    }
    tracing_subscriber::registry().with(lines(settings.form, filter)).with(traces).init();
    if let Some(error) = bad_filter {
        tracing::warn!(%error, filter = settings.level, "the log filter is not understood; only warnings are logged");
    }
    if let Some(why) = bad_endpoint {
        tracing::warn!(endpoint = settings.otlp_endpoint, why, "nothing is traced; correct the OTLP endpoint");
    }
    Guard { provider }
}

/// The library for MCP logs whole messages at `debug`, and secrets may be in them; and it takes a client that leaves in the
/// middle of a stream for an error. Only who names it sees these.
fn without_messages(filter: EnvFilter, asked: &str) -> EnvFilter {
    if asked.contains("rmcp") {
        return filter;
    }
    let quiet = ["rmcp::service=off".parse().ok(), "rmcp=info".parse().ok()];
    let wanted = if filter.max_level_hint() <= Some(LevelFilter::INFO) { 1 } else { 2 };
    quiet.into_iter().take(wanted).flatten().fold(filter, EnvFilter::add_directive)
}

/// The layer that writes lines to stderr.
fn lines(form: Form, filter: EnvFilter) -> Box<dyn Layer<Registry> + Send + Sync> {
    let silent = filter.max_level_hint() == Some(LevelFilter::OFF);
    // A warning says in which task it was also where lines about tasks are not wanted.
    let spans = filter_fn(move |metadata| !silent && metadata.is_span() && is_ours(metadata));
    let most = if silent { LevelFilter::OFF } else { LevelFilter::INFO };
    let filter = filter.or(spans.with_max_level_hint(most));
    match form {
        Form::Human => human().with_filter(filter).boxed(),
        Form::Json => tracing_subscriber::fmt::layer()
            .fmt_fields(JsonFields::new())
            .event_format(Flat)
            .with_writer(std::io::stderr)
            .with_filter(filter)
            .boxed(),
    }
}

fn human<S: Subscriber + for<'a> LookupSpan<'a>>() -> impl Layer<S> {
    tracing_subscriber::fmt::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr)
}

fn is_ours(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with("longhaul") && *metadata.level() <= Level::INFO
}

fn provider(endpoint: &str, service: &str) -> Result<SdkTracerProvider, String> {
    let url = traces_url(endpoint);
    if !(url.starts_with("http://") || url.starts_with("https://")) {
        return Err("it must begin with http:// or https://".to_owned());
    }
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(Sender::new(EXPORT_TIMEOUT)?)
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(url)
        .with_timeout(EXPORT_TIMEOUT)
        .build()
        .map_err(|error| error.to_string())?;
    let resource = Resource::builder()
        .with_service_name(service.to_owned())
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}

/// The endpoint is the collector's, as the environment variable of OpenTelemetry has it; one that names the
/// place of traces already is left as it is.
fn traces_url(endpoint: &str) -> String {
    let endpoint = endpoint.trim().trim_end_matches('/');
    if endpoint.ends_with(TRACES) { endpoint.to_owned() } else { format!("{endpoint}{TRACES}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(set: &[(&str, &str)]) -> TelemetrySettings {
        TelemetrySettings::from_env(|name| {
            set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn without_a_word_warnings_are_logged_for_eyes_and_nothing_is_traced() {
        let defaults = settings(&[("LONGHAUL_LOG", ""), ("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]);
        assert_eq!(defaults, settings(&[]));
        assert_eq!((defaults.form, defaults.level.as_str(), defaults.otlp_endpoint), (Form::Human, "warn", None));
    }

    #[test]
    fn our_own_endpoint_comes_before_that_of_opentelemetry() {
        let both = [("OTEL_EXPORTER_OTLP_ENDPOINT", "http://b"), ("LONGHAUL_OTLP_ENDPOINT", "http://a")];
        assert_eq!(settings(&both).otlp_endpoint.as_deref(), Some("http://a"));
        assert_eq!(settings(&both[..1]).otlp_endpoint.as_deref(), Some("http://b"));
    }

    #[test]
    fn traces_go_below_the_endpoint() {
        for endpoint in ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"] {
            assert_eq!(traces_url(endpoint), "http://c:4318/v1/traces");
        }
    }

    #[test]
    fn an_endpoint_that_is_no_address_is_told() {
        assert!(provider("c:4318", "longhaul").is_err());
    }
}
