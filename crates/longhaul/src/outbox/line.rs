//! What is done with a line that was taken: its events are read from the task's log, sent in order,
//! and settled one by one. And the rules of trying again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::json;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use uuid::Uuid;

use super::reply::{self, Replies, Reply};
use super::webhook::{Sender, Sent};
use super::{Counts, OutboxSettings};
use crate::engine::Engine;
use crate::event::Event;
use crate::store::batch::{Batcher, Sink};
use crate::store::outbox::{Attempt, DeliveryStatus, Due, Settle, Then, Which, delivery_id};
use crate::store::{LOG_PAGE, Lanes, Store, StoreError};
use crate::task::Task;

/// How much memory the bodies under way may take, in KiB.
const BODIES_KIB: u32 = 64 * 1024;
/// How many bodies are made at the same time.
const MAKERS: usize = 4;
/// How much longer than a receiver may take a line is held, so that its end can be written.
const SPARE: Duration = Duration::from_secs(45);

/// Makes deliveries.
pub(super) struct Deliverer {
    engine: Arc<Engine>,
    sender: Sender,
    replies: Option<Arc<dyn Replies>>,
    settles: Batcher<Settles>,
    pace: Pace,
    timeout: Duration,
    pub(super) counts: Arc<Counts>,
    makers: Semaphore,
    bodies: Semaphore,
    stopping: watch::Receiver<bool>,
}

/// When to try again, and when to stop trying.
#[derive(Clone, Copy, Debug)]
struct Pace {
    first: Duration,
    longest: Duration,
    give_up_after: Duration,
}

impl Pace {
    /// The pause after the failure of this number, from 1; `jitter` is between 0 and 1. A receiver
    /// that asks for a longer one gets it, up to the longest there is.
    fn pause(&self, failure: u32, asked: Option<Duration>, jitter: f64) -> Duration {
        let doubled = self.first.saturating_mul(2_u32.saturating_pow(failure.saturating_sub(1).min(30)));
        let own = doubled.min(self.longest).mul_f64(0.8 + 0.4 * jitter);
        own.max(asked.unwrap_or_default()).min(self.longest)
    }
}

/// One event of a line, tried.
struct Tried {
    attempt: Attempt,
    /// The pause before the next try; none when there is none.
    again_after: Option<Duration>,
    /// The receiver wants nothing more.
    ended: bool,
    first_at: Option<i64>,
}

impl Deliverer {
    pub(super) fn new(
        engine: &Arc<Engine>,
        sender: Sender,
        settings: &OutboxSettings,
        counts: Arc<Counts>,
        stopping: watch::Receiver<bool>,
    ) -> Self {
        let pace = Pace {
            first: settings.first_retry,
            longest: settings.longest_retry,
            give_up_after: settings.give_up_after,
        };
        Self {
            engine: Arc::clone(engine),
            sender,
            replies: settings.replies.clone(),
            settles: Batcher::start(Settles(Arc::clone(&engine.store)), Lanes::ONE),
            pace,
            timeout: settings.timeout,
            counts,
            makers: Semaphore::new(MAKERS),
            bodies: Semaphore::new(BODIES_KIB as usize),
            stopping,
        }
    }

    /// For how long a line is taken.
    pub(super) fn lease(&self) -> Duration {
        self.timeout + SPARE
    }

    /// Does what can be done with `due`. What cannot be read or written now is due again when the
    /// lease is over.
    pub(super) async fn deliver(&self, due: Due, owner: Uuid) {
        let done = match due.which {
            Which::After(sent) => self.go_on(&due, owner, sent).await,
            Which::Again(seq) => self.repeat(&due, owner, seq).await,
        };
        if let Err(error) = done {
            tracing::warn!(%error, task = %due.task, destination = due.destination, "a delivery is made again later");
        }
    }

