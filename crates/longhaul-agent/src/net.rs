//! What every HTTP client here has in common: TLS by rustls with the system's roots, and the words
//! for what went wrong.

use std::sync::{Arc, OnceLock};

use reqwest::{Client, ClientBuilder};
use rustls::{ClientConfig, RootCertStore};

/// Begins a client: our TLS, our name, no retries of its own, and no redirects, which each caller
/// decides about.
pub(crate) fn client() -> Result<ClientBuilder, rustls::Error> {
    Ok(Client::builder()
        .tls_backend_preconfigured(config()?)
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .user_agent(concat!("longhaul/", env!("CARGO_PKG_VERSION"))))
}

/// Reading the system's roots takes a while, so it is done once.
fn config() -> Result<ClientConfig, rustls::Error> {
    static CONFIG: OnceLock<ClientConfig> = OnceLock::new();
    if let Some(config) = CONFIG.get() {
        return Ok(config.clone());
    }
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(CONFIG.get_or_init(|| config).clone())
}

/// Why a request failed: the innermost causes, without the URL, which may hold what is not for
/// everyone's eyes.
pub(crate) fn causes(error: &reqwest::Error) -> String {
    let mut source = std::error::Error::source(error);
    let mut why = Vec::new();
    while let Some(cause) = source {
        why.push(cause.to_string());
        source = cause.source();
    }
    why.dedup();
    if why.is_empty() { "the request failed".to_owned() } else { why.join(": ") }
}
