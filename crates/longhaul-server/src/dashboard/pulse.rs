//! How many tasks ended in each of the last sixty minutes, and how long they took.
//!
//! No store keeps such numbers, so they are counted here, for the tenants that someone looks at: from the tasks that have
//! ended already, as far as the newest of them tell, and then from the feed of events. It takes a few kilobytes for each
//! tenant, and ends when nobody has looked for a while.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use longhaul::{Client, Event, Filter, State, TaskId};

use crate::problem::Problem;
use crate::state::App;

/// How far back it goes.
pub(super) const MINUTES: usize = 60;
/// How many times of one minute are kept; of more, some at random.
const SAMPLES: usize = 512;
/// How many tasks that have ended already are read, of each final state.
const SEED: usize = 500;
/// For how many tenants at once.
const TENANTS: usize = 32;
/// How long it goes on when nobody looks.
const IDLE: Duration = Duration::from_secs(600);

/// One minute.
#[derive(Clone, Debug, Default)]
pub(super) struct Minute {
    /// Its number since 1970.
    number: i64,
    pub(super) completed: u64,
    pub(super) failed: u64,
    pub(super) cancelled: u64,
    /// How long the tasks took from submit to end, seconds; some of them when there are many.
    took: Vec<f32>,
}

impl Minute {
    /// The time below which this part of the tasks stayed.
    pub(super) fn quantile(&self, part: f64) -> Option<f64> {
        let mut took = self.took.clone();
        took.sort_by(f32::total_cmp);
        let place = ((took.len() as f64 * part).ceil() as usize).clamp(1, took.len().max(1)) - 1;
        took.get(place).map(|&seconds| f64::from(seconds))
    }

    pub(super) fn ended(&self) -> u64 {
        self.completed + self.failed + self.cancelled
    }
}

/// The last minutes of a tenant, oldest first, without those in which nothing ended.
#[derive(Default)]
struct Minutes(VecDeque<Minute>);

impl Minutes {
    fn count(&mut self, state: State, at: Timestamp, took: Option<f64>) {
        let number = at.as_second() / 60;
        let place = self.0.partition_point(|minute| minute.number < number);
        if self.0.get(place).is_none_or(|minute| minute.number != number) {
            self.0.insert(place, Minute { number, ..Minute::default() });
        }
        let minute = &mut self.0[place];
        match state {
            State::Completed => minute.completed += 1,
            State::Failed => minute.failed += 1,
            _ => minute.cancelled += 1,
        }
        if let Some(took) = took.filter(|took| *took >= 0.0) {
            let took = took as f32;
            if minute.took.len() < SAMPLES {
                minute.took.push(took);
            } else {
                // Each of the minute's tasks is as likely to be kept.
                let place = rand::random_range(0..minute.ended() as usize);
                if let Some(kept) = minute.took.get_mut(place) {
                    *kept = took;
                }
            }
        }
        while self.0.len() > MINUTES {
            self.0.pop_front();
        }
    }

    /// All minutes up to this time, also the empty ones.
    fn until(&self, now: Timestamp) -> Vec<Minute> {
        let last = now.as_second() / 60;
        let first = last + 1 - MINUTES as i64;
        (first..=last)
            .map(|number| {
                let known = self.0.iter().find(|minute| minute.number == number);
                known.cloned().unwrap_or(Minute { number, ..Minute::default() })
            })
            .collect()
    }
}

struct Pulse {
    minutes: Mutex<Minutes>,
    /// When someone looked last.
    looked: Mutex<Instant>,
}

/// One for each tenant that someone looks at.
#[derive(Default)]
pub(crate) struct Pulses(Mutex<HashMap<String, Arc<Pulse>>>);

impl Pulses {
    /// The last minutes of a tenant.
    pub(super) async fn minutes(&self, app: &App, client: &Client, tenant: &str) -> Result<Vec<Minute>, Problem> {
        let now = client.clock().now();
        let known = lock(&self.0).get(tenant).cloned();
        let pulse = match known {
            Some(pulse) => pulse,
            None => self.begin(app, client, tenant).await?,
        };
        *lock(&pulse.looked) = Instant::now();
        let minutes = lock(&pulse.minutes).until(now);
        Ok(minutes)
    }

