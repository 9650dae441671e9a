//! How a client reaches the product: by the library on the store itself, or over HTTP. What it asks, and what it is told, is the same.

use std::sync::Arc;
use std::time::Duration;

use longhaul::{Client, Error, State, StatePatch, TaskId};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::Anyhow;
use crate::chance::Chance;
use crate::ledger::digest;
use crate::program::{HANDLER, Plan, Same, WINDOW};
use crate::records::{Answer, Ask, Records, answer_of};
use crate::web::{self, Asking, Web};

/// How often something is repeated over HTTP that may be, when no answer came.
const REPEATS: u32 = 40;
/// The pause before it is repeated.
const PAUSE: Duration = Duration::from_millis(100);

/// See the module.
#[derive(Clone)]
pub enum Via {
    /// The library.
    Library(Client),
    /// HTTP, with the token of this tenant.
    Web(Arc<Web>, &'static str),
}

impl Via {
    /// Submits a task until it is accepted or refused; gives its id if it was accepted.
    pub async fn submit(
        &self,
        records: &Records,
        plan: &Plan,
        hook: Option<&str>,
    ) -> Result<Option<TaskId>, Anyhow> {
        match self {
            Self::Library(client) => submit(client, records, plan, hook).await,
            Self::Web(web, _) => post(web, records, plan, hook).await,
        }
    }

    /// Cancels.
    pub async fn cancel(&self, records: &Records, task: TaskId) -> Result<Answer, Anyhow> {
        self.control(records, task, Ask::Cancel { task }, async |client| {
            let told = client.cancel(task, Some("as planned")).await?;
            Ok((task, Some(told.state)))
        })
        .await
    }

    /// Opens it again.
    pub async fn resume(&self, records: &Records, task: TaskId) -> Result<Answer, Anyhow> {
        self.control(records, task, Ask::Resume { task }, async |client| {
            let told = client.resume(task).await?;
            Ok((task, Some(told.state)))
        })
        .await
    }

    /// Undoes what it did.
    pub async fn undo(&self, records: &Records, task: TaskId) -> Result<Answer, Anyhow> {
        self.control(records, task, Ask::Undo { task }, async |client| {
            let undo = client.undo(task, Some("as planned")).await?;
            Ok((undo.id, None))
        })
        .await
    }

    /// Forks it.
    pub async fn fork(&self, records: &Records, task: TaskId, from: &str) -> Result<Answer, Anyhow> {
        self.control(records, task, Ask::Fork { task, from: from.to_owned() }, async |client| {
            let fork = client.fork(task, from, None).await?;
            Ok((fork.id, None))
        })
        .await
    }

    /// Changes the state's goal, if the state is of this version.
    pub async fn patch(&self, records: &Records, task: TaskId, version: u64, goal: u64) -> Result<Answer, Anyhow> {
        self.control(records, task, Ask::Patch { task, version, goal }, async |client| {
            let patch = StatePatch { set_goal: Some(goal.to_string()), ..StatePatch::default() };
            client.patch_state(task, patch, Some(version)).await?;
            Ok((task, None))
        })
        .await
    }

    /// The version of a task's state and the number that is its goal; `None` while it has none, or nobody answers.
    pub async fn state(&self, task: TaskId) -> Option<(u64, u64)> {
        match self {
            Self::Library(client) => {
                let (version, state) = client.state(task).await.ok()??;
                Some((version, state.goal.parse().ok()?))
            }
            Self::Web(web, tenant) => {
                let said = web.ask(tenant, Asking::get(&format!("/v1/tasks/{task}/state"))).await.ok()?;
                let goal = said.body["state"]["goal"].as_str()?.parse().ok()?;
                Some((said.body["version"].as_u64()?, goal))
            }
        }
    }

