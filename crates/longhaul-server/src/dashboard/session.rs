//! Who looks at the dashboard: signing in with a token, and the session that follows.
//!
//! The token is shown once. What the browser keeps is a signed note, in a cookie no script can read, that names the token's
//! id and ends by itself; a token that is revoked or expires ends its sessions. Where no token is needed there is a session
//! too, that names nobody: it carries the word that every form has to repeat, so that no other page can act in one's name.

use axum::extract::{FromRequest, FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::{SignedDuration, Timestamp};
use longhaul::{Client, Role};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::page::{self, SignIn, wants_page};
use crate::auth::{self, Caller};
use crate::body::{Params, read_bytes};
use crate::problem::Problem;
use crate::state::App;

/// How long one stays signed in.
const LIFE: SignedDuration = SignedDuration::from_hours(12);

/// What the cookie says.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Session {
    /// What every form repeats.
    csrf: String,
    /// The token that was shown; nobody's where none is needed.
    token: Option<Uuid>,
    tenant: String,
    until: Timestamp,
}

impl Session {
    fn new(client: &Client, token: Option<&longhaul::TokenInfo>) -> Self {
        let until = client.clock().now().saturating_add(LIFE).unwrap_or(Timestamp::MAX);
        Self {
            csrf: URL_SAFE_NO_PAD.encode(rand::random::<[u8; 18]>()),
            token: token.map(|token| token.id),
            tenant: token.map_or_else(|| "default".to_owned(), |token| token.tenant.clone()),
            until: token.and_then(|token| token.expires_at).map_or(until, |at| until.min(at)),
        }
    }

    async fn of(app: &App, client: &Client, headers: &HeaderMap) -> Result<Option<Self>, Problem> {
        let name = cookie_name(headers);
        for cookie in headers.get_all(header::COOKIE).into_iter().filter_map(|value| value.to_str().ok()) {
            let values = cookie.split(';').filter_map(|pair| pair.trim().split_once('='));
            for (_, value) in values.filter(|(given, _)| *given == name) {
                let session = app.session_key().open::<Self>(client, value).await?;
                if let Some(session) = session.filter(|session| session.until > client.clock().now()) {
                    return Ok(Some(session));
                }
            }
        }
        Ok(None)
    }

    async fn cookie(&self, app: &App, client: &Client, headers: &HeaderMap) -> Result<HeaderValue, Problem> {
        let value = app.session_key().sign(client, self).await?;
        let seconds = self.until.duration_since(client.clock().now()).as_secs().max(0);
        set_cookie(headers, &value, seconds)
    }
}

/// Servers on several ports of one host share the cookies of that host: each has its own name.
fn cookie_name(headers: &HeaderMap) -> String {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let port = host.rsplit_once(':').map_or("", |(_, port)| port);
    let port = if port.bytes().all(|byte| byte.is_ascii_digit()) { port } else { "" };
    format!("longhaul{port}")
}

fn set_cookie(headers: &HeaderMap, value: &str, seconds: i64) -> Result<HeaderValue, Problem> {
    // The server itself does not speak TLS; what stands before it may, and then the browser's page says so.
    let secure = headers.get(header::ORIGIN).is_some_and(|origin| origin.as_bytes().starts_with(b"https://"));
    let secure = if secure { "; Secure" } else { "" };
    let name = cookie_name(headers);
    let cookie = format!("{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}");
    HeaderValue::from_str(&cookie).map_err(|_| Problem::new("internal", "the session cannot be written"))
}

/// Who looks, and with which session.
#[derive(Clone)]
pub(super) struct Visitor {
    pub(super) caller: Caller,
    session: Session,
}

impl Visitor {
    /// What every form repeats.
    pub(super) fn csrf(&self) -> &str {
        &self.session.csrf
    }

    /// Whether there is anyone to sign out.
    pub(super) fn signed_in(&self) -> bool {
        self.session.token.is_some()
    }

    /// Whether they may steer tasks.
    pub(super) fn operates(&self) -> bool {
        self.caller.role >= Role::Operator
    }

    /// Whether they may steer what belongs to everyone.
    pub(super) fn administers(&self) -> bool {
        self.caller.role >= Role::Admin
    }

