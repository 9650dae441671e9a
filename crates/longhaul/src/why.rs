//! Why a task stands where it stands: one sentence, and what would change that. A pure decision over
//! gathered facts.

use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};

use crate::steps::{StepInfo, StepState};
use crate::store::overview::{AHEAD, Facts};
use crate::store::rules::SUSPECT_CRASHES;
use crate::store::{Ask, WorkerInfo};
use crate::task::{Phase, State, Task, TaskId, Waiting, timestamp};

/// Why a task stands where it stands.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Why {
    /// For people: what it waits for, and what would change that.
    pub sentence: String,
    /// For programs: `no_worker`, `queue_paused`, `behind`, `retry_at`, `not_before`, `limit`, `suspect`,
    /// `running`, `lease_expiring`, `compensating`, `approval`, `question`, `signal`, `timer`, `child`,
    /// `lock`, `in_doubt`, `completed`, `failed` or `cancelled`.
    pub code: &'static str,
    /// More for programs.
    pub details: Value,
    /// When that changes by itself, if it does.
    pub until: Option<Timestamp>,
}

/// What a decision is made from.
pub(crate) struct Gathered {
    pub(crate) task: Task,
    pub(crate) facts: Facts,
    pub(crate) workers: Vec<WorkerInfo>,
    /// What is asked of people for it.
    pub(crate) asks: Vec<Ask>,
    /// The child it waits for.
    pub(crate) child: Option<Task>,
    /// Its newest steps.
    pub(crate) steps: Vec<StepInfo>,
    /// The task that undoes what it took over as a fork.
    pub(crate) taken_back: Option<TaskId>,
}

fn why(code: &'static str, sentence: impl Into<String>) -> Why {
    Why { sentence: sentence.into(), code, details: json!({}), until: None }
}

impl Why {
    fn details(mut self, details: Value) -> Self {
        self.details = details;
        self
    }

    fn until(mut self, micros: Option<i64>) -> Self {
        self.until = micros.map(timestamp);
        self
    }
}

/// Decides.
pub(crate) fn explain(gathered: &Gathered) -> Why {
    let task = &gathered.task;
    match task.state {
        State::Pending => pending(gathered),
        State::Running => running(gathered),
        State::Waiting => match &task.waiting_for {
            Some(waiting) => waits(gathered, waiting),
            None => why("signal", "The task is suspended; it goes on when something arrives for it."),
        },
        State::Completed => match task.undone_by {
            Some(undo) => why("completed", format!("The task has completed, and task {undo} undoes what it did."))
                .details(json!({"undone_by": undo})),
            None => why("completed", "The task has completed; its result is kept until retention removes it."),
        },
        State::Failed => ended(gathered, "failed", "failed"),
        State::Cancelled => ended(gathered, "cancelled", "was cancelled"),
    }
}

fn ended(gathered: &Gathered, code: &'static str, what: &str) -> Why {
    let task = &gathered.task;
    let message = task.error.as_ref().map_or(String::new(), |error| format!(": {}", error.message));
    let late = task.deadline.is_some_and(|deadline| deadline.as_microsecond() <= gathered.facts.now);
    let then = match (task.undone_by, task.undo_of) {
        (Some(undo), _) => format!("Task {undo} undoes what it did, so no resume opens it again; submit it anew."),
        (None, None) if let Some(undo) = gathered.taken_back => {
            format!("Task {undo} undoes what it took over as a fork, so no resume opens it again; submit it anew.")
        }
        (None, Some(other)) => format!("Ask again to undo task {other}: what was undone stays so."),
        _ if late => {
            "Its deadline has passed, so no resume opens it again; submit it anew, with more time.".to_owned()
        }
        _ => "A resume opens it again, and keeps what was recorded and not undone.".to_owned(),
    };
    let not_undone = task.error.as_ref().is_some_and(|error| error.code == "compensation_failed");
    let again = match (task.undone_by, task.undo_of) {
        (None, None) if not_undone => "An undo by request tries again what could not be undone. ",
        _ => "",
    };
    why(code, format!("The task {what}{message}. {again}{then}"))
        .details(json!({"error": task.error, "undone_by": task.undone_by}))
}

