//! The driver: polls a handler, delivers what the desk releases, writes what it gathers, and
//! ends the run when the handler does, or when the lease, the deadline or a person says so.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep, sleep_until};

use super::desk::Next;
use super::{Run, Signals};
use crate::engine::Engine;
use crate::error::TaskError;
use crate::event::{LogRow, NewEvent};
use crate::record::Record;
use crate::retry::RetryPolicy;
use crate::store::rules::{cancel_error, deadline_error};
use crate::store::{Beat, Cancel, Commit, CommitRefused, Committed, Heartbeat, Outcome, StoreError};

/// How long events that nobody waits for may wait for company.
const COMPANY: Duration = Duration::from_millis(20);
/// How long a run that only waits stays in memory.
const IDLE: Duration = Duration::from_millis(100);
/// How long the end of a run is offered to a store that does not answer. The fence decides
/// whether it is still accepted then.
const OFFER_END: Duration = Duration::from_secs(60);
/// The pause before a store that did not answer is asked again.
const PAUSE: Duration = Duration::from_millis(200);

pub(crate) type HandlerFuture = Pin<Box<dyn Future<Output = Result<Box<RawValue>, TaskError>> + Send>>;

/// How a run is ended when it is told to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manners {
    /// How long an effect that may not happen twice has to be recorded after a cancel.
    pub(crate) cancel_grace: Duration,
    /// The wait between runs of a task that fails.
    pub(crate) retry: RetryPolicy,
}

/// Why a run is over.
enum End {
    Returned(Result<Box<RawValue>, TaskError>),
    Suspended,
    Cancelled,
    DeadlineExceeded,
    HandBack,
    /// The lease is over, by this host's clock.
    LeaseOver,
    /// The lease is another's: nothing may be written any more.
    Lost,
}

/// Runs a handler to its end, whatever that is, and writes it.
pub(crate) async fn run_to_end(run: Run, handler: HandlerFuture, manners: Manners) {
    let driver = Driver { run, manners };
    let mut writing = None;
    let end = driver.drive(handler, &mut writing).await;
    let end = driver.settle(end, writing).await;
    driver.write_end(end).await;
}

struct Driver {
    run: Run,
    manners: Manners,
}

/// What came of polling the handler.
enum Polled {
    Returned(Result<Box<RawValue>, TaskError>),
    Wants(Next),
}

/// The answer of the store to a commit, and what others wrote to the log before it.
type Written = (Result<Result<Committed, CommitRefused>, StoreError>, Result<Vec<LogRow>, StoreError>);
/// A commit under way.
type Writing = Pin<Box<dyn Future<Output = Written> + Send>>;

impl Driver {
    /// Polls the handler until the run is over. `writing` is the commit that was under way then.
    async fn drive(&self, handler: HandlerFuture, writing: &mut Option<Writing>) -> End {
        // A panic of the handler is the task's error, not the worker's.
        let mut handler = Box::pin(std::panic::AssertUnwindSafe(handler).catch_unwind());
        let mut signals = self.run.inner.signals.clone();
        let mut looked_for = self.run.inner.closed.subscribe();
        let deadline = self.run.inner.lease.deadline.map(|at| self.instant_of(at));
        // Told to end, but an effect that may not happen twice is still to be recorded.
        let mut closing: Option<(Instant, End)> = None;
        let mut later: Option<(Instant, Next)> = None;

        loop {
            let told = told_to_end(&signals.borrow_and_update(), deadline);
            match told {
                Some(end @ (End::Lost | End::LeaseOver)) => return end,
                Some(end) if closing.is_none() => closing = Some(self.close(end)),
                _ => {}
            }
            if let Some((grace, _)) = &closing
                && (!self.run.desk().has_effects_under_way() || Instant::now() >= *grace)
                && let Some((_, end)) = closing.take()
            {
                return end;
            }
            let lease_until = signals.borrow().lease_until;
            let grace = closing.as_ref().map(|(grace, _)| *grace);
            let armed = later.as_ref().map(|(_, next)| *next);

            tokio::select! {
                biased;
                // Told something by the worker, or out of time: looked at when the loop begins again.
                _ = signals.changed() => {}
                () = sleep_until(lease_until) => {}
                () = until(deadline), if closing.is_none() => {}
                () = until(grace) => {}
                answer = written(writing) => {
                    *writing = None;
                    match self.take_answer(answer) {
                        None => {}
                        Some(end @ (End::Cancelled | End::DeadlineExceeded)) => {
                            closing.get_or_insert_with(|| self.close(end));
                        }
                        Some(end) => return end,
                    }
                }
                polled = poll_fn(|cx| self.poll(&mut handler, armed, cx)) => match polled {
                    Polled::Returned(result) => return match closing {
                        // After a cancel or a deadline, what it returns is not wanted any more.
                        Some((_, end @ (End::Cancelled | End::DeadlineExceeded))) => end,
                        _ => self.returned(result),
                    },
                    Polled::Wants(Next::Load) => tokio::select! {
                        loaded = self.load() => {
                            if let Err(error) = loaded {
                                return End::Returned(Err(error));
                            }
                        }
                        () = must_end(signals.clone(), deadline) => {}
                    },
                    Polled::Wants(Next::Commit) => {
                        later = None;
                        *writing = Some(self.write());
                    }
                    Polled::Wants(next) => {
                        let time = if next == Next::Idle { IDLE } else { COMPANY };
                        later = Some((Instant::now() + time, next));
                    }
                },
                () = until(later.as_ref().map(|(at, _)| *at)) => {
                    later = None;
                    let next = self.run.desk().next();
                    match next {
                        Next::Idle => *writing = self.suspend(),
                        Next::Commit | Next::CommitSoon => *writing = Some(self.write()),
                        _ => {}
                    }
                }
                // Something was gathered by another task of the handler's.
                _ = looked_for.changed() => {}
            }
        }
    }