    async fn begin(&self, app: &App, client: &Client, tenant: &str) -> Result<Arc<Pulse>, Problem> {
        // First the feed, then what ended before it: nothing falls in between.
        let events = client.all_events(None).await?;
        let events = events
            .types(["task.completed", "task.failed", "task.cancelled"])
            .map_err(|invalid| Problem::new("internal", invalid.to_string()))?;
        let minutes = seed(client).await?;
        let pulse = Arc::new(Pulse { minutes: Mutex::new(minutes), looked: Mutex::new(Instant::now()) });
        {
            let mut pulses = lock(&self.0);
            if let Some(known) = pulses.get(tenant) {
                return Ok(Arc::clone(known));
            }
            if pulses.len() >= TENANTS {
                // Shown once, and not followed.
                return Ok(pulse);
            }
            pulses.insert(tenant.to_owned(), Arc::clone(&pulse));
        }
        let (app, followed, tenant) = (app.clone(), Arc::clone(&pulse), tenant.to_owned());
        tokio::spawn(async move {
            let stopping = app.stopping().clone();
            tokio::select! {
                () = follow(events, &followed) => {}
                () = stopping.cancelled() => {}
            }
            lock(&app.pulses().0).remove(&tenant);
        });
        Ok(pulse)
    }
}

/// Counts what ends, until nobody has looked for a while or the feed fails; who looks then begins anew.
async fn follow(mut events: longhaul::AllEvents, pulse: &Pulse) {
    loop {
        match tokio::time::timeout(IDLE / 10, events.next()).await {
            Ok(Ok((event, _))) => {
                if let Some(state) = ended(&event) {
                    let took =
                        created(event.task_id).map(|created| event.time.duration_since(created).as_secs_f64());
                    lock(&pulse.minutes).count(state, event.time, took);
                }
            }
            Ok(Err(error)) => {
                tracing::debug!(%error, "the feed for the charts failed");
                return;
            }
            Err(_) => {}
        }
        if lock(&pulse.looked).elapsed() > IDLE {
            return;
        }
    }
}

fn ended(event: &Event) -> Option<State> {
    match event.kind.as_str() {
        "task.completed" => Some(State::Completed),
        "task.failed" => Some(State::Failed),
        "task.cancelled" => Some(State::Cancelled),
        _ => None,
    }
}

/// When a task was submitted, as its id has it; the ids of children have not.
fn created(id: TaskId) -> Option<Timestamp> {
    let (seconds, nanos) = id.0.get_timestamp()?.to_unix();
    Timestamp::new(i64::try_from(seconds).ok()?, i32::try_from(nanos).ok()?).ok()
}

/// What the newest tasks that have ended already tell.
async fn seed(client: &Client) -> Result<Minutes, Problem> {
    let mut minutes = Minutes::default();
    for state in [State::Completed, State::Failed, State::Cancelled] {
        let filter = Filter { state: Some(state), limit: SEED, ..Filter::default() };
        for task in client.page(&filter).await?.tasks {
            if let Some(at) = task.finished_at {
                minutes.count(state, at, Some(at.duration_since(task.created_at).as_secs_f64()));
            }
        }
    }
    Ok(minutes)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Counts and times: a panic leaves them usable.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(minute: i64) -> Timestamp {
        Timestamp::from_second(minute * 60 + 5).expect("a time")
    }

    #[test]
    fn minutes_are_counted_in_whatever_order_tasks_are_read() {
        let mut minutes = Minutes::default();
        for minute in [1_000, 998, 1_000, 999] {
            minutes.count(State::Completed, at(minute), Some(2.0));
        }
        minutes.count(State::Failed, at(1_000), Some(8.0));
        let shown = minutes.until(at(1_000));
        assert_eq!(shown.len(), MINUTES);
        let [before, last] = [&shown[MINUTES - 3], &shown[MINUTES - 1]];
        assert_eq!((before.completed, last.completed, last.failed), (1, 2, 1));
        assert_eq!((last.quantile(0.5), last.quantile(0.95)), (Some(2.0), Some(8.0)));
        assert_eq!(shown[0].quantile(0.5), None);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut minutes = Minutes::default();
        for minute in 0..200 {
            for _ in 0..50 {
                minutes.count(State::Completed, at(minute), Some(1.0));
            }
        }
        for _ in 0..2_000 {
            minutes.count(State::Completed, at(199), Some(1.0));
        }
        assert_eq!(minutes.0.len(), MINUTES);
        assert_eq!(minutes.0.back().map(|minute| (minute.took.len(), minute.completed)), Some((SAMPLES, 2_050)));
    }
}
