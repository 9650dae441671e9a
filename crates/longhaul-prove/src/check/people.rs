//! I9 and I13: what people asked for, and what a deadline says.

use std::collections::{BTreeMap, BTreeSet};

use longhaul::{AskStatus, State, TaskId};

use super::lives::{generation_in, is_resumed, lives};
use super::runs::of_undo;
use super::{Found, View};
use crate::history::Fact;
use crate::records::{Answer, Ask};

/// I9: after a deadline or an acknowledged cancel no step is begun that must be on record first, and nothing is completed. A
/// cancel that was acknowledged is what became of the task.
pub(super) fn nothing_after_the_end(view: &View<'_>, found: &mut Found<'_>) {
    for task in view.tasks() {
        after_cancel(task, found);
        if let Some(deadline) = task.deadline {
            after_deadline(task, deadline, found);
        }
    }
    for asked in &view.history.asked {
        let (Ask::Cancel { task }, Answer::Done { state, .. }) = (&asked.ask, &asked.answer) else { continue };
        let Some(fact) = view.history.tasks.get(task) else { continue };
        if fact.events.iter().any(is_resumed) {
            continue;
        }
        if fact.state == State::Completed {
            found.of(*task, format!("a cancel was acknowledged (the task was {state:?} then), and it completed"));
        }
        if *state == Some(State::Cancelled) && fact.state != State::Cancelled {
            found.of(*task, format!("it was cancelled, and is {}", fact.state));
        }
    }
}

fn begins_carefully(task: &Fact, event: &longhaul::Event) -> bool {
    let step = event.step.as_deref().and_then(|step| task.program.step(step));
    event.kind == "step.started" && !of_undo(event) && step.is_some_and(|step| step.effect.needs_intent())
}

fn after_cancel(task: &Fact, found: &mut Found<'_>) {
    lives(task).for_each(|life| after_cancel_in(task, life, found));
}

fn after_cancel_in(task: &Fact, life: &[longhaul::Event], found: &mut Found<'_>) {
    let Some(cancel) = life.iter().find(|event| event.kind == "task.cancel_requested") else { return };
    for event in life.iter().filter(|event| event.seq > cancel.seq) {
        if event.kind == "task.completed" || begins_carefully(task, event) {
            let (kind, seq) = (&event.kind, event.seq);
            found.of(
                task.id,
                format!("event {seq} ({kind} {:?}) after the cancel, event {}", event.step, cancel.seq),
            );
        }
    }
}

fn after_deadline(task: &Fact, deadline: i64, found: &mut Found<'_>) {
    for event in task.events.iter().filter(|event| event.time.as_microsecond() > deadline) {
        if event.kind == "task.completed" || begins_carefully(task, event) {
            let late = event.time.as_microsecond() - deadline;
            found.of(task.id, format!("event {} ({}) {late} µs after the deadline", event.seq, event.kind));
        }
    }
}

