//! I6 and I7: events, as they are stored, read and delivered.

use std::collections::BTreeMap;

use longhaul::TaskId;

use super::{Found, View};
use crate::history::Fact;
use crate::ledger::{What, digest};
use crate::records::Stream;

/// I6: events are 1..n, the final one is last unless a resume follows it, and what readers read is the log.
pub(super) fn gapless(view: &View<'_>, found: &mut Found<'_>) {
    for task in view.tasks() {
        let numbers: Vec<u64> = task.events.iter().map(|event| event.seq).collect();
        if let Some((place, number)) =
            numbers.iter().enumerate().find(|(place, number)| **number != *place as u64 + 1)
        {
            found.of(task.id, format!("event {} has the number {number}", place + 1));
        }
        if numbers.last().copied().unwrap_or(0) != task.last_seq {
            let last = numbers.last();
            found.of(task.id, format!("the newest event is {last:?}, the task says {}", task.last_seq));
        }
        for pair in task.events.windows(2) {
            if pair[0].is_final() && pair[1].kind != "task.resumed" {
                found.of(task.id, format!("{} follows the final event {}", pair[1].kind, pair[0].kind));
            }
        }
    }
    read_as_stored(view, found);
    read_as_a_whole(view, found);
}

/// What each event says, by task and number.
fn logs(view: &View<'_>) -> BTreeMap<TaskId, Vec<u64>> {
    let text = |event| serde_json::to_string(event).unwrap_or_default();
    view.tasks().map(|task| (task.id, task.events.iter().map(|event| digest(&text(event))).collect())).collect()
}

fn read_as_stored(view: &View<'_>, found: &mut Found<'_>) {
    let logs = logs(view);
    for stream in &view.history.streams {
        let Some(log) = logs.get(&stream.task) else {
            found.of(stream.task, "it was read, and is not in the store");
            continue;
        };
        for (place, (seq, read)) in stream.events.iter().enumerate() {
            let expected = stream.after + 1 + place as u64;
            if *seq != expected {
                found.of(stream.task, format!("a reader was given {seq} instead of {expected}"));
                break;
            }
            if log.get(*seq as usize - 1) != Some(read) {
                found.of(stream.task, format!("a reader was told something else of event {seq} than the log has"));
                break;
            }
        }
        let end = stream.events.last().map_or(stream.after, |(seq, _)| *seq);
        // Unless a resume follows it.
        let task = view.history.tasks.get(&stream.task);
        let is_end = |task: &Fact| task.events.get(end as usize - 1).is_some_and(longhaul::Event::is_final);
        if stream.ended && !(end > 0 && task.is_some_and(is_end)) {
            found.of(stream.task, format!("a reader was told that {end} is the last event of {}", log.len()));
        }
    }
}

/// What each reader read that was to read everything is the log, from its first event to its end: each of its streams begins where the
/// one before it ended, and the last one came to the end.
fn read_as_a_whole(view: &View<'_>, found: &mut Found<'_>) {
    let mut readers: BTreeMap<(u64, TaskId), Vec<&Stream>> = BTreeMap::new();
    for stream in &view.history.streams {
        if let Some(reader) = stream.reader {
            readers.entry((reader, stream.task)).or_default().push(stream);
        }
    }
    for ((reader, task), streams) in readers {
        let mut next = 0;
        for stream in &streams {
            if stream.after != next {
                found.of(
                    task,
                    format!("reader {reader} had read up to {next}, and went on after {}", stream.after),
                );
            }
            next = stream.events.last().map_or(stream.after, |(seq, _)| *seq);
        }
        if !streams.last().is_some_and(|stream| stream.ended) {
            found.of(task, format!("reader {reader} never came to the end; it has read up to {next}"));
        }
    }
}

/// I7: the subscriber was given every event, as it is in the log, those of a task in their order; and so was the broker.
pub(super) fn delivered(view: &View<'_>, found: &mut Found<'_>) {
    if view.history.setup.heard {
        came(view, found, "delivered", |what| match what {
            What::Heard { seq, digest, .. } => Some((*seq, *digest)),
            _ => None,
        });
    }
    if view.history.setup.arrives {
        came(view, found, "published", |what| match what {
            What::Arrived { seq, digest, .. } => Some((*seq, *digest)),
            _ => None,
        });
    }
}

