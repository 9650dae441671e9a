//! Telling of something that does not work: once when it begins, once a minute while it lasts, and once when it is over. What is tried
//! again several times a second would fill a log that nobody reads then.

use std::time::Duration;

use tokio::time::Instant;

/// How long nothing more is said.
const QUIET: Duration = Duration::from_secs(60);

/// Something that may not work for a while.
#[derive(Default)]
pub(crate) struct Outage {
    /// Since when it does not, and when that was last told.
    lasting: Option<(Instant, Instant)>,
}

impl Outage {
    /// It does not work (still); whether that is to be told.
    pub(crate) fn met(&mut self) -> bool {
        self.met_at(Instant::now())
    }

    fn met_at(&mut self, now: Instant) -> bool {
        match &mut self.lasting {
            Some((_, told)) if now.duration_since(*told) < QUIET => false,
            Some((_, told)) => {
                *told = now;
                true
            }
            None => {
                self.lasting = Some((now, now));
                true
            }
        }
    }

    /// It works; if it did not before, for how long.
    pub(crate) fn over(&mut self) -> Option<Duration> {
        self.lasting.take().map(|(since, _)| since.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_told_when_it_begins_each_minute_and_when_it_is_over() {
        let mut outage = Outage::default();
        assert_eq!(outage.over(), None);
        let begun = Instant::now();
        let told = (0..300).filter(|half| outage.met_at(begun + *half * Duration::from_millis(500))).count();
        assert_eq!(told, 3, "in two and a half minutes");
        assert!(outage.over().is_some());
        assert_eq!(outage.over(), None);
        assert!(outage.met());
    }
}
