//! The people around the tasks: they send the signals that tasks wait for, answer questions, approve (sometimes of what they
//! did not see) or deny, and say what became of steps in doubt. They are a process of their own, which is not killed.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use longhaul::store::Controlled;
use longhaul::{AskKind, Client, Decision, Error, Event, Filter, State, Task, TaskId};
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::Anyhow;
use crate::chance::Chance;
use crate::handler::Given;
use crate::ledger::World;
use crate::process::{Place, open};
use crate::program::{Program, TENANTS, marker};
use crate::records::{Answer, Ask, Records, answer_of};
use crate::serve::Wires;
use crate::web::{Asking, Web, answer_of as answer_over_http};

/// How many there are.
const PEOPLE: usize = 16;

/// The people as a process.
pub async fn people(place: Place) -> Result<(), Anyhow> {
    let (client, world) = (open(&place.store).await?, World::open(&place.folder)?);
    let records = Arc::new(Records::open(&place.folder, "people")?);
    let wires = Wires::find(&place.folder)?;
    let web = wires.map(|wires| Web::new(wires, Arc::clone(&records))).transpose()?;
    help(client, world, records, web, Duration::from_millis(50)).await
}

/// Looks after waiting tasks until it is killed, with this pause in between; with `web`, half of the time over HTTP.
pub async fn help(
    client: Client,
    world: World,
    records: Arc<Records>,
    web: Option<Web>,
    pause: Duration,
) -> Result<(), Anyhow> {
    let done = Mutex::default();
    loop {
        for tenant in TENANTS {
            let client = client.for_tenant(tenant);
            // What cannot be done now, because the store is away, is done in the next round.
            if let Ok(waiting) = waiting(&client).await {
                let helper =
                    Helper { client: &client, records: &records, world: &world, done: &done, web: web.as_ref() };
                let helped: Vec<_> = waiting.iter().map(|task| helper.help(task)).collect();
                let helped = stream::iter(helped).buffer_unordered(PEOPLE);
                helped.try_collect::<Vec<()>>().await?;
            }
        }
        sleep(pause).await;
    }
}

async fn waiting(client: &Client) -> Result<Vec<Task>, Error> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let filter = Filter { state: Some(State::Waiting), after, limit: 1_000, ..Filter::default() };
        let page = client.page(&filter).await?;
        all.extend(page.tasks);
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(all),
        }
    }
}

struct Helper<'a> {
    client: &'a Client,
    records: &'a Records,
    world: &'a World,
    /// The signals that were sent.
    done: &'a Mutex<BTreeSet<(TaskId, String)>>,
    /// Servers, if there are any: half of the people use them.
    web: Option<&'a Web>,
}