    /// Sends what is wanted of the events after `sent`, one page of the log.
    async fn go_on(&self, due: &Due, owner: Uuid, sent: u64) -> Result<(), StoreError> {
        let rows = self.engine.store.log(due.task, sent, LOG_PAGE).await?;
        let events: Vec<Event> =
            rows.iter().flat_map(|row| row.events_of(due.task)).filter(|event| event.seq > sent).collect();
        drop(rows);
        let last = events.last().map_or(sent, |event| event.seq);
        let wanted: Vec<&Event> = events.iter().filter(|event| due.webhook.wants(&event.kind)).collect();
        let settle = |sent, then| Settle {
            task: due.task,
            destination: due.destination.clone(),
            owner,
            attempt: None,
            again: false,
            sent,
            attempts: 0,
            first_at: None,
            then,
        };
        let (mut attempts, mut first_at) = (due.attempts, due.first_at);
        for (n, event) in wanted.iter().enumerate() {
            if *self.stopping.borrow() {
                // Everything before it is settled, and it was not begun.
                let settle = Settle { attempts, first_at, ..settle(event.seq - 1, Then::LetGo) };
                return self.settle(settle).await.map(drop);
            }
            let Some(tried) = self.try_once(due, event, attempts, first_at).await? else { return Ok(()) };
            if let Some(pause) = tried.again_after {
                let (attempts, first_at) = (tried.attempt.number, tried.first_at);
                let settle = settle(event.seq - 1, Then::Retry(pause));
                let settle = Settle { attempt: Some(tried.attempt), attempts, first_at, ..settle };
                return self.settle(settle).await.map(drop);
            }
            // After the last one it is let go in the same breath; what came meanwhile makes it due.
            let (sent, then) = match (tried.ended, n + 1 == wanted.len()) {
                (true, _) => (event.seq, Then::End),
                (false, true) => (last, Then::LetGo),
                (false, false) => (event.seq, Then::GoOn(self.lease())),
            };
            let kept = self.settle(Settle { attempt: Some(tried.attempt), ..settle(sent, then) }).await?;
            if !kept || then != Then::GoOn(self.lease()) {
                return Ok(());
            }
            (attempts, first_at) = (0, None);
        }
        self.settle(settle(last, Then::LetGo)).await.map(drop)
    }

    /// Sends one event again, by request.
    async fn repeat(&self, due: &Due, owner: Uuid, seq: u64) -> Result<(), StoreError> {
        let rows = self.engine.store.log(due.task, seq.saturating_sub(1), LOG_PAGE).await?;
        let event = rows.iter().flat_map(|row| row.events_of(due.task)).find(|event| event.seq == seq);
        drop(rows);
        // Gone with its task.
        let Some(event) = event else { return Ok(()) };
        let Some(tried) = self.try_once(due, &event, due.attempts, due.first_at).await? else { return Ok(()) };
        let settle = Settle {
            task: due.task,
            destination: due.destination.clone(),
            owner,
            again: true,
            sent: seq,
            attempts: tried.attempt.number,
            first_at: tried.first_at,
            attempt: Some(tried.attempt),
            then: tried.again_after.map_or(Then::LetGo, Then::Retry),
        };
        self.settle(settle).await.map(drop)
    }

    /// Sends one event and decides what comes of it; `None` when its task is gone.
    async fn try_once(
        &self,
        due: &Due,
        event: &Event,
        attempts: u32,
        first_at: Option<i64>,
    ) -> Result<Option<Tried>, StoreError> {
        let id = delivery_id(due.task, &due.destination, event.seq);
        if let (Some(to), Some(replies)) = (&due.reply, &self.replies) {
            let Some(task) = self.engine.store.task(&due.tenant, due.task).await? else { return Ok(None) };
            let reply = Reply {
                to: to.to.clone(),
                correlation_id: to.correlation_id.clone(),
                id,
                tenant: due.tenant.clone(),
                event: event.clone(),
                task,
            };
            let sent = reply::send(&**replies, &reply, self.timeout).await;
            return Ok(Some(self.judge(due, event, sent, attempts + 1, first_at)));
        }
        let (body, _held) = {
            let _maker = self.makers.acquire().await;
            let Some(task) = self.engine.store.task(&due.tenant, due.task).await? else { return Ok(None) };
            let body = body(event, &task)?;
            let kib = u32::try_from(body.len() / 1024 + 1).unwrap_or(BODIES_KIB).min(BODIES_KIB);
            (body, self.bodies.acquire_many(kib).await)
        };
        let sent = self.sender.send(&due.webhook, id, body).await;
        Ok(Some(self.judge(due, event, sent, attempts + 1, first_at)))
    }

