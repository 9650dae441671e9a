//! How far a call is, for tools that say so while they work.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The shortest time between two words about one call.
const OFTEN: Duration = Duration::from_secs(1);
/// A call that has taken long is told about less often: after this part of its time so far. So a call of
/// a day is told about some hundred times.
const RARELY: u32 = 50;

/// How far a call is, as its tool says.
#[derive(Clone, Debug, PartialEq)]
pub struct HowFar {
    /// What is done; grows.
    pub progress: f64,
    /// What is to be done, if that is known.
    pub total: Option<f64>,
    /// In words.
    pub message: Option<String>,
}

impl fmt::Display for HowFar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.total {
            Some(total) => write!(f, "{} of {total}", self.progress)?,
            None => write!(f, "{}", self.progress)?,
        }
        match &self.message {
            Some(message) => write!(f, ", {message}"),
            None => Ok(()),
        }
    }
}

/// Who is told how far a call is.
#[derive(Clone)]
pub struct Tell(Arc<dyn Fn(&HowFar) + Send + Sync>);

impl Tell {
    /// Calls this function, which must not wait.
    pub fn new(tell: impl Fn(&HowFar) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }
}

impl fmt::Debug for Tell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tell")
    }
}

/// Tells what is new of one call, and not too often.
pub(super) struct Paced {
    tell: Tell,
    begun: Instant,
    /// When it was told last, and how far the call was.
    last: Option<(Instant, f64)>,
}

impl Paced {
    pub(super) fn new(tell: Tell, begun: Instant) -> Self {
        Self { tell, begun, last: None }
    }

    /// Tells it, unless it is old, or too soon after the last.
    pub(super) fn tell(&mut self, now: Instant, how_far: &HowFar) {
        let pause = OFTEN.max(now.saturating_duration_since(self.begun) / RARELY);
        let due = self.last.is_none_or(|(last, progress)| {
            how_far.progress > progress && now.saturating_duration_since(last) >= pause
        });
        if due {
            self.last = Some((now, how_far.progress));
            (self.tell.0)(how_far);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    fn told(each: Duration, count: u32) -> Vec<f64> {
        let told = Arc::new(Mutex::new(Vec::new()));
        let hears = Arc::clone(&told);
        let tell = Tell::new(move |how_far| hears.lock().expect("no panic").push(how_far.progress));
        let begun = Instant::now();
        let mut paced = Paced::new(tell, begun);
        for number in 0..count {
            let how_far = HowFar { progress: number.into(), total: None, message: None };
            paced.tell(begun + each * number, &how_far);
        }
        let told = told.lock().expect("no panic");
        told.clone()
    }

    #[test]
    fn a_call_is_told_about_once_a_second_at_most_and_less_often_the_longer_it_takes() {
        assert_eq!(told(Duration::from_millis(100), 31), [0.0, 10.0, 20.0, 30.0]);
        let day = told(Duration::from_secs(1), 86_400).len();
        assert!(day < 500, "{day} times in a day");
    }

    #[test]
    fn what_does_not_go_on_is_not_told() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let hears = Arc::clone(&told);
        let begun = Instant::now();
        let tell = Tell::new(move |how_far| hears.lock().expect("no panic").push(how_far.to_string()));
        let mut paced = Paced::new(tell, begun);
        for (second, progress) in [(0, 2.0), (5, 2.0), (10, 1.0), (15, 2.5)] {
            let how_far = HowFar { progress, total: Some(4.0), message: Some("copying".into()) };
            paced.tell(begun + Duration::from_secs(second), &how_far);
        }
        assert_eq!(*told.lock().expect("no panic"), ["2 of 4, copying", "2.5 of 4, copying"]);
    }
}
