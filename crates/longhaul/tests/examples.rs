//! Every example checks its own claims; here they all run.
#![allow(dead_code, reason = "main of each example is for `cargo run --example`")]

use std::error::Error;
use std::process::Command;

#[path = "../examples/claim.rs"]
mod claim;
#[path = "../examples/deploy.rs"]
mod deploy;
#[path = "../examples/event_handlers.rs"]
mod event_handlers;
#[path = "../examples/hello.rs"]
mod hello;
#[path = "../examples/resume_after_crash.rs"]
mod resume_after_crash;
#[path = "../examples/retry_with_backoff.rs"]
mod retry_with_backoff;
#[path = "../examples/run_if_not_done.rs"]
mod run_if_not_done;

type Done = Result<(), Box<dyn Error>>;

#[tokio::test]
async fn hello_greets() -> Done {
    hello::run().await
}

#[tokio::test]
async fn retry_with_backoff_waits_longer_each_time_and_gives_up() -> Done {
    retry_with_backoff::run().await
}

#[tokio::test]
async fn run_if_not_done_runs_once() -> Done {
    run_if_not_done::run().await
}

#[tokio::test]
async fn event_handlers_miss_nothing() -> Done {
    event_handlers::run().await
}

#[tokio::test]
async fn claim_gives_each_task_to_one_worker_in_order() -> Done {
    claim::run().await
}

#[tokio::test]
async fn deploy_undoes_exactly_what_was_completed() -> Done {
    deploy::run().await
}

#[tokio::test]
async fn resume_after_crash_goes_on_from_the_last_recorded_step() -> Done {
    let mut child = Command::new(std::env::current_exe()?);
    child.args(["--exact", "the_worker_process_that_crashes", "--ignored", "--nocapture"]);
    resume_after_crash::run(child).await
}

#[tokio::test]
#[ignore = "the test above starts it as a process of its own"]
async fn the_worker_process_that_crashes() -> Done {
    match std::env::var(resume_after_crash::STORE) {
        Ok(store) => resume_after_crash::work_until_the_crash(&store).await,
        Err(_) => Ok(()),
    }
}