    fn judge(&self, due: &Due, event: &Event, sent: Sent, number: u32, first_at: Option<i64>) -> Tried {
        let now = self.engine.store.clock().now_micros();
        let first_at = first_at.unwrap_or(now);
        let mut tried = Tried {
            attempt: Attempt {
                seq: event.seq,
                event: event.kind.clone(),
                tenant: due.tenant.clone(),
                webhook: due.webhook.clone(),
                status: DeliveryStatus::Delivered,
                number,
                http_status: None,
                error: None,
            },
            again_after: None,
            ended: false,
            first_at: Some(first_at),
        };
        let attempt = &mut tried.attempt;
        let count = match sent {
            Sent::Delivered(status) => {
                attempt.http_status = Some(status);
                &self.counts.delivered
            }
            Sent::Replied => &self.counts.delivered,
            Sent::Refused(error) => {
                (attempt.status, attempt.error) = (DeliveryStatus::Dead, Some(error));
                &self.counts.dead
            }
            Sent::Gone(error) => {
                (attempt.status, attempt.http_status) = (DeliveryStatus::Dead, Some(410));
                attempt.error = Some(format!("{error}; nothing more is sent there for this task"));
                tried.ended = true;
                &self.counts.dead
            }
            Sent::Failed { status, error, after } => {
                attempt.http_status = status;
                let pause = self.pace.pause(number, after, rand::random());
                let waited = Duration::from_micros(u64::try_from(now - first_at).unwrap_or(0));
                if waited + pause > self.pace.give_up_after {
                    attempt.status = DeliveryStatus::Dead;
                    attempt.error = Some(format!("{error}; given up after {number} tries"));
                    &self.counts.dead
                } else {
                    (attempt.status, attempt.error) = (DeliveryStatus::Failed, Some(error));
                    tried.again_after = Some(pause);
                    &self.counts.failed
                }
            }
        };
        count.fetch_add(1, Ordering::Relaxed);
        if attempt.status == DeliveryStatus::Dead {
            let (task, url, error) = (due.task, &due.webhook.url, attempt.error.as_deref());
            tracing::warn!(%task, url, event = event.kind, error, "a delivery was given up; it can be sent again");
        }
        tried
    }

    /// Writes what came of it, for as long as the line is held; `false` when it is no longer.
    async fn settle(&self, settle: Settle) -> Result<bool, StoreError> {
        let until = Instant::now() + SPARE;
        loop {
            match self.settles.one(settle.clone()).await {
                Err(error) if error.is_unavailable() && Instant::now() < until => {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
                other => return other,
            }
        }
    }
}

/// What is sent: the event's type and time, and the task as it stands now. How a task ended says the
/// task itself; of other events the rest comes along.
fn body(event: &Event, task: &Task) -> Result<Vec<u8>, StoreError> {
    #[derive(serde::Serialize)]
    struct Message<'a> {
        #[serde(rename = "type")]
        kind: &'a str,
        timestamp: jiff::Timestamp,
        data: &'a Task,
        #[serde(skip_serializing_if = "Option::is_none")]
        event: Option<serde_json::Value>,
    }
    let rest = || json!({"seq": event.seq, "run": event.run, "step": event.step, "data": event.data});
    let message =
        Message { kind: &event.kind, timestamp: event.time, data: task, event: (!event.is_final()).then(rest) };
    serde_json::to_vec(&message).map_err(|error| StoreError::Failed(format!("a task cannot be written: {error}")))
}

/// What came of deliveries, on its way into the store.
struct Settles(Arc<dyn Store>);

#[async_trait]
impl Sink for Settles {
    type Entry = Settle;
    type Answer = bool;
    const PATIENCE: Duration = Duration::from_secs(2);

    async fn write(&self, batch: &[Settle]) -> Result<Vec<bool>, StoreError> {
        self.0.settle(batch).await
    }
    fn bytes(_: &Settle) -> usize {
        1_024
    }
    fn key(settle: &Settle) -> Uuid {
        settle.task.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_a_receiver_may_ask_for_more() {
        let secs = Duration::from_secs;
        let pace = Pace { first: secs(5), longest: secs(3_600), give_up_after: secs(86_400) };
        let pauses: Vec<u64> = (1..=12).map(|n| pace.pause(n, None, 0.5).as_secs()).collect();
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 320, 640, 1_280, 2_560, 3_600, 3_600]);
        assert_eq!(pace.pause(u32::MAX, None, 1.0), secs(3_600));
        for jitter in [0.0, 0.3, 1.0] {
            let pause = pace.pause(3, None, jitter);
            assert!((secs(16)..=secs(24)).contains(&pause), "{pause:?}");
        }
        assert_eq!(pace.pause(1, Some(secs(100)), 0.5), secs(100));
        assert_eq!(pace.pause(1, Some(secs(1)), 0.5), secs(5), "no sooner than otherwise");
        assert_eq!(pace.pause(1, Some(secs(1_000_000)), 0.5), secs(3_600));
    }
}
