//! Readers of events over HTTP: they read slowly, leave in the middle of a frame, and go on where they were. What each read is noted,
//! from one connect to the next. [`run`] is a run of its own with many of them.

use std::time::Duration;

use futures_util::StreamExt;
use longhaul::{Event, TaskId};
use tokio::time::{Instant, sleep, timeout};
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Error as SocketError, Message};

use crate::Anyhow;
use crate::chance::Chance;
use crate::history::carried;
use crate::ledger::digest;
use crate::records::{Records, Sight, Stream};
use crate::web::{Asking, Web};

pub mod run;

/// After so long without a sign of life a reader connects anew; servers of the suite give one each second.
const SILENCE: Duration = Duration::from_secs(8);

/// How someone reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Server-sent events, as fast as they come.
    Quick,
    /// The same, with pauses.
    Slow,
    /// A WebSocket.
    Socket,
}

/// Someone who reads a task's events to their end.
#[derive(Clone, Debug)]
pub struct Reader {
    /// Whose task it is.
    pub tenant: &'static str,
    /// The task.
    pub task: TaskId,
    /// The reader's number.
    pub number: u64,
    /// The number of the event before the first that is asked for.
    pub after: u64,
    /// So many times it leaves by itself and comes back.
    pub reconnects: u32,
    /// After about so many bytes.
    pub bytes: u64,
    /// How it reads.
    pub manner: Manner,
    /// Comes back as often as it is to, also when there is nothing more.
    pub insists: bool,
    /// Gives up then.
    pub until: Instant,
}

/// What a reader met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Met {
    /// Connections that were made.
    pub connections: u64,
    /// Times it left in the middle of a frame.
    pub cut: u64,
    /// Connections that ended without the reader's doing, and before the end.
    pub lost: u64,
    /// Times it was told that there is nothing more.
    pub over: u64,
}

/// How a connection went.
#[derive(Debug, PartialEq, Eq)]
enum Went {
    /// There was none: the server is away.
    Away,
    /// There is no such task any more.
    Gone,
    /// The server ended it.
    Ended,
    /// The reader left.
    Left,
}

impl Reader {
    /// A client that reads its own task.
    pub fn of_client(tenant: &'static str, task: TaskId, reconnects: u32) -> Self {
        let until = Instant::now() + Duration::from_secs(600);
        let number = digest(&task.to_string());
        let (manner, bytes) = (if number.is_multiple_of(4) { Manner::Socket } else { Manner::Quick }, 900);
        Self { tenant, task, number, after: 0, reconnects, bytes, manner, insists: false, until }
    }

    /// Reads to the end.
    pub async fn read(self, web: &Web, records: &Records) -> Result<Met, Anyhow> {
        let mut chance = Chance::of(self.task.0.as_u128() as u64, self.number);
        let (mut after, mut left, mut met) = (self.after, self.reconnects, Met::default());
        while Instant::now() < self.until {
            let limit = (left > 0).then(|| chance.between(0, 2 * self.bytes));
            let mut reading = Reading { chance: &mut chance, limit, taken: 0, met: &mut met };
            let mut stream =
                Stream { task: self.task, after, events: Vec::new(), ended: false, reader: Some(self.number) };
            let went = match self.manner {
                Manner::Socket => self.socket(web, records, &mut stream, &mut reading).await?,
                _ => self.sse(web, records, &mut stream, &mut reading).await?,
            };
            match went {
                Went::Away => {
                    sleep(Duration::from_millis(30)).await;
                    continue;
                }
                Went::Gone => return Ok(met),
                Went::Ended if !stream.ended => met.lost += 1,
                _ => {}
            }
            met.connections += 1;
            after = stream.events.last().map_or(after, |(seq, _)| *seq);
            let ended = stream.ended;
            records.read_events(stream)?;
            if ended {
                met.over += 1;
                if left == 0 || !self.insists {
                    break;
                }
            }
            left = left.saturating_sub(1);
        }
        Ok(met)
    }

    /// One connection by SSE, from `stream.after` on.
    async fn sse(
        &self,
        web: &Web,
        records: &Records,
        stream: &mut Stream,
        reading: &mut Reading<'_>,
    ) -> Result<Went, Anyhow> {
        let path = format!("/v1/tasks/{}/events", self.task);
        let by_query = format!("{path}?after={}", stream.after);
        let asking = match reading.chance.percent(70) {
            true => Asking::get(&path).header("last-event-id", stream.after),
            false => Asking::get(&by_query),
        };
        let request = web.request(self.tenant, &asking.header("accept", "text/event-stream"));
        let Ok(Ok(response)) = timeout(SILENCE, request.send()).await else { return Ok(Went::Away) };
        match response.status().as_u16() {
            200 => {}
            204 => {
                stream.ended = true;
                return Ok(Went::Ended);
            }
            404 => return Ok(Went::Gone),
            _ => return Ok(Went::Away),
        }
        let (mut body, mut frames) = (response.bytes_stream(), Frames::default());
        while let Ok(Some(Ok(chunk))) = timeout(SILENCE, body.next()).await {
            let (kept, leaves) = reading.take(&chunk);
            for (seq, data) in frames.take(kept) {
                self.check(records, &data)?;
                stream.events.push((seq, digest(&data)));
            }
            if leaves {
                reading.met.cut += u64::from(!frames.is_empty());
                return Ok(Went::Left);
            }
            if self.manner == Manner::Slow {
                sleep(Duration::from_millis(reading.chance.between(1, 25))).await;
            }
        }
        Ok(Went::Ended)
    }