    pub(super) fn client(&self) -> &Client {
        &self.caller.client
    }
}

impl FromRequestParts<App> for Visitor {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Problem> {
        let visitor = parts.extensions.get::<Self>().cloned();
        visitor.ok_or_else(|| Problem::new("internal", "nobody asked who looks"))
    }
}

/// Finds out who looks; who has to sign in first is sent there.
pub(super) async fn identify(
    State(app): State<App>,
    mut request: Request,
    next: Next,
) -> Result<Response, Problem> {
    if auth::wants_events(request.headers()) {
        // As for the streams of the API: an EventSource does not come back after a refusal.
        app.wait_until_open().await;
    }
    let client = app.client()?.clone();
    let session = Session::of(&app, &client, request.headers()).await?;
    if session.is_none() && came_from_elsewhere(&request) {
        return Ok(page::once_more(&wanted(&request)));
    }
    let token = match &session {
        Some(Session { token: Some(id), tenant, .. }) => app.tokens().by_id(&client, tenant, *id).await?,
        _ => None,
    };
    let caller = match &token {
        Some(token) => Caller::of_session(&client, token),
        None if app.auth_required() => return to_sign_in(&request),
        None => {
            auth::known_host(&app, request.headers())?;
            Caller::local(&client)
        }
    };
    // One whose token is gone, or none at all, is replaced by a session of nobody.
    let kept = session.filter(|session| session.token.is_some() == token.is_some());
    let (session, cookie) = match kept {
        Some(session) => (session, None),
        None => {
            let session = Session::new(&client, None);
            let cookie = session.cookie(&app, &client, request.headers()).await?;
            (session, Some(cookie))
        }
    };
    request.extensions_mut().insert(Visitor { caller: caller.clone(), session });
    let mut response = auth::answer(app, caller, request, next).await?;
    if let Some(cookie) = cookie {
        response.headers_mut().append(header::SET_COOKIE, cookie);
    }
    Ok(response)
}

/// Whether a link on another site led here: browsers leave the cookie out then.
fn came_from_elsewhere(request: &Request) -> bool {
    let site = request.headers().get("sec-fetch-site").map(HeaderValue::as_bytes);
    request.method() == Method::GET && site == Some(b"cross-site") && wants_page(request.headers())
}

/// The page that is asked for.
fn wanted(request: &Request) -> String {
    request.uri().path_and_query().map_or_else(|| "/".to_owned(), |path| path.to_string())
}

fn to_sign_in(request: &Request) -> Result<Response, Problem> {
    if request.method() == Method::GET && wants_page(request.headers()) {
        let next = super::show::query_value(&wanted(request));
        return Ok(page::see_other(&format!("/sign-in?next={next}")));
    }
    Err(Problem::new("unauthorized", "sign in first, at /sign-in"))
}

/// A form that a page of this server sent, with the word of the session in it.
pub(super) struct Posted<T>(pub(super) T);

#[derive(Deserialize)]
struct Repeated {
    #[serde(default)]
    csrf: String,
}

impl<T: DeserializeOwned> FromRequest<App> for Posted<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, app: &App) -> Result<Self, Problem> {
        let (mut parts, body) = request.into_parts();
        let visitor = Visitor::from_request_parts(&mut parts, app).await?;
        let bytes = posted(&parts.headers, body, app).await?;
        let repeated: Repeated = form(&bytes)?;
        // Digests, so that how long it takes says nothing about where they differ.
        if Sha256::digest(&repeated.csrf) != Sha256::digest(visitor.csrf()) {
            return Err(Problem::new("forbidden", "the page is older than the session; load it again"));
        }
        Ok(Self(form(&bytes)?))
    }
}

/// The body of a form, if a page of this server sent it.
async fn posted(headers: &HeaderMap, body: axum::body::Body, app: &App) -> Result<axum::body::Bytes, Problem> {
    own_page(headers)?;
    let kind = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    if !kind.starts_with(b"application/x-www-form-urlencoded") {
        return Err(Problem::new("unsupported_media_type", "the dashboard takes forms only"));
    }
    read_bytes(body, headers, app).await
}

