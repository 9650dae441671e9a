//! Events: the numbered history of a task that people and programs follow.
//!
//! A task's log is a list of rows, one per accepted transaction. A row holds the events of that
//! transaction (what outsiders see) and its records (what replay needs, see `record.rs`). The
//! row knows the number of its first event, the time and the run, so an event inside it only
//! carries what differs.

use std::borrow::Borrow;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::record::Record;
use crate::task::{TaskId, timestamp};

/// One line of a task's history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Its number in the task: 1, 2, 3 … without gaps.
    pub seq: u64,
    /// The task.
    pub task_id: TaskId,
    /// What happened: `task.started`, `step.completed`, `progress`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// When, by the store's clock.
    pub time: Timestamp,
    /// The fence of the run that told it; 0 when no run did.
    pub run: u64,
    /// The step it is about.
    pub step: Option<String>,
    /// The rest.
    pub data: Value,
}

impl Event {
    /// Whether this event ends the task (until a `resume`).
    pub fn is_final(&self) -> bool {
        matches!(self.kind.as_str(), "task.completed" | "task.failed" | "task.cancelled")
    }
}

/// What a person watches: which step, what it does, in words.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The task.
    pub task_id: TaskId,
    /// The current step (an agent's iteration).
    pub step: u32,
    /// How many steps are expected; 0 when unknown.
    pub total_step: u32,
    /// `queued`, `thinking`, `tool_call`, `tool_result`, `waiting`, `retrying`, `compensating`,
    /// `completed` or `error`.
    pub status: String,
    /// The tool in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    /// One sentence for people.
    pub message: String,
    /// When.
    pub time: Timestamp,
}

/// An event before it has a number.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NewEvent {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) step: Option<String>,
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub(crate) data: Value,
    /// When it happened, microseconds, if that was not when its transaction was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) time: Option<i64>,
}

impl NewEvent {
    pub(crate) fn new(kind: impl Into<String>, data: Value) -> Self {
        Self { kind: kind.into(), step: None, data, time: None }
    }

    pub(crate) fn of_step(kind: impl Into<String>, step: &str, data: Value) -> Self {
        Self { kind: kind.into(), step: Some(step.to_owned()), data, time: None }
    }

    pub(crate) fn at(mut self, time: i64) -> Self {
        self.time = Some(time);
        self
    }
}

/// What one transaction adds to a task's log, already in its stored form. Records never come
/// without an event: the event's number is the row's place in the log.
#[derive(Clone, Debug, Default)]
pub struct LogEntry {
    /// How many events.
    pub(crate) count: u32,
    /// The events, a JSON array.
    pub(crate) events: String,
    /// The records, a JSON array; `None` when there is nothing to replay.
    pub(crate) records: Option<String>,
}

impl LogEntry {
    /// An entry of `events` and `records`. Both are made of types that always serialise.
    pub(crate) fn new<E: Borrow<NewEvent> + Serialize, R: Borrow<Record> + Serialize>(
        events: &[E],
        records: &[R],
    ) -> Self {
        debug_assert!(records.is_empty() || !events.is_empty(), "records need an event");
        Self {
            count: u32::try_from(events.len()).unwrap_or(u32::MAX),
            events: serde_json::to_string(events).unwrap_or_else(|_| "[]".to_owned()),
            records: (!records.is_empty())
                .then(|| serde_json::to_string(records).unwrap_or_else(|_| "[]".to_owned())),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.events.len() + self.records.as_ref().map_or(0, String::len)
    }
}

/// One stored row of a task's log.
#[derive(Clone, Debug)]
pub struct LogRow {
    /// The number of its first event.
    pub(crate) seq: u64,
    /// How many events it holds.
    pub(crate) count: u32,
    /// When it was accepted, microseconds by the store's clock.
    pub(crate) time: i64,
    /// The fence of the run that wrote it; 0 for everyone else.
    pub(crate) run: u64,
    /// The events, a JSON array.
    pub(crate) events: String,
    /// The records, a JSON array.
    pub(crate) records: Option<String>,
}

impl LogRow {
    /// The number of its last event.
    pub(crate) fn last_seq(&self) -> u64 {
        (self.seq + u64::from(self.count)).saturating_sub(1)
    }

    /// Its events with their numbers. A damaged row gives one event that says so for each number
    /// it covers, so that the numbers stay gapless.
    pub(crate) fn events_of(&self, task: TaskId) -> Vec<Event> {
        let damaged = |error: &serde_json::Error| {
            let event = NewEvent::new("log.damaged", Value::String(error.to_string()));
            vec![event; self.count as usize]
        };
        let events: Vec<NewEvent> = serde_json::from_str(&self.events).unwrap_or_else(|error| damaged(&error));
        (self.seq..)
            .zip(events)
            .map(|(seq, event)| Event {
                seq,
                task_id: task,
                kind: event.kind,
                time: timestamp(event.time.unwrap_or(self.time)),
                run: self.run,
                step: event.step,
                data: event.data,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(events: String, count: u32) -> LogRow {
        LogRow { seq: 4, count, time: 1_000_000, run: 2, events, records: None }
    }

    #[test]
    fn events_of_one_transaction_get_consecutive_numbers() {
        let entry = LogEntry::new(
            &[
                NewEvent::of_step("step.completed", "a", json!({"attempt": 1})),
                NewEvent::new("progress", json!({})),
            ],
            &[] as &[Record],
        );
        let task = TaskId::new();
        let row = row(entry.events, entry.count);
        let events = row.events_of(task);
        assert_eq!(events.iter().map(|event| event.seq).collect::<Vec<_>>(), [4, 5]);
        assert_eq!(events[0].step.as_deref(), Some("a"));
        assert_eq!(row.last_seq(), 5);
    }

    #[test]
    fn a_damaged_row_keeps_its_numbers() {
        let events = row("not json".to_owned(), 3).events_of(TaskId::new());
        assert_eq!(events.iter().map(|event| event.seq).collect::<Vec<_>>(), [4, 5, 6]);
        assert!(events.iter().all(|event| event.kind == "log.damaged"));
    }
}
