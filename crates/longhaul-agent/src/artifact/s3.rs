//! S3-compatible stores, by the system's TLS roots and the TLS provider of the other calls.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::client::{ClientOptions, HttpClient, HttpConnector};
use object_store::{ObjectStore, RetryConfig};
use rustls::{ClientConfig, RootCertStore};

/// The smallest part that S3 takes, but for the last.
pub(super) const PART_BYTES: usize = 5 * 1024 * 1024;

/// Opens a bucket with what the environment says.
pub(super) fn open(bucket: &str) -> Result<Arc<dyn ObjectStore>, String> {
    if bucket.is_empty() {
        return Err("it names no bucket; write s3://BUCKET/PREFIX".to_owned());
    }
    let store = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        // Who says http:// in AWS_ENDPOINT_URL means it.
        .with_allow_http(true)
        // A step that fails is tried again anyway.
        .with_retry(RetryConfig {
            max_retries: 5,
            retry_timeout: Duration::from_secs(30),
            ..RetryConfig::default()
        })
        .with_http_connector(Connector)
        .build();
    Ok(Arc::new(store.map_err(|error| error.to_string())?))
}

#[derive(Debug)]
struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| object_store::Error::Generic {
            store: "S3",
            source,
        };
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| failed(error.into()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let client = reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .connect_timeout(Duration::from_secs(5))
            .read_timeout(Duration::from_secs(30))
            .user_agent(concat!("longhaul/", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(HttpClient::new(client.map_err(|error| failed(error.into()))?))
    }
}
