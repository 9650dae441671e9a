//! Each promise broken once in an otherwise right ledger: the judge must notice.

use std::time::Duration;

use super::super::world::Thing;
use super::*;

const KILLED: u32 = 100;
const OTHER: u32 = 200;

/// A small evening: two deployments, a broken one, a hotfix and two agents. The first deployment is held by the worker that is
/// killed in its second step.
struct Evening {
    accepted: Vec<Accepted>,
    ledger: Vec<Line>,
    sandbox: Sandbox,
    told: Vec<Told>,
    ended: BTreeMap<String, Ended>,
    calls: Vec<ModelCall>,
    killed: Option<Killed>,
    paused: Option<Paused>,
    decided: Option<Decided>,
    again: (usize, usize),
    begun: Instant,
}

impl Evening {
    fn new() -> Self {
        let agent = |goal: &str, asks| Kind::Agent { goal: goal.to_owned(), asks };
        let tasks = [
            ("a", "app-001", Kind::Deploy { broken: false }),
            ("b", "app-002", Kind::Deploy { broken: true }),
            ("c", "app-003", Kind::Deploy { broken: false }),
            ("h", "app-hotfix", Kind::Hotfix),
            ("x", "app-001", agent("Look", false)),
            ("y", "app-002", agent("Repair", true)),
        ];
        let accepted =
            tasks.map(|(id, app, kind)| Accepted { id: id.to_owned(), app: app.to_owned(), kind }).to_vec();
        let begun = Instant::now();
        let mut evening = Self {
            accepted,
            ledger: Vec::new(),
            sandbox: Sandbox::new(),
            told: Vec::new(),
            ended: BTreeMap::new(),
            calls: Vec::new(),
            killed: None,
            paused: Some(Paused { refused: 2 }),
            decided: None,
            again: (2, 0),
            begun,
        };
        evening.deploy("a", 0..1, 1, KILLED);
        evening.line("a", What::Do, "create_cert", Mark::Begin, 1, KILLED);
        evening.killed = Some(Killed { worker: KILLED, at: 1_000_000, lines: evening.ledger.len() });
        evening.deploy("h", 0..4, 1, OTHER);
        evening.deploy("a", 1..4, 3, OTHER);
        evening.deploy("b", 0..3, 1, OTHER);
        evening.line("b", What::Do, "go_live", Mark::Begin, 1, OTHER);
        evening.line("b", What::Do, "go_live", Mark::Failed, 1, OTHER);
        for (step, _) in PLACES[..3].iter().rev() {
            evening.both("b", What::Undo, step, 1, OTHER);
        }
        evening.deploy("c", 0..4, 1, OTHER);
        for id in ["x", "y"] {
            evening.both(id, What::Call, "look", 1, OTHER);
        }
        evening.decided = Some(Decided { task: "y".to_owned(), approved: true, lines: evening.ledger.len() });
        evening.both("y", What::Call, "restart", 1, OTHER);
        evening.make("restarts", "app-002", "y");
        for (id, app) in [("a", "app-001"), ("c", "app-003"), ("h", "app-hotfix")] {
            for (_, place) in PLACES {
                evening.make(place, app, id);
            }
        }
        for (number, (goal, turn)) in
            [("Look", 0), ("Repair", 0), ("Look", 1), ("Look", 1), ("Repair", 1), ("Look", 2), ("Repair", 2)]
                .into_iter()
                .enumerate()
        {
            evening.call(goal, turn, number);
        }
        for task in &evening.accepted {
            let state = if task.id == "b" { "failed" } else { "completed" };
            let ended = Ended { state: state.to_owned(), at: begun + Duration::from_secs(60) };
            evening.ended.insert(task.id.clone(), ended);
        }
        evening
    }

    fn line(&mut self, task: &str, what: What, step: &str, mark: Mark, fence: u64, worker: u32) {
        let key = if what == What::Undo { format!("{task}/undo {step}") } else { format!("{task}/{step}") };
        let (task, step) = (task.to_owned(), step.to_owned());
        let at = 1_000_000 + self.ledger.len() as i64 * 1_000;
        self.ledger.push(Line { task, step, key, fence, worker, process: 1, what, mark, at });
    }

    fn both(&mut self, task: &str, what: What, step: &str, fence: u64, worker: u32) {
        self.line(task, what, step, Mark::Begin, fence, worker);
        self.line(task, what, step, Mark::Done, fence, worker);
    }

    fn deploy(&mut self, task: &str, steps: std::ops::Range<usize>, fence: u64, worker: u32) {
        for (step, _) in &PLACES[steps] {
            self.both(task, What::Do, step, fence, worker);
            self.told.push(Told { task: task.to_owned(), step: (*step).to_owned(), undo: false, run: fence });
        }
    }