fn pending(gathered: &Gathered) -> Why {
    let Gathered { task, facts, workers, .. } = gathered;
    let queue = &task.queue;
    if let Some(at) = facts.run_at {
        let time = timestamp(at);
        return match &task.error {
            Some(error) if task.attempts > 0 => why(
                "retry_at",
                format!("Attempt {} failed ({}); it is tried again at {time}.", task.attempts, error.message),
            )
            .details(json!({"attempts": task.attempts, "error": error})),
            _ => why("not_before", format!("It was asked not to start before {time}.")),
        }
        .until(Some(at));
    }
    if let Some((since, by)) = &facts.paused {
        let since = timestamp(*since);
        return why(
            "queue_paused",
            format!("Queue '{queue}' was paused by {by} at {since}; it starts when the queue is resumed."),
        )
        .details(json!({"queue": queue, "since": since, "by": by}));
    }
    if let Some(limit) = &facts.parked {
        return limited(facts, limit);
    }
    let serves = |worker: &&WorkerInfo| {
        !worker.is_silent(facts.now) && worker.handlers.contains(&task.handler) && worker.queues.contains(queue)
    };
    let serving: Vec<&WorkerInfo> = workers.iter().filter(serves).collect();
    if serving.is_empty() {
        return no_worker(gathered);
    }
    if task.crashes >= SUSPECT_CRASHES {
        return why(
            "suspect",
            format!(
                "{} workers in a row were lost while running it, so it starts only on a worker that runs nothing else.",
                task.crashes
            ),
        )
        .details(json!({"crashes": task.crashes}));
    }
    let (slots, busy): (u32, u32) =
        serving.iter().fold((0, 0), |(slots, busy), worker| (slots + worker.slots, busy + worker.running));
    let ahead = match facts.ahead {
        0 => "It is next in line".to_owned(),
        1 => "1 task comes first".to_owned(),
        AHEAD.. => format!("At least {AHEAD} tasks come first"),
        ahead => format!("{ahead} tasks come first"),
    };
    let serving = match serving.len() {
        1 => "1 worker".to_owned(),
        count => format!("{count} workers"),
    };
    why(
        "behind",
        format!(
            "{ahead} in queue '{queue}', served by {serving} with {busy} of {slots} slots in use; \
             more slots or a higher priority start it sooner."
        ),
    )
    .details(
        json!({"queue": queue, "ahead": facts.ahead, "slots": slots, "busy": busy, "priority": task.priority}),
    )
}

fn no_worker(gathered: &Gathered) -> Why {
    let Gathered { task, facts, workers, .. } = gathered;
    let (queue, handler) = (&task.queue, &task.handler);
    let alive = |worker: &&WorkerInfo| !worker.is_silent(facts.now);
    let having: Vec<&str> = workers
        .iter()
        .filter(alive)
        .filter(|worker| worker.handlers.contains(handler))
        .map(|worker| worker.name.as_str())
        .collect();
    let sentence = match having.first() {
        Some(name) => format!(
            "No worker that has handler '{handler}' serves queue '{queue}'; let {name} serve it too, or start another."
        ),
        None => format!("No worker with handler '{handler}' runs; start one that serves queue '{queue}'."),
    };
    why("no_worker", sentence).details(json!({"queue": queue, "handler": handler, "workers_with_handler": having}))
}

/// `limit` is its stored name: `queue/…`, `tenant/…` or `key/TENANT/KEY`.
fn limited(facts: &Facts, limit: &str) -> Why {
    let (kind, name) = limit.split_once('/').unwrap_or(("limit", limit));
    let name = if kind == "key" { name.split_once('/').map_or(name, |(_, key)| key) } else { name };
    let of = match kind {
        "queue" => format!("queue '{name}'"),
        "tenant" => format!("tenant '{name}'"),
        _ => format!("concurrency key '{name}'"),
    };
    let (max, running) = facts.limit.unwrap_or_default();
    let holders = facts.holders.iter().map(ToString::to_string).collect::<Vec<_>>();
    let held = if holders.is_empty() { String::new() } else { format!(" ({})", holders.join(", ")) };
    let sentence = format!(
        "The limit of {max} running tasks of {of} is reached: {running} run{held}; it starts when one of them ends or \
         the limit is raised."
    );
    why("limit", sentence)
        .details(json!({"kind": kind, "name": name, "max": max, "running": running, "held_by": facts.holders}))
}

