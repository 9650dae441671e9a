//! After any sequence of operations: counters equal the truth, limits hold, histories are whole,
//! and every task has gone only where the table of transitions lets it go.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::bed::{Bed, completed, failed, retry, secs, suspended, write};
use crate::record::Decision;
use crate::state::StatePatch;
use crate::store::{Action, Claim, Filter, Lease, Outcome, QueueSettings, Settings};
use crate::task::{NewTask, State, Task, TaskId};

/// A small generator of numbers, the same on every machine (xorshift64*).
struct Dice(u64);

impl Dice {
    /// 0 to `below` - 1.
    fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % below
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.roll(from.len() as u64) as usize]
    }
}

const QUEUES: [&str; 2] = ["q", "r"];
const MAX_RUNNING_Q: u64 = 6;
const MAX_RUNNING_TENANT: usize = 9;

/// What a random sequence of operations has come to.
struct Story {
    bed: Bed,
    dice: Dice,
    tasks: Vec<TaskId>,
    /// Leases as their holders believe them, with the number of the next commit.
    leases: Vec<(Lease, u32)>,
    seen: BTreeMap<TaskId, (State, u64, u64)>,
}

impl Story {
    async fn start(bed: Bed, seed: u64) -> Self {
        let q =
            QueueSettings { max_running: Some(MAX_RUNNING_Q as u32), max_pending: 40, ..QueueSettings::default() };
        bed.configure(Settings {
            queues: [("q".to_owned(), q)].into(),
            tenant_max_running: [("default".to_owned(), MAX_RUNNING_TENANT as u32)].into(),
            key_max_running: [("two".to_owned(), 2)].into(),
            retention: Some(secs(10_000)),
        })
        .await;
        Self { bed, dice: Dice(seed), tasks: Vec::new(), leases: Vec::new(), seen: BTreeMap::new() }
    }

    async fn act(&mut self) {
        match self.dice.roll(12) {
            0 | 1 => self.submit().await,
            2 | 3 => self.claim().await,
            4..=6 => self.commit().await,
            7 | 8 => self.control().await,
            9 => {
                let seconds = *self.dice.pick(&[1, 5, 20, 20, 100, 3_000]);
                self.bed.advance(seconds);
            }
            10 => {
                let limit = *self.dice.pick(&[1, 3, 1_000]);
                self.bed.store.sweep(limit, true).await.expect("the store answers");
            }
            _ => {
                let leases: Vec<&Lease> = self.leases.iter().map(|(lease, _)| lease).collect();
                self.bed.heartbeat(&leases).await;
            }
        }
    }

    async fn submit(&mut self) {
        let count = *self.dice.pick(&[1, 1, 3, 8]);
        let now = self.bed.store.clock().now().as_microsecond();
        let batch: Vec<NewTask> = (0..count)
            .map(|n| {
                let mut task = NewTask::new(*self.dice.pick(&["h", "g"]), &n).queue(*self.dice.pick(&QUEUES));
                task.priority = self.dice.roll(10) as u8;
                match self.dice.roll(5) {
                    0 => task.concurrency_key = Some("one".into()),
                    1 => task.concurrency_key = Some("two".into()),
                    _ => {}
                }
                match self.dice.roll(6) {
                    0 => task = task.timeout(secs(50)),
                    1 => task = task.run_at(Timestamp::from_microsecond(now + 30_000_000).expect("in range")),
                    2 => task = task.key(format!("k{}", self.dice.roll(20))),
                    _ => {}
                }
                task
            })
            .collect();
        for answer in self.bed.store.submit(&batch).await.expect("the store answers").into_iter().flatten() {
            if answer.new {
                self.tasks.push(answer.id);
            }
        }
    }

    async fn claim(&mut self) {
        let idle = self.dice.roll(3) == 0;
        let ask = Claim { idle, ..self.bed.ask(self.dice.roll(5) as usize) };
        let leases = self.bed.claim_as(&ask).await.leases;
        if self.dice.roll(4) == 0 {
            let again = self.bed.claim_as(&ask).await.leases;
            assert_eq!(again.len(), leases.len(), "a repeated claim gives the same");
        }
        self.leases.extend(leases.into_iter().map(|lease| (lease, 1)));
    }

    async fn commit(&mut self) {
        if self.leases.is_empty() {
            return;
        }
        let at = self.dice.roll(self.leases.len() as u64) as usize;
        let (lease, number) = &mut self.leases[at];
        let mut written = write(lease, *number);
        written = match self.dice.roll(9) {
            0 | 1 => written.step(&format!("s{number}")),
            2 | 3 => written.outcome(completed()),
            4 => written.outcome(failed()),
            5 => written.outcome(retry(*self.dice.pick(&[0, 10]))),
            6 => written.outcome(suspended("in_doubt", "pay", self.dice.pick(&[None, Some(15)]).to_owned())),
            7 => written.outcome(Outcome::Released),
            _ => written.outcome(super::bed::cancelled()),
        };
        if self.dice.roll(3) == 0 {
            written = written.backward();
        }
        let first = self.bed.commit(written.clone()).await;
        if self.dice.roll(3) == 0 {
            assert_eq!(self.bed.commit(written).await, first, "a repeated commit is answered the same");
        }
        self.leases[at].1 += u32::from(first.is_ok());
        // A holder that was refused may try again with its old lease; it must never succeed.
        if self.dice.roll(3) > 0
            && self.bed.find(self.leases[at].0.task).await.is_none_or(|task| task.state != State::Running)
        {
            self.leases.swap_remove(at);
        }
    }

