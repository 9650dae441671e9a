//! What a task did and left behind: its steps, its checkpoints, everything of it in one piece; and a
//! message to it.

use std::collections::HashMap;

use jiff::Timestamp;
use serde::Serialize;

use super::{Client, Error};
use crate::event::{Event, LogRow};
use crate::state::AgentState;
use crate::steps::{StepInfo, steps_of};
use crate::store::{Ask, Checkpoint, Controlled, LOG_PAGE};
use crate::task::{Task, TaskId, timestamp};

/// The signal under which clarifying messages arrive.
const MESSAGE: &str = "message";

/// A snapshot as others see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CheckpointInfo {
    /// The number of the event up to which it speaks.
    pub id: u64,
    /// The iteration it was made in.
    pub iteration: u32,
    /// How large it is.
    pub bytes: usize,
    /// When it was made.
    pub created_at: Timestamp,
    /// Whether a run can go on from it, as far as can be told from outside.
    pub valid: bool,
    /// Why not.
    pub why_not: Option<String>,
}

impl CheckpointInfo {
    /// `refused`: why a run would not go on from it.
    fn new(checkpoint: &Checkpoint, refused: Option<&String>) -> Self {
        let damaged = crc32fast::hash(checkpoint.data.as_bytes()) != checkpoint.checksum;
        let why_not = match refused {
            _ if damaged => Some("it is damaged: its checksum is wrong".to_owned()),
            refused => refused.cloned(),
        };
        Self {
            id: checkpoint.seq,
            iteration: checkpoint.iteration,
            bytes: checkpoint.data.len(),
            created_at: timestamp(checkpoint.created_at),
            valid: why_not.is_none(),
            why_not,
        }
    }
}

/// Everything the store has of a task.
#[derive(Clone, Debug, Serialize)]
pub struct Export {
    /// The task.
    pub task: Task,
    /// Its history.
    pub events: Vec<Event>,
    /// Its steps and waits, in the order in which they began.
    pub steps: Vec<StepInfo>,
    /// Its agent state, if it has one.
    pub state: Option<ExportedState>,
    /// What was asked of people.
    pub asks: Vec<Ask>,
    /// What snapshots it has, newest first.
    pub checkpoints: Vec<CheckpointInfo>,
}

/// An agent's state, as an export has it.
#[derive(Clone, Debug, Serialize)]
pub struct ExportedState {
    /// How often it was changed.
    pub version: u64,
    /// The state.
    pub state: AgentState,
}

impl Client {
    /// The task's steps and waits, in the order in which they began.
    pub async fn steps(&self, id: TaskId) -> Result<Vec<StepInfo>, Error> {
        self.task(id).await?;
        Ok(steps_of(id, &self.whole_log(id).await?))
    }

    /// The task's checkpoints, newest first.
    pub async fn checkpoint_list(&self, id: TaskId) -> Result<Vec<CheckpointInfo>, Error> {
        self.task(id).await?;
        let checkpoints = self.engine.store.checkpoints(id).await?;
        if checkpoints.is_empty() {
            return Ok(Vec::new());
        }
        Ok(checkpoint_infos(&checkpoints, &events_of(id, &self.whole_log(id).await?)))
    }

    /// Everything the store has of a task, for those who keep it elsewhere.
    pub async fn export(&self, id: TaskId) -> Result<Export, Error> {
        let task = self.task(id).await?;
        let log = self.whole_log(id).await?;
        let events = events_of(id, &log);
        let state = self.engine.store.state(id).await?;
        let asks = self.engine.store.asks(&self.tenant, Some(id)).await?;
        let checkpoints = self.engine.store.checkpoints(id).await?;
        let checkpoints = checkpoint_infos(&checkpoints, &events);
        let steps = steps_of(id, &log);
        let state = state.map(|(version, state)| ExportedState { version, state });
        Ok(Export { task, events, steps, state, asks, checkpoints })
    }

    /// Writes a consistent copy of the whole store, of every tenant, to a new file while it is in use: a
    /// database file on SQLite, an archive of `pg_dump` on PostgreSQL.
    pub async fn backup(&self, path: impl AsRef<std::path::Path>) -> Result<(), Error> {
        Ok(self.engine.store.backup(path.as_ref()).await??)
    }

    /// Sends the task a clarifying message: the signal `message`, which its handler hears of when it asks
    /// for it.
    pub async fn message(&self, id: TaskId, text: &str) -> Result<Controlled, Error> {
        self.signal(id, MESSAGE, &text).await
    }

    /// All rows of a task's log. Whose task it is must be known already.
    pub(super) async fn whole_log(&self, id: TaskId) -> Result<Vec<LogRow>, Error> {
        let mut log: Vec<LogRow> = Vec::new();
        loop {
            let after = log.last().map_or(0, LogRow::last_seq);
            let rows = self.engine.store.log(id, after, LOG_PAGE).await?;
            if rows.is_empty() {
                return Ok(log);
            }
            log.extend(rows);
        }
    }
}

fn events_of(id: TaskId, log: &[LogRow]) -> Vec<Event> {
    log.iter().flat_map(|row| row.events_of(id)).collect()
}

fn checkpoint_infos(checkpoints: &[Checkpoint], events: &[Event]) -> Vec<CheckpointInfo> {
    let refused: HashMap<u64, String> = events
        .iter()
        .filter(|event| event.kind == "checkpoint.refused")
        .filter_map(|event| Some((event.data["id"].as_u64()?, event.data["why"].as_str()?.to_owned())))
        .collect();
    checkpoints.iter().map(|checkpoint| CheckpointInfo::new(checkpoint, refused.get(&checkpoint.seq))).collect()
}
