//! Secrets and signatures, as [Standard Webhooks](https://www.standardwebhooks.com) has them.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::task::Invalid;

const PREFIX: &str = "whsec_";
/// How many bytes a secret may have.
const LENGTHS: std::ops::RangeInclusive<usize> = 24..=64;

/// A secret that receivers check signatures with. Never shown by accident: only
/// [`WebhookSecret::reveal`] gives it.
#[derive(Clone, PartialEq, Eq)]
pub struct WebhookSecret(Vec<u8>);

impl WebhookSecret {
    /// A new one.
    pub fn generate() -> Self {
        Self(rand::random::<[u8; 32]>().to_vec())
    }

    /// The secret as receivers are given it: `whsec_` and base64.
    pub fn reveal(&self) -> String {
        format!("{PREFIX}{}", STANDARD.encode(&self.0))
    }

    /// The signature of one message.
    pub(crate) fn sign(&self, id: &str, timestamp: i64, body: &[u8]) -> String {
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(&self.0) else {
            // A key of any length is accepted.
            return String::new();
        };
        mac.update(format!("{id}.{timestamp}.").as_bytes());
        mac.update(body);
        format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
    }
}

impl fmt::Debug for WebhookSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WebhookSecret(…)")
    }
}

impl FromStr for WebhookSecret {
    type Err = Invalid;
    fn from_str(text: &str) -> Result<Self, Invalid> {
        let bytes = text.trim().strip_prefix(PREFIX).and_then(|encoded| STANDARD.decode(encoded).ok());
        bytes.filter(|bytes| LENGTHS.contains(&bytes.len())).map(Self).ok_or_else(|| {
            Invalid::new(
                "webhook secret",
                format!("must be {PREFIX} and the base64 of {} to {} bytes", LENGTHS.start(), LENGTHS.end()),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_is_the_one_of_the_specification() {
        // The example of the Standard Webhooks libraries.
        let secret: WebhookSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse().expect("a secret");
        let signature = secret.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, br#"{"test": 2432232314}"#);
        assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn secrets_are_read_back_and_never_shown_by_accident() {
        let secret = WebhookSecret::generate();
        assert_eq!(secret.reveal().parse::<WebhookSecret>().expect("read back"), secret);
        assert_eq!(format!("{secret:?}"), "WebhookSecret(…)");
        for bad in ["", "whsec_", "whsec_AAAA", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_%%%%"] {
            let error = bad.parse::<WebhookSecret>().expect_err(bad).to_string();
            assert!(error.contains("24 to 64"), "{error}");
        }
    }
}
