//! Where a call goes and with which key: read from the environment at each call, so that a key that
//! is rotated in its file is seen.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use reqwest::Url;
use reqwest::header::HeaderValue;

use super::error::{ModelError, ModelErrorKind};
use crate::mask::Mask;

/// The names of one provider's variables, and what holds without them.
pub(super) struct Variables {
    pub(super) key: &'static str,
    pub(super) key_file: &'static str,
    pub(super) base_url: &'static str,
    pub(super) default_base_url: &'static str,
    /// The host that no call can be made to without a key.
    pub(super) key_needed_by: &'static str,
}

/// A key shorter than this is a placeholder for a server that wants none; hiding it would only make
/// errors unreadable.
const MIN_HIDDEN_BYTES: usize = 4;
const HIDDEN: &str = "[key]";

type Lookup = dyn Fn(&str) -> Option<String> + Send + Sync;

/// Looks variables up: the process's own, or a test's.
#[derive(Clone)]
pub struct Environment(Arc<Lookup>);

impl Environment {
    /// The environment of this process.
    pub fn process() -> Self {
        Self::new(|name| std::env::var(name).ok())
    }

    /// An environment that this function is.
    pub fn new(lookup: impl Fn(&str) -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(lookup))
    }

    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// The address of the provider's API.
    pub(super) fn base_url(&self, variables: &Variables) -> Result<Url, ModelError> {
        let name = variables.base_url;
        let text = self.get(name).unwrap_or_else(|| variables.default_base_url.to_owned());
        let bad = |why: &str| {
            let example = variables.default_base_url;
            let message = format!("{name} {why}; set it to an address like {example}");
            ModelError::new(ModelErrorKind::BadRequest, message)
        };
        // The text itself is not shown: a password may be in it.
        let url = Url::parse(&text).map_err(|error| bad(&format!("is not a URL ({error})")))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(bad("is neither http nor https"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(bad(&format!(
                "has a user name or password in it; the key belongs into {}",
                variables.key
            )));
        }
        Ok(url)
    }

    /// The key for a call of this address, if there is one or none is needed.
    pub(super) async fn key(&self, variables: &Variables, url: &Url) -> Result<Option<Key>, ModelError> {
        let refused = |message: String| ModelError::new(ModelErrorKind::RefusedKey, message);
        let Variables { key: name, key_file, key_needed_by, .. } = variables;
        let (source, text) = if let Some(text) = self.get(name) {
            (name, text)
        } else if let Some(file) = self.get(key_file) {
            let text = tokio::fs::read_to_string(&file).await.map_err(|error| {
                refused(format!(
                    "{key_file} names {file}, which cannot be read ({error}); let it name a file with the key"
                ))
            })?;
            (key_file, text.trim().to_owned())
        } else {
            (name, String::new())
        };
        if text.is_empty() {
            if url.host_str() != Some(*key_needed_by) {
                return Ok(None);
            }
            return Err(refused(format!("{key_needed_by} wants a key; set {name} or {key_file}")));
        }
        let plain = text.bytes().all(|byte| byte.is_ascii_graphic());
        if !plain {
            return Err(refused(format!("{source} has a line break, a space or a letter that no key has in it")));
        }
        Ok(Some(Key(text)))
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Environment")
    }
}

/// A provider's key. Shows itself to nobody but the provider.
pub(super) struct Key(String);

impl Key {
    /// What it is, for the one header that carries it.
    pub(super) fn expose(&self) -> &str {
        &self.0
    }

    /// Hides the key in an answer.
    pub(super) fn mask(key: Option<&Self>) -> Mask {
        Mask::new(key.map(|Self(key)| ("key".to_owned(), key.clone().into_bytes())))
    }

    /// A text without the key.
    pub(super) fn hide(key: Option<&Self>, text: &str) -> String {
        match key {
            Some(Self(key)) if key.len() >= MIN_HIDDEN_BYTES => text.replace(key.as_str(), HIDDEN),
            _ => text.to_owned(),
        }
    }
}

