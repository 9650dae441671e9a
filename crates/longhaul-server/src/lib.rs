//! The server of Longhaul: REST, server-sent events, WebSocket, MCP, the dashboard, tokens, metrics.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use longhaul::Client;
//! use longhaul_server::{App, ServerSettings, serve};
//!
//! let client = Client::open("sqlite:longhaul.db").await?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:7171").await?;
//! serve(listener, App::new(client, false, ServerSettings::default()), std::future::pending()).await;
//! # Ok(())
//! # }
//! ```
//!
//! [`router`] is an axum `Router` that can be mounted in another program. The rooms, in the order in which a request goes
//! through them: `serve` (connections), `request` (ids and traces), `auth` (who asks), `body` (what is asked), `routes`, `stream`, `mcp`
//! and `dashboard` (what is done), `problem` (what is answered when something is wrong).

use axum::Router;
use axum::http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::from_fn_with_state;
use axum::routing::get;
use rmcp::handler::server::ServerHandler;
use tower_http::compression::CompressionLayer;
use tower_http::compression::predicate::{DefaultPredicate, Predicate as _};
use tower_http::cors::{AllowOrigin, CorsLayer};
use utoipa_axum::router::OpenApiRouter;

mod auth;
mod body;
mod dashboard;
pub mod mcp;
mod metrics;
mod openapi;
pub mod problem;
mod request;
mod routes;
mod schema;
mod serve;
mod state;
mod stream;
mod time;

pub use metrics::Metrics;
pub use serve::{serve, serve_router};
pub use state::{App, Rate, ServerSettings};

/// All routes of the server.
pub fn router(app: App) -> Router {
    router_with(app, |mcp| mcp)
}

/// The same, with an MCP server of one's own on `/mcp`: made around Longhaul's, it can add tools, resources and prompts.
pub fn router_with<H: ServerHandler>(app: App, handler: impl Fn(mcp::Mcp) -> H + Send + Sync + 'static) -> Router {
    let known = OpenApiRouter::<App>::new()
        .merge(routes::router())
        .merge(routes::health::router())
        .merge(stream::router())
        // Not in the document: it is another protocol, which describes itself.
        .route("/mcp", mcp::http::route(&app, handler))
        .route_layer(from_fn_with_state(app.clone(), auth::identify));
    let (router, api) = OpenApiRouter::new().merge(known).merge(routes::health::open_router()).split_for_parts();
    let document = HeaderedDocument::new(api);
    let mut router = router
        .route("/openapi.json", get(async move || document.answer()))
        .merge(dashboard::router(&app))
        .fallback(async || problem::Problem::new("not_found", "there is no such path; /openapi.json lists them"))
        .method_not_allowed_fallback(async || {
            problem::Problem::new("method_not_allowed", "this path has other methods; the header Allow lists them")
        })
        .layer(from_fn_with_state(app.clone(), request::accompany))
        .layer(CompressionLayer::new().compress_when(DefaultPredicate::new().and(may_change)));
    if let Some(cors) = cors(&app.settings().cors_origins) {
        router = router.layer(cors);
    }
    router.with_state(app)
}

/// Whether the bytes of an answer may be others on the wire.
fn may_change(_: StatusCode, _: Version, _: &HeaderMap, extensions: &Extensions) -> bool {
    extensions.get::<routes::AsItIs>().is_none()
}

/// The OpenAPI document, written once.
#[derive(Clone)]
struct HeaderedDocument(axum::body::Bytes);

impl HeaderedDocument {
    fn new(api: utoipa::openapi::OpenApi) -> Self {
        // Made of types that always serialise.
        Self(openapi::complete(api).to_json().unwrap_or_else(|_| "{}".to_owned()).into())
    }

    fn answer(&self) -> ([(HeaderName, &'static str); 1], axum::body::Bytes) {
        ([(header::CONTENT_TYPE, "application/json")], self.0.clone())
    }
}

/// What pages of other origins may do.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    let listed = origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok());
    let allowed =
        if origins.iter().any(|origin| origin == "*") { AllowOrigin::any() } else { AllowOrigin::list(listed) };
    let headers = [
        "last-event-id",
        "idempotency-key",
        "traceparent",
        "x-request-id",
        "mcp-session-id",
        "mcp-protocol-version",
        "mcp-method",
        "mcp-name",
    ]
    .map(HeaderName::from_static);
    let headers =
        headers.into_iter().chain([header::AUTHORIZATION, header::CONTENT_TYPE, header::IF_MATCH, header::RANGE]);
    let told = [
        header::CONTENT_RANGE,
        header::ETAG,
        header::LOCATION,
        header::RETRY_AFTER,
        HeaderName::from_static("x-request-id"),
        HeaderName::from_static("mcp-session-id"),
    ];
    let methods = [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
    Some(
        CorsLayer::new()
            .allow_origin(allowed)
            .allow_methods(methods)
            .allow_headers(headers.collect::<Vec<_>>())
            .expose_headers(told),
    )
}
