//! Faults, switched on.

use std::collections::HashMap;
use std::fs::File;
use std::future::Future;
use std::io::Write;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::{Mutant, StoreError, TaskError};

/// All points.
pub const POINTS: &[&str] = &[
    "submit.begin",
    "submit.before_commit",
    "submit.after_commit",
    "claim.begin",
    "claim.before_commit",
    "claim.after_commit",
    "record.begin",
    "record.before_commit",
    "record.after_commit",
    "outcome.begin",
    "outcome.before_commit",
    "outcome.after_commit",
    "heartbeat.begin",
    "heartbeat.before_commit",
    "heartbeat.after_commit",
    "control.begin",
    "control.before_commit",
    "control.after_commit",
    "sweep.begin",
    "sweep.before_commit",
    "sweep.after_commit",
    "move.begin",
    "move.before_commit",
    "move.after_commit",
    "effect.before",
    "effect.after",
    "undo.before",
    "undo.after",
    "subscriber.after",
];

impl Mutant {
    /// All mutants.
    pub const ALL: [Self; 10] = [
        Self::FenceNotChecked,
        Self::EventApart,
        Self::UndoForward,
        Self::LimitReadThenWrite,
        Self::HeartbeatIgnored,
        Self::IdempotencyReadThenWrite,
        Self::LeaseByLocalClock,
        Self::OutboxByCursor,
        Self::ApprovalUnbound,
        Self::CancelLost,
    ];

    /// Its name in `LONGHAUL_MUTANT`.
    pub fn name(self) -> &'static str {
        match self {
            Self::FenceNotChecked => "fence_not_checked",
            Self::EventApart => "event_apart",
            Self::UndoForward => "undo_forward",
            Self::LimitReadThenWrite => "limit_read_then_write",
            Self::HeartbeatIgnored => "heartbeat_ignored",
            Self::IdempotencyReadThenWrite => "idempotency_read_then_write",
            Self::LeaseByLocalClock => "lease_by_local_clock",
            Self::OutboxByCursor => "outbox_by_cursor",
            Self::ApprovalUnbound => "approval_unbound",
            Self::CancelLost => "cancel_lost",
        }
    }
}

/// Whether this process, or the simulation on this thread, has the defect.
pub(crate) fn is(mutant: Mutant) -> bool {
    if let Some(simulated) = super::simulation::mutant() {
        return simulated == Some(mutant);
    }
    static SET: OnceLock<Option<Mutant>> = OnceLock::new();
    *SET.get_or_init(|| {
        let name = std::env::var("LONGHAUL_MUTANT").ok()?;
        let known = Mutant::ALL.into_iter().find(|mutant| mutant.name() == name);
        assert!(known.is_some(), "LONGHAUL_MUTANT: there is no mutant '{name}'");
        known
    }) == Some(mutant)
}

/// How far this process's wall clock is off.
pub(crate) fn clock_micros() -> i64 {
    static OFF: OnceLock<i64> = OnceLock::new();
    *OFF.get_or_init(|| {
        let Ok(text) = std::env::var("LONGHAUL_FAULTS_CLOCK") else { return 0 };
        let seconds: i64 = text.parse().expect("LONGHAUL_FAULTS_CLOCK is a number of seconds");
        seconds * 1_000_000
    })
}

/// The newest version of the schema that this process knows.
pub(crate) fn newest_schema() -> i64 {
    let Ok(text) = std::env::var("LONGHAUL_FAULTS_SCHEMA") else { return i64::MAX };
    text.parse().expect("LONGHAUL_FAULTS_SCHEMA is a version")
}

/// What happens at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The process ends, as with `kill -9`.
    Abort,
    /// The store does not answer.
    Error,
    /// It takes so long.
    Delay(Duration),
}

/// A fault to come.
#[derive(Debug)]
struct Planned {
    point: &'static str,
    kind: Kind,
    /// The first and the last time.
    turns: (u64, u64),
}

struct Plan {
    faults: Vec<Planned>,
    seen: Mutex<HashMap<&'static str, u64>>,
    fired: Option<File>,
}

impl Plan {
    /// Appends a line, which ends with this process.
    fn note(&self, what: std::fmt::Arguments<'_>) {
        if let Some(mut fired) = self.fired.as_ref() {
            let line = format!("{what} {}\n", std::process::id());
            fired.write_all(line.as_bytes()).expect("LONGHAUL_FAULTS_FIRED can be written");
        }
    }
}

fn plan() -> &'static Plan {
    static PLAN: OnceLock<Plan> = OnceLock::new();
    PLAN.get_or_init(|| {
        let text = std::env::var("LONGHAUL_FAULTS").unwrap_or_default();
        let faults = parse(&text).unwrap_or_else(|why| panic!("LONGHAUL_FAULTS: {why}"));
        let fired = std::env::var_os("LONGHAUL_FAULTS_FIRED").map(|path| {
            File::options().create(true).append(true).open(path).expect("LONGHAUL_FAULTS_FIRED opens")
        });
        Plan { faults, seen: Mutex::default(), fired }
    })
}

fn parse(text: &str) -> Result<Vec<Planned>, String> {
    text.split(',').filter(|entry| !entry.is_empty()).map(parse_one).collect()
}

