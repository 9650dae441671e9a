//! The driver: polls a handler, delivers what the desk releases, writes what it gathers, and
//! ends the run when the handler does, or when the lease, the deadline or a person says so.
//!
//! Each `select!` here takes the first of those that are ready, so that what a simulation does can be done again.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep, sleep_until};

use super::desk::Next;
use super::journal::Journal;
use super::undo::{Report, undo_all};
use super::{Run, Signals};
use crate::engine::Engine;
use crate::error::TaskError;
use crate::event::{LogRow, NewEvent};
use crate::meter::Ended;
use crate::record::Record;
use crate::retry::RetryPolicy;
use crate::store::rules::{cancel_error, deadline_error};
use crate::store::{Commit, CommitRefused, Committed, LOG_PAGE, Outcome, StoreError};
use crate::task::{Phase, State, timestamp};

mod ending;

/// How long events that nobody waits for may wait for company.
const COMPANY: Duration = Duration::from_millis(20);
/// How long a run that only waits stays in memory.
const IDLE: Duration = Duration::from_millis(100);
/// How long the end of a run is offered to a store that does not answer. The fence decides
/// whether it is still accepted then.
const OFFER_END: Duration = Duration::from_secs(60);
/// How long a handler has to get through its records again when what it did is to be undone.
const REPLAY: Duration = Duration::from_secs(30);
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
    /// The task ends so, and everything that could be undone was.
    Undone {
        state: State,
        error: TaskError,
        report: Report,
    },
    /// The engine could not go on with a task that must be undone; another run does, later.
    Interrupted(TaskError),
    /// The task will end so, but how to undo what it did is not known here: another run finds out.
    UndoElsewhere {
        state: State,
        error: TaskError,
    },
}

/// Runs a handler to its end, whatever that is, writes it and gives it. A task that fails for good or is
/// cancelled undoes first what it did.
pub(crate) async fn run_to_end(run: Run, handler: HandlerFuture, manners: Manners) -> Ended {
    let mut driver = Driver { run, manners, undoing: false };
    let mut end = if driver.run.inner.lease.phase == Phase::Compensating {
        driver.go_on_undoing(handler).await
    } else {
        driver.run_handler(handler).await
    };
    loop {
        match driver.undo_needed(&end).await {
            Ok(Some((state, error))) => end = driver.undo(state, error).await,
            Ok(None) => match driver.write_end(end).await {
                ControlFlow::Continue(other) => end = other,
                ControlFlow::Break(ended) => return ended,
            },
            Err(interrupted) => end = interrupted,
        }
    }
}

struct Driver {
    run: Run,
    manners: Manners,
    /// Cancels and deadlines were heard already.
    undoing: bool,
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
    /// Runs the handler until the run is over and what it wrote is on disk.
    async fn run_handler(&self, handler: HandlerFuture) -> End {
        let mut writing = None;
        let end = self.drive(handler, &mut writing).await;
        self.settle(end, writing).await
    }

    /// Whether what was done must be undone before the task ends so, and how it ends then. The
    /// error is an end that came in between.
    async fn undo_needed(&self, end: &End) -> Result<Option<(State, TaskError)>, End> {
        if self.undoing {
            return Ok(None);
        }
        let mut asked = false;
        let ending = match end {
            End::Returned(Err(error)) if self.is_final(error) => {
                (State::Failed, error.clone().detail("task_attempts", self.run.inner.lease.attempts + 1))
            }
            End::DeadlineExceeded => (State::Failed, self.deadline_error()),
            End::Cancelled => {
                let cancel = self.cancel_request().await;
                asked = cancel.undo;
                (State::Cancelled, cancel_error(&cancel))
            }
            _ => return Ok(None),
        };
        if !self.run.desk().undo_on.applies(ending.0, asked) {
            return Ok(None);
        }
        if !self.run.desk().is_loaded() {
            tokio::select! {
                biased;
                loaded = self.load() => match loaded {
                    Ok(()) => {}
                    // The handler's error is that very damage.
                    Err(error) if !error.retryable && matches!(end, End::Returned(_)) => return Ok(None),
                    Err(error) => return Err(End::Interrupted(error)),
                },
                end = self.interrupted() => return Err(end),
            }
        }
        if self.run.desk().journal().began_late() {
            // What lies before the checkpoint was not read; another run reads it.
            let whole = tokio::select! {
                biased;
                whole = self.whole_journal() => whole,
                end = self.interrupted() => return Err(end),
            };
            return match whole {
                Ok(whole) => Ok(whole.has_undoable().then_some(ending)),
                Err(error) => Err(End::Interrupted(error)),
            };
        }
        Ok(self.run.desk().journal().has_undoable().then_some(ending))
    }

