//! Hostile manifests, placeholders, schemas and artifacts: what people, models and the servers of tools write.

use longhaul_agent::artifact::Artifacts;
use longhaul_agent::{AgentTool, Manifest, Template, load};
use longhaul_hostile::Judged;
use serde_json::{Value, json};

use super::bed::shared_memory;
use super::trial::{Broke, Trial};

/// A problem is told in so many bytes at most, beside what it is about, which may be told several times and escaped.
const MOST_TOLD: usize = 16 * 1024;

/// Folders of manifests: read, and everything that is wrong told.
pub(super) async fn manifests(trial: &mut Trial<'_>) -> Result<(), Broke> {
    let folder = tempfile::tempdir_in(shared_memory())?;
    let file = folder.path().join("hostile.toml");
    while let Some(input) = trial.draw()? {
        std::fs::write(&file, &input)?;
        let loaded = load(folder.path());
        for problem in loaded.problems.iter().chain(&loaded.warnings()) {
            if problem.to_string().len() > MOST_TOLD + 8 * input.len() {
                return Err(Broke(format!("a problem is told in {} bytes", problem.to_string().len())));
            }
        }
        let judged = match (loaded.problems.is_empty(), loaded.manifests.as_slice()) {
            (false, []) => Judged::Refused,
            (true, [manifest]) => {
                used(manifest);
                Judged::Accepted
            }
            (sound, manifests) => {
                let told = loaded.problems.len();
                return Err(Broke(format!(
                    "{} manifests came of a file with {told} problems ({sound})",
                    manifests.len()
                )));
            }
        };
        trial.judged(judged)?;
    }
    Ok(())
}

/// A manifest that is taken can be used, with values of any kind.
fn used(manifest: &Manifest) {
    let values =
        json!({"input": {"app": "a/../b", "n": [1, {"x": null}], "page": "\u{202e}"}, "steps": {}, "days": 3});
    match manifest {
        Manifest::Agent(agent) => {
            for tool in &agent.tools {
                let _ = (tool.spec(), tool.digest(), tool.action.describe(&values));
                let _ = tool.arguments(r#"{"days": 3}"#);
            }
        }
        Manifest::Saga(saga) => {
            for step in &saga.steps {
                let _ = (step.action.digest(), step.action.describe(&values));
            }
        }
    }
}

/// Placeholders: what is read is written the same, and filled with values or refused.
pub(super) async fn templates(trial: &mut Trial<'_>) -> Result<(), Broke> {
    let values = json!({
        "input": {"app": "shop {{input.n}}", "n": 7, "list": [{"a": null}, [], "x"], "": 1, "ключ": true},
        "steps": {"one": {"result": {"id": "1"}}},
    });
    while let Some(input) = trial.draw()? {
        let text = String::from_utf8_lossy(&input);
        let judged = match Template::parse(&text) {
            Err(bad) => {
                if bad.message.is_empty() || bad.remedy.is_empty() {
                    return Err(Broke("a template is refused without a word".to_owned()));
                }
                Judged::Refused
            }
            Ok(template) => {
                let written = template.to_string();
                if Template::parse(&written).as_ref() != Ok(&template) {
                    return Err(Broke(format!("a template is written as another one: {written:?}")));
                }
                match template.render(&values) {
                    Ok(rendered)
                        if template.placeholders().next().is_none() && rendered != text.replace("{{{{", "{{") =>
                    {
                        return Err(Broke(format!("a text without placeholders is changed: {rendered:?}")));
                    }
                    Ok(_) => Judged::Accepted,
                    Err(_) => Judged::Refused,
                }
            }
        };
        trial.judged(judged)?;
    }
    Ok(())
}

/// Schemas that the servers of tools give, and arguments that models write: an input is `{"schema": …, "arguments": …}`, or both at once.
pub(super) async fn schemas(trial: &mut Trial<'_>) -> Result<(), Broke> {
    while let Some(input) = trial.draw()? {
        let text = String::from_utf8_lossy(&input).into_owned();
        let whole: Value = serde_json::from_str(&text).unwrap_or_default();
        let schema = if whole["schema"].is_object() { whole["schema"].clone() } else { json!({"type": "object"}) };
        let made = AgentTool::function("look", "Looks", schema, async |arguments, _| Ok(arguments));
        let judged = match made {
            Err(_) => Judged::Refused,
            Ok(tool) => {
                let _ = (tool.spec(), tool.digest());
                let written = if whole["arguments"].is_null() { text } else { whole["arguments"].to_string() };
                match tool.arguments(&written) {
                    Ok(_) => Judged::Accepted,
                    Err(told) if told.len() > 4_096 => {
                        return Err(Broke(format!("a model is told {} bytes about its arguments", told.len())));
                    }
                    Err(_) => Judged::Refused,
                }
            }
        };
        trial.judged(judged)?;
    }
    Ok(())
}

/// Outputs that are kept, and what models ask of them.
pub(super) async fn artifacts(trial: &mut Trial<'_>) -> Result<(), Broke> {
    let mut artifacts = Artifacts::open("memory:")?;
    while let Some(input) = trial.draw()? {
        if trial.drawn().is_multiple_of(5_000) {
            artifacts = Artifacts::open("memory:")?;
        }
        let stored = artifacts.put("t", input.clone().into()).await?;
        if stored.bytes != input.len() as u64 || stored.excerpt.len() > 8_192 || stored.summary.len() > 2_048 {
            return Err(Broke(format!("an artifact is described wrongly: {stored:?}")));
        }
        let dice = &mut trial.mutator.dice;
        let (from, to) = (dice.draw() >> dice.below(64), dice.draw() >> dice.below(64));
        let most = 1 + dice.below(20_000);
        let id = &stored.artifact_id;
        let read = artifacts.read("t", id, from.min(to)..from.max(to)).await;
        let lines = artifacts.lines("t", id, from, to, most).await;
        let text = artifacts.text("t", id, from, most).await;
        let pattern = String::from_utf8_lossy(&input[..input.len().min(600)]);
        let found = artifacts.search("t", id, &pattern, 1 + most / 100, most).await;
        if let Ok(page) = &lines
            && page.text.len() > most + 4_096
        {
            return Err(Broke(format!("a page has {} bytes; {most} were asked for", page.text.len())));
        }
        // What is no id names nothing, whatever it looks like.
        let _ = artifacts.info("t", &String::from_utf8_lossy(&input)).await;
        let sound = read.is_ok() && lines.is_ok() && text.is_ok() && found.is_ok();
        trial.judged(if sound { Judged::Accepted } else { Judged::Refused })?;
    }
    Ok(())
}
