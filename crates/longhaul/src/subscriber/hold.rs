//! Holding a subscriber's place: taking it when nobody has it, keeping it while events are handled, noting how
//! far they are, and letting go.
//!
//! What was handled is noted beside the handling: while one note is on its way, the next batch is handled, and
//! the note after that tells the newest. Notes extend the lease. A holder that cannot note anything any more stops
//! before its lease is over, counted from before it asked for it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::deliver::Delivery;
use super::read::{Batch, Reader, Step};
use super::{Handler, Shared, Subscriber};
use crate::engine::Engine;
use crate::faults;
use crate::feed::patterns::Patterns;
use crate::store::StoreError;
use crate::store::subscribers::{Held, MoveSubscriber, Take, TakeSubscriber};
use crate::worker::process_name;

/// The longest pause while the store does not answer.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// The least time between two notes: they cost the store a transaction each.
const BETWEEN_NOTES: Duration = Duration::from_millis(50);
/// How long calls under way may take when the subscriber is stopped.
const DRAIN: Duration = Duration::from_secs(10);
/// The most events that are read and not handled, when they are handled one by one.
const READ_AHEAD: usize = 4_000;

/// Why a holder stopped.
enum Ended {
    /// By request.
    Stopped,
    /// It is another's by now, or the store did not answer in time.
    Lost,
    /// Reading broke off.
    Broken,
}

/// Runs a subscriber in this process.
pub(super) struct Holder {
    engine: Arc<Engine>,
    ask: TakeSubscriber,
    patterns: Patterns,
    tenant: Option<Arc<str>>,
    batch: usize,
    delivery: Delivery,
    shared: Arc<Shared>,
    stopping: watch::Receiver<bool>,
}

/// How far events are handled, as far as is known to who notes it.
#[derive(Clone, Copy)]
pub(super) struct Progress {
    pub(super) step: Step,
    /// Grows with everything that was handled; what was only passed by can be noted later.
    pub(super) handled: u64,
}

/// Until when the place is held, by this process's clock.
#[derive(Clone)]
pub(super) struct Until(Arc<Mutex<Instant>>);

impl Until {
    fn get(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, until: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }

    /// Whether a handler may be called.
    pub(super) fn is_held(&self) -> bool {
        Instant::now() < self.get()
    }
}

impl Holder {
    pub(super) fn new(
        engine: Arc<Engine>,
        subscriber: Subscriber,
        handler: Handler,
        shared: Arc<Shared>,
        stopping: watch::Receiver<bool>,
    ) -> Self {
        let Subscriber { client, name, patterns, all_tenants, batch, concurrency, lease, retry, .. } = subscriber;
        let batch = if matches!(handler, Handler::Each(_)) { READ_AHEAD } else { batch };
        Self {
            engine,
            delivery: Delivery {
                name: name.clone(),
                handler,
                concurrency,
                retry,
                shared: Arc::clone(&shared),
                stopping: stopping.clone(),
            },
            ask: TakeSubscriber { name, held_by: process_name(), lease },
            patterns,
            tenant: (!all_tenants).then(|| Arc::clone(&client.tenant)),
            batch,
            shared,
            stopping,
        }
    }

    /// Runs it until it is stopped, whenever no one else does.
    pub(super) async fn run(mut self) {
        let look = self.ask.lease / 3;
        let mut pause = Duration::from_millis(100);
        while !*self.stopping.borrow() {
            let asked = Instant::now();
            let wait = match self.engine.store.take_subscriber(&self.ask).await {
                Ok(Take::Taken(held)) => {
                    pause = Duration::from_millis(100);
                    self.hold(held, Until(Arc::new(Mutex::new(asked + self.ask.lease)))).await;
                    // Whoever lost it asks again; whoever takes over does not have to be this process.
                    look
                }
                Ok(Take::Busy(left)) => left.clamp(Duration::from_millis(10), look),
                Ok(Take::Gone) => {
                    tracing::warn!(subscriber = self.ask.name, "the subscriber was removed; it ends here");
                    return;
                }
                Err(error) => {
                    self.warn(&error);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    pause
                }
            };
            // The sender lives as long as the handle.
            let _ = tokio::time::timeout(wait, self.stopping.wait_for(|&stop| stop)).await;
        }
    }