fn running(gathered: &Gathered) -> Why {
    let Gathered { task, facts, workers, steps, .. } = gathered;
    let worker = facts.owner.and_then(|owner| workers.iter().find(|worker| worker.id == owner));
    let name =
        worker.map_or_else(|| "a worker that is gone".to_owned(), |worker| format!("worker {}", worker.name));
    let taken_back = facts.lease_left.map(|left| facts.now + left.max(0));
    let seen = worker.map(|worker| worker.seen_at);
    if seen.is_none_or(|seen| facts.now - seen > WorkerInfo::SILENT / 2)
        || facts.lease_left.is_some_and(|left| left <= 0)
    {
        let last = seen.map_or_else(String::new, |seen| format!(", last heard of at {}", timestamp(seen)));
        let when = taken_back.map_or_else(|| "soon".to_owned(), |at| format!("at {}", timestamp(at)));
        return why(
            "lease_expiring",
            format!("It is leased to {name}{last}; unless that comes back, the task is taken back {when} and goes on elsewhere."),
        )
        .details(json!({"worker": facts.owner, "name": worker.map(|worker| &worker.name), "seen_at": seen.map(timestamp)}))
        .until(taken_back);
    }
    let step = steps.iter().rev().find(|step| step.state == StepState::Running);
    let details = json!({
        "worker": facts.owner,
        "name": worker.map(|worker| &worker.name),
        "since": facts.started_at.map(timestamp),
        "step": step.map(|step| &step.name),
        "step_since": step.and_then(|step| step.started_at),
    });
    if task.phase == Phase::Compensating {
        let cause = task.error.as_ref().map_or(String::new(), |error| format!(" because of '{}'", error.message));
        return why("compensating", format!("{name} undoes what the task did{cause}; it ends when that is done."))
            .details(details);
    }
    let since = facts.started_at.map_or_else(String::new, |at| format!(" since {}", timestamp(at)));
    if let Some(cancel) = &facts.cancel {
        let reason = cancel.reason.as_ref().map_or_else(String::new, |reason| format!(" ('{reason}')"));
        let left =
            step.map_or_else(String::new, |step| format!("; step '{}' has a moment to be recorded", step.name));
        return why(
            "cancelling",
            format!("It was told to stop by {}{reason}, and {name} ends it{left}.", cancel.by),
        )
        .details(details);
    }
    let doing = match (step, &task.progress) {
        (Some(step), _) => format!(", in step '{}'", step.name),
        (None, Some(progress)) => format!(": {}", progress.message.trim_end_matches('.')),
        (None, None) => String::new(),
    };
    why("running", format!("It is run by {name}{since}{doing}; a cancel would stop it.")).details(details)
}

