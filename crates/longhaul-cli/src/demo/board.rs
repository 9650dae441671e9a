//! What clients are told while the demo runs: every event of every task, followed over HTTP as anyone could.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use reqwest::Method;
use serde_json::Value;
use tokio::task::JoinHandle;

use super::judge::{Ended, Told};
use crate::http::{Path, Server};
use crate::sse::Parser;

/// Before the stream is opened again.
const PAUSE: Duration = Duration::from_millis(200);

/// How many tasks are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) pending: usize,
    pub(super) running: usize,
    pub(super) waiting: usize,
    pub(super) ended: usize,
}

/// What is known of a task.
#[derive(Debug, Default)]
struct Seen {
    state: State,
    /// The worker that has it, by the id that workers have.
    worker: Option<String>,
    /// What it does, in its own words.
    message: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Pending,
    Running,
    Waiting,
    Ended,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Board {
    tasks: BTreeMap<String, Seen>,
    pub(super) told: Vec<Told>,
    pub(super) ended: BTreeMap<String, Ended>,
    /// When the newest event happened, as it says itself.
    pub(super) newest: Timestamp,
    pub(super) events: usize,
}

impl Board {
    fn hear(&mut self, event: &Value) {
        let (Some(id), Some(kind)) = (event["task_id"].as_str(), event["type"].as_str()) else { return };
        self.events += 1;
        let time: Option<Timestamp> = event["time"].as_str().and_then(|time| time.parse().ok());
        self.newest = self.newest.max(time.unwrap_or_default());
        let (step, data) = (event["step"].as_str().unwrap_or_default(), &event["data"]);
        let seen = self.tasks.entry(id.to_owned()).or_default();
        match kind {
            "task.started" => {
                seen.state = State::Running;
                seen.worker = data["worker"].as_str().map(str::to_owned);
            }
            "task.waiting" => seen.state = State::Waiting,
            "task.submitted" | "task.resumed" => seen.state = State::Pending,
            "progress" => {
                if data["status"] == "retrying" {
                    (seen.state, seen.worker) = (State::Pending, None);
                }
                seen.message = data["message"].as_str().unwrap_or_default().to_owned();
            }
            "step.completed" => {
                let undo = data["kind"] == "undo";
                let step = if undo { data["undoes"].as_str().unwrap_or_default() } else { step };
                let run = event["run"].as_u64().unwrap_or(0);
                self.told.push(Told { task: id.to_owned(), step: step.to_owned(), undo, run });
            }
            "task.completed" | "task.failed" | "task.cancelled" => {
                (seen.state, seen.worker) = (State::Ended, None);
                let state = kind.trim_start_matches("task.").to_owned();
                self.ended.insert(id.to_owned(), Ended { state, at: Instant::now() });
            }
            _ => {}
        }
    }

    pub(super) fn counts(&self) -> Counts {
        let count = |state: State| self.tasks.values().filter(|seen| seen.state == state).count();
        Counts {
            pending: count(State::Pending),
            running: count(State::Running),
            waiting: count(State::Waiting),
            ended: count(State::Ended),
        }
    }

    /// The tasks that a worker runs, with what they do.
    pub(super) fn held_by<'a>(&'a self, worker: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let mine = move |seen: &Seen| seen.state == State::Running && seen.worker.as_deref() == Some(worker);
        let held = self.tasks.iter().filter(move |(_, seen)| mine(seen));
        held.map(|(id, seen)| (id.as_str(), seen.message.as_str()))
    }
}

/// A board that is kept up to date until it is dropped.
pub(super) struct Watched {
    board: Arc<Mutex<Board>>,
    watching: JoinHandle<()>,
}

impl Watched {
    pub(super) fn start(server: &Server) -> Self {
        let board = Arc::new(Mutex::new(Board::default()));
        let (server, shared) = (server.clone(), Arc::clone(&board));
        let watching = tokio::spawn(async move {
            let mut cursor = "0".to_owned();
            loop {
                follow(&server, &mut cursor, &shared).await;
                tokio::time::sleep(PAUSE).await;
            }
        });
        Self { board, watching }
    }

    pub(super) fn now(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

/// Hears what comes after the cursor, until the stream ends.
async fn follow(server: &Server, cursor: &mut String, board: &Mutex<Board>) {
    let path = Path::new(&["v1", "events"]).with("cursor", Some(&*cursor));
    let call = server.request(Method::GET, &path).accept("text/event-stream");
    // No bound on the whole: with --keep it goes on for as long as someone looks.
    let Ok(mut response) = call.timeout(Duration::from_secs(365 * 86_400)).open().await else { return };
    let mut parser = Parser::default();
    while let Ok(Some(chunk)) = response.chunk().await {
        let Ok(frames) = parser.push(&chunk) else { return };
        let mut board = board.lock().unwrap_or_else(PoisonError::into_inner);
        for frame in frames {
            if let Ok(event) = serde_json::from_str(&frame.data) {
                board.hear(&event);
            }
            *cursor = frame.id.unwrap_or_else(|| cursor.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_board_knows_who_has_what_and_what_was_told() {
        let mut board = Board::default();
        let event = |kind: &str, step: Option<&str>, data: Value| json!({"task_id": "t", "type": kind, "step": step, "run": 3, "time": "2026-01-02T12:00:01Z", "data": data});
        board.hear(&event("task.submitted", None, json!({})));
        assert_eq!(board.counts(), Counts { pending: 1, ..Counts::default() });
        board.hear(&event("task.started", None, json!({"worker": "w"})));
        assert_eq!(board.held_by("w").map(|(id, _)| id).collect::<Vec<_>>(), ["t"]);
        board.hear(&event("progress", None, json!({"status": "retrying", "message": "The worker was lost"})));
        assert_eq!(board.held_by("w").count(), 0);
        board.hear(&event(
            "step.completed",
            Some("undo create_dns"),
            json!({"kind": "undo", "undoes": "create_dns"}),
        ));
        assert_eq!(board.told, [Told { task: "t".to_owned(), step: "create_dns".to_owned(), undo: true, run: 3 }]);
        board.hear(&event("task.failed", None, json!({})));
        assert_eq!(board.ended["t"].state, "failed");
        assert_eq!(board.counts(), Counts { ended: 1, ..Counts::default() });
    }
}
