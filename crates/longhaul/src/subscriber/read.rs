//! Reading for a subscriber: pages of the log of all tasks, as batches of the events it wants.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use super::Told;
use crate::engine::Engine;
use crate::feed::pages::Pages;
use crate::feed::patterns::Patterns;
use crate::store::StoreError;
use crate::store::feed::{FeedPage, FeedRow};
use crate::store::subscribers::Position;

/// How many rows are read at a time. Many, because on PostgreSQL what was added lately is looked through for
/// each page.
const ROWS: usize = 4_000;
/// The pauses while the store does not answer, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Events that are handled together, and how far the subscriber has come then.
pub(super) struct Batch {
    /// What is wanted; may be empty, when everything was passed by.
    pub(super) told: Arc<[Told]>,
    /// For each of them, how far the subscriber has come after it.
    pub(super) steps: Vec<Step>,
    /// How far it has come after all of them.
    pub(super) end: Step,
    /// There was nothing more when this was read.
    pub(super) caught_up: bool,
}

/// How far a subscriber has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) at: Position,
    /// The time of what it has passed, microseconds.
    pub(super) time: i64,
}

/// What is read, and for whom.
pub(super) struct Reader {
    pub(super) engine: Arc<Engine>,
    pub(super) patterns: Patterns,
    /// Whose events; of all tenants when `None`.
    pub(super) tenant: Option<Arc<str>>,
    /// How many events one batch has at most.
    pub(super) most: usize,
    pub(super) from: Step,
}

impl Reader {
    /// Reads until nobody wants more.
    pub(super) async fn run(self, batches: mpsc::Sender<Batch>) {
        let mut pages = Pages::new(Arc::clone(&self.engine), self.from.at.place, ROWS);
        let mut last = self.from;
        let mut pause = FIRST_PAUSE;
        loop {
            let begun = self.engine.store.clock().now_micros();
            let page = match pages.read().await {
                Ok(page) => page,
                Err(error) => {
                    warn(&error, pause);
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    continue;
                }
            };
            pause = FIRST_PAUSE;
            for batch in self.cut(&page, &mut last, begun) {
                if batches.send(batch).await.is_err() {
                    return;
                }
            }
            if page.rows.is_empty() {
                pages.rest(&page).await;
            }
        }
    }

    /// The wanted events of a page, in batches. There is always one, which says how far the page goes.
    fn cut(&self, page: &FeedPage, last: &mut Step, begun: i64) -> Vec<Batch> {
        // What may not be given yet holds up every reader, and says nothing of this one.
        let caught_up = !page.more;
        let newest = page.rows.last().map_or(last.time, |row| row.row.time);
        let time = if caught_up { begun.max(newest) } else { newest };
        let end = Step { at: Position { place: page.next, given: 0 }, time };
        let mut batches = Vec::new();
        let (mut told, mut steps) = (Vec::new(), Vec::new());
        let mut close = |told: &mut Vec<Told>, steps: &mut Vec<Step>, end, caught_up| {
            let told: Arc<[Told]> = std::mem::take(told).into();
            batches.push(Batch { told, steps: std::mem::take(steps), end, caught_up });
        };
        let mut tenants = Tenants { known: None, wanted: self.tenant.clone() };
        for row in &page.rows {
            let Some(tenant) = row.tenant.as_deref().and_then(|name| tenants.get(name)) else { continue };
            let given = if row.place == last.at.place { last.at.given } else { 0 };
            for (event, at) in events(row) {
                if event.seq <= given || !self.patterns.want(&event.kind) {
                    continue;
                }
                let step = Step { at, time: row.row.time };
                if told.len() == self.most {
                    let end = steps.last().copied().unwrap_or(step);
                    close(&mut told, &mut steps, end, false);
                }
                told.push(Told { tenant: Arc::clone(&tenant), event });
                steps.push(step);
            }
        }
        close(&mut told, &mut steps, end, caught_up);
        *last = end;
        batches
    }
}

/// The events of a row, each with the position after it.
fn events(row: &FeedRow) -> impl Iterator<Item = (crate::event::Event, Position)> + '_ {
    let last = row.row.last_seq();
    row.row.events_of(row.task).into_iter().map(move |event| {
        let after = if event.seq == last {
            Position { place: row.place.next(), given: 0 }
        } else {
            Position { place: row.place, given: event.seq }
        };
        (event, after)
    })
}

/// Names of tenants that are wanted; the same one is made once.
struct Tenants {
    known: Option<Arc<str>>,
    wanted: Option<Arc<str>>,
}

impl Tenants {
    fn get(&mut self, name: &str) -> Option<Arc<str>> {
        if let Some(wanted) = &self.wanted {
            return (**wanted == *name).then(|| Arc::clone(wanted));
        }
        if self.known.as_deref() != Some(name) {
            self.known = Some(name.into());
        }
        self.known.clone()
    }
}

fn warn(error: &StoreError, pause: Duration) {
    tracing::warn!(%error, again_in = ?pause, "events cannot be read for a subscriber; trying again");
}
