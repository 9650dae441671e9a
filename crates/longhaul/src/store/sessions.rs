//! Sessions: what keeps a lock at a lock service outside, beside its row and its line here.
//!
//! The line in the store decides who is next and what token it gets; the service decides whether
//! anyone outside has the lock. A lock whose first in line can be served gets a session, [asked
//! for](Stage::Asked) at the service by whichever process looks first. Only when the service gave it is
//! the lock given to the task. While it is [held](Stage::Held), processes take turns to keep the session
//! alive; when the hold is over it is [given back](Stage::Ended), and only then does the next one begin.
//!
//! What holds: a task has the lock only while its session counts here, and it counts here for less time
//! than at the service. So what the task is told is never later than what the service does.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::json;
use uuid::Uuid;

use super::StoreError;
use super::clock::micros;
use super::locks::{Book, Line, key};
use crate::lock::MAX_TTL;
use crate::task::TaskId;

/// Where the name of the lock service stands in the settings.
pub(crate) const SERVICE: &str = "lock_service";
/// When to ask again for a lock that someone outside has.
const BUSY: Duration = Duration::from_millis(400);
/// When to turn again to a service that did not answer.
const TROUBLE: Duration = Duration::from_secs(1);
/// After this time a session that nobody could give back has run out at the service by itself.
pub(crate) const FORGET: Duration = MAX_TTL;
/// How much is kept of what a service said.
const MAX_TROUBLE: usize = 500;

/// The part of a store that keeps sessions.
#[async_trait]
pub trait SessionStore: Send + Sync + 'static {
    /// From now on locks are taken at the service of this name too, or (`None`) by the store alone. Holds
    /// stay where they are until they end.
    async fn choose_lock_service(&self, service: Option<&str>) -> Result<(), StoreError>;

    /// The service of this store's locks, if it is not the store alone.
    async fn lock_service(&self) -> Result<Option<String>, StoreError>;

    /// Sessions at `service` for which it is time to turn to it, at most `limit`. Each is given to one
    /// caller; should nothing be noted within `patience`, it is given again.
    async fn due_sessions(&self, service: &str, patience: Duration, limit: usize)
    -> Result<Vec<Look>, StoreError>;

    /// Writes what the service said, and what comes of it for the locks: given, lost, passed on. What was
    /// said of a session that is another by now changes nothing.
    async fn note_sessions(&self, notes: &[Note]) -> Result<(), StoreError>;

    /// The locks of `tenant` that are held or waited for, by name, after the name `after`; or only the
    /// one named.
    async fn locks(&self, tenant: &str, which: &Which) -> Result<Vec<LockInfo>, StoreError>;
}

/// Which locks to show.
#[derive(Clone, Debug)]
pub enum Which {
    /// The one of this name.
    One(String),
    /// The first ones after this name, at most so many.
    After(String, usize),
}

impl Which {
    /// The keys from which and up to which, and how many at most.
    pub(crate) fn range(&self, tenant: &str) -> (String, String, i64) {
        // No name has a control character, so this is before every longer name.
        let after = |name| format!("{}\u{1}", key(tenant, name));
        match self {
            Self::One(name) => (key(tenant, name), after(name), 1),
            // '0' comes after '/'.
            Self::After(name, most) => {
                (after(name), format!("{tenant}0"), i64::try_from(*most).unwrap_or(i64::MAX))
            }
        }
    }
}

/// A lock as others see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LockInfo {
    /// Its name.
    pub name: String,
    /// The task that has it.
    pub holder: Option<TaskId>,
    /// The holder's token: the largest that was given for this lock.
    pub token: Option<u64>,
    /// Since when it is held.
    pub acquired_at: Option<Timestamp>,
    /// When it goes to the next in line, whatever its holder does.
    pub until: Option<Timestamp>,
    /// How many tasks wait for it.
    pub waiting: u64,
    /// The lock service that keeps it, or is asked for it.
    pub service: Option<String>,
    /// What the service, or the way to it, said last if that was bad news.
    pub trouble: Option<String>,
}

