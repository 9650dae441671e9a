//! The command line of Longhaul. `main` only starts; what a command does is in its module.

mod args;
mod bench;
mod bench_worker;
mod check;
mod exit;
mod worker;

use std::process::ExitCode;

use clap::Parser;

use args::{Args, Command};

fn main() -> ExitCode {
    let args = Args::parse();
    logging();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return exit::report(&exit::Failure::internal(format!("cannot start: {error}"))),
    };
    // On a thread of the pool: this one would have to be woken for every answer.
    let done = runtime.block_on(runtime.spawn(async {
        match args.command {
            Command::Bench(bench) => bench::run(bench).await,
            Command::Check(check) => check::run(&check),
            Command::Worker(worker) | Command::Up(worker) => worker::run(worker).await,
            Command::BenchWorker(worker) => bench_worker::run(worker).await,
        }
    }));
    let done = done.unwrap_or_else(|error| Err(exit::Failure::internal(error.to_string())));
    // What is still under way in the background has nothing more to say.
    runtime.shutdown_background();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => exit::report(&failure),
    }
}

/// Logs go to stderr, warnings and worse unless `LONGHAUL_LOG` says otherwise.
fn logging() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("LONGHAUL_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}
