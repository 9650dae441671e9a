//! `longhaul watch`, `wait` and `events`; also `submit --follow` and `--wait`.

use std::time::Duration;

use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use crate::args::client::{EventsArgs, Patience, WaitArgs, WatchArgs};
use crate::exit::Failure;
use crate::follow::{Follower, Heard};
use crate::http::{Answer, Path, Server, Trouble};
use crate::out;
use crate::units;
use crate::view::{self, View};

/// How long one request waits.
const POLL: Duration = Duration::from_secs(30);
/// What the server may need beyond that.
const GRACE: Duration = Duration::from_secs(30);
/// The pause before a server that was lost is asked again.
const PAUSE: Duration = Duration::from_secs(1);

pub(crate) async fn watch(args: WatchArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    // Trouble is told before anything is drawn.
    server.get(&Path::task(&args.id, &[])).await?;
    follow(&server, &args.id, &args.patience, args.remote.json).await
}

/// Shows a task until it has ended, and says how.
pub(crate) async fn follow(server: &Server, id: &str, patience: &Patience, json: bool) -> Result<(), Failure> {
    let mut view = View::choose(json);
    let mut follower = Follower::new(server, id, 0, patience.reconnect_for).already_met();
    let shown = interruptible(id, async {
        let mut last = None;
        while let Some(heard) = follower.next().await? {
            view.hear(&heard)?;
            if let Heard::Event(event) = heard {
                last = Some(event);
            }
        }
        Ok(last)
    })
    .await;
    view.end();
    let last = shown?;
    let (state, result, error) = match last {
        Some(event) if event.is_final() => {
            let state = event.kind.trim_start_matches("task.").to_owned();
            (state, event.data["result"].clone(), event.data["error"].clone())
        }
        // Everything was told before; how it stands is in the task.
        _ => {
            let task = server.get(&Path::task(id, &[])).await?.json()?;
            (task["state"].as_str().unwrap_or_default().to_owned(), task["result"].clone(), task["error"].clone())
        }
    };
    if matches!(view, View::Live(_)) && state == "completed" {
        print_result(&result)?;
    }
    outcome(id, &state, &error)
}

pub(crate) async fn wait(args: WaitArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    wait_for(&server, &args.id, args.timeout, &args.patience, args.remote.json).await
}

/// Waits for the end of a task, prints its result and says how it ended.
pub(crate) async fn wait_for(
    server: &Server,
    id: &str,
    timeout: Option<Duration>,
    patience: &Patience,
    json: bool,
) -> Result<(), Failure> {
    let answer = interruptible(id, ended(server, id, timeout, patience.reconnect_for)).await?;
    let task = answer.json()?;
    if json {
        answer.print()?;
    } else if task["state"] == "completed" {
        print_result(&task["result"])?;
    }
    outcome(id, task["state"].as_str().unwrap_or_default(), &task["error"])
}

async fn ended(
    server: &Server,
    id: &str,
    timeout: Option<Duration>,
    patience: Duration,
) -> Result<Answer, Failure> {
    let until = timeout.map(|timeout| Instant::now() + timeout);
    let (mut met, mut lost_since) = (false, None);
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        // The first answer decides whether there is such a task and such a server, so it comes at once.
        let poll = if met { left.map_or(POLL, |left| left.min(POLL)) } else { Duration::ZERO };
        let path = Path::task(id, &["wait"]).with("timeout", Some(units::show(poll)));
        let asked = server.request(reqwest::Method::GET, &path).timeout(poll + GRACE).send().await;
        match asked {
            Ok(answer) if answer.status != reqwest::StatusCode::ACCEPTED => return Ok(answer),
            Ok(answer) => {
                (met, lost_since) = (true, None);
                if until.is_some_and(|until| Instant::now() >= until) {
                    let state = answer.json().ok().and_then(|task| task["state"].as_str().map(str::to_owned));
                    return Err(not_yet(id, timeout, state.as_deref()));
                }
            }
            Err(trouble) if met && trouble.passes() => {
                let since = *lost_since.get_or_insert_with(Instant::now);
                if until.is_some_and(|until| Instant::now() >= until) {
                    return Err(not_yet(id, timeout, None));
                }
                if since.elapsed() >= patience {
                    return Err(trouble.into());
                }
                let pause = match &trouble {
                    Trouble::Refused { retry_after: Some(asked), .. } => (*asked).clamp(PAUSE, POLL),
                    _ => PAUSE,
                };
                tokio::time::sleep(left.map_or(pause, |left| left.min(pause))).await;
            }
            Err(trouble) => return Err(trouble.into()),
        }
    }
}

fn not_yet(id: &str, timeout: Option<Duration>, state: Option<&str>) -> Failure {
    let waited = units::show(timeout.unwrap_or_default());
    let state = state.map(|state| format!(" it is {state} and")).unwrap_or_default();
    Failure::timed_out(format!(
        "task {id} has not ended after {waited};{state} goes on. 'longhaul why {id}' says what it waits for"
    ))
}

pub(crate) async fn events(args: EventsArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let task = server.get(&Path::task(&args.id, &[])).await?.json()?;
    let newest = task["last_seq"].as_u64().unwrap_or(0);
    if !args.follow && newest <= args.after {
        return Ok(());
    }
    let mut view = if args.remote.json { View::Json } else { View::Lines };
    // A number that was never given is as the newest one.
    let after = args.after.min(newest);
    let mut follower = Follower::new(&server, &args.id, after, args.patience.reconnect_for).already_met();
    interruptible(&args.id, async {
        while let Some(heard) = follower.next().await? {
            view.hear(&heard)?;
            if matches!(&heard, Heard::Event(event) if !args.follow && event.seq >= newest) {
                break;
            }
        }
        Ok(())
    })
    .await
}

/// Ctrl-C ends the looking, never the task.
async fn interruptible<T>(id: &str, what: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    // Heard from here on, also while the first request is on its way.
    let mut interrupt = signal(SignalKind::interrupt())
        .map_err(|error| Failure::internal(format!("cannot hear signals: {error}")))?;
    tokio::select! {
        done = what => done,
        _ = interrupt.recv() => {
            Err(Failure::interrupted(format!("interrupted; the task goes on: longhaul watch {id}")))
        }
    }
}

/// A text as it is, anything else as JSON.
fn print_result(result: &Value) -> Result<(), Failure> {
    match result {
        Value::Null => Ok(()),
        Value::String(text) => out::line(text),
        other => out::line(other.to_string()),
    }
}

fn outcome(id: &str, state: &str, error: &Value) -> Result<(), Failure> {
    let why = if error.is_object() { format!(": {}", out::clean(&view::error(error))) } else { String::new() };
    match state {
        "completed" => Ok(()),
        "failed" => Err(Failure::found(format!("task {id} failed{why}"))),
        "cancelled" => Err(Failure::found(format!("task {id} was cancelled{why}"))),
        other => Err(Failure::internal(format!(
            "the server ended the stream of task {id}, which is '{}'",
            out::clean(other)
        ))),
    }
}
