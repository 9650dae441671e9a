//! `longhaul ps`, `show`, `why`, `steps`, `export`, `delete`, `queues` and `workers`: looking, and removing.

use reqwest::Method;
use serde_json::Value;

use super::{age, cell, count, list, local};
use crate::args::client::{ListArgs, PsArgs, QueueAction, QueuesArgs, StateName, TaskArgs};
use crate::exit::Failure;
use crate::http::{Answer, Path, Server};
use crate::out;
use crate::table::{Table, state_style};
use crate::view;

/// How many tasks are asked for at once when all are wanted.
const PAGE: u32 = 200;

impl StateName {
    fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

pub(crate) async fn ps(args: PsArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let page = async |cursor: Option<&str>| -> Result<Answer, Failure> {
        let limit = if args.all { PAGE } else { args.limit };
        let path = Path::new(&["v1", "tasks"])
            .with("state", args.state.map(StateName::name))
            .with("handler", args.handler.as_ref())
            .with("queue", args.queue.as_ref())
            .with("tag", args.tag.as_ref().map(|(key, value)| format!("{key}={value}")))
            .with("q", args.q.as_ref())
            .with("order", args.oldest.then_some("created_at"))
            .with("limit", Some(limit.to_string()))
            .with("cursor", cursor);
        Ok(server.get(&path).await?)
    };
    let first = page(None).await?;
    if args.remote.json && !args.all {
        return first.print();
    }
    let (mut answer, mut shown, mut begun) = (first.json()?, 0, false);
    loop {
        let tasks = list(&answer, "tasks")?;
        shown += tasks.len();
        if args.remote.json {
            // One document, written page by page: it may be larger than the memory.
            for task in tasks {
                out::raw(if begun { b",\n" } else { b"{\"tasks\": [\n" })?;
                begun = true;
                out::raw(task.to_string().as_bytes())?;
            }
        } else if !tasks.is_empty() || shown == 0 {
            print_tasks(tasks)?;
        }
        let next = answer["next_cursor"].as_str().map(str::to_owned);
        match next {
            Some(cursor) if args.all && !tasks.is_empty() => answer = page(Some(&cursor)).await?.json()?,
            Some(_) if !args.remote.json => {
                out::note(format!("the first {}; --limit N shows more, --all all of them", count(shown, "task")));
                return Ok(());
            }
            _ => break,
        }
    }
    if args.remote.json {
        out::line(if begun { "\n], \"next_cursor\": null}" } else { "{\"tasks\": [], \"next_cursor\": null}" })?;
    }
    Ok(())
}

fn print_tasks(tasks: &[Value]) -> Result<(), Failure> {
    let mut table = Table::new(&["ID", "STATE", "HANDLER", "QUEUE", "PRIO", "AGE", "DOING"]).paint(1, state_style);
    for task in tasks {
        let id = cell(&task["id"]);
        table.row([
            id,
            cell(&task["state"]),
            cell(&task["handler"]),
            cell(&task["queue"]),
            cell(&task["priority"]),
            age(&task["created_at"]),
            doing(task),
        ]);
    }
    table.print()
}

/// What a task does, waits for or came to, in a few words.
fn doing(task: &Value) -> String {
    let waits = &task["waiting_for"];
    let said = match task["state"].as_str().unwrap_or_default() {
        "completed" => view::value(&task["result"]),
        "failed" | "cancelled" if task["error"].is_object() => view::error(&task["error"]),
        "waiting" if waits.is_object() => {
            let until = waits["until"].as_str().map(|until| format!(" until {until}")).unwrap_or_default();
            format!("for {}{until}", cell(&waits["kind"]))
        }
        _ => match task["progress"]["message"].as_str().filter(|message| !message.is_empty()) {
            Some(message) => message.to_owned(),
            None => view::value(&task["input"]),
        },
    };
    let said = if task["phase"] == "compensating" { format!("undoing: {said}") } else { said };
    out::short(&said, 100)
}

pub(crate) async fn show(args: TaskArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.get(&Path::task(&args.id, &[])).await?;
    if args.remote.json {
        return answer.print();
    }
    let task = answer.json()?;
    let mut lines = vec![
        ("id", cell(&task["id"])),
        ("state", cell(&task["state"])),
        ("handler", cell(&task["handler"])),
        ("queue", format!("{}, priority {}", cell(&task["queue"]), cell(&task["priority"]))),
        ("created", format!("{} ({} ago)", local(&task["created_at"]), age(&task["created_at"]))),
    ];
    let mut some = |name: &'static str, value: &Value, shown: String| {
        let empty = value.is_null() || value.as_object().is_some_and(serde_json::Map::is_empty);
        if !empty && *value != 0 {
            lines.push((name, shown));
        }
    };
    some("finished", &task["finished_at"], local(&task["finished_at"]));
    some("deadline", &task["deadline"], local(&task["deadline"]));
    if task["phase"] == "compensating" {
        some("phase", &task["phase"], "undoing what it did".to_owned());
    }
    some("waits for", &task["waiting_for"], doing(&task).trim_start_matches("for ").to_owned());
    some("attempts", &task["attempts"], cell(&task["attempts"]));
    some("crashes", &task["crashes"], cell(&task["crashes"]));
    for (name, key) in [
        ("parent", "parent_id"),
        ("fork of", "fork_of"),
        ("undo of", "undo_of"),
        ("undone by", "undone_by"),
        ("tags", "tags"),
        ("usage", "usage"),
    ] {
        some(name, &task[key], cell(&task[key]));
    }
    some("progress", &task["progress"]["message"], cell(&task["progress"]["message"]));
    some("input", &task["input"], out::short(&view::value(&task["input"]), 2_000));
    some("result", &task["result"], out::short(&view::value(&task["result"]), 2_000));
    some("error", &task["error"], out::clean(&view::error(&task["error"])));
    for (name, value) in lines {
        out::line(format!("{name:<10} {value}"))?;
    }
    if matches!(task["state"].as_str(), Some("pending" | "waiting")) {
        out::note(format!("'longhaul why {}' says what it waits for", cell(&task["id"])));
    }
    Ok(())
}

