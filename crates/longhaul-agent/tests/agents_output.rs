//! A tool that gives 50 MB. Alone in its process, because it measures that.

mod agent;
mod common;
mod provider;

use agent::{Reads, Stage, calls, model, says};
use common::Folder;
use longhaul_agent::Agent;
use provider::Asked;
use serde_json::json;

const BYTES_IN_CONTEXT: usize = 8_000;
/// What a turn adds besides: the call, and the sentence that names the artifact.
const TURN_BYTES: usize = 600;

/// The most memory this process ever had, KiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the line");
    line.trim().trim_end_matches(" kB").trim().parse().expect("a number")
}

/// The bytes of everything that is said in a request.
fn said_bytes(asked: &Asked) -> usize {
    asked.messages().iter().map(|message| message["content"].as_str().map_or(0, str::len)).sum()
}

#[tokio::test]
async fn fifty_megabytes_are_kept_aside_paged_and_searched_in_little_memory() {
    let folder = Folder::new();
    folder.script(
        "big",
        "seq -f 'line %.0f of a log that nobody reads, with some words to fill it up' 1 360000\n\
         echo 'a needle in the middle'\n\
         seq -f 'line %.0f of a log that nobody reads, with some words to fill it up' 360001 720000",
    );
    folder.write(
        "agent.toml",
        "[agent]\nname = \"a\"\nmodel = \"m-1\"\n[[tool]]\nname = \"logs\"\ndescription = \"Shows the logs\"\n\
         command = [\"./big\"]\nrisk = \"read_only\"\ntimeout = \"110s\"\n",
    );
    let agent = Agent { model: model("m-1"), ..folder.agent() };
    let storage = folder.file("artifacts").display().to_string();
    let stage = Stage::on("memory:", &storage, [agent], move |turn, asked| match turn {
        // Warms up whatever is made at the first use.
        0 => calls(&[("remember", json!({"key": "disk", "value": "full"}))]),
        1 => calls(&[("logs", json!({}))]),
        2..8 => {
            calls(&[("read_artifact", json!({"artifact_id": artifact_of(asked), "from_line": turn * 10_000}))])
        }
        8 => calls(&[("read_artifact", json!({"artifact_id": artifact_of(asked), "search": "need.e"}))]),
        9 => {
            assert_eq!(asked.result().trim(), "360001: a needle in the middle");
            says("Found it.")
        }
        _ => says("Never."),
    })
    .await;
    let id = stage.begin("Find the needle.").await;
    let before = {
        stage.event(id, "state.patched", 1).await;
        peak()
    };
    let task = stage.end(id).await;
    assert_eq!(task.result.as_ref().map(|result| result.get()), Some(r#""Found it.""#), "{:?}", task.error);
    let grown = peak() - before;
    assert!(grown < 40 * 1024, "{grown} KiB more for 50 MB");
    let state = stage.state(id).await;
    let [artifact] = state.artifacts.as_slice() else { panic!("{:?}", state.artifacts) };
    assert!(artifact.bytes > 50_000_000 && artifact.summary.contains("MB of text"), "{artifact:?}");
    assert_eq!(artifact.kind, "tool_result.logs");
    let asked = stage.asked();
    let fixed = said_bytes(&asked[0]);
    for (turn, asked) in asked.iter().enumerate() {
        let most = fixed + BYTES_IN_CONTEXT + turn * TURN_BYTES;
        assert!(said_bytes(asked) <= most, "turn {turn}: {} > {most}", said_bytes(asked));
    }
    assert!(asked[2].standing().contains("line 1 of a log"), "an excerpt is shown: {}", asked[2].standing());
    assert!(asked[3].result().starts_with("20000: line 20000 of"), "{}", &asked[3].result()[..100]);
    let is_page = |result: &String| result.split_once(": line").is_some_and(|(at, _)| at.parse::<u64>().is_ok());
    let shown = asked[8].results().iter().filter(|result| is_page(result)).count();
    assert!((1..6).contains(&shown), "old pages are shown no more: {shown}");
    let exported = serde_json::to_string(&stage.client.export(id).await.expect("exported")).expect("JSON");
    assert!(exported.len() < 200_000, "the store has {} bytes of it", exported.len());
}

/// The id of the only artifact, as how the task stands names it.
fn artifact_of(asked: &Asked) -> String {
    let standing = asked.standing();
    let at = standing.find("sha256-").expect("an artifact");
    standing[at..at + "sha256-".len() + 64].to_owned()
}
