//! The URL of a bus: which broker, where, with which credentials and settings.
//!
//! `SCHEME://USER:PASSWORD@HOST:PORT,HOST:PORT/PATH?NAME=VALUE`; the parts are percent-encoded. Secrets are never
//! shown: what people see of it is [`Address::shown`].

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::time::Duration;

use percent_encoding::percent_decode_str;

use crate::bus::BusError;

/// What every URL may say: certificates for TLS.
const EVERYWHERE: [&str; 3] = ["ca", "cert", "key"];
/// What a broker's URL may say: how long events are kept.
pub(crate) const KEEP_PARAM: &str = "keep";
/// How long a broker keeps events, unless the URL says otherwise.
const KEEP: Duration = Duration::from_secs(7 * 86_400);

/// A URL, taken apart.
#[derive(Clone)]
pub(crate) struct Address {
    pub(crate) scheme: String,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    /// Hosts and ports, at least one.
    pub(crate) hosts: Vec<(String, u16)>,
    /// Without the slash before it; decoded.
    pub(crate) path: Option<String>,
    params: BTreeMap<String, String>,
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown())
    }
}

impl Address {
    /// Reads a URL whose scheme has this port by default, and may have these parameters beside those of all.
    pub(crate) fn parse(url: &str, default_port: u16, known: &[&str]) -> Result<Self, BusError> {
        // The URL itself is not repeated: it has the password in it.
        let wrong = |why: &str| BusError::Invalid(format!("the URL of the bus {why}"));
        let (scheme, rest) =
            url.split_once("://").ok_or_else(|| wrong("has no scheme; write it like nats://HOST:4222"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = match rest.split_once('/') {
            Some((authority, path)) => (authority, Some(path)),
            None => (rest, None),
        };
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let decode = |text: &str| {
            let decoded = percent_decode_str(text).decode_utf8();
            decoded.map(|text| text.into_owned()).map_err(|_| wrong("is not UTF-8 where it is percent-encoded"))
        };
        let (user, password) = match login.map(|login| login.split_once(':').unwrap_or((login, ""))) {
            None => (None, None),
            Some((user, password)) => {
                let part = |text: &str| if text.is_empty() { Ok(None) } else { decode(text).map(Some) };
                (part(user)?, part(password)?)
            }
        };
        let hosts = hosts.split(',').map(|host| host_and_port(host, default_port));
        let hosts =
            hosts.collect::<Option<Vec<_>>>().ok_or_else(|| wrong("needs a host, like HOST or HOST:PORT"))?;
        let mut params = BTreeMap::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if !known.contains(&name) && !EVERYWHERE.contains(&name) {
                let all: Vec<&str> = EVERYWHERE.iter().chain(known).copied().collect();
                return Err(wrong(&format!(
                    "has the unknown parameter '{}'; known are {}",
                    name.escape_debug(),
                    all.join(", ")
                )));
            }
            params.insert(name.to_owned(), decode(value)?);
        }
        let path = path.filter(|path| !path.is_empty()).map(decode).transpose()?;
        Ok(Self { scheme: scheme.to_owned(), user, password, hosts, path, params })
    }

    pub(crate) fn param(&self, name: &str) -> Option<&str> {
        self.params.get(name).map(String::as_str)
    }

    /// A parameter that is a number of at least 1.
    pub(crate) fn number(&self, name: &str) -> Result<Option<u16>, BusError> {
        let number = |text: &str| text.parse().ok().filter(|&number: &u16| number > 0);
        let read = |text: &str| {
            number(text).ok_or_else(|| {
                BusError::Invalid(format!("'{name}' in the URL of the bus must be a number from 1 on"))
            })
        };
        self.param(name).map(read).transpose()
    }

    /// How long events are kept: `keep=7d`; `keep=forever` is `None`.
    pub(crate) fn keep(&self) -> Result<Option<Duration>, BusError> {
        let Some(text) = self.param(KEEP_PARAM) else { return Ok(Some(KEEP)) };
        if text == "forever" {
            return Ok(None);
        }
        let days = text.strip_suffix('d').and_then(|days| days.parse::<u32>().ok());
        let span = match days {
            Some(days) => Some(Duration::from_secs(u64::from(days) * 86_400)),
            None => text.parse::<jiff::SignedDuration>().ok().and_then(|span| Duration::try_from(span).ok()),
        };
        span.filter(|span| span.as_secs() >= 1).map(Some).ok_or_else(|| {
            BusError::Invalid("'keep' in the URL of the bus must be a time like 7d or 12h, or forever".to_owned())
        })
    }

    /// What may be shown: the hosts.
    pub(crate) fn shown(&self) -> String {
        let hosts: Vec<String> = self.hosts.iter().map(|(host, port)| format!("{host}:{port}")).collect();
        hosts.join(",")
    }

    /// The certificates that the URL names, as PEM.
    pub(crate) fn certificates(&self) -> Result<Certificates, BusError> {
        let read = |name: &str| {
            let read = |path: &str| {
                fs::read(path).map_err(|error| {
                    BusError::Invalid(format!(
                        "the file '{path}' ('{name}' in the URL of the bus) cannot be read: {error}"
                    ))
                })
            };
            self.param(name).map(read).transpose()
        };
        let client = match (read("cert")?, read("key")?) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => {
                let why = "the URL of the bus has one of 'cert' and 'key'; a client's certificate needs both";
                return Err(BusError::Invalid(why.to_owned()));
            }
        };
        Ok(Certificates { ca: read("ca")?, client })
    }
}

