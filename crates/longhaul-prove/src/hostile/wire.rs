//! Hostile bytes on real connections: requests as they come over the wire, and frames of WebSockets.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use longhaul_hostile::{Dice, Judged};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::oneshot;

use super::bed::{Bed, Place};
use super::trial::{Broke, Trial};

/// After so many inputs the next bed is made: commands end its tasks.
const BATCH: u64 = 500;
/// A connection that has said everything is ended by the server within this.
const PATIENCE: Duration = Duration::from_secs(15);
/// One that is silent for so long waits for more, or has nothing to say.
const PAUSE: Duration = Duration::from_millis(6);
/// The most that is read of an answer: events of a task, and acknowledgements.
const MOST_READ: u64 = 4 * 1024 * 1024;
/// The frames of a text and of an end.
const TEXT: u8 = 1;
const CLOSE: u8 = 8;

/// A server on a port of its own.
struct Served {
    bed: Bed,
    address: SocketAddr,
    connections: u64,
    stop: Option<oneshot::Sender<()>>,
}

impl Served {
    async fn start() -> Result<Self, Broke> {
        let bed = Bed::make(&Place::Memory, false).await?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (stop, told) = oneshot::channel::<()>();
        let app = bed.app.clone();
        tokio::spawn(longhaul_server::serve(listener, app, async move {
            // Dropped is told too.
            let _ = told.await;
        }));
        Ok(Self { bed, address, connections: 0, stop: Some(stop) })
    }

    /// Sends bytes on a connection of its own, says that nothing more comes, and gives all that is answered.
    async fn exchange(&mut self, bytes: &[u8]) -> Result<Vec<u8>, Broke> {
        self.connections += 1;
        let socket = TcpSocket::new_v4()?;
        // Ports that were used rest for a minute: there are enough of them on many addresses.
        let here = u8::try_from(2 + self.connections % 250)?;
        socket.bind(SocketAddr::from((Ipv4Addr::new(127, 0, 0, here), 0)))?;
        let mut stream = socket.connect(self.address).await?;
        let mut read = Vec::new();
        let exchanged = tokio::time::timeout(PATIENCE, async {
            // The server may have had enough before it has read all.
            let _ = stream.write_all(bytes).await;
            // Who says at once that nothing more comes is taken to have left, and not answered.
            let mut buffer = vec![0; 16 * 1024];
            while let Ok(Ok(count @ 1..)) = tokio::time::timeout(PAUSE, stream.read(&mut buffer)).await {
                read.extend_from_slice(&buffer[..count]);
            }
            let _ = stream.shutdown().await;
            let _ = stream.take(MOST_READ).read_to_end(&mut read).await;
        });
        exchanged
            .await
            .map_err(|_| Broke(format!("the server did not end the connection within {PATIENCE:?}")))?;
        Ok(read)
    }

    /// The same, where nothing may be stored unless the answer says that something was accepted.
    async fn tried(
        &mut self,
        bytes: &[u8],
        accepted: impl Fn(&[u8]) -> Result<bool, Broke>,
    ) -> Result<Judged, Broke> {
        let answer = self.exchange(bytes).await?;
        let was_accepted = accepted(&answer)?;
        // What was not answered, in time, may have been accepted.
        if self.bed.has_changed().await? && !was_accepted && !answer.is_empty() {
            let before = self.bed.witness.digest().await?;
            self.exchange(bytes).await?;
            if self.bed.witness.digest().await? != before {
                return Err(Broke("it was refused, and something was stored".to_owned()));
            }
            self.bed.has_changed().await?;
        }
        Ok(if was_accepted { Judged::Accepted } else { Judged::Refused })
    }

    async fn stop(mut self) {
        drop(self.stop.take());
    }
}

/// Requests as bytes, with whatever is wrong with them.
pub(super) async fn requests(trial: &mut Trial<'_>) -> Result<(), Broke> {
    loop {
        let mut served = Served::start().await?;
        for _ in 0..BATCH {
            let Some(input) = trial.draw()? else { return Ok(()) };
            // As people write them, and as they are on the wire.
            let input = served.bed.filled(&input);
            let judged = served.tried(&input, answered).await?;
            trial.judged(judged)?;
        }
        served.stop().await;
    }
}

/// Whether anything was accepted of what came on a connection.
fn answered(answer: &[u8]) -> Result<bool, Broke> {
    // Who asks in version 1.0 is answered so.
    const HEADS: [&[u8]; 2] = [b"HTTP/1.1 ", b"HTTP/1.0 "];
    let mut accepted = false;
    for at in (0..answer.len()).filter(|at| HEADS.iter().any(|head| answer[*at..].starts_with(head))) {
        match answer.get(at + HEADS[0].len()) {
            Some(b'5') => {
                let shown = String::from_utf8_lossy(&answer[at..answer.len().min(at + 600)]).into_owned();
                return Err(Broke(format!("it was answered with {shown}")));
            }
            Some(b'1'..=b'3') => accepted = true,
            _ => {}
        }
    }
    Ok(accepted)
}

