//! A call under way: its answer, what it tells meanwhile, and that the server hears when nobody waits for it
//! any more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rmcp::model::{
    CallToolRequest, CallToolRequestParams, CancelledNotificationParam, ClientRequest, ProgressToken, RequestId,
    ServerResult,
};
use rmcp::service::{PeerRequestOptions, ServiceError};
use tokio::sync::oneshot;

use super::link::Link;
use crate::tool::progress::{Paced, Tell};

const NOBODY_WAITS: &str = "the caller gave up";
/// How long to try to say so.
const CANCEL_TIME: Duration = Duration::from_secs(5);

/// A call that was sent. Dropped before its answer came, it is cancelled at the server.
pub(super) struct Flight {
    link: Arc<Link>,
    id: RequestId,
    token: Option<ProgressToken>,
    answer: oneshot::Receiver<Result<ServerResult, ServiceError>>,
    answered: bool,
}

impl Flight {
    /// Sends a call. An error means that it was not sent.
    pub(super) async fn begin(
        link: &Arc<Link>,
        params: CallToolRequestParams,
        tell: Option<Tell>,
    ) -> Result<Self, ServiceError> {
        let request = ClientRequest::CallToolRequest(CallToolRequest::new(params));
        let sent = link.peer().send_cancellable_request(request, PeerRequestOptions::no_options());
        let (sent, token) = match tell {
            None => (sent.await?, None),
            Some(tell) => {
                let mut watched = link.watched().lock().await;
                let sent = sent.await?;
                watched.insert(sent.progress_token.clone(), Paced::new(tell, Instant::now()));
                let token = sent.progress_token.clone();
                (sent, Some(token))
            }
        };
        Ok(Self { link: Arc::clone(link), id: sent.id, token, answer: sent.rx, answered: false })
    }

    /// Waits for the answer.
    pub(super) async fn answer(mut self) -> Result<ServerResult, ServiceError> {
        let answer = (&mut self.answer).await;
        self.answered = true;
        answer.unwrap_or(Err(ServiceError::TransportClosed))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if !self.answered {
            self.link.doubt();
        }
        // Without a runtime everything ends, the connection too.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        // Held weakly: who asks whether the connection is in use must not find this.
        let (link, peer) = (Arc::downgrade(&self.link), self.link.peer().clone());
        if let Some(token) = self.token.take() {
            runtime.spawn(async move {
                if let Some(link) = link.upgrade() {
                    link.watched().lock().await.remove(&token);
                }
            });
        }
        if !self.answered {
            let cancelled = CancelledNotificationParam::new(Some(self.id.clone()), Some(NOBODY_WAITS.to_owned()));
            runtime.spawn(async move {
                // It fails when the server is gone, and then there is nothing to cancel. A server that takes
                // nothing any more is given up with the next call.
                let _ = tokio::time::timeout(CANCEL_TIME, peer.notify_cancelled(cancelled)).await;
            });
        }
    }
}
