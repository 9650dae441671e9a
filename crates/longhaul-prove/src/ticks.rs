//! Schedules of the suite: one of each tenant, which fires every second while things go wrong.

use std::collections::BTreeMap;
use std::time::Duration;

use longhaul::{Client, Effect, Error, NewTask, Schedule};
use tokio::time::{Instant, sleep};

use crate::Anyhow;
use crate::program::{Ends, HANDLER, Op, Program, Step, TENANTS, marker};

/// The time between two ticks.
const EVERY: Duration = Duration::from_secs(1);
/// The name of a schedule.
const NAME: &str = "prove";
/// How long a store may be away.
const PATIENCE: Duration = Duration::from_secs(60);

/// Begins a schedule for each tenant; gives the first tick and the time between two, microseconds.
pub async fn begin(client: &Client) -> Result<BTreeMap<String, (i64, i64)>, Anyhow> {
    let mut begun = BTreeMap::new();
    for tenant in TENANTS {
        let (name, effect) = ("tick".to_owned(), Effect::Idempotent);
        let step = Step { name, effect, ms: 1, fails: 0, undo: None, verify: false, deferred: false };
        let program =
            Program { number: u64::MAX, marker: marker(tenant), ops: vec![Op::Step(step)], ends: Ends::Well };
        let schedule = Schedule::every(NAME, EVERY, NewTask::new(HANDLER, &program));
        let made = client.for_tenant(tenant).schedule(schedule).await?;
        let first = made.next_at.ok_or("a schedule has a next tick")?.as_microsecond();
        begun.insert(tenant.to_owned(), (first, i64::try_from(EVERY.as_micros())?));
    }
    Ok(begun)
}

/// Ends them, so that everything can settle.
pub async fn end(client: &Client) -> Result<(), Anyhow> {
    let until = Instant::now() + PATIENCE;
    for client in TENANTS.map(|tenant| client.for_tenant(tenant)) {
        loop {
            match client.unschedule(NAME).await {
                // Gone already: the answer to the first request was lost.
                Ok(()) | Err(Error::NoSchedule(_)) => break,
                Err(Error::Store(error)) if error.is_unavailable() && Instant::now() < until => {
                    sleep(Duration::from_millis(100)).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}
