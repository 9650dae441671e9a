//! A mutant, [`Mutant::EventApart`](crate::faults::Mutant::EventApart): what runs tell is written in a transaction of its
//! own, after the one that it tells of. A process that dies between the two loses it.

use super::rows::Id;
use super::store_error;
use super::writer::Writer;
use crate::event::LogEntry;
use crate::store::StoreError;
use crate::task::TaskId;

/// A row of the log that is to be written.
pub(super) struct Row {
    pub(super) task: TaskId,
    pub(super) seq: u64,
    pub(super) time: i64,
    pub(super) run: u64,
    pub(super) entry: LogEntry,
}

pub(super) async fn write(writer: &Writer, rows: Vec<Row>) -> Result<(), StoreError> {
    if rows.is_empty() {
        return Ok(());
    }
    let append = move |transaction: &rusqlite::Transaction<'_>| {
        let mut append = transaction.prepare_cached(include_str!("sql/log_append.sql")).map_err(store_error)?;
        for Row { task, seq, time, run, entry } in rows {
            let row = (Id::from(task), seq, entry.count, time, run, entry.events, entry.records);
            append.execute(row).map_err(store_error)?;
        }
        Ok(())
    };
    writer.transact(false, append).await
}
