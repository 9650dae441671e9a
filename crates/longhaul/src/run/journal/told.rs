//! Which progress was told by runs before, so that a replay does not tell it again. No I/O.
//!
//! Progress has no record. Where something was recorded after it, the replay knows that it was told;
//! behind the last record, what stands in the log has to be compared.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::Value;

use crate::event::{LogRow, NewEvent};
use crate::record::Record;

/// How often each was told since something was recorded last. Not its text, which would be kept in
/// memory for nothing.
#[derive(Debug, Default)]
pub(super) struct Told(HashMap<u64, u32>);

impl Told {
    /// Reads a row of the log with these records.
    pub(super) fn read<'a>(&mut self, row: &LogRow, records: impl Iterator<Item = &'a Record>) {
        if row.run == 0 {
            return;
        }
        let recorded = |record: &Record| match record.plain() {
            Record::Done { .. } | Record::Checkpoint { .. } => true,
            Record::Failed { last, .. } => *last,
            _ => false,
        };
        // A result that was given before it was written was given before what is told behind it.
        let given = |record: &Record| record.given_after().is_some();
        let (mut any, mut all_given) = (false, true);
        for record in records.filter(|record| recorded(record)) {
            (any, all_given) = (true, all_given && given(record));
        }
        if any {
            self.0.clear();
        }
        if any && !all_given || !row.events.contains("\"progress\"") {
            return;
        }
        let events: Vec<NewEvent> = serde_json::from_str(&row.events).unwrap_or_default();
        let behind = events.iter().rposition(|event| any && event.kind == "step.completed").map_or(0, |at| at + 1);
        for event in events[behind..].iter().filter(|event| event.kind == "progress") {
            *self.0.entry(mark(&event.data)).or_default() += 1;
        }
    }

    /// Whether it was told, once for each time.
    pub(super) fn take(&mut self, progress: &Value) -> bool {
        match self.0.get_mut(&mark(progress)) {
            Some(times) if *times > 0 => {
                *times -= 1;
                true
            }
            _ => false,
        }
    }
}

/// Everything but the time.
fn mark(progress: &Value) -> u64 {
    let mut hasher = DefaultHasher::new();
    for member in ["status", "step", "total_step", "tool", "message"] {
        progress[member].to_string().hash(&mut hasher);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::event::LogEntry;

    fn progress(message: &str, time: u32) -> Value {
        json!({"status": "thinking", "step": 1, "total_step": 0, "message": message, "time": time})
    }

    fn row(messages: &[&str], records: &[Record]) -> LogRow {
        let events: Vec<NewEvent> =
            messages.iter().map(|message| NewEvent::new("progress", progress(message, 1))).collect();
        let LogEntry { count, events, records } = LogEntry::new(&events, records);
        LogRow { seq: 1, count, time: 0, run: 1, events, records }
    }

    #[test]
    fn what_was_told_is_known_as_often_as_it_was_told_and_what_was_not_is_new() {
        let mut told = Told::default();
        told.read(&row(&["a", "b", "a"], &[]), [].iter());
        assert!(told.take(&progress("a", 2)) && told.take(&progress("a", 3)), "whenever that was");
        assert!(!told.take(&progress("a", 4)));
        assert!(!told.take(&progress("c", 1)));
        let checkpoint = Record::Checkpoint { part: 1, kept: Vec::new() };
        told.read(&row(&["c"], std::slice::from_ref(&checkpoint)), [checkpoint].iter());
        assert!(!told.take(&progress("b", 2)), "a record lies in between");
    }
}
