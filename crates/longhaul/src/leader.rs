//! Leadership: of all processes with a worker, one fires the schedules.
//!
//! By the store alone nobody needs to lead: whoever comes first fires a tick, in one transaction, and the
//! others skip it. With a lock service, the processes take turns by it, so that only one looks for ticks.
//! It is not what makes a tick fire once (the store's transaction does): so when the service does not
//! answer everyone fires, and a leader that hangs costs seconds, not correctness.

use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};
use uuid::Uuid;

use crate::engine::Engine;
use crate::lock::{LockClaim, LockService, LockServiceError, Take};
use crate::sessions::within;

/// How long a leader that gives no sign of life stays it.
const TTL: Duration = Duration::from_secs(4);
/// How often it gives one, and how often the others try.
const EVERY: Duration = Duration::from_secs(1);
/// How long an answer is waited for.
const CALL: Duration = Duration::from_millis(900);
/// The name under which the store keeps what its processes call themselves together.
const CLUSTER: &str = "cluster";

/// Whether this process fires schedules.
pub(crate) struct Leader {
    /// `None`: nobody leads here, so everyone does.
    seat: Option<Mutex<Seat>>,
}

struct Seat {
    leads: bool,
    /// When the process last did what was due. One that cannot, because it has lost the store, must not lead.
    swept: Instant,
}

impl Leader {
    /// Everyone fires.
    pub(crate) fn nobody() -> Arc<Self> {
        Arc::new(Self { seat: None })
    }

    /// Nobody here fires before the service was asked.
    pub(crate) fn by_service() -> Arc<Self> {
        Arc::new(Self { seat: Some(Mutex::new(Seat { leads: false, swept: Instant::now() })) })
    }

    /// Whether ticks that have come are fired here.
    pub(crate) fn fires(&self) -> bool {
        self.seat.as_ref().is_none_or(|seat| lock(seat).leads)
    }

    /// What was due was done.
    pub(crate) fn swept(&self) {
        if let Some(seat) = &self.seat {
            lock(seat).swept = Instant::now();
        }
    }

    fn set(&self, leads: bool) {
        if let Some(seat) = &self.seat {
            lock(seat).leads = leads;
        }
    }

    fn can_lead(&self) -> bool {
        self.seat.as_ref().is_some_and(|seat| lock(seat).swept.elapsed() < TTL)
    }
}

fn lock(seat: &Mutex<Seat>) -> MutexGuard<'_, Seat> {
    // Each change of it is one assignment, also before a panic.
    seat.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs for the lead until it is told to stop, and resigns then; what it comes to is in `leader`.
pub(crate) async fn campaign(
    engine: Arc<Engine>,
    service: Arc<dyn LockService>,
    leader: Arc<Leader>,
    stop: impl Future<Output = ()>,
) {
    let owner = Uuid::now_v7().to_string();
    let name = format!("leaders/{}/schedules", cluster(&engine).await);
    let claim = LockClaim { name: &name, owner: &owner, token: None, ttl: TTL };
    let mut pace = tokio::time::interval(EVERY);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut told = None;
    tokio::pin!(stop);
    loop {
        tokio::select! {
            () = &mut stop => break,
            _ = pace.tick() => {}
        }
        let leads = ask(&*service, &claim, leader.can_lead()).await;
        leader.set(leads.as_ref().copied().unwrap_or(true));
        let news = leads.as_ref().ok().copied();
        if told.replace(news) != Some(news) {
            match leads {
                Ok(true) => tracing::info!("this process fires the schedules"),
                Ok(false) => tracing::debug!("another process fires the schedules"),
                Err(error) => tracing::warn!(%error, "nobody leads; every process fires the schedules"),
            }
        }
    }
    // Who stops in peace lets the next one lead at once; should that fail, it leads when the time has passed.
    let _ = within(service.name(), CALL, service.release(&claim)).await;
}

async fn ask(service: &dyn LockService, claim: &LockClaim<'_>, can_lead: bool) -> Result<bool, LockServiceError> {
    let call = async {
        if can_lead {
            return Ok(service.take(claim).await? == Take::Taken);
        }
        service.release(claim).await?;
        Ok(false)
    };
    within(service.name(), CALL, call).await
}

/// What tells this store's processes from those of other stores at the same service. Asked until the store
/// answers.
async fn cluster(engine: &Engine) -> String {
    loop {
        match engine.store.kept_secret(CLUSTER, &Uuid::now_v7().to_string()).await {
            Ok(cluster) => return cluster,
            Err(error) => tracing::debug!(%error, "trying again"),
        }
        tokio::time::sleep(EVERY).await;
    }
}
