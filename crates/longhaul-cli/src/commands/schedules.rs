//! `longhaul schedules`: tasks that are submitted again and again.

use reqwest::Method;
use serde_json::{Value, json};

use super::control::done;
use super::{cell, list, local, submit};
use crate::args::client::{ListArgs, Missed, NameArgs, ScheduleAction, SchedulesArgs, SetScheduleArgs};
use crate::exit::Failure;
use crate::http::{Path, Server};
use crate::out;
use crate::table::Table;
use crate::units;
use crate::view;

pub(crate) async fn run(args: SchedulesArgs) -> Result<(), Failure> {
    match args.action {
        ScheduleAction::List(args) => all(args).await,
        ScheduleAction::Show(args) => show(args).await,
        ScheduleAction::Set(args) => set(*args).await,
        ScheduleAction::Pause(args) => turn(args, "pause", "rests").await,
        ScheduleAction::Resume(args) => turn(args, "resume", "goes on").await,
        ScheduleAction::Delete(args) => delete(args).await,
    }
}

fn path(name: &str) -> Path {
    Path::new(&["v1", "schedules", name])
}

async fn all(args: ListArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.get(&Path::new(&["v1", "schedules"])).await?;
    if args.remote.json {
        return answer.print();
    }
    let answer = answer.json()?;
    let mut table = Table::new(&["SCHEDULE", "WHEN", "HANDLER", "NEXT", "LAST", "LAST TASK", "TROUBLE"]);
    for schedule in list(&answer, "schedules")? {
        table.row([
            cell(&schedule["name"]),
            when(schedule),
            cell(&schedule["task"]["handler"]),
            if schedule["paused"] == true { "paused".to_owned() } else { local(&schedule["next_at"]) },
            local(&schedule["last_at"]),
            cell(&schedule["last_task"]),
            cell(&schedule["last_error"]),
        ]);
    }
    table.print()
}

/// `30 2 * * * Europe/Berlin`, `every 10m`
fn when(schedule: &Value) -> String {
    let when = if schedule["when"].is_object() { &schedule["when"] } else { schedule };
    let cron = if when["cron"].is_object() { &when["cron"] } else { when };
    let expr = if cron["expr"].is_null() { &cron["cron"] } else { &cron["expr"] };
    if let Some(expr) = expr.as_str() {
        return format!("{expr} {}", cron["time_zone"].as_str().unwrap_or("UTC"));
    }
    match &when["every"] {
        Value::Null => "-".to_owned(),
        Value::Object(time) => {
            let seconds = time.get("secs").and_then(Value::as_u64).unwrap_or(0);
            format!("every {}", units::show(std::time::Duration::from_secs(seconds)))
        }
        every => format!("every {}", view::value(every)),
    }
}

async fn show(args: NameArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.get(&path(&args.name)).await?;
    if args.remote.json {
        return answer.print();
    }
    let schedule = answer.json()?;
    let next = if schedule["paused"] == true { "paused".to_owned() } else { local(&schedule["next_at"]) };
    for (name, value) in [
        ("name", cell(&schedule["name"])),
        ("when", when(&schedule)),
        ("missed", cell(&schedule["missed"])),
        ("next", next),
        ("last", format!("{} {}", local(&schedule["last_at"]), cell(&schedule["last_task"]))),
        ("trouble", cell(&schedule["last_error"])),
        ("task", out::short(&schedule["task"].to_string(), 2_000)),
    ] {
        out::line(format!("{name:<10} {}", out::clean(&value)))?;
    }
    Ok(())
}

async fn set(args: SetScheduleArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let mut body = json!({"task": Value::Object(submit::body(&args.handler, &args.input, &args.work)?)});
    if let Some(cron) = &args.cron {
        body["cron"] = json!(cron);
    }
    if let Some(zone) = &args.time_zone {
        body["time_zone"] = json!(zone);
    }
    if let Some(every) = args.every {
        body["every"] = json!(units::show(every));
    }
    if let Some(missed) = args.missed {
        body["missed"] = json!(match missed {
            Missed::Skip => "skip",
            Missed::RunOnce => "run_once",
        });
    }
    let answer = server.request(Method::PUT, &path(&args.name)).json(&body).send().await?;
    let schedule = answer.json().unwrap_or_default();
    let next = if schedule["paused"] == true {
        "is paused".to_owned()
    } else {
        format!("fires next at {}", local(&schedule["next_at"]))
    };
    done(&args.remote, &answer, format!("schedule {} {next}", args.name))
}

async fn turn(args: NameArgs, verb: &str, told: &str) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.post(&Path::new(&["v1", "schedules", &args.name, verb]), &json!({})).await?;
    done(&args.remote, &answer, format!("schedule {} {told}", args.name))
}

async fn delete(args: NameArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.request(Method::DELETE, &path(&args.name)).send().await?;
    done(&args.remote, &answer, format!("schedule {} is removed; the tasks it made stay", args.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_it_fires_is_told_in_a_few_words() {
        assert_eq!(
            when(&json!({"cron": "0 9 * * 1-5", "time_zone": "Europe/Berlin"})),
            "0 9 * * 1-5 Europe/Berlin"
        );
        assert_eq!(when(&json!({"when": {"cron": {"expr": "0 9 * * *", "time_zone": "UTC"}}})), "0 9 * * * UTC");
        assert_eq!(when(&json!({"every": "10m"})), "every 10m");
        assert_eq!(when(&json!({"when": {"every": {"secs": 90, "nanos": 0}}})), "every 1m 30s");
    }
}