impl Helper<'_> {
    fn done(&self) -> MutexGuard<'_, BTreeSet<(TaskId, String)>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn help(&self, task: &Task) -> Result<(), Anyhow> {
        let Some(waiting) = &task.waiting_for else { return Ok(()) };
        let id = task.id;
        match waiting.kind.as_str() {
            "signal" => {
                // Once for each name: a second one would be kept for nobody. One that came too late for a task that is
                // resumed afterwards was not sent.
                if self.done().contains(&(id, waiting.id.clone())) {
                    return Ok(());
                }
                let ask = Ask::Other { task: id, what: format!("signal {}", waiting.id) };
                let marker = marker(&task.tenant);
                let path = format!("/v1/tasks/{id}/signals/{}", waiting.id);
                let sent = match self.by_web(task, Asking::post(&path, &json!(marker)), &ask).await? {
                    Some(sent) => sent,
                    None => self.ask(id, ask, self.client.signal(id, &waiting.id, &marker)).await?,
                };
                if sent {
                    self.done().insert((id, waiting.id.clone()));
                }
            }
            "question" | "approval" => self.answer(task).await?,
            "in_doubt" => self.decide(task, &waiting.id).await?,
            _ => {}
        }
        Ok(())
    }

    /// The same over HTTP, if this one uses servers; gives whether it was done.
    async fn by_web(&self, task: &Task, asking: Asking<'_>, ask: &Ask) -> Result<Option<bool>, Anyhow> {
        let Some(web) = self.web.filter(|_| task.id.0.as_u128().is_multiple_of(2)) else { return Ok(None) };
        let open = self.records.ask(ask.clone())?;
        let answer = answer_over_http(Some(task.id), &web.ask(&task.tenant, asking).await);
        let done = matches!(answer, Answer::Done { .. });
        self.records.answer(open, answer)?;
        Ok(Some(done))
    }

    /// Approves or denies over HTTP, if this one uses servers; gives whether it did.
    async fn approve_by_web(&self, task: &Task, ask: &Ask, approval: &str, body: &Value) -> Result<bool, Anyhow> {
        let path = format!("/v1/tasks/{}/approvals/{approval}", task.id);
        Ok(self.by_web(task, Asking::post(&path, body), ask).await?.is_some())
    }

    /// Asks, and records it; gives whether it was done.
    async fn ask(
        &self,
        task: TaskId,
        ask: Ask,
        asking: impl Future<Output = Result<Controlled, Error>>,
    ) -> Result<bool, Anyhow> {
        let open = self.records.ask(ask)?;
        let answer = asking.await;
        let done = answer.is_ok();
        self.records.answer(open, answer_of(task, answer.map(|told| (task, Some(told.state)))))?;
        Ok(done)
    }

    async fn answer(&self, task: &Task) -> Result<(), Anyhow> {
        let id = task.id;
        let Ok(asks) = self.client.asks(id).await else { return Ok(()) };
        for ask in asks.iter().filter(|ask| ask.decided_at.is_none()) {
            if ask.kind == AskKind::Question {
                let what = Ask::Other { task: id, what: "answer".to_owned() };
                self.ask(id, what, self.client.answer(id, Some(&ask.id), "left")).await?;
                continue;
            }
            // The same person decides the same each time, and in every run of a seed.
            let program: Program = serde_json::from_str(task.input.get())?;
            let mut chance = Chance::new(crate::ledger::digest(&format!("{} {}", program.number, ask.step)));
            let approve = |right| Ask::Approve { task: id, approval: ask.id.clone(), right };
            if chance.percent(30) {
                let seen = "0".repeat(ask.digest.len());
                let body = json!({"decision": "approve", "digest": seen});
                if !self.approve_by_web(task, &approve(false), &ask.id, &body).await? {
                    let asking = self.client.approve(id, Some(&ask.id), None, Some(&seen));
                    self.ask(id, approve(false), asking).await?;
                }
            }
            if chance.percent(15) {
                let what = Ask::Other { task: id, what: "deny".to_owned() };
                if !self.approve_by_web(task, &what, &ask.id, &json!({"decision": "deny"})).await? {
                    self.ask(id, what, self.client.deny(id, Some(&ask.id), None)).await?;
                }
            } else {
                let body = json!({"decision": "approve", "digest": ask.digest});
                if !self.approve_by_web(task, &approve(true), &ask.id, &body).await? {
                    let asking = self.client.approve(id, Some(&ask.id), None, Some(&ask.digest));
                    self.ask(id, approve(true), asking).await?;
                }
            }
        }
        Ok(())
    }

    /// Looks whether it happened, and says so.
    async fn decide(&self, task: &Task, step: &str) -> Result<(), Anyhow> {
        let id = task.id;
        let program: Program = serde_json::from_str(task.input.get())?;
        // Undos are never in doubt: they may happen again. A step that was undone and is started again has another key.
        let exported = self.client.export(id).await;
        let Ok(exported) = exported else { return Ok(()) };
        let found = self.world.find(&key_of(id, step, &exported.events))?;
        let decision = match found {
            Some(result) => Decision::Done(to_raw_value(&Given { result, marker: program.marker })?),
            None => Decision::Retry,
        };
        let ask = Ask::Other { task: id, what: format!("decide {step} {}", decision.name()) };
        self.ask(id, ask, self.client.decide(id, step, decision, None)).await?;
        Ok(())
    }
}

/// The idempotency key of a step's newest call, as its events tell it.
fn key_of(task: TaskId, step: &str, events: &[Event]) -> String {
    let undone = format!("undo {step}");
    let undone =
        events.iter().filter(|event| event.kind == "step.completed" && event.step.as_deref() == Some(&undone));
    match undone.count() {
        0 => format!("{task}/{step}"),
        times => format!("{task}/{step}~{}", times + 1),
    }
}
