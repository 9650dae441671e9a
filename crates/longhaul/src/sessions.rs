//! Keeps the sessions of locks at a lock service: asks for them, keeps them alive, gives them back. Runs
//! in every process that has a worker and the service; the store hands each session to one of them at a
//! time, so a process that stops or hangs is replaced before the session ends.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};

use crate::engine::Engine;
use crate::lock::{LockClaim, LockService, LockServiceError, Take};
use crate::store::sessions::{Look, Note, Said, Stage};

/// How many sessions are looked after in one go, and how many of them at once.
const LIMIT: usize = 500;
const AT_ONCE: usize = 32;
/// The longest pause between looks: how late something is noticed that another process has to do with the
/// service.
const PAUSE: Duration = Duration::from_millis(250);
/// The longest pause while the store does not answer.
const MOST_PATIENCE: Duration = Duration::from_secs(5);

/// Beyond this no counter of tokens comes; whatever says so at a service must not use up the store's.
const MOST_TOKEN: u64 = 1 << 52;

/// How long an answer of the service is waited for: with two more tries, less than a session lasts.
pub(crate) fn call_time(ttl: Duration) -> Duration {
    ttl / 5
}

/// Looks after sessions until it is dropped.
pub(crate) async fn keep(engine: Arc<Engine>, service: Arc<dyn LockService>) {
    let ttl = service.ttl();
    // Longer than a call, so that nobody else begins while one is under way.
    let claim = ttl * 3 / 10;
    let mut pause = PAUSE;
    let mut hint = engine.hints.on_sessions();
    let mut down = false;
    loop {
        hint.mark_unchanged();
        let looked = match engine.store.due_sessions(service.name(), claim, LIMIT).await {
            Ok(looks) => look_after(&engine, &*service, looks, &mut down).await,
            Err(error) => Err(error),
        };
        pause = match looked {
            Ok(count) if count >= LIMIT => Duration::ZERO,
            Ok(_) => PAUSE,
            Err(error) => {
                tracing::warn!(%error, "sessions of locks could not be looked after; trying again");
                (pause * 2).clamp(PAUSE, MOST_PATIENCE)
            }
        };
        // The sender lives as long as the engine.
        let _ = tokio::time::timeout(pause, hint.changed()).await;
    }
}

async fn look_after(
    engine: &Engine,
    service: &dyn LockService,
    looks: Vec<Look>,
    down: &mut bool,
) -> Result<usize, crate::store::StoreError> {
    let count = looks.len();
    if count == 0 {
        return Ok(0);
    }
    let ttl = service.ttl();
    let asked = looks.into_iter().map(|look| async move {
        let said = ask(service, &look).await.unwrap_or_else(|error| Said::Failed(error.to_string()));
        Note { look, said, ttl }
    });
    let notes: Vec<Note> = stream::iter(asked).buffer_unordered(AT_ONCE).collect().await;
    tell_trouble(service.name(), &notes, down);
    engine.store.note_sessions(&notes).await?;
    Ok(count)
}

/// Does what is to be done for one session.
async fn ask(service: &dyn LockService, look: &Look) -> Result<Said, LockServiceError> {
    let name = format!("locks/{}", look.key);
    let ttl = service.ttl();
    let claim = LockClaim { name: &name, owner: &look.session, token: Some(look.token), ttl };
    let call = async {
        Ok(match look.stage {
            Stage::Asked => match service.take(&claim).await? {
                Take::Taken => Said::Taken,
                Take::Busy => Said::Busy,
                Take::Outdated { largest } if largest < MOST_TOKEN => Said::Outdated { largest },
                Take::Outdated { largest } => {
                    let why = format!(
                        "it says that the token {largest} was given, which none of us did; remove it there"
                    );
                    Said::Failed(format!("{}: {why}", service.name()))
                }
            },
            Stage::Held if service.keep(&claim).await? => Said::Kept,
            Stage::Held => Said::Lost,
            Stage::Ended => {
                service.release(&claim).await?;
                Said::Released
            }
        })
    };
    within(service.name(), call_time(ttl), call).await
}

/// An answer in time, or an error that says there was none.
pub(crate) async fn within<T>(
    service: &str,
    time: Duration,
    call: impl Future<Output = Result<T, LockServiceError>>,
) -> Result<T, LockServiceError> {
    tokio::time::timeout(time, call).await.unwrap_or_else(|_| {
        Err(LockServiceError::Unavailable { service: service.to_owned(), why: format!("no answer in {time:?}") })
    })
}

/// Says once that the service does not answer, and once that it does again.
fn tell_trouble(service: &str, notes: &[Note], down: &mut bool) {
    let failed = notes.iter().find_map(|note| match &note.said {
        Said::Failed(why) => Some(why),
        _ => None,
    });
    match (failed, *down) {
        (Some(why), false) => tracing::warn!(service, why, "the lock service does not do what it is asked"),
        (None, true) => tracing::info!(service, "the lock service answers again"),
        _ => {}
    }
    *down = failed.is_some();
}
