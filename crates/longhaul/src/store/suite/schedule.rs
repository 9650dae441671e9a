//! Schedules: one task per tick, whoever sweeps, however often, by whatever clock.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use rusqlite::Connection;
use tokio::sync::Barrier;
use tokio_postgres::NoTls;

use super::bed::{Bed, LEASE, completed, on_postgres, on_sqlite, secs, worker};
use crate::schedule::{MAX_SCHEDULES, Missed, Schedule, When};
use crate::store::{Claim, Filter, QueueSettings, SubmitRefused};
use crate::task::{Deadline, NewTask, State, Task};

const HOUR: u64 = 3_600;

impl Bed {
    async fn schedule(&self, schedule: Schedule) -> Schedule {
        self.store.save_schedule(&schedule).await.expect("the store answers").expect("accepted")
    }

    async fn schedule_named(&self, name: &str) -> Schedule {
        let all = self.store.schedules("default").await.expect("the store answers");
        all.into_iter().find(|schedule| schedule.name == name).expect("the schedule is there")
    }

    async fn pause(&self, name: &str, pause: bool) -> Option<Schedule> {
        self.store.pause_schedule("default", name, pause).await.expect("the store answers")
    }

    /// The tasks that a schedule made, oldest first.
    async fn made_by(&self, name: &str) -> Vec<Task> {
        let tag = Some(("schedule".to_owned(), name.to_owned()));
        let filter = Filter { tag, oldest_first: true, limit: 1_000, ..Filter::default() };
        self.store.list("default", &filter).await.expect("the store answers").tasks
    }

    async fn ticks_of(&self, name: &str) -> Vec<Timestamp> {
        let tasks = self.made_by(name).await;
        tasks.iter().map(|task| task.tags["tick"].parse().expect("a moment")).collect()
    }

    /// Moves the clock to a moment.
    fn move_to(&self, moment: Timestamp) {
        let micros = moment.as_microsecond() - self.store.clock().now().as_microsecond();
        self.store.clock().advance(Duration::from_micros(u64::try_from(micros).expect("it lies ahead")));
    }

    /// Completes the only task of a queue.
    async fn end_one_of(&self, queue: &str) {
        let leases = self.claim_as(&Claim { queues: vec![queue.to_owned()], ..self.ask(2) }).await.leases;
        assert_eq!(leases.len(), 1);
        self.end(&leases[0], completed()).await;
    }

    /// Sweeps until nothing is due; gives how many ticks had come.
    async fn settle(&self) -> usize {
        let mut ticks = 0;
        for _ in 0..200 {
            let swept = self.sweep().await;
            ticks += swept.ticks;
            if swept.ticks == 0 && swept.next_due_in != Some(0) {
                return ticks;
            }
        }
        panic!("it does not come to an end");
    }
}

fn every(name: &str, seconds: u64) -> Schedule {
    Schedule::every(name, secs(seconds), NewTask::new("h", &name))
}

fn seconds_between(earlier: Timestamp, later: Timestamp) -> i64 {
    later.as_second() - earlier.as_second()
}

async fn a_schedule_is_saved_listed_and_removed(bed: Bed) {
    let cron = Schedule::cron("nightly", "30 2 * * *", NewTask::new("h", &1)).time_zone("Europe/Berlin");
    let saved = bed.schedule(cron.missed(Missed::RunOnce)).await;
    let next = saved.next_at.expect("planned").to_zoned(jiff::tz::TimeZone::get("Europe/Berlin").expect("known"));
    assert!(
        next.strftime("%H:%M").to_string() == "02:30" || next.strftime("%H:%M").to_string() == "03:00",
        "{next}"
    );
    bed.schedule(every("a", 60)).await;
    let names = || async {
        let all = bed.store.schedules("default").await.expect("the store answers");
        all.into_iter().map(|schedule| schedule.name).collect::<Vec<_>>()
    };
    assert_eq!(names().await, ["a", "nightly"]);
    let read = bed.schedule_named("nightly").await;
    assert_eq!((&read.when, read.missed, read.next_at), (&saved.when, Missed::RunOnce, saved.next_at));
    assert!(bed.store.remove_schedule("default", "nightly").await.expect("the store answers"));
    assert!(!bed.store.remove_schedule("default", "nightly").await.expect("the store answers"));
    assert_eq!(names().await, ["a"]);
    assert!(bed.pause("nightly", true).await.is_none());
}

