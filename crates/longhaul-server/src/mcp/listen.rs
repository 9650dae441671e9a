//! What `subscriptions/listen` may name, found out before anything is acknowledged.
//!
//! rmcp acknowledges what a handler accepts without asking the store, and without saying who asks. So the filter of a request is cut
//! down to what is there for the caller before rmcp sees it: the acknowledgement then names what will be told of, as the protocol
//! wants it, and what is another tenant's is missing in it as what never was. When nothing of what a request names is there, it is
//! answered as a read of the first resource would be.

use std::borrow::Cow;
use std::collections::HashSet;

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderName};
use axum::response::Response;
use futures_util::{StreamExt, TryStreamExt, stream};
use rmcp::handler::server::ServerHandler;
use rmcp::model::{
    ClientJsonRpcMessage, ClientRequest, ErrorCode, ErrorData, GetMeta, JsonRpcError, ProtocolVersion,
    ServerResult, SubscriptionFilter,
};
use rmcp::service::{NotificationContext, RequestContext, RoleServer, Service, ServiceRole};

use super::http::REVISION;
use super::{Mcp, error, resources};
use crate::auth::Caller;
use crate::problem::Problem;
use crate::routes::json_answer;

const METHOD: HeaderName = HeaderName::from_static("mcp-method");
/// How many resources are looked for at once.
const AT_ONCE: usize = 8;

/// Leaves of a filter what the handler accepts and the store has, each once.
async fn cut_down(
    caller: &Caller,
    handler: &impl ServerHandler,
    filter: &mut SubscriptionFilter,
) -> Result<(), ErrorData> {
    let Some(asked) = filter.resource_subscriptions.take() else { return Ok(()) };
    let first = asked.first().cloned();
    let mut seen = HashSet::new();
    filter.resource_subscriptions =
        Some(asked.into_iter().filter(|uri| seen.insert(uri.clone())).collect::<Vec<_>>());
    let Some(mut accepted) = handler.accepted_subscription_filter(filter) else { return Ok(()) };
    let found: Result<Vec<Option<String>>, Problem> =
        stream::iter(accepted.resource_subscriptions.take().unwrap_or_default())
            .map(|uri| async move { Ok(is_there(caller, &uri).await?.then_some(uri)) })
            .buffered(AT_ONCE)
            .try_collect()
            .await;
    let there: Vec<String> = found.map_err(|problem| error(&problem))?.into_iter().flatten().collect();
    if let Some(first) = first
        && there.is_empty()
        && accepted == SubscriptionFilter::default()
    {
        let problem = match resources::watchable(&caller.client, &first).await {
            Err(problem) => problem,
            // It came to be just now: as for the others, too late.
            Ok(_) => Problem::not_found("resource", &first),
        };
        let mut error = error(&problem.with("uri", first));
        // What the protocol says since the revision that has this method.
        if error.code == ErrorCode::RESOURCE_NOT_FOUND {
            error.code = ErrorCode::INVALID_PARAMS;
        }
        return Err(error);
    }
    filter.resource_subscriptions = (!there.is_empty()).then_some(there);
    Ok(())
}

/// Whether a resource that the handler accepts is there. One that is not Longhaul's is the handler's own affair.
async fn is_there(caller: &Caller, uri: &str) -> Result<bool, Problem> {
    if !resources::is_ours(uri) {
        return Ok(true);
    }
    match resources::watchable(&caller.client, uri).await {
        Ok(_) => Ok(true),
        Err(problem) if problem.code() == "not_found" => Ok(false),
        Err(problem) => Err(problem),
    }
}

/// The body of a request over HTTP, its filter cut down if it has one; or what is answered instead. What rmcp will refuse is left to it.
pub(super) async fn before<H: ServerHandler>(
    caller: &Caller,
    handler: impl Fn() -> H,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<Bytes, Response> {
    // rmcp takes no such request whose header says otherwise.
    if headers.get(METHOD).is_none_or(|method| method != "subscriptions/listen") {
        return Ok(body);
    }
    let Ok(ClientJsonRpcMessage::Request(mut message)) = serde_json::from_slice(&body) else { return Ok(body) };
    let handler = handler();
    let good = is_good(message.request.get_meta().protocol_version(), &handler)
        && message.request.get_meta().missing_required_keys(&ProtocolVersion::V_2026_07_28).is_empty()
        && message.request.get_meta().protocol_version().is_some_and(|version| {
            headers.get(REVISION).is_some_and(|given| given.as_bytes() == version.as_str().as_bytes())
        });
    let ClientRequest::SubscriptionsListenRequest(request) = &mut message.request else { return Ok(body) };
    if !good {
        return Ok(body);
    }
    let error = match cut_down(caller, &handler, &mut request.params.notifications).await {
        Ok(()) => {
            let filter = serde_json::to_value(&request.params.notifications);
            let whole = serde_json::from_slice::<serde_json::Value>(&body);
            if let (Ok(filter), Ok(mut whole)) = (filter, whole) {
                whole["params"]["notifications"] = filter;
                return Ok(whole.to_string().into());
            }
            ErrorData::internal_error("the request cannot be written", None)
        }
        Err(error) => error,
    };
    let error = JsonRpcError::new(Some(message.id), error);
    Err(json_answer(axum::http::StatusCode::OK, &error))
}

/// Whether a request of this revision will be served, by listening.
fn is_good(version: Option<ProtocolVersion>, handler: &impl ServerHandler) -> bool {
    version.is_some_and(|version| {
        version.as_str() >= ProtocolVersion::V_2026_07_28.as_str()
            && handler.supported_protocol_versions().contains(&version)
    })
}

/// Longhaul's server on lines, with the same care.
pub(super) struct Lines {
    pub(super) mcp: Mcp,
    pub(super) caller: Caller,
}

impl Service<RoleServer> for Lines {
    async fn handle_request(
        &self,
        mut request: ClientRequest,
        context: RequestContext<RoleServer>,
    ) -> Result<ServerResult, ErrorData> {
        let good = is_good(context.protocol_version(), &self.mcp);
        if let ClientRequest::SubscriptionsListenRequest(request) = &mut request
            && good
        {
            cut_down(&self.caller, &self.mcp, &mut request.params.notifications).await?;
        }
        self.mcp.handle_request(request, context).await
    }

    async fn handle_notification(
        &self,
        notification: <RoleServer as ServiceRole>::PeerNot,
        context: NotificationContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.mcp.handle_notification(notification, context).await
    }

    fn get_info(&self) -> <RoleServer as ServiceRole>::Info {
        Service::get_info(&self.mcp)
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        Service::supported_protocol_versions(&self.mcp)
    }
}