    /// Polls the handler for as long as the desk has something for it.
    fn poll(
        &self,
        handler: &mut Pin<
            Box<impl Future<Output = Result<Result<Box<RawValue>, TaskError>, Box<dyn Any + Send>>>>,
        >,
        armed: Option<Next>,
        cx: &mut std::task::Context<'_>,
    ) -> Poll<Polled> {
        loop {
            if let Poll::Ready(result) = handler.as_mut().poll(cx) {
                return Poll::Ready(Polled::Returned(result.unwrap_or_else(|panic| Err(panicked(&*panic)))));
            }
            match self.run.desk().next() {
                Next::Poll => {}
                Next::Wait => return Poll::Pending,
                next if Some(next) == armed => return Poll::Pending,
                next => return Poll::Ready(Polled::Wants(next)),
            }
        }
    }

    fn close(&self, end: End) -> (Instant, End) {
        self.run.desk().close(!matches!(end, End::HandBack));
        self.run.inner.closed.send_replace(true);
        (Instant::now() + self.manners.cancel_grace, end)
    }

    fn returned(&self, result: Result<Box<RawValue>, TaskError>) -> End {
        for step in self.run.desk().journal().unused() {
            tracing::warn!(task = %self.run.id(), step, "a recorded step was not asked for; was the handler changed?");
        }
        End::Returned(result)
    }

    /// Waits for the commit that was under way when the run ended, so that its records are on
    /// disk before the end is, and so that the two cannot overtake each other.
    async fn settle(&self, end: End, writing: Option<Writing>) -> End {
        let Some(writing) = writing.filter(|_| !matches!(end, End::Lost | End::Suspended)) else { return end };
        let mut signals = self.run.inner.signals.clone();
        tokio::select! {
            answer = writing => self.take_answer(answer).unwrap_or(end),
            _ = signals.wait_for(|signals| signals.lost) => End::Lost,
            () = sleep(OFFER_END) => end,
        }
    }

    /// Reads the journal, all of it.
    async fn load(&self) -> Result<(), TaskError> {
        let mut after = self.run.desk().journal().seen();
        loop {
            let rows = patiently(|| self.run.inner.engine.store.log(self.run.id(), after))
                .await
                .map_err(|error| TaskError::retryable("store", error.to_string()))?;
            let Some(last) = rows.last() else { break };
            after = last.last_seq();
            self.run.desk().load(&rows, false)?;
        }
        self.run.desk().load(&[], true)
    }

    /// Begins to write what was gathered.
    fn write(&self) -> Writing {
        let mut desk = self.run.desk();
        let seen = desk.journal().seen();
        let commit = desk.take_commit();
        Box::pin(write(Arc::clone(&self.run.inner.engine), commit, seen))
    }

