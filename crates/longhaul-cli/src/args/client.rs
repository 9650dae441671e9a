//! The arguments of the commands that talk to a server.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use crate::units;

/// Where the server is, and how to print what it says.
#[derive(Args, Clone, Debug)]
pub(crate) struct Remote {
    /// The server to talk to.
    #[arg(long, env = "LONGHAUL_SERVER", value_name = "URL", default_value = "http://127.0.0.1:7171")]
    pub(crate) server: String,
    /// JSON on stdout, as the server gives it.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What an MCP client talks to.
#[derive(Args, Debug)]
pub(crate) struct McpArgs {
    /// The server to talk to.
    #[arg(long, env = "LONGHAUL_SERVER", value_name = "URL", default_value = "http://127.0.0.1:7171")]
    pub(crate) server: String,
    /// Use this store itself (sqlite:PATH or postgres://…) instead of a server, with all rights; tokens are not asked for.
    #[arg(long, value_name = "URL")]
    pub(crate) store: Option<String>,
}

/// How long a lost server is tried for.
#[derive(Args, Clone, Debug)]
pub(crate) struct Patience {
    /// After the server was lost, how long to try to reach it again.
    #[arg(long, value_name = "TIME", value_parser = units::duration, default_value = "5m")]
    pub(crate) reconnect_for: Duration,
}

/// A task, and nothing else.
#[derive(Args, Debug)]
pub(crate) struct TaskArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

/// What is submitted, now or by a schedule.
#[derive(Args, Clone, Debug)]
pub(crate) struct Work {
    /// How urgent it is: 0 to 9, larger first [default: 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=9))]
    pub(crate) priority: Option<u8>,
    /// The queue it waits in [default: default]
    #[arg(long, value_name = "Q")]
    pub(crate) queue: Option<String>,
    /// How long it may take in all, from now on; after that it fails.
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    pub(crate) timeout: Option<Duration>,
    /// Call this URL when it has ended.
    #[arg(long, value_name = "URL")]
    pub(crate) webhook: Option<String>,
    /// A label; may be given several times.
    #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) tags: Vec<(String, String)>,
    /// Of the tasks with this key one runs at a time, unless a limit says otherwise; one that waits for
    /// somebody or something does not run, and lets the next one go
    #[arg(long, value_name = "KEY")]
    pub(crate) concurrency_key: Option<String>,
    /// How many runs may fail before the task fails [default: 3]
    #[arg(long, value_name = "N")]
    pub(crate) max_attempts: Option<u32>,
}

#[derive(Args, Debug)]
pub(crate) struct SubmitArgs {
    /// The agent, saga or workflow that does it.
    pub(crate) handler: String,
    /// What it is given: JSON, else a text; '-' reads stdin, '@FILE' a file.
    pub(crate) input: String,
    #[command(flatten)]
    pub(crate) work: Work,
    /// The same key is the same task: submitting twice does it once.
    #[arg(long, value_name = "K")]
    pub(crate) key: Option<String>,
    /// Not before this moment (2026-12-24T18:00:00Z) or this time from now (10m); with --key say the moment, so that the same
    /// is asked again
    #[arg(long, value_name = "WHEN")]
    pub(crate) run_at: Option<String>,
    /// Show what it does until it has ended.
    #[arg(long, conflicts_with = "wait")]
    pub(crate) follow: bool,
    /// Wait until it has ended and print its result.
    #[arg(long)]
    pub(crate) wait: bool,
    #[command(flatten)]
    pub(crate) patience: Patience,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StateName {
    Pending,
    Running,
    Waiting,
    Completed,
    Failed,
    Cancelled,
}

#[derive(Args, Debug)]
pub(crate) struct PsArgs {
    /// Only tasks in this state.
    #[arg(long)]
    pub(crate) state: Option<StateName>,
    /// Only tasks of this handler.
    #[arg(long)]
    pub(crate) handler: Option<String>,
    /// Only tasks of this queue.
    #[arg(long)]
    pub(crate) queue: Option<String>,
    /// Only tasks with this label.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) tag: Option<(String, String)>,
    /// Only tasks whose input has this text.
    #[arg(long, value_name = "TEXT")]
    pub(crate) q: Option<String>,
    /// Oldest first.
    #[arg(long)]
    pub(crate) oldest: bool,
    /// How many, newest first.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub(crate) limit: u32,
    /// All of them.
    #[arg(long, conflicts_with = "limit")]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct WatchArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    #[command(flatten)]
    pub(crate) patience: Patience,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct WaitArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// How long to wait; the task goes on afterwards [default: until it has ended]
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    pub(crate) timeout: Option<Duration>,
    #[command(flatten)]
    pub(crate) patience: Patience,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct EventsArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// Go on until the task has ended.
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Only events after this number.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) after: u64,
    #[command(flatten)]
    pub(crate) patience: Patience,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct CancelArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// Undo what it did, also where that is not done anyway: a saga always does, an agent by its manifest
    #[arg(long)]
    pub(crate) undo: bool,
    /// Why; it stands in the task's history.
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct UndoArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// Why; it stands in the history.
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct ForkArgs {
    /// The task whose beginning is shared.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// The first step that is done anew; what came before is taken over.
    #[arg(long, value_name = "NAME")]
    pub(crate) from_step: String,
    /// Another input: JSON, else a text; '-' reads stdin, '@FILE' a file.
    #[arg(long, value_name = "JSON")]
    pub(crate) input: Option<String>,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct DecisionArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// The approval's id; not needed when only one is open.
    #[arg(value_name = "APPROVAL")]
    pub(crate) approval: Option<String>,
    /// Why; it stands in the task's history.
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct AnswerArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// The answer; '-' reads stdin.
    pub(crate) text: String,
    /// The question's id; not needed when only one is open.
    #[arg(long, value_name = "QID")]
    pub(crate) question: Option<String>,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct MessageArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// What the task should know; '-' reads stdin.
    pub(crate) text: String,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct SignalArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// The signal's name.
    pub(crate) name: String,
    /// What is sent along: JSON, else a text; '-' reads stdin, '@FILE' a file.
    #[arg(value_name = "JSON")]
    pub(crate) message: String,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Verdict {
    /// It did not happen: do it again.
    Retry,
    /// It happened; --result says what came of it.
    Done,
    /// Give it up.
    Fail,
}

#[derive(Args, Debug)]
pub(crate) struct DecideArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// The step in doubt.
    pub(crate) step: String,
    pub(crate) verdict: Verdict,
    /// What came of it: JSON, else a text (with done).
    #[arg(long, value_name = "JSON")]
    pub(crate) result: Option<String>,
    /// Why; it stands in the task's history.
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct StateArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// Change it: a StatePatch as JSON, '-' for stdin, '@FILE' for a file.
    #[arg(long, value_name = "JSON")]
    pub(crate) patch: Option<String>,
    /// Only when the state still has this version [default: the version it has now]
    #[arg(long, value_name = "VERSION", requires = "patch")]
    pub(crate) if_version: Option<u64>,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct ArtifactArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// The artifact's id.
    pub(crate) artifact: String,
    /// Write it to this file instead of stdout; an existing one is replaced.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Only these bytes: FIRST-LAST, counted from 0; FIRST- to the end, -N for the last N.
    #[arg(long, value_name = "RANGE", value_parser = byte_range, allow_hyphen_values = true)]
    pub(crate) range: Option<String>,
    /// The server to talk to.
    #[arg(long, env = "LONGHAUL_SERVER", value_name = "URL", default_value = "http://127.0.0.1:7171")]
    pub(crate) server: String,
}

fn byte_range(text: &str) -> Result<String, String> {
    let number = |text: &str| text.parse::<u64>().ok();
    let (first, last) = text.split_once('-').unwrap_or((text, "x"));
    match (number(first), number(last)) {
        (Some(first), Some(last)) if first > last => {
            Err(format!("it ends before it begins; write {last}-{first} for those bytes"))
        }
        (Some(_), Some(_)) => Ok(text.to_owned()),
        (Some(_), None) if last.is_empty() => Ok(text.to_owned()),
        (None, Some(1..)) if first.is_empty() => Ok(text.to_owned()),
        _ => Err("write it like 0-999, 1000- or -500".to_owned()),
    }
}

#[derive(Args, Debug)]
pub(crate) struct PriorityArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// 0 to 9, larger first.
    #[arg(value_name = "N", value_parser = clap::value_parser!(u8).range(0..=9))]
    pub(crate) priority: u8,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct QueuesArgs {
    #[command(subcommand)]
    pub(crate) action: Option<QueueAction>,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Subcommand, Debug)]
pub(crate) enum QueueAction {
    /// Let no task of a queue start; those that run go on.
    Pause(NameArgs),
    /// Let them start again.
    Resume(NameArgs),
}

#[derive(Args, Debug)]
pub(crate) struct NameArgs {
    /// Its name.
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct SchedulesArgs {
    #[command(subcommand)]
    pub(crate) action: ScheduleAction,
}

#[derive(Subcommand, Debug)]
pub(crate) enum ScheduleAction {
    /// All schedules and when they fire next.
    List(ListArgs),
    /// One schedule.
    Show(NameArgs),
    /// Create a schedule, or replace the one of this name.
    #[command(after_help = "\
Examples:
  longhaul schedules set nightly --cron '30 2 * * *' --time-zone Europe/Berlin --handler report --input '{\"of\": \"yesterday\"}'
  longhaul schedules set ping --every 10m --handler ping --input '{}' --missed run-once

A schedule that was paused stays paused.")]
    Set(Box<SetScheduleArgs>),
    /// Let it rest until it is resumed.
    Pause(NameArgs),
    /// Let it go on with its next time.
    Resume(NameArgs),
    /// Remove it; the tasks it made stay.
    Delete(NameArgs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Missed {
    /// They are dropped.
    Skip,
    /// One task is submitted for the newest of them.
    #[value(alias = "run_once")]
    RunOnce,
}

#[derive(Args, Debug)]
#[command(group = clap::ArgGroup::new("when").required(true).args(["cron", "every"]))]
pub(crate) struct SetScheduleArgs {
    /// Its name.
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// Minute, hour, day, month, weekday.
    #[arg(long, value_name = "EXPR")]
    pub(crate) cron: Option<String>,
    /// Every so often.
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    pub(crate) every: Option<Duration>,
    /// The time zone of --cron, such as Europe/Berlin [default: UTC]
    #[arg(long, value_name = "ZONE", requires = "cron")]
    pub(crate) time_zone: Option<String>,
    /// What happens to times that nobody was there for [default: skip]
    #[arg(long)]
    pub(crate) missed: Option<Missed>,
    /// The agent, saga or workflow that does it.
    #[arg(long)]
    pub(crate) handler: String,
    /// What it is given: JSON, else a text; '-' reads stdin, '@FILE' a file.
    #[arg(long)]
    pub(crate) input: String,
    #[command(flatten)]
    pub(crate) work: Work,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

#[derive(Args, Debug)]
pub(crate) struct RedeliverArgs {
    /// The task's id.
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// The delivery's id, as 'webhooks deliveries' shows it.
    #[arg(value_name = "DELIVERY")]
    pub(crate) delivery: String,
    #[command(flatten)]
    pub(crate) remote: Remote,
}

/// `KEY=VALUE`
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write it like team=payments".to_owned()),
    }
}
