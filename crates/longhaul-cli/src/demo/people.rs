//! The approval: answered in the terminal, on the dashboard, or by the demo itself when nobody is there.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::judge::Decided;
use super::view::{Tone, View};
use crate::commands::list;
use crate::exit::Failure;
use crate::http::{Path, Server};

/// How often the server is asked what waits for a person.
const EVERY: Duration = Duration::from_millis(250);

/// See the module.
pub(super) struct Person {
    server: Server,
    /// Lines from the terminal; none when nobody is asked there.
    answers: Option<mpsc::Receiver<String>>,
    /// How long it waits for somebody when nobody is asked here.
    patience: Duration,
    looked: Option<Instant>,
    asked: Option<Asked>,
    pub(super) decided: Option<Decided>,
}

/// An approval that waits.
struct Asked {
    task: String,
    id: String,
    since: Instant,
    /// How many lines the ledger had when it was last seen waiting.
    lines: usize,
}

impl Person {
    /// `ask`: there may be somebody at the terminal.
    pub(super) fn new(server: &Server, ask: bool, patience: Duration) -> Self {
        let terminal = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
        let answers = (ask && terminal).then(read_lines);
        Self { server: server.clone(), answers, patience, looked: None, asked: None, decided: None }
    }

    /// Whether everything waits for somebody at the terminal.
    pub(super) fn is_waited_for(&self) -> bool {
        self.answers.is_some() && self.asked.is_some()
    }

    /// Looks whether something waits for a person, and whether somebody has answered.
    pub(super) async fn look(&mut self, lines: usize, view: &View) -> Result<(), Failure> {
        if self.decided.is_some() {
            return Ok(());
        }
        if self.asked.is_some() {
            let answer = self.answers.as_mut().and_then(|answers| answers.try_recv().ok());
            match answer.as_deref().map(|answer| answer.trim().to_lowercase()) {
                Some(answer) if ["y", "yes"].contains(&answer.as_str()) => {
                    return self.decide(true, lines, view).await;
                }
                Some(answer) if ["n", "no"].contains(&answer.as_str()) => {
                    return self.decide(false, lines, view).await;
                }
                Some(_) => view.say(Tone::Loud, "type y or n and Enter"),
                None => {}
            }
        }
        if self.looked.is_some_and(|looked| looked.elapsed() < EVERY) {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        let answer = self.server.get(&Path::new(&["v1", "approvals"])).await?.json()?;
        let open = list(&answer, "approvals")?.first().cloned();
        match (open, &mut self.asked) {
            (Some(open), None) => self.is_asked(&open, lines, view),
            (Some(_), Some(asked)) => {
                asked.lines = lines;
                if self.answers.is_none() && asked.since.elapsed() >= self.patience {
                    self.decide(true, lines, view).await?;
                }
            }
            (None, Some(_)) => self.was_answered_elsewhere(view).await?,
            (None, None) => {}
        }
        Ok(())
    }

    fn is_asked(&mut self, open: &Value, lines: usize, view: &View) {
        let text = |name: &str| open[name].as_str().unwrap_or_default().to_owned();
        let app = open["arguments"]["app"].as_str().unwrap_or("an app").to_owned();
        view.say(
            Tone::Loud,
            format!(
                "an agent wants to {} {app} and waits for a person; it holds no worker meanwhile",
                text("tool")
            ),
        );
        self.asked = Some(Asked { task: text("task_id"), id: text("id"), since: Instant::now(), lines });
        let inbox = format!("{}/inbox", self.server.base());
        if self.answers.is_some() {
            view.ask(Some(&format!(
                "Approve the {} of {app}? Type y or n and Enter, or answer at {inbox}",
                text("tool")
            )));
        } else {
            let seconds = self.patience.as_secs();
            view.say(Tone::Plain, format!("nobody is asked here: it is approved in {seconds} s over HTTP, as a person would (or before, at {inbox})"));
        }
    }

    async fn decide(&mut self, approve: bool, lines: usize, view: &View) -> Result<(), Failure> {
        let Some(asked) = self.asked.take() else { return Ok(()) };
        let decision = if approve { "approve" } else { "deny" };
        let path = Path::task(&asked.task, &["approvals", &asked.id]);
        let sent = self.server.post(&path, &json!({"decision": decision, "reason": "answered in the demo"})).await;
        view.ask(None);
        if let Err(trouble) = sent {
            // Somebody may have been quicker on the dashboard.
            view.say(Tone::Plain, format!("the answer was not taken: {}", Failure::from(trouble)));
            self.asked = Some(asked);
            return self.was_answered_elsewhere(view).await;
        }
        view.say(Tone::Good, format!("the restart is {}", if approve { "approved" } else { "denied" }));
        self.decided = Some(Decided { task: asked.task, approved: approve, lines });
        Ok(())
    }

    async fn was_answered_elsewhere(&mut self, view: &View) -> Result<(), Failure> {
        let Some(asked) = self.asked.take() else { return Ok(()) };
        let answer = self.server.get(&Path::task(&asked.task, &["approvals"])).await?.json()?;
        let found = list(&answer, "approvals")?.iter().find(|approval| approval["id"] == json!(asked.id)).cloned();
        let status = found.and_then(|approval| approval["status"].as_str().map(str::to_owned)).unwrap_or_default();
        if status == "pending" {
            self.asked = Some(asked);
            return Ok(());
        }
        view.ask(None);
        view.say(Tone::Good, format!("the restart was answered on the dashboard: {status}"));
        let approved = matches!(status.as_str(), "approved" | "used");
        self.decided = Some(Decided { task: asked.task, approved, lines: asked.lines });
        Ok(())
    }
}

/// What is typed, line by line. The thread ends with the process: reading cannot be given up.
fn read_lines() -> mpsc::Receiver<String> {
    let (send, lines) = mpsc::channel(8);
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if send.blocking_send(line).is_err() {
                return;
            }
        }
    });
    lines
}
