//! Schedules: tasks that are submitted again and again, by cron or at fixed intervals.
//!
//! No I/O here. A schedule knows its next **tick**. A sweep that finds the tick past asks
//! `Stored::due` what to do, and writes the task and the schedule's next tick in one transaction,
//! so that a tick has exactly one task however many machines sweep.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::store::{Accepted, SubmitRefused};
use crate::task::{Deadline, Invalid, NewTask, TaskId, check_name, timestamp};

mod ticks;

use ticks::Ticks;

/// A tick that is later than this (microseconds) was missed. Up to then it fires, only late.
const GRACE: i64 = 60_000_000;
/// The largest input of a schedule's task.
pub const MAX_SCHEDULE_INPUT_BYTES: usize = 64 * 1024;
/// How many schedules a tenant may have.
pub const MAX_SCHEDULES: usize = 1_000;
/// The labels of a task that say which schedule made it, and for which tick.
const TAGS: [&str; 2] = ["schedule", "tick"];

/// When a schedule fires.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// By the clock of a time zone.
    Cron {
        /// Minute, hour, day, month, weekday; with six fields the first is the second.
        expr: String,
        /// An IANA name, such as `Europe/Berlin`, or `UTC`.
        time_zone: String,
    },
    /// Every so often, counted from when the schedule was made: 1 second to 10 years.
    Every(Duration),
}

/// What happens to ticks that nobody was there for: all workers were down, or the store was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Missed {
    /// They are dropped.
    #[default]
    Skip,
    /// One task is submitted for the newest of them.
    RunOnce,
}

/// Submits a task again and again.
///
/// ```
/// use longhaul::{Missed, NewTask, Schedule};
/// use std::time::Duration;
///
/// let task = NewTask::new("report", &serde_json::json!({"of": "yesterday"})).timeout(Duration::from_secs(3600));
/// let nightly = Schedule::cron("nightly", "30 2 * * *", task).time_zone("Europe/Berlin").missed(Missed::RunOnce);
/// let often = Schedule::every("ping", Duration::from_secs(60), NewTask::new("ping", &()));
/// assert!(nightly.validate().is_ok() && often.validate().is_ok());
/// ```
#[derive(Clone, Debug, Serialize)]
pub struct Schedule {
    /// Names it within its tenant.
    pub name: String,
    /// Who owns it and its tasks.
    #[serde(skip_serializing)]
    pub tenant: String,
    /// When it fires.
    pub when: When,
    /// What it submits. Each task has an id of its own and the labels `schedule` and `tick`.
    pub task: NewTask,
    /// What happens to missed ticks.
    pub missed: Missed,
    /// Whether it rests. Replacing a paused schedule leaves it paused.
    pub paused: bool,
    /// The next tick, set by the store; none while it is paused.
    pub next_at: Option<Timestamp>,
    /// The newest tick that has a task, set by the store.
    pub last_at: Option<Timestamp>,
    /// That task, set by the store.
    pub last_task: Option<TaskId>,
    /// Why the newest ticks have no task, set by the store; gone once a tick has one again.
    pub last_error: Option<String>,
}

impl Schedule {
    /// Fires by a cron expression, in UTC unless [`Schedule::time_zone`] says otherwise.
    pub fn cron(name: impl Into<String>, expr: impl Into<String>, task: NewTask) -> Self {
        Self::new(name.into(), When::Cron { expr: expr.into(), time_zone: "UTC".to_owned() }, task)
    }

    /// Fires every so often, the first time one interval from now.
    pub fn every(name: impl Into<String>, interval: Duration, task: NewTask) -> Self {
        Self::new(name.into(), When::Every(interval), task)
    }

    fn new(name: String, when: When, task: NewTask) -> Self {
        Self {
            name,
            tenant: task.tenant.clone(),
            when,
            task,
            missed: Missed::default(),
            paused: false,
            next_at: None,
            last_at: None,
            last_task: None,
            last_error: None,
        }
    }

    /// Sets the time zone of a cron expression; intervals have none.
    pub fn time_zone(mut self, name: impl Into<String>) -> Self {
        if let When::Cron { time_zone, .. } = &mut self.when {
            *time_zone = name.into();
        }
        self
    }

    /// Sets what happens to missed ticks.
    pub fn missed(mut self, missed: Missed) -> Self {
        self.missed = missed;
        self
    }

    /// Makes it rest until it is resumed.
    pub fn paused(mut self) -> Self {
        self.paused = true;
        self
    }

