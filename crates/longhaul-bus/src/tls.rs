//! TLS for brokers whose client takes a configuration of rustls.

use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use crate::address::Certificates;
use crate::bus::BusError;

/// Trusts the authority that the URL names, else the system's, and shows the client's certificate if there is one.
pub(crate) fn client_config(certificates: &Certificates) -> Result<ClientConfig, BusError> {
    let wrong = |what: &str, why: String| BusError::Invalid(format!("{what} cannot be used for TLS: {why}"));
    let read = |what: &str, pem: &[u8]| {
        CertificateDer::pem_slice_iter(pem)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| wrong(what, error.to_string()))
            .and_then(|read| {
                if read.is_empty() {
                    Err(wrong(what, "it has no certificate in PEM".to_owned()))
                } else {
                    Ok(read)
                }
            })
    };
    let mut roots = RootCertStore::empty();
    match &certificates.ca {
        Some(pem) => {
            for certificate in read("the file of 'ca'", pem)? {
                roots.add(certificate).map_err(|error| wrong("the file of 'ca'", error.to_string()))?;
            }
        }
        // Those of the system that cannot be read are none that a broker would have.
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong("what this program was built with", error.to_string()))?
        .with_root_certificates(roots);
    match &certificates.client {
        None => Ok(builder.with_no_client_auth()),
        Some((certificate, key)) => {
            let key = PrivateKeyDer::from_pem_slice(key)
                .map_err(|error| wrong("the file of 'key'", error.to_string()))?;
            builder
                .with_client_auth_cert(read("the file of 'cert'", certificate)?, key)
                .map_err(|error| wrong("the files of 'cert' and 'key'", error.to_string()))
        }
    }
}
