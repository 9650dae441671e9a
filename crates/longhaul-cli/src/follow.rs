//! Following a task: every event once and in order, whatever happens to the connection.
//!
//! The stream ends after the final event, is cut when the server restarts, and may be cut for a slow
//! reader. Each time it is opened again after the last event that was given; an answer of 204 says that
//! there will be no more. A final event alone does not: the task may have been resumed after it.

use std::collections::VecDeque;
use std::time::Duration;

use reqwest::header::HeaderName;
use reqwest::{Method, Response, StatusCode};
use serde_json::Value;
use tokio::time::Instant;

use crate::exit::Failure;
use crate::http::{Path, Server, Trouble};
use crate::sse::{Frame, Parser};

/// The server sends a heartbeat every 15 seconds; a connection silent for so long is gone.
const SILENCE: Duration = Duration::from_secs(45);
/// The pause before the first new connection; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// What the server asks for with Retry-After is heeded up to this.
const LONGEST_ASKED: Duration = Duration::from_secs(30);
/// How long it is silent about trouble: a restart of the server is over by then.
const QUIET: Duration = Duration::from_secs(5);

/// A durable event of a task.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Event {
    pub(crate) seq: u64,
    /// `type` in JSON.
    pub(crate) kind: String,
    pub(crate) time: String,
    pub(crate) step: Option<String>,
    pub(crate) data: Value,
    /// As the server wrote it.
    pub(crate) raw: String,
}

impl Event {
    pub(crate) fn is_final(&self) -> bool {
        matches!(self.kind.as_str(), "task.completed" | "task.failed" | "task.cancelled")
    }

    fn read(frame: &Frame) -> Option<Self> {
        let value: Value = serde_json::from_str(&frame.data).ok()?;
        Some(Self {
            seq: value["seq"].as_u64().or_else(|| frame.id.as_deref()?.parse().ok())?,
            kind: value["type"].as_str()?.to_owned(),
            time: value["time"].as_str().unwrap_or_default().to_owned(),
            step: value["step"].as_str().map(str::to_owned),
            data: value["data"].clone(),
            raw: frame.data.clone(),
        })
    }
}

/// What a follower hears.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Heard {
    Event(Event),
    /// Text of a model as it is written; not durable, may be written again.
    Live {
        step: String,
        attempt: u64,
        text: String,
    },
    /// The server cannot be reached for a while; it is tried again.
    Trouble(String),
    /// It can be again.
    Back,
}

struct Stream {
    response: Response,
    parser: Parser,
    opened: Instant,
}

/// See the module.
pub(crate) struct Follower {
    server: Server,
    id: String,
    /// The number of the last event given.
    last: u64,
    last_is_final: bool,
    /// How long to try for after the server was lost.
    patience: Duration,
    stream: Option<Stream>,
    ready: VecDeque<Heard>,
    /// Whether there was ever an answer; before that, trouble is told at once.
    met: bool,
    lost_since: Option<Instant>,
    pause: Duration,
    told: bool,
    /// The event after which the stream was once opened again at once, to hear that it was the last.
    asked_after: u64,
}

impl Follower {
    /// Follows a task from the event after number `after` on.
    pub(crate) fn new(server: &Server, id: &str, after: u64, patience: Duration) -> Self {
        Self {
            server: server.clone(),
            id: id.to_owned(),
            last: after,
            last_is_final: false,
            patience,
            stream: None,
            ready: VecDeque::new(),
            met: false,
            lost_since: None,
            pause: FIRST_PAUSE,
            told: false,
            asked_after: 0,
        }
    }

    /// The server answered a moment ago; if it is gone now, it may come back.
    pub(crate) fn already_met(mut self) -> Self {
        self.met = true;
        self
    }

    /// What comes next; `None` when the task is over and everything was given.
    pub(crate) async fn next(&mut self) -> Result<Option<Heard>, Failure> {
        loop {
            if let Some(heard) = self.ready.pop_front() {
                return Ok(Some(heard));
            }
            match self.stream.take() {
                None => {
                    if self.open().await? {
                        return Ok(None);
                    }
                }
                Some(stream) => self.read(stream).await?,
            }
        }
    }