/// Where a session stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The service is to give the lock.
    Asked,
    /// It gave it, and is to keep it.
    Held,
    /// It is to take it back.
    Ended,
}

impl Stage {
    pub(crate) fn code(self) -> i16 {
        self as i16
    }

    pub(crate) fn from_code(code: i16) -> Self {
        match code {
            0 => Self::Asked,
            1 => Self::Held,
            _ => Self::Ended,
        }
    }
}

/// A session for which it is time to turn to the service.
#[derive(Clone, Debug)]
pub struct Look {
    /// The lock: tenant and name.
    pub key: String,
    /// Who owns it at the service.
    pub session: String,
    /// What is to be done there.
    pub stage: Stage,
    /// The token of who has it, or gets it.
    pub token: u64,
    /// The store's time, before the service is asked.
    pub at: i64,
}

/// What the service said of a session.
#[derive(Clone, Debug)]
pub struct Note {
    /// What it was asked.
    pub look: Look,
    /// What it said.
    pub said: Said,
    /// How long the service keeps a session without being asked to.
    pub ttl: Duration,
}

/// An answer of a lock service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// The session has the lock.
    Taken,
    /// Someone outside has it, or is before us in line.
    Busy,
    /// The lock was had with a token as large as this one.
    Outdated {
        /// The largest it knows.
        largest: u64,
    },
    /// The session goes on.
    Kept,
    /// The session is over.
    Lost,
    /// The session was given back.
    Released,
    /// No answer, or none that helps.
    Failed(String),
}

impl Note {
    /// Whether it leaves the lock where it is.
    fn is_quiet(&self) -> bool {
        matches!(self.said, Said::Busy | Said::Kept | Said::Failed(_))
    }

    /// Counted from before the service was asked, and for less than it counts: what is decided here comes
    /// before it happens there.
    fn counts_until(&self) -> i64 {
        self.look.at.saturating_add(micros(self.ttl) / 5 * 4)
    }

    fn keep_at(&self) -> i64 {
        self.look.at.saturating_add(micros(self.ttl) / 4)
    }

    /// A larger token than the store would give, if the service knows one.
    pub(crate) fn raises(&self) -> Option<u64> {
        match self.said {
            Said::Outdated { largest } => Some(largest),
            _ => None,
        }
    }
}

/// A session as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Session {
    pub(crate) service: String,
    pub(crate) id: String,
    pub(crate) stage: Stage,
    pub(crate) token: u64,
    pub(crate) until: Option<i64>,
    pub(crate) look_at: i64,
    pub(crate) trouble: Option<String>,
}

impl Session {
    fn ask(service: &str, token: u64, now: i64) -> Self {
        let id = Uuid::now_v7().to_string();
        Self {
            service: service.to_owned(),
            id,
            stage: Stage::Asked,
            token,
            until: None,
            look_at: now,
            trouble: None,
        }
    }

    fn end(&mut self, now: i64) {
        if self.stage != Stage::Ended {
            (self.stage, self.look_at) = (Stage::Ended, now);
            self.until = Some(now.saturating_add(micros(FORGET)));
        }
    }

    fn is_over(&self, now: i64) -> bool {
        self.until.is_some_and(|until| until <= now)
    }
}

impl Line {
    /// Whether what is known of the session may take the lock from its holder, or give it to the next.
    pub(super) fn session_may_free(&self, now: i64) -> bool {
        let noted = self.note.as_ref().is_some_and(|note| !note.is_quiet());
        noted || self.session.as_ref().is_some_and(|session| session.is_over(now))
    }

