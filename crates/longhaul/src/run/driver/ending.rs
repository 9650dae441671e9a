//! How runs end: what each way of ending writes, and offering it to the store until it is taken.

use std::ops::ControlFlow;

use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{Driver, End, OFFER_END, PAUSE, cancel_error};
use crate::error::TaskError;
use crate::event::NewEvent;
use crate::meter::Ended;
use crate::record::Record;
use crate::run::shown::is_over;
use crate::run::undo::Report;
use crate::store::{Beat, Cancel, Commit, CommitRefused, Committed, Heartbeat, Outcome, StoreError};
use crate::task::State;

impl Driver {
    /// Writes how the run ended. A cancel or a deadline that came in between wins: it is given
    /// back.
    pub(super) async fn write_end(&self, end: End) -> ControlFlow<Ended, End> {
        let commit = match &end {
            End::Suspended => return over(Ended::Suspended, None),
            End::Lost => {
                tracing::warn!(task = %self.run.id(), fence = self.run.fence(), "the lease was lost; giving the task up");
                self.run.inner.engine.meter.leases_lost.inc();
                return over(Ended::Lost, None);
            }
            End::Returned(Ok(result)) => match serde_json::to_value(result) {
                Ok(told) => self.completed(result, &told),
                // A number like 1e400: a handler may give any text as JSON.
                Err(error) => {
                    let message = format!("the result cannot be told to others: {error}");
                    return ControlFlow::Continue(End::Returned(Err(TaskError::fatal("bad_result", message))));
                }
            },
            End::Returned(Err(error)) => self.failed(error),
            End::Cancelled => self.cancelled(cancel_error(&self.cancel_request().await)),
            End::DeadlineExceeded => self.failed_for_good(self.deadline_error(), false),
            End::HandBack | End::LeaseOver => self.handed_back(),
            End::Undone { state, error, report } => self.undone(*state, error, report),
            End::Interrupted(error) => self.interrupted_by(error),
            End::UndoElsewhere { state, error } => self.undo_elsewhere(*state, error),
        };
        let is_final = commit.outcome.as_ref().is_some_and(|outcome| outcome.state().is_final());
        let ended = commit.outcome.as_ref().map_or(Ended::Released, Ended::from);
        let error = commit.outcome.as_ref().and_then(Outcome::error).cloned();
        let other = match self.offer(commit).await {
            Ok(Err(CommitRefused::Cancelled)) => End::Cancelled,
            Ok(Err(CommitRefused::DeadlineExceeded)) => End::DeadlineExceeded,
            Ok(Err(CommitRefused::ApprovalExpired { id })) => {
                let mut desk = self.run.desk();
                desk.not_committed();
                desk.without_use(&id);
                return ControlFlow::Continue(end);
            }
            Ok(Err(CommitRefused::Stale { .. })) => {
                // Others wrote to the log meanwhile; what was gathered follows theirs.
                self.run.desk().not_committed();
                return ControlFlow::Continue(match self.load().await {
                    Ok(()) => end,
                    Err(error) => End::Returned(Err(error)),
                });
            }
            Ok(Err(refused)) => {
                tracing::info!(task = %self.run.id(), %refused, "the end of a run was refused");
                self.run.inner.engine.meter.leases_lost.inc();
                return over(Ended::Lost, None);
            }
            Ok(Ok(_)) => {
                if is_final {
                    self.let_go().await;
                }
                return over(ended, error.as_ref());
            }
            Err(error) => {
                tracing::warn!(task = %self.run.id(), %error, "the end of a run could not be written; the task will be taken over");
                return over(Ended::Lost, None);
            }
        };
        self.run.desk().not_committed();
        ControlFlow::Continue(other)
    }

    /// The task has ended, and with it what it held; the sweep does this if it cannot be done here.
    async fn let_go(&self) {
        if !self.run.desk().journal().is_locked() {
            return;
        }
        if let Err(error) = self.run.inner.engine.store.let_go(&[self.run.id()]).await {
            tracing::debug!(task = %self.run.id(), %error, "its locks are left to the sweep");
        }
    }

    fn completed(&self, result: &RawValue, told: &Value) -> Commit {
        let event = NewEvent::new("task.completed", json!({"result": told}));
        self.run.desk().end_commit(true, Some(event), None, Outcome::Completed { result: result.to_owned() })
    }

    /// The handler's error: another run if there may be one, the end otherwise.
    fn failed(&self, error: &TaskError) -> Commit {
        let lease = &self.run.inner.lease;
        let attempts = lease.attempts + 1;
        if self.is_final(error) {
            return self.failed_for_good(error.clone().detail("task_attempts", attempts), true);
        }
        let after = self.manners.retry.delay(attempts);
        let message = format!(
            "Attempt {attempts} of {} failed ({}); trying again in {:.1} s",
            lease.max_attempts,
            error.message,
            after.as_secs_f64()
        );
        let mut event = self.run.progress_event("retrying", 0, 0, None, &message);
        event.data["error"] = json!(error);
        let outcome = Outcome::Retry { error: error.clone(), after, attempt: true };
        self.run.desk().end_commit(true, Some(event), Some(Record::Reopened { resumed: false }), outcome)
    }