    /// Begins to suspend the run, unless someone writes to the log meanwhile.
    fn suspend(&self) -> Option<Writing> {
        let mut desk = self.run.desk();
        let waiting = desk.waiting_for()?;
        let seen = desk.journal().seen();
        let event = NewEvent::new("task.waiting", json!({"kind": waiting.kind, "id": waiting.id}));
        let outcome = Outcome::Suspended { waiting, wake_after: None };
        let commit = desk.end_commit(true, Some(event), None, outcome);
        Some(Box::pin(write(Arc::clone(&self.run.inner.engine), commit, seen)))
    }

    /// What an answer of the store means for the run; `None`: it goes on.
    fn take_answer(&self, (answer, others): Written) -> Option<End> {
        let mut desk = self.run.desk();
        let read = match answer {
            Ok(Ok(_)) if desk.is_suspending() => return Some(End::Suspended),
            Ok(Ok(committed)) => match others {
                Ok(others) => desk.committed(&others, committed.last_seq),
                Err(error) => {
                    let written = desk.committed(&[], committed.last_seq);
                    written.and(Err(TaskError::retryable("store", error.to_string())))
                }
            },
            Ok(Err(refused)) => {
                desk.not_committed();
                match refused {
                    CommitRefused::Fenced { .. } => return Some(End::Lost),
                    CommitRefused::Cancelled => return Some(End::Cancelled),
                    CommitRefused::DeadlineExceeded => return Some(End::DeadlineExceeded),
                    CommitRefused::Stale { .. } => match others {
                        Ok(others) => desk.load(&others, false),
                        Err(error) => Err(TaskError::retryable("store", error.to_string())),
                    },
                }
            }
            Err(error) => {
                // The store refuses this very content, and always will.
                desk.discard();
                Err(TaskError::fatal("not_storable", error.to_string()))
            }
        };
        read.err().map(|error| End::Returned(Err(error)))
    }

    /// Writes how the run ended. A cancel or a deadline that came in between wins.
    async fn write_end(&self, mut end: End) {
        loop {
            let commit = match &end {
                End::Suspended => return,
                End::Lost => {
                    tracing::warn!(task = %self.run.id(), fence = self.run.fence(), "the lease was lost; giving the task up");
                    return;
                }
                End::Returned(Ok(result)) => self.completed(result),
                End::Returned(Err(error)) => self.failed(error),
                End::Cancelled => self.cancelled(&self.cancel_request().await),
                End::DeadlineExceeded => {
                    let deadline = self.run.inner.lease.deadline.unwrap_or_default();
                    self.failed_for_good(deadline_error(deadline, "while the task was running"), false)
                }
                End::HandBack | End::LeaseOver => self.handed_back(),
            };
            end = match self.offer(commit).await {
                Ok(Err(CommitRefused::Cancelled)) => End::Cancelled,
                Ok(Err(CommitRefused::DeadlineExceeded)) => End::DeadlineExceeded,
                Ok(Err(CommitRefused::Stale { .. })) => {
                    // Others wrote to the log meanwhile; what was gathered follows theirs.
                    self.run.desk().not_committed();
                    if let Err(error) = self.load().await {
                        end = End::Returned(Err(error));
                    }
                    continue;
                }
                Ok(Err(refused)) => {
                    tracing::info!(task = %self.run.id(), %refused, "the end of a run was refused");
                    return;
                }
                Ok(Ok(_)) => return,
                Err(error) => {
                    tracing::warn!(task = %self.run.id(), %error, "the end of a run could not be written; the task will be taken over");
                    return;
                }
            };
            self.run.desk().not_committed();
        }
    }

    fn completed(&self, result: &RawValue) -> Commit {
        let event = NewEvent::new("task.completed", json!({"result": result}));
        self.run.desk().end_commit(true, Some(event), None, Outcome::Completed { result: result.to_owned() })
    }

