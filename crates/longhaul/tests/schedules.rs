//! A schedule on three workers over simulated days: no tick lost, none doubled.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use common::{Bed, PATIENCE};
use jiff::{Timestamp, ToSpan};
use longhaul::{Client, Filter, NewTask, Run, Schedule, State, TaskError, Worker, WorkerHandle};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

const DAYS: i64 = 6;
/// How far the clocks of the three are apart.
const OFFSETS: [u64; 3] = [0, 2, 9];

/// A schedule's name, and the moment. A task whose worker died may tell of its own a second time.
type Tick = (String, Timestamp);

/// Three processes, as far as the store can tell.
struct Three {
    clients: Vec<Client>,
    workers: Vec<Option<WorkerHandle>>,
    told: UnboundedSender<Tick>,
    heard: UnboundedReceiver<Tick>,
}

impl Three {
    async fn on(bed: &Bed) -> Self {
        let (told, heard) = unbounded_channel();
        let mut three = Self { clients: Vec::new(), workers: Vec::new(), told, heard };
        for offset in OFFSETS {
            let client = bed.another_client().await;
            // Past the grace that a database server that has just started gives.
            client.clock().advance(Duration::from_secs(60 + offset));
            three.clients.push(client);
            three.workers.push(None);
            three.start(three.workers.len() - 1).await;
        }
        three
    }

    async fn start(&mut self, n: usize) {
        let told = self.told.clone();
        let worker = Worker::new(&self.clients[n]).handler("tell", move |run: Run, name: String| {
            let told = told.clone();
            async move {
                let _ = told.send((name, run.tags()["tick"].parse().expect("a moment")));
                Ok::<_, TaskError>(())
            }
        });
        self.workers[n] = Some(worker.start().await.expect("starts"));
    }

    /// Moves all clocks until the slowest one is past the next tick; gives that of every schedule that had it.
    async fn pass_a_tick(&self) -> BTreeSet<Tick> {
        let client = &self.clients[0];
        let schedules = client.schedules().await.expect("the store answers");
        let next = schedules.iter().filter_map(|schedule| schedule.next_at).min().expect("one is planned");
        let ahead = next.as_microsecond() - client.clock().now().as_microsecond() + 1_000;
        for client in &self.clients {
            client.clock().advance(Duration::from_micros(u64::try_from(ahead).unwrap_or(0)));
        }
        schedules
            .into_iter()
            .filter(|schedule| schedule.next_at == Some(next))
            .map(|schedule| (schedule.name, next))
            .collect()
    }

    async fn stop(self) {
        for worker in self.workers.into_iter().flatten() {
            worker.stop().await;
        }
    }
}

async fn ticks_of(client: &Client, schedule: &str) -> Vec<Timestamp> {
    let tag = Some(("schedule".to_owned(), schedule.to_owned()));
    let filter = Filter { tag, oldest_first: true, limit: 1_000, ..Filter::default() };
    let tasks = client.list(&filter).await.expect("the store answers");
    assert!(tasks.len() < 1_000, "one page has them all");
    for task in &tasks {
        let task = client.wait(task.id, PATIENCE).await.expect("it ends");
        assert_eq!((task.state, task.handler.as_str()), (State::Completed, "tell"));
    }
    tasks.iter().map(|task| task.tags["tick"].parse().expect("a moment")).collect()
}

