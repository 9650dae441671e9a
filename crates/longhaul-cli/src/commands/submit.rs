//! `longhaul submit`.

use jiff::Timestamp;
use reqwest::Method;
use reqwest::header::HeaderName;
use serde_json::{Map, Value, json};

use super::{input_of, watch};
use crate::args::client::{SubmitArgs, Work};
use crate::exit::Failure;
use crate::http::{Answer, Path, Server, Trouble};
use crate::out;
use crate::units;

/// How often a submit is sent when its answer is lost. With its key it is the same task each time.
const TRIES: u32 = 3;

pub(crate) async fn run(args: SubmitArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let mut body = body(&args.handler, &args.input, &args.work)?;
    if let Some(when) = &args.run_at {
        body.insert("run_at".to_owned(), json!(run_at(when, Timestamp::now())?));
    }
    let answer = submit(&server, &Value::Object(body), args.key.as_deref()).await?;
    let task = answer.json()?;
    let id = task["id"].as_str().ok_or_else(|| Failure::internal("the server's answer has no id"))?;
    if args.follow {
        out::note(format!("submitted {id}"));
        return watch::follow(&server, id, &args.patience, args.remote.json).await;
    }
    if args.wait {
        out::note(format!("submitted {id}"));
        return watch::wait_for(&server, id, None, &args.patience, args.remote.json).await;
    }
    if args.remote.json { answer.print() } else { out::line(id) }
}

/// What the server is sent to make a task.
pub(crate) fn body(handler: &str, input: &str, work: &Work) -> Result<Map<String, Value>, Failure> {
    let mut body = Map::new();
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            body.insert(name.to_owned(), value);
        }
    };
    set("handler", Some(json!(handler)));
    set("input", Some(input_of(input)?));
    set("priority", work.priority.map(Value::from));
    set("queue", work.queue.as_deref().map(Value::from));
    set("timeout", work.timeout.map(|timeout| units::show(timeout).into()));
    set("webhook", work.webhook.as_ref().map(|url| json!({"url": url})));
    set("concurrency_key", work.concurrency_key.as_deref().map(Value::from));
    set("max_attempts", work.max_attempts.map(Value::from));
    if !work.tags.is_empty() {
        let mut tags = Map::new();
        for (key, value) in &work.tags {
            if tags.insert(key.clone(), json!(value)).is_some() {
                return Err(Failure::usage(format!("the label '{key}' is given twice")));
            }
        }
        set("tags", Some(Value::Object(tags)));
    }
    Ok(body)
}

async fn submit(server: &Server, body: &Value, key: Option<&str>) -> Result<Answer, Failure> {
    // A key of its own makes it safe to send the same again when the answer was lost.
    let key = key.map_or_else(|| format!("cli-{}", uuid::Uuid::now_v7().simple()), str::to_owned);
    let mut tries = 1;
    loop {
        let call = server.request(Method::POST, &Path::new(&["v1", "tasks"]));
        let sent = call.header(HeaderName::from_static("idempotency-key"), &key).json(body).send().await;
        match sent {
            Err(Trouble::Unreachable(why)) if tries < TRIES && !why.starts_with("cannot reach") => tries += 1,
            other => return Ok(other?),
        }
    }
}

/// A moment, or a time from now.
fn run_at(when: &str, now: Timestamp) -> Result<String, Failure> {
    if let Ok(at) = when.parse::<Timestamp>() {
        return Ok(at.to_string());
    }
    let after = units::duration(when).map_err(|_| {
        Failure::usage(format!(
            "--run-at '{when}' is neither a moment like 2026-12-24T18:00:00Z nor a time like 10m"
        ))
    })?;
    let at = now.checked_add(after).map_err(|_| Failure::usage(format!("--run-at '{when}' is too far away")))?;
    Ok(at.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_at_is_a_moment_or_a_time_from_now() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a moment");
        assert_eq!(run_at("90m", now).expect("right"), "2026-01-01T01:30:00Z");
        assert_eq!(run_at("2026-12-24T18:00:00+01:00", now).expect("right"), "2026-12-24T17:00:00Z");
        assert_eq!(run_at("tomorrow", now).expect_err("wrong").code(), 2);
    }
}