    /// Decides, before anything is stored and the same for every store, whether this may be
    /// accepted at all.
    pub fn validate(&self) -> Result<(), Invalid> {
        check_name("name", &self.name)?;
        check_name("tenant", &self.tenant)?;
        self.task.validate()?;
        let task = &self.task;
        for (field, is_set, remedy) in [
            ("key", task.key.is_some(), "every tick has its own task; leave it out"),
            ("dedupe_window", task.dedupe_window.is_some(), "every tick has its own task; leave it out"),
            ("run_at", task.run_at.is_some(), "the schedule says when; leave it out"),
            (
                "deadline",
                matches!(task.deadline, Some(Deadline::At(_))),
                "a moment cannot hold for every tick; use a timeout",
            ),
        ] {
            if is_set {
                return Err(Invalid::new(field, format!("cannot be set for a schedule: {remedy}")));
            }
        }
        let bytes = task.input.get().len();
        if bytes > MAX_SCHEDULE_INPUT_BYTES {
            let problem = format!("has {bytes} bytes; a schedule's may have {MAX_SCHEDULE_INPUT_BYTES}");
            return Err(Invalid::new("input", problem));
        }
        if let Some(tag) = TAGS.iter().find(|tag| task.tags.contains_key(**tag)) {
            return Err(Invalid::new("tags", format!("'{tag}' is set by the schedule; use another name")));
        }
        self.task_of(timestamp(0)).validate()?;
        Ticks::of(&self.when, 0).map(drop)
    }

    /// The task of one tick.
    fn task_of(&self, tick: Timestamp) -> NewTask {
        let [schedule, at] = TAGS;
        let mut task = self.task.clone().tenant(&self.tenant).tag(schedule, &self.name).tag(at, tick.to_string());
        task.id = TaskId::new();
        task
    }
}

/// A schedule as the store keeps it.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) schedule: Schedule,
    /// The moment from which intervals are counted.
    pub(crate) anchor: i64,
}

/// The part of a schedule that is stored as one text.
#[derive(Serialize, Deserialize)]
struct Plan {
    when: When,
    task: NewTask,
    missed: Missed,
}

/// The other columns of a schedule's row; times are microseconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Columns {
    pub(crate) tenant: String,
    pub(crate) name: String,
    pub(crate) paused: bool,
    pub(crate) anchor: i64,
    pub(crate) next_at: Option<i64>,
    pub(crate) last_at: Option<i64>,
    pub(crate) last_task: Option<TaskId>,
    pub(crate) last_error: Option<String>,
}

impl Stored {
    /// A row's schedule. An error is what people should read: another version wrote the row, or it
    /// is damaged.
    pub(crate) fn read(columns: Columns, plan: &str) -> Result<Self, String> {
        let plan: Plan = serde_json::from_str(plan)
            .map_err(|error| format!("this version cannot read the schedule ({error}); save it again"))?;
        let schedule = Schedule {
            name: columns.name,
            tenant: columns.tenant,
            when: plan.when,
            task: plan.task,
            missed: plan.missed,
            paused: columns.paused,
            next_at: columns.next_at.map(timestamp),
            last_at: columns.last_at.map(timestamp),
            last_task: columns.last_task,
            last_error: columns.last_error,
        };
        Ok(Self { schedule, anchor: columns.anchor })
    }

    /// What [`Stored::read`] reads. All of it is made of types that always serialise.
    pub(crate) fn plan(&self) -> String {
        let Schedule { when, task, missed, .. } = self.schedule.clone();
        serde_json::to_string(&Plan { when, task, missed }).unwrap_or_default()
    }

    pub(crate) fn next_at(&self) -> Option<i64> {
        self.schedule.next_at.map(Timestamp::as_microsecond)
    }

    pub(crate) fn last_at(&self) -> Option<i64> {
        self.schedule.last_at.map(Timestamp::as_microsecond)
    }

    /// A new schedule.
    pub(crate) fn create(asked: &Schedule, now: i64) -> Result<Self, Invalid> {
        let schedule =
            Schedule { next_at: None, last_at: None, last_task: None, last_error: None, ..asked.clone() };
        Self { schedule, anchor: now }.planned(now)
    }

    /// This schedule, replaced by what is asked for. As long as it fires at the same times, it keeps
    /// its place in time, so that a program that saves its schedules whenever it starts changes
    /// nothing. What it did so far is kept, and so is a pause.
    pub(crate) fn replace(self, asked: &Schedule, now: i64) -> Result<Self, Invalid> {
        let known = self.schedule;
        let same_times = known.when == asked.when;
        let schedule = Schedule {
            paused: asked.paused || known.paused,
            next_at: known.next_at,
            last_at: known.last_at,
            last_task: known.last_task,
            last_error: known.last_error,
            ..asked.clone()
        };
        let replaced = Self { schedule, anchor: if same_times { self.anchor } else { now } };
        if same_times && !replaced.schedule.paused { Ok(replaced) } else { replaced.planned(now) }
    }

