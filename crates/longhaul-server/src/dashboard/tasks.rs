//! The list of tasks: filters that stand in the address, and what can be done with all that match.

use askama::Template;
use axum::http::StatusCode;
use axum::response::Response;
use jiff::Timestamp;
use longhaul::{Filter, State, Task, TaskId};
use serde::Deserialize;

use super::page::{Frame, render};
use super::session::Visitor;
use super::show::{self, Badge, Moment};
use crate::body::Params;
use crate::problem::Problem;
use crate::routes::tasks::{after, cursor};

/// How many tasks a page has.
const PAGE: usize = 50;
/// How much of an input and of a progress message a row shows.
const SHOWN: usize = 140;

/// Which tasks are listed, as it stands in the address.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Wanted {
    pub(super) state: String,
    pub(super) handler: String,
    pub(super) queue: String,
    pub(super) tag: String,
    pub(super) parent: String,
    pub(super) q: String,
    pub(super) order: String,
    pub(super) cursor: String,
}

impl Wanted {
    /// What the store is asked for. An empty field is as none.
    pub(super) fn filter(&self, limit: usize) -> Result<Filter, Problem> {
        let some = |text: &str| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
        let state = some(&self.state)
            .map(|name| state(&name).ok_or_else(|| Problem::parameter("state", "is no state of a task")))
            .transpose()?;
        let tag = some(&self.tag)
            .map(|tag| {
                let (name, value) =
                    tag.split_once('=').ok_or_else(|| Problem::parameter("tag", "must be name=value"))?;
                Ok::<_, Problem>((name.trim().to_owned(), value.trim().to_owned()))
            })
            .transpose()?;
        Ok(Filter {
            state,
            handler: some(&self.handler),
            queue: some(&self.queue),
            tag,
            parent: some(&self.parent).map(|id| crate::body::task_id(&id)).transpose()?,
            q: some(&self.q),
            oldest_first: self.order == "created_at",
            after: some(&self.cursor).map(|cursor| after(&cursor)).transpose()?,
            limit,
        })
    }

    /// The address of the same list with something changed.
    fn address(&self, path: &str, change: &[(&str, &str)]) -> String {
        let fields = [
            ("state", &self.state),
            ("handler", &self.handler),
            ("queue", &self.queue),
            ("tag", &self.tag),
            ("parent", &self.parent),
            ("q", &self.q),
            ("order", &self.order),
        ];
        let mut query: Vec<(&str, &str)> = fields.iter().map(|(name, value)| (*name, value.trim())).collect();
        for &(name, value) in change {
            query.retain(|(known, _)| *known != name);
            query.push((name, value));
        }
        let query: Vec<String> = query
            .iter()
            .filter(|(_, value)| !value.is_empty())
            .map(|(name, value)| format!("{name}={}", show::query_value(value)))
            .collect();
        if query.is_empty() { path.to_owned() } else { format!("{path}?{}", query.join("&")) }
    }

    /// Whether anything is filtered by beside the state.
    fn is_narrowed(&self) -> bool {
        [&self.handler, &self.queue, &self.tag, &self.parent, &self.q].iter().any(|field| !field.trim().is_empty())
    }
}

pub(super) fn state(name: &str) -> Option<State> {
    State::ALL.into_iter().find(|state| state.name() == name)
}

/// A state that can be chosen.
struct Tab {
    name: &'static str,
    count: String,
    address: String,
    here: bool,
}

/// A task in a list.
pub(super) struct Row {
    pub(super) id: TaskId,
    pub(super) short: String,
    pub(super) handler: String,
    pub(super) queue: String,
    pub(super) priority: u8,
    pub(super) input: String,
    pub(super) badge: Badge,
    pub(super) created: Moment,
    /// How long it took, for one that has ended.
    pub(super) took: Option<String>,
    pub(super) cost: Option<String>,
    pub(super) tokens: Option<String>,
    pub(super) message: String,
    pub(super) failed: bool,
    pub(super) step: u32,
    pub(super) total: u32,
    /// How much of the bar is filled, of 100.
    pub(super) done: u32,
}

impl Row {
    pub(super) fn new(task: &Task, now: Timestamp) -> Self {
        let progress = task.progress.as_ref();
        let (step, total) = progress.map_or((0, 0), |progress| (progress.step, progress.total_step));
        let failed = task.state == State::Failed;
        let message = match (&task.error, progress) {
            (Some(error), _) if task.state.is_final() => error.message.clone(),
            (_, Some(progress)) => progress.message.clone(),
            _ => String::new(),
        };
        let done = if task.state == State::Completed { 100 } else { percent(step, total) };
        Self {
            id: task.id,
            short: show::short(task.id),
            handler: task.handler.clone(),
            queue: task.queue.clone(),
            priority: task.priority.get(),
            input: show::line(&task.input, SHOWN),
            badge: Badge::of(task),
            created: Moment::new(task.created_at, now),
            took: task.finished_at.map(|at| show::exact(at.duration_since(task.created_at))),
            cost: show::cost(task),
            tokens: show::tokens(task).map(show::compact),
            message: show::cut(&message, SHOWN).0,
            failed,
            step,
            total,
            done,
        }
    }
}