    /// The handler's error: another run if there may be one, the end otherwise.
    fn failed(&self, error: &TaskError) -> Commit {
        let lease = &self.run.inner.lease;
        let attempts = lease.attempts + 1;
        if !error.retryable || attempts >= lease.max_attempts {
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
        let outcome = Outcome::Retry { error: error.clone(), after };
        self.run.desk().end_commit(true, Some(event), Some(Record::Reopened), outcome)
    }

    fn failed_for_good(&self, error: TaskError, attempt: bool) -> Commit {
        let event = NewEvent::new("task.failed", json!({"error": error}));
        // After a deadline only this may still be written, so it is no step forward.
        self.run.desk().end_commit(attempt, Some(event), None, Outcome::Failed { error, attempt })
    }

    fn cancelled(&self, cancel: &Cancel) -> Commit {
        let error = cancel_error(cancel);
        let event = NewEvent::new("task.cancelled", json!({"error": error}));
        self.run.desk().end_commit(false, Some(event), None, Outcome::Cancelled { error })
    }

    fn handed_back(&self) -> Commit {
        let message = "The worker stops; another one goes on from the last recorded step.";
        let event = self.run.progress_event("retrying", 0, 0, None, message);
        self.run.desk().end_commit(true, Some(event), None, Outcome::Released)
    }

    /// Who asked to cancel, and why: known from a heartbeat, or asked for.
    async fn cancel_request(&self) -> Cancel {
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

    /// This host's clock at a time of the store's.
    fn instant_of(&self, at: i64) -> Instant {
        let left = at.saturating_sub(self.run.now_micros()).max(0).unsigned_abs();
        Instant::now() + Duration::from_micros(left)
    }
}

/// Whether the worker, the lease or the time says that the run must end.
fn told_to_end(signals: &Signals, deadline: Option<Instant>) -> Option<End> {
    let now = Instant::now();
    if signals.lost {
        Some(End::Lost)
    } else if now >= signals.lease_until {
        Some(End::LeaseOver)
    } else if signals.cancel.is_some() {
        Some(End::Cancelled)
    } else if deadline.is_some_and(|deadline| now >= deadline) {
        Some(End::DeadlineExceeded)
    } else {
        signals.hand_back.then_some(End::HandBack)
    }
}

/// Returns when the run must end.
async fn must_end(mut signals: tokio::sync::watch::Receiver<Signals>, deadline: Option<Instant>) {
    loop {
        let lease_until = {
            let signals = signals.borrow_and_update();
            if told_to_end(&signals, deadline).is_some() {
                return;
            }
            signals.lease_until
        };
        tokio::select! {
            _ = signals.changed() => {}
            () = sleep_until(lease_until) => {}
            () = until(deadline) => {}
        }
    }
}

/// Writes a commit, for as long as the run is not dropped, and reads what others wrote before it.
async fn write(engine: Arc<Engine>, commit: Commit, seen: u64) -> Written {
    let answer = patiently(|| engine.commits.one(commit.clone())).await;
    let before = match &answer {
        Ok(Ok(committed)) if committed.first_seq > seen + 1 => committed.first_seq,
        Ok(Err(CommitRefused::Stale { .. })) => u64::MAX,
        _ => return (answer, Ok(Vec::new())),
    };
    let others = others_rows(&engine, commit.task, seen, before).await;
    (answer, others)
}

/// The rows that others wrote to a task's log after number `after` and before number `before`.
async fn others_rows(
    engine: &Engine,
    task: crate::task::TaskId,
    mut after: u64,
    before: u64,
) -> Result<Vec<LogRow>, StoreError> {
    let mut others = Vec::new();
    loop {
        let rows = patiently(|| engine.store.log(task, after)).await?;
        let Some(last) = rows.last() else { return Ok(others) };
        after = last.last_seq();
        let done = after + 1 >= before;
        // Rows of this run are known already; others' have no run.
        others.extend(rows.into_iter().filter(|row| row.run == 0 && row.seq < before));
        if done {
            return Ok(others);
        }
    }
}

/// Asks the store, again and again while it does not answer.
pub(super) async fn patiently<T, F: Future<Output = Result<T, StoreError>>>(
    mut ask: impl FnMut() -> F,
) -> Result<T, StoreError> {
    loop {
        match ask().await {
            Err(error) if error.is_unavailable() => sleep(PAUSE).await,
            other => return other,
        }
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn written(writing: &mut Option<Writing>) -> Written {
    match writing {
        Some(writing) => writing.await,
        None => std::future::pending().await,
    }
}

fn panicked(panic: &(dyn Any + Send)) -> TaskError {
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned());
    TaskError::retryable("panic", format!("the handler panicked: {message}"))
}