/// I13: every dangerous call was made with an approval for its arguments, given before and used for it alone; an
/// approval of what was not seen is refused.
pub(super) fn approvals(view: &View<'_>, found: &mut Found<'_>) {
    // When each approval may first have been given: by one who saw what it was for, and was not refused.
    let mut given: BTreeMap<(TaskId, &str), i64> = BTreeMap::new();
    for asked in &view.history.asked {
        let Ask::Approve { task, approval, right } = &asked.ask else { continue };
        match (&asked.answer, right) {
            (Answer::Refused { .. }, _) => {}
            (Answer::Done { .. }, false) => {
                found.of(*task, format!("approval {approval} was taken from someone who saw something else"));
            }
            (_, true) => {
                let first = given.entry((*task, approval)).or_insert(asked.began);
                *first = asked.began.min(*first);
            }
            (_, false) => {}
        }
    }
    for task in view.tasks() {
        let mut used: BTreeMap<&str, BTreeSet<(&str, usize)>> = BTreeMap::new();
        for (step, calls) in view.begun(task.id) {
            let Some(amount) = task.program.dangerous(step) else { continue };
            for (call, at) in calls {
                let Some(approval) = call.approval.as_deref() else {
                    found.of(task.id, format!("step {step} was called without an approval"));
                    continue;
                };
                let generation = generation_in(task, step, call.fence);
                used.entry(approval).or_default().insert((step, generation));
                if given.get(&(task.id, approval)).is_none_or(|given| *given > at) {
                    found.of(task.id, format!("step {step} was called before anyone gave approval {approval}"));
                }
                let ask = task.asks.iter().find(|ask| ask.id == approval);
                let matches = ask.is_some_and(|ask| ask.subject["arguments"]["amount"] == amount);
                if !matches {
                    found.of(task.id, format!("approval {approval} of step {step} is for something else"));
                }
                if ask.is_some_and(|ask| ask.status != AskStatus::Used) {
                    found.of(task.id, format!("step {step} was called with an approval that was not used up"));
                }
            }
        }
        for (approval, steps) in used.iter().filter(|(_, steps)| steps.len() > 1) {
            found.of(task.id, format!("approval {approval} was used for {steps:?}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use crate::history::History;
    use crate::ledger::What;
    use crate::program::Op;
    use crate::records::Asked;
    use longhaul::{AskKind, Effect};
    use serde_json::json;

    const NONE: [u8; 0] = [];

    fn asked(ask: Ask, answer: Answer) -> Asked {
        Asked { ask, answer, began: 5, ended: Some(6) }
    }

    #[test]
    fn what_goes_on_after_a_cancel_or_a_deadline_breaks_i9() {
        let steps = || vec![step("a", Effect::Irreversible), step("b", Effect::Irreversible)];
        let cancelled = |state| {
            let begun = fact(steps(), state).submitted().started(1);
            let begun = begun.told(1, "step.started", Some("a"), json!({"attempt": 1}));
            let begun = begun.told(0, "task.cancel_requested", None, json!({}));
            begun.told(1, "step.completed", Some("a"), json!({"attempt": 1}))
        };
        let good = cancelled(State::Cancelled).ended(1);
        assert_eq!(broken(&history([good.clone()], vec![])), NONE, "what was under way may be recorded");
        assert_eq!(broken(&history([cancelled(State::Completed).ended(1)], vec![])), [9]);
        let more = cancelled(State::Cancelled).done(1, "b").ended(1);
        assert_eq!(broken(&history([more], vec![])), [9]);

        let mut late = fact(steps(), State::Completed).submitted().started(1).ended(1);
        late.deadline = Some(2_500_000);
        assert_eq!(broken(&history([late], vec![])), [9]);

        let won = |fact: &Fact, state| {
            let answer = Answer::Done { task: fact.id, state: Some(state) };
            let asked = vec![asked(Ask::Cancel { task: fact.id }, answer)];
            History { asked, ..history([fact.clone()], vec![]) }
        };
        assert_eq!(broken(&won(&good, State::Running)), NONE);
        let completed = fact(vec![], State::Completed).submitted().started(1).ended(1);
        assert_eq!(broken(&won(&completed, State::Running)), [9]);
        let again = |task: Fact| task.told(0, "task.resumed", None, json!({"by": "ann"})).started(3).done(3, "b");
        let mut resumed = again(good.clone());
        resumed.state = State::Completed;
        let resumed = resumed.ended(3);
        assert_eq!(broken(&won(&resumed, State::Running)), NONE, "it was opened again");
    }

    fn dangerous() -> Fact {
        let mut task = fact(vec![], State::Completed).submitted().started(1).done(1, "pay").ended(1);
        task.program.ops = vec![Op::Dangerous { step: step("pay", Effect::Irreversible), amount: 10 }];
        task.asks = vec![longhaul::Ask {
            id: "x".into(),
            task_id: task.id,
            kind: AskKind::Approval,
            status: AskStatus::Used,
            step: "approve pay".into(),
            text: String::new(),
            subject: json!({"arguments": {"amount": 10}}),
            digest: String::new(),
            requested_at: 0,
            expires_at: None,
            decided_by: None,
            decided_at: None,
            reason: None,
        }];
        task
    }

    fn with_approval(task: &Fact, right: bool, approval: Option<&str>, at: i64) -> History {
        let mut call = task.call("pay", 1, 1);
        call.approval = approval.map(str::to_owned);
        let ask = Ask::Approve { task: task.id, approval: "x".into(), right };
        let asked = vec![asked(ask, Answer::Done { task: task.id, state: None })];
        History { asked, ..history([task.clone()], vec![line(at, What::Begin(call))]) }
    }

    #[test]
    fn a_dangerous_call_without_a_matching_earlier_approval_breaks_i13() {
        let task = dangerous();
        assert_eq!(broken(&with_approval(&task, true, Some("x"), 9)), NONE);
        assert_eq!(broken(&with_approval(&task, true, None, 9)), [13]);
        assert_eq!(broken(&with_approval(&task, true, Some("x"), 4)), [13], "before it was given");
        assert_eq!(
            broken(&with_approval(&task, false, Some("x"), 9)),
            [13],
            "given by one who saw something else"
        );
        let mut other = dangerous();
        other.asks[0].subject = json!({"arguments": {"amount": 11}});
        assert_eq!(broken(&with_approval(&other, true, Some("x"), 9)), [13]);
        let mut open = dangerous();
        open.asks[0].status = AskStatus::Approved;
        assert_eq!(broken(&with_approval(&open, true, Some("x"), 9)), [13]);
    }
}