    fn failed_for_good(&self, error: TaskError, attempt: bool) -> Commit {
        let event = NewEvent::new("task.failed", json!({"error": error}));
        // After a deadline, or when it was undone, only this may still be written, so it is no step forward.
        let forward = attempt && !self.undoing;
        self.run.desk().end_commit(forward, Some(event), None, Outcome::Failed { error, attempt })
    }

    fn cancelled(&self, error: TaskError) -> Commit {
        let event = NewEvent::new("task.cancelled", json!({"error": error}));
        self.run.desk().end_commit(false, Some(event), None, Outcome::Cancelled { error })
    }

    fn handed_back(&self) -> Commit {
        let message = "The worker stops; another one goes on from the last recorded step.";
        let event = self.run.progress_event("retrying", 0, 0, None, message);
        self.run.desk().end_commit(!self.undoing, Some(event), None, Outcome::Released)
    }

    /// The end of a task that undid what it did. What could not be undone is its error then, with
    /// the original one as the cause.
    fn undone(&self, state: State, error: &TaskError, report: &Report) -> Commit {
        let told = report.told();
        let with_told = |error: TaskError| {
            told.iter().fold(error, |error, (name, names)| error.detail(name.as_str(), names.clone()))
        };
        // The handler's error, and not a deadline (`undo_needed`).
        let attempt = error.details.get("task_attempts").is_some();
        if report.failed.is_empty() {
            self.run.desk().tell(NewEvent::new("saga.compensated", json!(told)));
            if state == State::Completed {
                return self.undone_by_request(&json!(told));
            }
            let error = with_told(error.clone());
            return match state {
                State::Cancelled => self.cancelled(error),
                _ => self.failed_for_good(error, attempt),
            };
        }
        let names: Vec<&str> = report.failed.iter().map(|failed| failed.step.as_str()).collect();
        let message = format!("{}, and {} could not be undone", error.message, names.join(", "));
        let error = with_told(TaskError::fatal("compensation_failed", message))
            .detail("not_undone", json!(report.failed))
            .caused_by(error.clone());
        self.run.desk().tell(NewEvent::new("saga.compensation_failed", json!({"error": error})));
        self.failed_for_good(error, attempt)
    }

    /// The end of a task whose only work was to undo another.
    fn undone_by_request(&self, result: &Value) -> Commit {
        let event = NewEvent::new("task.completed", json!({"result": result}));
        // Lists of names always serialise.
        let result = to_raw_value(result).unwrap_or_else(|_| RawValue::NULL.to_owned());
        self.run.desk().end_commit(false, Some(event), None, Outcome::Completed { result })
    }

    /// Tries again later; nothing of what has to be undone is given up, unless trying again cannot
    /// help.
    fn interrupted_by(&self, error: &TaskError) -> Commit {
        tracing::warn!(task = %self.run.id(), %error, "undoing was interrupted");
        if !error.retryable {
            let message = format!("what was done could not be undone: {}", error.message);
            let failed = TaskError::fatal("compensation_failed", message).caused_by(error.clone());
            self.run.desk().tell(NewEvent::new("saga.compensation_failed", json!({"error": failed})));
            return self.failed_for_good(failed, false);
        }
        let after = self.manners.retry.delay(self.run.inner.lease.attempts + 1);
        let event = self.run.progress_event("compensating", 0, 0, None, &error.message);
        let outcome = Outcome::Retry { error: error.clone(), after, attempt: false };
        self.run.desk().end_commit(false, Some(event), None, outcome)
    }

    /// Leaves the undoing to a run that replays the handler first.
    fn undo_elsewhere(&self, state: State, error: &TaskError) -> Commit {
        let event = self.run.progress_event("compensating", 0, 0, None, &error.message);
        let record = Record::Undoing { state, error: error.clone() };
        self.run.desk().end_commit(false, Some(event), Some(record), Outcome::Released)
    }

    /// Who asked to cancel, and why: known from a heartbeat, or asked for.
    pub(super) async fn cancel_request(&self) -> Cancel {
        let known = self.run.inner.signals.borrow().cancel.clone();
        if let Some(cancel) = known {
            return cancel;
        }
        let lease = &self.run.inner.lease;
        let beat = Heartbeat {
            worker: uuid::Uuid::nil(),
            leases: vec![(lease.task, lease.fence)],
            lease: self.run.inner.lease_time,
        };
        let answer = self.run.inner.engine.store.heartbeat(&beat).await;
        match answer.map(|answer| answer.beats.into_iter().next()) {
            Ok(Some(Beat::Held { cancel: Some(cancel), .. })) => cancel,
            _ => Cancel { undo: false, by: "request".to_owned(), reason: None },
        }
    }

    /// Offers the end of the run to the store for as long as it makes sense.
    async fn offer(&self, commit: Commit) -> Result<Result<Committed, CommitRefused>, StoreError> {
        let give_up = Instant::now() + OFFER_END;
        loop {
            match self.run.inner.engine.commits.one(commit.clone()).await {
                Err(error) if error.is_unavailable() && Instant::now() < give_up => sleep(PAUSE).await,
                other => return other,
            }
        }
    }
}

fn over(ended: Ended, error: Option<&TaskError>) -> ControlFlow<Ended, End> {
    is_over(ended, error);
    ControlFlow::Break(ended)
}