    /// How the task ended; `None` when it has not within this time, or is gone.
    pub async fn ended(&self, task: TaskId, within: Duration) -> Option<State> {
        let until = Instant::now() + within;
        // It is looked at once at least.
        loop {
            let time = until.saturating_duration_since(Instant::now()).min(Duration::from_secs(2));
            let state = match self {
                Self::Library(client) => match client.wait(task, time).await {
                    Ok(task) => Some(task.state),
                    Err(Error::NotFound(_)) => return None,
                    Err(_) => None,
                },
                Self::Web(web, tenant) => {
                    let path = format!("/v1/tasks/{task}/wait?timeout={}ms", time.as_millis().max(1));
                    match web.ask(tenant, Asking::get(&path)).await {
                        Ok(said) if said.status == 404 => return None,
                        Ok(said) => serde_json::from_value(said.body["state"].clone()).ok(),
                        Err(_) => None,
                    }
                }
            };
            if let Some(state) = state.filter(|state: &State| state.is_final()) {
                return Some(state);
            }
            if Instant::now() >= until {
                return None;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Asks for something and notes the answer; over HTTP again and again while there is none, where that is the same as once.
    async fn control(
        &self,
        records: &Records,
        task: TaskId,
        ask: Ask,
        call: impl AsyncFnOnce(&Client) -> Result<(TaskId, Option<State>), Error>,
    ) -> Result<Answer, Anyhow> {
        let (web, tenant) = match self {
            Self::Library(client) => {
                let open = records.ask(ask)?;
                let answer = answer_of(task, call(client).await);
                records.answer(open, answer.clone())?;
                return Ok(answer);
            }
            Self::Web(web, tenant) => (web, tenant),
        };
        // A fork made twice is two, and a version is changed once.
        let repeats = if matches!(ask, Ask::Fork { .. } | Ask::Patch { .. }) { 1 } else { REPEATS };
        let mut answer = Answer::Unknown { why: String::new() };
        for _ in 0..repeats {
            let open = records.ask(ask.clone())?;
            let path = |what: &str| format!("/v1/tasks/{task}/{what}");
            let said = match &ask {
                Ask::Fork { from, .. } => {
                    web.ask(tenant, Asking::post(&path("fork"), &json!({"from_step": from}))).await
                }
                Ask::Patch { version, goal, .. } => {
                    let (path, body) = (path("state"), json!({"set_goal": goal.to_string()}));
                    let patch = Asking::patch(&path, &body).header("if-match", format!("\"{version}\""));
                    web.ask(tenant, patch).await
                }
                Ask::Cancel { .. } => web.ask(tenant, Asking::post(&path("cancel"), &json!({}))).await,
                Ask::Undo { .. } => web.ask(tenant, Asking::post(&path("undo"), &json!({}))).await,
                _ => web.ask(tenant, Asking::post(&path("resume"), &json!({}))).await,
            };
            answer = web::answer_of(Some(task), &said);
            records.answer(open, answer.clone())?;
            if !matches!(answer, Answer::Unknown { .. }) {
                break;
            }
            sleep(PAUSE).await;
        }
        Ok(answer)
    }
}

async fn submit(
    client: &Client,
    records: &Records,
    plan: &Plan,
    hook: Option<&str>,
) -> Result<Option<TaskId>, Anyhow> {
    let task = plan.task_told_to(hook);
    loop {
        let equal = (plan.same == Same::Equal).then(|| digest(task.input.get()));
        let (id, tenant) = (task.id, plan.tenant.to_owned());
        let open = records.ask(Ask::Submit { id, tenant, key: plan.key(), equal })?;
        let answer = client.submit(task.clone()).await;
        let accepted = answer.as_ref().ok().map(|accepted| accepted.id);
        let again = matches!(&answer, Err(Error::Store(error)) if error.is_unavailable());
        records.answer(open, answer_of(id, answer.map(|accepted| (accepted.id, None))))?;
        if !again {
            return Ok(accepted);
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// The body of a plan's submit, with the input as the library writes it: the same task, whichever way it comes.
fn body(plan: &Plan, hook: Option<&str>) -> Result<String, Anyhow> {
    let task = plan.task_told_to(hook);
    let mut body = json!({
        "handler": HANDLER,
        "priority": plan.priority,
        "max_attempts": plan.max_attempts,
        "tags": task.tags,
    });
    if let Some(ms) = plan.timeout_ms {
        body["timeout"] = format!("{ms}ms").into();
    }
    if plan.same == Same::Equal {
        body["dedupe_window"] = format!("{}s", WINDOW.as_secs()).into();
    }
    if let Some(key) = plan.concurrency_key {
        body["concurrency_key"] = key.into();
    }
    if let Some(webhook) = &task.webhook {
        body["webhook"] = json!({"url": webhook.url, "events": webhook.events});
    }
    let Value::Object(fields) = body else { return Err("a body is an object".into()) };
    let mut text = format!("{{\"input\":{}", task.input.get());
    for (name, value) in fields {
        text.push_str(&format!(",{}:{value}", Value::String(name)));
    }
    text.push('}');
    Ok(text)
}

async fn post(web: &Web, records: &Records, plan: &Plan, hook: Option<&str>) -> Result<Option<TaskId>, Anyhow> {
    let (number, tenant) = (plan.program.number, plan.tenant);
    let mut chance = Chance::of(number, u64::MAX - 1);
    let equal = (plan.same == Same::Equal).then(|| digest(plan.task().input.get()));
    // Without one, a repeated submit would be another task; equal ones are recognised by what they are.
    let key = plan.key().or_else(|| equal.is_none().then(|| format!("http-{number}")));
    let body = body(plan, hook)?;
    loop {
        let ask = Ask::Post { number, tenant: tenant.to_owned(), key: key.clone(), equal };
        let open = records.ask(ask)?;
        let mut asking = Asking::post_text("/v1/tasks", body.clone());
        if let Some(key) = &key {
            asking = asking.header("idempotency-key", key);
        }
        let leave = chance.percent(15).then(|| Duration::from_micros(chance.between(200, 20_000)));
        let answer = web::answer_of(None, &web.ask(tenant, asking.leaving(leave)).await);
        records.answer(open, answer.clone())?;
        match answer {
            Answer::Done { task, .. } => return Ok(Some(task)),
            Answer::Refused { .. } => return Ok(None),
            Answer::Unknown { .. } => sleep(Duration::from_millis(50)).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul::request::Submit;

    #[tokio::test]
    async fn a_submit_over_http_asks_for_the_same_as_one_by_the_library() {
        for number in 0..300 {
            let plan = Plan::draw(3, number, 20);
            let hook = Some("http://127.0.0.1:9/hook");
            let text = body(&plan, hook).expect("written");
            let submit: Submit = serde_json::from_str(&text).expect("read");
            let asked = submit.into_task::<longhaul::task::Invalid>(async || unreachable!()).await.expect("good");
            let own = plan.task_told_to(hook);
            let text = |task: &longhaul::NewTask| {
                let mut value = serde_json::to_value(task).expect("writes");
                // The client's own are in the header and the token.
                for field in ["id", "key", "tenant"] {
                    value[field] = Value::Null;
                }
                value.to_string()
            };
            assert_eq!(text(&asked), text(&own));
        }
    }
}
