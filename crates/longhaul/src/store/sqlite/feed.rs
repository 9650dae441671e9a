//! The log of all tasks, in the order of its rows' numbers.

use async_trait::async_trait;

use super::rows::task_id;
use super::{SqliteStore, rows};
use crate::store::StoreError;
use crate::store::feed::{FeedPage, FeedRow, FeedStore, Place, ROW_BYTES};

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

    async fn feed(&self, from: Place, span: i64, most: usize) -> Result<FeedPage, StoreError> {
        self.read(move |sql| {
            let mut select = sql.prepare_cached(include_str!("sql/feed.sql"))?;
            let found = select.query_map((from.first_row(), most as i64), |row| {
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
                if bytes > most * ROW_BYTES {
                    break;
                }
            }
            let more = page.len() == most || bytes > most * ROW_BYTES;
            let next = page.last().map_or(from, |row| row.place.next());
            Ok(FeedPage { rows: page, next, span, more, held: false })
        })
        .await
    }

    fn feed_kind(&self) -> char {
        's'
    }
}
