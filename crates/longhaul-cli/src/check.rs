//! `longhaul check`: what is wrong with the manifests of a folder, before a worker meets it.

use longhaul_agent::{Loaded, Manifest, load};
use serde_json::{Value, json};

use crate::args::CheckArgs;
use crate::exit::Failure;
use crate::out;

pub(crate) fn run(args: &CheckArgs) -> Result<(), Failure> {
    let loaded = load(&args.folder);
    if args.json {
        out::line(as_json(&loaded).to_string())?;
    } else {
        for manifest in &loaded.manifests {
            out::line(format!("{}: {}", manifest.file().display(), summary(manifest)))?;
        }
        for warning in loaded.warnings() {
            out::line(format!("warning: {warning}"))?;
        }
        for problem in &loaded.problems {
            out::line(problem.to_string())?;
        }
    }
    match loaded.problems.len() {
        0 => Ok(()),
        1 => Err(Failure::found("1 problem found")),
        many => Err(Failure::found(format!("{many} problems found"))),
    }
}

fn summary(manifest: &Manifest) -> String {
    let (count, what) = (parts(manifest).len(), part_name(manifest));
    let plural = if count == 1 { "" } else { "s" };
    format!("{} {}, {count} {what}{plural}", manifest.kind(), manifest.name())
}

fn part_name(manifest: &Manifest) -> &'static str {
    match manifest {
        Manifest::Saga(_) => "step",
        Manifest::Agent(_) => "tool",
    }
}

/// The steps of a saga, the tools of an agent.
fn parts(manifest: &Manifest) -> Vec<&str> {
    match manifest {
        Manifest::Saga(saga) => saga.steps.iter().map(|step| step.name.as_str()).collect(),
        Manifest::Agent(agent) => agent.tools.iter().map(|tool| tool.name.as_str()).collect(),
    }
}

fn as_json(loaded: &Loaded) -> Value {
    let manifests: Vec<Value> = loaded
        .manifests
        .iter()
        .map(|manifest| {
            let parts_name = format!("{}s", part_name(manifest));
            json!({"file": manifest.file().display().to_string(), "kind": manifest.kind(), "name": manifest.name(),
                   parts_name: parts(manifest)})
        })
        .collect();
    json!({"manifests": manifests, "problems": loaded.problems, "warnings": loaded.warnings()})
}
