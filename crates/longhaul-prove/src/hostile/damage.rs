//! Damaged rows: what the store gives back is not what was written. Everything that reads it says so, or goes on without it; nothing panics.
//!
//! An input takes the place of a column of some row of a bed's store, and what was there is put back afterwards. (This needs no file of the
//! corpus to be good: the columns themselves are.) Some rows are damaged under a run: its journal, its checkpoint and its state.

use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::Request;
use longhaul::{Client, NewTask, RetryPolicy, Run, State, TaskError, TaskId, Worker};
use longhaul_hostile::Judged;
use rusqlite::types::Value as Column;
use rusqlite::{Connection, params_from_iter};
use serde_json::{Value, json};

use super::bed::{Bed, Place};
use super::trial::{Broke, Trial};

/// A bed is made anew after so many inputs.
const BATCH: u64 = 1_000;
/// One input in so many is under a run.
const RUNS: usize = 12;
/// A run is over within this.
const PATIENCE: Duration = Duration::from_secs(15);
/// What is damaged. Ids and what is looked up by are left alone: a row that is not found is not read.
const TABLES: [(&str, &[&str]); 8] = [
    (
        "tasks",
        &[
            "tags",
            "cancel",
            "waiting",
            "result",
            "error",
            "progress",
            "usage",
            "holds",
            "deadline",
            "created_at",
            "updated_at",
            "finished_at",
            "attempts",
            "last_seq",
            "priority",
            "state",
            "run_at",
        ],
    ),
    ("log", &["events", "records", "time", "run", "count"]),
    ("states", &["state", "version"]),
    (
        "asks",
        &["subject", "text", "digest", "requested_at", "expires_at", "decided_by", "reason", "kind", "status"],
    ),
    ("schedules", &["plan", "next_at", "last_at", "anchor"]),
    ("endpoints", &["webhook", "lane", "finals", "created_at"]),
    ("tokens", &["role", "expires_at"]),
    ("settings", &["value"]),
];

pub(super) async fn rows(trial: &mut Trial<'_>) -> Result<(), Broke> {
    loop {
        let bed = Bed::make(&Place::Memory, false).await?;
        let file = bed.file.clone().ok_or("the store is in a file")?;
        let rows = Connection::open(file)?;
        rows.busy_timeout(PATIENCE)?;
        let quick = Duration::from_millis(1);
        let retry = RetryPolicy { first: quick, cap: quick, ..RetryPolicy::default() };
        // A queue of its own: it leaves the tasks of the bed alone.
        let worker =
            Worker::new(&bed.client).queues(["damaged"]).retry(retry).handler("journal", journal).start().await?;
        for _ in 0..BATCH {
            let Some(input) = trial.draw()? else { return Ok(()) };
            let judged = match trial.mutator.dice.once_in(RUNS) {
                true => under_a_run(&bed.client, &rows, &input, trial).await?,
                false => one(&bed, &rows, &input, trial).await?,
            };
            trial.judged(judged)?;
        }
        worker.stop().await;
    }
}

/// What a column becomes: the input, a number that it may be, or what was there with something changed.
fn damaged(before: &Column, input: &[u8], trial: &mut Trial<'_>) -> Column {
    let text = String::from_utf8_lossy(input).into_owned();
    match (before, trial.mutator.dice.below(3)) {
        (Column::Integer(_), 0) => {
            Column::Integer(*trial.mutator.dice.one_of(&[0, 1, -1, 9, 255, i64::MIN, i64::MAX, 4_294_967_295]))
        }
        (Column::Integer(_), 1) => Column::Integer(trial.mutator.dice.draw() as i64),
        (Column::Text(was), 0 | 1) => {
            let mut changed = was.clone().into_bytes();
            trial.mutator.change(&mut changed);
            Column::Text(String::from_utf8_lossy(&changed).into_owned())
        }
        _ => Column::Text(text),
    }
}

async fn one(bed: &Bed, rows: &Connection, input: &[u8], trial: &mut Trial<'_>) -> Result<Judged, Broke> {
    let dice = &mut trial.mutator.dice;
    let (table, columns) = *dice.one_of(&TABLES);
    let column = *dice.one_of(columns);
    let count: usize = rows.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0))?;
    if count == 0 {
        return Ok(Judged::Refused);
    }
    let at = dice.below(count);
    let find = format!("SELECT rowid, {column} FROM {table} LIMIT 1 OFFSET {at}");
    // Tables without row numbers are found by their key.
    let (key, before): (Column, Column) = match rows.query_row(&find, [], |row| Ok((row.get(0)?, row.get(1)?))) {
        Ok(found) => found,
        Err(_) => {
            let key = key_of(table);
            rows.query_row(&format!("SELECT {key}, {column} FROM {table} LIMIT 1 OFFSET {at}"), [], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })?
        }
    };
    let name = if matches!(key, Column::Integer(_)) { "rowid" } else { key_of(table) };
    let write = |value: Column| {
        rows.execute(
            &format!("UPDATE {table} SET {column} = ? WHERE {name} = ?"),
            params_from_iter([value, key.clone()]),
        )
    };
    // Some columns must not be empty, or must be unique: what the store itself refuses cannot come back from it.
    if write(damaged(&before, input, trial)).is_err() {
        return Ok(Judged::Refused);
    }
    let shown = look(bed)
        .await
        .map_err(|Broke(why)| Broke(format!("{table}.{column} of row {at} was {before:?}: {why}")))?;
    write(before)?;
    Ok(if shown { Judged::Accepted } else { Judged::Refused })
}