fn parse_one(entry: &str) -> Result<Planned, String> {
    let (name, rest) = entry.split_once('=').ok_or_else(|| format!("'{entry}' has no '='"))?;
    let point =
        POINTS.iter().find(|point| **point == name).ok_or_else(|| format!("there is no point '{name}'"))?;
    let (kind, turns) = rest.split_once('@').unwrap_or((rest, "1.."));
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("'{text}' in '{entry}' is not a number"));
    let kind = match kind.split_once(':') {
        None if kind == "abort" => Kind::Abort,
        None if kind == "error" => Kind::Error,
        Some(("delay", millis)) => Kind::Delay(Duration::from_millis(number(millis)?)),
        _ => return Err(format!("'{kind}' is neither abort nor error nor delay:MILLISECONDS")),
    };
    let turns = match turns.split_once("..") {
        None => (number(turns)?, number(turns)?),
        Some((first, "")) => (number(first)?, u64::MAX),
        Some((first, last)) => (number(first)?, number(last)?),
    };
    Ok(Planned { point, kind, turns })
}

/// What is to happen at a point now; an abort happens here.
fn due(point: &'static str) -> Option<Kind> {
    let plan = plan();
    if !plan.faults.iter().any(|fault| fault.point == point) {
        return None;
    }
    let turn = {
        let mut seen = plan.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = seen.entry(point).or_default();
        *turn += 1;
        *turn
    };
    let fault = plan
        .faults
        .iter()
        .find(|fault| fault.point == point && (fault.turns.0..=fault.turns.1).contains(&turn))?;
    plan.note(format_args!("{point} {:?} {turn}", fault.kind));
    if fault.kind == Kind::Abort {
        std::process::abort();
    }
    Some(fault.kind)
}

/// Notes that the engine met something that was made outside of it.
pub(crate) fn met(what: &'static str) {
    plan().note(format_args!("{what} met 1"));
}

fn failed(point: &str) -> StoreError {
    StoreError::Unavailable(format!("a fault on purpose at {point}"))
}

/// A point where the store may fail.
pub(crate) async fn at(point: &'static str) -> Result<(), StoreError> {
    match due(point) {
        Some(Kind::Delay(time)) => tokio::time::sleep(time).await,
        Some(_) => return Err(failed(point)),
        None => {}
    }
    Ok(())
}

/// A point after something was done outside of the store: an error leaves open whether it was.
pub(crate) async fn after<T>(point: &'static str, outcome: Result<T, TaskError>) -> Result<T, TaskError> {
    match at(point).await {
        Ok(()) => outcome,
        Err(fault) => Err(TaskError::in_doubt("error", fault.to_string())),
    }
}

tokio::task_local! {
    /// Which operation of the store is under way.
    static CURRENT: &'static str;
}

/// The name of a point of an operation, as it is in the list; one that is not there never fires.
fn point_of(operation: &str, when: &str) -> Option<&'static str> {
    POINTS
        .iter()
        .copied()
        .find(|point| point.strip_prefix(operation).and_then(|rest| rest.strip_prefix('.')) == Some(when))
}

/// A call of the store, with its points before and after; see [`committing`] for the one within.
pub(crate) async fn around<T>(
    operation: &'static str,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    if let Some(point) = point_of(operation, "begin") {
        at(point).await?;
    }
    let answer = CURRENT.scope(operation, call).await?;
    if let Some(point) = point_of(operation, "after_commit") {
        at(point).await?;
    }
    Ok(answer)
}

/// The point before the COMMIT of the operation under way.
pub(crate) async fn committing() -> Result<(), StoreError> {
    match Operation::current().before_commit() {
        Some(point) => at(point).await,
        None => Ok(()),
    }
}

/// The operation under way, to be taken along to another thread.
pub(crate) struct Operation(Option<&'static str>);

impl Operation {
    pub(crate) fn current() -> Self {
        Self(CURRENT.try_with(|operation| *operation).ok())
    }

    fn before_commit(&self) -> Option<&'static str> {
        point_of(self.0?, "before_commit")
    }

    /// As [`committing`], on a thread that may block.
    pub(crate) fn committing(&self) -> Result<(), StoreError> {
        let Some(point) = self.before_commit() else { return Ok(()) };
        match due(point) {
            Some(Kind::Delay(time)) => std::thread::sleep(time),
            Some(_) => return Err(failed(point)),
            None => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_names_points_kinds_and_turns() {
        let text =
            "claim.before_commit=abort@3,heartbeat.begin=error@2..,effect.after=delay:40@1..2,move.begin=error";
        let plan = parse(text).expect("a plan");
        let read: Vec<_> = plan.iter().map(|fault| (fault.point, fault.kind, fault.turns)).collect();
        assert_eq!(
            read,
            [
                ("claim.before_commit", Kind::Abort, (3, 3)),
                ("heartbeat.begin", Kind::Error, (2, u64::MAX)),
                ("effect.after", Kind::Delay(Duration::from_millis(40)), (1, 2)),
                ("move.begin", Kind::Error, (1, u64::MAX)),
            ]
        );
        for wrong in
            ["claim", "nowhere.begin=abort", "claim.begin=explode", "claim.begin=delay", "claim.begin=abort@x"]
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_operation_has_its_points_and_another_has_none() {
        assert_eq!(point_of("claim", "before_commit"), Some("claim.before_commit"));
        assert_eq!(point_of("lock", "begin"), None);
        assert_eq!(point_of("", "begin"), None);
    }
}
