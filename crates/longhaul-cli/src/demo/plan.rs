//! What is submitted, and how long things take.

use std::time::Duration;

use serde_json::{Value, json};

use super::judge::Kind;
use super::model::REPAIR;
use super::world::BROKEN;

/// How many deployments arrive on this Friday evening.
pub(super) const DEPLOYS: usize = 200;
/// Those that fail at their last step.
const BROKEN_ONES: [usize; 5] = [17, 58, 96, 131, 174];
/// Every so many deployments an agent is asked something.
const AGENT_EVERY: usize = 18;
/// Every so many deployments a user is impatient and sends the same again.
pub(super) const AGAIN_EVERY: usize = 10;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) workers: usize,
    pub(super) slots: usize,
    /// How long a task stays with a worker that gives no sign of life. Short, so that nobody has to wait.
    pub(super) lease: &'static str,
    /// How long each step takes.
    pub(super) work_ms: u64,
    /// Between two words of the model.
    pub(super) word: Duration,
    /// What has begun when the hotfix comes, when a worker is killed, and when another one is stopped.
    pub(super) hotfix_after: usize,
    pub(super) kill_after: usize,
    pub(super) pause_after: usize,
    /// How long an approval waits for somebody when nobody is there.
    pub(super) approve_after: Duration,
}

impl Plan {
    pub(super) fn new(fast: bool) -> Self {
        let plan = Self {
            workers: 5,
            slots: 4,
            lease: "5s",
            work_ms: 1_000,
            word: Duration::from_millis(60),
            hotfix_after: 40,
            kill_after: 60,
            pause_after: 100,
            approve_after: Duration::from_secs(8),
        };
        match fast {
            true => Self {
                work_ms: 250,
                word: Duration::from_millis(40),
                approve_after: Duration::from_secs(1),
                ..plan
            },
            false => plan,
        }
    }

    /// Everything that is submitted before the hotfix, in order.
    pub(super) fn line(&self) -> Vec<Submit> {
        let mut line = vec![self.repair()];
        for number in 1..=DEPLOYS {
            line.push(self.deploy(number));
            if number % AGENT_EVERY == 0 {
                line.push(self.question(number));
            }
        }
        line
    }

    fn deploy(&self, number: usize) -> Submit {
        let broken = BROKEN_ONES.contains(&number);
        self.deployment(format!("app-{number:03}"), if broken { BROKEN } else { "v2" }, Kind::Deploy { broken }, 5)
    }

    /// What must not wait.
    pub(super) fn hotfix(&self) -> Submit {
        self.deployment("app-hotfix".to_owned(), "v2.1", Kind::Hotfix, 9)
    }

    fn deployment(&self, app: String, version: &str, kind: Kind, priority: u8) -> Submit {
        let input = json!({"app": app, "version": version, "work_ms": self.work_ms});
        let body = json!({"handler": "deploy", "input": input, "priority": priority, "tags": {"app": app}});
        Submit { key: format!("deploy-{app}"), app, kind, body }
    }

    fn question(&self, number: usize) -> Submit {
        self.agent_run(
            format!("app-{number:03}"),
            format!("Say how far the deployment of app-{number:03} is."),
            false,
        )
    }

    fn repair(&self) -> Submit {
        self.agent_run("app-007".to_owned(), format!("{REPAIR} app-007: it answers slowly."), true)
    }

    fn agent_run(&self, app: String, goal: String, asks: bool) -> Submit {
        let body = json!({"handler": "oncall", "input": goal, "tags": {"app": app}});
        Submit { key: format!("ask-{app}"), app, kind: Kind::Agent { goal, asks }, body }
    }
}

/// A task to be submitted.
#[derive(Clone, Debug)]
pub(super) struct Submit {
    pub(super) app: String,
    pub(super) kind: Kind,
    /// The idempotency key.
    pub(super) key: String,
    pub(super) body: Value,
}
