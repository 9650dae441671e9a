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

/// Ends them once each has fired, which takes no longer than a second when all is well; so that everything can settle.
pub async fn end(client: &Client) -> Result<(), Anyhow> {
    let (fired, until) = (Instant::now() + PATIENCE / 3, Instant::now() + PATIENCE);
    for client in TENANTS.map(|tenant| client.for_tenant(tenant)) {
        loop {
            match ended(&client, Instant::now() < fired).await {
                Ok(true) => break,
                Ok(false) => {}
                Err(Error::Store(error)) if error.is_unavailable() => {}
                Err(error) => return Err(error.into()),
            }
            if Instant::now() > until {
                return Err("a schedule could not be ended: the store is not reachable".into());
            }
            sleep(Duration::from_millis(100)).await;
        }
    }
    Ok(())
}

/// Ends a schedule, unless it must fire first.
async fn ended(client: &Client, must_fire: bool) -> Result<bool, Error> {
    match client.schedules().await?.iter().find(|schedule| schedule.name == NAME) {
        Some(schedule) if must_fire && schedule.last_at.is_none() => Ok(false),
        Some(_) => client.unschedule(NAME).await.map(|()| true),
        // The answer to the first request was lost.
        None => Ok(true),
    }
}
