//! I5: undo.

use longhaul::{Event, State};

use super::lives::{is_resumed, lives};
use super::runs::of_undo;
use super::{Found, View};
use crate::history::Fact;

/// I5: undo is exactly the completed undoable steps, the last completed first; "compensated" is said only when all
/// succeeded, and a task that ended well undid nothing. By request, a task of its own undoes what is left of another.
pub(super) fn reverse(view: &View<'_>, found: &mut Found<'_>) {
    for task in view.tasks().filter(|task| task.state.is_final() && task.undo_of.is_none()) {
        let mut done = Vec::new();
        let ends: Vec<&[Event]> = lives(task).collect();
        for (number, life) in ends.iter().enumerate() {
            completed(task, life, &mut done);
            // The last one ended as the task says; those before it did not end well, or nobody could have resumed them.
            let last = number + 1 == ends.len();
            let code = if last { code(task) } else { code_of(life) };
            let well = last && task.state == State::Completed;
            judge(task, life, &mut done, well, code, found);
        }
        by_request(view, task, done, found);
    }
}

/// What tasks that undo this one by request did, one after the other, to what is left of it.
fn by_request(view: &View<'_>, task: &Fact, mut left: Vec<&str>, found: &mut Found<'_>) {
    let mut undos = view.undos(task.id).to_vec();
    undos.sort_by_key(|undo| undo.created_at);
    for (number, undo) in undos.iter().enumerate() {
        if let Some(event) =
            task.events.iter().find(|event| is_resumed(event) && event.time.as_microsecond() > undo.created_at)
        {
            found.of(
                task.id,
                format!("event {}: it was resumed after {} had begun to undo it", event.seq, undo.id),
            );
        }
        if number + 1 < undos.len() && undo.state != State::Failed {
            found.of(undo.id, format!("it is {}, and another undo of {} was begun", undo.state, task.id));
        }
        if !undo.state.is_final() {
            return;
        }
        judge(undo, &undo.events, &mut left, false, code(undo), found);
        if undo.state == State::Completed && !left.is_empty() {
            found.of(undo.id, format!("it says that it undid {}, and {left:?} is left", task.id));
        }
    }
}

fn code(task: &Fact) -> &str {
    task.error.as_ref().map_or("", |error| error.code.as_str())
}

/// The code with which a life ended that was followed by another.
fn code_of(life: &[Event]) -> &str {
    let end = life.iter().rfind(|event| event.is_final());
    end.and_then(|end| end.data["error"]["code"].as_str()).unwrap_or_default()
}

/// Whether what was undone in these events is what was done, and takes it away.
fn judge(task: &Fact, events: &[Event], done: &mut Vec<&str>, well: bool, code: &str, found: &mut Found<'_>) {
    let undone = undone(events);
    if well {
        if !undone.is_empty() {
            found.of(task.id, "it ended well, and something was undone");
        }
        return;
    }
    let expected: Vec<&str> = done.iter().rev().copied().collect();
    let given_up = code == "compensation_failed";
    let names: Vec<&str> = undone.iter().map(|(step, _)| *step).collect();
    // A task whose workers die while it undoes is given up in the end, and says so.
    let short = given_up && expected.starts_with(&names);
    if names != expected && !short {
        found.of(task.id, format!("undone were {names:?}, and completed in reverse were {expected:?}"));
    }
    let all = names == expected && undone.iter().all(|(_, well)| *well);
    let said = events.iter().any(|event| event.kind == "saga.compensated");
    if said && !all {
        found.of(task.id, "it says that everything was undone");
    }
    if !all && !given_up {
        found.of(task.id, format!("not everything was undone, and its error is '{code}'"));
    }
    for (step, _) in undone.iter().filter(|(_, well)| *well) {
        done.retain(|other| other != step);
    }
}

/// Adds what has to be undone: the completed steps that can be, in order.
fn completed<'a>(task: &'a Fact, events: &'a [Event], done: &mut Vec<&'a str>) {
    let ended = events.iter().filter(|event| {
        let completed = event.kind == "step.completed" && !of_undo(event);
        completed || (event.kind == "step.decided" && event.data["decision"] == "done")
    });
    let names = ended.filter_map(|event| event.step.as_deref());
    done.extend(names.filter(|step| task.program.step(step).is_some_and(|step| step.undo.is_some())));
}