    fn make(&mut self, place: &str, app: &str, task: &str) {
        let thing = Thing { app: app.to_owned(), version: "v1".to_owned(), task: task.to_owned(), healthy: true };
        self.sandbox.insert((place.to_owned(), app.to_owned()), thing);
    }

    fn call(&mut self, goal: &str, turn: usize, second: usize) {
        let at = self.begun + Duration::from_secs(second as u64);
        self.calls.push(ModelCall { goal: goal.to_owned(), turn, at });
    }

    /// The place of a line in the ledger.
    fn place(&self, task: &str, what: What, step: &str, mark: Mark) -> usize {
        let found = |line: &Line| {
            (line.task.as_str(), line.what, line.step.as_str(), line.mark) == (task, what, step, mark)
        };
        self.ledger.iter().position(found).expect("it is there")
    }

    fn judged(&self) -> Judgement {
        judge(&Evidence {
            submitted: 6,
            accepted: &self.accepted,
            again: self.again,
            ledger: &self.ledger,
            sandbox: &self.sandbox,
            told: &self.told,
            ended: &self.ended,
            calls: &self.calls,
            killed: self.killed,
            paused: self.paused,
            decided: self.decided.clone(),
            overtaking: Some(Overtaking { begun: 1, room: 1 }),
        })
    }

    /// The rows that are not right, by name, and what is said about them.
    fn faults(&self) -> (Vec<&'static str>, String) {
        let judged = self.judged();
        let bad: Vec<&str> = judged.rows.iter().filter(|row| !row.ok).map(|row| row.name).collect();
        assert_eq!(judged.is_ok(), bad.is_empty(), "{judged:?}");
        assert_eq!(judged.faults.is_empty(), bad.is_empty(), "a fault is told in words: {judged:?}");
        (bad, judged.faults.join("\n"))
    }

