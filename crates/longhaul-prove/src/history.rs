//! Everything that is known when a run of the suite is over: the store's final content, what clients were told, what
//! readers read, and what really happened.

use std::collections::BTreeMap;
use std::path::Path;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use longhaul::{Ask, Client, Event, Export, Filter, State, Task, TaskError, TaskId};

use crate::Anyhow;
use crate::ledger::{Ledger, Line};
use crate::program::{Program, TENANTS, marker};
use crate::records::{Asked, Records, Sight, Stream};

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// How it was run.
    pub setup: Setup,
    /// The store's tasks.
    pub tasks: BTreeMap<TaskId, Fact>,
    /// What clients and people asked, and were told.
    pub asked: Vec<Asked>,
    /// What was read of events.
    pub streams: Vec<Stream>,
    /// What really happened.
    pub ledger: Vec<Line>,
    /// Tasks of one tenant that another was given.
    pub seen_by_others: Vec<TaskId>,
    /// What was shown over HTTP.
    pub sights: Vec<Sight>,
}

/// How a run of the suite was set up.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// The lease of workers, microseconds.
    pub lease: i64,
    /// When the last fault was over, microseconds by the store's clock.
    pub calm_at: i64,
    /// For how long after a start of its server the store takes no lease back, microseconds, if that was started anew.
    pub grace: i64,
    /// When the host stood still (a small file took longer to write than a quarter of a lease): from and to,
    /// microseconds. Whoever is not let to run, or to write, in time loses its lease by right.
    pub slow: Vec<(i64, i64)>,
    /// Whether everything had settled before the bound.
    pub settled: bool,
    /// How many tasks of a concurrency key may run at once.
    pub limits: BTreeMap<String, u32>,
    /// Whether a subscriber was to hear everything.
    pub heard: bool,
    /// Whether everything that webhooks were to be told has had time to arrive.
    pub hooked: bool,
    /// The schedules: by tenant, the first tick and the time between two, microseconds.
    pub ticks: BTreeMap<String, (i64, i64)>,
    /// Whether everything was to arrive at a broker.
    pub arrives: bool,
    /// How long rows may be held by a transaction whose process is stopped in it, microseconds, if any is: PostgreSQL
    /// ends it then. Claims pass over what is held.
    pub held: i64,
    /// Within which time a task that nothing holds up must have started, microseconds, if the faults do not stand in its way.
    pub starts_within: Option<i64>,
}

/// A task as the store has it in the end.
#[derive(Clone, Debug)]
pub struct Fact {
    /// Its id.
    pub id: TaskId,
    /// Its owner.
    pub tenant: String,
    /// Its input.
    pub program: Program,
    /// Its state.
    pub state: State,
    /// Why it failed or was cancelled.
    pub error: Option<TaskError>,
    /// Runs that ended with its error.
    pub attempts: u32,
    /// How many may.
    pub max_attempts: u32,
    /// When it had to be over, microseconds.
    pub deadline: Option<i64>,
    /// The task that made it.
    pub parent: Option<TaskId>,
    /// What it shares a limit with.
    pub concurrency_key: Option<String>,
    /// The number of its newest event.
    pub last_seq: u64,
    /// Its events.
    pub events: Vec<Event>,
    /// What people were asked.
    pub asks: Vec<Ask>,
    /// The recorded results of its steps, as they were written.
    pub results: BTreeMap<String, String>,
    /// The tenants whose markers are in what its owner can see of it.
    pub carries: Vec<&'static str>,
    /// How urgent it is.
    pub priority: u8,
    /// When it was accepted, microseconds.
    pub created_at: i64,
    /// The task that it is a fork of.
    pub fork_of: Option<TaskId>,
    /// The task that it undoes.
    pub undo_of: Option<TaskId>,
    /// Its labels.
    pub tags: BTreeMap<String, String>,
    /// The version of its state and the goal in it.
    pub goal: Option<(u64, String)>,
}

impl Fact {
    /// Whether it is one that a client submitted: not a child, a fork, an undo or the task of a tick.
    pub fn is_root(&self) -> bool {
        let made = self.parent.or(self.fork_of).or(self.undo_of);
        made.is_none() && !self.tags.contains_key("schedule")
    }

    async fn read(client: &Client, task: Task) -> Result<Self, Anyhow> {
        let id = task.id;
        let exported = client.export(id).await?;
        let carries = carried(&serde_json::to_string(&exported)?);
        let Export { events, steps, .. } = exported;
        let results = steps.into_iter().filter_map(|step| Some((step.name, step.result?.get().to_owned())));
        Ok(Self {
            id,
            program: serde_json::from_str(task.input.get())?,
            state: task.state,
            error: task.error,
            attempts: task.attempts,
            max_attempts: task.max_attempts,
            deadline: task.deadline.map(|at| at.as_microsecond()),
            parent: task.parent_id,
            concurrency_key: task.concurrency_key,
            last_seq: task.last_seq,
            events,
            asks: client.asks(id).await?,
            results: results.collect(),
            carries,
            tenant: task.tenant,
            priority: task.priority.get(),
            created_at: task.created_at.as_microsecond(),
            fork_of: task.fork_of,
            undo_of: task.undo_of,
            tags: task.tags,
            goal: client.state(id).await?.map(|(version, state)| (version, state.goal)),
        })
    }
}

/// How many tasks are read at once in the end.
const READ_AT_ONCE: usize = 16;

/// The tenants whose markers a text carries.
pub fn carried(text: &str) -> Vec<&'static str> {
    TENANTS.into_iter().filter(|tenant| text.contains(&marker(tenant))).collect()
}

/// All tasks of a tenant, oldest first.
pub async fn list(client: &Client, state: Option<State>) -> Result<Vec<Task>, longhaul::Error> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let filter = Filter { state, after, limit: 1_000, oldest_first: true, ..Filter::default() };
        let page = client.page(&filter).await?;
        all.extend(page.tasks);
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(all),
        }
    }
}

impl History {
    /// Gathers everything.
    pub async fn gather(client: &Client, folder: &Path, setup: Setup) -> Result<Self, Anyhow> {
        let (asked, streams) = Records::read(folder)?;
        let (ledger, sights) = (Ledger::read(folder)?, Records::sights(folder)?);
        let history = Self { setup, asked, streams, ledger, sights, ..Self::default() };
        history.with_tasks(client).await
    }

    /// Adds what the store has.
    pub async fn with_tasks(self, client: &Client) -> Result<Self, Anyhow> {
        let mut history = self;
        for (number, tenant) in TENANTS.into_iter().enumerate() {
            let (own, other) = (client.for_tenant(tenant), client.for_tenant(TENANTS[1 - number]));
            let tasks = list(&own, None).await?;
            // Every task is read by its owner, some are asked for by the other.
            for id in tasks.iter().step_by(50).map(|task| task.id) {
                if !matches!(other.task(id).await, Err(longhaul::Error::NotFound(_))) {
                    history.seen_by_others.push(id);
                }
            }
            let reading: Vec<_> = tasks.into_iter().map(|task| Fact::read(&own, task)).collect();
            let mut facts = stream::iter(reading).buffered(READ_AT_ONCE);
            while let Some(fact) = facts.try_next().await? {
                history.tasks.insert(fact.id, fact);
            }
        }
        Ok(history)
    }
}
