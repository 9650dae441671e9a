//! A subscriber that was down for long.

mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Bed, PATIENCE};
use longhaul::{NewTask, Run, TaskError, TaskId, Told, Worker};
use tokio::sync::watch;

on_every_store!(a_subscriber_that_was_down_for_ten_thousand_events_gets_them_all_in_order);

/// Each task tells six: submitted, started, three of its own, completed.
const TASKS: u64 = 1_700;
const OWN: u64 = 3;

async fn a_subscriber_that_was_down_for_ten_thousand_events_gets_them_all_in_order(bed: Bed) {
    let subscriber = || bed.client.subscriber("mail").concurrency(8);
    let mail = subscriber().start(async |_| Ok(())).await.expect("starts");
    mail.stop().await;

    let worker = Worker::new(&bed.client)
        .handler("talk", |run: Run, (): ()| async move {
            for n in 0..OWN {
                run.publish("word.said", &n).await?;
            }
            Ok::<_, TaskError>(())
        })
        .start()
        .await
        .expect("starts");
    let tasks = (0..TASKS).map(|_| NewTask::new("talk", &())).collect();
    let answers = bed.client.submit_many(tasks).await.expect("the store answers");
    let ids: Vec<TaskId> = answers.into_iter().map(|answer| answer.expect("accepted").id).collect();
    for &id in &ids {
        bed.client.wait(id, PATIENCE * 4).await.expect("it ends");
    }
    worker.stop().await;
    let mut expected = BTreeMap::new();
    for &id in &ids {
        let last = bed.client.task(id).await.expect("it is there").last_seq;
        expected.insert(id, (1..=last).collect::<Vec<u64>>());
    }
    let count: usize = expected.values().map(Vec::len).sum();
    assert!(count >= 10_000, "{count}");

    let seen: Arc<Mutex<BTreeMap<TaskId, Vec<u64>>>> = Arc::default();
    let (handled, mut all) = watch::channel(0);
    let begun = Instant::now();
    let mail = {
        let seen = Arc::clone(&seen);
        let handler = move |told: Told| {
            seen.lock().expect("no panic").entry(told.event.task_id).or_default().push(told.event.seq);
            handled.send_modify(|count| *count += 1);
            async { Ok(()) }
        };
        subscriber().start(handler).await.expect("starts")
    };
    let wait = all.wait_for(|&handled| handled >= count);
    tokio::time::timeout(Duration::from_secs(60), wait).await.expect("in time").expect("it lives");
    println!("{count} events, {:.0}/s", count as f64 / begun.elapsed().as_secs_f64());
    mail.stop().await;
    assert_eq!(*seen.lock().expect("no panic"), expected);
}

/// Written past the engine, so that it is only the reading that is measured.
const ROWS: usize = 100_000;
/// What a debug build on a busy machine reaches easily; a release build is many times faster.
const LEAST: f64 = 4_000.0;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscriber_passes_thousands_of_events_a_second_on_postgres() {
    let Some(bed) = Bed::postgres().await else { return };
    let (sql, connection) =
        tokio_postgres::connect(&bed.url, tokio_postgres::NoTls).await.expect("the test server answers");
    tokio::spawn(connection);
    sql.batch_execute(
        "INSERT INTO tasks (id, tenant, handler, queue, max_attempts, created_at, priority, rank, state, ready,
                            last_seq, updated_at, finished_at)
         SELECT gen_random_uuid(), 'default', 'h', 'default', 3, 0, 5, 0, 3, false, 4, 0, 0
         FROM generate_series(1, 25000)",
    )
    .await
    .expect("tasks");
    for seq in 1..=4 {
        // Transactions of 500 rows.
        for part in 0..50 {
            let tell = format!(
                r#"INSERT INTO log (task, seq, count, time, run, events)
                   SELECT t.id, {seq}, 1, 0, 1,
                          '[{{"type":"step.completed","step":"clean","data":{{"attempt":1,"result":"some text"}}}}]'
                   FROM (SELECT id FROM tasks ORDER BY id OFFSET {} LIMIT 500) AS t"#,
                part * 500
            );
            sql.batch_execute(&tell).await.expect("told");
        }
    }
    let (handled, mut all) = watch::channel(0);
    let begun = Instant::now();
    let bus = bed
        .client
        .subscriber("bus")
        .all_tenants()
        .from_start()
        .start_batches(move |batch| {
            handled.send_modify(|count| *count += batch.len());
            async { Ok(()) }
        })
        .await
        .expect("starts");
    let wait = all.wait_for(|&handled| handled >= ROWS);
    tokio::time::timeout(PATIENCE * 2, wait).await.expect("in time").expect("it lives");
    let rate = ROWS as f64 / begun.elapsed().as_secs_f64();
    println!("{ROWS} events, {rate:.0}/s");
    assert!(rate > LEAST, "{rate:.0} events a second");
    bus.stop().await;
    assert_eq!(bed.client.subscribers().await.expect("listed")[0].rows_behind, 0);
}
