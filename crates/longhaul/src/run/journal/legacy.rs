//! What another task begins with of this one's journal: one that undoes it, or a fork. No I/O.

use crate::error::TaskError;
use crate::event::LogRow;
use crate::record::{Op, Record};
use crate::run::child::{CHILD, Child, SPAWN};
use crate::run::order::{self, Order};
use crate::task::{State, TaskId};

use super::{APPROVAL, Arrival, Journal, Key, LOCK};

impl Journal {
    /// What a fork of the task takes over, in its order: what was recorded well and not undone, what
    /// arrived, and changes of the state. Approvals and locks are not passed on.
    fn legacy(self, undone_later: &[Key]) -> Vec<Record> {
        let is_undone = |key: &Key| self.undone.contains(key) || undone_later.contains(key);
        let mut all: Vec<(Order, Record)> = Vec::new();
        for ((part, step), recorded) in self.recorded {
            let Ok(result) = recorded.outcome else { continue };
            let op = recorded.op.unwrap_or(Op::Step);
            // Children that had not ended then would never be heard of: the fork makes its own.
            let unheard = |child: &Child| !self.arrivals.contains_key(&format!("{CHILD}{}", child.id));
            let children: Vec<Child> = match step.starts_with(SPAWN) {
                true => serde_json::from_str(result.get()).unwrap_or_default(),
                false => Vec::new(),
            };
            let key = (part, step);
            if !is_undone(&key) && !children.iter().any(unheard) && !matches!(op, Op::Undo | Op::Approval) {
                let (part, step) = key;
                all.push((recorded.order, Record::Inherited { part, step, op, result }));
            }
        }
        for (at, arrivals) in self.arrivals {
            if !at.starts_with(APPROVAL) && !at.starts_with(LOCK) {
                let arrived = |arrival: Arrival| {
                    (arrival.order, Record::Arrived { at: at.clone(), message: arrival.message, id: None })
                };
                all.extend(arrivals.into_iter().map(arrived));
            }
        }
        let changed = |(order, change, version)| (order, Record::of_state(change, version));
        all.extend(self.patches.into_iter().map(changed));
        all.sort_by_key(|(order, _)| *order);
        all.into_iter().map(|(_, record)| record).collect()
    }
}

/// All records, in the order in which they are given. In another task they are one row, so that they
/// need not say it themselves.
fn all_records(rows: &[LogRow]) -> Result<Vec<Record>, TaskError> {
    let mut records = Vec::new();
    for row in rows {
        records.extend(order::numbered(row)?);
    }
    order::sort(&mut records);
    let plain = |(_, mut record)| {
        if let Record::Done { given_after, .. } = &mut record {
            *given_after = None;
        }
        record
    };
    Ok(records.into_iter().map(plain).collect())
}

/// What an undo of `task` begins with, which was recorded so far in these rows: all of it, to replay the
/// handler from. `None` when nothing is left to undo.
pub(crate) fn to_undo(rows: &[LogRow], task: TaskId, why: TaskError) -> Result<Option<Vec<Record>>, TaskError> {
    let mut records = all_records(rows)?;
    records.retain(|record| !matches!(record, Record::Input(_)));
    records.push(Record::UndoOf { task });
    let mut journal = Journal::default();
    for record in &records {
        journal.take(0, record.clone());
    }
    records.push(Record::Undoing { state: State::Completed, error: why });
    Ok(journal.has_undoable().then_some(records))
}

/// What a fork from `step` on takes over of a task with this log; `None` when the log does not know
/// the step.
pub(crate) fn prefix(rows: &[LogRow], step: &str) -> Result<Option<Vec<Record>>, TaskError> {
    let mut records = all_records(rows)?;
    // Since the task was resumed last, if it got that far again.
    let resumed = records.iter().rposition(|record| matches!(record, Record::Reopened { resumed: true }));
    // What undid a step is none of the task's own.
    let is_it =
        |record: &Record| record.step() == Some(step) && !matches!(record, Record::Done { op: Op::Undo, .. });
    let since = resumed.unwrap_or(0);
    let again = records[since..].iter().position(is_it).map(|place| since + place);
    let Some(cut) = again.or_else(|| records.iter().position(is_it)) else { return Ok(None) };
    let undone: Vec<Key> = records[cut..]
        .iter()
        .filter_map(|record| match record {
            Record::Undone { part, step } => Some((*part, step.clone())),
            _ => None,
        })
        .collect();
    let mut journal = Journal::default();
    for record in records.drain(..cut) {
        journal.take(0, record);
    }
    Ok(Some(journal.legacy(&undone)))
}
