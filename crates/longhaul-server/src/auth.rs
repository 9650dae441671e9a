//! Who asks: tokens, roles, tenants, rates, and the short-lived tokens of one task's stream.
//!
//! Every request under `/v1`, `/api`, `/mcp` and `/metrics` goes through [`identify`], which refuses what pages of other origins
//! may not do and leaves a [`Caller`] behind. A handler says by its argument which role it needs: [`Viewer`], [`Submitter`], [`Operator`] or [`Admin`].

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
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::Uuid;

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
    /// What let them in, if they had to show anything.
    shown: Option<Shown>,
}

/// What someone showed to be let in.
#[derive(Clone)]
enum Shown {
    /// A token.
    Secret(Arc<str>),
    /// A session of the dashboard, begun with the token of this id.
    Session(Uuid),
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
            shown: None,
        }
    }

    /// Who signed in to the dashboard with this token.
    pub(crate) fn of_session(client: &Client, token: &TokenInfo) -> Self {
        let shown = Some(Shown::Session(token.id));
        Self { shown, ..Self::new(client, &token.tenant, token.role, &token.name) }
    }

    /// Returns when their token is no longer good; never for those who need none.
    pub(crate) async fn ends(&self, app: &App) {
        let Some(shown) = &self.shown else { return std::future::pending().await };
        loop {
            tokio::time::sleep(LOOK_AGAIN).await;
            let found = match shown {
                Shown::Secret(secret) => app.tokens().look_up(&self.client, secret).await,
                Shown::Session(token) => app.tokens().by_id(&self.client, &self.tenant, *token).await,
            };
            // A store that does not answer ends nothing.
            if let Ok(None) = found {
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
pub(crate) async fn identify(State(app): State<App>, request: Request, next: Next) -> Result<Response, Problem> {
    if wants_events(request.headers()) {
        // A browser's EventSource never comes back after a refusal: one that reconnects while the server is being
        // started again waits for it.
        app.wait_until_open().await;
    }
    let caller = caller(&app, request.headers(), request.uri()).await?;
    if only_for_own_pages(&request, &caller) {
        own_origin(&app, request.headers())?;
    }
    answer(app, caller, request, next).await
}

/// Answers someone who is known, for as long as they may ask.
pub(crate) async fn answer(
    app: App,
    caller: Caller,
    mut request: Request,
    next: Next,
) -> Result<Response, Problem> {
    app.rates().take(&caller.tenant)?;
    request.extensions_mut().insert(caller.clone());
    let response = tokio::select! {
        response = next.run(request) => response,
        () = caller.ends(&app) => return Err(no_longer_good()),
    };
    // What is there already is simply sent.
    if caller.shown.is_none() || response.body().size_hint().exact().is_some() {
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

pub(crate) fn wants_events(headers: &HeaderMap) -> bool {
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
                caller.shown = Some(Shown::Secret(secret.into()));
                Ok(caller)
            }
            None => Err(no_longer_good()),
        };
    }
    if let Some(token) = query_token(uri) {
        let grant = app.stream_key().open::<Grant>(client, &token).await?;
        let grant = grant.filter(|grant| grant.until > client.clock().now()).ok_or_else(|| {
            Problem::new("unauthorized", "the stream token is malformed or expired; get a new one")
        })?;
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
pub(crate) fn known_host(app: &App, headers: &HeaderMap) -> Result<(), Problem> {
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

/// Whether a page of another origin may not make this request. One that reads needs no check: browsers keep the answer from
/// such a page. Nor does one with a token, which no page has unless it was given to it; channels and `/mcp`, whose protocol wants
/// it, are checked all the same.
fn only_for_own_pages(request: &Request, caller: &Caller) -> bool {
    let opens_channel = request.headers().contains_key(header::UPGRADE);
    let changes = !request.method().is_safe() && caller.shown.is_none();
    changes || opens_channel || request.uri().path() == "/mcp"
}

/// A page of any origin may send requests to every server its browser reaches: the browser only says which page asks.
/// This lets through pages of this server and of the configuration, and whatever is no page.
fn own_origin(app: &App, headers: &HeaderMap) -> Result<(), Problem> {
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes).unwrap_or_default();
    let allowed = &app.settings().cors_origins;
    let own = match (headers.get(header::ORIGIN), headers.get("sec-fetch-site").map(HeaderValue::as_bytes)) {
        (Some(origin), _) => {
            let origin = origin.to_str().unwrap_or_default();
            let authority = origin.split_once("://").map_or("", |(_, authority)| authority);
            let same = !authority.is_empty() && authority.as_bytes().eq_ignore_ascii_case(host);
            same || allowed.iter().any(|allowed| allowed == "*" || allowed == origin)
        }
        (None, Some(b"cross-site" | b"same-site")) => allowed.iter().any(|allowed| allowed == "*"),
        (None, _) => true,
    };
    own.then_some(()).ok_or_else(|| {
        Problem::new(
            "origin_not_allowed",
            "pages of this origin may not do this; list the origin in [server] cors_origins if they should",
        )
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
pub(crate) struct TokenCache(Mutex<HashMap<Name, (TokenInfo, Instant)>>);

/// What a token is looked up by.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Name {
    /// The digest of its secret.
    Secret([u8; 32]),
    Id(Uuid),
}

impl TokenCache {
    /// The token with this secret, if it is still good.
    pub(crate) async fn look_up(&self, client: &Client, secret: &str) -> Result<Option<TokenInfo>, Problem> {
        let name = Name::Secret(Sha256::digest(secret).into());
        if let Some(known) = self.known(name, client) {
            return Ok(known);
        }
        Ok(self.remember(name, client.authenticate(secret).await?))
    }

    /// The token of a tenant with this id, if it is still good.
    pub(crate) async fn by_id(
        &self,
        client: &Client,
        tenant: &str,
        id: Uuid,
    ) -> Result<Option<TokenInfo>, Problem> {
        let name = Name::Id(id);
        if let Some(known) = self.known(name, client) {
            return Ok(known);
        }
        let now = client.clock().now();
        let good = |token: &TokenInfo| {
            token.id == id && token.revoked_at.is_none() && token.expires_at.is_none_or(|at| at > now)
        };
        Ok(self.remember(name, client.tokens(Some(tenant)).await?.into_iter().find(good)))
    }

    /// What is believed of a token, if anything is.
    fn known(&self, name: Name, client: &Client) -> Option<Option<TokenInfo>> {
        let now = client.clock().now();
        let tokens = self.lock();
        let (token, _) = tokens.get(&name).filter(|(_, since)| since.elapsed() < BELIEVED)?;
        Some(Some(token.clone()).filter(|token| token.expires_at.is_none_or(|at| at > now)))
    }

    fn remember(&self, name: Name, found: Option<TokenInfo>) -> Option<TokenInfo> {
        let mut cache = self.lock();
        match &found {
            Some(token) => {
                if cache.len() >= REMEMBERED {
                    cache.retain(|_, (_, since)| since.elapsed() < BELIEVED);
                }
                if cache.len() < REMEMBERED {
                    cache.insert(name, (token.clone(), Instant::now()));
                }
            }
            None => drop(cache.remove(&name)),
        }
        found
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Name, (TokenInfo, Instant)>> {
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

/// Signs what is given out to be shown again. The key is kept in the store, so that every server of a cluster has the same.
pub(crate) struct SigningKey {
    name: &'static str,
    key: tokio::sync::OnceCell<Vec<u8>>,
}

/// What a stream token says.
#[derive(Serialize, Deserialize)]
struct Grant {
    task: TaskId,
    tenant: String,
    name: String,
    until: Timestamp,
}

/// A token for one task's stream, and until when it is good.
pub(crate) async fn grant_stream(
    app: &App,
    caller: &Caller,
    task: TaskId,
) -> Result<(String, Timestamp), Problem> {
    let until = caller.client.clock().now().saturating_add(STREAM_TOKEN_LIFE).unwrap_or(Timestamp::MAX);
    let grant = Grant { task, tenant: caller.tenant.clone(), name: caller.name.clone(), until };
    Ok((app.stream_key().sign(&caller.client, &grant).await?, until))
}

impl SigningKey {
    /// The key that the store keeps under this name.
    pub(crate) fn new(name: &'static str) -> Self {
        Self { name, key: tokio::sync::OnceCell::new() }
    }

    /// What is said, readable by anyone and signed.
    pub(crate) async fn sign(&self, client: &Client, said: &impl Serialize) -> Result<String, Problem> {
        let said = serde_json::to_vec(said).map_err(|_| Problem::new("internal", "cannot write the token"))?;
        let mac = self.mac(client, &said).await?.finalize().into_bytes();
        Ok(format!("{}.{}", URL_SAFE_NO_PAD.encode(said), URL_SAFE_NO_PAD.encode(mac)))
    }

    /// What was said and signed here; `None` when it was not.
    pub(crate) async fn open<T: DeserializeOwned>(
        &self,
        client: &Client,
        signed: &str,
    ) -> Result<Option<T>, Problem> {
        let Some((said, mac)) = signed.split_once('.') else { return Ok(None) };
        let (said, mac) = (URL_SAFE_NO_PAD.decode(said), URL_SAFE_NO_PAD.decode(mac));
        let (Ok(said), Ok(mac)) = (said, mac) else { return Ok(None) };
        if self.mac(client, &said).await?.verify_slice(&mac).is_err() {
            return Ok(None);
        }
        Ok(serde_json::from_slice(&said).ok())
    }

    async fn mac(&self, client: &Client, said: &[u8]) -> Result<Hmac<Sha256>, Problem> {
        let key = self.key.get_or_try_init(|| client.kept_secret(self.name)).await?;
        let mac =
            Hmac::<Sha256>::new_from_slice(key).map_err(|_| Problem::new("internal", "the key is unusable"))?;
        Ok(mac.chain_update(said))
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
