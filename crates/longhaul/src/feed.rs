//! Events out: following a task from a number on, exactly, across processes.
//!
//! A follower reads the task's log and then waits for a hint. Hints of this process come with
//! every transaction; what other processes wrote is found by one question for all followed tasks
//! at once, asked when the store hints that something changed elsewhere and once a second.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::Engine;
use crate::event::Event;
use crate::store::hints::Follow;
use crate::store::{Hints, Store, StoreError};
use crate::task::TaskId;

mod all;
pub(crate) mod pages;
pub(crate) mod patterns;

pub use all::{AllEvents, Cursor};

/// How much of a log is read at a time: thousands may follow at once, and some of them read slowly.
const PAGE: usize = 32 * 1024;
/// How often followed tasks are looked at without a hint.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Finds out, for everyone in this process who follows a task, when others changed it.
pub(crate) async fn watch_others(store: Arc<dyn Store>, hints: Arc<Hints>) {
    let mut anything = hints.on_anything();
    loop {
        // Either way it is time to look; the sender lives as long as `hints`.
        let _ = tokio::time::timeout(LOOK_EVERY, anything.changed()).await;
        let followed = hints.followed();
        if followed.is_empty() {
            continue;
        }
        match store.advanced(&followed).await {
            Ok(advanced) => {
                for (task, seq) in advanced {
                    hints.tell_advanced(task, seq);
                }
            }
            Err(error) => tracing::debug!(%error, "cannot look for new events; trying again"),
        }
    }
}

/// The events of one task, from a number on, in order and without gaps.
pub struct Events {
    engine: Arc<Engine>,
    follow: Follow,
    task: TaskId,
    after: u64,
    read: VecDeque<Event>,
    /// The last event given was final; a resume may have followed it.
    at_end: bool,
    /// Whether to wait for more after a final event.
    endless: bool,
}

impl Events {
    pub(crate) fn new(engine: Arc<Engine>, task: TaskId, after: u64) -> Self {
        let follow = engine.hints.follow(task);
        Self { engine, follow, task, after, read: VecDeque::new(), at_end: false, endless: false }
    }

    /// Goes on after the final event: the task may be resumed, and its state may be patched, at any time.
    /// [`Events::next`] then gives `None` only when the task was removed.
    pub fn endless(mut self) -> Self {
        self.endless = true;
        self
    }

    /// The next event; waits for it when there is none yet. `None` after the final one.
    pub async fn next(&mut self) -> Result<Option<Event>, StoreError> {
        loop {
            if let Some(event) = self.next_ready() {
                return Ok(Some(event));
            }
            self.look().await?;
            if self.read.is_empty() {
                let ended =
                    if self.endless { self.is_removed().await? } else { self.at_end || self.is_over().await? };
                if ended {
                    return Ok(None);
                }
                self.follow.changed().await;
            }
        }
    }

    /// The next event, if it is stored already; never waits for one.
    pub async fn next_stored(&mut self) -> Result<Option<Event>, StoreError> {
        if self.read.is_empty() {
            self.look().await?;
        }
        Ok(self.next_ready())
    }

    /// Reads the next page, if there is one.
    async fn look(&mut self) -> Result<(), StoreError> {
        let rows = self.engine.store.log(self.task, self.after, PAGE).await?;
        let after = self.after;
        let events = rows.iter().flat_map(|row| row.events_of(self.task));
        self.read.extend(events.filter(|event| event.seq > after));
        Ok(())
    }

    /// The next event, if it was read already; never waits.
    pub fn next_ready(&mut self) -> Option<Event> {
        let event = self.read.pop_front()?;
        self.after = event.seq;
        self.at_end = event.is_final();
        Some(event)
    }

    /// Whether nothing can follow: the newest event is final and was given before, or the task
    /// was removed.
    async fn is_over(&self) -> Result<bool, StoreError> {
        let newest = self.newest().await?;
        Ok(newest.is_none_or(|event| event.seq <= self.after && event.is_final()))
    }

    /// Whether the task is gone, and its log with it.
    async fn is_removed(&self) -> Result<bool, StoreError> {
        Ok(self.newest().await?.is_none())
    }

    /// The newest event of the page that has the last one given; a task that is there has at least that.
    async fn newest(&self) -> Result<Option<Event>, StoreError> {
        let rows = self.engine.store.log(self.task, self.after.saturating_sub(1), PAGE).await?;
        Ok(rows.last().and_then(|row| row.events_of(self.task).pop()))
    }
}
