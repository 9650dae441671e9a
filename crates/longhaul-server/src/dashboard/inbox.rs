//! The inbox: everything that waits for a person's decision.

use askama::Template;
use axum::http::StatusCode;
use axum::response::Response;
use jiff::Timestamp;
use longhaul::{Ask, AskKind, Filter, State, TaskId};

use super::page::{Frame, render};
use super::session::Visitor;
use super::show::{self, Moment};
use crate::problem::Problem;
use crate::time::timestamp;

/// How many entries are shown; the oldest come first, so that the others follow.
const SHOWN: usize = 100;
/// How much of the arguments is shown.
const ARGUMENTS: usize = 8_000;

/// A question or an approval, with what one has to know to decide.
pub(super) struct Card {
    pub(super) task: TaskId,
    pub(super) task_short: String,
    pub(super) id: String,
    pub(super) approval: bool,
    pub(super) text: String,
    pub(super) tool: Option<String>,
    pub(super) arguments: Option<String>,
    pub(super) risk: Option<String>,
    pub(super) risk_class: &'static str,
    pub(super) digest: String,
    pub(super) asked: Moment,
    pub(super) expires: Option<Moment>,
    pub(super) status: &'static str,
    pub(super) decided_by: Option<String>,
    pub(super) reason: Option<String>,
}

impl Card {
    pub(super) fn new(ask: &Ask, now: Timestamp) -> Self {
        let subject = &ask.subject;
        let arguments = subject.get("arguments").filter(|arguments| !arguments.is_null());
        Self {
            task: ask.task_id,
            task_short: show::short(ask.task_id),
            id: ask.id.clone(),
            approval: ask.kind == AskKind::Approval,
            text: show::cut(&ask.text, ARGUMENTS).0,
            tool: subject["tool"].as_str().map(str::to_owned),
            arguments: arguments.map(|arguments| show::pretty(arguments, ARGUMENTS)),
            risk: subject["risk"].as_str().map(|risk| show::cut(risk, 40).0),
            risk_class: match subject["risk"].as_str() {
                Some("read_only") => "low",
                Some("write_local") => "middle",
                _ => "high",
            },
            digest: ask.digest.clone(),
            asked: Moment::new(timestamp(ask.requested_at), now),
            expires: ask.expires_at.map(|at| Moment::new(timestamp(at), now)),
            status: ask.status.name(),
            decided_by: ask.decided_by.clone(),
            reason: ask.reason.as_ref().map(|reason| show::cut(reason, ARGUMENTS).0),
        }
    }
}

/// A step of which nobody knows whether it happened.
struct Doubt {
    task: TaskId,
    task_short: String,
    handler: String,
    step: String,
    since: Option<Moment>,
}

#[derive(Template)]
#[template(path = "inbox.html")]
struct Page {
    frame: Frame,
    cards: Vec<Card>,
    left_out: usize,
    doubts: Vec<Doubt>,
    /// Where the forms lead.
    next: &'static str,
}

/// The page.
pub(super) async fn page(visitor: Visitor) -> Result<Response, Problem> {
    let client = visitor.client();
    let waiting = Filter { state: Some(State::Waiting), limit: 500, oldest_first: true, ..Filter::default() };
    let (asks, waiting) = tokio::try_join!(client.open_asks(), client.page(&waiting))?;
    let now = client.clock().now();
    let doubts = waiting.tasks.iter().filter_map(|task| {
        let waiting = task.waiting_for.as_ref().filter(|waiting| waiting.kind == "in_doubt")?;
        Some(Doubt {
            task: task.id,
            task_short: show::short(task.id),
            handler: task.handler.clone(),
            step: waiting.id.clone(),
            since: waiting.since.map(|since| Moment::new(since, now)),
        })
    });
    let view = Page {
        frame: Frame::new(&visitor, "Inbox", "inbox").await?,
        left_out: asks.len().saturating_sub(SHOWN),
        cards: asks.iter().take(SHOWN).map(|ask| Card::new(ask, now)).collect(),
        doubts: doubts.take(SHOWN).collect(),
        next: "/inbox",
    };
    Ok(render(StatusCode::OK, &view))
}
