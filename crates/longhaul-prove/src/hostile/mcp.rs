//! Hostile messages of MCP: over HTTP with and without a session, and as lines.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, Request};
use longhaul_hostile::Judged;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::bed::{Answer, Bed, PATIENCE, Place};
use super::trial::{Broke, Trial};

/// After so many inputs what is stored is compared with what was accepted, and the next bed is made.
const BATCH: u64 = 2_000;
/// How long is waited for what may never come.
const WAITS: Duration = Duration::from_millis(15);
/// The revisions that are spoken.
const MODERN: &str = "2026-07-28";
const LEGACY: &str = "2025-11-25";
/// The error of a server that failed.
const INTERNAL: i64 = -32603;

pub(super) async fn messages(trial: &mut Trial<'_>) -> Result<(), Broke> {
    'beds: loop {
        let mut bed = Bed::make(&Place::Memory, false).await?;
        let session = session(&bed).await?;
        for _ in 0..BATCH {
            let Some(input) = trial.draw()? else { return bed.audit().await };
            let message = bed.filled(&input);
            let way = trial.mutator.dice.below(25);
            let judged = match way {
                0 => lines(&mut bed, &message).await?,
                1..8 => Some(over_http(&mut bed, &message, Some(&session)).await?),
                _ => Some(over_http(&mut bed, &message, None).await?),
            };
            trial.judged(judged.unwrap_or(Judged::Accepted))?;
            if judged.is_none() {
                continue 'beds;
            }
        }
        bed.audit().await?;
        trial.calm()?;
    }
}

/// Begins a session of the older revision.
async fn session(bed: &Bed) -> Result<String, Broke> {
    let begin = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params":
        {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "hostile", "version": "1"}}});
    let answer = bed.send_within(posted(begin.to_string().as_bytes(), None)?, PATIENCE, PATIENCE / 3).await?;
    let session = answer.headers.get("mcp-session-id").and_then(|session| session.to_str().ok());
    let session = session.ok_or_else(|| Broke(format!("no session begins: {answer:?}")))?.to_owned();
    let told = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    bed.send_within(posted(told.to_string().as_bytes(), Some(&session))?, PATIENCE, PATIENCE / 3).await?;
    Ok(session)
}

/// A message as clients send it: what the head must say of it is taken out of it, if it says anything.
fn posted(message: &[u8], session: Option<&str>) -> Result<Request<Body>, Broke> {
    let said: Value = serde_json::from_slice(message).unwrap_or_default();
    let mut request = Request::post("/mcp")
        .header("host", "localhost")
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream")
        .body(Body::from(message.to_vec()))?;
    let headers = request.headers_mut();
    let modern = session.is_none() && said["method"] != "initialize";
    headers.insert("mcp-protocol-version", HeaderValue::from_static(if modern { MODERN } else { LEGACY }));
    if let Some(session) = session {
        headers.insert("mcp-session-id", HeaderValue::from_str(session)?);
    }
    if modern {
        let named = ["name", "uri", "taskId"].iter().find_map(|name| said["params"][name].as_str());
        for (header, value) in [("mcp-method", said["method"].as_str()), ("mcp-name", named)] {
            if let Some(Ok(value)) = value.map(HeaderValue::from_str) {
                headers.insert(header, value);
            }
        }
    }
    Ok(request)
}

async fn over_http(bed: &mut Bed, message: &[u8], session: Option<&str>) -> Result<Judged, Broke> {
    // Who waits or listens may be told nothing for a long time.
    let waits =
        [b"wait".as_slice(), b"listen"].iter().any(|word| message.windows(word.len()).any(|text| text == *word));
    let (whole, pause) = if waits { (WAITS, WAITS) } else { (PATIENCE, PATIENCE / 3) };
    let answer = bed.send_within(posted(message, session)?, whole, pause).await?;
    bed.check(&answer)?;
    // One that began another session ends it: there is room for a hundred.
    if let Some(begun) = answer.headers.get("mcp-session-id").cloned() {
        let mut end = Request::delete("/mcp").header("host", "localhost").body(Body::empty())?;
        end.headers_mut().insert("mcp-session-id", begun);
        bed.send(end).await?;
    }
    let said = spoken(&answer);
    let mut accepted = answer.status.is_success();
    for said in &said {
        accepted &= heard(bed, said)?;
    }
    judged(bed.has_changed().await?, accepted)
}

/// What a server said: as it is, or in frames of a stream.
fn spoken(answer: &Answer) -> Vec<Value> {
    match answer.streams {
        false => answer.json().into_iter().collect(),
        true => {
            let text = String::from_utf8_lossy(&answer.body);
            text.lines()
                .filter_map(|line| line.strip_prefix("data:"))
                .filter_map(|data| serde_json::from_str(data.trim()).ok())
                .collect()
        }
    }
}

