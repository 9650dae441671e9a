//! Who asks: tokens, roles, tenants, rates, and the short-lived tokens of one task's stream.
//!
//! Every request under `/v1`, `/api` and `/metrics` goes through [`identify`], which leaves a [`Caller`] behind. A handler
//! says by its argument which role it needs: [`Viewer`], [`Submitter`], [`Operator`] or [`Admin`].

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::StreamExt;
use hmac::{Hmac, KeyInit, Mac};
use http_body_util::{BodyStream, StreamBody};
use jiff::Timestamp;
use longhaul::{Client, Role, TaskId, TokenInfo};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::problem::Problem;
use crate::state::{App, Rate};

/// How long a token that was looked up is believed; so long a revoked one may still be used here.
const BELIEVED: Duration = Duration::from_secs(2);
/// How often it is looked whether the token of an answer that is under way, a stream perhaps, is still good.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// How many tokens are remembered.
const REMEMBERED: usize = 10_000;
/// How long a stream token lives.
const STREAM_TOKEN_LIFE: jiff::SignedDuration = jiff::SignedDuration::from_mins(5);
/// The names of loopback, under which a server without authentication may be called.
const LOOPBACK: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// Who asks, and what they may do.
#[derive(Clone)]
pub(crate) struct Caller {
    /// Whose tasks they see.
    pub(crate) tenant: String,
    pub(crate) role: Role,
    /// Their name in events and audits.
    pub(crate) name: String,
    /// The store as their tenant sees it, under their name.
    pub(crate) client: Client,
    /// The only task whose stream they may read, for a stream token.
    only: Option<TaskId>,
    /// The token they showed.
    secret: Option<Arc<str>>,
}

impl Caller {
    /// Whoever started this process, who can do everything with the store anyway.
    pub(crate) fn local(client: &Client) -> Self {
        Self::new(client, "default", Role::Admin, "local")
    }

    fn new(client: &Client, tenant: &str, role: Role, name: &str) -> Self {
        Self {
            tenant: tenant.to_owned(),
            role,
            name: name.to_owned(),
            client: client.for_tenant(tenant).acting_as(name),
            only: None,
            secret: None,
        }
    }

    /// Returns when their token is no longer good; never for those who need none.
    pub(crate) async fn ends(&self, app: &App) {
        let Some(secret) = &self.secret else { return std::future::pending().await };
        loop {
            tokio::time::sleep(LOOK_AGAIN).await;
            // A store that does not answer ends nothing.
            if let Ok(None) = app.tokens().look_up(&self.client, secret).await {
                return;
            }
        }
    }

    /// Whether they have at least this role.
    pub(crate) fn has(&self, role: Role) -> Result<(), Problem> {
        if self.only.is_some() {
            return Err(Problem::new("forbidden", "a stream token only reads the stream it was made for"));
        }
        if self.role < role {
            let (need, have) = (role.name(), self.role.name());
            let detail = format!("this needs the role {need}; the token '{}' has the role {have}", self.name);
            return Err(Problem::new("forbidden", detail).with("role", need));
        }
        Ok(())
    }

    /// Whether they may read this task's stream.
    pub(crate) fn may_follow(&self, task: TaskId) -> Result<(), Problem> {
        match self.only {
            Some(only) if only == task => Ok(()),
            // As for any task that is not theirs.
            Some(_) => Err(Problem::no_task(&task.to_string())),
            None => self.has(Role::Viewer),
        }
    }
}

/// Finds out who asks, or refuses.
pub(crate) async fn identify(
    State(app): State<App>,
    mut request: Request,
    next: Next,
) -> Result<Response, Problem> {
    if wants_events(request.headers()) {
        // A browser's EventSource never comes back after a refusal: one that reconnects while the server is being
        // started again waits for it.
        app.wait_until_open().await;
    }
    let caller = caller(&app, request.headers(), request.uri()).await?;
    app.rates().take(&caller.tenant)?;
    request.extensions_mut().insert(caller.clone());
    let response = tokio::select! {
        response = next.run(request) => response,
        () = caller.ends(&app) => return Err(no_longer_good()),
    };
    // What is there already is simply sent.
    if caller.secret.is_none() || response.body().size_hint().exact().is_some() {
        return Ok(response);
    }
    Ok(response.map(|body| {
        let ends = Box::pin(async move { caller.ends(&app).await });
        Body::new(StreamBody::new(BodyStream::new(body).take_until(ends)))
    }))
}

fn no_longer_good() -> Problem {
    Problem::new("unauthorized", "the token is unknown, expired or revoked")
}

fn wants_events(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    accept.contains("text/event-stream")
}