    /// Breaks something and expects exactly these rows to say so, and a sentence with these words.
    #[track_caller]
    fn breaks(change: impl FnOnce(&mut Self), rows: &[&str], words: &str) {
        let mut evening = Self::new();
        change(&mut evening);
        let (bad, said) = evening.faults();
        assert_eq!(bad, rows, "{said}");
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn an_evening_on_which_everything_held_is_right() {
    let judged = Evening::new().judged();
    assert!(judged.is_ok(), "{:?}", judged.faults);
    let actual = |name: &str| {
        judged.rows.iter().find(|row| row.name == name).map(|row| row.actual.clone()).expect("the row is there")
    };
    assert_eq!(actual("completed"), "3");
    assert_eq!(actual("rolled_back"), "1");
    assert_eq!(actual("lost"), "0");
    assert_eq!(actual("repeated"), "1, 0 with another key");
    assert_eq!(actual("hotfix"), "after 1 of 3");
    assert_eq!(actual("answers_lost"), "1");
    assert!(actual("resumed").starts_with("1 of 1, the last 0.0"), "{}", actual("resumed"));
}

#[test]
fn a_lost_task_is_a_fault() {
    let lose = |evening: &mut Evening| {
        evening.ledger.retain(|line| line.task != "c");
        evening.decided.as_mut().expect("decided").lines -= 8;
        evening.sandbox.retain(|_, thing| thing.task != "c");
        evening.ended.remove("c");
    };
    Evening::breaks(lose, &["completed", "lost", "told"], "app-003 (task c) is lost");
}

#[test]
fn an_effect_that_is_not_in_the_sandbox_is_a_fault_whatever_the_ledger_says() {
    let lose = |evening: &mut Evening| {
        evening.sandbox.remove(&("cert".to_owned(), "app-003".to_owned()));
    };
    Evening::breaks(lose, &["completed", "lost"], "cert/app-003 is not in the sandbox");
}

#[test]
fn a_step_run_again_after_the_next_had_begun_is_a_fault() {
    let again = |evening: &mut Evening| {
        evening.told.clear();
        evening.both("c", What::Do, "create_dns", 2, OTHER);
    };
    Evening::breaks(again, &["recorded_run_again"], "create_dns was on record, because create_cert had begun");
}

#[test]
fn a_step_run_again_after_clients_were_told_is_a_fault() {
    let again = |evening: &mut Evening| evening.both("c", What::Do, "go_live", 2, OTHER);
    Evening::breaks(
        again,
        &["recorded_run_again"],
        "go_live was told to be done by run 1, and was run again by run 2",
    );
}

#[test]
fn a_step_done_twice_by_one_run_is_a_fault() {
    let again = |evening: &mut Evening| evening.both("c", What::Do, "go_live", 1, OTHER);
    Evening::breaks(again, &["recorded_run_again"], "go_live was done by run 1 and begun by it once more");
}

#[test]
fn a_step_that_was_not_on_record_may_be_repeated_with_its_key_and_with_no_other() {
    let mut evening = Evening::new();
    evening.told.retain(|told| (told.task.as_str(), told.step.as_str()) != ("c", "go_live"));
    evening.both("c", What::Do, "go_live", 2, OTHER);
    assert_eq!(evening.faults(), (vec![], String::new()));
    for line in evening.ledger.iter_mut().filter(|line| line.task == "c" && line.fence == 2) {
        line.key = "c/go_live again".to_owned();
    }
    assert_eq!(evening.faults().0, ["repeated"]);
}

#[test]
fn an_undo_out_of_order_is_a_fault() {
    let swap = |evening: &mut Evening| {
        for mark in [Mark::Begin, Mark::Done] {
            let (one, other) = (
                evening.place("b", What::Undo, "create_cert", mark),
                evening.place("b", What::Undo, "create_dns", mark),
            );
            evening.ledger.swap(one, other);
        }
    };
    Evening::breaks(swap, &["undone_in_reverse"], "undone: start_container, create_dns, create_cert");
}

#[test]
fn an_undo_that_is_missing_is_a_fault() {
    let skip = |evening: &mut Evening| {
        evening.ledger.retain(|line| (line.what, line.step.as_str()) != (What::Undo, "create_cert"));
        evening.decided.as_mut().expect("decided").lines -= 2;
        evening.make("cert", "app-002", "b");
    };
    Evening::breaks(skip, &["rolled_back", "lost", "undone_in_reverse"], "create_cert was undone");
}

#[test]
fn a_step_under_an_old_fence_after_a_newer_one_is_a_fault() {
    let late = |evening: &mut Evening| {
        evening.line("a", What::Do, "go_live", Mark::Begin, 1, KILLED);
    };
    Evening::breaks(
        late,
        &["stale_fences"],
        "go_live was begun under fence 1 by process 100, after fence 3 had begun",
    );
}

#[test]
fn a_worker_that_came_back_and_was_refused_nothing_is_a_fault() {
    Evening::breaks(
        |evening| evening.paused = Some(Paused { refused: 0 }),
        &["late_writes_refused"],
        "not refused",
    );
    Evening::breaks(|evening| evening.paused = None, &["late_writes_refused"], "no worker was stopped");
}

#[test]
fn a_model_call_on_record_that_is_paid_again_is_a_fault() {
    Evening::breaks(
        |evening| evening.call("Look", 1, 9),
        &["paid_twice"],
        "turn 1 was on record and was paid again",
    );
    Evening::breaks(|evening| evening.call("Look", 2, 99), &["paid_twice"], "asked after the end");
}

#[test]
fn a_task_of_the_killed_worker_that_nobody_took_over_is_a_fault() {
    let leave = |evening: &mut Evening| {
        for line in evening.ledger.iter_mut().filter(|line| line.task == "a") {
            line.worker = KILLED;
        }
    };
    Evening::breaks(leave, &["resumed"], "nobody took app-001");
    Evening::breaks(|evening| evening.killed = None, &["resumed"], "no worker was killed");
}

#[test]
fn a_dangerous_call_before_its_approval_or_after_a_denial_is_a_fault() {
    let early = |evening: &mut Evening| {
        evening.decided.as_mut().expect("decided").lines = evening.ledger.len();
    };
    Evening::breaks(early, &["approval"], "before anyone had approved");
    let denied = |evening: &mut Evening| evening.decided.as_mut().expect("decided").approved = false;
    Evening::breaks(denied, &["approval"], "was denied and happened");
    Evening::breaks(|evening| evening.decided = None, &["approval"], "nobody was asked");
}

#[test]
fn a_hotfix_that_waits_in_line_is_a_fault() {
    let wait = |evening: &mut Evening| {
        let (first, rest) = evening.ledger.clone().into_iter().partition::<Vec<_>, _>(|line| line.task != "h");
        evening.ledger = [first, rest].concat();
        evening.decided.as_mut().expect("decided").lines -= 8;
    };
    Evening::breaks(wait, &["hotfix"], "after 3 of 3");
}

#[test]
fn a_second_task_for_the_same_key_and_a_task_nobody_submitted_are_faults() {
    Evening::breaks(|evening| evening.again = (2, 1), &["duplicates"], "1 of 2 instead of 0 of 2");
    Evening::breaks(|evening| evening.both("z", What::Do, "create_dns", 1, OTHER), &["strangers"], "task z");
}

#[test]
fn clients_who_were_told_otherwise_are_a_fault() {
    let tell = |evening: &mut Evening| evening.ended.get_mut("b").expect("ended").state = "completed".to_owned();
    Evening::breaks(tell, &["told"], "clients were told 'completed' of app-002");
}
