//! `bench bus`: how fast events leave the store through a broker.

use std::time::{Duration, Instant};

use longhaul::{Client, Run, Worker};
use longhaul_bus::{Publisher, PublisherSettings, Topic};
use uuid::Uuid;

use super::scenarios::{PATIENCE, fill, open_gates, until_none};
use super::{Measured, Progress};
use crate::args::BenchArgs;
use crate::bench_worker::noop;
use crate::exit::Failure;

/// Submitted, started, completed.
const EVENTS_OF_A_TASK: usize = 3;

/// Tasks are run while a publisher has its place and does not publish; then it does.
pub(super) async fn events_out(
    client: &Client,
    args: &BenchArgs,
    progress: &Progress,
) -> Result<Measured, Failure> {
    let total = args.tasks.unwrap_or(20_000);
    let bus = longhaul_bus::connect(&args.bus).await?;
    // A topic of its own: what other runs left does not count.
    let topic = Topic::log(&format!("longhaul.bench-{}", Uuid::now_v7().simple()))?;
    let settings = PublisherSettings::new(topic);
    Publisher::keep_place(client, &settings).await?;
    open_gates(client, &["noop"]).await?;
    fill(client, "noop", &(), total, 5, progress).await?;
    let worker = Worker::new(client)
        .slots(args.workers)
        .handler("noop", |run: Run, input: ()| noop(run, input))
        .start()
        .await?;
    until_none(client, total, progress, |queue| queue.pending + queue.running).await?;
    worker.stop().await;

    let events = total * EVENTS_OF_A_TASK;
    progress.phase("publishing", events);
    let started = Instant::now();
    let publisher = Publisher::start(client, bus, settings).await?;
    loop {
        let stats = publisher.stats();
        let handled = usize::try_from(stats.handled).unwrap_or(usize::MAX);
        progress.at(handled);
        if handled >= events {
            break;
        }
        if started.elapsed() > PATIENCE {
            return Err(Failure::found(format!("{handled} of {events} events were published")));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let seconds = started.elapsed().as_secs_f64();
    let errors = usize::try_from(publisher.stats().failed).unwrap_or(usize::MAX);
    publisher.stop().await;
    Ok(Measured {
        tasks: total,
        seconds,
        per_second: events as f64 / seconds,
        errors,
        published: Some(events),
        ..Measured::default()
    })
}
