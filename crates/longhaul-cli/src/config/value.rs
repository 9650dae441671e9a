//! What a value can be, and how each kind is read from text (flags, environment) and from TOML.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use longhaul_agent::manifest::nearest;
use serde_json::Value;

use crate::units;

/// A kind of value.
pub(super) trait Setting: Sized {
    /// The remedy when it cannot be read.
    const HELP: &'static str;
    /// Whether it may come from a file that the environment names, and is not shown.
    const SECRET: bool = false;

    fn from_text(text: &str) -> Result<Self, String>;

    /// From TOML, which was made JSON.
    fn from_json(value: &Value) -> Result<Self, String> {
        match value {
            Value::String(text) => Self::from_text(text),
            other => Err(format!("must be a string, not {}", kind(other))),
        }
    }

    /// For people; without what is secret.
    fn show(&self) -> String;
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(number) if number.is_f64() => "a fraction",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "a table",
    }
}

/// Nothing may be set.
impl<T: Setting> Setting for Option<T> {
    const HELP: &'static str = T::HELP;
    const SECRET: bool = T::SECRET;

    fn from_text(text: &str) -> Result<Self, String> {
        T::from_text(text).map(Some)
    }

    fn from_json(value: &Value) -> Result<Self, String> {
        T::from_json(value).map(Some)
    }

    fn show(&self) -> String {
        self.as_ref().map_or("-".to_owned(), T::show)
    }
}

impl Setting for String {
    const HELP: &'static str = "write a text that is not empty";

    fn from_text(text: &str) -> Result<Self, String> {
        if text.is_empty() { Err("is empty".to_owned()) } else { Ok(text.to_owned()) }
    }

    fn show(&self) -> String {
        self.clone()
    }
}

impl Setting for PathBuf {
    const HELP: &'static str = "name a folder";

    fn from_text(text: &str) -> Result<Self, String> {
        String::from_text(text).map(PathBuf::from)
    }

    fn show(&self) -> String {
        self.display().to_string()
    }
}

impl Setting for Vec<String> {
    const HELP: &'static str = "write a list of strings, like [\"a\", \"b\"]; in the environment: a,b";

    fn from_text(text: &str) -> Result<Self, String> {
        Ok(text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect())
    }

    fn from_json(value: &Value) -> Result<Self, String> {
        let Value::Array(items) = value else {
            return Err(format!("must be a list of strings, not {}", kind(value)));
        };
        let strings = items.iter().map(|item| match item {
            Value::String(text) => Ok(text.clone()),
            other => Err(format!("must be a list of strings only; it has {}", kind(other))),
        });
        strings.collect()
    }

    fn show(&self) -> String {
        if self.is_empty() { "-".to_owned() } else { self.join(", ") }
    }
}

impl Setting for bool {
    const HELP: &'static str = "write true or false";

    fn from_text(text: &str) -> Result<Self, String> {
        match text {
            "true" | "1" | "yes" | "on" => Ok(true),
            "false" | "0" | "no" | "off" => Ok(false),
            other => Err(format!("'{other}' is neither true nor false")),
        }
    }

