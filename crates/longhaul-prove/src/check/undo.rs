//! I5: undo.

use longhaul::State;

use super::runs::of_undo;
use super::{Found, View};
use crate::history::Fact;

/// I5: undo is exactly the completed undoable steps, the last completed first; "compensated" is said only when all
/// succeeded, and a task that ended well undid nothing.
pub(super) fn reverse(view: &View<'_>, found: &mut Found<'_>) {
    for task in view.tasks().filter(|task| task.state.is_final()) {
        let undone = undone(task);
        if task.state == State::Completed {
            if !undone.is_empty() {
                found.of(task.id, "it ended well, and something was undone");
            }
            continue;
        }
        let expected = completed(task);
        let code = task.error.as_ref().map_or("", |error| error.code.as_str());
        let given_up = code == "compensation_failed";
        let names: Vec<&str> = undone.iter().map(|(step, _)| *step).collect();
        // A task whose workers die while it undoes is given up in the end, and says so.
        let short = given_up && expected.starts_with(&names);
        if names != expected && !short {
            found.of(task.id, format!("undone were {names:?}, and completed in reverse were {expected:?}"));
        }
        let all = names == expected && undone.iter().all(|(_, well)| *well);
        let said = task.events.iter().any(|event| event.kind == "saga.compensated");
        if said && !all {
            found.of(task.id, "it says that everything was undone");
        }
        if !all && !given_up {
            found.of(task.id, format!("not everything was undone, and its error is '{code}'"));
        }
    }
}

/// What has to be undone: the completed steps that can be, the last one first.
fn completed(task: &Fact) -> Vec<&str> {
    let done = task.events.iter().filter(|event| {
        let completed = event.kind == "step.completed" && !of_undo(event);
        completed || (event.kind == "step.decided" && event.data["decision"] == "done")
    });
    let mut names: Vec<&str> = done
        .filter_map(|event| event.step.as_deref())
        .filter(|step| task.program.step(step).is_some_and(|step| step.undo.is_some()))
        .collect();
    names.reverse();
    names
}

/// What was undone, or given up, in order; and whether well.
fn undone(task: &Fact) -> Vec<(&str, bool)> {
    let ends = task.events.iter().filter(|event| of_undo(event));
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
}
