//! Undoing what a task did: every completed step that can be undone, the last completed first.
//!
//! Each undo is a journaled operation with tries of its own, so a crash in the middle goes on with
//! what is left. One that fails for good does not stop the others.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};

use super::child::{Child, child_id};
use super::desk::{Turn, Undo, UndoHow, UndoWork};
use super::driver::panicked;
use super::journal::{Key, undo_name};
use super::shown::Try;
use super::step::decode;
use super::{Operation, Run};
use crate::client::Client;
use crate::client::undo::ChildUndo;
use crate::error::TaskError;
use crate::event::NewEvent;
use crate::faults::{self, Mutant};
use crate::record::{Effect, Op, Record};
use crate::retry::RetryPolicy;

/// The pauses between looks at the undo of a child: from the first to the last, twice as long each time.
const FIRST_LOOK: Duration = Duration::from_millis(200);
const LAST_LOOK: Duration = Duration::from_secs(30);

/// What came of undoing.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) undone: Vec<String>,
    /// What could not be undone, and why.
    pub(super) failed: Vec<NotUndone>,
    /// What stays, because nothing says how to undo it.
    pub(super) lasting: Vec<String>,
}

impl Report {
    /// What people are told of it, beside what failed.
    pub(super) fn told(&self) -> Map<String, Value> {
        let undone = [("undone".to_owned(), json!(self.undone))];
        let lasting = (!self.lasting.is_empty()).then(|| ("not_undoable".to_owned(), json!(self.lasting)));
        undone.into_iter().chain(lasting).collect()
    }
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
    let mut report = {
        let desk = run.desk();
        Report { undone: desk.journal().undone(), failed: Vec::new(), lasting: desk.journal().lasting() }
    };
    let mut left = run.desk().journal().undoable();
    if faults::is(Mutant::UndoForward) {
        left.reverse();
    }
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
    let doubtful = run.desk().journal().doubts();
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
        let Undo { how, policy, timeout } = undo;
        let work = match how {
            UndoHow::Call(work) => work,
            UndoHow::Children => {
                operation.undo_children(step, result).await?;
                continue;
            }
        };
        loop {
            tries += 1;
            let started = run.now_micros();
            run.may_start_effect().await;
            let mut tried = run.try_undo(&operation.key.1, tries);
            let error =
                match operation.try_undo(step, (&mut *work, *timeout), result, tries, started, &mut tried).await {
                    Ok(()) => {
                        tried.completed();
                        operation.undone(step, started, tries).await;
                        break;
                    }
                    Err(error) => error,
                };
            if !error.retryable || !policy.allows(tries) {
                tried.failed(&error);
                operation.give_up(tries, started, error).await;
                break;
            }
            let delay = policy.delay(tries);
            tried.retried(&error, delay);
            operation.failed_once(*policy, delay, tries, started, error).await;
        }
    }
}

impl Operation {
    async fn try_undo(
        &self,
        step: &Key,
        (work, timeout): (&mut UndoWork, Option<Duration>),
        result: &RawValue,
        attempt: u32,
        started: i64,
        tried: &mut Try,
    ) -> Result<(), TaskError> {
        let begun = NewEvent::of_step("step.started", &self.key.1, json!({"attempt": attempt, "kind": "undo"}));
        self.run.desk().tell(begun.at(started));
        let traceparent = tried.traceparent.take();
        let context = self.run.context_of(&(step.0, undo_name(step)), step, attempt, traceparent);
        faults::at("undo.before").await?;
        // The function itself may panic, before there is a future.
        let call = || AssertUnwindSafe(async { work(context, result).await }).catch_unwind();
        let work = tried.watch(call);
        let outcome = match timeout {
            None => work.await,
            Some(limit) => match tokio::time::timeout(limit, work).await {
                Ok(outcome) => outcome,
                Err(_) => return Err(TaskError::retryable("timeout", format!("no result after {limit:?}"))),
            },
        };
        faults::after("undo.after", outcome.unwrap_or_else(|panic| Err(panicked(&*panic)))).await
    }

    /// Undoes what the tasks did that a step made, the last one first. Each is undone by a task of its own, and
    /// this one is suspended until that has ended.
    async fn undo_children(&self, step: &Key, result: &RawValue) -> Result<(), TaskError> {
        let (run, started) = (&self.run, self.run.now_micros());
        let begun = NewEvent::of_step("step.started", &self.key.1, json!({"attempt": 1, "kind": "undo"}));
        run.desk().tell(begun.at(started));
        let children: Vec<Child> = decode(step, result)?;
        let client = Client::of_run(&run.inner.engine, run.tenant(), &format!("task {}", run.id()));
        let asked = run.context_of(&(step.0, undo_name(step)), step, 1, None).idempotency_key;
        for child in children.iter().rev() {
            // Its own for each task that undoes, so that a failed one can be tried again by another.
            let own = child_id(run.id(), &format!("{}/{asked}/{}", run.id(), child.id));
            let mut pause = FIRST_LOOK;
            loop {
                let undo = client.undo_child(child.id, own, "the task that made it is undone").await;
                match undo.map_err(|error| TaskError::retryable("store", error.to_string()))? {
                    ChildUndo::Done => break,
                    ChildUndo::Failed(error) => {
                        let error = error.detail("child", child.id.to_string());
                        run.try_undo(&self.key.1, 1).failed(&error);
                        self.give_up(1, started, error).await;
                        return Ok(());
                    }
                    ChildUndo::Waits(task) => {
                        run.desk().wait(&self.key, self.waiting("child", &task.to_string(), None));
                        run.sleep(pause).key(format!("undo of {}", child.id)).await?;
                        run.desk().stop_waiting(&self.key);
                        pause = (pause * 2).min(LAST_LOOK);
                    }
                }
            }
        }
        self.undone(step, started, 1).await;
        Ok(())
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