/// How much is done. A handler may say anything.
fn percent(step: u32, total: u32) -> u32 {
    let percent = (u64::from(step) * 100).checked_div(total.into()).unwrap_or(0);
    u32::try_from(percent).unwrap_or(100).min(100)
}

#[derive(Template)]
#[template(path = "tasks.html")]
struct Page {
    frame: Frame,
    wanted: Wanted,
    tabs: Vec<Tab>,
    handlers: Vec<String>,
    queues: Vec<String>,
    rows: Vec<Row>,
    next: Option<String>,
    first: Option<String>,
    clear: Option<String>,
    order: String,
    cancel: Option<String>,
    resume: Option<String>,
    submitted_any: bool,
}

/// The page.
pub(super) async fn page(visitor: Visitor, Params(wanted): Params<Wanted>) -> Result<Response, Problem> {
    let client = visitor.client();
    let filter = wanted.filter(PAGE)?;
    let (page, stats, handlers) = tokio::try_join!(client.page(&filter), client.stats(), client.handlers())?;
    let now = client.clock().now();
    let counts = stats.tasks;
    let all = [counts.pending, counts.running, counts.waiting, counts.completed, counts.failed, counts.cancelled];
    let shown = |count: u64| match counts.bounded {
        true if count > 0 => format!("{}+", show::number(count)),
        _ => show::number(count),
    };
    let mut tabs = vec![Tab {
        name: "all",
        count: shown(all.iter().sum()),
        address: wanted.address("/", &[("state", "")]),
        here: wanted.state.is_empty(),
    }];
    tabs.extend(State::ALL.iter().zip(all).map(|(state, count)| Tab {
        name: state.name(),
        count: if *state == State::Running { show::number(count) } else { shown(count) },
        address: wanted.address("/", &[("state", state.name())]),
        here: wanted.state == state.name(),
    }));
    let can = |applies: fn(State) -> bool| visitor.operates() && filter.state.is_none_or(applies);
    let bulk = |action: &str| wanted.address("/bulk", &[("action", action)]);
    let order = if filter.oldest_first { "" } else { "created_at" };
    let view = Page {
        frame: Frame::new(&visitor, "Tasks", "tasks").await?,
        tabs,
        handlers: handlers.into_iter().map(|handler| handler.name).collect(),
        queues: stats.queues.into_iter().map(|queue| queue.name).collect(),
        rows: page.tasks.iter().map(|task| Row::new(task, now)).collect(),
        next: page.next.map(|next| wanted.address("/", &[("cursor", &cursor(next))])),
        first: filter.after.is_some().then(|| wanted.address("/", &[])),
        clear: wanted.is_narrowed().then(|| {
            let state = wanted.state.clone();
            Wanted { state, ..Wanted::default() }.address("/", &[])
        }),
        order: wanted.address("/", &[("order", order)]),
        cancel: can(|state| !state.is_final()).then(|| bulk("cancel")),
        resume: can(|state| matches!(state, State::Failed | State::Cancelled)).then(|| bulk("resume")),
        submitted_any: all.iter().any(|count| *count > 0),
        wanted,
    };
    Ok(render(StatusCode::OK, &view))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_beyond_its_end_is_all_of_it() {
        assert_eq!([percent(1, 3), percent(3, 3), percent(4, 3), percent(1, 0)], [33, 100, 100, 0]);
        assert_eq!(
            [percent(u32::MAX, 1), percent(u32::MAX, u32::MAX), percent(42_949_673, 100_000_000)],
            [100, 100, 42]
        );
    }

    #[test]
    fn a_list_is_found_again_by_its_address() {
        let wanted = Wanted { q: "a&b=c".into(), state: "failed".into(), ..Wanted::default() };
        assert_eq!(wanted.address("/", &[]), "/?state=failed&q=a%26b%3Dc");
        assert_eq!(wanted.address("/", &[("state", "")]), "/?q=a%26b%3Dc");
        let filter = wanted.filter(10).expect("it can be asked for");
        assert_eq!((filter.q.as_deref(), filter.state), (Some("a&b=c"), Some(State::Failed)));
        assert!(Wanted { state: "lost".into(), ..Wanted::default() }.filter(1).is_err());
        assert!(Wanted { tag: "lost".into(), ..Wanted::default() }.filter(1).is_err());
    }
}
