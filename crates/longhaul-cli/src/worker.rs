//! `longhaul worker` and `longhaul up`: workers for the handlers that manifests declare.

use std::path::{Path, PathBuf};

use longhaul::{Client, Worker};
use longhaul_agent::{Manifest, load, saga};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::WorkerArgs;
use crate::exit::Failure;

pub(crate) async fn run(args: WorkerArgs) -> Result<(), Failure> {
    let manifests = manifests(&args.manifests)?;
    let store = args.store.map_or_else(default_store, Ok)?;
    let client = Client::open(&store).await?;
    let names: Vec<&str> = manifests.iter().map(Manifest::name).collect();
    tracing::info!(handlers = names.join(", "), queues = args.queues.join(", "), "working");
    let worker = Worker::new(&client).slots(args.workers).queues(args.queues).lease(args.lease).drain(args.drain);
    let worker = saga::register(worker, manifests);
    run_until_told(worker).await
}

/// Runs a worker until SIGTERM or Ctrl-C, and then lets it drain.
pub(crate) async fn run_until_told(worker: Worker) -> Result<(), Failure> {
    let mut terminate = signal(SignalKind::terminate())
        .map_err(|error| Failure::internal(format!("cannot hear signals: {error}")))?;
    worker
        .run(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
        })
        .await?;
    Ok(())
}

/// The manifests of the folder. None is run when one of them is wrong: a worker that has half of
/// what it should have is found out late.
fn manifests(folder: &Path) -> Result<Vec<Manifest>, Failure> {
    let loaded = load(folder);
    if loaded.problems.is_empty() {
        return Ok(loaded.manifests);
    }
    for problem in &loaded.problems {
        eprintln!("{problem}");
    }
    let problems = if loaded.problems.len() == 1 { "problem" } else { "problems" };
    Err(Failure::found(format!("{} {problems} in the manifests; nothing was started", loaded.problems.len())))
}

/// A file in the user's data folder.
fn default_store() -> Result<String, Failure> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let data = set("XDG_DATA_HOME").or_else(|| set("HOME").map(|home| home.join(".local/share")));
    let data = data.ok_or_else(|| Failure::usage("there is no home folder to put the store in; say --store"))?;
    Ok(format!("sqlite:{}", data.join("longhaul/longhaul.db").display()))
}