fn came(view: &View<'_>, found: &mut Found<'_>, how: &str, told: fn(&What) -> Option<(u64, u64)>) {
    let logs = logs(view);
    for (task, log) in &logs {
        let mut next = 1;
        for line in view.lines(*task) {
            let Some((seq, digest)) = told(&line.what) else { continue };
            if seq > next {
                found.of(*task, format!("event {seq} was {how} before {next}"));
                next = seq;
            }
            if log.get(seq as usize - 1) != Some(&digest) {
                found.of(*task, format!("event {seq} was {how} otherwise than it is in the log"));
            }
            if seq == next {
                next += 1;
            }
        }
        if next <= log.len() as u64 {
            found.of(*task, format!("event {next} of {} was never {how}", log.len()));
        }
    }
    for line in &view.history.ledger {
        let task = super::task_of(&line.what);
        if let Some((seq, _)) = told(&line.what)
            && !logs.contains_key(&task)
        {
            found.of(task, format!("event {seq} was {how}, and the task is not in the store"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use crate::history::History;
    use longhaul::State;
    use serde_json::json;

    fn good() -> Fact {
        fact(vec![], State::Completed).submitted().started(1).ended(1)
    }

    #[test]
    fn a_gap_a_wrong_end_and_events_after_the_end_break_i6() {
        assert_eq!(broken(&history([good()], vec![])), [] as [u8; 0]);
        let mut gap = good();
        gap.events.remove(1);
        assert_eq!(found(6, &history([gap], vec![])).len(), 1);
        let mut short = good();
        short.last_seq = 4;
        assert_eq!(found(6, &history([short], vec![])).len(), 1);
        let after = good().told(0, "signal.received", None, serde_json::json!({}));
        assert_eq!(found(6, &history([after], vec![])).len(), 1);
    }

    fn read(task: &Fact, after: u64, count: usize) -> Stream {
        let text = |event| digest(&serde_json::to_string(event).expect("writes"));
        let events: Vec<(u64, u64)> = task
            .events
            .iter()
            .filter(|event| event.seq > after)
            .take(count)
            .map(|event| (event.seq, text(event)))
            .collect();
        let ended = events.last().is_some_and(|(seq, _)| *seq == task.last_seq);
        Stream { task: task.id, after, events, ended, reader: None }
    }

    #[test]
    fn a_reader_that_missed_something_or_was_told_otherwise_breaks_i6() {
        let task = good();
        let with = |streams: Vec<Stream>| History { streams, ..history([task.clone()], vec![]) };
        assert_eq!(broken(&with(vec![read(&task, 0, 2), read(&task, 2, 9)])), [] as [u8; 0]);
        let mut missed = read(&task, 0, 9);
        missed.events.remove(1);
        assert_eq!(broken(&with(vec![missed])), [6]);
        let mut otherwise = read(&task, 0, 9);
        otherwise.events[1].1 ^= 1;
        assert_eq!(broken(&with(vec![otherwise])), [6]);
        let cut = Stream { ended: true, ..read(&task, 0, 2) };
        assert_eq!(broken(&with(vec![cut])), [6]);
    }

    #[test]
    fn an_end_that_a_resume_follows_is_one_and_an_end_in_the_middle_breaks_i6() {
        let opened = |kind: &str| {
            let task = fact(vec![], State::Completed).submitted().started(1).told(1, kind, None, json!({}));
            task.told(0, "task.resumed", None, json!({"by": "ann"})).started(3).ended(3)
        };
        let with = |task: Fact| {
            let early = Stream { ended: true, ..read(&task, 0, 3) };
            broken(&History { streams: vec![early], ..history([task], vec![]) })
        };
        assert_eq!(with(opened("task.failed")), [] as [u8; 0]);
        assert_eq!(with(opened("step.failed")), [6]);
    }

    #[test]
    fn a_reader_that_does_not_come_to_the_end_or_leaves_something_out_breaks_i6() {
        let task = good();
        let with = |streams: Vec<Stream>| {
            let streams = streams.into_iter().map(|stream| Stream { reader: Some(7), ..stream }).collect();
            broken(&History { streams, ..history([task.clone()], vec![]) })
        };
        assert_eq!(with(vec![read(&task, 0, 2), read(&task, 2, 0), read(&task, 2, 9)]), [] as [u8; 0]);
        assert_eq!(with(vec![read(&task, 0, 2)]), [6], "it never ended");
        assert_eq!(with(vec![read(&task, 0, 1), read(&task, 2, 9)]), [6], "one is missing");
        assert_eq!(with(vec![read(&task, 0, 2), read(&task, 1, 9)]), [6], "one is read twice");
    }

    #[test]
    fn an_event_that_was_not_delivered_or_out_of_order_breaks_i7() {
        let task = good();
        let heard = |seqs: &[u64]| {
            let lines = seqs.iter().map(|seq| {
                let text = serde_json::to_string(&task.events[*seq as usize - 1]).expect("writes");
                line(0, What::Heard { task: task.id, seq: *seq, digest: digest(&text) })
            });
            let mut history = history([task.clone()], lines.collect());
            history.setup.heard = true;
            history
        };
        assert_eq!(broken(&heard(&[1, 2, 3])), [] as [u8; 0]);
        assert_eq!(broken(&heard(&[1, 1, 2, 1, 2, 3])), [] as [u8; 0], "again is allowed");
        assert_eq!(broken(&heard(&[1, 2])), [7]);
        assert_eq!(broken(&heard(&[1, 3, 2])), [7]);
    }
}
