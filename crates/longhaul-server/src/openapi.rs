//! The OpenAPI document: the routes describe themselves, here is what they have in common.

use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, Info, OpenApi, Ref, RefOr, Response};
use utoipa::{PartialSchema, ToSchema};

use crate::problem::CODES;
use crate::schema;

/// What the document says beside the routes.
pub(crate) fn complete(mut api: OpenApi) -> OpenApi {
    api.info = Info::new("Longhaul", env!("CARGO_PKG_VERSION"));
    api.info.description = Some("Tasks for AI agents that outlive the process that runs them.".to_owned());
    let components = api.components.get_or_insert_default();
    components.schemas.insert("Problem".to_owned(), schema::Problem::schema());
    let mut further = Vec::new();
    schema::Problem::schemas(&mut further);
    components.schemas.extend(further);
    let bearer =
        HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some("`longhaul token create` makes one"));
    components.security_schemes.insert("token".to_owned(), RefOr::T(SecurityScheme::Http(bearer.build())));
    api.security = Some(vec![SecurityRequirement::default(), SecurityRequirement::new("token", [] as [&str; 0])]);
    let problems = problems();
    for item in api.paths.paths.values_mut() {
        let operations = [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch];
        for operation in operations.into_iter().flatten() {
            for (status, problem) in &problems {
                let responses = &mut operation.responses.responses;
                responses.entry(status.clone()).or_insert_with(|| RefOr::T(problem.clone()));
            }
        }
    }
    api
}

/// Every refusal can come from every route: who asks, how fast, how large and how well-formed is looked at first.
fn problems() -> Vec<(String, Response)> {
    let mut statuses: Vec<u16> = CODES.iter().map(|(_, status, _)| status.as_u16()).collect();
    statuses.sort_unstable();
    statuses.dedup();
    statuses
        .into_iter()
        .map(|status| {
            let codes: Vec<&str> =
                CODES.iter().filter(|(_, of, _)| of.as_u16() == status).map(|(code, ..)| *code).collect();
            let mut response = Response::new(format!("Problem: {}", codes.join(", ")));
            let content = Content::new(Some(RefOr::Ref(Ref::from_schema_name("Problem"))));
            response.content.insert("application/problem+json".to_owned(), RefOr::T(content));
            (status.to_string(), response)
        })
        .collect()
}