async fn caller(app: &App, headers: &HeaderMap, uri: &Uri) -> Result<Caller, Problem> {
    let client = app.client()?;
    if let Some(secret) = bearer(headers)? {
        let token = app.tokens().look_up(client, secret).await?;
        return match token {
            Some(token) => {
                let mut caller = Caller::new(client, &token.tenant, token.role, &token.name);
                caller.secret = Some(secret.into());
                Ok(caller)
            }
            None => Err(no_longer_good()),
        };
    }
    if let Some(token) = query_token(uri) {
        let grant = app.stream_key().open(client, &token).await?;
        let mut caller = Caller::new(client, &grant.tenant, Role::Viewer, &grant.name);
        caller.only = Some(grant.task);
        return Ok(caller);
    }
    if app.auth_required() {
        return Err(Problem::new(
            "unauthorized",
            "send a token: Authorization: Bearer lh_…; `longhaul token create` makes one",
        ));
    }
    known_host(app, headers)?;
    Ok(Caller::local(client))
}

fn bearer(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return Ok(None) };
    let malformed = || Problem::new("unauthorized", "the header Authorization must be 'Bearer' and a token");
    let (scheme, secret) = value.to_str().ok().and_then(|text| text.split_once(' ')).ok_or_else(malformed)?;
    if !scheme.eq_ignore_ascii_case("bearer") {
        return Err(malformed());
    }
    Ok(Some(secret.trim()))
}

/// The stream token of a browser, which cannot set headers.
fn query_token(uri: &Uri) -> Option<String> {
    let query = uri.query()?;
    let token = query.split('&').find_map(|pair| pair.strip_prefix("access_token="))?;
    Some(token.to_owned())
}

/// A page in someone's browser can reach a server on loopback under any name it has a DNS entry for; one
/// without authentication answers to its own names only.
fn known_host(app: &App, headers: &HeaderMap) -> Result<(), Problem> {
    let Some(host) = headers.get(header::HOST).and_then(|host| host.to_str().ok()) else { return Ok(()) };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let known = LOOPBACK.iter().any(|loopback| loopback.eq_ignore_ascii_case(name))
        || app.settings().hosts.iter().any(|host| host.eq_ignore_ascii_case(name));
    known.then_some(()).ok_or_else(|| {
        Problem::new(
            "host_not_allowed",
            "without authentication the server answers only to localhost and to [server] hosts",
        )
    })
}

/// A page of another origin may send requests to any server its browser reaches, and open WebSockets: the browser only
/// says which page asks. Where that may do something, only pages of this server and of the configuration may.
pub(crate) fn own_origin(app: &App, headers: &HeaderMap) -> Result<(), Problem> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or_default();
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes).unwrap_or_default();
    let same =
        origin.split_once("://").is_some_and(|(_, authority)| authority.as_bytes().eq_ignore_ascii_case(host));
    let allowed = app.settings().cors_origins.iter().any(|allowed| allowed == "*" || allowed == origin);
    (same || allowed).then_some(()).ok_or_else(|| {
        Problem::new("forbidden", "pages of this origin may not do this; [server] cors_origins can allow it")
    })
}

macro_rules! roles {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        pub(crate) struct $name(pub(crate) Caller);

        impl FromRequestParts<App> for $name {
            type Rejection = Problem;

            async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Problem> {
                let caller = known(parts)?;
                caller.has(Role::$name)?;
                Ok(Self(caller))
            }
        }
    )*};
}

roles! {
    /// May read.
    Viewer
    /// May submit, too.
    Submitter
    /// May steer tasks, queues and schedules, and decide, too.
    Operator
    /// May make tokens, too.
    Admin
}

/// Anyone who was let in, also with a stream token.
pub(crate) struct Anyone(pub(crate) Caller);

impl FromRequestParts<App> for Anyone {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Problem> {
        known(parts).map(Self)
    }
}

fn known(parts: &Parts) -> Result<Caller, Problem> {
    parts.extensions.get::<Caller>().cloned().ok_or_else(|| Problem::new("internal", "nobody asked who asks"))
}

/// Tokens that were looked up a moment ago.
#[derive(Default)]
pub(crate) struct TokenCache(Mutex<HashMap<[u8; 32], (TokenInfo, Instant)>>);

