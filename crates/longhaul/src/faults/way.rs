//! The way between a simulated process and the store, on which calls are lost, answers are lost, and everything is
//! delayed, repeated or late, by a seed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::sleep;

use super::simulation::Chance;
use crate::store::StoreError;

/// What goes wrong on a way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// A call is not made, and the caller is told that the store does not answer.
    Lost,
    /// A call is made, and the caller is told that the store does not answer.
    Unanswered,
    /// A call is made long after it was asked for, or answered long after it was made.
    Delayed,
    /// A call is made twice, one after the other; the caller gets the second answer.
    Repeated,
    /// The caller is told that the store does not answer, and the call is made all the same, later.
    Late,
    /// A call is made before another that was asked for earlier.
    Overtaken,
    /// A process is not told that another one wrote something.
    Unheard,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Lost, Self::Unanswered, Self::Delayed, Self::Repeated, Self::Late, Self::Overtaken, Self::Unheard];

    /// What so many of them are called in a report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lost => "calls lost",
            Self::Unanswered => "answers lost",
            Self::Delayed => "calls delayed",
            Self::Repeated => "calls repeated",
            Self::Late => "calls late",
            Self::Overtaken => "calls overtaken",
            Self::Unheard => "hints lost",
        }
    }
}

/// How often each thing goes wrong, out of a thousand calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Odds {
    /// [`Fault::Lost`].
    pub lost: u64,
    /// [`Fault::Unanswered`].
    pub unanswered: u64,
    /// [`Fault::Delayed`], before the call or after it.
    pub delayed: u64,
    /// [`Fault::Repeated`].
    pub repeated: u64,
    /// [`Fault::Late`].
    pub late: u64,
    /// [`Fault::Unheard`], out of a thousand hints.
    pub unheard: u64,
    /// The longest that a call is delayed or late.
    pub longest: Duration,
}

impl Odds {
    /// Nothing goes wrong.
    pub const CALM: Self =
        Self { lost: 0, unanswered: 0, delayed: 0, repeated: 0, late: 0, unheard: 0, longest: Duration::ZERO };
    /// Nothing gets through.
    pub const CUT: Self = Self { lost: 1_000, ..Self::CALM };
}

/// How long a call takes at most when nothing is wrong with it, each way.
const USUAL: Duration = Duration::from_millis(2);
/// From here on it counts as delayed.
const LONG: Duration = Duration::from_millis(10);

/// What a call is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// It reads: it makes no difference whether it was made when its answer is lost.
    Read,
    /// It writes, and who gets no answer asks again: entries are idempotent.
    Write,
    /// It writes, and is not made twice on the way: a second answer would be another. It can be late.
    Once,
}

/// See the module. Clones are the same way.
#[derive(Clone)]
pub struct Way(Arc<Mutex<Inner>>);

struct Inner {
    chance: Chance,
    odds: Odds,
    fired: BTreeMap<Fault, u64>,
    /// Calls that were asked for and not made yet, by their numbers.
    under_way: BTreeSet<u64>,
    asked: u64,
}

/// What becomes of one call.
struct Fate {
    before: Duration,
    fault: Option<Fault>,
    after: Duration,
    late: Duration,
    /// Its number among those under way.
    number: u64,
}