    /// One connection by WebSocket, from `stream.after` on.
    async fn socket(
        &self,
        web: &Web,
        records: &Records,
        stream: &mut Stream,
        reading: &mut Reading<'_>,
    ) -> Result<Went, Anyhow> {
        let url = format!("ws://{}/v1/tasks/{}/ws?after={}", web.server(), self.task, stream.after);
        let mut request = url.into_client_request()?;
        request.headers_mut().insert("authorization", format!("Bearer {}", web.token(self.tenant)).parse()?);
        let mut socket = match timeout(SILENCE, tokio_tungstenite::connect_async(request)).await {
            Ok(Ok((socket, _))) => socket,
            Ok(Err(SocketError::Http(answer))) if answer.status().as_u16() == 404 => return Ok(Went::Gone),
            _ => return Ok(Went::Away),
        };
        while let Ok(Some(Ok(message))) = timeout(SILENCE, socket.next()).await {
            match message {
                Message::Text(text) => {
                    let (kept, leaves) = reading.take(text.as_bytes());
                    if leaves && kept.len() < text.len() {
                        reading.met.cut += 1;
                        return Ok(Went::Left);
                    }
                    self.check(records, &text)?;
                    let told: serde_json::Value = serde_json::from_str(&text)?;
                    if told["type"] == "event" {
                        let event: Event = serde_json::from_value(told["event"].clone())?;
                        stream.events.push((event.seq, digest(&serde_json::to_string(&event)?)));
                    }
                }
                Message::Close(why) => {
                    stream.ended = why.is_some_and(|why| why.code == CloseCode::Normal);
                    return Ok(Went::Ended);
                }
                _ => {}
            }
        }
        Ok(Went::Ended)
    }

    /// Whether another tenant's marker came along.
    fn check(&self, records: &Records, text: &str) -> Result<(), Anyhow> {
        let carries = carried(text);
        if carries.iter().any(|other| *other != self.tenant) {
            records.saw(Sight {
                tenant: self.tenant.to_owned(),
                what: format!("the events of {}", self.task),
                status: 200,
                foreign: false,
                carries: carries.into_iter().map(str::to_owned).collect(),
            })?;
        }
        Ok(())
    }
}

/// One connection, as it is read.
struct Reading<'a> {
    chance: &'a mut Chance,
    /// After so many bytes the reader leaves.
    limit: Option<u64>,
    taken: u64,
    met: &'a mut Met,
}

impl Reading<'_> {
    /// What is read of what came, and whether the reader leaves now.
    fn take<'a>(&mut self, came: &'a [u8]) -> (&'a [u8], bool) {
        let Some(limit) = self.limit else { return (came, false) };
        let most = usize::try_from(limit - self.taken).unwrap_or(usize::MAX);
        let kept = &came[..came.len().min(most)];
        self.taken += kept.len() as u64;
        (kept, self.taken == limit)
    }
}

/// Bytes of a stream of events, cut into frames as they become whole.
#[derive(Debug, Default)]
struct Frames(Vec<u8>);

impl Frames {
    /// The events whose frames are whole with these bytes: number and data.
    fn take(&mut self, bytes: &[u8]) -> Vec<(u64, String)> {
        self.0.extend_from_slice(bytes);
        let mut events = Vec::new();
        while let Some(end) = self.0.windows(2).position(|pair| pair == b"\n\n") {
            let rest = self.0.split_off(end + 2);
            let frame = String::from_utf8_lossy(&std::mem::replace(&mut self.0, rest)).into_owned();
            let field = |name: &str| frame.lines().find_map(|line| line.strip_prefix(name));
            if let (Some(id), Some(data)) = (field("id: ").and_then(|id| id.parse().ok()), field("data: ")) {
                events.push((id, data.to_owned()));
            }
        }
        events
    }

    /// Whether nothing of a frame is left.
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_whole_wherever_the_bytes_are_cut() {
        let text =
            b": longhaul\n\nid: 1\ndata: {\"a\": 1}\n\n: alive\n\ndata: live\n\nid: 2\ndata: {}\n\nid: 3\nda";
        for cut in 0..text.len() {
            let mut frames = Frames::default();
            let mut events = frames.take(&text[..cut]);
            events.extend(frames.take(&text[cut..]));
            assert_eq!(events, [(1, "{\"a\": 1}".to_owned()), (2, "{}".to_owned())], "cut at {cut}");
            assert!(!frames.is_empty(), "the third is not whole");
        }
    }

    #[test]
    fn a_reader_leaves_after_its_bytes_and_not_before() {
        let (mut chance, mut met) = (Chance::new(1), Met::default());
        let mut reading = Reading { chance: &mut chance, limit: Some(5), taken: 0, met: &mut met };
        assert_eq!(reading.take(b"abc"), (b"abc".as_slice(), false));
        assert_eq!(reading.take(b"defg"), (b"de".as_slice(), true));
        let mut reading = Reading { chance: &mut chance, limit: None, taken: 0, met: &mut met };
        assert_eq!(reading.take(b"abc"), (b"abc".as_slice(), false));
    }
}
