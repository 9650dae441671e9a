//! I7: webhooks.

use std::collections::BTreeMap;

use longhaul::Event;

use super::{Found, View};
use crate::history::Fact;
use crate::ledger::What;
use crate::program::Hook;

/// The events that a task's webhook is to be told of, in their order.
fn wanted(task: &Fact) -> Vec<&Event> {
    let all = match task.tags.get(Hook::TAG).map(String::as_str) {
        Some("all") => true,
        Some("final") => false,
        _ => return Vec::new(),
    };
    // A fork and an undo have the labels of their original, and no webhook.
    if task.fork_of.or(task.undo_of).is_some() {
        return Vec::new();
    }
    task.events.iter().filter(|event| all || event.is_final()).collect()
}

/// I7: every event that a webhook is to be told of arrives, those of a task in their order, each signed and under an id of its own.
pub(super) fn webhooks(view: &View<'_>, found: &mut Found<'_>) {
    for task in view.tasks() {
        let wanted = wanted(task);
        let mut messages: BTreeMap<&str, usize> = BTreeMap::new();
        let mut next = 0;
        for line in view.lines(task.id) {
            let What::Hooked { message, kind, time, signed, taken, .. } = &line.what else { continue };
            if !signed {
                found.of(task.id, format!("message {message} came with a wrong signature"));
            }
            let is_it = |event: &&Event| event.kind == *kind && event.time.as_microsecond() == *time;
            // Two events of one transaction can look the same; the next one is meant then.
            let place = match wanted.get(next).filter(|event| is_it(event)) {
                Some(_) if messages.get(message.as_str()).is_none_or(|place| *place == next) => Some(next),
                _ => messages.get(message.as_str()).copied().or_else(|| wanted.iter().position(is_it)),
            };
            let Some(place) = place else {
                found.of(task.id, format!("its webhook was told of {kind} at {time}, which it has not"));
                continue;
            };
            if *messages.entry(message).or_insert(place) != place {
                found.of(task.id, format!("message {message} stands for two events"));
            }
            if place > next {
                found.of(task.id, format!("its webhook was told of {kind} before {}", wanted[next].kind));
            }
            if *taken && place >= next {
                next = place + 1;
            }
        }
        if view.history.setup.hooked && next < wanted.len() {
            found.of(
                task.id,
                format!("its webhook was never told of {}, event {}", wanted[next].kind, wanted[next].seq),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use crate::ledger::Line;
    use longhaul::State;

    const NONE: [u8; 0] = [];

    fn told(task: &Fact, seq: usize, taken: bool) -> Line {
        let event = &task.events[seq - 1];
        let (message, kind, time) = (format!("m{seq}"), event.kind.clone(), event.time.as_microsecond());
        line(0, What::Hooked { task: task.id, message, kind, time, signed: true, taken })
    }

    #[test]
    fn a_webhook_that_is_not_told_not_in_order_or_not_signed_breaks_i7() {
        let task = |which: &str| {
            let mut task = fact(vec![], State::Completed).submitted().started(1).ended(1);
            task.tags.insert(Hook::TAG.into(), which.into());
            task
        };
        let all = task("all");
        let run = |task: &Fact, lines: Vec<Line>| {
            let mut history = history([task.clone()], lines);
            history.setup.hooked = true;
            broken(&history)
        };
        let seqs = |seqs: &[usize]| seqs.iter().map(|seq| told(&all, *seq, true)).collect::<Vec<_>>();
        assert_eq!(run(&all, seqs(&[1, 2, 3])), NONE);
        assert_eq!(run(&all, seqs(&[1, 2, 2, 3])), NONE, "again is allowed");
        assert_eq!(run(&all, seqs(&[1, 2])), [7], "the last is missing");
        assert_eq!(run(&all, seqs(&[1, 3, 2])), [7], "out of order");
        let refused = vec![told(&all, 1, true), told(&all, 2, false), told(&all, 3, true)];
        assert_eq!(run(&all, refused), [7], "it goes on although one was not taken");
        let mut forged = seqs(&[1, 2, 3]);
        if let What::Hooked { signed, .. } = &mut forged[1].what {
            *signed = false;
        }
        assert_eq!(run(&all, forged), [7]);
        let last = task("final");
        assert_eq!(run(&last, vec![told(&last, 3, true)]), NONE);
        assert_eq!(run(&last, vec![told(&last, 2, true), told(&last, 3, true)]), [7], "not what it asked for");
        assert_eq!(run(&last, vec![]), [7]);
    }
}
