//! `longhaul cancel`, `resume`, `undo`, `fork`, `priority`, `message`, `signal`, `decide` and `state`: steering a
//! task.

use reqwest::header::{ETAG, IF_MATCH};
use reqwest::{Method, StatusCode};
use serde_json::{Map, Value, json};

use super::{input_of, text_of};
use crate::args::client::{
    CancelArgs, DecideArgs, ForkArgs, MessageArgs, PriorityArgs, Remote, SignalArgs, StateArgs, TaskArgs,
    UndoArgs, Verdict,
};
use crate::exit::Failure;
use crate::http::{Answer, Path, Server, Trouble};
use crate::out;

/// Says what was done, or gives the server's JSON.
pub(crate) fn done(remote: &Remote, answer: &Answer, sentence: impl AsRef<str>) -> Result<(), Failure> {
    if remote.json && !answer.text.is_empty() {
        return answer.print();
    }
    out::note(out::clean(sentence.as_ref()));
    Ok(())
}

fn with_reason(mut body: Map<String, Value>, reason: Option<&str>) -> Value {
    if let Some(reason) = reason {
        body.insert("reason".to_owned(), json!(reason));
    }
    Value::Object(body)
}

pub(crate) async fn cancel(args: CancelArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let body = with_reason(Map::from_iter([("undo".to_owned(), json!(args.undo))]), args.reason.as_deref());
    let answer = server.post(&Path::task(&args.id, &["cancel"]), &body).await?;
    // A running task ends a moment later, and one that has something to undo when that is done.
    let task = answer.json().unwrap_or_default();
    let told = match (task["state"].as_str(), task["phase"].as_str()) {
        (Some("cancelled"), _) => "is cancelled",
        (_, Some("compensating")) => "does not go on; what it did is being undone",
        _ if args.undo => "is told to stop; what it did is undone then",
        _ => "is told to stop",
    };
    done(&args.remote, &answer, format!("task {} {told}", args.id))
}

pub(crate) async fn resume(args: TaskArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.post(&Path::task(&args.id, &["resume"]), &json!({})).await?;
    let completed = answer.json().is_ok_and(|task| task["state"] == "completed");
    let told = if completed { "has completed; there is nothing to resume" } else { "goes on" };
    done(&args.remote, &answer, format!("task {} {told}", args.id))
}

pub(crate) async fn undo(args: UndoArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let body = with_reason(Map::new(), args.reason.as_deref());
    new_task(&args.remote, &server.post(&Path::task(&args.id, &["undo"]), &body).await?)
}

pub(crate) async fn fork(args: ForkArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let mut body = Map::from_iter([("from_step".to_owned(), json!(args.from_step))]);
    if let Some(input) = &args.input {
        body.insert("input".to_owned(), input_of(input)?);
    }
    new_task(&args.remote, &server.post(&Path::task(&args.id, &["fork"]), &Value::Object(body)).await?)
}

/// A task was made: its id is the data.
fn new_task(remote: &Remote, answer: &Answer) -> Result<(), Failure> {
    if remote.json {
        return answer.print();
    }
    let task = answer.json()?;
    out::line(task["id"].as_str().ok_or_else(|| Failure::internal("the server's answer has no id"))?)
}

pub(crate) async fn priority(args: PriorityArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.post(&Path::task(&args.id, &["priority"]), &json!({"priority": args.priority})).await?;
    done(&args.remote, &answer, format!("task {} has priority {}", args.id, args.priority))
}

pub(crate) async fn message(args: MessageArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let text = if args.text == "-" { text_of("-")? } else { args.text };
    let answer = server.post(&Path::task(&args.id, &["messages"]), &json!({"text": text})).await?;
    done(&args.remote, &answer, format!("task {} has the message", args.id))
}

pub(crate) async fn signal(args: SignalArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let message = input_of(&args.message)?;
    let answer = server.post(&Path::task(&args.id, &["signals", &args.name]), &message).await?;
    done(&args.remote, &answer, format!("task {} has the signal {}", args.id, args.name))
}

pub(crate) async fn decide(args: DecideArgs) -> Result<(), Failure> {
    let decision = match args.verdict {
        Verdict::Retry => "retry",
        Verdict::Done => "done",
        Verdict::Fail => "fail",
    };
    if args.result.is_some() && args.verdict != Verdict::Done {
        return Err(Failure::usage(format!("--result belongs to done, not to {decision}")));
    }
    let server = Server::new(&args.remote.server)?;
    let mut body = Map::from_iter([("decision".to_owned(), json!(decision))]);
    if let Some(result) = &args.result {
        body.insert("result".to_owned(), input_of(result)?);
    }
    let body = with_reason(body, args.reason.as_deref());
    let answer = server.post(&Path::task(&args.id, &["steps", &args.step, "decision"]), &body).await?;
    done(&args.remote, &answer, format!("step {} of task {}: {decision}", args.step, args.id))
}

pub(crate) async fn state(args: StateArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let path = Path::task(&args.id, &["state"]);
    let Some(patch) = &args.patch else {
        let answer = server.get(&path).await?;
        if args.remote.json {
            return answer.print();
        }
        let state = answer.json()?;
        out::note(format!("version {}", state["version"]));
        // Indented text is for people; its keys and values are JSON, so nothing in it drives a terminal.
        return out::line(serde_json::to_string_pretty(&state["state"]).unwrap_or_default());
    };
    let patch = text_of(patch)?;
    let parsed: Value = serde_json::from_str(&patch).map_err(|error| {
        Failure::usage(format!("--patch is not JSON: {error}; write it like {{\"set_goal\": \"…\"}}"))
    })?;
    if !parsed.is_object() {
        return Err(Failure::usage("--patch is not a JSON object; write it like {\"set_goal\": \"…\"}"));
    }
    let version = match args.if_version {
        Some(version) => format!("\"{version}\""),
        None => current_version(&server, &path).await?,
    };
    let call = server.request(Method::PATCH, &path).header(IF_MATCH, &version).body(patch);
    match call.send().await {
        Ok(answer) => {
            let version = answer.json().ok().map_or(Value::Null, |state| state["version"].clone());
            done(&args.remote, &answer, format!("the state of task {} has version {version}", args.id))
        }
        Err(trouble) if trouble.status() == Some(StatusCode::PRECONDITION_FAILED) => Err(Failure::usage(format!(
            "the state was changed by someone else in between, and yours was not written; look at it with \
             'longhaul state {}' and repeat the command if it is still right",
            args.id
        ))),
        Err(trouble) => Err(trouble.into()),
    }
}

async fn current_version(server: &Server, path: &Path) -> Result<String, Trouble> {
    let answer = server.get(path).await?;
    let tag = answer.headers.get(ETAG).and_then(|tag| tag.to_str().ok()).map(str::to_owned);
    let version = || answer.json().ok().and_then(|state| state["version"].as_u64()).map(|v| format!("\"{v}\""));
    // A proxy that compresses may have made the tag weak, which If-Match never matches.
    let tag = tag.map(|tag| tag.strip_prefix("W/").map_or(tag.clone(), str::to_owned));
    tag.or_else(version)
        .ok_or_else(|| Trouble::Unreachable("the server's answer has no version; is it Longhaul?".to_owned()))
}