impl TokenCache {
    async fn look_up(&self, client: &Client, secret: &str) -> Result<Option<TokenInfo>, Problem> {
        let digest: [u8; 32] = Sha256::digest(secret).into();
        let now = client.clock().now();
        let fresh = self
            .lock()
            .get(&digest)
            .filter(|(_, since)| since.elapsed() < BELIEVED)
            .map(|(token, _)| token.clone());
        if let Some(token) = fresh {
            return Ok(Some(token).filter(|token| token.expires_at.is_none_or(|at| at > now)));
        }
        let found = client.authenticate(secret).await?;
        let mut cache = self.lock();
        match &found {
            Some(token) => {
                if cache.len() >= REMEMBERED {
                    cache.retain(|_, (_, since)| since.elapsed() < BELIEVED);
                }
                if cache.len() < REMEMBERED {
                    cache.insert(digest, (token.clone(), Instant::now()));
                }
            }
            None => drop(cache.remove(&digest)),
        }
        Ok(found)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<[u8; 32], (TokenInfo, Instant)>> {
        // Every change is one call: a panic leaves a usable map.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How much each tenant may still ask for.
pub(crate) struct Rates {
    rates: BTreeMap<String, Rate>,
    buckets: Mutex<HashMap<String, Bucket>>,
}

struct Bucket {
    left: f64,
    since: Instant,
}

impl Rates {
    pub(crate) fn new(rates: BTreeMap<String, Rate>) -> Self {
        Self { rates, buckets: Mutex::default() }
    }

    fn take(&self, tenant: &str) -> Result<(), Problem> {
        let Some(rate) = self.rates.get(tenant).or_else(|| self.rates.get("*")) else { return Ok(()) };
        let now = Instant::now();
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let full = f64::from(rate.burst.max(1));
        let bucket = buckets.entry(tenant.to_owned()).or_insert(Bucket { left: full, since: now });
        bucket.left = (bucket.left + now.duration_since(bucket.since).as_secs_f64() * rate.per_second).min(full);
        bucket.since = now;
        if bucket.left >= 1.0 {
            bucket.left -= 1.0;
            return Ok(());
        }
        let after = Duration::try_from_secs_f64((1.0 - bucket.left) / rate.per_second).unwrap_or(Duration::MAX);
        let after = after.min(Duration::from_secs(3600));
        let detail = format!("tenant '{tenant}' may ask {} times a second; try again later", rate.per_second);
        Err(Problem::new("rate_limited", detail).retry_after(after))
    }
}

/// Signs the tokens of streams. The key is kept in the store, so that every server of a cluster has the same.
#[derive(Default)]
pub(crate) struct StreamKey(tokio::sync::OnceCell<Vec<u8>>);

/// What a stream token says.
#[derive(Serialize, Deserialize)]
struct Grant {
    task: TaskId,
    tenant: String,
    name: String,
    until: Timestamp,
}

impl StreamKey {
    /// A token for one task's stream, and until when it is good.
    pub(crate) async fn grant(&self, caller: &Caller, task: TaskId) -> Result<(String, Timestamp), Problem> {
        let until = caller.client.clock().now().saturating_add(STREAM_TOKEN_LIFE).unwrap_or(Timestamp::MAX);
        let grant = Grant { task, tenant: caller.tenant.clone(), name: caller.name.clone(), until };
        let grant = serde_json::to_vec(&grant).map_err(|_| Problem::new("internal", "cannot write the token"))?;
        let mac = self.mac(&caller.client, &grant).await?.finalize().into_bytes();
        Ok((format!("{}.{}", URL_SAFE_NO_PAD.encode(grant), URL_SAFE_NO_PAD.encode(mac)), until))
    }

    async fn open(&self, client: &Client, token: &str) -> Result<Grant, Problem> {
        let bad = || Problem::new("unauthorized", "the stream token is malformed or expired; get a new one");
        let (grant, mac) = token.split_once('.').ok_or_else(bad)?;
        let (grant, mac) = (URL_SAFE_NO_PAD.decode(grant), URL_SAFE_NO_PAD.decode(mac));
        let (Ok(grant), Ok(mac)) = (grant, mac) else { return Err(bad()) };
        self.mac(client, &grant).await?.verify_slice(&mac).map_err(|_| bad())?;
        let grant: Grant = serde_json::from_slice(&grant).map_err(|_| bad())?;
        if grant.until <= client.clock().now() {
            return Err(bad());
        }
        Ok(grant)
    }

    async fn mac(&self, client: &Client, grant: &[u8]) -> Result<Hmac<Sha256>, Problem> {
        let key = self.0.get_or_try_init(|| client.kept_secret("stream_key")).await?;
        let mac = Hmac::<Sha256>::new_from_slice(key)
            .map_err(|_| Problem::new("internal", "the stream key is unusable"))?;
        Ok(mac.chain_update(grant))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_let_through_and_then_the_rate() {
        let rates = Rates::new([("a".to_owned(), Rate { per_second: 0.001, burst: 3 })].into());
        for _ in 0..3 {
            rates.take("a").expect("within the burst");
        }
        assert_eq!(rates.take("a").expect_err("over it").code(), "rate_limited");
        rates.take("b").expect("another tenant is not concerned");
    }
}