impl Way {
    /// A way on which, for now, nothing goes wrong.
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            chance: Chance::new(seed),
            odds: Odds::CALM,
            fired: BTreeMap::new(),
            under_way: BTreeSet::new(),
            asked: 0,
        })))
    }

    /// From now on this goes wrong.
    pub fn set(&self, odds: Odds) {
        self.inner().odds = odds;
    }

    /// How often each thing went wrong so far.
    pub fn fired(&self) -> BTreeMap<Fault, u64> {
        self.inner().fired.clone()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a hint gets lost; if not, after which time it is there.
    pub(super) fn hint(&self) -> Option<Duration> {
        let mut inner = self.inner();
        let unheard = inner.odds.unheard;
        if inner.happens(unheard) {
            inner.count(Fault::Unheard);
            return None;
        }
        // The real ones come from a look every twenty milliseconds.
        Some(Duration::from_millis(inner.chance.below(21)))
    }

    /// Makes a call over this way.
    pub(super) async fn call<T, F, Fut>(&self, kind: Kind, call: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Fn() -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let fate = self.inner().draw(kind);
        let asked = Asked { way: self, number: fate.number };
        sleep(fate.before).await;
        let answer = match fate.fault {
            Some(Fault::Lost) => return Err(no_answer(Fault::Lost)),
            Some(Fault::Late) => {
                // It is on its way, whatever becomes of the one who sent it.
                tokio::spawn(async move {
                    sleep(fate.late).await;
                    let _ = call().await;
                });
                return Err(no_answer(Fault::Late));
            }
            Some(Fault::Repeated) => {
                asked.made();
                let _first = call().await;
                sleep(fate.late).await;
                call().await
            }
            _ => {
                asked.made();
                call().await
            }
        };
        sleep(fate.after).await;
        match fate.fault {
            Some(Fault::Unanswered) => Err(no_answer(Fault::Unanswered)),
            _ => answer,
        }
    }
}

impl Inner {
    fn happens(&mut self, odds: u64) -> bool {
        odds > 0 && self.chance.below(1_000) < odds
    }

    fn count(&mut self, fault: Fault) {
        *self.fired.entry(fault).or_default() += 1;
    }

    fn time(&mut self, most: Duration) -> Duration {
        let most = u64::try_from(most.as_millis()).unwrap_or(u64::MAX - 1);
        Duration::from_millis(self.chance.below(most + 1))
    }

    fn draw(&mut self, kind: Kind) -> Fate {
        self.asked += 1;
        let number = self.asked;
        self.under_way.insert(number);
        let odds = self.odds;
        let (mut before, mut after) = (self.time(USUAL), self.time(USUAL));
        if self.happens(odds.delayed) {
            let time = self.time(odds.longest);
            // On the way there, or back.
            *(if self.chance.below(2) == 0 { &mut before } else { &mut after }) = time;
            if time >= LONG {
                self.count(Fault::Delayed);
            }
        }
        let faults: &[(Fault, u64)] = match kind {
            Kind::Read => &[(Fault::Lost, odds.lost)],
            Kind::Write => &[
                (Fault::Lost, odds.lost),
                (Fault::Unanswered, odds.unanswered),
                (Fault::Repeated, odds.repeated),
                (Fault::Late, odds.late),
            ],
            Kind::Once => {
                &[(Fault::Lost, odds.lost), (Fault::Unanswered, odds.unanswered), (Fault::Late, odds.late)]
            }
        };
        let mut fault = None;
        for &(one, odds) in faults {
            if self.happens(odds) {
                self.count(one);
                fault = Some(one);
                break;
            }
        }
        let late = self.time(odds.longest);
        Fate { before, fault, after, late, number }
    }

    /// A call is made.
    fn made(&mut self, number: u64) {
        if self.under_way.remove(&number) && self.under_way.first().is_some_and(|first| *first < number) {
            self.count(Fault::Overtaken);
        }
    }
}

/// A call that was asked for; it is not under way any more when this is dropped.
struct Asked<'a> {
    way: &'a Way,
    number: u64,
}

impl Asked<'_> {
    fn made(&self) {
        self.way.inner().made(self.number);
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.way.inner().under_way.remove(&self.number);
    }
}

