//! The two-way channel of one task: its events down, what people want of it up.

use std::pin::pin;

use axum::extract::State;
use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, WebSocketUpgrade, close_code};
use axum::response::Response;
use futures_util::stream::{BoxStream, try_unfold};
use futures_util::{StreamExt, TryStreamExt};
use longhaul::store::StoreError;
use longhaul::{Event, Events, Live, Role, TaskId};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::live_frame;
use crate::auth::{Anyone, Caller};
use crate::body::{OfTask, Params, parse};
use crate::problem::Problem;
use crate::routes::Commands;
use crate::state::App;

/// The largest message that is taken.
const MAX_MESSAGE_BYTES: usize = 1024 * 1024 + 64 * 1024;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(channel))
}

#[derive(Deserialize, IntoParams)]
struct ChannelParams {
    /// The number of the last event seen.
    #[param(minimum = 0)]
    after: Option<u64>,
    /// A stream token, for browsers; with one, nothing may be sent.
    #[allow(dead_code, reason = "read where it is found out who asks")]
    access_token: Option<String>,
}

/// A WebSocket with the task's events and what its model writes down, and commands up: `cancel`, `answer`, `approve`, `deny`, `priority`, `message`, `patch`.
#[utoipa::path(get, path = "/v1/tasks/{id}/ws", tag = "streams",
    params(("id" = String, Path, description = "The task's id"), ChannelParams),
    responses((status = 101, description = "The channel is open")))]
async fn channel(
    State(app): State<App>,
    Anyone(caller): Anyone,
    OfTask(id, ()): OfTask,
    Params(params): Params<ChannelParams>,
    upgrade: Result<WebSocketUpgrade, axum::extract::ws::rejection::WebSocketUpgradeRejection>,
) -> Result<Response, Problem> {
    let upgrade = upgrade.map_err(|error| Problem::new("invalid_parameter", error.body_text()))?;
    caller.may_follow(id)?;
    let after = params.after.unwrap_or(0);
    let live = caller.client.live(id);
    let events = all_events(caller.client.events(id, after).await?);
    let upgrade = upgrade.max_message_size(MAX_MESSAGE_BYTES).max_frame_size(MAX_MESSAGE_BYTES);
    // The browser offers its token as a protocol or in the query; nothing of that is a protocol of ours.
    Ok(upgrade.on_upgrade(move |socket| async move {
        let _reader = app.metrics().ws_reader();
        Channel { app, caller, task: id }.run(socket, Down { events, live, last: after }).await;
    }))
}

struct Channel {
    app: App,
    caller: Caller,
    task: TaskId,
}

/// What goes down the channel.
struct Down {
    /// A stream, so that reading goes on where it was whatever else happens on the channel.
    events: BoxStream<'static, Result<Event, StoreError>>,
    live: Live,
    /// The number of the last event given.
    last: u64,
}

impl Channel {
    async fn run(self, mut socket: WebSocket, mut down: Down) {
        let mut heartbeat = tokio::time::interval(self.app.settings().heartbeat);
        heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let stopping = self.app.stopping().clone();
        let mut token_ends = pin!(self.caller.ends(&self.app));
        let close = loop {
            let sent = tokio::select! {
                event = down.events.try_next() => match event {
                    Ok(Some(event)) => {
                        down.last = event.seq;
                        let sent = socket.send(told(&event)).await;
                        if sent.is_ok() && event.is_final() {
                            break close(close_code::NORMAL, "the task has ended");
                        }
                        sent
                    }
                    Ok(None) => break close(close_code::NORMAL, "the task has ended"),
                    Err(_) => break close(close_code::AGAIN, "the store does not answer; resume with ?after="),
                },
                Some(text) = down.live.next() => {
                    socket.send(Message::Text(live_frame(&text, down.last).to_string().into())).await
                }
                message = socket.recv() => match message {
                    Some(Ok(Message::Text(text))) => socket.send(self.obey(text.as_bytes()).await).await,
                    Some(Ok(Message::Binary(_))) => break close(close_code::UNSUPPORTED, "send text"),
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => Ok(()),
                    Some(Ok(Message::Close(_)) | Err(_)) | None => return,
                },
                _ = heartbeat.tick() => socket.send(Message::Ping(Default::default())).await,
                () = &mut token_ends => break close(close_code::POLICY, "the token is no longer good"),
                () = stopping.cancelled() => break close(close_code::RESTART, "the server is stopping; connect again"),
            };
            if sent.is_err() {
                return;
            }
        };
        // The reader may be gone already.
        let _ = socket.send(close).await;
    }

    /// Does what a message asks, and says what came of it.
    async fn obey(&self, text: &[u8]) -> Message {
        let command: Result<Up, Problem> = parse(text);
        let (reference, done) = match command {
            Ok(command) => (command.reference.clone(), self.command(command).await),
            Err(problem) => (None, Err(problem)),
        };
        let error = done.err().map(|problem| problem.to_json());
        let ack = json!({"type": "ack", "ref": reference, "ok": error.is_none(), "error": error});
        Message::Text(ack.to_string().into())
    }

    async fn command(&self, up: Up) -> Result<(), Problem> {
        self.caller.has(Role::Operator)?;
        let commands = Commands { client: &self.caller.client, task: self.task };
        let word = |name: &str| up.body.get(name).and_then(Value::as_str);
        let body = |names: &[&str]| {
            // What names the thing is in the path of an HTTP request; here it stands beside the body.
            let body: Map<String, Value> = up
                .body
                .iter()
                .filter(|(name, _)| !names.contains(&name.as_str()))
                .map(|(n, v)| (n.clone(), v.clone()))
                .collect();
            serde_json::to_vec(&body).map_err(|_| Problem::new("invalid_json", "the message cannot be read"))
        };
        match up.kind.as_str() {
            "cancel" => commands.cancel(&body(&[])?).await,
            "priority" => commands.priority(&body(&[])?).await,
            "message" => commands.message(&body(&[])?).await,
            "answer" => commands.answer(word("id").or(word("question_id")), &body(&["id", "question_id"])?).await,
            "approve" | "deny" => {
                let approval = word("id").or(word("approval_id"));
                commands.approval(approval, up.kind == "approve", word("reason"), word("digest")).await
            }
            "patch" => {
                let version = up.body.get("version").and_then(Value::as_u64);
                let patch = match up.body.get("patch") {
                    Some(patch) => patch.to_string().into_bytes(),
                    None => body(&["version"])?,
                };
                commands.patch(&patch, version).await.map(drop)
            }
            other => Err(Problem::field(
                "type",
                format!(
                    "is '{}'; it must be cancel, answer, approve, deny, priority, message or patch",
                    other.escape_debug()
                ),
            )),
        }
    }
}

/// A message from the client.
#[derive(Deserialize)]
struct Up {
    #[serde(rename = "type")]
    kind: String,
    /// Comes back with the acknowledgement.
    #[serde(rename = "ref")]
    reference: Option<Value>,
    #[serde(flatten)]
    body: Map<String, Value>,
}

fn all_events(events: Events) -> BoxStream<'static, Result<Event, StoreError>> {
    try_unfold(events, |mut events| async move { Ok(events.next().await?.map(|event| (event, events))) }).boxed()
}

fn told(event: &Event) -> Message {
    Message::Text(json!({"type": "event", "event": event}).to_string().into())
}

fn close(code: u16, reason: &'static str) -> Message {
    Message::Close(Some(CloseFrame { code, reason: Utf8Bytes::from_static(reason) }))
}
