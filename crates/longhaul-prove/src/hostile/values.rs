//! Small values that come from outside, each read by everything that reads one: spans of time, cron expressions and time zones,
//! addresses and ranges of them, cursors, ids, secrets, whole submits.

use std::time::Duration;

use longhaul::outbox::{IpRange, WebhookSecret};
use longhaul::request::{Span, Submit, read};
use longhaul::task::Invalid;
use longhaul::{Cursor, NewTask, ReplyTo, Schedule, StatePatch, TaskId, Webhook};
use longhaul_bus::{ReplyAddresses, Topic};
use longhaul_hostile::Judged;

use super::trial::{Broke, Trial};

/// The longest that a span may be, so that no sum of times overflows.
const LONGEST: Duration = Duration::from_secs(11 * 366 * 86_400);
/// The longest sentence about a value.
const MOST_TOLD: usize = 2_048;

pub(super) async fn values(trial: &mut Trial<'_>) -> Result<(), Broke> {
    while let Some(input) = trial.draw()? {
        let text = String::from_utf8_lossy(&input);
        let taken = [
            a_span(&text)?,
            a_cursor(&text)?,
            text.parse::<TaskId>().is_ok(),
            text.parse::<IpRange>().is_ok(),
            text.parse::<WebhookSecret>().is_ok(),
            Topic::queue(&text).is_ok(),
            ReplyAddresses::new(["*", &text]).check(&text).is_ok(),
            told(ReplyTo::new(&*text).correlation_id(&*text).validate(), &text)?,
            told(Webhook::new(&*text).validate(), &text)?,
            told(Webhook::new("https://example.com").event(&*text).validate(), &text)?,
            a_schedule(&text)?,
            a_submit(&input).await?,
            read::<StatePatch>(&input).is_ok(),
        ];
        trial.judged(if taken.contains(&true) { Judged::Accepted } else { Judged::Refused })?;
    }
    Ok(())
}

/// Whether it was taken; if not, it was said in a sentence that can be shown.
fn told(checked: Result<(), Invalid>, input: &str) -> Result<bool, Broke> {
    match checked {
        Ok(()) => Ok(true),
        Err(invalid) => {
            let said = invalid.to_string();
            if said.len() > MOST_TOLD + 8 * input.len() || said.contains('\0') {
                return Err(Broke(format!("a refusal cannot be shown: {said:?}")));
            }
            Ok(false)
        }
    }
}

fn a_span(text: &str) -> Result<bool, Broke> {
    match Span::parse(text) {
        Ok(Span(span)) if span > LONGEST => Err(Broke(format!("a span of {span:?} is taken"))),
        Ok(_) => Ok(true),
        Err(_) => Ok(false),
    }
}

fn a_cursor(text: &str) -> Result<bool, Broke> {
    let Ok(cursor) = text.parse::<Cursor>() else { return Ok(false) };
    match cursor.to_string().parse::<Cursor>() {
        Ok(again) if again == cursor => Ok(true),
        _ => Err(Broke("a cursor is written as another one".to_owned())),
    }
}

fn a_schedule(text: &str) -> Result<bool, Broke> {
    let (expression, zone) = text.split_once('|').unwrap_or((text, "UTC"));
    let schedule = Schedule::cron("s", expression, NewTask::new("h", &1)).time_zone(zone);
    let named = Schedule::every(text, Duration::from_secs(60), NewTask::new("h", &1));
    Ok(told(schedule.validate(), text)? | told(named.validate(), text)?)
}

async fn a_submit(input: &[u8]) -> Result<bool, Broke> {
    let Ok(submit) = read::<Submit>(input) else { return Ok(false) };
    let task = submit.into_task(async || Ok::<_, Invalid>("h".to_owned())).await;
    match task {
        Ok(task) => {
            // What is taken is JSON that anyone can read.
            let readable = serde_json::from_str::<serde_json::Value>(task.input.get());
            if readable.is_err() || task.input.get().contains('\0') {
                return Err(Broke("an input is taken that nobody can read".to_owned()));
            }
            Ok(true)
        }
        Err(invalid) => told(Err(invalid), &String::from_utf8_lossy(input)),
    }
}