fn waits(gathered: &Gathered, waiting: &Waiting) -> Why {
    let Gathered { task, facts, asks, child, .. } = gathered;
    let id = &waiting.id;
    let since = waiting.since.map_or_else(String::new, |since| format!(" since {since}"));
    let until = waiting.until.map(|until| until.as_microsecond());
    let asked = asks.iter().find(|ask| ask.id == *id);
    let text = asked.map_or(id.as_str(), |ask| ask.text.as_str());
    let expires = until.map_or_else(String::new, |at| format!(" (it expires at {})", timestamp(at)));
    let basics = json!({"id": id, "since": waiting.since});
    match waiting.kind.as_str() {
        "approval" => why(
            "approval",
            format!("It waits{since} for someone to approve or deny '{text}'{expires}."),
        )
        .details(json!({"id": id, "since": waiting.since, "what": text, "subject": asked.map(|ask| &ask.subject)}))
        .until(until),
        "question" => why("question", format!("It waits{since} for an answer to '{text}'{expires}."))
            .details(json!({"id": id, "since": waiting.since, "question": text}))
            .until(until),
        "timer" => {
            let at = until.map_or_else(|| "its time has come".to_owned(), |at| timestamp(at).to_string());
            why("timer", format!("It sleeps until {at}.")).details(basics).until(until)
        }
        "child" => {
            let state = child.as_ref().map_or("gone", |child| child.state.name());
            why("child", format!("It waits{since} for its child {id}, which is {state}."))
                .details(json!({"child": id, "state": state, "since": waiting.since}))
                .until(until)
        }
        "lock" => {
            let (holder, held_until) = facts.lock.unwrap_or_default();
            let by = holder.map_or_else(|| "nobody by now".to_owned(), |holder| format!("task {holder}"));
            let at = held_until.map_or_else(String::new, |at| format!(" until {} at the latest", timestamp(at)));
            let line = match facts.lock_ahead {
                0 => "it is next in line".to_owned(),
                ahead => format!("{ahead} others come first"),
            };
            let service = match (&facts.lock_service, &facts.lock_trouble) {
                (Some(_), Some(trouble)) => format!(" ({trouble})"),
                (Some(service), None) if holder.is_none() => format!(" ({service} is asked for it)"),
                _ => String::new(),
            };
            why("lock", format!("It waits{since} for lock '{id}', held by {by}{at}{service}; {line}."))
                .details(json!({"lock": id, "held_by": holder, "held_until": held_until.map(timestamp),
                                "ahead": facts.lock_ahead, "since": waiting.since,
                                "service": facts.lock_service, "trouble": facts.lock_trouble}))
                .until(until.or(held_until))
        }
        "in_doubt" => {
            let then = match task.phase {
                Phase::Compensating => {
                    " The task goes no further: what it did is undone then, and a retry is not tried."
                }
                Phase::Forward => "",
            };
            let sentence = format!(
                "Nobody knows whether step '{id}' happened; someone must decide: retry (it did not), done or fail.{then}"
            );
            why("in_doubt", sentence).details(basics)
        }
        _ => why("signal", format!("It waits{since} for signal '{id}'; it goes on when that is sent."))
            .details(json!({"signal": id, "since": waiting.since}))
            .until(until),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;
    use uuid::Uuid;

    use super::*;
    use crate::error::TaskError;
    use crate::store::{AskKind, AskStatus};
    use crate::task::{Priority, TaskId};

    const NOW: i64 = 1_700_000_000_000_000;

    fn task(state: State) -> Task {
        let id = TaskId::new();
        Task {
            id,
            task_id: id,
            tenant: "default".into(),
            handler: "deploy".into(),
            queue: "ops".into(),
            state,
            phase: Phase::Forward,
            waiting_for: None,
            priority: Priority::default(),
            input: RawValue::NULL.to_owned(),
            user_input: None,
            result: None,
            error: None,
            attempts: 0,
            crashes: 0,
            progress: None,
            usage: None,
            tags: std::collections::BTreeMap::new(),
            parent_id: None,
            fork_of: None,
            undo_of: None,
            created_at: timestamp(NOW),
            updated_at: timestamp(NOW),
            finished_at: None,
            deadline: None,
            last_seq: 1,
            fence: 0,
            concurrency_key: None,
            max_attempts: 3,
            undone_by: None,
            reply: None,
        }
    }

    fn worker() -> WorkerInfo {
        WorkerInfo {
            id: Uuid::now_v7(),
            name: "host:1".into(),
            handlers: vec!["deploy".into()],
            queues: vec!["ops".into()],
            slots: 4,
            started_at: 0,
            seen_at: NOW - 1_000_000,
            running: 4,
        }
    }

    /// A ready task in line, with a worker that serves it.
    fn gathered(state: State) -> Gathered {
        Gathered {
            task: task(state),
            facts: Facts { now: NOW, ..Facts::default() },
            workers: vec![worker()],
            asks: Vec::new(),
            child: None,
            steps: Vec::new(),
            taken_back: None,
        }
    }

    fn pending_with(change: impl FnOnce(&mut Gathered)) -> Why {
        let mut gathered = gathered(State::Pending);
        change(&mut gathered);
        explain(&gathered)
    }

    fn waiting_for(kind: &str, id: &str, change: impl FnOnce(&mut Gathered)) -> Why {
        let mut gathered = gathered(State::Waiting);
        let waiting = Waiting { kind: kind.into(), id: id.into(), since: Some(timestamp(NOW)), until: None };
        gathered.task.waiting_for = Some(waiting);
        change(&mut gathered);
        explain(&gathered)
    }

    #[test]
    fn a_ready_task_is_behind_others() {
        let next = pending_with(|_| {});
        assert_eq!(next.code, "behind");
        assert!(
            next.sentence.starts_with("It is next in line in queue 'ops', served by 1 worker with 4 of 4"),
            "{next:?}"
        );
        let third = pending_with(|it| it.facts.ahead = 2);
        assert!(third.sentence.starts_with("2 tasks come first"), "{third:?}");
        assert!(
            pending_with(|it| it.facts.ahead = AHEAD).sentence.starts_with("At least"),
            "it is not counted further"
        );
    }

    #[test]
    fn without_a_worker_it_says_which_is_missing() {
        let none = pending_with(|it| it.workers.clear());
        assert_eq!((none.code, none.until), ("no_worker", None));
        assert!(none.sentence.contains("No worker with handler 'deploy' runs"), "{none:?}");
        let silent = pending_with(|it| it.workers[0].seen_at = NOW - WorkerInfo::SILENT);
        assert_eq!(silent.code, "no_worker");
        let elsewhere = pending_with(|it| it.workers[0].queues = vec!["other".into()]);
        assert!(elsewhere.sentence.contains("let host:1 serve it too"), "{elsewhere:?}");
        assert_eq!(pending_with(|it| it.workers[0].handlers = vec!["x".into()]).code, "no_worker");
    }

    #[test]
    fn a_time_before_a_pause_before_a_limit_before_a_worker() {
        let all = |it: &mut Gathered| {
            it.workers.clear();
            it.facts.run_at = Some(NOW + 5);
            it.facts.paused = Some((NOW, "ann".into()));
            it.facts.parked = Some("queue/ops".into());
        };
        let time = pending_with(all);
        assert_eq!((time.code, time.until), ("not_before", Some(timestamp(NOW + 5))));
        let retry = pending_with(|it| {
            all(it);
            it.task.attempts = 2;
            it.task.error = Some(TaskError::retryable("e", "no route"));
        });
        assert_eq!(retry.code, "retry_at");
        assert!(retry.sentence.contains("Attempt 2 failed (no route)"), "{retry:?}");
        let paused = pending_with(|it| {
            all(it);
            it.facts.run_at = None;
        });
        assert_eq!(paused.code, "queue_paused");
        assert!(paused.sentence.contains("paused by ann"), "{paused:?}");
        let limited = pending_with(|it| {
            all(it);
            (it.facts.run_at, it.facts.paused) = (None, None);
        });
        assert_eq!(limited.code, "limit");
    }

    #[test]
    fn a_limit_names_what_it_is_of_and_who_holds_it() {
        let holder = TaskId::new();
        let of = |name: &str| {
            pending_with(|it| {
                it.facts.parked = Some(name.into());
                it.facts.limit = Some((1, 1));
                it.facts.holders = vec![holder];
            })
        };
        for (stored, kind, name) in
            [("queue/ops", "queue", "ops"), ("tenant/acme", "tenant", "acme"), ("key/acme/db/1", "key", "db/1")]
        {
            let why = of(stored);
            assert_eq!((why.details["kind"].as_str(), why.details["name"].as_str()), (Some(kind), Some(name)));
            assert!(why.sentence.contains(&holder.to_string()) && why.sentence.contains("limit of 1"), "{why:?}");
        }
    }

    #[test]
    fn a_suspect_waits_for_a_worker_of_its_own() {
        assert_eq!(pending_with(|it| it.task.crashes = SUSPECT_CRASHES).code, "suspect");
        assert_eq!(pending_with(|it| it.task.crashes = SUSPECT_CRASHES - 1).code, "behind");
    }

    fn running_with(change: impl FnOnce(&mut Gathered)) -> Why {
        let mut gathered = gathered(State::Running);
        gathered.facts.owner = Some(gathered.workers[0].id);
        gathered.facts.lease_left = Some(10_000_000);
        gathered.facts.started_at = Some(NOW - 7_000_000);
        change(&mut gathered);
        explain(&gathered)
    }

    #[test]
    fn a_running_task_names_its_worker_and_step() {
        let why = running_with(|_| {});
        assert_eq!(why.code, "running");
        assert!(why.sentence.contains("worker host:1 since"), "{why:?}");
        let undoing = running_with(|it| {
            it.task.phase = Phase::Compensating;
            it.task.error = Some(TaskError::fatal("e", "disk full"));
        });
        assert_eq!(undoing.code, "compensating");
        assert!(undoing.sentence.contains("disk full"), "{undoing:?}");
    }

    #[test]
    fn what_could_not_be_undone_can_be_undone_by_request() {
        let failed_with = |code: &'static str, change: fn(&mut Gathered)| {
            let mut gathered = gathered(State::Failed);
            gathered.task.error = Some(TaskError::fatal(code, "the lift is stuck"));
            change(&mut gathered);
            explain(&gathered).sentence
        };
        let says = |sentence: &str| sentence.contains("undo by request tries again");
        let not_undone = failed_with("compensation_failed", |_| {});
        assert!(says(&not_undone) && not_undone.contains("A resume opens it again"), "{not_undone}");
        assert!(!says(&failed_with("e", |_| {})));
        let begun = failed_with("compensation_failed", |it| it.task.undone_by = Some(TaskId::new()));
        assert!(!says(&begun), "{begun}");
    }

    #[test]
    fn a_silent_worker_loses_the_task_when_its_lease_ends() {
        let silent = running_with(|it| it.workers[0].seen_at = NOW - WorkerInfo::SILENT);
        assert_eq!((silent.code, silent.until), ("lease_expiring", Some(timestamp(NOW + 10_000_000))));
        assert!(silent.sentence.contains("last heard of at"), "{silent:?}");
        let gone = running_with(|it| it.workers.clear());
        assert_eq!(gone.code, "lease_expiring");
        let over = running_with(|it| it.facts.lease_left = Some(-5));
        assert_eq!((over.code, over.until), ("lease_expiring", Some(timestamp(NOW))));
    }

    #[test]
    fn a_waiting_task_says_what_for() {
        let ask = |kind, text: &str| Ask {
            id: "x".into(),
            task_id: TaskId::new(),
            kind,
            status: AskStatus::Pending,
            step: "s".into(),
            text: text.into(),
            subject: Value::Null,
            digest: String::new(),
            requested_at: NOW,
            expires_at: None,
            decided_at: None,
            decided_by: None,
            reason: None,
        };
        let approval = waiting_for("approval", "x", |it| it.asks = vec![ask(AskKind::Approval, "Go live?")]);
        assert_eq!(approval.code, "approval");
        assert!(approval.sentence.contains("approve or deny 'Go live?'"), "{approval:?}");
        let question = waiting_for("question", "x", |it| it.asks = vec![ask(AskKind::Question, "Which?")]);
        assert!(question.code == "question" && question.sentence.contains("'Which?'"), "{question:?}");
        assert!(waiting_for("signal", "go", |_| {}).sentence.contains("signal 'go'"));
        let doubt = waiting_for("in_doubt", "pay", |_| {});
        assert!(doubt.code == "in_doubt" && doubt.sentence.contains("step 'pay'"), "{doubt:?}");
        let timer = waiting_for("timer", "sleep", |it| {
            if let Some(waiting) = &mut it.task.waiting_for {
                waiting.until = Some(timestamp(NOW + 9));
            }
        });
        assert_eq!((timer.code, timer.until), ("timer", Some(timestamp(NOW + 9))));
        let child = waiting_for("child", "c", |it| it.child = Some(task(State::Running)));
        assert!(child.sentence.contains("its child c, which is running"), "{child:?}");
        let holder = TaskId::new();
        let lock = waiting_for("lock", "disk", |it| {
            (it.facts.lock, it.facts.lock_ahead) = (Some((Some(holder), Some(NOW + 3))), 1);
        });
        assert_eq!((lock.code, lock.until), ("lock", Some(timestamp(NOW + 3))));
        assert!(lock.sentence.contains(&format!("held by task {holder}")), "{lock:?}");
    }

    #[test]
    fn a_task_that_ended_says_how() {
        let mut failed = gathered(State::Failed);
        failed.task.error = Some(TaskError::fatal("e", "disk full"));
        let why = explain(&failed);
        assert!(why.code == "failed" && why.sentence.contains("disk full"), "{why:?}");
        assert_eq!(explain(&gathered(State::Completed)).code, "completed");
        assert_eq!(explain(&gathered(State::Cancelled)).code, "cancelled");
    }
}