async fn a_tick_makes_one_task_as_the_template_says(bed: Bed) {
    let task = NewTask::new("g", &serde_json::json!({"a": [1, "ü"]}))
        .queue("q")
        .priority(8)
        .timeout(secs(30))
        .max_attempts(7)
        .concurrency_key("one")
        .tag("of", "test");
    let saved = bed.schedule(Schedule::every("s", secs(HOUR), task)).await;
    assert_eq!(bed.pass(HOUR - 10).await.ticks, 0);
    assert_eq!(bed.pass(11).await.ticks, 1);
    let tasks = bed.made_by("s").await;
    let [task] = &tasks[..] else { panic!("one task, not {}", tasks.len()) };
    assert_eq!((task.handler.as_str(), task.queue.as_str(), task.priority.get()), ("g", "q", 8));
    assert_eq!(task.input.get(), r#"{"a":[1,"ü"]}"#);
    let tick = saved.next_at.expect("planned");
    assert_eq!(task.tags["tick"], tick.to_string());
    assert_eq!(task.tags["of"], "test");
    assert_eq!(seconds_between(task.created_at, task.deadline.expect("set")), 30);
    assert_eq!(bed.kinds(task.id).await, ["task.submitted"]);
    let after = bed.schedule_named("s").await;
    assert_eq!((after.last_at, after.last_task, after.last_error), (Some(tick), Some(task.id), None));
    assert_eq!(seconds_between(tick, after.next_at.expect("planned")), 3_600);
    assert!(matches!(after.task.deadline, Some(Deadline::After(_))), "the template is as it was");
    assert_eq!(bed.claim_one().await.max_attempts, 7);
    assert_eq!(bed.sweep().await.ticks, 0);
}

async fn a_tick_fires_once_however_many_sweep(bed: Bed) {
    let names: Vec<String> = (0..20).map(|n| format!("s{n}")).collect();
    for name in &names {
        bed.schedule(every(name, 3_600)).await;
    }
    let other = bed.another_process().await;
    for round in 1..=5 {
        bed.advance(HOUR);
        other.store.clock().advance(if bed.url.as_ref() == "memory:" { Duration::ZERO } else { secs(HOUR) });
        let start = Arc::new(Barrier::new(8));
        let sweepers: Vec<_> = (0..8)
            .map(|n| {
                let (bed, start) = (if n % 2 == 0 { bed.clone() } else { other.clone() }, Arc::clone(&start));
                tokio::spawn(async move {
                    start.wait().await;
                    bed.sweep().await.ticks
                })
            })
            .collect();
        let mut ticks = 0;
        for sweeper in sweepers {
            ticks += sweeper.await.expect("no panic");
        }
        ticks += bed.settle().await;
        assert_eq!(ticks, names.len(), "round {round}");
        for name in &names {
            let ticks = bed.ticks_of(name).await;
            assert_eq!(ticks.len(), round, "{name}: {ticks:?}");
            assert_eq!(ticks.iter().collect::<BTreeSet<_>>().len(), round, "{name}: {ticks:?}");
        }
    }
    assert_eq!(bed.queue("default").await.pending, 100);
}

async fn clocks_that_disagree_double_nothing(bed: Bed) {
    bed.schedule(every("s", 60)).await;
    let ahead = bed.another_process().await;
    if bed.url.as_ref() != "memory:" {
        ahead.advance(30);
    }
    for _ in 0..20 {
        bed.advance(20);
        if bed.url.as_ref() != "memory:" {
            ahead.advance(20);
        }
        ahead.settle().await;
        bed.settle().await;
        // Whoever is behind plans no tick that has a task.
        bed.pause("s", true).await;
        bed.pause("s", false).await;
    }
    let ticks = bed.ticks_of("s").await;
    assert!((6..=8).contains(&ticks.len()), "{ticks:?}");
    assert!(ticks.windows(2).all(|pair| seconds_between(pair[0], pair[1]) == 60), "{ticks:?}");
}

async fn a_schedule_saved_again_keeps_its_next_tick_and_one_with_other_times_does_not(bed: Bed) {
    let first = bed.schedule(every("s", HOUR)).await;
    bed.advance(HOUR / 4 - 10);
    let again = bed.schedule(Schedule { missed: Missed::RunOnce, ..every("s", HOUR) }).await;
    assert_eq!((again.next_at, again.missed), (first.next_at, Missed::RunOnce));
    let late = bed.schedule(every("late", HOUR / 4)).await.next_at;
    bed.advance(HOUR / 4 + 10);
    assert_eq!(bed.schedule(every("late", HOUR / 4)).await.next_at, late);
    bed.sweep().await;
    assert_eq!(Some(bed.ticks_of("late").await[0]), late, "a tick that has come is not forgotten");
    assert!(bed.store.remove_schedule("default", "late").await.expect("the store answers"));
    let task = NewTask::new("g", &"other");
    let other = bed.schedule(Schedule::every("s", secs(HOUR), task)).await;
    assert_eq!((other.next_at, other.task.handler.as_str()), (first.next_at, "g"));
    let moved = bed.schedule(every("s", HOUR * 2)).await;
    let until = seconds_between(first.next_at.expect("planned"), moved.next_at.expect("planned"));
    assert!((HOUR as i64 * 3 / 2..HOUR as i64 * 3 / 2 + 60).contains(&until), "{until}");
    bed.pass(HOUR).await;
    assert!(bed.made_by("s").await.is_empty(), "the old tick is gone");
    bed.pass(HOUR).await;
    assert_eq!(bed.made_by("s").await.len(), 1);
    let kept = bed.schedule(every("s", HOUR)).await;
    assert_eq!(kept.last_task, Some(bed.made_by("s").await[0].id), "what it did is not forgotten");
}

async fn a_paused_schedule_rests_and_makes_nothing_up(bed: Bed) {
    for missed in [Missed::Skip, Missed::RunOnce] {
        let name = format!("{missed:?}");
        bed.schedule(every(&name, HOUR).missed(missed)).await;
        let paused = bed.pause(&name, true).await.expect("there");
        assert!(paused.paused && paused.next_at.is_none());
        bed.pass(HOUR * 10).await;
        let again = bed.schedule(every(&name, HOUR).missed(missed)).await;
        assert!(again.paused, "saving it again does not wake it");
        let resumed = bed.pause(&name, false).await.expect("there");
        assert!(!resumed.paused && resumed.next_at.expect("planned") > bed.store.clock().now());
        bed.sweep().await;
        assert!(bed.made_by(&name).await.is_empty());
        bed.pass(HOUR).await;
        assert_eq!(bed.made_by(&name).await.len(), 1);
        bed.pause(&name, true).await.expect("there");
    }
    let born = bed.schedule(every("born", 60).paused()).await;
    assert!(born.paused && born.next_at.is_none());
    assert_eq!(bed.pass(HOUR).await.ticks, 0);
}

async fn missed_ticks_are_skipped_or_run_once(bed: Bed) {
    let skip = bed.schedule(every("skip", HOUR)).await;
    let once = bed.schedule(every("once", HOUR).missed(Missed::RunOnce)).await;
    bed.advance(HOUR * 10 + HOUR / 2);
    assert_eq!(bed.settle().await, 2);
    assert!(bed.ticks_of("skip").await.is_empty());
    let error = bed.schedule_named("skip").await.last_error.expect("says so");
    assert!(error.contains("missed") && error.contains(&skip.next_at.expect("planned").to_string()), "{error}");
    let newest = bed.ticks_of("once").await;
    assert_eq!(newest.len(), 1);
    assert_eq!(seconds_between(once.next_at.expect("planned"), newest[0]), HOUR as i64 * 9);
    // From then on they go on as if nothing had been.
    for name in ["skip", "once"] {
        assert_eq!(bed.schedule_named(name).await.next_at.map(|next| next > bed.store.clock().now()), Some(true));
    }
    bed.pass(HOUR / 2).await;
    bed.settle().await;
    assert_eq!((bed.ticks_of("skip").await.len(), bed.ticks_of("once").await.len()), (1, 2));
    assert_eq!(bed.schedule_named("skip").await.last_error, None);
}

async fn ticks_that_are_a_little_late_all_fire(bed: Bed) {
    let saved = bed.schedule(every("s", 10)).await;
    bed.advance(55);
    bed.settle().await;
    let ticks = bed.ticks_of("s").await;
    assert_eq!(ticks.first(), saved.next_at.as_ref());
    assert_eq!(ticks.len(), 5);
    assert!(ticks.windows(2).all(|pair| seconds_between(pair[0], pair[1]) == 10), "{ticks:?}");
}

async fn intervals_do_not_drift(bed: Bed) {
    let saved = bed.schedule(every("s", 60)).await;
    for late in [1, 17, 42, 3, 59] {
        bed.pass(60 + late).await;
        bed.settle().await;
    }
    let (first, ticks) = (saved.next_at.expect("planned"), bed.ticks_of("s").await);
    assert!(ticks.len() >= 5, "{ticks:?}");
    assert!(
        ticks.iter().all(|tick| (tick.as_microsecond() - first.as_microsecond()) % 60_000_000 == 0),
        "{ticks:?}"
    );
}

async fn cron_fires_at_its_times_over_months(bed: Bed) {
    let zone = jiff::tz::TimeZone::get("Europe/Berlin").expect("known");
    let schedule = Schedule::cron("nightly", "30 2 * * *", NewTask::new("h", &1)).time_zone("Europe/Berlin");
    let mut next = bed.schedule(schedule).await.next_at.expect("planned");
    let days = 400;
    for _ in 0..days {
        bed.move_to(next);
        bed.sweep().await;
        next = bed.schedule_named("nightly").await.next_at.expect("planned");
    }
    let shown: Vec<_> = bed.ticks_of("nightly").await.iter().map(|tick| tick.to_zoned(zone.clone())).collect();
    let dates: BTreeSet<_> = shown.iter().map(|at| at.date()).collect();
    assert_eq!((shown.len(), dates.len()), (days, days), "one a day, through both changes of the clocks");
    let odd: Vec<_> = shown.iter().filter(|at| (at.hour(), at.minute()) != (2, 30)).collect();
    assert!((1..=2).contains(&odd.len()) && odd.iter().all(|at| (at.hour(), at.minute()) == (3, 0)), "{odd:?}");
}

async fn a_full_queue_costs_the_tick_and_says_so(bed: Bed) {
    bed.configure_queue("q", QueueSettings { max_pending: 1, ..QueueSettings::default() }).await;
    bed.submit(NewTask::new("h", &1).queue("q")).await;
    bed.schedule(Schedule::every("s", secs(HOUR), NewTask::new("h", &2).queue("q"))).await;
    bed.schedule(every("free", HOUR)).await;
    let tick = bed.schedule_named("s").await.next_at.expect("planned");
    bed.pass(HOUR + 5).await;
    bed.settle().await;
    let after = bed.schedule_named("s").await;
    let error = after.last_error.clone().expect("says why");
    assert!(error.contains("queue 'q' is full") && error.contains(&tick.to_string()), "{error}");
    assert_eq!((after.last_at, after.last_task), (None, None));
    assert_eq!(seconds_between(tick, after.next_at.expect("planned")), HOUR as i64);
    assert_eq!((bed.made_by("s").await.len(), bed.queue("q").await.pending), (0, 1));
    assert_eq!(bed.made_by("free").await.len(), 1, "others are not held up");
    let refused = bed.try_submit(&NewTask::new("h", &3).queue("q")).await;
    assert!(matches!(refused, Err(SubmitRefused::QueueFull { .. })));
    bed.end_one_of("q").await;
    bed.pass(HOUR).await;
    bed.settle().await;
    assert_eq!((bed.made_by("s").await.len(), bed.schedule_named("s").await.last_error), (1, None));
}

async fn what_a_sweep_puts_back_in_line_counts_for_the_ticks_it_fires(bed: Bed) {
    bed.configure_queue("q", QueueSettings { max_pending: 1, ..QueueSettings::default() }).await;
    bed.submit(NewTask::new("h", &1).queue("q")).await;
    assert_eq!(bed.claim(1).await.len(), 1);
    let often = LEASE.as_secs() + 5;
    bed.schedule(Schedule::every("s", secs(often), NewTask::new("h", &2).queue("q"))).await;
    // One sweep takes the lost lease back, and finds the queue full because of it.
    let swept = bed.pass(often + 1).await;
    assert_eq!((swept.expired, swept.ticks), (1, 1));
    assert_eq!((bed.queue("q").await.pending, bed.made_by("s").await.len()), (1, 0));
}

async fn a_handler_that_nobody_has_costs_the_tick_and_says_so(bed: Bed) {
    bed.schedule(Schedule::every("s", secs(HOUR), NewTask::new("nobody", &1))).await;
    bed.schedule(every("known", HOUR)).await;
    bed.pass(HOUR + 5).await;
    bed.settle().await;
    let error = bed.schedule_named("s").await.last_error.expect("says why");
    assert!(error.contains("'nobody'"), "{error}");
    assert_eq!((bed.made_by("s").await.len(), bed.made_by("known").await.len()), (0, 1));
    bed.store.register(&worker(&["nobody"])).await.expect("registered");
    bed.pass(HOUR).await;
    bed.settle().await;
    assert_eq!((bed.made_by("s").await.len(), bed.schedule_named("s").await.last_error), (1, None));
}

async fn another_process_goes_on_where_one_stopped(bed: Bed) {
    let saved = bed.schedule(every("s", HOUR)).await;
    bed.pass(HOUR + 1).await;
    let other = bed.another_process().await;
    assert_eq!(other.sweep().await.ticks, 0, "that tick is done");
    let seen = other.schedule_named("s").await;
    assert_eq!((seen.last_at, seen.when), (saved.next_at, saved.when));
    other.pass(HOUR).await;
    other.settle().await;
    assert_eq!(bed.ticks_of("s").await.len(), 2);
    assert!(other.store.remove_schedule("default", "s").await.expect("the store answers"));
    assert_eq!(bed.pass(HOUR * 3).await.ticks, 0);
    assert_eq!(bed.made_by("s").await.len(), 2, "its tasks stay");
}

async fn a_tenant_neither_sees_nor_touches_anothers_schedules(bed: Bed) {
    let of = |tenant: &str, seconds| Schedule { tenant: tenant.to_owned(), ..every("s", seconds) };
    bed.schedule(of("default", HOUR)).await;
    bed.schedule(of("acme", HOUR * 2)).await;
    assert_eq!(bed.store.schedules("acme").await.expect("the store answers").len(), 1);
    assert!(bed.store.schedules("other").await.expect("the store answers").is_empty());
    assert!(bed.store.pause_schedule("other", "s", true).await.expect("the store answers").is_none());
    assert!(!bed.store.remove_schedule("other", "s").await.expect("the store answers"));
    bed.store.pause_schedule("acme", "s", true).await.expect("the store answers").expect("there");
    assert!(!bed.schedule_named("s").await.paused);
    bed.store.pause_schedule("acme", "s", false).await.expect("the store answers").expect("there");
    bed.pass(HOUR * 2 + 5).await;
    bed.settle().await;
    let theirs = bed.store.list("acme", &Filter::default()).await.expect("the store answers").tasks;
    assert_eq!((theirs.len(), theirs[0].tenant.as_str(), theirs[0].state), (1, "acme", State::Pending));
    assert!(bed.store.remove_schedule("acme", "s").await.expect("the store answers"));
    bed.schedule_named("s").await;
}

async fn hostile_names_are_exact_and_hostile_requests_store_nothing(bed: Bed) {
    let names =
        ["a", "A", "a'b", "a\"b", "a%", "a_", "a\\", "é", "e\u{301}", "🦀", "{a}", "a,b", "';--", "\u{feff}"];
    for name in names {
        bed.schedule(every(name, HOUR)).await;
    }
    bed.pass(HOUR + 1).await;
    bed.settle().await;
    for name in names {
        assert_eq!(bed.made_by(name).await.len(), 1, "{name}");
        assert_eq!(bed.schedule_named(name).await.task.input.get(), serde_json::json!(name).to_string());
        assert!(bed.store.remove_schedule("default", name).await.expect("the store answers"), "{name}");
    }
    let task = || NewTask::new("h", &1);
    for bad in [
        every("", 60),
        every("a b", 60),
        every("a/b", 60),
        every("nul\0", 60),
        every(&"n".repeat(129), 60),
        every("s", 0),
        Schedule { when: When::Every(Duration::MAX), ..every("s", 60) },
        Schedule { tenant: "nul\0".into(), ..every("s", 60) },
        Schedule::cron("s", "* * * *", task()),
        Schedule::cron("s", "0 0 31 2 *", task()),
        Schedule::cron("s", "\0", task()),
        Schedule::cron("s", "0 0 * * *", task()).time_zone("../etc/passwd"),
        Schedule::cron("s", "0 0 * * *", task().key("k")),
        Schedule::cron("s", "0 0 * * *", task().queue("q\0")),
    ] {
        bed.store.save_schedule(&bad).await.expect("the store answers").expect_err("refused");
    }
    assert!(bed.store.schedules("default").await.expect("the store answers").is_empty());
    assert!(bed.store.schedules("default\0").await.expect("the store answers").is_empty());
    assert!(bed.pause("s\0", true).await.is_none());
    assert!(!bed.store.remove_schedule("default", "s\0").await.expect("the store answers"));
}

async fn a_sweep_knows_when_the_next_tick_comes(bed: Bed) {
    bed.schedule(every("s", 600)).await;
    let due = bed.sweep().await.next_due_in.expect("known");
    assert!((500_000_000..=600_000_000).contains(&due), "{due}");
    bed.pause("s", true).await;
    assert_eq!(bed.sweep().await.next_due_in, None);
}

async fn many_schedules_fire_in_bounded_steps(bed: Bed) {
    for n in 0..25 {
        bed.schedule(every(&format!("s{n}"), HOUR)).await;
    }
    bed.advance(HOUR + 5);
    let mut ticks = Vec::new();
    while ticks.iter().sum::<usize>() < 25 {
        assert!(ticks.len() < 10, "it comes to an end: {ticks:?}");
        ticks.push(bed.store.sweep(10, true).await.expect("the store answers").ticks);
    }
    assert_eq!(ticks, [10, 10, 5]);
    assert_eq!(bed.queue("default").await.pending, 25);
}

async fn schedules_saved_at_the_same_moment_are_one(bed: Bed) {
    let start = Arc::new(Barrier::new(10));
    let savers: Vec<_> = (0..10)
        .map(|_| {
            let (bed, start) = (bed.clone(), Arc::clone(&start));
            tokio::spawn(async move {
                start.wait().await;
                bed.schedule(every("s", HOUR)).await.next_at
            })
        })
        .collect();
    let mut planned = BTreeSet::new();
    for saver in savers {
        planned.insert(saver.await.expect("no panic"));
    }
    assert_eq!(planned.len(), 1, "all were told the same next tick");
}

async fn a_tenant_has_at_most_so_many_schedules(bed: Bed) {
    for n in 0..MAX_SCHEDULES {
        bed.schedule(every(&format!("s{n}"), HOUR).paused()).await;
    }
    let one_more = every("one-more", HOUR);
    let refused = bed.store.save_schedule(&one_more).await.expect("the store answers").expect_err("refused");
    assert_eq!(refused.field, "schedules");
    bed.schedule(every("s0", HOUR * 2)).await;
    bed.schedule(Schedule { tenant: "other".into(), ..one_more.clone() }).await;
    assert_eq!(bed.store.schedules("default").await.expect("the store answers").len(), MAX_SCHEDULES);
    assert!(bed.store.remove_schedule("default", "s1").await.expect("the store answers"));
    bed.schedule(one_more).await;
}

on_every_store![
    a_schedule_is_saved_listed_and_removed,
    a_tick_makes_one_task_as_the_template_says,
    a_tick_fires_once_however_many_sweep,
    clocks_that_disagree_double_nothing,
    a_schedule_saved_again_keeps_its_next_tick_and_one_with_other_times_does_not,
    a_paused_schedule_rests_and_makes_nothing_up,
    missed_ticks_are_skipped_or_run_once,
    ticks_that_are_a_little_late_all_fire,
    intervals_do_not_drift,
    cron_fires_at_its_times_over_months,
    a_full_queue_costs_the_tick_and_says_so,
    what_a_sweep_puts_back_in_line_counts_for_the_ticks_it_fires,
    a_handler_that_nobody_has_costs_the_tick_and_says_so,
    another_process_goes_on_where_one_stopped,
    a_tenant_neither_sees_nor_touches_anothers_schedules,
    hostile_names_are_exact_and_hostile_requests_store_nothing,
    a_sweep_knows_when_the_next_tick_comes,
    many_schedules_fire_in_bounded_steps,
    schedules_saved_at_the_same_moment_are_one,
    a_tenant_has_at_most_so_many_schedules,
];

/// Runs statements behind the store's back.
async fn tamper(bed: &Bed, statements: &str) {
    if let Some(path) = bed.url.strip_prefix("sqlite:") {
        let connection = Connection::open(path).expect("it opens");
        connection.busy_timeout(secs(10)).expect("set");
        return connection.execute_batch(statements).expect("it runs");
    }
    let (client, connection) = tokio_postgres::connect(&bed.url, NoTls).await.expect("the test server answers");
    tokio::spawn(connection);
    client.batch_execute(statements).await.expect("it runs");
}

/// A schedule that cannot be moved on, and one whose task cannot be logged: nothing of either is
/// left, and the tick fires once when the store is whole again.
async fn nothing_is_left_of_a_tick_that_cannot_be_written_whole(bed: Bed, break_it: &str, mend_it: &str) {
    let saved = bed.schedule(every("s", HOUR)).await;
    bed.advance(HOUR + 1);
    tamper(&bed, break_it).await;
    bed.store.sweep(10, true).await.expect_err("it cannot be written");
    tamper(&bed, mend_it).await;
    assert!(bed.made_by("s").await.is_empty());
    assert_eq!(bed.schedule_named("s").await.next_at, saved.next_at);
    bed.settle().await;
    assert_eq!((bed.made_by("s").await.len(), bed.queue("default").await.pending), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tick_is_written_whole_or_not_at_all_on_sqlite() {
    on_sqlite(|bed| async move {
        let stuck = "CREATE TRIGGER stuck BEFORE UPDATE ON schedules BEGIN SELECT RAISE(ABORT, 'stuck'); END";
        nothing_is_left_of_a_tick_that_cannot_be_written_whole(bed, stuck, "DROP TRIGGER stuck").await;
    })
    .await;
    on_sqlite(|bed| async move {
        let stuck = "CREATE TRIGGER stuck BEFORE INSERT ON log BEGIN SELECT RAISE(ABORT, 'stuck'); END";
        nothing_is_left_of_a_tick_that_cannot_be_written_whole(bed, stuck, "DROP TRIGGER stuck").await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tick_is_written_whole_or_not_at_all_on_postgres() {
    for stuck in ["UPDATE ON schedules", "INSERT ON log"] {
        on_postgres(move |bed| async move {
            let break_it = format!(
                "CREATE FUNCTION stuck() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN RAISE EXCEPTION 'stuck' USING ERRCODE = '22000'; END $$;
                 CREATE TRIGGER stuck BEFORE {stuck} FOR EACH ROW EXECUTE FUNCTION stuck()"
            );
            let mend_it = "DROP FUNCTION stuck CASCADE";
            nothing_is_left_of_a_tick_that_cannot_be_written_whole(bed, &break_it, mend_it).await;
        })
        .await;
    }
}

async fn a_row_that_cannot_be_understood_holds_nothing_up(bed: Bed) {
    bed.schedule(every("odd", HOUR)).await;
    bed.schedule(every("s", HOUR)).await;
    let odd = r#"UPDATE schedules SET plan = '{"when":"full moon"}' WHERE name = 'odd'"#;
    tamper(&bed, odd).await;
    bed.pass(HOUR + 1).await;
    bed.settle().await;
    assert_eq!((bed.made_by("s").await.len(), bed.made_by("odd").await.len()), (1, 0));
    assert_eq!(bed.store.schedules("default").await.expect("the store answers").len(), 1);
    bed.schedule(every("odd", HOUR)).await;
    bed.pass(HOUR + 1).await;
    bed.settle().await;
    assert_eq!(bed.made_by("odd").await.len(), 1, "saved again, it goes on");
    tamper(&bed, odd).await;
    assert!(bed.store.remove_schedule("default", "odd").await.expect("the store answers"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_cannot_be_understood_holds_nothing_up_on_sqlite() {
    on_sqlite(a_row_that_cannot_be_understood_holds_nothing_up).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_cannot_be_understood_holds_nothing_up_on_postgres() {
    on_postgres(a_row_that_cannot_be_understood_holds_nothing_up).await;
}
