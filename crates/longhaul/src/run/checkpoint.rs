//! Checkpoints: taking a snapshot, and going on from one.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::Run;
use super::desk::Begun;
use super::driver::patiently;
use crate::error::TaskError;
use crate::event::{LogRow, NewEvent};
use crate::meter::Checkpointed;
use crate::record::{Record, records_of};
use crate::state::AgentState;
use crate::store::clock::micros;
use crate::store::{Checkpoint, LOG_PAGE, NewCheckpoint, StoreError};
use crate::task::Phase;

/// How many checkpoints of a task are kept, until what age they may be used, and what happens when
/// one may not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointPolicy {
    /// How many are kept; the newest always is.
    pub max_count: u32,
    /// Older ones are removed, and refused. Time that the task spent waiting since (for people, times,
    /// signals, children) does not count when one is to be used.
    pub max_age: Duration,
    /// What happens when one is refused.
    pub on_refused: OnRefused,
}

impl Default for CheckpointPolicy {
    fn default() -> Self {
        Self { max_count: 10, max_age: Duration::from_secs(86_400), on_refused: OnRefused::GoOn }
    }
}

/// What happens when a checkpoint is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnRefused {
    /// The one before it is tried, then the journal serves.
    #[default]
    GoOn,
    /// The task fails with `checkpoint_refused`.
    Fail,
}

impl Run {
    /// Takes a snapshot from which [`Run::resume`] can go on without replaying the steps before
    /// it. `version` names its form; `policy` says how many are kept and for how long.
    pub async fn checkpoint(
        &self,
        version: u32,
        iteration: u32,
        snapshot: &impl Serialize,
        policy: CheckpointPolicy,
    ) -> Result<(), TaskError> {
        let data = serde_json::to_string(snapshot)?;
        std::future::poll_fn(|cx| self.desk().poll_loaded(cx)).await;
        let CheckpointPolicy { max_count, max_age, .. } = policy;
        let batch = self.desk().checkpoint(NewCheckpoint { version, iteration, data, max_count, max_age })?;
        if let Some(batch) = batch {
            std::future::poll_fn(|cx| self.desk().poll_disk(batch, cx)).await;
            self.inner.engine.meter.checkpoint(Checkpointed::Taken);
        }
        Ok(())
    }

    /// The newest snapshot that can be trusted, when there is one; to be asked for before the
    /// first step. One that is too old, of another version or damaged is refused with an event
    /// `checkpoint.refused`, and the one before it is tried, unless the policy says that the task fails
    /// then; `None` means that the journal is replayed from its beginning.
    pub async fn resume<S: DeserializeOwned>(
        &self,
        version: u32,
        policy: CheckpointPolicy,
    ) -> Result<Option<S>, TaskError> {
        if self.inner.lease.phase == Phase::Compensating {
            // What is to be undone may lie before any checkpoint.
            return Ok(None);
        }
        let store = &self.inner.engine.store;
        let checkpoints = patiently(|| store.checkpoints(self.id())).await.map_err(store_error)?;
        for checkpoint in checkpoints {
            let refused = match self.check(&checkpoint, version, policy).await? {
                Ok((snapshot, begun)) => {
                    let state = if self.desk().is_loaded() { None } else { self.newest_state().await? };
                    self.desk().resume_at(begun, checkpoint.seq, state);
                    return Ok(Some(snapshot));
                }
                Err(refused) => refused,
            };
            self.refused(&checkpoint, &refused);
            if policy.on_refused == OnRefused::Fail {
                let message = format!("checkpoint {} is refused: {refused}", checkpoint.seq);
                return Err(TaskError::fatal("checkpoint_refused", message).detail("checkpoint", checkpoint.seq));
            }
        }
        Ok(None)
    }

    /// The snapshot, and the part of the journal that it begins; or why it is refused.
    async fn check<S: DeserializeOwned>(
        &self,
        checkpoint: &Checkpoint,
        version: u32,
        policy: CheckpointPolicy,
    ) -> Result<Result<(S, Begun), String>, TaskError> {
        if checkpoint.version != version {
            return Ok(Err(format!("it has version {}, wanted is {version}", checkpoint.version)));
        }
        if crc32fast::hash(checkpoint.data.as_bytes()) != checkpoint.checksum {
            return Ok(Err("it is damaged: its checksum is wrong".to_owned()));
        }
        let snapshot = match serde_json::from_str(&checkpoint.data) {
            Ok(snapshot) => snapshot,
            Err(error) => return Ok(Err(format!("it cannot be read: {error}"))),
        };
        let age = self.now_micros() - checkpoint.created_at;
        let old = age > micros(policy.max_age);
        let since = self.log_since(checkpoint, old).await?;
        let Some(begun) = begun(checkpoint, &since) else {
            return Ok(Err("the log does not know it".to_owned()));
        };
        let age = age - if old { self.waited(&since) } else { 0 };
        if age > micros(policy.max_age) {
            let (age, most) = (age / 1_000_000, policy.max_age.as_secs());
            return Ok(Err(format!(
                "it is {age} s old, without the time spent waiting; at most {most} s are allowed"
            )));
        }
        Ok(Ok((snapshot, begun)))
    }

    fn refused(&self, checkpoint: &Checkpoint, why: &str) {
        self.inner.engine.meter.checkpoint(Checkpointed::Refused);
        tracing::warn!(task = %self.id(), seq = checkpoint.seq, why, "a checkpoint was refused");
        self.desk().tell(NewEvent::new(
            "checkpoint.refused",
            json!({"id": checkpoint.seq, "iteration": checkpoint.iteration, "why": why}),
        ));
    }

    async fn newest_state(&self) -> Result<Option<(u64, AgentState)>, TaskError> {
        patiently(|| self.inner.engine.store.state(self.id())).await.map_err(store_error)
    }

    /// The log from the checkpoint's row on: all of it, or as much as is read at once.
    async fn log_since(&self, checkpoint: &Checkpoint, all: bool) -> Result<Vec<LogRow>, TaskError> {
        let mut after = checkpoint.seq.saturating_sub(1);
        let mut log = Vec::new();
        loop {
            let rows = patiently(|| self.inner.engine.store.log(self.id(), after, LOG_PAGE)).await;
            let rows = rows.map_err(store_error)?;
            let Some(last) = rows.last() else { return Ok(log) };
            after = last.last_seq();
            log.extend(rows);
            if !all || after >= self.inner.lease.last_seq {
                return Ok(log);
            }
        }
    }

    /// How long the task waited in this part of its log, microseconds: from each suspend until it ran
    /// again.
    fn waited(&self, log: &[LogRow]) -> i64 {
        let (mut waited, mut since) = (0, None);
        for event in log.iter().flat_map(|row| row.events_of(self.id())) {
            let time = event.time.as_microsecond();
            match event.kind.as_str() {
                "task.waiting" => since = Some(time),
                "task.started" => waited += since.take().map_or(0, |since| time - since),
                _ => {}
            }
        }
        waited
    }
}

fn store_error(error: StoreError) -> TaskError {
    TaskError::retryable("store", error.to_string())
}

/// The part of the journal that a checkpoint begins.
fn begun(checkpoint: &Checkpoint, log: &[LogRow]) -> Option<Begun> {
    let row = log.first().filter(|row| row.last_seq() == checkpoint.seq)?;
    records_of(row).unwrap_or_default().into_iter().find_map(|record| match record {
        Record::Checkpoint { part, kept } => Some(Begun { part, kept }),
        _ => None,
    })
}