fn no_answer(fault: Fault) -> StoreError {
    StoreError::Unavailable(format!("a fault on purpose: {}", fault.name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use tokio::time::Instant;

    /// Makes a call that counts how often it is made, and gives that.
    async fn counted(way: &Way, kind: Kind, made: &Arc<AtomicU64>) -> Result<u64, StoreError> {
        let made = Arc::clone(made);
        way.call(kind, move || {
            let made = Arc::clone(&made);
            async move { Ok(made.fetch_add(1, Ordering::Relaxed) + 1) }
        })
        .await
    }

    /// What the caller is told, how often the call was made by then, and how often in the end.
    async fn made_with(odds: Odds, kind: Kind) -> (Option<u64>, u64, u64) {
        let (way, made) = (Way::new(1), Arc::new(AtomicU64::new(0)));
        way.set(Odds { longest: Duration::from_millis(500), ..odds });
        let told = counted(&way, kind, &made).await;
        assert!(told.as_ref().err().is_none_or(StoreError::is_unavailable), "{told:?}");
        let then = made.load(Ordering::Relaxed);
        sleep(Duration::from_secs(1)).await;
        (told.ok(), then, made.load(Ordering::Relaxed))
    }

    #[tokio::test(start_paused = true)]
    async fn calls_are_lost_unanswered_repeated_and_late() {
        let lost = Odds { lost: 1_000, ..Odds::CALM };
        assert_eq!(made_with(Odds::CALM, Kind::Write).await, (Some(1), 1, 1));
        for kind in [Kind::Read, Kind::Write, Kind::Once] {
            assert_eq!(made_with(lost, kind).await, (None, 0, 0));
        }
        let unanswered = Odds { unanswered: 1_000, ..Odds::CALM };
        assert_eq!(made_with(unanswered, Kind::Write).await, (None, 1, 1));
        let repeated = Odds { repeated: 1_000, ..Odds::CALM };
        assert_eq!(made_with(repeated, Kind::Write).await, (Some(2), 2, 2));
        assert_eq!(made_with(repeated, Kind::Once).await, (Some(1), 1, 1), "not what is made once");
        let late = Odds { late: 1_000, ..Odds::CALM };
        assert_eq!(made_with(late, Kind::Once).await, (None, 0, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn calls_are_delayed_and_overtake_each_other() {
        let way = Way::new(3);
        way.set(Odds { delayed: 500, longest: Duration::from_secs(2), ..Odds::CALM });
        let order: Arc<Mutex<Vec<u64>>> = Arc::default();
        let begun = Instant::now();
        let calls = (0..50).map(|number| {
            let (way, order) = (way.clone(), Arc::clone(&order));
            tokio::spawn(async move {
                let noted = move || {
                    order.lock().expect("not poisoned").push(number);
                    std::future::ready(Ok(()))
                };
                way.call(Kind::Write, noted).await
            })
        });
        for call in calls.collect::<Vec<_>>() {
            call.await.expect("no panic").expect("answered");
        }
        assert!(begun.elapsed() >= Duration::from_millis(500), "{:?}", begun.elapsed());
        let order = order.lock().expect("not poisoned").clone();
        assert!(order.len() == 50 && !order.is_sorted(), "{order:?}");
        let fired = way.fired();
        assert!(fired[&Fault::Delayed] > 10 && fired[&Fault::Overtaken] > 10, "{fired:?}");
        assert_eq!(way.inner().under_way.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_seed_draws_the_same_faults_again() {
        let run = async |seed| {
            let (way, made) = (Way::new(seed), Arc::new(AtomicU64::new(0)));
            let often = Odds { lost: 200, unanswered: 200, repeated: 200, late: 200, ..Odds::CALM };
            way.set(Odds { longest: Duration::from_millis(80), ..often });
            let begun = Instant::now();
            let mut told = Vec::new();
            for _ in 0..100 {
                told.push(counted(&way, Kind::Write, &made).await.ok());
            }
            (told, begun.elapsed(), way.fired())
        };
        let one = run(5).await;
        assert_eq!(one, run(5).await);
        assert_ne!(one.0, run(6).await.0);
        assert_eq!(one.2.len(), 4, "{:?}", one.2);
    }
}
