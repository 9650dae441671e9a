//! Where events are sent: a task's own webhook, and the endpoints of a tenant.

use jiff::Timestamp;
use reqwest::Url;
use serde::{Deserialize, Serialize};

use crate::task::{Invalid, check_name};

/// The longest URL that is accepted.
const MAX_URL_BYTES: usize = 2_048;
/// How many patterns of events one destination may have.
const MAX_PATTERNS: usize = 32;
/// What is wanted when nothing else is said.
const FINALS: [&str; 3] = ["task.completed", "task.failed", "task.cancelled"];
/// How many endpoints a tenant may have: each of its tasks has a line to every one of them.
pub const MAX_ENDPOINTS: usize = 16;

/// A URL that hears of events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Webhook {
    /// Where to; `http` or `https`.
    pub url: String,
    /// Of which events: exact types (`task.completed`), all that begin alike (`step.*`), or `*`.
    /// None at all means how the task ended.
    #[serde(default)]
    pub events: Vec<String>,
}

impl Webhook {
    /// A URL that hears how the task ended.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), events: Vec::new() }
    }

    /// Adds a pattern of events.
    pub fn event(mut self, pattern: impl Into<String>) -> Self {
        self.events.push(pattern.into());
        self
    }

    /// Whether it can be kept; nothing is looked up.
    pub fn validate(&self) -> Result<(), Invalid> {
        self.parse().map_err(|why| Invalid::new("webhook", why))?;
        if self.events.len() > MAX_PATTERNS {
            let count = self.events.len();
            return Err(Invalid::new(
                "webhook",
                format!("has {count} patterns of events; at most {MAX_PATTERNS} are accepted"),
            ));
        }
        match self.events.iter().find(|pattern| !is_pattern(pattern)) {
            Some(pattern) => Err(Invalid::new(
                "webhook",
                format!(
                    "has the pattern '{}'; use a type as task.completed, a beginning as step.*, or *",
                    pattern.escape_debug()
                ),
            )),
            None => Ok(()),
        }
    }

    /// The URL, or why it is none that can be called.
    pub(crate) fn parse(&self) -> Result<Url, String> {
        if self.url.len() > MAX_URL_BYTES {
            return Err(format!("has a URL of {} bytes; at most {MAX_URL_BYTES} are accepted", self.url.len()));
        }
        if self.url.contains('\0') {
            return Err("has a URL with a NUL in it".to_owned());
        }
        let url = Url::parse(&self.url).map_err(|error| format!("has no URL that can be read ({error})"))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(format!("has the scheme {}; only http and https can be called", url.scheme()));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("has a user name or password in its URL; check the signature instead".to_owned());
        }
        Ok(url)
    }

    /// Whether it wants events of this type.
    pub fn wants(&self, kind: &str) -> bool {
        if self.events.is_empty() {
            return FINALS.contains(&kind);
        }
        self.events.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(beginning) => kind.starts_with(beginning),
            None => pattern == kind,
        })
    }

    /// Whether it wants only to hear how tasks ended.
    pub(crate) fn finals_only(&self) -> bool {
        self.events.iter().all(|pattern| FINALS.contains(&pattern.as_str()))
    }

    /// What it shares with others that go to the same receiver.
    pub(crate) fn lane(&self) -> String {
        let Ok(url) = self.parse() else { return String::new() };
        let port = url.port_or_known_default().unwrap_or(0);
        format!("{}:{port}", url.host_str().unwrap_or_default())
    }

    /// The stored form.
    pub(crate) fn to_json(&self) -> String {
        // Two members that always serialise.
        serde_json::to_string(self).unwrap_or_default()
    }
}

fn is_pattern(pattern: &str) -> bool {
    let name = match pattern.strip_suffix('*') {
        Some("") => return true,
        Some(beginning) if beginning.ends_with('.') => beginning,
        Some(_) => return false,
        None => pattern,
    };
    !name.is_empty()
        && name.len() <= 128
        && !name.contains(|c: char| c == '*' || c.is_control() || c.is_whitespace())
}

/// A webhook of a tenant, under a name. It hears of tasks submitted while it is there: one that is
/// removed and added again under its name hears of none from before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Its name.
    pub name: String,
    /// Where to, and of which events.
    #[serde(flatten)]
    pub webhook: Webhook,
    /// When it was added.
    pub created_at: Timestamp,
}

/// Whether an endpoint may be called so and be like this.
pub(crate) fn check_endpoint(name: &str, webhook: &Webhook) -> Result<(), Invalid> {
    check_name("endpoint", name)?;
    webhook.validate()
}

/// Why a tenant gets no further endpoint.
pub(crate) fn too_many_endpoints() -> Invalid {
    Invalid::new("endpoints", format!("are {MAX_ENDPOINTS} already, the most a tenant may have; remove some"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_types_exactly_by_beginning_or_all() {
        let plain = Webhook::new("https://example.com/hook");
        assert!(plain.wants("task.failed") && !plain.wants("task.started") && plain.finals_only());
        let some = plain.clone().event("step.*").event("progress");
        assert!(some.wants("step.completed") && some.wants("progress"));
        assert!(!some.wants("steps") && !some.wants("progressive") && !some.wants("task.failed"));
        assert!(!some.finals_only());
        assert!(plain.clone().event("*").wants("whatever"));
        assert!(plain.event("task.failed").finals_only());
    }

    #[test]
    fn what_cannot_be_called_is_refused() {
        assert_eq!(Webhook::new("http://example.com:8080/a?b=c").validate(), Ok(()));
        for url in [
            "",
            "example.com/hook",
            "ftp://example.com/",
            "file:///etc/passwd",
            "http://",
            "http://user:word@example.com/",
            "http://example.com/\0",
            &format!("http://example.com/{}", "x".repeat(MAX_URL_BYTES)),
        ] {
            assert_eq!(Webhook::new(url).validate().expect_err(url).field, "webhook");
        }
        let good = Webhook::new("http://example.com/");
        for pattern in ["", "a*", "a.*.b", "with space", "**"] {
            assert!(good.clone().event(pattern).validate().is_err(), "{pattern}");
        }
        let many = (0..33).fold(good, |hook, n| hook.event(format!("e{n}")));
        assert!(many.validate().is_err());
    }

    #[test]
    fn a_lane_is_the_receiver_whatever_the_spelling_of_its_url() {
        let lane = |url: &str| Webhook::new(url).lane();
        assert_eq!(lane("https://Example.com/a"), lane("https://example.com:443/b?c"));
        assert_eq!(lane("http://127.1/"), "127.0.0.1:80");
        assert_ne!(lane("http://example.com/"), lane("https://example.com/"));
    }
}
