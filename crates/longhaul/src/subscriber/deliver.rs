//! Calling a subscriber's handler, and calling it again after an error.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::hold::{Progress, Until};
use super::read::Batch;
use super::{Handled, Handler, Shared, Told};
use crate::error::TaskError;
use crate::faults;
use crate::retry::RetryPolicy;
use crate::run::driver::panicked;
use crate::task::TaskId;

/// How long nothing more is said of a batch that fails again and again.
const QUIET: std::time::Duration = std::time::Duration::from_secs(60);

/// Who is called, and how.
pub(super) struct Delivery {
    pub(super) name: String,
    pub(super) handler: Handler,
    pub(super) concurrency: usize,
    pub(super) retry: RetryPolicy,
    pub(super) shared: Arc<Shared>,
    pub(super) stopping: watch::Receiver<bool>,
}

/// The events of one task that are still to be handled, by their place in the batch.
struct Line {
    events: VecDeque<usize>,
    /// Failures of the one at the front.
    failures: u32,
}

/// What is under way in a batch that is handled event by event.
struct Board {
    /// Lines whose next event can be handled, by its place: the order of the feed, as far as there is a choice.
    ready: BTreeMap<usize, Line>,
    /// Lines that wait for another try, by when and the place of the event.
    resting: BTreeMap<(Instant, usize), Line>,
    /// Which events are done.
    done: Vec<bool>,
    /// How many from the first on are.
    passed: usize,
}

impl Board {
    fn new(told: &[Told]) -> Self {
        let mut tasks: HashMap<TaskId, Line> = HashMap::new();
        for (place, told) in told.iter().enumerate() {
            let line = tasks.entry(told.event.task_id);
            line.or_insert_with(|| Line { events: VecDeque::new(), failures: 0 }).events.push_back(place);
        }
        let first = |line: Line| line.events.front().copied().map(|place| (place, line));
        Self {
            ready: tasks.into_values().filter_map(first).collect(),
            resting: BTreeMap::new(),
            done: vec![false; told.len()],
            passed: 0,
        }
    }

    /// Readies what has rested; gives when the next one has.
    fn wake(&mut self, now: Instant) -> Option<Instant> {
        while let Some(entry) = self.resting.first_entry() {
            if entry.key().0 > now {
                return Some(entry.key().0);
            }
            let ((_, place), line) = entry.remove_entry();
            self.ready.insert(place, line);
        }
        None
    }

    /// The event at the front of a line is done. Whether more of the batch is done from its first event on.
    fn finish(&mut self, mut line: Line) -> bool {
        if let Some(place) = line.events.pop_front() {
            self.done[place] = true;
        }
        line.failures = 0;
        if let Some(&place) = line.events.front() {
            self.ready.insert(place, line);
        }
        let before = self.passed;
        while self.done.get(self.passed) == Some(&true) {
            self.passed += 1;
        }
        self.passed > before
    }
}

impl Delivery {
    /// Gives the whole batch, until it is taken; `false` when that is not to be waited for any longer.
    pub(super) async fn whole(&self, batch: &Batch, until: &Until) -> bool {
        let Handler::Batches(handler) = &self.handler else { return true };
        let (mut failures, mut told_at) = (0, None);
        loop {
            if !until.is_held() {
                return false;
            }
            match call(|| handler(Arc::clone(&batch.told))).await {
                Ok(()) => {
                    self.shared.handled(batch.told.len());
                    if failures > 0 {
                        tracing::warn!(subscriber = self.name, failures, "a subscriber goes on");
                    }
                    return true;
                }
                Err(error) => {
                    failures += 1;
                    // The same batch, and most often the same reason: a broker that is away.
                    let quiet = told_at.is_some_and(|at: Instant| at.elapsed() < QUIET);
                    if !quiet {
                        told_at = Some(Instant::now());
                    }
                    let again_in = self.failed(&error, failures, batch.told.first(), quiet);
                    if self.stopped_before(again_in).await {
                        return false;
                    }
                }
            }
        }
    }

