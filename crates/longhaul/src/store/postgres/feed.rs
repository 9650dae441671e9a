//! The log of all tasks, in the order of transactions.
//!
//! A transaction's number is not the order of its commit, so only those are given that are older than every
//! transaction under way; nothing can appear before them any more. Whoever only reads has no number and holds
//! nobody up. The index is a BRIN, which costs writers nothing; what was added since it was last summed up
//! has to be looked through, so readers sum up now and then.

use std::borrow::Cow;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use futures_util::future::join3;
use tokio_postgres::Row;

use super::PostgresStore;
use super::rows::{get_id, log_row, to_i64};
use crate::faults::{self, Mutant};
use crate::store::StoreError;
use crate::store::clock::wall_micros;
use crate::store::feed::{FeedPage, FeedRow, FeedStore, Place, ROW_BYTES};

/// How many transactions one read spans at most.
const MAX_SPAN: i64 = 1 << 40;
/// How long to the next summing up, microseconds.
const SUM_UP_EVERY: i64 = 5_000_000;

/// The only plan: through the BRIN index.
pub(super) const PLAN: &str = "BEGIN; SET LOCAL enable_bitmapscan = on; SET LOCAL enable_indexscan = off; \
                    SET LOCAL enable_indexonlyscan = off";

#[async_trait]
impl FeedStore for PostgresStore {
    async fn feed_now(&self) -> Result<Place, StoreError> {
        let tx = self.tx().await?;
        let found = tx.rows("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint", &[]).await?;
        tx.end();
        found.first().map_or(Ok(Place::START), |row| Ok(Place::of(row.try_get(0)?)))
    }

    async fn feed(&self, from: Place, span: i64, most: usize) -> Result<FeedPage, StoreError> {
        self.sum_up().await;
        // How many rows there are per transaction is not known: the span follows what was found.
        let span = span.clamp(1, MAX_SPAN);
        let until = from.order.saturating_add(span);
        let tx = self.tx().await?;
        let select = if faults::is(Mutant::OutboxByCursor) {
            include_str!("sql/feed.sql").replace("pg_snapshot_xmin", "pg_snapshot_xmax").into()
        } else {
            Cow::Borrowed(include_str!("sql/feed.sql"))
        };
        let select = tx.prepare(&select).await?;
        let (rows, bytes) = (to_i64(most), to_i64(most * ROW_BYTES));
        let (begun, found, committed) = join3(
            tx.batch(PLAN),
            tx.query(&select, &[&from.order, &from.task, &from.seq, &until, &rows, &bytes]),
            tx.send_commit(),
        )
        .await;
        begun?;
        let found = found?;
        committed?;
        tx.end();
        let nothing = || StoreError::Failed("the server says nothing of its transactions".to_owned());
        let first = found.first().ok_or_else(nothing)?;
        let (oldest, next): (i64, i64) = (first.try_get(0)?, first.try_get(1)?);
        let mut page = Vec::with_capacity(found.len());
        for row in &found {
            page.extend(feed_row(row)?);
        }
        let size: usize = page.iter().map(|row| row.row.events.len()).sum();
        let full = page.len() == most || size >= most * ROW_BYTES;
        let until = until.min(oldest);
        let span = match page.len() {
            _ if full => span / 4,
            few if few < most / 4 && until < oldest => span.saturating_mul(4),
            _ => span,
        };
        let next_place = match page.last() {
            Some(last) if full => last.place.next(),
            // All of the span was looked at.
            _ => from.max(Place::of(until)),
        };
        Ok(FeedPage { rows: page, next: next_place, span, more: full || until < oldest, held: oldest < next })
    }

    fn feed_kind(&self) -> char {
        'p'
    }
}

fn feed_row(row: &Row) -> Result<Option<FeedRow>, StoreError> {
    let Some(order) = row.try_get::<_, Option<i64>>(2)? else { return Ok(None) };
    let (task, row_of) = (get_id(row, 3)?, log_row(row, 5)?);
    let place = Place { order, task: task.0, seq: to_i64(row_of.seq) };
    Ok(Some(FeedRow { place, task, tenant: row.try_get(4)?, row: row_of }))
}

impl PostgresStore {
    /// Sums up what was added to the log, so that the next reads need not look through it. Only saves time:
    /// without the right to do so, or while a vacuum is under way, it is left to the server.
    async fn sum_up(&self) {
        let (now, last) = (wall_micros(), self.summed_up.load(Ordering::Relaxed));
        let due = now - last > SUM_UP_EVERY;
        if !due || self.summed_up.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        let Ok(tx) = self.tx().await else { return };
        let summed = tx
            .batch("BEGIN; SET LOCAL lock_timeout = '50ms'; SELECT brin_summarize_new_values('log_xact'); COMMIT")
            .await;
        match summed {
            Ok(()) => tx.end(),
            Err(error) => {
                tracing::debug!(%error, "the feed's index was not summed up");
                // Dropped with its failed transaction, the connection is closed.
            }
        }
    }
}
