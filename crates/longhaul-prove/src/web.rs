//! A client over HTTP. An answer that never came (the connection was cut, the server was killed) means that nothing is known: whoever
//! asked repeats it, a submit under the same key. Every answer is searched for the markers of other tenants.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use longhaul::{State, TaskId};
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::Anyhow;
use crate::chance::Chance;
use crate::history::carried;
use crate::program::{TENANTS, marker};
use crate::records::{Answer, Records, Sight};
use crate::serve::{Wires, use_tls};

/// How long an answer may take; a server that is frozen gives none.
const PATIENCE: Duration = Duration::from_secs(15);

/// An answer.
#[derive(Clone, Debug)]
pub struct Said {
    /// Its status.
    pub status: u16,
    /// Its body; a text that is no JSON as a string.
    pub body: Value,
}

impl Said {
    fn task(&self) -> Option<TaskId> {
        self.body["id"].as_str()?.parse().ok()
    }

    fn state(&self) -> Option<State> {
        serde_json::from_value(self.body["state"].clone()).ok()
    }
}

/// A request.
#[derive(Debug)]
pub struct Asking<'a> {
    method: Method,
    path: &'a str,
    headers: Vec<(&'static str, String)>,
    body: Option<String>,
    /// When the client leaves without waiting for the answer.
    leave: Option<Duration>,
}

impl<'a> Asking<'a> {
    /// A GET.
    pub fn get(path: &'a str) -> Self {
        Self { method: Method::GET, path, headers: Vec::new(), body: None, leave: None }
    }

    /// A POST of JSON.
    pub fn post(path: &'a str, body: &Value) -> Self {
        Self { method: Method::POST, body: Some(body.to_string()), ..Self::get(path) }
    }

    /// A POST of this text.
    pub fn post_text(path: &'a str, body: String) -> Self {
        Self { method: Method::POST, body: Some(body), ..Self::get(path) }
    }

    /// A PATCH of JSON.
    pub fn patch(path: &'a str, body: &Value) -> Self {
        Self { method: Method::PATCH, ..Self::post(path, body) }
    }

    /// With a header.
    pub fn header(mut self, name: &'static str, value: impl ToString) -> Self {
        self.headers.push((name, value.to_string()));
        self
    }

    /// The client leaves after this time.
    pub fn leaving(mut self, after: Option<Duration>) -> Self {
        self.leave = after;
        self
    }
}

/// See the module.
#[derive(Debug)]
pub struct Web {
    http: reqwest::Client,
    wires: Wires,
    turn: AtomicUsize,
    records: Arc<Records>,
    /// The newest task that is known of each tenant.
    known: Mutex<[Option<TaskId>; 2]>,
}

impl Web {
    /// A client of these servers, who notes what it sees.
    pub fn new(wires: Wires, records: Arc<Records>) -> Result<Self, Anyhow> {
        use_tls();
        let http = reqwest::Client::builder().no_proxy().connect_timeout(PATIENCE).build()?;
        Ok(Self { http, wires, turn: AtomicUsize::new(0), records, known: Mutex::default() })
    }

    /// Where the servers are, and all else.
    pub fn wires(&self) -> &Wires {
        &self.wires
    }

    /// One server after the other.
    pub fn server(&self) -> SocketAddr {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        // There is at least one.
        self.wires.servers[turn % self.wires.servers.len()]
    }

    /// The token of a tenant.
    pub fn token(&self, tenant: &str) -> &str {
        self.wires.tokens.get(tenant).map_or("", String::as_str)
    }

    /// A request to one of the servers, with the tenant's token.
    pub fn request(&self, tenant: &str, asking: &Asking<'_>) -> RequestBuilder {
        let url = format!("http://{}{}", self.server(), asking.path);
        let mut request = self.http.request(asking.method.clone(), url).bearer_auth(self.token(tenant));
        for (name, value) in &asking.headers {
            request = request.header(*name, value);
        }
        match &asking.body {
            Some(body) => request.header("content-type", "application/json").body(body.clone()),
            None => request,
        }
    }

    /// Asks. `Err`: there was no answer, and nobody knows.
    pub async fn ask(&self, tenant: &str, asking: Asking<'_>) -> Result<Said, String> {
        let answer = self.answer(tenant, &asking, false).await;
        if let Ok(Some(task)) = answer.as_ref().map(Said::task) {
            self.knows(tenant, task);
        }
        answer
    }