/// Browsers say which page sent a form. Unlike the API, which other origins may be allowed to use, the dashboard is for its
/// own pages alone.
fn own_page(headers: &HeaderMap) -> Result<(), Problem> {
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes).unwrap_or_default();
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let own = match (headers.get(header::ORIGIN), text("sec-fetch-site")) {
        (Some(origin), site) => {
            let authority = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, rest)| rest);
            authority.is_some_and(|authority| authority.as_bytes().eq_ignore_ascii_case(host))
                && site.is_none_or(|site| site == "same-origin")
        }
        (None, Some(site)) => site == "same-origin",
        // No browser: who has the cookie and the word may as well have the token.
        (None, None) => true,
    };
    own.then_some(()).ok_or_else(|| Problem::new("forbidden", "only pages of this server may send its forms"))
}

fn form<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let text = std::str::from_utf8(bytes).map_err(|_| Problem::new("invalid_field", "the form is not UTF-8"))?;
    if text.contains("%00") {
        return Err(Problem::new("invalid_field", "the form has the character U+0000"));
    }
    serde_urlencoded::from_str(text)
        .map_err(|error| Problem::new("invalid_field", format!("the form is wrong: {error}")))
}

#[derive(Deserialize, Default)]
pub(super) struct SignInParams {
    #[serde(default)]
    next: String,
}

/// The page that asks for a token.
pub(super) async fn sign_in_page(Params(params): Params<SignInParams>) -> Response {
    page::render(StatusCode::OK, &SignIn::new(page::local_path(&params.next), ""))
}

#[derive(Deserialize)]
struct SignInForm {
    #[serde(default)]
    token: String,
    #[serde(default)]
    next: String,
}

/// Begins a session.
pub(super) async fn sign_in(State(app): State<App>, request: Request) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let bytes = posted(&parts.headers, body, &app).await?;
    let SignInForm { token, next } = form(&bytes)?;
    let client = app.client()?;
    let next = page::local_path(&next);
    let Some(token) = app.tokens().look_up(client, token.trim()).await? else {
        let why = "This token is unknown, expired or revoked.";
        return Ok(page::render(StatusCode::UNAUTHORIZED, &SignIn::new(next, why)));
    };
    let session = Session::new(client, Some(&token));
    let mut response = page::see_other(next);
    response.headers_mut().append(header::SET_COOKIE, session.cookie(&app, client, &parts.headers).await?);
    Ok(response)
}

/// Ends the session.
pub(super) async fn sign_out(
    State(app): State<App>,
    headers: HeaderMap,
    _: Posted<Nothing>,
) -> Result<Response, Problem> {
    let mut response = page::see_other(if app.auth_required() { "/sign-in" } else { "/" });
    response.headers_mut().append(header::SET_COOKIE, set_cookie(&headers, "", 0)?);
    Ok(response)
}

/// A form without fields of its own.
#[derive(Deserialize)]
pub(super) struct Nothing {}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|&(name, value)| (name.parse().expect("a name"), HeaderValue::from_static(value)))
            .collect()
    }

    #[test]
    fn only_pages_of_this_server_may_send_forms() {
        for own in [
            &[("host", "a:1"), ("origin", "http://a:1")][..],
            &[("host", "a"), ("origin", "https://A"), ("sec-fetch-site", "same-origin")],
            &[("host", "a"), ("sec-fetch-site", "same-origin")],
            &[("host", "a")],
        ] {
            assert!(own_page(&headers(own)).is_ok(), "{own:?}");
        }
        for other in [
            &[("host", "a:1"), ("origin", "http://a:2")][..],
            &[("host", "a"), ("origin", "null")],
            &[("host", "a"), ("origin", "http://b"), ("sec-fetch-site", "same-origin")],
            &[("host", "a"), ("origin", "http://a"), ("sec-fetch-site", "cross-site")],
            &[("host", "a"), ("sec-fetch-site", "same-site")],
        ] {
            assert!(own_page(&headers(other)).is_err(), "{other:?}");
        }
    }

    #[test]
    fn each_port_has_a_cookie_of_its_own() {
        assert_eq!(cookie_name(&headers(&[("host", "localhost:7171")])), "longhaul7171");
        assert_eq!(cookie_name(&headers(&[("host", "example.com")])), "longhaul");
        assert_eq!(cookie_name(&headers(&[("host", "[::1]")])), "longhaul");
    }
}