    /// Gives the events one by one, those of different tasks side by side; `false` when they are not to be
    /// waited for any longer. What is done from the first on is noted as it comes.
    pub(super) async fn each(&self, batch: &Batch, progress: &watch::Sender<Progress>, until: &Until) -> bool {
        let Handler::Each(handler) = &self.handler else { return true };
        let mut board = Board::new(&batch.told);
        // Calls under way; they end with this value.
        let mut calls: JoinSet<(Line, Result<(), TaskError>)> = JoinSet::new();
        while board.passed < batch.told.len() {
            let next_wake = board.wake(Instant::now());
            let stopping = *self.stopping.borrow();
            while !stopping && until.is_held() && calls.len() < self.concurrency {
                let Some((place, line)) = board.ready.pop_first() else { break };
                let (handler, told) = (Arc::clone(handler), batch.told[place].clone());
                calls.spawn(faults::of_process(async move { (line, call(|| handler(told)).await) }));
            }
            if calls.is_empty() && (stopping || !until.is_held()) {
                return false;
            }
            let ended = tokio::select! {
                biased;
                Some(ended) = calls.join_next() => ended,
                stopped = self.stopped_at(next_wake), if !stopping => {
                    if stopped && calls.is_empty() {
                        return false;
                    }
                    continue;
                }
            };
            // Only the end of this value ends a call otherwise: panics are errors.
            let Ok((line, answer)) = ended else { return false };
            if self.settle(batch, &mut board, line, answer) {
                let step = batch.steps[board.passed - 1];
                progress.send_modify(|progress| {
                    progress.step = step;
                    progress.handled += 1;
                });
            }
        }
        true
    }

    /// What came of the event at the front of a line; whether the batch is done further from its first event on.
    fn settle(&self, batch: &Batch, board: &mut Board, mut line: Line, answer: Result<(), TaskError>) -> bool {
        let place = line.events.front().copied().unwrap_or_default();
        match answer {
            Ok(()) => self.shared.handled(1),
            Err(error) if error.retryable => {
                line.failures += 1;
                let again_in = self.failed(&error, line.failures, batch.told.get(place), false);
                board.resting.insert((Instant::now() + again_in, place), line);
                return false;
            }
            Err(error) => {
                self.shared.refused();
                let event = batch.told.get(place).map(|told| &told.event);
                let (task, seq) = (event.map(|event| event.task_id), event.map(|event| event.seq));
                let subscriber = &self.name;
                tracing::warn!(%error, subscriber, ?task, seq, "a subscriber refused an event; it is passed by");
            }
        };
        board.finish(line)
    }

    /// A call failed; gives the pause before the next.
    fn failed(&self, error: &TaskError, failures: u32, first: Option<&Told>, quiet: bool) -> std::time::Duration {
        self.shared.failed();
        let again_in = self.retry.delay(failures);
        let task = first.map(|told| told.event.task_id);
        let subscriber = &self.name;
        match quiet {
            true => tracing::debug!(%error, subscriber, ?task, failures, ?again_in, "a subscriber failed again"),
            false => {
                tracing::warn!(%error, subscriber, ?task, failures, ?again_in, "a subscriber failed; it is called again");
            }
        }
        again_in
    }

    /// Waits; whether it is to stop before the time has passed.
    async fn stopped_before(&self, pause: std::time::Duration) -> bool {
        self.stopped_at(Some(Instant::now() + pause)).await
    }

    /// Waits until then, or for ever; whether it is to stop before.
    async fn stopped_at(&self, until: Option<Instant>) -> bool {
        let mut stopping = self.stopping.clone();
        let stopped = stopping.wait_for(|&stop| stop);
        match until {
            Some(until) => tokio::time::timeout_at(until, stopped).await.is_ok(),
            None => stopped.await.is_ok(),
        }
    }
}

/// Calls a handler; a panic is an error like others.
async fn call(handler: impl FnOnce() -> Handled) -> Result<(), TaskError> {
    let called = AssertUnwindSafe(async { handler().await }).catch_unwind().await;
    faults::after("subscriber.after", called.unwrap_or_else(|panic| Err(panicked(&*panic)))).await
}
