//! The receiver of webhooks: it fails at random, checks every signature by itself, and notes what it is told. And who waits until it was
//! told everything.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::HeaderMap;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use longhaul::{Client, Filter};
use serde::Deserialize;
use sha2::Sha256;
use tokio::net::TcpListener;
use tokio::time::sleep;

use crate::Anyhow;
use crate::chance::Chance;
use crate::ledger::{Arrivals, Ledger, What};
use crate::process::Place;
use crate::program::{Hook, TENANTS};
use crate::serve::Wires;

/// What is read of a message.
#[derive(Deserialize)]
struct Message {
    #[serde(rename = "type")]
    kind: String,
    timestamp: jiff::Timestamp,
    data: Told,
}

#[derive(Deserialize)]
struct Told {
    id: longhaul::TaskId,
}

/// What the receiver does with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    /// Takes it.
    Takes,
    /// Takes it, so slowly that the sender has left.
    TakesSlowly,
    /// Does not take it and says so.
    Refuses,
    /// Does not take it and wants to be asked later.
    Later,
    /// Hangs up without a word.
    HangsUp,
}

impl Mood {
    fn draw(chance: &mut Chance) -> Self {
        match chance.between(1, 100) {
            1..=10 => Self::Refuses,
            11..=18 => Self::HangsUp,
            19..=22 => Self::Later,
            23 => Self::TakesSlowly,
            _ => Self::Takes,
        }
    }

    fn takes(self) -> bool {
        matches!(self, Self::Takes | Self::TakesSlowly)
    }
}

struct Receiver {
    secret: Vec<u8>,
    ledger: Ledger,
    calls: AtomicU64,
}

/// Receives until it is killed.
pub async fn receiver(place: Place) -> Result<(), Anyhow> {
    let wires = Wires::find(&place.folder)?.ok_or("there are no servers")?;
    let secret = STANDARD.decode(wires.secret.trim_start_matches("whsec_"))?;
    let receiver = Arc::new(Receiver { secret, ledger: Ledger::open(&place.folder)?, calls: AtomicU64::new(0) });
    let listener = TcpListener::bind(wires.hook).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        let receiver = Arc::clone(&receiver);
        tokio::spawn(async move {
            let service = service_fn(|request| receiver.call(request));
            // Hanging up is an error here, and meant.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

impl Receiver {
    async fn call(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Anyhow> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let mut chance = Chance::of(self.calls.fetch_add(1, Ordering::Relaxed), 3);
        let mood = Mood::draw(&mut chance);
        let (Ok(message), Some(id)) =
            (serde_json::from_slice::<Message>(&body), header(&parts.headers, "webhook-id"))
        else {
            return Ok(answer(StatusCode::BAD_REQUEST));
        };
        self.ledger.note(What::Hooked {
            task: message.data.id,
            message: id.to_owned(),
            kind: message.kind,
            time: message.timestamp.as_microsecond(),
            signed: is_signed(&self.secret, &parts.headers, &body),
            taken: mood.takes(),
        })?;
        match mood {
            Mood::Takes => Ok(answer(StatusCode::NO_CONTENT)),
            Mood::TakesSlowly => {
                sleep(Duration::from_millis(2_500)).await;
                Ok(answer(StatusCode::OK))
            }
            Mood::Refuses => Ok(answer(StatusCode::INTERNAL_SERVER_ERROR)),
            Mood::Later => {
                let mut later = answer(StatusCode::SERVICE_UNAVAILABLE);
                later.headers_mut().insert("retry-after", hyper::header::HeaderValue::from_static("1"));
                Ok(later)
            }
            Mood::HangsUp => Err("hangs up".into()),
        }
    }
}

fn answer(status: StatusCode) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(Bytes::new()));
    *answer.status_mut() = status;
    answer
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Whether one of the signatures is that of the message, as Standard Webhooks says.
fn is_signed(secret: &[u8], headers: &HeaderMap, body: &[u8]) -> bool {
    let signature = || {
        let (id, time) = (header(headers, "webhook-id")?, header(headers, "webhook-timestamp")?);
        let mut mac = Hmac::<Sha256>::new_from_slice(secret).ok()?;
        mac.update(format!("{id}.{time}.").as_bytes());
        mac.update(body);
        Some(format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes())))
    };
    let given = header(headers, "webhook-signature").unwrap_or_default();
    signature().is_some_and(|right| given.split(' ').any(|one| one == right))
}

/// Waits until webhooks were told everything, or nothing for as long as the bound says; gives how many messages were taken.
pub async fn told_all(client: &Client, folder: &std::path::Path, bound: Duration) -> Result<u64, Anyhow> {
    let mut expected = 0;
    for client in TENANTS.map(|tenant| client.for_tenant(tenant)) {
        for hook in [Hook::Final, Hook::All] {
            expected += wanted(&client, hook).await?;
        }
    }
    let mut messages = Arrivals::of(folder)?;
    loop {
        let taken = messages.look(|what| match what {
            What::Hooked { task, message, taken: true, .. } => Some((task, message)),
            _ => None,
        })?;
        if taken >= expected || messages.quiet() > bound {
            return Ok(taken);
        }
        sleep(Duration::from_millis(500)).await;
    }
}

/// How many messages the tasks of a tenant with this webhook are to make.
async fn wanted(client: &Client, hook: Hook) -> Result<u64, Anyhow> {
    let (mut count, mut after) = (0, None);
    loop {
        let tag = Some((Hook::TAG.to_owned(), hook.name().to_owned()));
        let page = client.page(&Filter { tag, after, limit: 1_000, ..Filter::default() }).await?;
        for task in page.tasks.iter().filter(|task| task.fork_of.or(task.undo_of).is_none()) {
            count += match hook {
                Hook::All => task.last_seq,
                Hook::Final => {
                    let events = client.export(task.id).await?.events;
                    events.iter().filter(|event| event.is_final()).count() as u64
                }
            };
        }
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(count),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;

    #[test]
    fn a_signature_is_right_for_one_message_alone() {
        // The example of the Standard Webhooks libraries.
        let secret = STANDARD.decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").expect("base64");
        let headers = |signature: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("webhook-id", HeaderValue::from_static("msg_p5jXN8AQM9LWM0D4loKWxJek"));
            headers.insert("webhook-timestamp", HeaderValue::from_static("1614265330"));
            headers.insert("webhook-signature", HeaderValue::from_static(signature));
            headers
        };
        let right = headers("v1,AAAA v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        assert!(is_signed(&secret, &right, br#"{"test": 2432232314}"#));
        assert!(!is_signed(&secret, &right, br#"{"test": 2432232315}"#), "another body");
        assert!(!is_signed(&secret, &headers("v1,AAAA"), br#"{"test": 2432232314}"#));
        assert!(!is_signed(b"another secret", &right, br#"{"test": 2432232314}"#));
    }

    #[test]
    fn every_mood_is_drawn() {
        let mut chance = Chance::new(1);
        let moods: Vec<Mood> = (0..500).map(|_| Mood::draw(&mut chance)).collect();
        for mood in [Mood::Takes, Mood::TakesSlowly, Mood::Refuses, Mood::Later, Mood::HangsUp] {
            assert!(moods.contains(&mood), "{mood:?}");
        }
    }
}