/// Certificates for TLS, as PEM.
pub(crate) struct Certificates {
    /// Who is trusted instead of the system's authorities.
    pub(crate) ca: Option<Vec<u8>>,
    /// Who we are, and the key.
    pub(crate) client: Option<(Vec<u8>, Vec<u8>)>,
}

fn host_and_port(text: &str, default_port: u16) -> Option<(String, u16)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            (host, rest.strip_prefix(':').or(rest.is_empty().then_some("")))
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, Some("")),
        },
    };
    let port = match port? {
        "" => default_port,
        port => port.parse().ok()?,
    };
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Address, BusError> {
        Address::parse(url, 4222, &[KEEP_PARAM, "replicas"])
    }

    #[test]
    fn a_url_is_taken_apart() {
        let address =
            parse("nats://a%40b:p%3Aw@one,two:99,[::1]:5/a%2Fb?ca=/x%20y&replicas=3").expect("can be read");
        assert_eq!((address.user.as_deref(), address.password.as_deref()), (Some("a@b"), Some("p:w")));
        let host = |name: &str, port| (name.to_owned(), port);
        assert_eq!(address.hosts, [host("one", 4222), host("two", 99), host("::1", 5)]);
        assert_eq!((address.path.as_deref(), address.param("ca")), (Some("a/b"), Some("/x y")));
        assert_eq!(address.number("replicas").expect("a number"), Some(3));
        assert_eq!(parse("nats://h/").expect("can be read").path, None);
    }

    #[test]
    fn what_is_wrong_is_said_without_the_password() {
        for wrong in [
            "nats",
            "nats://",
            "nats://u:secret@",
            "nats://u:secret@h:none",
            "nats://u:secret@h?cq=1",
            "nats://u:secret@h?ca=/does/not/exist",
            "nats://u:secret@h?cert=/does/not/exist",
            "nats://u:secret@h?replicas=0",
            "nats://u:secret@h?keep=long",
        ] {
            let read = |url| {
                let address = parse(url)?;
                address.number("replicas")?;
                address.keep()?;
                address.certificates().map(|_| address)
            };
            let error = read(wrong).expect_err(wrong).to_string();
            assert!(!error.contains("secret") && error.contains("URL of the bus"), "{error}");
        }
        let address = parse("nats://u:secret@h").expect("can be read");
        assert_eq!(format!("{address:?}"), "h:4222");
    }

    #[test]
    fn no_url_is_so_strange_that_its_password_is_shown() {
        use longhaul_hostile::Judged;
        longhaul_hostile::check("broker-urls", 20_000, |text| {
            let url = String::from_utf8_lossy(text);
            let read = Address::parse(&url, 4222, &[KEEP_PARAM, "replicas", "partitions"]);
            // The password of the corpus, unless it was put where it may be shown.
            let told = |shown: &str| shown.contains("p%40ss") || shown.contains("p@ss");
            let (rest, query) = url.split_once('?').unwrap_or((&url, ""));
            let authority =
                rest.split_once("://").map_or("", |(_, rest)| rest.split('/').next().unwrap_or_default());
            let hidden = authority.rsplit_once('@').is_some_and(|(_, hosts)| !told(hosts)) && !told(query);
            let secret = |shown: &str| hidden && told(shown);
            match read {
                Ok(address) => {
                    let refused = [address.number("replicas").err(), address.keep().err()];
                    assert!(
                        !secret(&address.shown())
                            && refused.iter().flatten().all(|error| !secret(&error.to_string()))
                    );
                    Judged::Accepted
                }
                Err(error) => {
                    assert!(!secret(&error.to_string()), "{error}");
                    Judged::Refused
                }
            }
        });
    }

    #[test]
    fn events_are_kept_for_a_week_unless_said_otherwise() {
        let keep = |url| parse(url).and_then(|address| address.keep()).expect("can be read");
        assert_eq!(keep("nats://h"), Some(KEEP));
        assert_eq!(keep("nats://h?keep=2d"), Some(Duration::from_secs(2 * 86_400)));
        assert_eq!(keep("nats://h?keep=90m"), Some(Duration::from_secs(5_400)));
        assert_eq!(keep("nats://h?keep=forever"), None);
    }
}