    /// Reads one piece of the stream; puts it back unless it is over.
    async fn read(&mut self, mut stream: Stream) -> Result<(), Failure> {
        let frames = match tokio::time::timeout(SILENCE, stream.response.chunk()).await {
            Ok(Ok(Some(chunk))) => stream.parser.push(&chunk).ok(),
            // The end, an error, or silence: all the same.
            _ => None,
        };
        let Some(frames) = frames else {
            // After the final event the server ends the stream; nothing is wrong.
            if self.last_is_final && self.asked_after != self.last {
                self.asked_after = self.last;
                return Ok(());
            }
            let why = format!("the connection to {} is lost again and again", self.server.base());
            return self.lost(Trouble::Unreachable(why)).await;
        };
        let before = self.last;
        let whole = self.take(&frames);
        // A server that takes connections only to drop them, or that repeats itself, is not back.
        if self.last > before || stream.opened.elapsed() > LONGEST_PAUSE {
            self.is_back();
        }
        if whole {
            self.stream = Some(stream);
            return Ok(());
        }
        self.lost(Trouble::Unreachable(format!("the server at {} left out an event", self.server.base()))).await
    }

    /// Opens the stream after the last event given. Says whether there will be no more.
    async fn open(&mut self) -> Result<bool, Failure> {
        let mut call = self.server.request(Method::GET, &Path::task(&self.id, &["events"]));
        if self.last > 0 {
            call = call.header(HeaderName::from_static("last-event-id"), &self.last.to_string());
        }
        // No bound on the whole: a task may take days.
        let call = call.accept("text/event-stream").timeout(Duration::from_secs(10 * 365 * 86_400));
        match tokio::time::timeout(SILENCE, call.open()).await {
            Ok(Ok(response)) => {
                self.met = true;
                if response.status() == StatusCode::NO_CONTENT {
                    return Ok(true);
                }
                self.stream = Some(Stream { response, parser: Parser::default(), opened: Instant::now() });
                Ok(false)
            }
            // A task that ended and is removed by its retention.
            Ok(Err(Trouble::Refused { status: StatusCode::NOT_FOUND, .. })) if self.last_is_final => Ok(true),
            Ok(Err(trouble)) if self.met && trouble.passes() => self.lost(trouble).await.map(|()| false),
            Ok(Err(trouble)) => Err(trouble.into()),
            Err(_) => {
                let trouble =
                    Trouble::Unreachable(format!("the server at {} does not answer", self.server.base()));
                if self.met { self.lost(trouble).await.map(|()| false) } else { Err(trouble.into()) }
            }
        }
    }

    /// Takes in what arrived. Says whether nothing was left out.
    fn take(&mut self, frames: &[Frame]) -> bool {
        for frame in frames {
            let Some(event) = Event::read(frame) else {
                self.live(frame);
                continue;
            };
            if event.seq <= self.last {
                continue;
            }
            if event.seq != self.last + 1 {
                return false;
            }
            self.last = event.seq;
            self.last_is_final = event.is_final();
            self.ready.push_back(Heard::Event(event));
        }
        true
    }

    fn live(&mut self, frame: &Frame) {
        let value: Value = serde_json::from_str(&frame.data).unwrap_or_default();
        if value["type"] == "live"
            && let Some(text) = value["text"].as_str()
        {
            let step = value["step"].as_str().unwrap_or_default().to_owned();
            let attempt = value["attempt"].as_u64().unwrap_or(0);
            self.ready.push_back(Heard::Live { step, attempt, text: text.to_owned() });
        }
    }

    fn is_back(&mut self) {
        if std::mem::take(&mut self.told) {
            self.ready.push_back(Heard::Back);
        }
        self.lost_since = None;
        self.pause = FIRST_PAUSE;
    }

    /// Waits a moment before the next try; gives up when it has been long enough.
    async fn lost(&mut self, trouble: Trouble) -> Result<(), Failure> {
        let now = Instant::now();
        let since = *self.lost_since.get_or_insert(now);
        let left = self.patience.saturating_sub(now - since);
        if left.is_zero() {
            return Err(trouble.into());
        }
        let asked = match &trouble {
            Trouble::Refused { retry_after, .. } => *retry_after,
            _ => None,
        };
        if now - since >= QUIET && !self.told {
            self.told = true;
            let why = Failure::from(trouble).to_string();
            self.ready.push_back(Heard::Trouble(why));
            return Ok(());
        }
        let jitter = 0.5 + rand::random::<f64>() / 2.0;
        let pause = asked.map_or(self.pause.mul_f64(jitter), |asked| asked.min(LONGEST_ASKED));
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        tokio::time::sleep(pause.min(left)).await;
        Ok(())
    }
}
