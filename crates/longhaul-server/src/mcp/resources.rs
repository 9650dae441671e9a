//! What can be read and watched: the state of each task that has one, and its artifacts.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::{StreamExt, TryStreamExt, stream};
use longhaul::{AgentState, Client, Error, Filter, Task, TaskId};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use rmcp::model::{ListResourcesResult, Resource, ResourceContents, ResourceTemplate};
use serde_json::{Value, json};

use crate::auth::Caller;
use crate::problem::Problem;
use crate::routes::artifacts::piece;
use crate::routes::tasks::{after, cursor};
use crate::state::App;

/// The template of the states.
const STATE_TEMPLATE: &str = "state://agents/{agent_id}/tasks/{task_id}";
/// The template of the artifacts.
const ARTIFACT_TEMPLATE: &str = "artifact://tasks/{task_id}/{artifact_id}";
/// What the URIs of each begin with.
const STATES: &str = "state://agents/";
const ARTIFACTS: &str = "artifact://tasks/";
/// How many tasks are looked at for one page.
const PAGE: usize = 50;
/// How many of them at once.
const AT_ONCE: usize = 8;
/// The largest artifact that is given whole; `read_artifact` reads larger ones in pieces.
const MAX_WHOLE: u64 = 1024 * 1024;
/// How many characters of a goal or a summary are listed.
const EXCERPT: usize = 300;
/// What need not be encoded in a piece of a URI.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// What a URI names.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Named {
    State { agent: String, task: TaskId },
    Artifact { task: TaskId, artifact: String },
}

impl Named {
    /// What is not a URI of ours names nothing, as does one of a task that is not there.
    pub(super) fn parse(uri: &str) -> Result<Self, Problem> {
        let nothing = || Problem::not_found("resource", uri);
        let decode = |piece: &str| percent_decode_str(piece).decode_utf8().ok().map(|piece| piece.into_owned());
        let named = if let Some(rest) = uri.strip_prefix(STATES) {
            rest.split_once("/tasks/").and_then(|(agent, task)| {
                Some(Self::State { agent: decode(agent)?, task: decode(task)?.parse().ok()? })
            })
        } else if let Some(rest) = uri.strip_prefix(ARTIFACTS) {
            rest.split_once('/').and_then(|(task, artifact)| {
                Some(Self::Artifact { task: decode(task)?.parse().ok()?, artifact: decode(artifact)? })
            })
        } else {
            None
        };
        named.ok_or_else(nothing)
    }
}

pub(super) fn state_uri(agent: &str, task: TaskId) -> String {
    format!("state://agents/{}/tasks/{task}", utf8_percent_encode(agent, PLAIN))
}

fn artifact_uri(task: TaskId, artifact: &str) -> String {
    format!("artifact://tasks/{task}/{}", utf8_percent_encode(artifact, PLAIN))
}

/// The templates of all resources.
pub(super) fn templates() -> Vec<ResourceTemplate> {
    vec![
        ResourceTemplate::new(STATE_TEMPLATE, "state")
            .with_title("State of an agent's task")
            .with_description(
                "Goal, plan, facts, open questions and artifacts of a task, with a version. Subscribe to hear of every change; \
                 the tool patch_state changes it.",
            )
            .with_mime_type("application/json"),
        ResourceTemplate::new(ARTIFACT_TEMPLATE, "artifact")
            .with_title("Artifact of a task")
            .with_description(
                "A large result of a task, whole. The tool read_artifact reads one of more than 1 MiB in pieces.",
            ),
    ]
}

/// The state of a task as others see it; `agent`, when given, must be the task's.
pub(super) async fn state(client: &Client, task: TaskId, agent: Option<&str>) -> Result<Value, Problem> {
    let nothing = || Problem::not_found("state of task", &task.to_string());
    let found = client.task(task).await?;
    if agent.is_some_and(|agent| agent != found.handler) {
        return Err(nothing());
    }
    let (version, state) = client.state(task).await?.ok_or_else(nothing)?;
    let artifacts: Vec<&str> = state.artifacts.iter().map(|artifact| artifact.artifact_id.as_str()).collect();
    Ok(json!({
        "uri": state_uri(&found.handler, task),
        "agent_id": found.handler,
        "task_id": task,
        "state": found.state,
        "plan": state.plan,
        "artifacts": artifacts,
        "version": version,
        "agent_state": state,
    }))
}

/// Whether a URI is one of those that are answered here.
pub(super) fn is_ours(uri: &str) -> bool {
    uri.starts_with(STATES) || uri.starts_with(ARTIFACTS)
}

