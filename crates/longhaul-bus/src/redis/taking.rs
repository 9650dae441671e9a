//! Consuming a stream of Redis.
//!
//! A task of the consumer reads, so that nothing that was read is lost when somebody stops waiting for the next
//! message; it ends with the consumer. It reads no more than may be unsettled.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use redis::aio::MultiplexedConnection;
use redis::streams::{StreamAutoClaimReply, StreamId, StreamReadReply};
use redis::{RedisError, Script, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{Inner, message};
use crate::bus::{BusError, Consumer, Delivery, Kind, Message, Settle, Subscription, dead_letter};
use crate::held::Held;

/// How long a read waits for something to come.
const BLOCK: Duration = Duration::from_secs(1);
/// A consumer that asked for nothing for this long, and has nothing, is forgotten.
const FORGET_AFTER: Duration = Duration::from_secs(86_400);
/// Forgets such consumers, and the one that is named. One script, so that none of them takes something between the look and
/// the end.
const FORGET: &str = "
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local field = {}
    for i = 1, #consumer, 2 do field[consumer[i]] = consumer[i + 1] end
    if field.pending == 0 and (field.idle > tonumber(ARGV[2]) or field.name == ARGV[3]) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], field.name)
    end
end";

pub(super) struct Taking {
    shared: Arc<Shared>,
    fresh: mpsc::Receiver<Result<Taken, BusError>>,
    reading: JoinHandle<()>,
}

/// What the consumer, its task and its deliveries have in common.
struct Shared {
    redis: Arc<Inner>,
    what: Subscription,
    /// The name of this consumer in its group.
    name: String,
    /// Entries that are here and not settled: claiming what is idle for long must not give them again.
    here: Mutex<HashSet<String>>,
    held: Held<Taken>,
}

/// An entry under way.
struct Taken {
    shared: Arc<Shared>,
    id: String,
    message: Message,
    _room: OwnedSemaphorePermit,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.shared.here().remove(&self.id);
    }
}

impl Shared {
    fn here(&self) -> MutexGuard<'_, HashSet<String>> {
        self.here.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stream(&self) -> &str {
        &self.what.topic.name
    }

    /// Makes the group, and the stream, if they are not there.
    async fn make_group(&self) -> Result<(), BusError> {
        let mut create = redis::cmd("XGROUP");
        create.arg("CREATE").arg(self.stream()).arg(&self.what.group).arg("0").arg("MKSTREAM");
        match self.redis.ask::<Value>(&create).await {
            Err(BusError::Failed { why, .. }) if why.contains("BUSYGROUP") => {}
            made => {
                made?;
            }
        }
        self.forget("").await
    }

    /// Lets Redis forget consumers that are gone, and this one.
    async fn forget(&self, consumer: &str) -> Result<(), BusError> {
        let script = Script::new(FORGET);
        let mut forget = script.key(self.stream());
        forget.arg(&self.what.group).arg(u64::try_from(FORGET_AFTER.as_millis()).unwrap_or(u64::MAX));
        forget.arg(consumer);
        let mut connection = self.redis.connection().await?;
        let forgotten: Result<Value, RedisError> = forget.invoke_async(&mut connection).await;
        if let Err(error) = forgotten {
            tracing::debug!(%error, "consumers that are gone are not forgotten");
        }
        Ok(())
    }
}

impl Taking {
    pub(super) async fn open(redis: &Arc<Inner>, what: &Subscription) -> Result<Self, BusError> {
        let shared = Arc::new(Shared {
            redis: Arc::clone(redis),
            what: what.clone(),
            name: format!("longhaul-{}", uuid::Uuid::now_v7()),
            here: Mutex::default(),
            held: Held::new(),
        });
        shared.make_group().await?;
        let (sender, fresh) = mpsc::channel(1);
        let reader = Reader {
            room: Arc::new(Semaphore::new(what.in_flight.max(1))),
            shared: Arc::clone(&shared),
            connection: None,
            missed_from: None,
            claim_from: "0-0".to_owned(),
            claim_at: Instant::now(),
        };
        Ok(Self { shared, fresh, reading: tokio::spawn(reader.run(sender)) })
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        self.reading.abort();
        self.shared.held.close();
    }
}

#[async_trait]
impl Consumer for Taking {
    async fn next(&mut self) -> Result<Delivery, BusError> {
        let taken = tokio::select! {
            biased;
            taken = self.shared.held.due() => taken,
            // The task ends only with this consumer, or by a panic that was told already.
            Some(fresh) = self.fresh.recv() => fresh?,
        };
        let position = format!("redis:{}:{}", self.shared.stream(), taken.id);
        Ok(Delivery::new(taken.message.clone(), Some(position), taken))
    }

    async fn close(mut self: Box<Self>) {
        self.reading.abort();
        // Ended, one way or the other: it reads nothing more under this name.
        let _ = (&mut self.reading).await;
        if let Err(error) = self.shared.forget(&self.shared.name).await {
            tracing::debug!(%error, "this consumer is not forgotten");
        }
    }
}

/// The task that reads.
struct Reader {
    shared: Arc<Shared>,
    room: Arc<Semaphore>,
    connection: Option<MultiplexedConnection>,
    /// After a connection was lost: where looking for what was given to us and never arrived goes on.
    missed_from: Option<String>,
    /// Where looking for what is idle goes on, and when.
    claim_from: String,
    claim_at: Instant,
}