/// The value of a header that must not be logged.
pub(super) fn secret_value(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Whether a URL leads to this very machine.
pub(super) fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    match address {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host == "localhost" || host.ends_with(".localhost"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VARIABLES: Variables = Variables {
        key: "KEY",
        key_file: "KEY_FILE",
        base_url: "URL",
        default_base_url: "https://api.example.com/v1",
        key_needed_by: "api.example.com",
    };

    fn with(variables: &[(&'static str, &str)]) -> Environment {
        let variables: Vec<_> = variables.iter().map(|&(name, value)| (name, value.to_owned())).collect();
        Environment::new(move |name| variables.iter().find(|(it, _)| *it == name).map(|(_, value)| value.clone()))
    }

    async fn key(variables: &[(&'static str, &str)], url: &str) -> Result<Option<String>, String> {
        let url = Url::parse(url).expect("a URL");
        match with(variables).key(&VARIABLES, &url).await {
            Ok(key) => Ok(key.map(|key| key.expose().to_owned())),
            Err(error) => Err(error.message),
        }
    }

    #[tokio::test]
    async fn a_key_comes_from_its_variable_or_its_file_and_is_read_anew() {
        let home = "https://api.example.com/v1";
        assert_eq!(key(&[("KEY", " abc ")], home).await, Ok(Some("abc".to_owned())));
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("key");
        let path = file.to_str().expect("text").to_owned();
        std::fs::write(&file, "first\n").expect("written");
        assert_eq!(key(&[("KEY_FILE", &path)], home).await, Ok(Some("first".to_owned())));
        std::fs::write(&file, "second").expect("written");
        assert_eq!(key(&[("KEY_FILE", &path)], home).await, Ok(Some("second".to_owned())));
        std::fs::write(&file, "two\nlines").expect("written");
        let error = key(&[("KEY_FILE", &path)], home).await.expect_err("no key");
        assert!(error.starts_with("KEY_FILE") && !error.contains("two"), "{error}");
        std::fs::remove_file(&file).expect("removed");
        let error = key(&[("KEY_FILE", &path)], home).await.expect_err("no file");
        assert!(error.contains(&path), "{error}");
    }

    #[tokio::test]
    async fn only_the_provider_itself_needs_a_key() {
        let error = key(&[("KEY", "")], "https://api.example.com/v1").await.expect_err("no key");
        assert_eq!(error, "api.example.com wants a key; set KEY or KEY_FILE");
        assert_eq!(key(&[], "http://127.0.0.1:11434/v1").await, Ok(None));
    }

    #[test]
    fn a_base_url_that_cannot_be_called_is_refused_without_showing_it() {
        for url in ["//x", "ftp://x/", "https://user:pa55word@x/"] {
            let error = with(&[("URL", url)]).base_url(&VARIABLES).expect_err("no such URL");
            assert_eq!(error.kind, ModelErrorKind::BadRequest);
            assert!(error.message.starts_with("URL ") && !error.message.contains("pa55word"), "{error}");
        }
        let url = with(&[]).base_url(&VARIABLES).expect("the default");
        assert_eq!(url.as_str(), "https://api.example.com/v1");
    }

    #[test]
    fn this_machine_is_recognised_by_each_of_its_names() {
        for (url, loopback) in [
            ("http://localhost:1/v1", true),
            ("http://127.0.0.1/", true),
            ("http://127.9.9.9/", true),
            ("http://[::1]:80/", true),
            ("http://[::ffff:127.0.0.1]/", true),
            ("http://a.localhost/", true),
            ("http://10.0.0.1/", false),
            ("https://api.openai.com/v1", false),
            ("http://localhost.example.com/", false),
        ] {
            assert_eq!(is_loopback(&Url::parse(url).expect("a URL")), loopback, "{url}");
        }
    }
}
