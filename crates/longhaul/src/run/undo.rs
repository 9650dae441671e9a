//! Undoing what a task did: every completed step that can be undone, the last completed first.
//!
//! Each undo is a journaled operation with tries of its own, so a crash in the middle goes on with
//! what is left. One that fails for good does not stop the others.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};

use super::desk::{Turn, Undo};
use super::driver::panicked;
use super::journal::{Key, undo_name};
use super::shown::Try;
use super::{Operation, Run};
use crate::error::TaskError;
use crate::event::NewEvent;
use crate::record::{Effect, Op, Record};
use crate::retry::RetryPolicy;

/// What came of undoing.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) undone: Vec<String>,
    /// What could not be undone, and why.
    pub(super) failed: Vec<NotUndone>,
}

/// A step that could not be undone.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct NotUndone {
    pub(super) step: String,
    pub(super) error: TaskError,
}

/// Undoes everything that was completed and can be undone.
pub(super) async fn undo_all(run: Run) -> Result<Box<RawValue>, TaskError> {
    settle_doubts(&run).await?;
    let mut report = Report { undone: run.desk().journal().undone(), failed: Vec::new() };
    let mut left = run.desk().journal().undoable();
    let total = left.len();
    for (number, (key, result)) in left.drain(..).enumerate() {
        let message = format!("Undoing {}", key.1);
        let (step, total) = (u32::try_from(number + 1).unwrap_or(0), u32::try_from(total).unwrap_or(0));
        run.progress("compensating", step, total, &message);
        let undo = run.desk().take_undo(&key);
        match undo_one(&run, &key, &result, undo).await? {
            Ok(()) => report.undone.push(key.1),
            Err(error) => report.failed.push(NotUndone { step: key.1, error }),
        }
    }
    Ok(to_raw_value(&report)?)
}

/// Waits until it is known of every step in doubt whether it happened; only then can the ones
/// before it be undone.
async fn settle_doubts(run: &Run) -> Result<(), TaskError> {
    let doubtful = run.desk().journal().undoable_in_doubt();
    for key in doubtful {
        run.desk().ask_again(&key, Op::Step)?;
        let operation = Operation { run: run.clone(), key, op: Op::Step };
        loop {
            match operation.turn().await {
                Turn::Recorded(_) => break,
                Turn::Start(unfinished) if unfinished.doubt.is_none() => break,
                Turn::Start(_) => operation.wait_for_decision(),
            }
        }
    }
    Ok(())
}

/// Undoes one step. The outer error is the engine's; the inner one is why it cannot be undone.
async fn undo_one(
    run: &Run,
    step: &Key,
    result: &RawValue,
    undo: Option<Undo>,
) -> Result<Result<(), TaskError>, TaskError> {
    // Recorded in the newest part, whichever the step was in.
    let key = (run.desk().journal().newest_part(), undo_name(step));
    run.desk().ask_again(&key, Op::Undo)?;
    let operation = Operation { run: run.clone(), key, op: Op::Undo };
    let mut undo = undo;
    loop {
        let mut tries = match operation.turn().await {
            Turn::Recorded(outcome) => return Ok(outcome.map(drop)),
            Turn::Start(unfinished) => unfinished.tries,
        };
        let Some(undo) = &mut undo else {
            let error = TaskError::fatal(
                "undo_missing",
                format!("the handler did not get to step {} again; was it changed?", step.1),
            );
            run.try_undo(&operation.key.1, 1).failed(&error);
            operation.give_up(1, run.now_micros(), error).await;
            continue;
        };
        loop {
            tries += 1;
            let started = run.now_micros();
            run.may_start_effect().await;
            let mut tried = run.try_undo(&operation.key.1, tries);
            let error = match operation.try_undo(step, undo, result, tries, started, &mut tried).await {
                Ok(()) => {
                    tried.completed();
                    operation.undone(step, started, tries).await;
                    break;
                }
                Err(error) => error,
            };
            if !error.retryable || !undo.policy.allows(tries) {
                tried.failed(&error);
                operation.give_up(tries, started, error).await;
                break;
            }
            let delay = undo.policy.delay(tries);
            tried.retried(&error, delay);
            operation.failed_once(undo.policy, delay, tries, started, error).await;
        }
    }
}

impl Operation {
    async fn try_undo(
        &self,
        step: &Key,
        undo: &mut Undo,
        result: &RawValue,
        attempt: u32,
        started: i64,
        tried: &mut Try,
    ) -> Result<(), TaskError> {
        let begun = NewEvent::of_step("step.started", &self.key.1, json!({"attempt": attempt, "kind": "undo"}));
        self.run.desk().tell(begun.at(started));
        let traceparent = tried.traceparent.take();
        let context = self.run.context_of(&(step.0, undo_name(step)), step, attempt, traceparent);
        // The function itself may panic, before there is a future.
        let work = || AssertUnwindSafe(async { (undo.work)(context, result).await }).catch_unwind();
        let work = tried.watch(work);
        let outcome = match undo.timeout {
            None => work.await,
            Some(limit) => match tokio::time::timeout(limit, work).await {
                Ok(outcome) => outcome,
                Err(_) => return Err(TaskError::retryable("timeout", format!("no result after {limit:?}"))),
            },
        };
        outcome.unwrap_or_else(|panic| Err(panicked(&*panic)))
    }

    async fn undone(&self, step: &Key, started: i64, attempt: u32) {
        let took_ms = (self.run.now_micros() - started) / 1_000;
        let event = NewEvent::of_step(
            "step.completed",
            &self.key.1,
            json!({"attempt": attempt, "kind": "undo", "undoes": step.1, "took_ms": took_ms}),
        );
        let batch = {
            let mut desk = self.run.desk();
            desk.record(self.done(started, RawValue::NULL.to_owned()), [event]);
            desk.record(Record::Undone { part: step.0, step: step.1.clone() }, [])
        };
        self.on_disk(batch).await;
    }

    async fn failed_once(
        &self,
        policy: RetryPolicy,
        delay: Duration,
        attempt: u32,
        started: i64,
        error: TaskError,
    ) {
        let event = NewEvent::of_step(
            "step.failed",
            &self.key.1,
            json!({"attempt": attempt, "attempts": policy.attempts, "kind": "undo", "error": error,
                   "retry_in_ms": u64::try_from(delay.as_millis()).unwrap_or(u64::MAX)}),
        );
        let step = self.key.1.clone();
        let record = Record::Failed { step, effect: Effect::Idempotent, attempt, started, last: false, error };
        self.record(record, [event]).await;
        tokio::time::sleep(delay).await;
    }

    async fn give_up(&self, attempt: u32, started: i64, error: TaskError) {
        let event = NewEvent::of_step(
            "step.failed",
            &self.key.1,
            json!({"attempt": attempt, "kind": "undo", "error": error, "last": true}),
        );
        let step = self.key.1.clone();
        let record = Record::Failed { step, effect: Effect::Idempotent, attempt, started, last: true, error };
        self.record(record, [event]).await;
    }
}