/// What a table without row numbers has instead.
fn key_of(table: &str) -> &'static str {
    match table {
        "states" => "task",
        "settings" | "endpoints" | "schedules" => "name",
        _ => "id",
    }
}

/// Looks at everything; whether all of it could be shown.
async fn look(bed: &Bed) -> Result<bool, Broke> {
    let mut paths: Vec<String> = [
        "/v1/tasks",
        "/v1/schedules",
        "/v1/webhooks",
        "/v1/tokens",
        "/v1/stats",
        "/v1/approvals",
        "/v1/queues",
        "/",
        "/fleet",
        "/inbox",
    ]
    .map(str::to_owned)
    .into();
    for name in ["done", "failed", "asks", "approves", "state", "pending"] {
        let id = bed.name(name);
        let of = ["", "/steps", "/why", "/export", "/state", "/events", "/checkpoints"]
            .map(|part| format!("/v1/tasks/{id}{part}"));
        paths.extend(of);
        paths.push(format!("/tasks/{id}"));
    }
    let mut all = true;
    for path in paths {
        let request =
            Request::get(&path).header("host", "localhost").header("accept", "text/html").body(Body::empty())?;
        let answer = bed.send(request).await.map_err(|Broke(why)| Broke(format!("{path}: {why}")))?;
        // A store that gives back something else than it was given has failed, and the answer may say so.
        all &= answer.status.is_success();
    }
    Ok(all)
}

/// Steps, a checkpoint, and a wait: what a run goes on from.
async fn journal(run: Run, _: Value) -> Result<Value, TaskError> {
    for number in 0..3 {
        run.step(format!("step {number}"), async || Ok::<_, TaskError>(json!({"number": number, "text": "done"})))
            .await?;
    }
    run.patch(serde_json::from_value(json!({"set_goal": "reach it"})).unwrap_or_default()).await?;
    let said: Value = run.signal("go").await?;
    run.step("last", async || Ok::<_, TaskError>(said.clone())).await
}

/// Damages what a run goes on from while it waits, and lets it go on.
async fn under_a_run(
    client: &Client,
    rows: &Connection,
    input: &[u8],
    trial: &mut Trial<'_>,
) -> Result<Judged, Broke> {
    let mut task = NewTask::new("journal", &json!(null));
    task.queue = "damaged".to_owned();
    task.max_attempts = 2;
    let id = client.submit(task).await?.id;
    settled(client, id).await?;
    let key = Column::Blob(id.0.as_bytes().to_vec());
    let (table, column) = *trial.mutator.dice.one_of(&[
        ("log", "records"),
        ("log", "events"),
        ("log", "run"),
        ("log", "count"),
        ("states", "state"),
    ]);
    let query = format!("SELECT {column} FROM {table} WHERE task = ? AND {column} IS NOT NULL");
    let before: Vec<Column> =
        rows.prepare(&query)?.query_map([&key], |row| row.get(0))?.collect::<Result<_, _>>()?;
    if before.is_empty() {
        return Ok(Judged::Refused);
    }
    let was = trial.mutator.dice.one_of(&before).clone();
    let now = damaged(&was, input, trial);
    let update = format!("UPDATE {table} SET {column} = ? WHERE task = ? AND {column} = ?");
    if rows.execute(&update, params_from_iter([now, key, was])).is_err() {
        return Ok(Judged::Refused);
    }
    if client.signal(id, "go", &json!("on")).await.is_err() {
        return Ok(Judged::Refused);
    }
    let state = settled(client, id).await.map_err(|Broke(why)| Broke(format!("{table}.{column}: {why}")))?;
    if !state.is_final() {
        // It waits for something that the damage made up.
        let _ = client.cancel(id, None).await;
    }
    Ok(if state == State::Completed { Judged::Accepted } else { Judged::Refused })
}

/// Waits until nobody has anything to do for a task.
async fn settled(client: &Client, id: TaskId) -> Result<State, Broke> {
    let begun = Instant::now();
    loop {
        let task = client.task(id).await?;
        let timer = task.waiting_for.as_ref().is_some_and(|waiting| waiting.kind == "timer");
        if task.state.is_final() || (task.state == State::Waiting && !timer) {
            return Ok(task.state);
        }
        if begun.elapsed() > PATIENCE {
            return Err(Broke(format!(
                "a run on damaged rows does not end: {:?} {:?}",
                task.state, task.waiting_for
            )));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