    async fn answer(&self, tenant: &str, asking: &Asking<'_>, foreign: bool) -> Result<Said, String> {
        let answering = async {
            let response = self.request(tenant, asking).send().await?;
            let status = response.status().as_u16();
            Ok::<_, reqwest::Error>((status, response.text().await?))
        };
        let answer = tokio::time::timeout(asking.leave.unwrap_or(PATIENCE), answering).await;
        let (status, text) =
            answer.map_err(|_| "the client left".to_owned())?.map_err(|error| format!("{error:?}"))?;
        let carries: Vec<String> = carried(&text).into_iter().map(str::to_owned).collect();
        if foreign || asking.method != Method::GET || carries.iter().any(|other| other != tenant) {
            let what = format!("{} {}", asking.method, asking.path);
            let sight = Sight { tenant: tenant.to_owned(), what, status, foreign, carries };
            self.records.saw(sight).map_err(|error| error.to_string())?;
        }
        let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
        Ok(Said { status, body })
    }

    fn knows(&self, tenant: &str, task: TaskId) {
        if let Some(place) = TENANTS.iter().position(|known| *known == tenant) {
            self.known.lock().unwrap_or_else(PoisonError::into_inner)[place] = Some(task);
        }
    }

    /// Looks at what a tenant can see, in lists and searches, and asks for what it must not see.
    pub async fn look_around(&self, tenant: &str, own: TaskId, chance: &mut Chance) {
        let known = *self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let other = TENANTS.iter().zip(known).find(|(known, _)| **known != tenant);
        let other_marker = other.map(|(tenant, _)| marker(tenant)).unwrap_or_default();
        let paths = [
            "/v1/tasks?limit=20".to_owned(),
            format!("/v1/tasks?q={other_marker}&limit=20"),
            "/v1/tasks?q=mark-of&limit=20&order=created_at".to_owned(),
            format!("/v1/tasks/{own}"),
            format!("/v1/tasks/{own}/steps"),
            "/v1/approvals".to_owned(),
            "/v1/stats".to_owned(),
        ];
        // What does not come is not seen.
        let path: &String = chance.one_of(&paths);
        let _ = self.answer(tenant, &Asking::get(path), false).await;
        let Some((_, Some(other))) = other else { return };
        let (path, nothing) = (format!("/v1/tasks/{other}"), json!({}));
        let _ = match chance.between(0, 9) {
            0 | 1 => self.answer(tenant, &Asking::get(&path), true).await,
            2 => self.answer(tenant, &Asking::get(&format!("{path}/events")), true).await,
            3 => self.answer(tenant, &Asking::get(&format!("{path}/steps")), true).await,
            4 => self.answer(tenant, &Asking::get(&format!("{path}/export")), true).await,
            5 => self.answer(tenant, &Asking::post(&format!("{path}/cancel"), &nothing), true).await,
            6 => self.answer(tenant, &Asking::post(&format!("{path}/signals/go1"), &nothing), true).await,
            7 => self.answer(tenant, &Asking::post(&format!("{path}/undo"), &nothing), true).await,
            8 => self.answer(tenant, &Asking::post(&format!("{path}/resume"), &nothing), true).await,
            _ => {
                let fork = json!({"from_step": "s1"});
                self.answer(tenant, &Asking::post(&format!("{path}/fork"), &fork), true).await
            }
        };
    }
}

/// What an answer means for the one who asked; `task` is the one that is meant unless the answer names it.
pub fn answer_of(task: Option<TaskId>, said: &Result<Said, String>) -> Answer {
    match said {
        Err(why) => Answer::Unknown { why: why.clone() },
        Ok(said) => match (said.status, said.task().or(task)) {
            (200..=299, Some(task)) => Answer::Done { task, state: said.state() },
            // The server did not do it, or does not know whether it was done.
            (408 | 429 | 500.., _) => Answer::Unknown { why: format!("{} {}", said.status, said.body["code"]) },
            _ => Answer::Refused { why: format!("{} {}", said.status, said.body) },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_came_is_unknown_and_what_was_refused_is_not_done() {
        let task = TaskId::new();
        let said = |status, body| answer_of(Some(task), &Ok(Said { status, body }));
        assert!(matches!(answer_of(Some(task), &Err("cut".into())), Answer::Unknown { .. }));
        assert!(matches!(said(503, json!({"code": "store_unavailable"})), Answer::Unknown { .. }));
        assert!(matches!(said(409, json!({"code": "wrong_state"})), Answer::Refused { .. }));
        let other = TaskId::new();
        let named = said(202, json!({"id": other.to_string(), "state": "pending"}));
        assert_eq!(named, Answer::Done { task: other, state: Some(State::Pending) });
        assert_eq!(said(202, json!({})), Answer::Done { task, state: None });
    }
}
