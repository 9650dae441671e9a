//! Going on from a checkpoint.

use serde::de::DeserializeOwned;
use serde_json::json;

use super::desk::Begun;
use super::driver::patiently;
use super::{CheckpointPolicy, Run};
use crate::error::TaskError;
use crate::event::NewEvent;
use crate::meter::Checkpointed;
use crate::record::{Record, records_of};
use crate::state::AgentState;
use crate::store::clock::micros;
use crate::store::{Checkpoint, LOG_PAGE, StoreError};
use crate::task::Phase;

/// The newest checkpoint that can be trusted; everything before it need not be replayed.
pub(super) async fn resume<S: DeserializeOwned>(
    run: &Run,
    version: u32,
    policy: CheckpointPolicy,
) -> Result<Option<S>, TaskError> {
    if run.inner.lease.phase == Phase::Compensating {
        // What is to be undone may lie before any checkpoint.
        return Ok(None);
    }
    let store = &run.inner.engine.store;
    let checkpoints = patiently(|| store.checkpoints(run.id())).await.map_err(store_error)?;
    for checkpoint in checkpoints {
        let refused = match check(run, &checkpoint, version, policy) {
            Ok(snapshot) => match part_of(run, &checkpoint).await? {
                Some(begun) => {
                    let state = if run.desk().is_loaded() { None } else { state_of(run).await? };
                    run.desk().resume_at(begun, checkpoint.seq, state);
                    return Ok(Some(snapshot));
                }
                None => "the log does not know it".to_owned(),
            },
            Err(why) => why,
        };
        run.inner.engine.meter.checkpoint(Checkpointed::Refused);
        tracing::warn!(task = %run.id(), seq = checkpoint.seq, why = refused, "a checkpoint was refused");
        run.desk().tell(NewEvent::new(
            "checkpoint.refused",
            json!({"id": checkpoint.seq, "iteration": checkpoint.iteration, "why": refused}),
        ));
    }
    Ok(None)
}

fn check<S: DeserializeOwned>(
    run: &Run,
    checkpoint: &Checkpoint,
    version: u32,
    policy: CheckpointPolicy,
) -> Result<S, String> {
    if checkpoint.version != version {
        return Err(format!("it has version {}, wanted is {version}", checkpoint.version));
    }
    let age = run.now_micros() - checkpoint.created_at;
    if age > micros(policy.max_age) {
        return Err(format!(
            "it is {} s old, at most {} s are allowed",
            age / 1_000_000,
            policy.max_age.as_secs()
        ));
    }
    if crc32fast::hash(checkpoint.data.as_bytes()) != checkpoint.checksum {
        return Err("it is damaged: its checksum is wrong".to_owned());
    }
    serde_json::from_str(&checkpoint.data).map_err(|error| format!("it cannot be read: {error}"))
}

fn store_error(error: StoreError) -> TaskError {
    TaskError::retryable("store", error.to_string())
}

async fn state_of(run: &Run) -> Result<Option<(u64, AgentState)>, TaskError> {
    patiently(|| run.inner.engine.store.state(run.id())).await.map_err(store_error)
}

/// The part of the journal that a checkpoint begins.
async fn part_of(run: &Run, checkpoint: &Checkpoint) -> Result<Option<Begun>, TaskError> {
    let after = checkpoint.seq.saturating_sub(1);
    let rows = patiently(|| run.inner.engine.store.log(run.id(), after, LOG_PAGE)).await.map_err(store_error)?;
    let Some(row) = rows.first().filter(|row| row.last_seq() == checkpoint.seq) else { return Ok(None) };
    Ok(records_of(row).unwrap_or_default().into_iter().find_map(|record| match record {
        Record::Checkpoint { part, kept } => Some(Begun { part, kept }),
        _ => None,
    }))
}
