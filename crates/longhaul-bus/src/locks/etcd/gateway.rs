//! etcd's JSON gateway: requests under `/v3/`, keys and values in base64, numbers as text.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use longhaul::lock::LockServiceError;
use reqwest::{Client, redirect};
use serde_json::{Value, json};

use super::super::wrong_url;
use crate::address::Address;
use crate::tls::client_config;

/// How long a member may take for one request. Then another one is asked.
const TIMEOUT: Duration = Duration::from_millis(900);
/// The largest answer that is read.
const MAX_ANSWER: usize = 1024 * 1024;
/// gRPC's code for one who is not known, or not any more.
const UNAUTHENTICATED: i64 = 16;

/// The way to the members.
pub(super) struct Gateway {
    client: Client,
    /// `http://HOST:PORT` of each.
    members: Vec<String>,
    /// Which of them is asked.
    current: AtomicUsize,
    login: Option<(String, String)>,
    /// What etcd gave for the login, until it forgets it.
    token: Mutex<Option<String>>,
}

/// What etcd did not want to do.
pub(super) struct Refused {
    code: i64,
    pub(super) why: String,
}

impl From<Refused> for LockServiceError {
    fn from(refused: Refused) -> Self {
        Gateway::refused(refused.why)
    }
}

impl Gateway {
    pub(super) fn new(address: &Address) -> Result<Self, LockServiceError> {
        let wrong =
            |why: String| LockServiceError::Url(format!("the URL of the lock service cannot be used: {why}"));
        if address.path.is_some() {
            return Err(wrong("etcd's has no path".to_owned()));
        }
        let tls = client_config(&address.certificates().map_err(wrong_url)?).map_err(wrong_url)?;
        let client = Client::builder()
            .tls_backend_preconfigured(tls)
            .connect_timeout(TIMEOUT)
            .timeout(TIMEOUT)
            .redirect(redirect::Policy::none())
            .no_proxy()
            .build()
            .map_err(|error| wrong(error.to_string()))?;
        let scheme = if address.scheme == "etcds" { "https" } else { "http" };
        let member = |(host, port): &(String, u16)| match host.contains(':') {
            true => format!("{scheme}://[{host}]:{port}"),
            false => format!("{scheme}://{host}:{port}"),
        };
        let login = match (&address.user, &address.password) {
            (Some(user), Some(password)) => Some((user.clone(), password.clone())),
            (None, None) => None,
            _ => return Err(wrong("etcd needs both a user and a password, or neither".to_owned())),
        };
        let members = address.hosts.iter().map(member).collect();
        Ok(Self { client, members, current: AtomicUsize::new(0), login, token: Mutex::default() })
    }

    pub(super) fn refused(why: String) -> LockServiceError {
        LockServiceError::Refused { service: "etcd".to_owned(), why }
    }

    /// Asks something that etcd does unless something is wrong.
    pub(super) async fn ask(&self, what: &str, body: &Value) -> Result<Value, LockServiceError> {
        Ok(self.try_ask(what, body).await??)
    }

    /// Asks, as the user of the URL if it names one; logs in when that was never done or is forgotten.
    pub(super) async fn try_ask(
        &self,
        what: &str,
        body: &Value,
    ) -> Result<Result<Value, Refused>, LockServiceError> {
        let Some(login) = &self.login else { return self.send(what, body, None).await };
        let known = self.token.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(token) = known {
            match self.send(what, body, Some(&token)).await? {
                Err(refused) if refused.code == UNAUTHENTICATED || refused.why.contains("invalid auth token") => {}
                answer => return Ok(answer),
            }
        }
        let token = self.log_in(login).await?;
        let answer = self.send(what, body, Some(&token)).await;
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(token);
        answer
    }

    async fn log_in(&self, (user, password): &(String, String)) -> Result<String, LockServiceError> {
        let answer = self.send("auth/authenticate", &json!({"name": user, "password": password}), None).await?;
        let answer = answer.map_err(|refused| {
            let hint = if refused.why.contains("not enabled") {
                "; leave user and password out of the URL"
            } else {
                "; check the user and the password in the URL"
            };
            Self::refused(format!("{}{hint}", refused.why))
        })?;
        let token = answer["token"].as_str().map(str::to_owned);
        token.ok_or_else(|| Self::refused("it gave no token for the login".to_owned()))
    }

    /// Asks one member after the other until one answers.
    async fn send(
        &self,
        what: &str,
        body: &Value,
        token: Option<&str>,
    ) -> Result<Result<Value, Refused>, LockServiceError> {
        let first = self.current.load(Ordering::Relaxed);
        let mut why = String::new();
        for turn in first..first + self.members.len() {
            let member = &self.members[turn % self.members.len()];
            // Also when nobody waits for the answer any more, the next one to ask is another.
            self.current.store(turn + 1, Ordering::Relaxed);
            match self.send_to(member, what, body, token).await {
                Ok(answer) => {
                    self.current.store(turn, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(error) => why = with_causes(&error),
            }
        }
        Err(LockServiceError::Unavailable { service: "etcd".to_owned(), why })
    }

    async fn send_to(
        &self,
        member: &str,
        what: &str,
        body: &Value,
        token: Option<&str>,
    ) -> Result<Result<Value, Refused>, Trouble> {
        let mut request = self.client.post(format!("{member}/v3/{what}")).body(body.to_string());
        if let Some(token) = token {
            request = request.header("Authorization", token);
        }
        let mut response = request.send().await.map_err(reqwest::Error::without_url)?;
        let status = response.status();
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(reqwest::Error::without_url)? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() > MAX_ANSWER {
                return Err(Trouble::Answer(format!("an answer of more than {MAX_ANSWER} bytes")));
            }
        }
        let answer: Value = serde_json::from_slice(&bytes)
            .map_err(|_| Trouble::Answer(format!("an answer that is not etcd's, with status {status}")))?;
        // A stream tells its error inside.
        let error = if answer["error"].is_object() { &answer["error"] } else { &answer };
        let said = error["message"].as_str().or(error["error"].as_str());
        match said {
            None if status.is_success() => Ok(Ok(answer)),
            None => Err(Trouble::Answer(format!("status {status}"))),
            Some(why) => {
                let code = error["code"].as_i64().or(error["grpc_code"].as_i64()).unwrap_or(0);
                // The member has no leader, or is not ready: another one may do better.
                if code == 14 || code == 4 || status.is_server_error() && code == 0 {
                    return Err(Trouble::Answer(why.to_owned()));
                }
                Ok(Err(Refused { code, why: why.to_owned() }))
            }
        }
    }
}

/// Why a member gave no answer.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error(transparent)]
    Http(#[from] reqwest::Error),
    #[error("{0}")]
    Answer(String),
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

pub(super) fn encoded(text: &str) -> String {
    BASE64.encode(text)
}

/// A key or a value of an answer.
pub(super) fn text(value: &Value) -> Option<String> {
    String::from_utf8(BASE64.decode(value.as_str()?).ok()?).ok()
}

/// A number of an answer.
pub(super) fn number(value: &Value) -> Option<i64> {
    value.as_str()?.parse().ok()
}