    /// Why the session ends the hold now, if it does.
    pub(super) fn session_ends_hold(&self, book: &Book) -> Option<serde_json::Value> {
        let session = self.session.as_ref().filter(|session| session.stage == Stage::Held)?;
        let lost = self.note_of(session).is_some_and(|note| note.said == Said::Lost);
        if lost {
            return Some(json!({"reason": "session_lost", "service": session.service}));
        }
        let ended = || json!({"reason": "session_ended", "service": session.service, "detail": session.trouble});
        session.is_over(book.now()).then(ended)
    }

    fn note_of(&self, session: &Session) -> Option<&Note> {
        let of_it = |note: &&Note| note.look.session == session.id && note.look.stage == session.stage;
        self.note.as_ref().filter(of_it)
    }

    /// Takes up what the service said; says whether it gave the lock just now.
    pub(super) fn hear_service(&mut self, book: &Book) -> bool {
        let now = book.now();
        let heard = self.session.as_ref().and_then(|session| self.note_of(session)).cloned();
        if let Some(session) = &mut self.session
            && session.stage == Stage::Ended
            && session.is_over(now)
        {
            (self.session, self.session_changed) = (None, true);
        }
        let (Some(note), Some(session)) = (heard, &mut self.session) else { return false };
        self.session_changed = true;
        session.trouble = None;
        match &note.said {
            Said::Taken | Said::Kept => {
                let taken = note.counts_until() > now;
                session.until = session.until.max(Some(note.counts_until()));
                session.look_at = if taken { note.keep_at() } else { now };
                return taken && session.stage == Stage::Asked;
            }
            Said::Busy => {
                session.trouble = Some(format!("someone outside has it, by {}", session.service));
                session.look_at = now.saturating_add(micros(BUSY));
            }
            Said::Outdated { .. } => (session.token, session.look_at) = (self.next_token, now),
            Said::Lost | Said::Released => self.session = None,
            Said::Failed(why) => {
                session.trouble = Some(why.chars().take(MAX_TROUBLE).collect());
                session.look_at = now.saturating_add(micros(TROUBLE));
            }
        }
        false
    }

    /// Gives the lock, which is free here, to the next in line: at once when the store keeps it alone, else
    /// when the service has given it.
    pub(super) fn pass_on(&mut self, taken: bool, book: &mut Book) {
        let now = book.now();
        // A session whose hold is over ends; so does one that nobody needs any more.
        let stage = self.session.as_ref().map(|session| session.stage);
        if stage == Some(Stage::Held) {
            self.end_session(now);
        }
        match (&self.session, &book.service) {
            (Some(session), _) if session.stage == Stage::Ended => {}
            (Some(session), service) => {
                let (wanted, token) = (service.as_ref() == Some(&session.service), session.token);
                match self.next(book).filter(|_| wanted) {
                    None => self.end_session(now),
                    Some(next) if taken => {
                        let session = self.session.as_mut().map(|session| {
                            session.stage = Stage::Held;
                            session.service.clone()
                        });
                        self.grant(next, token, session, book);
                    }
                    Some(_) => {}
                }
            }
            (None, service) => {
                let service = service.clone();
                let Some(next) = self.next(book) else { return };
                match service {
                    Some(service) => {
                        self.session = Some(Session::ask(&service, self.next_token, now));
                        self.session_changed = true;
                    }
                    None => self.grant(next, self.next_token, None, book),
                }
            }
        }
    }

    /// A lock that was given without its session (by a program that knows of none) needs none.
    pub(super) fn drop_stray_session(&mut self, now: i64) {
        if self.hold.is_some() && self.session.as_ref().is_some_and(|session| session.stage == Stage::Asked) {
            self.end_session(now);
        }
    }

    fn end_session(&mut self, now: i64) {
        if let Some(session) = &mut self.session {
            session.end(now);
            self.session_changed = true;
        }
    }

    /// Whether someone must turn to the service at once.
    pub(crate) fn calls_for_a_look(&self, now: i64) -> bool {
        self.session_changed && self.session.as_ref().is_some_and(|session| session.look_at <= now)
    }
}
