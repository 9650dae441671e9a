//! The command line of Longhaul. `main` only starts; what a command does is in its module.

mod args;
mod bench;
mod bench_worker;
mod bus;
mod check;
mod commands;
mod config;
mod demo;
mod exit;
mod follow;
mod http;
mod init;
mod node;
mod notify;
mod out;
mod sse;
mod table;
mod telemetry;
mod units;
mod view;

use std::process::ExitCode;

use clap::Parser;

use args::{Args, Command};
use commands::{admin, artifacts, control, doctor, mcp, people, schedules, shell, submit, tasks, watch};
use exit::Failure;
use node::Part;

fn main() -> ExitCode {
    let args = Args::parse();
    if let Command::DemoEffect(effect) = &args.command {
        // Started hundreds of times: it needs neither logs nor a runtime.
        return demo::effect(effect);
    }
    let settings = match node::telemetry(&args.command) {
        Ok(settings) => settings,
        Err(failure) => return exit::report(&failure),
    };
    // Dropped last, when everything that is traced has ended.
    let _telemetry = telemetry::init(&settings);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return exit::report(&exit::Failure::internal(format!("cannot start: {error}"))),
    };
    // On a thread of the pool: this one would have to be woken for every answer.
    let done = runtime.block_on(runtime.spawn(run(args.command)));
    let done = done.unwrap_or_else(|error| Err(exit::Failure::internal(error.to_string())));
    // What is still under way in the background has nothing more to say.
    runtime.shutdown_background();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => exit::report(&failure),
    }
}

/// Does what the command says.
async fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Submit(args) => submit::run(*args).await,
        Command::Ps(args) => tasks::ps(args).await,
        Command::Show(args) => tasks::show(args).await,
        Command::Watch(args) => watch::watch(args).await,
        Command::Wait(args) => watch::wait(args).await,
        Command::Why(args) => tasks::why(args).await,
        Command::Cancel(args) => control::cancel(args).await,
        Command::Resume(args) => control::resume(args).await,
        Command::Undo(args) => control::undo(args).await,
        Command::Fork(args) => control::fork(args).await,
        Command::Approvals(args) => people::approvals(args).await,
        Command::Approve(args) => people::decide(args, true).await,
        Command::Deny(args) => people::decide(args, false).await,
        Command::Answer(args) => people::answer(args).await,
        Command::Message(args) => control::message(args).await,
        Command::Signal(args) => control::signal(args).await,
        Command::Decide(args) => control::decide(args).await,
        Command::State(args) => control::state(args).await,
        Command::Steps(args) => tasks::steps(args).await,
        Command::Events(args) => watch::events(args).await,
        Command::Artifacts(args) => artifacts::run(args).await,
        Command::Artifact(args) => artifacts::one(args).await,
        Command::Priority(args) => control::priority(args).await,
        Command::Delete(args) => tasks::delete(args).await,
        Command::Export(args) => tasks::export(args).await,
        Command::Queues(args) => tasks::queues(args).await,
        Command::Workers(args) => tasks::workers(args).await,
        Command::Schedules(args) => schedules::run(args).await,
        Command::Webhooks(args) => admin::webhooks(args).await,
        Command::Subscribers(args) => admin::subscribers(args).await,
        Command::Token(args) => admin::token(args).await,
        Command::Backup(args) => admin::backup(args).await,
        Command::Doctor(args) => doctor::run(args).await,
        Command::Config => shell::config(),
        Command::Completions(args) => shell::completions(&args),
        Command::Man(args) => shell::man(&args),
        Command::Mcp(args) => mcp::run(args).await,
        Command::Bench(args) => bench::run(args).await,
        Command::Check(args) => check::run(&args),
        Command::Init(args) => init::run(&args),
        Command::Up(args) => node::run(args, Part::Up).await,
        Command::Serve(args) => node::run(args, Part::Serve).await,
        Command::Worker(args) => node::run(args, Part::Worker).await,
        Command::Demo(args) => demo::run(args).await,
        Command::BenchWorker(args) => bench_worker::run(args).await,
        // Done before there is a runtime.
        Command::DemoEffect(_) => Ok(()),
    }
}