/// Takes note of an answer; whether it is none that refuses.
fn heard(bed: &mut Bed, said: &Value) -> Result<bool, Broke> {
    if said["error"]["code"] == INTERNAL {
        return Err(Broke(format!("the server failed: {said}")));
    }
    let result = &said["result"];
    if result["isError"] == true {
        let text = result["content"][0]["text"].as_str().unwrap_or_default();
        let problem: Value = serde_json::from_str(text).unwrap_or_default();
        if problem["status"].as_u64().is_some_and(|status| status >= 500) {
            return Err(Broke(format!("a tool failed: {problem}")));
        }
        return Ok(false);
    }
    bed.hear(&result["structuredContent"]);
    Ok(said["error"].is_null())
}

/// What was refused has stored nothing. (Only accepted calls of tools store: there is no other way to compare than by looking at all.)
fn judged(changed: bool, accepted: bool) -> Result<Judged, Broke> {
    match (changed, accepted) {
        (true, false) => Err(Broke("a message was refused, and something was stored".to_owned())),
        (_, true) => Ok(Judged::Accepted),
        (false, false) => Ok(Judged::Refused),
    }
}

/// A session over lines: its beginning, the message, the end. `None` when something was stored and the answer did not come in time.
async fn lines(bed: &mut Bed, message: &[u8]) -> Result<Option<Judged>, Broke> {
    let (near, far) = tokio::io::duplex(1 << 20);
    let (input, output) = tokio::io::split(far);
    let served = tokio::spawn(longhaul_server::mcp::serve_lines(bed.app.clone(), input, output));
    let (mut read, mut write) = tokio::io::split(near);
    let begin = json!({"jsonrpc": "2.0", "id": "first", "method": "initialize", "params":
        {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "hostile", "version": "1"}}});
    let told = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    let last = json!({"jsonrpc": "2.0", "id": "last", "method": "tools/list"});
    let mut answer = Vec::new();
    // The server may have had enough at any moment: what it says then is looked at, and what it does not say is not missed.
    let exchanged = tokio::time::timeout(PATIENCE, async {
        let _ = write.write_all(format!("{begin}\n{told}\n").as_bytes()).await;
        until(&mut read, &mut answer, b"\"id\":\"first\"").await;
        let _ = write.write_all(&[message, b"\n"].concat()).await;
        // Messages are answered as they are done: this one first, if it is one.
        let _ = tokio::time::timeout(WAITS, until(&mut read, &mut answer, b"\n{\"jsonrpc\"")).await;
        let _ = write.write_all(format!("{last}\n").as_bytes()).await;
        until(&mut read, &mut answer, b"\"id\":\"last\"").await;
    });
    let in_time = exchanged.await.is_ok();
    served.abort();
    if let Err(error) = served.await
        && error.is_panic()
    {
        return Err(Broke(format!("the server of lines panicked: {error}")));
    }
    if !in_time {
        return Err(Broke(format!("a session of lines goes silent: {}", String::from_utf8_lossy(&answer))));
    }
    let (mut answers, mut accepted) = (0, false);
    for line in answer.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let said: Value =
            serde_json::from_slice(line).map_err(|error| Broke(format!("a line is no JSON: {error}")))?;
        let sound = heard(bed, &said)?;
        if said["id"] != "first" && said["id"] != "last" {
            answers += 1;
            accepted |= sound;
        }
    }
    // Of several messages in one input each has an answer, in any order, and the one that was accepted may be the last.
    let asked = message.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count();
    let changed = bed.has_changed().await?;
    if changed && !accepted && answers < asked.max(1) {
        return Ok(None);
    }
    judged(changed, accepted).map(Some)
}

/// Whether a line has come whole that says `what`, or that begins with it.
fn has_come(answer: &[u8], what: &[u8]) -> bool {
    let said = answer.windows(what.len()).position(|text| text == what);
    said.is_some_and(|at| answer[at + what.len()..].contains(&b'\n'))
}

/// Reads until it has come, or nothing more comes.
async fn until(read: &mut (impl AsyncReadExt + Unpin), answer: &mut Vec<u8>, what: &[u8]) {
    let mut buffer = vec![0; 64 * 1024];
    while !has_come(answer, what) {
        match read.read(&mut buffer).await {
            Ok(count @ 1..) => answer.extend_from_slice(&buffer[..count]),
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::has_come;

    #[test]
    fn an_answer_has_come_with_the_end_of_its_line() {
        assert!(!has_come(b"{\"id\":\"la", b"\"id\":\"last\""));
        assert!(!has_come(b"{\"id\":\"last\",\"result\":\"the fir", b"\"id\":\"last\""));
        assert!(has_come(b"{\"id\":\"last\",\"result\":\"all\"}\n", b"\"id\":\"last\""));
    }
}
