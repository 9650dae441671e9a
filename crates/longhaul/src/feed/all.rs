//! The events of all tasks of a tenant: at least once, in order per task, from any place on.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use uuid::Uuid;

use super::pages::Pages;
use super::patterns::Patterns;
use crate::engine::Engine;
use crate::event::Event;
use crate::store::StoreError;
use crate::store::feed::{FeedRow, PAGE_ROWS, Place};
use crate::task::Invalid;

/// A place in the events of all tasks. Its text is opaque; keep it and come back with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// The store's kind; `None` for the start, which every store has.
    kind: Option<char>,
    /// The row that is given next, or was given in part.
    place: Place,
    /// The last event of it that was given.
    given: u64,
}

impl Cursor {
    /// The beginning of what is kept; its text is `0`.
    pub const START: Cursor = Cursor { kind: None, place: Place::START, given: 0 };
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, place, given } = self;
        let Some(kind) = kind else { return f.write_str("0") };
        write!(f, "{kind}{:x}-{:x}-{:x}-{given:x}", place.order, place.task.as_u128(), place.seq)
    }
}

impl FromStr for Cursor {
    type Err = Invalid;
    fn from_str(text: &str) -> Result<Self, Invalid> {
        if text == "0" {
            return Ok(Self::START);
        }
        parse(text).ok_or_else(|| Invalid::new("cursor", "cannot be read; use one as it was given, or begin anew"))
    }
}

fn parse(text: &str) -> Option<Cursor> {
    let kind = text.chars().next().filter(char::is_ascii_lowercase)?;
    let mut numbers = text[1..].split('-').map(|number| {
        // Only what `Display` writes: no sign, at most 128 bits.
        let plain = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_hexdigit());
        plain.then(|| u128::from_str_radix(number, 16).ok()).flatten()
    });
    let mut next = || numbers.next().flatten();
    let (order, task, seq, given) = (next()?, next()?, next()?, next()?);
    if numbers.next().is_some() {
        return None;
    }
    // One less than the largest, which reading adds one to.
    let number = |number: u128| i64::try_from(number).ok().filter(|&number| number < i64::MAX);
    let place = Place { order: number(order)?, task: Uuid::from_u128(task), seq: number(seq)? };
    Some(Cursor { kind: Some(kind), place, given: u64::try_from(given).ok()? })
}

/// The events of all tasks of a tenant, without end. Those of one task come in their order; after a
/// reconnect with the cursor of the last one, the rest follows, and nothing is missed.
pub struct AllEvents {
    pages: Pages,
    tenant: Arc<str>,
    patterns: Patterns,
    kind: char,
    /// Read and not given yet, each with the cursor after it.
    read: VecDeque<(Event, Cursor)>,
    /// Up to where events of the row that is read next were given before.
    given: u64,
    /// After everything that was given or passed by.
    cursor: Cursor,
}

impl AllEvents {
    pub(crate) async fn start(
        engine: Arc<Engine>,
        tenant: Arc<str>,
        after: Option<&Cursor>,
    ) -> Result<Self, crate::client::Error> {
        let kind = engine.store.feed_kind();
        // Made before the first look, so that it hears of what happens since.
        let mut pages = Pages::new(engine, Place::START, PAGE_ROWS);
        let now = pages.now().await?;
        let (next, given) = match after {
            None => (now, 0),
            Some(cursor) if cursor.kind.is_some_and(|of| of != kind) || cursor.place.order > now.order => {
                let problem = "is of another store, or of a time that a restored backup does not know; begin anew";
                return Err(Invalid::new("cursor", problem).into());
            }
            Some(cursor) => (cursor.place, cursor.given),
        };
        pages.next = next;
        let cursor = Cursor { kind: Some(kind), place: next, given };
        Ok(Self { pages, tenant, patterns: Patterns::default(), kind, read: VecDeque::new(), given, cursor })
    }

    /// Only events of these types: exact ones (`task.completed`), or all that begin so (`task.*`, `*`).
    pub fn types<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Result<Self, Invalid> {
        self.patterns = Patterns::new(patterns)?;
        Ok(self)
    }

    /// Where one who begins anew goes on: after everything that was given, and after what was passed by
    /// because nobody asked for it.
    pub fn cursor(&self) -> Cursor {
        self.cursor.clone()
    }

    /// The next event and the cursor after it; waits for it when there is none yet. Dropped while it
    /// waits, it has lost nothing.
    pub async fn next(&mut self) -> Result<(Event, Cursor), StoreError> {
        loop {
            if let Some((event, cursor)) = self.read.pop_front() {
                self.cursor = cursor.clone();
                return Ok((event, cursor));
            }
            let from = self.pages.next;
            let page = self.pages.read().await?;
            self.take(from, &page.rows);
            // A row that was given in part is on the page, or gone.
            self.given = 0;
            if self.read.is_empty() {
                self.cursor = Cursor { kind: Some(self.kind), place: self.pages.next, given: 0 };
                self.pages.rest(&page).await;
            }
        }
    }

    fn take(&mut self, from: Place, rows: &[FeedRow]) {
        for FeedRow { place, task, tenant, row } in rows {
            if tenant.as_deref() != Some(&*self.tenant) {
                continue;
            }
            let given = if *place == from { self.given } else { 0 };
            let last = row.last_seq();
            for event in row.events_of(*task) {
                if event.seq <= given || !self.patterns.want(&event.kind) {
                    continue;
                }
                let (place, given) = if event.seq == last { (place.next(), 0) } else { (*place, event.seq) };
                self.read.push_back((event, Cursor { kind: Some(self.kind), place, given }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_back_from_its_text() {
        let place = Place { order: 77, task: Uuid::now_v7(), seq: 3 };
        for cursor in [Cursor::START, Cursor { kind: Some('p'), place, given: 5 }] {
            assert_eq!(cursor.to_string().parse(), Ok(cursor));
        }
        assert_eq!("0".parse(), Ok(Cursor::START));
    }

    #[test]
    fn text_that_is_no_cursor_is_refused() {
        let huge = format!("s{}-0-0-0", "f".repeat(40));
        for text in [
            "",
            "1",
            "s",
            "s1",
            "s1-2-3",
            "s1-2-3-4-5",
            "s-1-2-3-4",
            "s1--3-4",
            "S1-0-0-0",
            "é1-0-0-0",
            &huge,
            "s7fffffffffffffff-0-0-0",
            "s+1-0-0-0",
            "00",
        ] {
            assert_eq!(text.parse::<Cursor>().expect_err(text).field, "cursor");
        }
    }
}
