//! Hostile messages of a broker: tasks that come in, hints of other processes, and the addresses of brokers.
//!
//! A message is written as headers, an empty line, and the body; `id`, `key`, `content-type`, `reply-to` and `correlation-id` are its own
//! fields, all else are headers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use longhaul_bus::{Bus, Intake, IntakeSettings, MemoryBus, Message, Outgoing, Subscription, To, Topic};
use longhaul_hostile::Judged;

use super::bed::{Bed, Place};
use super::trial::{Broke, Trial};

/// After so many inputs what is stored is compared with what was accepted, and the next bed is made.
const BATCH: u64 = 5_000;
/// A message is settled within this.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) async fn messages(trial: &mut Trial<'_>) -> Result<(), Broke> {
    loop {
        let bed = Bed::make(&Place::Memory, false).await?;
        let tasks = bed.witness.held().await?.tasks.len() as u64;
        let bus: Arc<dyn Bus> = Arc::new(MemoryBus::new());
        let topic = Topic::queue("hostile")?;
        let settings =
            IntakeSettings { default_handler: Some("echo".to_owned()), ..IntakeSettings::new(topic.clone()) };
        let intake = Intake::start(&bed.client, Arc::clone(&bus), settings).await?;
        let mut dead = bus.consume(&Subscription::new(topic.dead_letters(), "undertaker")).await?;
        let mut ended = false;
        for _ in 0..BATCH {
            let Some(input) = trial.draw()? else {
                ended = true;
                break;
            };
            let before = intake.counts();
            let message = message(&bed.filled(&input));
            let sent = Outgoing {
                to: To::Topic { topic: topic.clone(), subject: String::new() },
                message: message.clone(),
            };
            bus.publish(&[sent]).await.map_err(|not| not.error)?;
            let begun = Instant::now();
            let after = loop {
                let now = intake.counts();
                if now != before {
                    break now;
                }
                if begun.elapsed() > PATIENCE {
                    return Err(Broke("a message is not settled".to_owned()));
                }
                tokio::task::yield_now().await;
            };
            if after.put_off > before.put_off {
                return Err(Broke("a message is put off: the store failed, or something is full".to_owned()));
            }
            let refused = after.rejected > before.rejected;
            if refused {
                let letter =
                    tokio::time::timeout(PATIENCE, dead.next()).await.map_err(|_| "a dead letter is lost")??;
                if letter.message.body != message.body {
                    return Err(Broke("a dead letter says something else than what was refused".to_owned()));
                }
                letter.ack().await?;
            }
            trial.judged(if refused { Judged::Refused } else { Judged::Accepted })?;
        }
        let (stored, new) = (bed.witness.held().await?.tasks.len() as u64, intake.counts().new);
        if stored != tasks + new {
            return Err(Broke(format!("{stored} tasks are stored; there were {tasks}, and {new} were accepted")));
        }
        intake.stop().await;
        trial.calm()?;
        if ended {
            return Ok(());
        }
    }
}

/// The message that an input says.
fn message(input: &[u8]) -> Message {
    let (head, body) = match input.windows(2).position(|two| two == b"\n\n") {
        Some(end) => (&input[..end], &input[end + 2..]),
        None => (&[][..], input),
    };
    let mut message = Message { body: body.to_vec().into(), ..Message::default() };
    for line in head.split(|byte| *byte == b'\n') {
        let line = String::from_utf8_lossy(line);
        let Some((name, value)) = line.split_once(':') else { continue };
        let value = value.strip_prefix(' ').unwrap_or(value).to_owned();
        match name {
            "id" => message.id = Some(value),
            "key" => message.key = Some(value),
            "content-type" => message.content_type = Some(value),
            "reply-to" => message.reply_to = Some(value),
            "correlation-id" => message.correlation_id = Some(value),
            _ => message.headers.push((name.to_owned(), value)),
        }
    }
    message
}

/// Hints that other processes broadcast, or someone else on their channel.
pub(super) async fn hints(trial: &mut Trial<'_>) -> Result<(), Broke> {
    let bed = Bed::make(&Place::Memory, false).await?;
    let before = bed.witness.digest().await?;
    let relay = bed.client.relay();
    while let Some(input) = trial.draw()? {
        let hints = bed.filled(&input);
        relay.hear(&hints);
        let readable = serde_json::from_slice::<serde_json::Value>(&hints).is_ok_and(|hints| hints.is_object());
        trial.judged(if readable { Judged::Accepted } else { Judged::Refused })?;
        if trial.drawn().is_multiple_of(64) {
            tokio::task::yield_now().await;
        }
    }
    match bed.witness.digest().await? == before {
        true => Ok(()),
        false => Err(Broke("hints changed what is stored".to_owned())),
    }
}
