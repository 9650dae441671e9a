//! The feed: the log of all tasks in one order that never changes behind a reader's back.
//!
//! Numbers given before a commit become visible out of order, so a reader must not pass anything that can
//! still appear before it. SQLite has one writer at a time, so the rows' own numbers are in the order of
//! commits; a marker row keeps the newest number from being given again after a delete. PostgreSQL orders by
//! transaction and gives only rows of transactions older than every one still under way.

use async_trait::async_trait;
use uuid::Uuid;

use super::StoreError;
use crate::event::LogRow;
use crate::task::TaskId;

/// How many rows one read gives to someone who follows what happens.
pub(crate) const PAGE_ROWS: usize = 500;
/// About how many bytes of events a read gives for each row it may give.
pub(crate) const ROW_BYTES: usize = 2 * 1024;

/// How many orders the first read spans.
pub(crate) const FIRST_SPAN: i64 = 1_000;

/// Reading the log of all tasks.
#[async_trait]
pub trait FeedStore: Send + Sync {
    /// The place before which everything there is has been given: what is committed from now on is at or
    /// after it.
    async fn feed_now(&self) -> Result<Place, StoreError>;

    /// The rows from `from` on, in the order of their places. `span` is that of the page before, or
    /// `FIRST_SPAN`; `most` is how many rows are given, within a bound on their size. Whatever is committed
    /// later has a place at or after the page's `next`.
    async fn feed(&self, from: Place, span: i64, most: usize) -> Result<FeedPage, StoreError>;

    /// Tells this kind of store's places from another's.
    fn feed_kind(&self) -> char;
}

/// A place in the feed. `order` is a row's number on SQLite, its transaction's on PostgreSQL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub(crate) order: i64,
    pub(crate) task: Uuid,
    pub(crate) seq: i64,
}

impl Place {
    /// Before everything.
    pub(crate) const START: Self = Self { order: 0, task: Uuid::nil(), seq: 0 };

    /// Before everything of this order.
    pub(crate) fn of(order: i64) -> Self {
        Self { order, ..Self::START }
    }

    /// The first row from here on, where an order is a row's number: a place after that row is of the next.
    pub(crate) fn first_row(self) -> i64 {
        self.order + i64::from(self.seq > 0)
    }

    /// The next place that another row can have.
    pub(crate) fn next(self) -> Self {
        Self { seq: self.seq + 1, ..self }
    }
}

/// A row of the feed.
#[derive(Debug)]
pub struct FeedRow {
    pub(crate) place: Place,
    pub(crate) task: TaskId,
    /// Whose it is; `None` when the task is gone.
    pub(crate) tenant: Option<String>,
    /// Without its records.
    pub(crate) row: LogRow,
}

/// Some rows of the feed.
#[derive(Debug)]
pub struct FeedPage {
    pub(crate) rows: Vec<FeedRow>,
    /// Where to go on.
    pub(crate) next: Place,
    /// How many orders the next read should span, where that matters.
    pub(crate) span: i64,
    /// There may be more at once.
    pub(crate) more: bool,
    /// Something is committed, or about to be, that may not be given yet: look again soon.
    pub(crate) held: bool,
}
