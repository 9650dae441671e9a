//! Why a task stands where it stands: gathering the facts.

use super::{Client, Error};
use crate::steps::steps_of;
use crate::store::{LOG_PAGE, locks};
use crate::task::{State, TaskId};
use crate::why::{Gathered, Why, explain};

/// How many of a running task's newest events are looked at to know its step.
const NEWEST: u64 = 100;

impl Client {
    /// Why the task stands where it stands, and what would change that.
    pub async fn why(&self, id: TaskId) -> Result<Why, Error> {
        let store = &self.engine.store;
        let task = self.task(id).await?;
        let waiting = task.waiting_for.as_ref().filter(|_| task.state == State::Waiting);
        let of_kind = |kind: &str| waiting.filter(|waiting| waiting.kind == kind);
        let lock = of_kind("lock").map(|waiting| locks::key(&self.tenant, &waiting.id));
        let mut facts = store.facts(id, lock.as_deref()).await?.ok_or(Error::NotFound(id))?;
        let workers =
            if task.state.is_final() || waiting.is_some() { Vec::new() } else { store.workers().await? };
        let asks = match of_kind("approval").or(of_kind("question")) {
            Some(_) => store.asks(&self.tenant, Some(id)).await?,
            None => Vec::new(),
        };
        let child = match of_kind("child").and_then(|waiting| waiting.id.parse().ok()) {
            Some(child) => store.task(&self.tenant, child).await?,
            None => None,
        };
        let mut steps = Vec::new();
        if task.state == State::Running {
            let rows = store.log(id, task.last_seq.saturating_sub(NEWEST), LOG_PAGE).await?;
            let started = |row: &&crate::event::LogRow| row.run == task.fence;
            facts.started_at = rows.iter().find(started).map(|row| row.time);
            steps = steps_of(id, &rows);
        }
        let taken_back = match task.state {
            State::Failed | State::Cancelled => self.undo_of_what_it_took_over(&task).await?,
            _ => None,
        };
        Ok(explain(&Gathered { task, facts, workers, asks, child, steps, taken_back }))
    }
}