    /// The journal from its beginning.
    async fn whole_journal(&self) -> Result<Journal, TaskError> {
        let mut journal = Journal::default();
        loop {
            let after = journal.seen();
            let rows = patiently(|| self.run.inner.engine.store.log(self.run.id(), after, LOG_PAGE)).await;
            let rows = rows.map_err(|error| not_read(&error))?;
            if rows.is_empty() {
                journal.take_read();
                return Ok(journal);
            }
            journal.read(&rows)?;
        }
    }

    /// Undoes what was done.
    async fn undo(&mut self, state: State, error: TaskError) -> End {
        self.undoing = true;
        if !self.run.desk().knows_undos() {
            return End::UndoElsewhere { state, error };
        }
        self.run.desk().begin_undo();
        let message = format!("{}; undoing what was done", error.message);
        let event = self.run.progress_event("compensating", 0, 0, None, &message);
        self.run.desk().record(Record::Undoing { state, error: error.clone() }, [event]);
        self.undo_all(state, error).await
    }

    async fn undo_all(&self, state: State, error: TaskError) -> End {
        self.run.inner.closed.send_replace(false);
        match self.run_handler(Box::pin(undo_all(self.run.clone()))).await {
            End::Returned(Ok(report)) => match serde_json::from_str(report.get()) {
                Ok(report) => End::Undone { state, error, report },
                Err(unread) => End::Interrupted(unread.into()),
            },
            End::Returned(Err(error)) => End::Interrupted(error),
            end => end,
        }
    }