    async fn control(&mut self) {
        if self.tasks.is_empty() {
            return;
        }
        let id = *self.dice.pick(&self.tasks);
        let patch = StatePatch { set_goal: Some("x".into()), ..StatePatch::default() };
        let action = match self.dice.roll(8) {
            0 | 1 => Action::Cancel { undo: false, reason: None },
            2 | 3 => Action::Resume,
            4 => Action::Priority(self.dice.roll(10) as u8),
            5 => Action::Decide { step: "pay".into(), decision: Decision::Retry, reason: None },
            6 => Action::Patch { patch, version: None, under: None },
            _ => Action::Delete,
        };
        let _ = self.bed.control(id, action).await;
    }

    async fn all(&self) -> Vec<Task> {
        let filter = Filter { limit: 1_000, ..Filter::default() };
        self.bed.store.list("default", &filter).await.expect("the store answers").tasks
    }

    /// Holds what everyone believes against what is.
    async fn check(&mut self) {
        let tasks = self.all().await;
        assert!(tasks.len() < 1_000, "the whole truth fits one page");
        for queue in self.bed.store.queues().await.expect("the store answers") {
            let count =
                |state| tasks.iter().filter(|task| task.queue == queue.name && task.state == state).count() as u64;
            assert_eq!(
                (queue.pending, queue.running),
                (count(State::Pending), count(State::Running)),
                "{}",
                queue.name
            );
            assert!(queue.name != "q" || queue.running <= MAX_RUNNING_Q);
        }
        let running: Vec<&Task> = tasks.iter().filter(|task| task.state == State::Running).collect();
        assert!(running.len() <= MAX_RUNNING_TENANT);
        for task in &tasks {
            let ended = task.state.is_final();
            assert_eq!(task.finished_at.is_some(), ended, "{task:?}");
            assert_eq!(task.waiting_for.is_some(), task.state == State::Waiting, "{task:?}");
            assert!(task.crashes <= 5);
            let now = (task.state, task.fence, task.last_seq);
            if let Some((state, fence, last_seq)) = self.seen.insert(task.id, now) {
                assert!(task.fence >= fence && task.last_seq >= last_seq, "{task:?} was at {fence} {last_seq}");
                assert!(
                    state != State::Completed || now == (state, fence, task.last_seq),
                    "{task:?} had completed"
                );
            }
        }
        self.tasks.retain(|id| tasks.iter().any(|task| task.id == *id));
    }

    /// Lets everything come to its end and checks that nothing is stuck.
    async fn settle(&mut self) {
        self.leases.clear();
        for _ in 0..300 {
            self.bed.advance(16);
            self.bed.sweep().await;
            for task in self.all().await.into_iter().filter(|task| task.state == State::Waiting) {
                let decide = Action::Decide { step: "pay".into(), decision: Decision::Retry, reason: None };
                self.bed.control(task.id, decide).await.expect("it waits for this");
            }
            let mut leases = self.bed.claim(50).await;
            if leases.is_empty() {
                leases = self.bed.claim_idle(50).await;
            }
            for lease in leases {
                let outcome = if lease.deadline.is_some() { failed() } else { completed() };
                let done = self.bed.commit(write(&lease, 1).outcome(outcome.clone())).await;
                if done.is_err() {
                    let _ = self.bed.commit(write(&lease, 1).outcome(failed()).backward()).await;
                }
            }
            if self.all().await.iter().all(|task| task.state.is_final()) {
                return;
            }
        }
        let stuck: Vec<Task> = self.all().await.into_iter().filter(|task| !task.state.is_final()).collect();
        panic!("{} tasks never end, such as {:?}", stuck.len(), stuck[0]);
    }
}

async fn counters_and_limits_are_true_after_any_sequence_and_everything_comes_to_its_end(bed: Bed) {
    let mut bed = bed;
    for seed in [1, 7, 42] {
        let mut story = Story::start(bed, seed).await;
        for step in 0..250 {
            story.act().await;
            if step % 5 == 0 {
                story.check().await;
            }
        }
        story.check().await;
        story.settle().await;
        story.check().await;
        for task in story.all().await {
            let ends = story.bed.events(task.id).await;
            assert!(ends.iter().any(|event| event.is_final()));
        }
        bed = story.bed;
    }
}

on_every_store![counters_and_limits_are_true_after_any_sequence_and_everything_comes_to_its_end];
