//! The HTTP client of the exporter.
//!
//! Exports come from a thread of the exporter's, seconds apart, and the last one when the program's runtime
//! is about to end. So each has a small runtime and a connection of its own, and needs nothing that may
//! be gone.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use rustls::{ClientConfig, RootCertStore};

/// See the module.
#[derive(Debug)]
pub(super) struct Sender {
    client: reqwest::Client,
    /// The last export did not arrive, and that was said.
    away: AtomicBool,
}

impl Sender {
    pub(super) fn new(timeout: Duration) -> Result<Self, String> {
        let client = reqwest::Client::builder()
            .tls_backend_preconfigured(tls()?)
            .redirect(reqwest::redirect::Policy::none())
            .pool_max_idle_per_host(0)
            .timeout(timeout)
            .user_agent(concat!("longhaul/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Self { client, away: AtomicBool::new(false) })
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let request = reqwest::Request::try_from(request)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let answer = self.client.execute(request).await?;
            let (status, headers) = (answer.status(), answer.headers().clone());
            let mut response = Response::new(answer.bytes().await?);
            *response.status_mut() = status;
            *response.headers_mut() = headers;
            Ok(response)
        })
    }

    /// Says once that the collector is away, and once that it is back.
    fn note(&self, failure: Option<String>) {
        match failure {
            Some(why) if !self.away.swap(true, Ordering::Relaxed) => {
                tracing::warn!(why, "traces cannot be sent; tasks are not affected, spans are lost meanwhile");
            }
            Some(why) => tracing::debug!(why, "traces still cannot be sent"),
            None if self.away.swap(false, Ordering::Relaxed) => tracing::info!("traces are sent again"),
            None => {}
        }
    }
}

#[async_trait::async_trait]
impl HttpClient for Sender {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let answer = self.send(request);
        self.note(match &answer {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(format!("the collector answered {}", response.status())),
            Err(error) => Some(causes(&**error)),
        });
        answer
    }
}

fn causes(error: &(dyn Error + 'static)) -> String {
    let mut why = vec![error.to_string()];
    let mut source = error.source();
    while let Some(cause) = source {
        why.push(cause.to_string());
        source = cause.source();
    }
    why.join(": ")
}

fn tls() -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    Ok(versions.map_err(|error| error.to_string())?.with_root_certificates(roots).with_no_client_auth())
}
