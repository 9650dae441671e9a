//! Hints between processes, by LISTEN and NOTIFY on one connection of their own.
//!
//! A transaction never sends a notification itself: the server lets only one transaction with a
//! notification commit at a time, which would undo everything group commit gains. What was told is
//! gathered here and sent behind the transactions' backs, one notification at a time and some
//! milliseconds apart; what comes meanwhile shares the next one. A lost notification costs latency,
//! never correctness, so nothing is repeated. An idle process sends nothing.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_postgres::AsyncMessage;
use uuid::Uuid;

use super::Told;
use super::connect::{Address, with_causes};
use crate::store::Hints;
use crate::store::news::News;

/// The least time between two notifications.
const SPACING: Duration = Duration::from_millis(5);
/// The longest pause before the connection is tried again.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// What is shared between those who tell and the loop that sends.
#[derive(Default)]
struct Outgoing {
    news: Mutex<News>,
    wake: Notify,
}

impl Outgoing {
    fn lock(&self) -> MutexGuard<'_, News> {
        // A panic while the lock was held leaves usable news: at worst some are missing.
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The connection of one process; ends when dropped.
pub(super) struct Notifier {
    outgoing: Arc<Outgoing>,
    task: JoinHandle<()>,
}

impl Notifier {
    pub(super) fn start(address: Address, channel: String, hints: Arc<Hints>) -> Self {
        let outgoing = Arc::new(Outgoing::default());
        let line = Line { address, channel, hints, outgoing: Arc::clone(&outgoing), me: Uuid::now_v7() };
        Self { outgoing, task: tokio::spawn(line.keep()) }
    }

    /// Lets other processes know, soon.
    pub(super) fn tell(&self, told: &Told) {
        self.outgoing.lock().add(told.ready, &told.changed, &told.finished, &told.controlled);
        self.outgoing.wake.notify_one();
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Line {
    address: Address,
    channel: String,
    hints: Arc<Hints>,
    outgoing: Arc<Outgoing>,
    me: Uuid,
}

impl Line {
    async fn keep(self) {
        let mut pause = Duration::from_millis(100);
        loop {
            let connected = tokio::time::Instant::now();
            if let Err(error) = self.session().await {
                tracing::warn!(
                    error = with_causes(&error),
                    "the connection for hints was lost; others are heard later"
                );
            }
            if connected.elapsed() > MAX_PAUSE * 2 {
                pause = Duration::from_millis(100);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// Listens and sends until the connection breaks.
    async fn session(&self) -> Result<(), tokio_postgres::Error> {
        let (client, mut connection) = self.address.config.connect(self.address.tls.clone()).await?;
        let hear = async {
            while let Some(message) = poll_fn(|context| connection.poll_message(context)).await {
                if let AsyncMessage::Notification(notification) = message? {
                    self.hear(notification.payload());
                }
            }
            Ok(())
        };
        let speak = async {
            // A notification is no data: if the server crashes before it is on disk, nobody is left
            // to hear it. Waiting for the disk would take turns from the transactions that must.
            let setup =
                format!("SET synchronous_commit = off; SET statement_timeout = '5s'; LISTEN {}", self.channel);
            client.batch_execute(&setup).await?;
            let notify = client.prepare("SELECT pg_notify($1, $2)").await?;
            // What was told while nobody listened is not known.
            self.hints.tell_anything();
            loop {
                self.outgoing.wake.notified().await;
                let mut news = std::mem::take(&mut *self.outgoing.lock());
                if news.is_empty() {
                    continue;
                }
                news.from = self.me;
                let text = serde_json::to_string(&news).unwrap_or_default();
                client.execute(&notify, &[&self.channel, &text]).await?;
                tokio::time::sleep(SPACING).await;
            }
        };
        tokio::select! {
            heard = hear => heard,
            spoken = speak => spoken,
        }
    }

    fn hear(&self, payload: &str) {
        match serde_json::from_str::<News>(payload) {
            Ok(news) if news.from == self.me => {}
            Ok(news) => news.pass_on(&self.hints),
            // From a version that says it differently.
            Err(_) => self.hints.tell_anything(),
        }
    }
}