    fn from_json(value: &Value) -> Result<Self, String> {
        value.as_bool().ok_or_else(|| format!("must be true or false, not {}", kind(value)))
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Setting for u64 {
    const HELP: &'static str = "write a whole number that is not negative";

    fn from_text(text: &str) -> Result<Self, String> {
        text.trim().parse().map_err(|_| format!("'{text}' is not a whole number"))
    }

    fn from_json(value: &Value) -> Result<Self, String> {
        value.as_u64().ok_or_else(|| match value {
            Value::Number(number) => format!("is {number}"),
            other => format!("must be a whole number, not {}", kind(other)),
        })
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Setting for u32 {
    const HELP: &'static str = "write a whole number up to 4294967295";

    fn from_text(text: &str) -> Result<Self, String> {
        u64::from_text(text).and_then(small)
    }

    fn from_json(value: &Value) -> Result<Self, String> {
        u64::from_json(value).and_then(small)
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

fn small(number: u64) -> Result<u32, String> {
    u32::try_from(number).map_err(|_| format!("is {number}, which is too large"))
}

impl Setting for f64 {
    const HELP: &'static str = "write a number above 0, like 50 or 0.5";

    fn from_text(text: &str) -> Result<Self, String> {
        let number: f64 = text.trim().parse().map_err(|_| format!("'{text}' is not a number"))?;
        if number.is_finite() && number > 0.0 { Ok(number) } else { Err(format!("is {number}")) }
    }

    fn from_json(value: &Value) -> Result<Self, String> {
        match value {
            Value::Number(number) => Self::from_text(&number.to_string()),
            other => Err(format!("must be a number, not {}", kind(other))),
        }
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Setting for Duration {
    const HELP: &'static str = units::TIME_HELP;

    fn from_text(text: &str) -> Result<Self, String> {
        units::duration(text)
    }

    fn from_json(value: &Value) -> Result<Self, String> {
        match value {
            Value::String(text) => units::duration(text),
            Value::Number(number) => Err(format!("must be a time with its unit, like \"{number}s\"")),
            other => Err(format!("must be a time, not {}", kind(other))),
        }
    }

    fn show(&self) -> String {
        units::show(*self)
    }
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) u64);

impl Setting for Bytes {
    const HELP: &'static str = "write it like \"4MiB\", \"512KB\" or a number of bytes";

    fn from_text(text: &str) -> Result<Self, String> {
        units::bytes(text).map(Self)
    }

    fn from_json(value: &Value) -> Result<Self, String> {
        match value {
            Value::String(text) => Self::from_text(text),
            other => u64::from_json(other).map(Self),
        }
    }

    fn show(&self) -> String {
        units::show_bytes(self.0)
    }
}

impl Setting for SocketAddr {
    const HELP: &'static str = "write address and port, like \"127.0.0.1:7171\" or \"[::]:7171\"";

    fn from_text(text: &str) -> Result<Self, String> {
        // A name that means the same on every machine; others could have many addresses.
        if let Some(port) = text.strip_prefix("localhost:").and_then(|port| port.parse().ok()) {
            return Ok(Self::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
        }
        text.parse().map_err(|_| format!("'{text}' is not an address with a port"))
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogForm {
    Human,
    Json,
}

impl Setting for LogForm {
    const HELP: &'static str = "write human or json";

    fn from_text(text: &str) -> Result<Self, String> {
        match text {
            "human" => Ok(Self::Human),
            "json" => Ok(Self::Json),
            other => Err(format!("'{other}' is neither human nor json")),
        }
    }

    fn show(&self) -> String {
        match self {
            Self::Human => "human".to_owned(),
            Self::Json => "json".to_owned(),
        }
    }
}

/// How events on the bus are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventForm {
    Structured,
    Binary,
}

impl Setting for EventForm {
    const HELP: &'static str = "write structured or binary";

    fn from_text(text: &str) -> Result<Self, String> {
        match text {
            "structured" => Ok(Self::Structured),
            "binary" => Ok(Self::Binary),
            other => Err(format!("'{other}' is neither structured nor binary")),
        }
    }

    fn show(&self) -> String {
        match self {
            Self::Structured => "structured".to_owned(),
            Self::Binary => "binary".to_owned(),
        }
    }
}

/// Something that never reaches a log, a message or a report.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(String);

impl Secret {
    /// For where it must be told.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The secrets that sign webhooks: the first for new ones, all while they rotate.
impl Setting for Vec<Secret> {
    const HELP: &'static str = "write \"whsec_\" and base64, or a list of such while secrets rotate";
    const SECRET: bool = true;

    fn from_text(text: &str) -> Result<Self, String> {
        Vec::<String>::from_text(text).and_then(signing)
    }

    fn from_json(value: &Value) -> Result<Self, String> {
        match value {
            Value::String(text) => Self::from_text(text),
            other => Vec::<String>::from_json(other).and_then(signing),
        }
    }

    fn show(&self) -> String {
        match self.len() {
            0 => "-".to_owned(),
            1 => "set".to_owned(),
            many => format!("{many} are set"),
        }
    }
}

fn signing(secrets: Vec<String>) -> Result<Vec<Secret>, String> {
    if secrets.iter().any(|secret| secret.strip_prefix("whsec_").is_none_or(str::is_empty)) {
        return Err("must begin with whsec_".to_owned());
    }
    Ok(secrets.into_iter().map(Secret).collect())
}

/// An address that may have a password in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address(pub(super) String);

impl Setting for Address {
    const HELP: &'static str = "a store is sqlite:PATH, postgres://USER@HOST/DATABASE or memory:";
    const SECRET: bool = true;

    fn from_text(text: &str) -> Result<Self, String> {
        String::from_text(text).map(Self)
    }

    fn show(&self) -> String {
        without_password(&self.0)
    }
}

/// The address of a broker or a lock service, which may have a password in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServiceUrl(pub(super) String);

impl Setting for ServiceUrl {
    const HELP: &'static str =
        "write it like nats://USER:PASSWORD@HOST:4222; docs/bus.md and docs/locks.md have all forms";
    const SECRET: bool = true;

    fn from_text(text: &str) -> Result<Self, String> {
        String::from_text(text).map(Self)
    }

    fn show(&self) -> String {
        without_password(&self.0)
    }
}

/// `postgres://me:…@host/db`, also where the password is a parameter, and where the URL is not one: its scheme was forgotten, or
/// the password not encoded.
fn without_password(url: &str) -> String {
    if url.starts_with("sqlite:") {
        return url.to_owned();
    }
    let (scheme, rest) = match url.find("://") {
        Some(at) => url.split_at(at + 3),
        None => ("", url),
    };
    let mut end = rest.find(['/', '?']).unwrap_or(rest.len());
    if let Some((login, _)) = rest.rsplit_once('@')
        && login.contains(':')
        && !rest[..end].contains('@')
    {
        end = login.len() + 1;
    }
    let (authority, tail) = rest.split_at(end);
    let authority = match authority.rsplit_once('@') {
        Some((user, host)) => match user.split_once(':') {
            Some((user, _)) => format!("{user}:…@{host}"),
            None => authority.to_owned(),
        },
        None => authority.to_owned(),
    };
    let tail = match tail.split_once('?') {
        Some((path, query)) => {
            let parts = query.split('&').map(|part| match part.split_once('=') {
                Some((name, _)) if name.contains("password") || name == "token" => format!("{name}=…"),
                _ => part.to_owned(),
            });
            format!("{path}?{}", parts.collect::<Vec<_>>().join("&"))
        }
        None => tail.to_owned(),
    };
    format!("{scheme}{authority}{tail}")
}

/// A webhook endpoint of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) name: String,
    pub(crate) url: String,
    /// Patterns of event types; empty: the final events.
    pub(crate) events: Vec<String>,
    pub(crate) tenant: String,
}

impl Setting for Vec<Endpoint> {
    const HELP: &'static str =
        "write [[webhook.endpoints]] with name, url and, if you want, events = [\"task.failed\"] and tenant";

    fn from_text(_: &str) -> Result<Self, String> {
        Err("cannot be given as text".to_owned())
    }

    fn from_json(value: &Value) -> Result<Self, String> {
        let Value::Array(items) = value else { return Err(format!("must be tables, not {}", kind(value))) };
        items.iter().map(endpoint).collect()
    }

    fn show(&self) -> String {
        let all = self.iter().map(|endpoint| format!("{} ({})", endpoint.name, without_password(&endpoint.url)));
        let all: Vec<String> = all.collect();
        all.show()
    }
}

fn endpoint(value: &Value) -> Result<Endpoint, String> {
    const KEYS: [&str; 4] = ["events", "name", "tenant", "url"];
    let Value::Object(fields) = value else { return Err(format!("must be tables; it has {}", kind(value))) };
    if let Some(unknown) = fields.keys().find(|key| !KEYS.contains(&key.as_str())) {
        let near = nearest(unknown, KEYS).map_or(String::new(), |near| format!("; did you mean '{near}'?"));
        return Err(format!("has an endpoint with the unknown key '{unknown}'{near}"));
    }
    let text = |key: &str| match fields.get(key) {
        None => Ok(None),
        Some(value) => {
            String::from_json(value).map(Some).map_err(|why| format!("has an endpoint whose '{key}' {why}"))
        }
    };
    let must = |key: &str| text(key)?.ok_or_else(|| format!("has an endpoint without '{key}'"));
    Ok(Endpoint {
        name: must("name")?,
        url: must("url")?,
        events: fields.get("events").map_or(Ok(Vec::new()), Vec::<String>::from_json)?,
        tenant: text("tenant")?.unwrap_or_else(|| "default".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_not_shown() {
        assert_eq!(without_password("postgres://me:pw@db:5432/x?a=b"), "postgres://me:…@db:5432/x?a=b");
        assert_eq!(
            without_password("postgres://me@db/x?user=a&password=pw"),
            "postgres://me@db/x?user=a&password=…"
        );
        assert_eq!(without_password("nats://u:p@ss@host"), "nats://u:…@host");
        assert_eq!(without_password("sqlite:a@b:c"), "sqlite:a@b:c");
        assert_eq!(without_password("nats://u:pw@host?token=pw"), "nats://u:…@host?token=…");
        for plain in ["memory:", "store:", "nats://127.0.0.1:4222", "https://example.com:8443/hook?x=1"] {
            assert_eq!(without_password(plain), plain);
        }
    }

    #[test]
    fn the_password_of_a_url_that_is_none_is_not_shown_either() {
        assert_eq!(without_password("u:pw@host:4222/x?token=pw"), "u:…@host:4222/x?token=…");
        assert_eq!(without_password("nats:u:pw@host"), "nats:…@host");
        assert_eq!(without_password("nats:/u:pw@host"), "nats:…@host");
        assert_eq!(without_password("nats://u:p/w?x@host/y"), "nats://u:…@host/y");
        assert_eq!(format!("{:?}", Secret("whsec_x".to_owned())), "Secret(…)");
    }
}
