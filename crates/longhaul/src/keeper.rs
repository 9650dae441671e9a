//! The keeper: does what is due, in every process that has a worker. Sweeps need no leader; what
//! one process does, the others skip. Only for schedules there may be one ([`Leader`]).

use std::sync::Arc;
use std::time::Duration;

use crate::engine::Engine;
use crate::leader::Leader;

/// How many tasks one sweep takes on.
const SWEEP_LIMIT: usize = 500;
/// The longest pause between sweeps: how late a timer or a schedule that was set meanwhile, here or in
/// another process, can be.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// The shortest, so that a clock that stands still does not make a busy loop.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);

/// The longest pause while the store does not answer.
const MOST_PATIENCE: Duration = Duration::from_secs(5);

/// Sweeps until it is dropped.
pub(crate) async fn keep(engine: Arc<Engine>, leader: Arc<Leader>) {
    let mut patience = LONGEST_PAUSE;
    let mut due = engine.hints.on_due();
    loop {
        due.mark_unchanged();
        let swept = engine.store.sweep(SWEEP_LIMIT, leader.fires()).await;
        if let Ok(swept) = &swept {
            engine.meter.swept(swept);
            leader.swept();
            patience = LONGEST_PAUSE;
        }
        let pause = match swept {
            Ok(swept) if swept.is_full(SWEEP_LIMIT) => Duration::ZERO,
            Ok(swept) => swept
                .next_due_in
                .map_or(LONGEST_PAUSE, |micros| Duration::from_micros(micros.unsigned_abs()))
                .clamp(SHORTEST_PAUSE, LONGEST_PAUSE),
            Err(error) => {
                tracing::warn!(%error, "a sweep failed; trying again");
                patience = (patience * 2).min(MOST_PATIENCE);
                patience
            }
        };
        // The sender lives as long as the engine.
        let _ = tokio::time::timeout(pause, due.changed()).await;
    }
}
