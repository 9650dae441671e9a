//! What one process tells others at once: hints, gathered. However much there is to tell, it stays small: what
//! does not fit is "many", and who hears that looks for itself.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Hints;
use crate::task::TaskId;

/// How many ids of each kind are named; a notification of PostgreSQL has at most 8,000 bytes.
const MAX_IDS: usize = 60;

/// See the module.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct News {
    /// The process that says it.
    pub(crate) from: Uuid,
    /// A task may be ready.
    pub(crate) ready: bool,
    /// More tasks have changed than can be named.
    pub(crate) many: bool,
    /// These have new events.
    pub(crate) tasks: Vec<TaskId>,
    /// These have ended.
    pub(crate) ended: Vec<TaskId>,
    /// Someone asked something of these.
    pub(crate) controlled: Vec<TaskId>,
}

impl News {
    pub(crate) fn is_empty(&self) -> bool {
        !self.ready && !self.many && self.tasks.is_empty() && self.ended.is_empty() && self.controlled.is_empty()
    }

    pub(crate) fn add(&mut self, ready: bool, changed: &[TaskId], ended: &[TaskId], controlled: &[TaskId]) {
        self.ready |= ready;
        for (known, new) in
            [(&mut self.tasks, changed), (&mut self.ended, ended), (&mut self.controlled, controlled)]
        {
            if known.len() + new.len() <= MAX_IDS {
                known.extend_from_slice(new);
            } else {
                self.many = true;
            }
        }
    }

    pub(crate) fn pass_on(self, hints: &Hints) {
        if self.many {
            hints.tell_anything();
        } else if self.ready {
            hints.tell_ready();
        }
        hints.tell_changed(self.tasks);
        hints.tell_finished(self.ended);
        for task in self.controlled {
            hints.tell_controlled(task);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_fit_into_a_notification_however_much_is_told() {
        let mut news = News::default();
        for _ in 0..30 {
            let ids = |count| (0..count).map(|_| TaskId::new()).collect::<Vec<_>>();
            news.add(true, &ids(7), &ids(11), &ids(13));
        }
        assert!(news.many && news.ready);
        assert!(serde_json::to_string(&news).expect("news serialise").len() < 8_000);
    }
}