/// What was undone, or given up, in order; and whether well.
fn undone(events: &[Event]) -> Vec<(&str, bool)> {
    let ends = events.iter().filter(|event| of_undo(event));
    ends.filter_map(|event| {
        let step = event.step.as_deref()?.strip_prefix("undo ")?;
        match event.kind.as_str() {
            "step.completed" => Some((step, true)),
            "step.failed" if event.data["last"] == true => Some((step, false)),
            _ => None,
        }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use longhaul::TaskError;
    use serde_json::json;

    const NONE: [u8; 0] = [];

    fn begun() -> Fact {
        let steps = vec![undoable("a"), undoable("b"), step("c", longhaul::Effect::Read)];
        fact(steps, State::Failed).submitted().started(1).done(1, "a").done(1, "b").done(1, "c")
    }

    #[test]
    fn another_order_something_left_out_and_something_undone_for_nothing_break_i5() {
        let good = begun().undone(1, "b").undone(1, "a").told(1, "saga.compensated", None, json!({})).ended(1);
        assert_eq!(broken(&history([good], vec![])), NONE);
        let forward = begun().undone(1, "a").undone(1, "b").ended(1);
        assert!(broken(&history([forward], vec![])).contains(&5));
        let left = begun().undone(1, "b").ended(1);
        assert!(broken(&history([left], vec![])).contains(&5));
        let mut well = begun().undone(1, "b");
        well.state = State::Completed;
        assert_eq!(broken(&history([well.ended(1)], vec![])), [5]);
    }

    #[test]
    fn a_failed_undo_that_is_called_compensated_breaks_i5() {
        let failed = || {
            let given_up = json!({"kind": "undo", "last": true});
            let mut task = begun().told(1, "step.failed", Some("undo b"), given_up).undone(1, "a");
            task.error = Some(TaskError::fatal("compensation_failed", "b could not be undone"));
            task
        };
        assert_eq!(broken(&history([failed().ended(1)], vec![])), NONE);
        let said = failed().told(1, "saga.compensated", None, json!({})).ended(1);
        assert_eq!(broken(&history([said], vec![])), [5]);
        let mut silent = failed().ended(1);
        silent.error = None;
        assert_eq!(broken(&history([silent], vec![])), [5]);
    }

    #[test]
    fn a_resumed_task_that_does_not_undo_its_second_life_or_undoes_its_first_again_breaks_i5() {
        let first = begun().undone(1, "b").undone(1, "a").told(1, "task.failed", None, json!({}));
        let again = |task: Fact| task.told(0, "task.resumed", None, json!({"by": "ann"})).started(3).done(3, "a");
        assert_eq!(broken(&history([again(first.clone()).undone(3, "a").ended(3)], vec![])), NONE);
        assert!(!found(5, &history([again(first.clone()).ended(3)], vec![])).is_empty(), "a is left");
        let more = again(first).undone(3, "a").undone(3, "b").ended(3);
        assert!(!found(5, &history([more], vec![])).is_empty(), "b was undone before");
        let left = begun().undone(1, "b").told(1, "task.failed", None, json!({"error": {"code": "no"}}));
        let left = left.told(0, "task.resumed", None, json!({"by": "ann"})).started(3).undone(3, "a").ended(3);
        assert!(!found(5, &history([left], vec![])).is_empty(), "the first life left something");
    }

    #[test]
    fn an_undo_by_request_that_leaves_something_or_comes_twice_breaks_i5() {
        let mut done = begun();
        done.state = State::Completed;
        let done = done.ended(1);
        let undo = |steps: &[&str], state| {
            let mut undo = fact(vec![], state).submitted().started(1);
            undo.program = done.program.clone();
            (undo.undo_of, undo.created_at) = (Some(done.id), 20_000_000);
            steps.iter().fold(undo, |undo, step| undo.undone(1, step)).ended(1)
        };
        let run = |undos: Vec<Fact>| broken(&history(std::iter::once(done.clone()).chain(undos), vec![]));
        assert_eq!(run(vec![undo(&["b", "a"], State::Completed)]), NONE);
        assert_eq!(run(vec![undo(&["a", "b"], State::Completed)]), [5], "the first completed first");
        assert_eq!(run(vec![undo(&["b"], State::Completed)]), [5], "a is left");
        assert_eq!(run(vec![undo(&["b", "a"], State::Completed), undo(&[], State::Completed)]), [5], "two");
        let mut failed = undo(&["b"], State::Failed);
        failed.error = Some(TaskError::fatal("compensation_failed", "a could not be undone"));
        let mut rest = undo(&["a"], State::Completed);
        rest.created_at += 1;
        assert_eq!(run(vec![failed, rest]), NONE, "the second undoes what the first left");
    }
}