/// The task whose state a URI names, if it is there for this client. It may have no state yet.
pub(super) async fn watchable(client: &Client, uri: &str) -> Result<TaskId, Problem> {
    let Named::State { agent, task } = Named::parse(uri)? else {
        return Err(Problem::not_found("resource that changes", uri));
    };
    if client.task(task).await?.handler != agent {
        return Err(Problem::not_found("state of task", &task.to_string()));
    }
    Ok(task)
}

/// What a URI names, read.
pub(super) async fn read(app: &App, caller: &Caller, uri: &str) -> Result<ResourceContents, Problem> {
    match Named::parse(uri)? {
        Named::State { agent, task } => {
            let state = state(&caller.client, task, Some(&agent)).await?;
            Ok(ResourceContents::text(state.to_string(), uri).with_mime_type("application/json"))
        }
        Named::Artifact { task, artifact } => {
            let piece = piece(app, caller, task, &artifact, 0, MAX_WHOLE).await?;
            if piece.size > MAX_WHOLE {
                let detail = format!(
                    "the artifact has {} bytes, more than are given at once; read it in pieces with the tool read_artifact",
                    piece.size
                );
                return Err(Problem::new("too_large", detail).with("bytes", piece.size));
            }
            match String::from_utf8(piece.bytes.into()) {
                Ok(text) if !piece.binary => Ok(ResourceContents::text(text, uri)),
                Ok(text) => Ok(blob(text.as_bytes(), uri)),
                Err(error) => Ok(blob(error.as_bytes(), uri)),
            }
        }
    }
}

fn blob(bytes: &[u8], uri: &str) -> ResourceContents {
    ResourceContents::blob(STANDARD.encode(bytes), uri).with_mime_type("application/octet-stream")
}

/// A page of resources: the states of tasks, newest first, each followed by its artifacts. A page can be short, or
/// empty, and have a next one: not every task has a state.
pub(super) async fn list(client: &Client, from: Option<&str>) -> Result<ListResourcesResult, Problem> {
    let filter = Filter { limit: PAGE, after: from.map(after).transpose()?, ..Filter::default() };
    let page = client.page(&filter).await?;
    let found: Vec<(Task, Option<AgentState>)> = stream::iter(page.tasks)
        .map(|task| async move {
            match client.state(task.id).await {
                Ok(state) => Ok((task, state.map(|(_, state)| state))),
                // Removed since it was listed.
                Err(Error::NotFound(_)) => Ok((task, None)),
                Err(error) => Err(Problem::from(error)),
            }
        })
        .buffered(AT_ONCE)
        .try_collect()
        .await?;
    let with_state = found.into_iter().filter_map(|(task, state)| state.map(|state| (task, state)));
    let resources = with_state.flat_map(|(task, state)| resources_of(&task, state)).collect();
    let mut result = ListResourcesResult::with_all_items(resources);
    result.next_cursor = page.next.map(cursor);
    Ok(result)
}

/// The beginning of a text: a list is for choosing, not for reading.
fn excerpt(text: &str) -> String {
    match text.char_indices().nth(EXCERPT) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

fn resources_of(task: &Task, state: AgentState) -> Vec<Resource> {
    let of_state = Resource::new(state_uri(&task.handler, task.id), format!("{} {}", task.handler, task.id))
        .with_title(format!("State of {} ({})", task.handler, task.state))
        .with_description(excerpt(&state.goal))
        .with_mime_type("application/json");
    let of_artifacts = state.artifacts.into_iter().map(|artifact| {
        Resource::new(artifact_uri(task.id, &artifact.artifact_id), artifact.artifact_id)
            .with_title(format!("{} of {}", artifact.kind, task.handler))
            .with_description(excerpt(&artifact.summary))
            .with_size(artifact.bytes)
    });
    std::iter::once(of_state).chain(of_artifacts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_names_what_it_was_made_for() {
        let task = TaskId::new();
        for agent in ["devops", "a%2Fb", "агент", "a?b#c"] {
            let uri = state_uri(agent, task);
            assert_eq!(Named::parse(&uri).expect("ours"), Named::State { agent: agent.to_owned(), task }, "{uri}");
        }
        let artifact = "sha256-00".to_owned();
        let uri = artifact_uri(task, &artifact);
        assert_eq!(Named::parse(&uri).expect("ours"), Named::Artifact { task, artifact });
    }

    #[test]
    fn any_other_uri_names_nothing() {
        let task = TaskId::new();
        for uri in [
            "",
            "state://agents/a",
            "state://agents/a/tasks/",
            "state://agents/a/tasks/1",
            &format!("state://agents/a/tasks/{task}/more"),
            &format!("STATE://agents/a/tasks/{task}"),
            &format!("state://agents/%ff/tasks/{task}"),
            "artifact://tasks/x/y",
            "file:///etc/passwd",
        ] {
            assert_eq!(Named::parse(uri).expect_err(uri).code(), "not_found", "{uri}");
        }
    }
}
