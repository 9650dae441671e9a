//! A task that is resumed lives on: what was undone is started again, under new keys. A step so has **generations**, counted by
//! how often it was undone before.

use std::collections::BTreeMap;

use longhaul::Event;

use super::runs::of_undo;
use crate::history::Fact;

/// The step and how often it had been undone.
pub(super) type Generation<'a> = (&'a str, usize);

/// The step that an event says is undone.
pub(super) fn undoes(event: &Event) -> Option<&str> {
    let undone = event.kind == "step.completed" && of_undo(event);
    undone.then(|| event.step.as_deref().and_then(|step| step.strip_prefix("undo "))).flatten()
}

/// Whether someone opened the task again with this event.
pub(super) fn is_resumed(event: &Event) -> bool {
    event.kind == "task.resumed" && event.data["by"] != "time"
}

fn undone_where(task: &Fact, step: &str, counts: impl Fn(&Event) -> bool) -> usize {
    task.events.iter().filter(|event| undoes(event) == Some(step) && counts(event)).count()
}

/// The generation of a step (or of its undo) at an event.
pub(super) fn generation_at(task: &Fact, step: &str, seq: u64) -> usize {
    undone_where(task, step.trim_start_matches("undo "), |event| event.seq < seq)
}

/// The generation of a step that a run calls: undoing is the last thing that a run does.
pub(super) fn generation_in(task: &Fact, step: &str, fence: u64) -> usize {
    undone_where(task, step, |event| event.run < fence)
}

/// How many generations of a step are forgotten, because the task was resumed after they were undone.
pub(super) fn forgotten(task: &Fact, step: &str) -> usize {
    let resumed = task.events.iter().rfind(|event| is_resumed(event)).map_or(0, |event| event.seq);
    undone_where(task, step, |event| event.seq < resumed)
}

/// Which run recorded the result of each step, and with which event.
pub(super) fn recorded(task: &Fact) -> BTreeMap<Generation<'_>, &Event> {
    let mut recorded = BTreeMap::new();
    for event in task.events.iter().filter(|event| event.kind == "step.completed" && !of_undo(event)) {
        if let Some(step) = event.step.as_deref() {
            recorded.entry((step, generation_at(task, step, event.seq))).or_insert(event);
        }
    }
    recorded
}

/// The task's events from one resume to the next.
pub(super) fn lives(task: &Fact) -> impl Iterator<Item = &[Event]> {
    let mut rest = task.events.as_slice();
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = rest.iter().skip(1).position(is_resumed).map_or(rest.len(), |place| place + 1);
        let (life, later) = rest.split_at(end);
        rest = later;
        Some(life)
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use longhaul::State;
    use serde_json::json;

    #[test]
    fn a_resume_begins_another_life_and_an_undone_step_another_generation() {
        let first = fact(vec![undoable("a")], State::Completed).submitted().started(1).done(1, "a").undone(1, "a");
        let ended = first.told(1, "task.failed", None, json!({}));
        let task = ended.told(0, "task.resumed", None, json!({"by": "ann"})).started(3).done(3, "a").ended(3);
        let lives: Vec<usize> = lives(&task).map(<[Event]>::len).collect();
        assert_eq!(lives, [6, 5]);
        assert_eq!((generation_in(&task, "a", 1), generation_in(&task, "a", 3)), (0, 1));
        let recorded: Vec<(Generation<'_>, u64)> =
            recorded(&task).into_iter().map(|(of, event)| (of, event.run)).collect();
        assert_eq!(recorded, [(("a", 0), 1), (("a", 1), 3)]);
    }
}