impl Reader {
    async fn run(mut self, fresh: mpsc::Sender<Result<Taken, BusError>>) {
        loop {
            // The semaphore is never closed, and the receiver ends this task when it goes.
            let Ok(first) = Arc::clone(&self.room).acquire_owned().await else { return };
            let more = self.room.available_permits();
            let count = more + 1;
            drop(first);
            let entries = match self.read(count).await {
                Ok(entries) => entries,
                Err(error) => {
                    self.connection = None;
                    if fresh.send(Err(error)).await.is_err() {
                        return;
                    }
                    continue;
                }
            };
            for entry in entries {
                if !self.shared.here().insert(entry.id.clone()) {
                    continue; // it is being worked on here
                }
                let Ok(room) = Arc::clone(&self.room).acquire_owned().await else { return };
                let (shared, message) = (Arc::clone(&self.shared), message(entry.map));
                let taken = Taken { shared, id: entry.id, message, _room: room };
                if fresh.send(Ok(taken)).await.is_err() {
                    return;
                }
            }
        }
    }

    /// What got lost on its way here with a connection, so that what came after it does not overtake it; what consumers
    /// that died left, from time to time; else what is new.
    async fn read(&mut self, count: usize) -> Result<Vec<StreamId>, BusError> {
        let shared = Arc::clone(&self.shared);
        let connection = match &mut self.connection {
            Some(connection) => connection,
            None => {
                shared.make_group().await?;
                self.missed_from = Some("0-0".to_owned());
                self.connection.insert(shared.redis.connect(Some(BLOCK + crate::bus::TIMEOUT)).await?)
            }
        };
        let error = |error: RedisError| shared.redis.error(&error);
        let read = || {
            let mut read = redis::cmd("XREADGROUP");
            read.arg("GROUP").arg(&shared.what.group).arg(&shared.name).arg("COUNT").arg(count);
            read
        };
        while let Some(from) = self.missed_from.take() {
            // With a number, it reads what is ours and not acknowledged.
            let mut missed = read();
            missed.arg("STREAMS").arg(shared.stream()).arg(from);
            let missed: Option<StreamReadReply> = missed.query_async(connection).await.map_err(error)?;
            let mut missed = entries(missed);
            self.missed_from = missed.last().map(|entry| entry.id.clone());
            // One that was trimmed since has no fields. What is being worked on here did arrive.
            missed.retain(|entry| !entry.map.is_empty() && !shared.here().contains(&entry.id));
            if !missed.is_empty() {
                return Ok(missed);
            }
        }
        let ack_wait = u64::try_from(shared.what.ack_wait.as_millis()).unwrap_or(u64::MAX);
        if self.claim_at <= Instant::now() {
            let mut claim = redis::cmd("XAUTOCLAIM");
            claim.arg(shared.stream()).arg(&shared.what.group).arg(&shared.name).arg(ack_wait);
            claim.arg(&self.claim_from).arg("COUNT").arg(count);
            let claimed: StreamAutoClaimReply = claim.query_async(connection).await.map_err(error)?;
            if claimed.next_stream_id == "0-0" {
                self.claim_at = Instant::now() + shared.what.ack_wait / 4;
            }
            self.claim_from = claimed.next_stream_id;
            if !claimed.claimed.is_empty() {
                return Ok(claimed.claimed);
            }
        }
        let mut fresh = read();
        let block = BLOCK.min(self.claim_at.saturating_duration_since(Instant::now()));
        // 0 would be for ever.
        fresh.arg("BLOCK").arg(u64::try_from(block.as_millis()).unwrap_or(1).max(1));
        fresh.arg("STREAMS").arg(shared.stream()).arg(">");
        let fresh: Option<StreamReadReply> = fresh.query_async(connection).await.map_err(error)?;
        Ok(entries(fresh))
    }
}

fn entries(reply: Option<StreamReadReply>) -> Vec<StreamId> {
    reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids).collect()
}

#[async_trait]
impl Settle for Taken {
    async fn ack(self: Box<Self>) -> Result<(), BusError> {
        let Shared { redis, what, .. } = &*self.shared;
        let mut pipe = redis::pipe();
        pipe.cmd("XACK").arg(self.shared.stream()).arg(&what.group).arg(&self.id).ignore();
        if what.topic.kind == Kind::Queue {
            pipe.atomic().cmd("XDEL").arg(self.shared.stream()).arg(&self.id).ignore();
        }
        let mut connection = redis.connection().await?;
        pipe.query_async::<()>(&mut connection).await.map_err(|error| redis.met(&error))
    }

    async fn reject(self: Box<Self>, reason: &str) -> Result<(), BusError> {
        let dead = dead_letter(&self.shared.what.topic, &self.message, reason);
        self.shared.redis.publish(&[dead]).await.map_err(|not| not.error)?;
        self.ack().await
    }

    async fn redeliver(self: Box<Self>, after: Duration) -> Result<(), BusError> {
        let shared = Arc::clone(&self.shared);
        // It stays ours: nobody else finds it idle.
        let mut claim = redis::cmd("XCLAIM");
        claim.arg(shared.stream()).arg(&shared.what.group).arg(&shared.name).arg(0).arg(&self.id).arg("JUSTID");
        let claimed = shared.redis.ask::<Value>(&claim).await.map(drop);
        shared.held.put(Instant::now() + shared.what.put_off(after), *self);
        claimed
    }
}