async fn no_tick_is_lost_and_none_is_doubled(bed: Bed) {
    let mut three = Three::on(&bed).await;
    let client = three.clients[0].clone();
    let task = |name: &str| NewTask::new("tell", &name);
    let begun = client.clock().now();
    let all = [
        Schedule::cron("six-hourly", "0 */6 * * *", task("six-hourly")),
        Schedule::cron("nightly", "30 2 * * *", task("nightly")).time_zone("Europe/Berlin"),
        Schedule::every("five-hourly", Duration::from_secs(5 * 3_600), task("five-hourly")),
    ];
    let mut first = BTreeMap::new();
    for (schedule, client) in all.into_iter().zip(&three.clients) {
        let saved = client.schedule(schedule).await.expect("accepted");
        first.insert(saved.name, saved.next_at.expect("planned"));
    }
    let end = begun + (DAYS * 24).hours();
    let mut passed = 0;
    while client.clock().now() < end {
        let mut expected = three.pass_a_tick().await;
        while !expected.is_empty() {
            let tick = tokio::time::timeout(PATIENCE, three.heard.recv()).await.expect("a tick is lost");
            expected.remove(&tick.expect("the workers live"));
        }
        passed += 1;
        // Now and then one of the three dies, and comes back.
        if passed % 5 == 0 {
            let n = passed / 5 % 3;
            three.workers[n].take().expect("it runs").abort();
            three.start(n).await;
        }
    }
    let now = client.clock().now();
    for (name, first) in first {
        let ticks = ticks_of(&client, &name).await;
        let expected: Vec<Timestamp> = match name.as_str() {
            "nightly" => {
                let zone = jiff::tz::TimeZone::get("Europe/Berlin").expect("known");
                let days =
                    (0..).map(|day| first.to_zoned(zone.clone()).checked_add(day.days()).expect("in range"));
                days.map(|day| day.timestamp()).take_while(|tick| *tick <= now).collect()
            }
            _ => {
                let hours = if name == "six-hourly" { 6 } else { 5 };
                (0..).map(|n| first + (n * hours).hours()).take_while(|tick| *tick <= now).collect()
            }
        };
        assert!(expected.len() >= DAYS as usize, "{name}: {expected:?}");
        assert_eq!(ticks, expected, "{name}");
    }
    three.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_workers_lose_no_tick_and_double_none_over_days_on_sqlite() {
    no_tick_is_lost_and_none_is_doubled(Bed::sqlite().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_workers_lose_no_tick_and_double_none_over_days_on_postgres() {
    if let Some(bed) = Bed::postgres().await {
        no_tick_is_lost_and_none_is_doubled(bed).await;
    }
}

#[tokio::test]
async fn a_schedule_saved_by_one_process_is_fired_by_another_within_about_a_second() {
    let bed = Bed::sqlite().await;
    let (told, mut heard) = unbounded_channel();
    let worker = Worker::new(&bed.client)
        .handler("tell", move |_run: Run, (): ()| {
            let _ = told.send(tokio::time::Instant::now());
            async { Ok::<_, TaskError>(()) }
        })
        .start()
        .await
        .expect("starts");
    let other = bed.another_client().await;
    let saved = tokio::time::Instant::now();
    other
        .schedule(Schedule::every("s", Duration::from_secs(1), NewTask::new("tell", &())))
        .await
        .expect("accepted");
    let fired = tokio::time::timeout(PATIENCE, heard.recv()).await.expect("it fires").expect("the worker lives");
    assert!(fired - saved < Duration::from_secs(5), "one interval and a moment, not {:?}", fired - saved);
    worker.stop().await;
}

#[tokio::test]
async fn the_client_creates_pauses_resumes_and_removes_and_says_what_is_wrong() {
    let client = Bed::memory().await.client;
    let task = || NewTask::new("h", &()).tenant("someone else");
    let saved = client.schedule(Schedule::cron("s", "0 9 * * 1-5", task())).await.expect("accepted");
    assert_eq!((saved.tenant.as_str(), saved.task.tenant.as_str()), ("default", "default"));
    assert!(client.for_tenant("acme").schedules().await.expect("the store answers").is_empty());
    assert!(client.pause_schedule("s").await.expect("there").paused);
    assert_eq!(client.resume_schedule("s").await.expect("there").next_at, saved.next_at);
    client.unschedule("s").await.expect("there");
    for missing in [client.pause_schedule("s").await.err(), client.unschedule("s").await.err()] {
        assert_eq!(missing.expect("gone").to_string(), "there is no schedule 's'");
    }
    let refused = client.schedule(Schedule::cron("s", "9 o'clock", task())).await.expect_err("refused");
    assert!(refused.to_string().contains("5 fields"), "{refused}");
}