    pub(crate) fn pause(mut self) -> Self {
        self.schedule.paused = true;
        self.schedule.next_at = None;
        self
    }

    pub(crate) fn resume(mut self, now: i64) -> Result<Self, Invalid> {
        if !self.schedule.paused {
            return Ok(self);
        }
        self.schedule.paused = false;
        self.planned(now)
    }

    /// With its next tick from now on. Never one that has a task already, which could be when the
    /// clock of whoever submitted it was ahead.
    fn planned(mut self, now: i64) -> Result<Self, Invalid> {
        let ticks = Ticks::of(&self.schedule.when, self.anchor)?;
        let next = ticks.after(self.last_at().map_or(now, |last| last.max(now)));
        self.schedule.next_at = next.filter(|_| !self.schedule.paused).map(timestamp);
        Ok(self)
    }

    /// What is to be done now: at most one task, and the next tick, which may be past as well.
    ///
    /// Ticks up to a minute late fire each. Of those that are later, [`Missed::Skip`] drops all, and
    /// [`Missed::RunOnce`] fires the newest.
    pub(crate) fn due(self, now: i64) -> Result<Due, String> {
        let ticks = Ticks::of(&self.schedule.when, self.anchor).map_err(|invalid| invalid.to_string())?;
        let Some(planned) = self.next_at().filter(|&next| next <= now) else {
            return Ok(Due { next: self.next_at(), schedule: self, tick: None, task: None, missed: None });
        };
        let oldest = now - GRACE;
        let missed = planned < oldest;
        let tick = match self.schedule.missed {
            _ if !missed => Some(planned),
            Missed::RunOnce => Some(ticks.newest(planned, oldest - 1)),
            Missed::Skip => ticks.after(oldest - 1).filter(|&first| first <= now),
        };
        let next = ticks.after(tick.unwrap_or(now));
        let missed = missed && tick != Some(planned);
        let missed = missed.then(|| {
            format!("ticks from {} on were missed: no worker was there within a minute", timestamp(planned))
        });
        let task = tick.map(|tick| self.schedule.task_of(timestamp(tick)));
        Ok(Due { schedule: self, tick, next, task, missed })
    }
}

/// A schedule whose time has come.
#[derive(Debug)]
pub(crate) struct Due {
    schedule: Stored,
    tick: Option<i64>,
    next: Option<i64>,
    /// To be submitted.
    pub(crate) task: Option<NewTask>,
    /// What to say of ticks that were passed over.
    missed: Option<String>,
}

impl Due {
    /// The schedule afterwards. `answer`: what became of its task.
    pub(crate) fn settled(self, answer: Option<Result<Accepted, SubmitRefused>>) -> Stored {
        let Self { schedule: Stored { mut schedule, anchor }, tick, next, missed, .. } = self;
        schedule.next_at = next.map(timestamp);
        let tick = tick.map(timestamp);
        match answer {
            Some(Ok(accepted)) => {
                schedule.last_at = tick;
                schedule.last_task = Some(accepted.id);
                schedule.last_error = missed;
            }
            Some(Err(refused)) => {
                let tick = tick.map(|tick| tick.to_string()).unwrap_or_default();
                schedule.last_error = Some(format!("the tick of {tick} was missed: {refused}"));
            }
            None => schedule.last_error = missed.or(schedule.last_error),
        }
        Stored { schedule, anchor }
    }
}

