//! Tokens: who may do what.

use axum::http::StatusCode;
use axum::response::Response;
use longhaul::request::Span;
use longhaul::{NewToken, Role};
use serde::Deserialize;
use serde_json::json;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::json_answer;
use crate::auth::Admin;
use crate::body::{Json, Segment};
use crate::problem::Problem;
use crate::schema;
use crate::state::App;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list, create)).routes(routes!(revoke))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct TokenBody {
    /// Stands in events and audits.
    name: String,
    role: RoleWord,
    /// After this time it is no longer good: `90d`. Without, until it is revoked.
    #[schema(value_type = Option<String>)]
    expires_after: Option<Span>,
}

#[derive(Deserialize, ToSchema, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum RoleWord {
    Viewer,
    Submitter,
    Operator,
    Admin,
}

impl From<RoleWord> for Role {
    fn from(word: RoleWord) -> Self {
        match word {
            RoleWord::Viewer => Self::Viewer,
            RoleWord::Submitter => Self::Submitter,
            RoleWord::Operator => Self::Operator,
            RoleWord::Admin => Self::Admin,
        }
    }
}

/// The tokens of the caller's tenant, without their secrets.
#[utoipa::path(get, path = "/v1/tokens", tag = "tokens", responses((status = 200, description = "The tokens", body = schema::Tokens)))]
async fn list(Admin(caller): Admin) -> Result<Response, Problem> {
    Ok(json_answer(StatusCode::OK, &json!({"tokens": caller.client.tokens(Some(&caller.tenant)).await?})))
}

/// Makes a token for the caller's tenant. Its secret is told once.
#[utoipa::path(post, path = "/v1/tokens", tag = "tokens", request_body = TokenBody,
    responses((status = 201, description = "The token and its secret", body = schema::NewToken)))]
async fn create(Admin(caller): Admin, Json(body): Json<TokenBody>) -> Result<Response, Problem> {
    let new = NewToken {
        name: body.name,
        tenant: caller.tenant,
        role: body.role.into(),
        expires_after: body.expires_after.map(|span| span.0),
    };
    let (token, secret) = caller.client.create_token(new).await?;
    Ok(json_answer(StatusCode::CREATED, &json!({"token": token, "secret": secret})))
}

/// Revokes a token; within seconds no server takes it any more.
#[utoipa::path(delete, path = "/v1/tokens/{token_id}", tag = "tokens", params(("token_id" = String, Path, description = "Its id")),
    responses((status = 204, description = "It is revoked")))]
async fn revoke(Admin(caller): Admin, Segment(id): Segment) -> Result<StatusCode, Problem> {
    let tokens = caller.client.tokens(Some(&caller.tenant)).await?;
    let found = tokens.into_iter().find(|token| token.id.to_string() == id);
    let found = found.ok_or_else(|| Problem::not_found("token", &id))?;
    caller.client.revoke_token(found.id).await?;
    Ok(StatusCode::NO_CONTENT)
}