    /// A run of a task that was undoing already: the handler is replayed from records only, to
    /// learn again how its steps are undone.
    async fn go_on_undoing(&mut self, handler: HandlerFuture) -> End {
        self.undoing = true;
        let mut handler = Box::pin(std::panic::AssertUnwindSafe(handler).catch_unwind());
        self.run.desk().close(true);
        let replayed = poll_fn(|cx| {
            loop {
                if self.run.desk().knows_undos() || handler.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(());
                }
                if self.run.desk().next() != Next::Poll {
                    return Poll::Pending;
                }
            }
        });
        let replay = async {
            self.load().await?;
            // What is outside of steps may take its time, but not for ever.
            let _ = tokio::time::timeout(REPLAY, replayed).await;
            Ok::<_, TaskError>(())
        };
        let replayed = tokio::select! {
            biased;
            replayed = replay => replayed,
            end = self.interrupted() => return end,
        };
        if let Err(error) = replayed {
            return End::Interrupted(error);
        }
        let ending = self.run.desk().journal().undoing().cloned();
        let Some((state, error)) = ending else {
            let why = "it is not recorded why the task undoes";
            return End::Interrupted(TaskError::fatal("journal_damaged", why));
        };
        self.run.desk().forget_usage();
        self.run.desk().begin_undo();
        self.undo_all(state, error).await
    }

    /// Returns when the run must stop although it only undoes.
    async fn interrupted(&self) -> End {
        let mut signals = self.run.inner.signals.clone();
        loop {
            let lease_until = {
                let signals = signals.borrow_and_update();
                if let Some(end) = told_to_end(&signals, None, true) {
                    return end;
                }
                signals.lease_until
            };
            tokio::select! {
                biased;
                _ = signals.changed() => {}
                () = sleep_until(lease_until) => {}
            }
        }
    }

    /// Whether the handler's error ends the task, instead of another attempt.
    fn is_final(&self, error: &TaskError) -> bool {
        let lease = &self.run.inner.lease;
        !error.retryable || lease.attempts + 1 >= lease.max_attempts
    }

    fn deadline_error(&self) -> TaskError {
        deadline_error(self.run.inner.lease.deadline.unwrap_or_default(), "while the task was running")
    }

    /// Polls the handler until the run is over. `writing` is the commit that was under way then.
    async fn drive(&self, handler: HandlerFuture, writing: &mut Option<Writing>) -> End {
        // A panic of the handler is the task's error, not the worker's.
        let mut handler = Box::pin(std::panic::AssertUnwindSafe(handler).catch_unwind());
        let mut signals = self.run.inner.signals.clone();
        let mut looked_for = self.run.inner.closed.subscribe();
        let deadline = self.run.inner.lease.deadline.filter(|_| !self.undoing);
        let deadline = deadline.map(|at| self.run.instant_of(at));
        // Told to end, but an effect that may not happen twice is still to be recorded.
        let mut closing: Option<(Instant, End)> = None;
        let mut later: Option<(Instant, Next)> = None;

        loop {
            let told = told_to_end(&signals.borrow_and_update(), deadline, self.undoing);
            match told {
                Some(end @ (End::Lost | End::LeaseOver)) => return end,
                Some(end) if closing.is_none() => closing = Some(self.close(end)),
                _ => {}
            }
            if let Some((grace, end)) = &closing
                && (!self.run.desk().has_effects_under_way(matches!(end, End::HandBack))
                    || Instant::now() >= *grace)
                && let Some((_, end)) = closing.take()
            {
                return end;
            }
            if writing.is_none() && closing.is_none() && self.others_wrote(&signals) {
                tokio::select! {
                    biased;
                    read = self.read_others() => if let Err(error) = read { return End::Returned(Err(error)) },
                    () = must_end(signals.clone(), deadline, self.undoing) => {}
                }
                continue;
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
                        biased;
                        loaded = self.load() => {
                            if let Err(error) = loaded {
                                return End::Returned(Err(error));
                            }
                        }
                        () = must_end(signals.clone(), deadline, self.undoing) => {}
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
        let unused = if self.undoing { Vec::new() } else { self.run.desk().unused() };
        for step in unused {
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
            biased;
            answer = writing => self.take_answer(answer).unwrap_or(end),
            _ = signals.wait_for(|signals| signals.lost) => End::Lost,
            () = sleep(OFFER_END) => end,
        }
    }

    /// Reads the journal, all of it.
    async fn load(&self) -> Result<(), TaskError> {
        let mut after = self.run.desk().journal().seen();
        loop {
            let rows = patiently(|| self.run.inner.engine.store.log(self.run.id(), after, LOG_PAGE))
                .await
                .map_err(|error| not_read(&error))?;
            let Some(last) = rows.last() else { break };
            after = last.last_seq();
            self.run.desk().load(&rows, false)?;
        }
        self.run.desk().load(&[], true)
    }

    /// Whether others wrote to the log, and something of it may be waited for here.
    fn others_wrote(&self, signals: &tokio::sync::watch::Receiver<Signals>) -> bool {
        let desk = self.run.desk();
        desk.waits_for_others() && signals.borrow().last_seq.max(desk.heard()) > desk.journal().seen()
    }

    /// Reads what others wrote to the log. Nothing of this run is on its way there meanwhile, so
    /// everything has its order.
    async fn read_others(&self) -> Result<(), TaskError> {
        let seen = self.run.desk().journal().seen();
        // What the worker heard of may have been this run's own; what it hears from now on may not
        // be in the rows.
        let heard = self.run.inner.signals.borrow().last_seq.max(self.run.desk().heard());
        let rows = others_rows(&self.run.inner.engine, self.run.id(), seen, u64::MAX).await;
        let rows = rows.map_err(|error| not_read(&error))?;
        let newest = rows.last().map(LogRow::last_seq);
        let mut desk = self.run.desk();
        desk.load(&rows, false)?;
        desk.saw(newest.unwrap_or(0).max(heard));
        Ok(())
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
        let (waiting, until) = desk.waiting_for()?;
        let seen = desk.journal().seen();
        let event = NewEvent::new(
            "task.waiting",
            json!({"kind": waiting.kind, "id": waiting.id, "until": until.map(timestamp)}),
        );
        let now = self.run.now_micros();
        let wake_after = until.map(|until| Duration::from_micros((until - now).max(0).unsigned_abs()));
        let outcome = Outcome::Suspended { waiting, wake_after };
        let commit = desk.end_commit(!self.undoing, Some(event), None, outcome);
        Some(Box::pin(write(Arc::clone(&self.run.inner.engine), commit, seen)))
    }

    /// What an answer of the store means for the run; `None`: it goes on.
    fn take_answer(&self, (answer, others): Written) -> Option<End> {
        let mut desk = self.run.desk();
        let read = match answer {
            Ok(Ok(_)) if desk.is_suspending() => return Some(End::Suspended),
            Ok(Ok(committed)) => match others {
                Ok(others) => desk.committed(&others, committed),
                Err(error) => {
                    let written = desk.committed(&[], committed);
                    written.and(Err(not_read(&error)))
                }
            },
            Ok(Err(refused)) => {
                desk.not_committed();
                match refused {
                    CommitRefused::Fenced { .. } => return Some(End::Lost),
                    CommitRefused::Cancelled => return Some(End::Cancelled),
                    CommitRefused::DeadlineExceeded => return Some(End::DeadlineExceeded),
                    CommitRefused::ApprovalExpired { id } => {
                        desk.without_use(&id);
                        Ok(())
                    }
                    CommitRefused::Stale { .. } => match others {
                        Ok(others) => desk.load(&others, false),
                        Err(error) => Err(not_read(&error)),
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
}

/// Whether the worker, the lease or the time says that the run must end.
fn told_to_end(signals: &Signals, deadline: Option<Instant>, undoing: bool) -> Option<End> {
    let now = Instant::now();
    if signals.lost {
        Some(End::Lost)
    } else if now >= signals.lease_until {
        Some(End::LeaseOver)
    } else if signals.cancel.is_some() && !undoing {
        Some(End::Cancelled)
    } else if deadline.is_some_and(|deadline| now >= deadline) {
        Some(End::DeadlineExceeded)
    } else {
        signals.hand_back.then_some(End::HandBack)
    }
}

/// Returns when the run must end.
async fn must_end(mut signals: tokio::sync::watch::Receiver<Signals>, deadline: Option<Instant>, undoing: bool) {
    loop {
        let lease_until = {
            let signals = signals.borrow_and_update();
            if told_to_end(&signals, deadline, undoing).is_some() {
                return;
            }
            signals.lease_until
        };
        tokio::select! {
            biased;
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

/// Why a log could not be read. One that is damaged will be so the next time.
fn not_read(error: &StoreError) -> TaskError {
    match error {
        StoreError::Incompatible(why) => TaskError::fatal("journal_damaged", why.clone()),
        _ => TaskError::retryable("store", error.to_string()),
    }
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
        let rows = patiently(|| engine.store.log(task, after, LOG_PAGE)).await?;
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

pub(crate) fn panicked(panic: &(dyn Any + Send)) -> TaskError {
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned());
    TaskError::retryable("panic", format!("the handler panicked: {message}"))
}
