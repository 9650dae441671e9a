//! What all pages share: the frame, the rules that the browser is given, and what is shown when something is wrong.

use askama::Template;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::assets;
use super::session::Visitor;
use crate::problem::Problem;

/// Only files of this server are run, styled by or asked for, and no text becomes a script by mistake: what makes HTML of
/// text has to go through the one policy `longhaul`, of `morph.js`, which is given whole pages of this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      form-action 'self'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
                      trusted-types longhaul";

/// The frame around a page.
pub(super) struct Frame {
    pub(super) assets: String,
    pub(super) title: String,
    /// Which entry of the menu this is.
    pub(super) here: &'static str,
    /// What tells the page that something changed.
    pub(super) stream: String,
    /// The time here: the browser may have another.
    pub(super) now: String,
    pub(super) csrf: String,
    pub(super) who: String,
    pub(super) tenant: String,
    pub(super) role: &'static str,
    pub(super) signed_in: bool,
    pub(super) operates: bool,
    pub(super) administers: bool,
    /// How many people's decisions are waited for.
    pub(super) asked: usize,
}

impl Frame {
    pub(super) async fn new(
        visitor: &Visitor,
        title: impl Into<String>,
        here: &'static str,
    ) -> Result<Self, Problem> {
        Ok(Self {
            assets: assets::folder(),
            title: title.into(),
            here,
            stream: "/live".to_owned(),
            now: visitor.client().clock().now().to_string(),
            csrf: visitor.csrf().to_owned(),
            who: visitor.caller.name.clone(),
            tenant: visitor.caller.tenant.clone(),
            role: visitor.caller.role.name(),
            signed_in: visitor.signed_in(),
            operates: visitor.operates(),
            administers: visitor.administers(),
            asked: visitor.client().open_asks().await?.len(),
        })
    }
}

/// The page that asks for a token.
#[derive(Template)]
#[template(path = "sign_in.html")]
pub(super) struct SignIn<'a> {
    assets: String,
    next: &'a str,
    why: &'a str,
}

impl<'a> SignIn<'a> {
    pub(super) fn new(next: &'a str, why: &'a str) -> Self {
        Self { assets: assets::folder(), next, why }
    }
}

/// What is shown instead of a page.
#[derive(Template)]
#[template(path = "wrong.html")]
struct Wrong<'a> {
    assets: String,
    title: &'a str,
    detail: &'a str,
    code: &'a str,
    /// Whether it will pass by itself.
    passes: bool,
}

/// A page that asks for another one at once.
#[derive(Template)]
#[template(path = "once_more.html")]
struct OnceMore<'a> {
    path: &'a str,
}

/// Lets the browser ask again by itself: then it sends its cookie along.
pub(super) fn once_more(path: &str) -> Response {
    render(StatusCode::OK, &OnceMore { path: local_path(path) })
}

/// A page as it is sent.
pub(super) fn render(status: StatusCode, page: &impl Template) -> Response {
    match page.render() {
        Ok(html) => (status, [(header::CONTENT_TYPE, "text/html; charset=utf-8")], html).into_response(),
        Err(error) => {
            tracing::error!(%error, "a page cannot be written");
            Problem::new("internal", "the page cannot be written; the server's log says why").into_response()
        }
    }
}

/// Sends the browser elsewhere.
pub(super) fn see_other(path: &str) -> Response {
    // Paths are checked or made here; one that cannot stand in a header leads home.
    let path = HeaderValue::from_str(path).unwrap_or(HeaderValue::from_static("/"));
    (StatusCode::SEE_OTHER, [(header::LOCATION, path)]).into_response()
}

/// A path of this server, or its first page: nobody is sent to where someone else wanted them.
pub(super) fn local_path(path: &str) -> &str {
    let plain = path.starts_with('/')
        && !path.starts_with("//")
        && path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\');
    if plain { path } else { "/" }
}

/// Whether a browser asks for a page, and not one of its scripts for data.
pub(super) fn wants_page(headers: &HeaderMap) -> bool {
    headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .is_some_and(|accept| accept.contains("text/html"))
}

/// Gives every answer the rules for browsers, and shows people what is wrong in their own words.
pub(super) async fn for_people(request: Request, next: Next) -> Response {
    let person = wants_page(request.headers());
    let mut response = next.run(request).await;
    let problem = response.extensions().get::<Problem>().filter(|_| person).cloned();
    if let Some(problem) = problem {
        let (title, detail, code) = (problem.title(), problem.detail(), problem.code());
        let passes = response.headers().contains_key(header::RETRY_AFTER);
        let wrong = Wrong { assets: assets::folder(), title, detail, code, passes };
        let told = std::mem::replace(&mut response, render(problem.status(), &wrong));
        for name in [header::SET_COOKIE, header::RETRY_AFTER] {
            if let Some(value) = told.headers().get(&name) {
                response.headers_mut().insert(name, value.clone());
            }
        }
    }
    let rules: [(HeaderName, &'static str); 7] = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        // Not less: a form without a referrer has no origin either.
        (header::REFERRER_POLICY, "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("permissions-policy"), "camera=(), geolocation=(), microphone=()"),
    ];
    for (name, value) in rules {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response.headers_mut().entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_sent_elsewhere() {
        assert_eq!(local_path("/tasks/1?a=b"), "/tasks/1?a=b");
        for elsewhere in
            ["", "//evil.example", "https://evil.example", "/\\evil.example", "/a\r\nb", "javascript:1"]
        {
            assert_eq!(local_path(elsewhere), "/", "{elsewhere}");
        }
    }
}