    async fn hold(&self, held: Held, until: Until) {
        self.shared.holding.store(true, std::sync::atomic::Ordering::Relaxed);
        let step = Step { at: held.at, time: held.passed_at };
        let (progress, notes) = watch::channel(Progress { step, handled: 0 });
        let (send, batches) = mpsc::channel(1);
        let reader = Reader {
            engine: Arc::clone(&self.engine),
            patterns: self.patterns.clone(),
            tenant: self.tenant.clone(),
            most: self.batch,
            from: step,
        };
        // Ends with this value.
        let mut reading = JoinSet::new();
        reading.spawn(faults::of_process(reader.run(send)));
        let noting = Noting { engine: &self.engine, ask: &self.ask, fence: held.fence, until: &until };
        let ended = {
            let mut stopping = self.stopping.clone();
            let drained = async {
                let _ = stopping.wait_for(|&stop| stop).await;
                tokio::time::sleep(DRAIN).await;
            };
            tokio::select! {
                biased;
                () = noting.keep(notes.clone(), &self.shared) => Ended::Lost,
                ended = self.work(batches, &progress, &until) => ended,
                () = drained => Ended::Stopped,
            }
        };
        drop(reading);
        self.shared.holding.store(false, std::sync::atomic::Ordering::Relaxed);
        self.shared.oldest.store(0, std::sync::atomic::Ordering::Relaxed);
        self.shared.show();
        let newest = *notes.borrow();
        match ended {
            Ended::Lost => tracing::warn!(subscriber = self.ask.name, "another process runs the subscriber now"),
            Ended::Stopped | Ended::Broken => noting.let_go(newest).await,
        }
    }

    /// Handles what is read until it is told to stop.
    async fn work(
        &self,
        mut batches: mpsc::Receiver<Batch>,
        progress: &watch::Sender<Progress>,
        until: &Until,
    ) -> Ended {
        let mut stopping = self.stopping.clone();
        loop {
            let batch = tokio::select! {
                biased;
                _ = stopping.wait_for(|&stop| stop) => return Ended::Stopped,
                batch = batches.recv() => batch,
            };
            let Some(batch) = batch else { return Ended::Broken };
            if let Some(first) = batch.steps.first() {
                self.shared.oldest.store(first.time, std::sync::atomic::Ordering::Relaxed);
                if !until.is_held() {
                    return Ended::Lost;
                }
                let done = match &self.delivery.handler {
                    Handler::Batches(_) => self.delivery.whole(&batch, until).await,
                    Handler::Each(_) => self.delivery.each(&batch, progress, until).await,
                };
                if !done {
                    return if until.is_held() { Ended::Stopped } else { Ended::Lost };
                }
            }
            let handled = u64::from(!batch.told.is_empty());
            progress.send_modify(|progress| {
                progress.step = batch.end;
                progress.handled += handled;
            });
            if batch.caught_up {
                self.shared.oldest.store(0, std::sync::atomic::Ordering::Relaxed);
            }
        }
    }

    fn warn(&self, error: &StoreError) {
        tracing::warn!(%error, subscriber = self.ask.name, "the subscriber cannot be taken; trying again");
    }
}

/// Notes how far a holder has come.
struct Noting<'a> {
    engine: &'a Engine,
    ask: &'a TakeSubscriber,
    fence: u64,
    until: &'a Until,
}

impl Noting<'_> {
    /// Notes what was handled as it comes, and extends the lease; returns when the place is lost.
    async fn keep(&self, mut progress: watch::Receiver<Progress>, shared: &Shared) {
        let mut noted = *progress.borrow_and_update();
        let mut next = Instant::now() + self.ask.lease / 3;
        loop {
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(next) => {}
                // The sender lives as long as the work does.
                _ = progress.wait_for(|progress| progress.handled != noted.handled) => {}
            }
            let newest = *progress.borrow_and_update();
            shared.show();
            let asked = Instant::now();
            let step = self.step(newest, Some(self.ask.lease));
            match tokio::time::timeout_at(self.until.get(), self.engine.store.move_subscriber(&step)).await {
                Ok(Ok(true)) => {
                    self.until.set(asked + self.ask.lease);
                    noted = newest;
                    next = asked + self.ask.lease / 3;
                    tokio::time::sleep_until(next.min(asked + BETWEEN_NOTES)).await;
                }
                // Another's, removed, or no answer until the lease is over.
                Ok(Ok(false)) | Err(_) => return,
                Ok(Err(error)) => {
                    tracing::warn!(%error, subscriber = self.ask.name, "the place of a subscriber cannot be noted");
                    next = Instant::now() + self.ask.lease / 10;
                    tokio::time::sleep_until(next.min(self.until.get())).await;
                    if !self.until.is_held() {
                        return;
                    }
                }
            }
        }
    }

    /// Notes the last of it, and lets another take over at once.
    async fn let_go(&self, newest: Progress) {
        let step = self.step(newest, None);
        match tokio::time::timeout(self.ask.lease, self.engine.store.move_subscriber(&step)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                tracing::warn!(%error, subscriber = self.ask.name, "the place of a subscriber was not noted");
            }
            Err(_) => {
                tracing::warn!(subscriber = self.ask.name, "the place of a subscriber was not noted in time")
            }
        }
    }

    fn step(&self, newest: Progress, lease: Option<Duration>) -> MoveSubscriber {
        MoveSubscriber {
            name: self.ask.name.clone(),
            fence: self.fence,
            to: Some(newest.step.at),
            passed_at: Some(newest.step.time),
            lease,
        }
    }
}