/// Frames of a WebSocket.
pub(super) async fn frames(trial: &mut Trial<'_>) -> Result<(), Broke> {
    loop {
        let mut served = Served::start().await?;
        for _ in 0..BATCH {
            let Some(said) = trial.draw()? else { return Ok(()) };
            let task = trial.mutator.dice.one_of(&["state", "asks", "approves", "pending", "done"]);
            let mut bytes = opening(served.bed.name(task));
            for _ in 0..=trial.mutator.dice.below(2) {
                bytes.extend(framed(&served.bed.filled(&said), &mut trial.mutator.dice));
            }
            bytes.extend(frame(0x80 | CLOSE, &[], None));
            let judged = served.tried(&bytes, acknowledged).await?;
            trial.judged(judged)?;
        }
        served.stop().await;
    }
}

/// What asks for a channel to a task. The key is that of the protocol's own example.
fn opening(task: &str) -> Vec<u8> {
    format!(
        "GET /v1/tasks/{task}/ws?after=1000000 HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    .into_bytes()
}

/// What is said in a frame: mostly in a sound one, else in one whose head lies.
fn framed(said: &[u8], dice: &mut Dice) -> Vec<u8> {
    let first = match dice.below(12) {
        0 => dice.draw() as u8,
        // In two pieces.
        1 if !said.is_empty() => {
            let (one, other) = said.split_at(dice.below(said.len()));
            return [frame(TEXT, one, None), frame(0x80, other, None)].concat();
        }
        2 => 0x80 | *dice.one_of(&[0_u8, 2, 3, 7, 8, 9, 10, 11, 15]),
        _ => 0x80 | TEXT,
    };
    let length =
        dice.once_in(30).then(|| *dice.one_of(&[0_u64, 1, 125, 126, 65_535, 65_536, 1 << 31, 1 << 63, u64::MAX]));
    let mut bytes = frame(first, said, length);
    if dice.once_in(40) {
        // Without its mask, which clients must have.
        bytes[1] &= 0x7f;
    }
    bytes
}

/// A masked frame, its length as it is or as is claimed.
fn frame(first: u8, said: &[u8], claimed: Option<u64>) -> Vec<u8> {
    const MASK: [u8; 4] = [0x12, 0x34, 0x56, 0x78];
    let length = claimed.unwrap_or(said.len() as u64);
    let mut bytes = vec![first];
    match (u8::try_from(length), u16::try_from(length)) {
        (Ok(short @ ..=125), _) => bytes.push(0x80 | short),
        (_, Ok(middle)) => {
            bytes.push(0x80 | 126);
            bytes.extend(middle.to_be_bytes());
        }
        _ => {
            bytes.push(0x80 | 127);
            bytes.extend(length.to_be_bytes());
        }
    }
    bytes.extend(MASK);
    bytes.extend(said.iter().zip(MASK.iter().cycle()).map(|(byte, mask)| byte ^ mask));
    bytes
}

/// Whether a command of a channel was accepted. What it is answered must be sound.
fn acknowledged(answer: &[u8]) -> Result<bool, Broke> {
    let Some(end) = answer.windows(4).position(|four| four == b"\r\n\r\n") else { return answered(answer) };
    let mut rest = &answer[end + 4..];
    if !answer.starts_with(b"HTTP/1.1 101") {
        return answered(answer);
    }
    let mut accepted = false;
    while let Some((kind, said, after)) = unframed(rest) {
        rest = after;
        if kind != TEXT {
            continue;
        }
        let said: Value =
            serde_json::from_slice(said).map_err(|error| Broke(format!("a frame is no JSON: {error}")))?;
        if said["error"]["status"].as_u64().is_some_and(|status| status >= 500) {
            return Err(Broke(format!("a command was answered with {said}")));
        }
        accepted |= said["ok"] == true;
    }
    Ok(accepted)
}

/// The first frame of what a server sent: its kind, what it says, and the rest.
fn unframed(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (first, length) = (*bytes.first()?, *bytes.get(1)?);
    let (length, head) = match length {
        126 => (u64::from(u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?)), 4),
        127 => (u64::from_be_bytes(bytes.get(2..10)?.try_into().ok()?), 10),
        length => (u64::from(length), 2),
    };
    let end = head + usize::try_from(length).ok()?;
    Some((first & 0xf, bytes.get(head..end)?, &bytes[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_the_length_of_what_they_say() {
        for length in [0, 125, 126, 65_535, 65_536] {
            let bytes = frame(0x81, &vec![b'x'; length], None);
            let head = match length {
                0..=125 => 2,
                126..=65_535 => 4,
                _ => 10,
            };
            assert_eq!(bytes.len(), head + 4 + length, "{length}");
        }
    }

    #[test]
    fn answers_are_told_apart() {
        assert!(answered(b"HTTP/1.1 200 OK\r\n\r\n").expect("sound"));
        assert!(answered(b"HTTP/1.0 202 Accepted\r\n\r\n").expect("sound"));
        assert!(!answered(b"HTTP/1.1 400 Bad Request\r\n\r\n").expect("sound"));
        assert!(answered(b"HTTP/1.1 400 Bad\r\n\r\nHTTP/1.1 503 No\r\n\r\n").is_err());
        let head = b"HTTP/1.1 101 Switching Protocols\r\n\r\n".as_slice();
        let said =
            |text: &str| [head, &[0x81, u8::try_from(text.len()).expect("short")], text.as_bytes()].concat();
        assert!(acknowledged(&said(r#"{"ok":true}"#)).expect("sound"));
        assert!(!acknowledged(&said(r#"{"ok":false,"error":{"status":400}}"#)).expect("sound"));
        assert!(acknowledged(&said(r#"{"ok":false,"error":{"status":500}}"#)).is_err());
        assert!(acknowledged(&said("no JSON")).is_err());
    }
}
