//! The order in which recorded outcomes, and what arrives, are given to a handler. No I/O.
//!
//! It is the order of the log, but for deferred records: their results are given before they are
//! written, so each says how much of the log was known then, and has its place right behind that.

use crate::error::TaskError;
use crate::event::LogRow;
use crate::record::{Record, records_of};

/// The place of a record among all of a task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Order {
    /// The number of the first event of its row; of a deferred one, of the newest event known.
    seq: u64,
    deferred: bool,
    /// Tells those of one place apart.
    number: u64,
}

impl Order {
    /// Behind everything.
    pub(super) const LAST: Self = Self { seq: u64::MAX, deferred: true, number: u64::MAX };

    /// The place of the record that is the `number`th to be looked at, from a row that begins with
    /// event `seq`.
    pub(super) fn of(record: &Record, seq: u64, number: u64) -> Self {
        match record.given_after() {
            Some(known) => Self { seq: known, deferred: true, number },
            None => Self { seq, deferred: false, number },
        }
    }

    /// The place of what a checkpoint kept, before everything that came later.
    pub(super) fn kept(number: u64) -> Self {
        Self { seq: 0, deferred: false, number }
    }
}

/// The records of a row, each with the number of the row's first event.
pub(super) fn numbered(row: &LogRow) -> Result<impl Iterator<Item = (u64, Record)>, TaskError> {
    let records = records_of(row).map_err(|error| {
        TaskError::fatal("journal_damaged", format!("row {} of the task's log cannot be read: {error}", row.seq))
            .detail("seq", row.seq)
    })?;
    let seq = row.seq;
    Ok(records.into_iter().map(move |record| (seq, record)))
}

/// Brings records into the order in which they are given.
pub(super) fn sort(records: &mut [(u64, Record)]) {
    // Stable: what has one place stays as it was written.
    records.sort_by_key(|(seq, record)| Order::of(record, *seq, 0));
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;
    use crate::record::{Effect, Op};

    fn done(step: &str, given_after: Option<u64>) -> Record {
        Record::Done {
            step: step.into(),
            op: Op::Step,
            effect: Effect::Read,
            attempt: 1,
            started: 0,
            result: RawValue::NULL.to_owned(),
            undoable: false,
            given_after,
        }
    }

    #[test]
    fn a_deferred_record_comes_behind_what_was_known_when_its_result_was_given() {
        let mut records = vec![
            (3, done("known", None)),
            (5, done("came meanwhile", None)),
            (7, done("first", Some(4))),
            (7, done("second", Some(4))),
            (7, done("third", Some(6))),
            (7, done("not deferred", None)),
        ];
        sort(&mut records);
        let names: Vec<&str> = records.iter().filter_map(|(_, record)| record.step()).collect();
        assert_eq!(names, ["known", "first", "second", "came meanwhile", "third", "not deferred"]);
    }
}
