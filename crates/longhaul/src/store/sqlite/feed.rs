//! The log of all tasks, in the order of its rows' numbers.

use async_trait::async_trait;

use super::rows::task_id;
use super::{SqliteStore, rows};
use crate::store::StoreError;
use crate::store::feed::{FeedPage, FeedRow, FeedStore, PAGE_BYTES, PAGE_ROWS, Place};

#[async_trait]
impl FeedStore for SqliteStore {
    async fn feed_now(&self) -> Result<Place, StoreError> {
        self.read(|sql| {
            let newest: Option<i64> =
                sql.prepare_cached("SELECT max(rowid) FROM log")?.query_row((), |row| row.get(0))?;
            Ok(Place::of(newest.unwrap_or(0) + 1))
        })
        .await
    }

    async fn feed(&self, from: Place, span: i64) -> Result<FeedPage, StoreError> {
        self.read(move |sql| {
            let mut select = sql.prepare_cached(include_str!("sql/feed.sql"))?;
            // A place after the row of its order is one of the next row.
            let first = from.order + i64::from(from.seq > 0);
            let found = select.query_map((first, PAGE_ROWS as i64), |row| {
                Ok(FeedRow {
                    place: Place::of(row.get(0)?),
                    task: task_id(row, 1)?,
                    tenant: row.get(2)?,
                    row: rows::log_row_from(row, 3)?,
                })
            })?;
            let (mut page, mut bytes) = (Vec::new(), 0);
            for row in found {
                let row = row?;
                bytes += row.row.events.len();
                page.push(row);
                if bytes > PAGE_BYTES {
                    break;
                }
            }
            let more = page.len() == PAGE_ROWS || bytes > PAGE_BYTES;
            let next = page.last().map_or(from, |row| row.place.next());
            Ok(FeedPage { rows: page, next, span, more, held: false })
        })
        .await
    }

    fn feed_kind(&self) -> char {
        's'
    }
}
