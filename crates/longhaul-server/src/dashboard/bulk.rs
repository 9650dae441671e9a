//! Cancelling or resuming all tasks of a list: first it is said how many, then it is done to those, and to none that came
//! after.

use std::collections::HashSet;

use askama::Template;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use futures_util::StreamExt;
use futures_util::stream::iter;
use jiff::Timestamp;
use longhaul::{Client, Filter, Role, State, TaskId};
use serde::Deserialize;

use super::actions::done;
use super::page::{Frame, render};
use super::session::{Posted, Visitor};
use super::show;
use super::tasks::Wanted;
use crate::body::Params;
use crate::problem::Problem;

/// How many tasks are changed by one request at most; the rest is left for another.
const MOST: usize = 10_000;
/// How many are asked for at once: they share transactions.
const AT_ONCE: usize = 64;
/// How many are read at once.
const READ: usize = 500;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum What {
    #[default]
    Cancel,
    Resume,
}

impl What {
    fn applies(self, state: State) -> bool {
        match self {
            Self::Cancel => !state.is_final(),
            Self::Resume => matches!(state, State::Failed | State::Cancelled),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Resume => "resume",
        }
    }

    /// The word for having done it.
    fn participle(self) -> &'static str {
        match self {
            Self::Cancel => "cancelled",
            Self::Resume => "resumed",
        }
    }
}

/// What is to be done with which tasks. The filter's fields stand here once more: forms and addresses are flat.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Asked {
    action: What,
    state: String,
    handler: String,
    queue: String,
    tag: String,
    parent: String,
    q: String,
    /// Also undo, for a cancel.
    undo: Option<String>,
    reason: String,
    /// Only tasks that were there then.
    before: Option<Timestamp>,
}

impl Asked {
    fn wanted(&self) -> Wanted {
        let Self { state, handler, queue, tag, parent, q, .. } = self.clone();
        Wanted { state, handler, queue, tag, parent, q, ..Wanted::default() }
    }

    async fn apply(&self, client: &Client, id: TaskId) -> Result<(), longhaul::Error> {
        let reason = Some(self.reason.trim()).filter(|reason| !reason.is_empty());
        match self.action {
            What::Cancel if self.undo.is_some() => client.cancel_with_undo(id, reason).await?,
            What::Cancel => client.cancel(id, reason).await?,
            What::Resume => client.resume(id).await?,
        };
        Ok(())
    }

    /// The states it is about: those that it can do something with, of those that are listed.
    fn states(&self) -> Result<Vec<State>, Problem> {
        let listed = self.wanted().filter(READ)?.state;
        let about = |state: &State| self.action.applies(*state) && listed.is_none_or(|listed| listed == *state);
        Ok(State::ALL.into_iter().filter(about).collect())
    }

    /// The tasks it applies to that are not among `known`, and whether there may be more.
    async fn tasks(
        &self,
        client: &Client,
        before: Timestamp,
        known: &HashSet<TaskId>,
    ) -> Result<(Vec<TaskId>, bool), Problem> {
        let mut found = Vec::new();
        for state in self.states()? {
            let mut filter = Filter { state: Some(state), oldest_first: true, ..self.wanted().filter(READ)? };
            loop {
                let page = client.page(&filter).await?;
                for task in page.tasks {
                    if task.created_at <= before && !known.contains(&task.id) {
                        if known.len() + found.len() == MOST {
                            return Ok((found, true));
                        }
                        found.push(task.id);
                    }
                }
                match page.next {
                    Some(next) => filter.after = Some(next),
                    None => break,
                }
            }
        }
        // One that changed its state meanwhile may have been met twice.
        found.sort_unstable();
        found.dedup();
        Ok((found, false))
    }
}

#[derive(Template)]
#[template(path = "bulk.html")]
struct Page {
    frame: Frame,
    asked: Asked,
    action: &'static str,
    count: String,
    none: bool,
    more: bool,
    one: bool,
    before: String,
    /// What is filtered by, in words.
    by: Vec<(&'static str, String)>,
}

/// Says how many tasks it would be.
pub(super) async fn page(visitor: Visitor, Params(asked): Params<Asked>) -> Result<Response, Problem> {
    visitor.caller.has(Role::Operator)?;
    let before = visitor.client().clock().now();
    let (tasks, more) = asked.tasks(visitor.client(), before, &HashSet::new()).await?;
    let by = [
        ("state", &asked.state),
        ("handler", &asked.handler),
        ("queue", &asked.queue),
        ("tag", &asked.tag),
        ("parent", &asked.parent),
        ("text", &asked.q),
    ];
    let by = by.into_iter().filter(|(_, value)| !value.trim().is_empty());
    let mut frame = Frame::new(&visitor, format!("{} tasks", asked.action.name()), "tasks").await?;
    // What was counted stays counted.
    frame.stream.clear();
    let view = Page {
        frame,
        action: asked.action.name(),
        count: show::number(tasks.len() as u64),
        none: tasks.is_empty(),
        one: tasks.len() == 1,
        more,
        before: before.to_string(),
        by: by.map(|(name, value)| (name, value.clone())).collect(),
        asked,
    };
    Ok(render(StatusCode::OK, &view))
}

/// Does it.
pub(super) async fn act(
    visitor: Visitor,
    headers: HeaderMap,
    Posted(asked): Posted<Asked>,
) -> Result<Response, Problem> {
    visitor.caller.has(Role::Operator)?;
    let client = visitor.client();
    let before = asked.before.unwrap_or_else(|| client.clock().now());
    let mut asked_for = HashSet::new();
    let (mut changed, mut refused) = (0, 0);
    // Tasks go from state to state while they are looked for, so one may be missed at the first look.
    let more = loop {
        let (tasks, more) = asked.tasks(client, before, &asked_for).await?;
        if tasks.is_empty() {
            break more;
        }
        asked_for.extend(tasks.iter().copied());
        let mut outcomes = iter(tasks).map(|id| asked.apply(client, id)).buffer_unordered(AT_ONCE);
        while let Some(outcome) = outcomes.next().await {
            match outcome {
                Ok(()) => changed += 1,
                // It has ended meanwhile, or was removed: there is nothing left to do.
                Err(longhaul::Error::Control(_) | longhaul::Error::NotFound(_)) => refused += 1,
                Err(error) => return Err(error.into()),
            }
        }
        if more {
            break true;
        }
    };
    let tasks = if changed == 1 { "task" } else { "tasks" };
    let mut message = format!("{} {tasks} {}.", show::number(changed), asked.action.participle());
    if refused > 0 {
        message.push_str(&format!(" {} could not be any more.", show::number(refused)));
    }
    if more {
        message.push_str(" There are more; do it again for those.");
    }
    Ok(done(&headers, "/", &message))
}