/// When to look again (microseconds from now) at a row that cannot be understood here: another
/// version may, and it must not keep the others waiting.
pub(crate) const LOOK_AGAIN: i64 = 60_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: i64 = 60_000_000;
    const HOUR: i64 = 60 * MINUTE;

    fn hourly() -> Schedule {
        Schedule::cron("hourly", "0 * * * *", NewTask::new("h", &1))
    }

    fn stored(schedule: &Schedule) -> Stored {
        Stored::create(schedule, 0).expect("the test's schedule is one")
    }

    /// The tick that fires and the next one, in hours, and whether something was missed.
    fn due(stored: &Stored, now: i64) -> (Option<i64>, i64, bool) {
        let due = stored.clone().due(now).expect("understood");
        assert_eq!(due.task.is_some(), due.tick.is_some());
        (due.tick.map(|tick| tick / HOUR), due.next.expect("it goes on") / HOUR, due.missed.is_some())
    }

    /// The ticks that fire at `now`, one after the other, in seconds.
    fn fired(mut stored: Stored, now: i64) -> Vec<i64> {
        let mut ticks = Vec::new();
        while let Some(tick) = stored.clone().due(now).expect("understood").tick {
            ticks.push(tick / 1_000_000);
            assert!(ticks.len() < 20, "it comes to an end: {ticks:?}");
            let accepted = Accepted { id: TaskId::new(), new: true, created_at: now };
            stored = stored.due(now).expect("understood").settled(Some(Ok(accepted)));
        }
        ticks
    }

    #[test]
    fn a_tick_up_to_a_minute_late_fires_and_the_next_one_is_planned() {
        for missed in [Missed::Skip, Missed::RunOnce] {
            let stored = stored(&hourly().missed(missed));
            assert_eq!(due(&stored, HOUR - 1), (None, 1, false));
            assert_eq!(due(&stored, HOUR), (Some(1), 2, false));
            assert_eq!(due(&stored, HOUR + MINUTE), (Some(1), 2, false));
        }
    }

    #[test]
    fn missed_ticks_are_skipped_or_run_once() {
        let skip = stored(&hourly());
        assert_eq!(due(&skip, HOUR + MINUTE + 1), (None, 2, true));
        assert_eq!(due(&skip, 100 * HOUR + 30 * MINUTE), (None, 101, true));
        assert_eq!(due(&skip, 100 * HOUR + MINUTE), (Some(100), 101, true), "the newest is not late");
        let once = stored(&hourly().missed(Missed::RunOnce));
        assert_eq!(due(&once, HOUR + MINUTE + 1), (Some(1), 2, false));
        assert_eq!(due(&once, 100 * HOUR + 30 * MINUTE), (Some(100), 101, true));
    }

    #[test]
    fn ticks_that_follow_fast_are_each_made_up_within_the_grace() {
        let fast = Schedule::every("fast", Duration::from_secs(1), NewTask::new("h", &1));
        assert_eq!(fired(stored(&fast), 10_000_000), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    }

    #[test]
    fn what_is_missed_is_made_up_once_and_ticks_of_the_last_minute_each() {
        let fires = |missed| {
            let fast = Schedule::every("fast", Duration::from_secs(7), NewTask::new("h", &1)).missed(missed);
            fired(stored(&fast), 90_000_000)
        };
        assert_eq!(fires(Missed::Skip), [35, 42, 49, 56, 63, 70, 77, 84]);
        assert_eq!(fires(Missed::RunOnce), [28, 35, 42, 49, 56, 63, 70, 77, 84]);
    }

    #[test]
    fn a_tick_that_was_refused_is_missed_and_says_why_until_one_is_accepted() {
        let stored = stored(&hourly());
        let refused = SubmitRefused::UnknownHandler { handler: "h".into() };
        let after = stored.due(HOUR).expect("understood").settled(Some(Err(refused)));
        let error = after.schedule.last_error.clone().expect("says why");
        assert!(error.contains("1970-01-01T01:00:00Z") && error.contains("'h'"), "{error}");
        assert_eq!((after.schedule.last_at, after.next_at()), (None, Some(2 * HOUR)));
        let accepted = Accepted { id: TaskId::new(), new: true, created_at: 0 };
        let after = after.due(2 * HOUR).expect("understood").settled(Some(Ok(accepted.clone())));
        assert_eq!(after.schedule.last_error, None);
        assert_eq!((after.last_at(), after.schedule.last_task), (Some(2 * HOUR), Some(accepted.id)));
    }

    #[test]
    fn a_schedule_that_is_saved_again_as_it_was_keeps_its_place_in_time() {
        let every = |seconds| Schedule::every("s", Duration::from_secs(seconds), NewTask::new("h", &1));
        let stored = stored(&every(3600));
        let again = stored.clone().replace(&every(3600).missed(Missed::RunOnce), HOUR / 2).expect("replaced");
        assert_eq!((again.next_at(), again.schedule.missed), (Some(HOUR), Missed::RunOnce));
        let late = stored.clone().replace(&every(3600), 5 * HOUR + 1).expect("replaced");
        assert_eq!(late.next_at(), Some(HOUR), "what was missed is still decided by the policy");
        let other = stored.replace(&every(1800), HOUR / 4).expect("replaced");
        assert_eq!(other.next_at(), Some(HOUR / 4 + HOUR / 2), "counted anew");
    }

    #[test]
    fn a_pause_survives_replacement_and_nothing_is_made_up_after_it() {
        let paused = stored(&hourly()).pause();
        assert_eq!(paused.next_at(), None);
        let replaced = paused.replace(&hourly().missed(Missed::RunOnce), HOUR).expect("replaced");
        assert!(replaced.schedule.paused && replaced.next_at().is_none());
        let resumed = replaced.resume(9 * HOUR + 1).expect("resumed");
        assert_eq!((resumed.schedule.paused, resumed.next_at()), (false, Some(10 * HOUR)));
        assert_eq!(resumed.resume(20 * HOUR).expect("no change").next_at(), Some(10 * HOUR));
    }

    #[test]
    fn no_tick_is_planned_twice_although_a_clock_is_behind() {
        let accepted = Accepted { id: TaskId::new(), new: true, created_at: 0 };
        let fired = stored(&hourly()).due(HOUR).expect("understood").settled(Some(Ok(accepted)));
        let resumed = fired.clone().pause().resume(HOUR - MINUTE).expect("resumed");
        assert_eq!(resumed.next_at(), Some(2 * HOUR));
        let moved = Schedule::cron("hourly", "0 */1 * * *", NewTask::new("h", &1));
        assert_eq!(fired.replace(&moved, HOUR - MINUTE).expect("replaced").next_at(), Some(2 * HOUR));
    }

    #[test]
    fn a_task_says_which_schedule_and_tick_it_is_for() {
        let schedule = Schedule { tenant: "acme".into(), ..hourly() };
        let one = schedule.task_of(timestamp(HOUR));
        assert_eq!((one.tenant.as_str(), one.tags["schedule"].as_str()), ("acme", "hourly"));
        assert_eq!(one.tags["tick"], "1970-01-01T01:00:00Z");
        assert_ne!(one.id, schedule.task_of(timestamp(HOUR)).id);
    }

    #[test]
    fn what_cannot_hold_for_every_tick_is_refused() {
        let task = || NewTask::new("h", &1);
        let many_tags = (0..31).fold(task(), |task, n| task.tag(format!("t{n}"), "v"));
        for (bad, field) in [
            (Schedule::cron("", "0 * * * *", task()), "name"),
            (Schedule::cron("a/b", "0 * * * *", task()), "name"),
            (Schedule::cron("nul\0", "0 * * * *", task()), "name"),
            (Schedule::cron(&*"n".repeat(129), "0 * * * *", task()), "name"),
            (Schedule::cron("s", "0 * * *", task()), "cron"),
            (hourly().time_zone("Mars/Olympus"), "time_zone"),
            (Schedule::every("s", Duration::ZERO, task()), "every"),
            (Schedule::cron("s", "0 * * * *", task().key("k")), "key"),
            (Schedule::cron("s", "0 * * * *", task().dedupe_window(Duration::from_secs(1))), "dedupe_window"),
            (Schedule::cron("s", "0 * * * *", task().run_at(Timestamp::MAX)), "run_at"),
            (Schedule::cron("s", "0 * * * *", task().deadline(Timestamp::MAX)), "deadline"),
            (Schedule::cron("s", "0 * * * *", task().tag("tick", "x")), "tags"),
            (Schedule::cron("s", "0 * * * *", many_tags), "tags"),
            (Schedule::cron("s", "0 * * * *", task().queue("a b")), "queue"),
            (Schedule::cron("s", "0 * * * *", NewTask::new("h", &"x".repeat(MAX_SCHEDULE_INPUT_BYTES))), "input"),
            (Schedule { tenant: String::new(), ..hourly() }, "tenant"),
        ] {
            assert_eq!(bad.validate().expect_err("must be refused").field, field);
        }
    }

    #[test]
    fn a_stored_schedule_is_read_back_and_those_of_this_version_for_ever() {
        let schedule = hourly().time_zone("Europe/Berlin").missed(Missed::RunOnce);
        let kept = stored(&schedule);
        let read = Stored::read(Columns::default(), &kept.plan()).expect("readable").schedule;
        assert_eq!((read.when, read.missed), (schedule.when, schedule.missed));
        let first = r#"{"when":{"cron":{"expr":"0 9 * * 1-5","time_zone":"UTC"}},"task":{"id":
            "01890000-0000-7000-8000-000000000000","tenant":"default","handler":"h","input":{"a":1},"queue":"default",
            "priority":5,"run_at":null,"deadline":{"after":{"secs":60,"nanos":0}},"key":null,"dedupe_window":null,
            "concurrency_key":null,"max_attempts":3,"tags":{"a":"b"}},"missed":"skip"}"#;
        let read = Stored::read(Columns::default(), first).expect("readable").schedule;
        assert_eq!((read.task.input.get(), read.task.handler.as_str()), (r#"{"a":1}"#, "h"));
        assert!(Stored::read(Columns::default(), "{}").is_err());
    }
}
