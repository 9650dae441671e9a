//! Secrets: the value of a variable that a tool may see, and the key of the model, appear nowhere, whatever
//! a tool prints and whatever a provider repeats.

mod agent;
mod common;
mod provider;

use std::path::Path;
use std::process::Command;

use agent::{Reads, Stage, calls, model, says};
use common::Folder;
use longhaul::State;
use longhaul_agent::Agent;
use provider::KEY;
use serde_json::json;

const VARIABLE: &str = "SERVICE_CANARY";
const CANARY: &str = "canary-\"7f3a\"-91d2c4e8";
/// The same as it stands in JSON, and what is left when only a part is hidden.
const TRACES: [&str; 4] = [CANARY, r#"canary-\"7f3a\"-91d2c4e8"#, "7f3a", "91d2c4e8"];
const NAME: &str = "a_secret_of_the_environment_appears_nowhere";

/// All files below a folder.
fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

fn assert_clean(what: &str, bytes: &[u8]) {
    for trace in TRACES.into_iter().chain([KEY]) {
        let found = bytes.windows(trace.len()).position(|window| window == trace.as_bytes());
        let around =
            found.map(|at| String::from_utf8_lossy(&bytes[at.saturating_sub(80)..(at + 80).min(bytes.len())]));
        assert!(found.is_none(), "{what} has {trace}: …{}…", around.unwrap_or_default());
    }
}

#[tokio::test]
async fn a_secret_of_the_environment_appears_nowhere() {
    if std::env::var(VARIABLE).is_ok() {
        return leak().await;
    }
    // In a process of its own, whose environment has the secret and whose logs are read.
    let run = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", NAME, "--nocapture"])
        .env(VARIABLE, CANARY)
        .output()
        .expect("it runs");
    let said = [run.stdout, run.stderr].concat();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&said));
    let text = String::from_utf8_lossy(&said);
    assert!(text.contains("longhaul"), "there are logs: {text}");
    assert_clean("the log", &said);
}

async fn leak() {
    tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(std::io::stderr).init();
    let echo = common::Server::answering("200 OK", &json!({"you sent": CANARY}).to_string()).await;
    let angry = common::Server::answering("400 Bad Request", &format!("what is {CANARY}?")).await;
    let folder = Folder::new();
    folder
        .script("print", r#"printf 'the token is %s.\n' "$SERVICE_CANARY""#)
        .script("fail", r#"printf 'no use for %s\n' "$SERVICE_CANARY" >&2; exit 3"#)
        .script(
            "object",
            r#"printf '{"token": "canary-\\"7f3a\\"-91d2c4e8", "canary-\\u00227f3a\\"-91d2c4e8": 1}'"#,
        )
        .script("flood", r#"i=0; while [ $i -lt 2000 ]; do echo "$i $SERVICE_CANARY"; i=$((i+1)); done"#)
        .script("server", SERVER);
    let tool = |name: &str, action: &str| {
        format!(
            "[[tool]]\nname = \"{name}\"\ndescription = \"Does it\"\nrisk = \"read_only\"\nattempts = 1\nenv = [\"{VARIABLE}\"]\n{action}\n"
        )
    };
    let http = |url: &str| {
        format!(
            "http = {{ method = \"GET\", url = \"{url}\", headers = {{ X-Token = \"{{{{env.{VARIABLE}}}}}\" }} }}"
        )
    };
    let mut manifest = "[agent]\nname = \"a\"\nmodel = \"m-1\"\n".to_owned();
    for name in ["print", "fail", "object", "flood"] {
        manifest.push_str(&tool(name, &format!("command = [\"./{name}\"]")));
    }
    manifest.push_str(&tool("echo", &http(&echo.url)));
    manifest.push_str(&tool("angry", &http(&angry.url)));
    manifest.push_str(&format!(
        "[[mcp]]\nname = \"mcp\"\ncommand = [\"./server\"]\nenv = [\"{VARIABLE}\"]\nrisk = \"read_only\"\nattempts = 1\n"
    ));
    folder.write("agent.toml", &manifest);
    let work = tempfile::tempdir().expect("a folder");
    let store = format!("sqlite:{}", work.path().join("longhaul.db").display());
    let artifacts = work.path().join("artifacts").display().to_string();
    const TOOLS: [&str; 8] = ["print", "fail", "object", "flood", "echo", "angry", "mcp__leak", "mcp__break"];
    let agent = Agent { model: model("m-1"), ..folder.agent() };
    let stage = Stage::on(&store, &artifacts, [agent], |turn, _| match TOOLS.get(turn) {
        Some(tool) => calls(&[(tool, json!({}))]),
        // The provider repeats the key.
        None if turn == TOOLS.len() => {
            calls(&[("remember", json!({"key": "key", "value": format!("it is {KEY}")}))])
        }
        None => says(&format!("The key is {KEY}.")),
    })
    .await;
    let id = stage.begin("Leak.").await;
    let task = stage.end(id).await;
    assert_eq!(task.state, State::Completed, "{:?}", task.error);
    assert_eq!(task.result.as_ref().expect("a result").get(), r#""The key is [key].""#);
    let asked = stage.asked();
    let results = asked.last().expect("asked").results();
    let shown = format!("[{VARIABLE}]");
    assert_eq!(results[0], format!("the token is {shown}."));
    for (tool, result) in TOOLS.iter().zip(&results).filter(|(tool, _)| **tool != "flood") {
        assert!(result.contains(&shown), "{tool}: {result}");
    }
    assert!(echo.only().header("x-token") == Some(CANARY), "the tool itself has it");
    for asked in &asked {
        assert_clean("a request to the model", asked.body.to_string().as_bytes());
    }
    assert_clean(
        "the export",
        &serde_json::to_vec(&stage.client.export(id).await.expect("exported")).expect("JSON"),
    );
    let files = files(work.path());
    assert!(files.len() >= 2, "a store and an artifact: {files:?}");
    for file in files {
        assert_clean(&file.display().to_string(), &std::fs::read(&file).expect("readable"));
    }
}

/// A server on stdio that tells what it knows, in its tools, its answers and its complaints.
const SERVER: &str = r#"
echo "started with $SERVICE_CANARY" >&2
token=$(printf '%s' "$SERVICE_CANARY" | sed 's/"/\\"/g')
while read -r line; do
  id=$(printf '%s' "$line" | sed -n 's/.*"id":\([0-9]*\).*/\1/p')
  [ -n "$id" ] || continue
  case "$line" in
    *'"initialize"'*) body='"result":{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"s","version":"1"}}' ;;
    *'"tools/list"'*) body='"result":{"tools":[{"name":"leak","description":"Knows '"$token"'","inputSchema":{"type":"object"}},{"name":"break","inputSchema":{"type":"object"}}]}' ;;
    *'"name":"leak"'*) body='"result":{"content":[{"type":"text","text":"it is '"$token"'"}]}' ;;
    *) body='"error":{"code":-32000,"message":"no way with '"$token"'"}' ;;
  esac
  printf '{"jsonrpc":"2.0","id":%s,%s}\n' "$id" "$body"
done
"#;