pub(crate) async fn why(args: TaskArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.get(&Path::task(&args.id, &["why"])).await?;
    if args.remote.json {
        return answer.print();
    }
    let why = answer.json()?;
    out::line(out::clean(why["sentence"].as_str().unwrap_or("the server does not say why")))
}

pub(crate) async fn steps(args: TaskArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.get(&Path::task(&args.id, &["steps"])).await?;
    if args.remote.json {
        return answer.print();
    }
    let answer = answer.json()?;
    let mut table = Table::new(&["STEP", "KIND", "STATE", "ATTEMPT", "TOOK", "RESULT"]).paint(2, state_style);
    for step in list(&answer, "steps")? {
        let said =
            if step["error"].is_object() { view::error(&step["error"]) } else { view::value(&step["result"]) };
        table.row([
            cell(&step["name"]),
            cell(&step["kind"]),
            cell(&step["state"]),
            cell(&step["attempt"]),
            took(step),
            out::short(&said, 100),
        ]);
    }
    table.print()
}

fn took(step: &Value) -> String {
    let (from, to) = (super::moment(&step["started_at"]), super::moment(&step["finished_at"]));
    match (from, to) {
        (Some(from), Some(to)) => crate::units::brief(super::between(from, to)),
        _ => "-".to_owned(),
    }
}

pub(crate) async fn export(args: TaskArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    server.get(&Path::task(&args.id, &["export"])).await?.print()
}

pub(crate) async fn delete(args: TaskArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.request(Method::DELETE, &Path::task(&args.id, &[])).send().await?;
    if args.remote.json && !answer.text.is_empty() {
        return answer.print();
    }
    out::note(format!("removed {}", out::clean(&args.id)));
    Ok(())
}

pub(crate) async fn queues(args: QueuesArgs) -> Result<(), Failure> {
    let (name, verb) = match args.action {
        Some(QueueAction::Pause(queue)) => (queue, "pause"),
        Some(QueueAction::Resume(queue)) => (queue, "resume"),
        None => return list_queues(&args.remote.server, args.remote.json).await,
    };
    let server = Server::new(&name.remote.server)?;
    let path = Path::new(&["v1", "queues", &name.name, verb]);
    let answer = server.post(&path, &serde_json::json!({})).await?;
    if name.remote.json && !answer.text.is_empty() {
        return answer.print();
    }
    let done = if verb == "pause" { "paused; what runs goes on" } else { "resumed" };
    out::note(format!("queue {} {done}", out::clean(&name.name)));
    Ok(())
}

async fn list_queues(server: &str, json: bool) -> Result<(), Failure> {
    let server = Server::new(server)?;
    let answer = server.get(&Path::new(&["v1", "queues"])).await?;
    if json {
        return answer.print();
    }
    let answer = answer.json()?;
    let mut table = Table::new(&["QUEUE", "PENDING", "RUNNING", "MAX PENDING", "MAX RUNNING", "OLDEST", "STATE"]);
    for queue in list(&answer, "queues")? {
        table.row([
            cell(&queue["name"]),
            cell(&queue["pending"]),
            cell(&queue["running"]),
            cell(&queue["max_pending"]),
            cell(&queue["max_running"]),
            age(&queue["oldest"]),
            if queue["paused"] == true { "paused".to_owned() } else { "open".to_owned() },
        ]);
    }
    table.print()
}

pub(crate) async fn workers(args: ListArgs) -> Result<(), Failure> {
    let server = Server::new(&args.remote.server)?;
    let answer = server.get(&Path::new(&["v1", "workers"])).await?;
    if args.remote.json {
        return answer.print();
    }
    let answer = answer.json()?;
    let names = |value: &Value| {
        let names = value.as_array().map(Vec::as_slice).unwrap_or_default().iter().filter_map(Value::as_str);
        names.collect::<Vec<_>>().join(",")
    };
    let workers = list(&answer, "workers")?;
    let mut table = Table::new(&["WORKER", "RUNNING", "SLOTS", "UP", "SEEN", "QUEUES", "HANDLERS"]);
    for worker in workers {
        table.row([
            cell(&worker["name"]),
            cell(&worker["running"]),
            cell(&worker["slots"]),
            age(&worker["started_at"]),
            format!("{} ago", age(&worker["seen_at"])),
            names(&worker["queues"]),
            names(&worker["handlers"]),
        ]);
    }
    table.print()?;
    if workers.is_empty() {
        out::note("no worker is running; start one with 'longhaul worker --manifests DIR'");
    }
    Ok(())
}
