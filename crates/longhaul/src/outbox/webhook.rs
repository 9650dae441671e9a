//! One delivery: a signed POST, and what its answer means.
//!
//! Every delivery has a connection of its own, so that it never meets the goodbye of one that was kept.
//! Redirects are not followed, and no proxy of the environment is used: the address that was checked is
//! the one that is called.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use reqwest::header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode};
use rustls::{ClientConfig, RootCertStore};
use uuid::Uuid;

use super::address::{Resolver, Rules};
use super::secret::WebhookSecret;
use super::target::Webhook;

/// How much of a refusal is read, to be told.
const MAX_EXCERPT_BYTES: usize = 256;

/// What came of sending.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// The receiver took it.
    Delivered(u16),
    /// A reply reached its destination.
    Replied,
    /// A reply can never reach its destination.
    Refused(String),
    /// The receiver wants nothing more.
    Gone(String),
    /// It did not.
    Failed {
        status: Option<u16>,
        error: String,
        /// When the receiver wants to be asked again.
        after: Option<Duration>,
    },
}

/// Sends.
pub(super) struct Sender {
    client: Client,
    rules: Arc<Rules>,
    secrets: Vec<WebhookSecret>,
}

impl Sender {
    pub(super) fn new(rules: Rules, secrets: Vec<WebhookSecret>, timeout: Duration) -> Result<Self, String> {
        let rules = Arc::new(rules);
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("cannot set up TLS: {error}"))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let client = Client::builder()
            .tls_backend_preconfigured(tls)
            .dns_resolver(Arc::new(Resolver(Arc::clone(&rules))))
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .no_proxy()
            .pool_max_idle_per_host(0)
            .timeout(timeout)
            .user_agent(concat!("longhaul/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| format!("cannot set up the HTTP client: {error}"))?;
        Ok(Self { client, rules, secrets })
    }

    /// Sends one message; the same id names the same message however often it is sent.
    pub(super) async fn send(&self, webhook: &Webhook, id: Uuid, body: Vec<u8>) -> Sent {
        let failed = |error: String| Sent::Failed { status: None, error, after: None };
        let url = match webhook.parse() {
            Ok(url) => url,
            Err(why) => return failed(format!("the webhook {why}")),
        };
        if let Err(refused) = self.rules.check_url(&url) {
            return failed(refused.to_string());
        }
        let id = format!("msg_{}", id.simple());
        // The host's clock, not the store's: receivers compare it with theirs.
        let timestamp = Timestamp::now().as_second();
        let signatures: Vec<String> =
            self.secrets.iter().map(|secret| secret.sign(&id, timestamp, &body)).collect();
        let request = self
            .client
            .post(url)
            .header(CONTENT_TYPE, "application/json")
            .header("webhook-id", id)
            .header("webhook-timestamp", timestamp)
            .header("webhook-signature", signatures.join(" "))
            .body(body);
        match request.send().await {
            Ok(response) => judge(response).await,
            Err(error) => failed(causes(&error)),
        }
    }
}

async fn judge(response: Response) -> Sent {
    let status = response.status();
    if status.is_success() {
        return Sent::Delivered(status.as_u16());
    }
    let after = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
        .then(|| retry_after(response.headers(), Timestamp::now()))
        .flatten();
    let redirects = if status.is_redirection() { "; redirects are not followed, use the final URL" } else { "" };
    let said = excerpt(response).await;
    let said = if said.is_empty() { said } else { format!(": {said}") };
    let error = format!("answered {status}{redirects}{said}");
    if status == StatusCode::GONE {
        return Sent::Gone(error);
    }
    Sent::Failed { status: Some(status.as_u16()), error, after }
}

/// When the receiver wants to be asked again: seconds, or a date.
fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let at = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
    Duration::try_from(at.duration_since(now)).ok()
}

/// The beginning of what was said, in one line that can be shown.
async fn excerpt(mut response: Response) -> String {
    let mut said = Vec::new();
    while said.len() < MAX_EXCERPT_BYTES {
        match response.chunk().await {
            Ok(Some(chunk)) => said.extend_from_slice(&chunk[..chunk.len().min(MAX_EXCERPT_BYTES - said.len())]),
            // The status says enough; the body only helps to understand it.
            _ => break,
        }
    }
    let text = String::from_utf8_lossy(&said).replace(|c: char| c.is_control(), " ");
    text.trim().to_owned()
}

/// Why there was no answer, without the URL, which stands beside it anyway.
fn causes(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return "no answer in time".to_owned();
    }
    let mut why = Vec::new();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        why.push(cause.to_string());
        source = cause.source();
    }
    why.dedup();
    if why.is_empty() { "the request failed".to_owned() } else { why.join(": ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_says_in_seconds_or_by_a_date_when_to_ask_again() {
        let now: Timestamp = "2026-01-02T03:04:05Z".parse().expect("a time");
        let after = |text: &str| {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, text.parse().expect("a header"))]);
            retry_after(&headers, now)
        };
        assert_eq!(after("120"), Some(Duration::from_secs(120)));
        assert_eq!(after("Fri, 02 Jan 2026 03:05:05 GMT"), Some(Duration::from_secs(60)));
        assert_eq!(after("Fri, 02 Jan 2026 03:04:00 GMT"), None, "in the past");
        assert_eq!(after("soon"), None);
    }
}
