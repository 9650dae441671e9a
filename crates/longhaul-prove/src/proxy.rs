//! A bad network: a proxy between the processes of the suite and the PostgreSQL server. It cuts connections in the middle of
//! what they carry, holds bytes back, and loses the answer to what was committed.
//!
//! For the last it knows just enough of the protocol: what the server says is messages of a type, a length and a
//! body, and an answer ends with "ready for query" (`Z`), which tells whether a transaction is open. An answer that says that
//! something was committed is not passed on: the connection is gone, and only the server knows.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

use crate::Anyhow;
use crate::chance::Chance;

/// What a client sends first when it would like to have TLS.
const SSL_REQUEST: u32 = 80_877_103;

/// A fault that waits for its moment, and how often it came.
#[derive(Debug, Default)]
struct Fault {
    armed: AtomicU64,
    done: AtomicU64,
}

impl Fault {
    /// Whether it happens here and now.
    fn take(&self) -> bool {
        self.armed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |armed| armed.checked_sub(1)).is_ok()
    }

    fn happened(&self) {
        self.done.fetch_add(1, Ordering::SeqCst);
    }

    fn waits(&self) -> bool {
        self.armed.load(Ordering::SeqCst) > 0
    }
}

/// What can go wrong on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// A connection is cut, after any byte.
    Cut,
    /// Bytes are held back.
    Hold,
    /// The answer to a commit is lost.
    LostAnswer,
}

#[derive(Debug)]
struct Shared {
    to: SocketAddr,
    cut: Fault,
    hold: Fault,
    lost: Fault,
    /// How many bytes clients may send before one is cut off, if that is so; 0: any number.
    to_cut: AtomicU64,
    /// How many bytes clients have sent.
    carried: AtomicU64,
    /// The longest time that bytes are held back.
    longest: Duration,
    chance: Mutex<Chance>,
}

impl Shared {
    fn fault(&self, wrong: Wrong) -> &Fault {
        match wrong {
            Wrong::Cut => &self.cut,
            Wrong::Hold => &self.hold,
            Wrong::LostAnswer => &self.lost,
        }
    }

    /// How many of so many bytes from a client are the last.
    fn cut_within(&self, count: usize) -> Option<usize> {
        let less = |left: u64| (left > 0).then(|| left.saturating_sub(count as u64));
        let left = self.to_cut.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).ok()?;
        (left <= count as u64).then_some(left as usize - 1)
    }

    fn between(&self, low: u64, high: u64) -> u64 {
        self.chance.lock().unwrap_or_else(PoisonError::into_inner).between(low, high)
    }
}

/// See the module. Ends, with all connections, when dropped.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// A proxy to this address. `longest`: for how long bytes are held back at most.
    pub async fn start(to: SocketAddr, longest: Duration, chance: Chance) -> Result<Self, Anyhow> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let (cut, hold, lost) = Default::default();
        let shared = Arc::new(Shared {
            to,
            cut,
            hold,
            lost,
            to_cut: AtomicU64::new(0),
            carried: AtomicU64::new(0),
            longest,
            chance: Mutex::new(chance),
        });
        let task = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Ok(Self { port, shared, task })
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// This is to happen once more, as soon as it can.
    pub fn arm(&self, wrong: Wrong) {
        self.shared.fault(wrong).armed.fetch_add(1, Ordering::SeqCst);
    }

    /// The connection that sends the byte of this number from now on is cut there.
    pub fn cut_after(&self, byte: u64) {
        self.shared.to_cut.store(byte.saturating_add(1), Ordering::SeqCst);
    }

    /// How many bytes clients have sent so far.
    pub fn carried(&self) -> u64 {
        self.shared.carried.load(Ordering::SeqCst)
    }

    /// How often it happened.
    pub fn happened(&self, wrong: Wrong) -> u64 {
        self.shared.fault(wrong).done.load(Ordering::SeqCst)
    }

    /// Nothing is to happen any more.
    pub fn disarm(&self) {
        for wrong in [Wrong::Cut, Wrong::Hold, Wrong::LostAnswer] {
            self.shared.fault(wrong).armed.store(0, Ordering::SeqCst);
        }
        self.shared.to_cut.store(0, Ordering::SeqCst);
    }

    /// Whether something is still to happen.
    pub fn waits(&self) -> bool {
        [Wrong::Cut, Wrong::Hold, Wrong::LostAnswer].into_iter().any(|wrong| self.shared.fault(wrong).waits())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((client, _)) = accepted {
                    let shared = Arc::clone(&shared);
                    connections.spawn(async move {
                        // However it ends, both sides are closed with it.
                        let _ = pass(client, &shared).await;
                    });
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Passes a connection on, until one side or the proxy ends it.
async fn pass(client: TcpStream, shared: &Shared) -> std::io::Result<()> {
    let mut server = TcpStream::connect(shared.to).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (mut from_client, mut to_client) = client.into_split();
    let mut first = [0; 8];
    from_client.read_exact(&mut first).await?;
    server.write_all(&first).await?;
    let mut framed = true;
    if u32::from_be_bytes([first[4], first[5], first[6], first[7]]) == SSL_REQUEST {
        let answer = server.read_u8().await?;
        to_client.write_u8(answer).await?;
        // What is encrypted is passed on as it is.
        framed = answer == b'N';
    }
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        ended = forth(from_client, to_server, shared) => ended,
        ended = back(from_server, to_client, framed, shared) => ended,
    }
}

/// Passes bytes on, badly if it is time; false: the connection is to be cut.
async fn carry(bytes: &[u8], to: &mut OwnedWriteHalf, shared: &Shared) -> std::io::Result<bool> {
    if shared.hold.take() {
        shared.hold.happened();
        let longest = u64::try_from(shared.longest.as_millis()).unwrap_or(u64::MAX);
        let some = shared.between(0, bytes.len() as u64 - 1) as usize;
        to.write_all(&bytes[..some]).await?;
        sleep(Duration::from_millis(shared.between(longest / 10, longest))).await;
        to.write_all(&bytes[some..]).await?;
        return Ok(true);
    }
    if shared.cut.take() {
        shared.cut.happened();
        let some = shared.between(0, bytes.len() as u64 - 1) as usize;
        to.write_all(&bytes[..some]).await?;
        to.flush().await?;
        return Ok(false);
    }
    to.write_all(bytes).await?;
    Ok(true)
}

async fn forth(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, shared: &Shared) -> std::io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let count = from.read(&mut buffer).await?;
        shared.carried.fetch_add(count as u64, Ordering::SeqCst);
        if let Some(some) = shared.cut_within(count) {
            shared.cut.happened();
            return to.write_all(&buffer[..some]).await;
        }
        if count == 0 || !carry(&buffer[..count], &mut to, shared).await? {
            return Ok(());
        }
    }
}

async fn back(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    framed: bool,
    shared: &Shared,
) -> std::io::Result<()> {
    let (mut buffer, mut answers) = (vec![0; 16 * 1024], Answers::default());
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        if !framed {
            if !carry(&buffer[..count], &mut to, shared).await? {
                return Ok(());
            }
            continue;
        }
        answers.came.extend_from_slice(&buffer[..count]);
        while let Some(end) = answers.next() {
            if end == End::Committed && shared.lost.take() {
                shared.lost.happened();
                return to.write_all(&answers.take(answers.began)).await;
            }
        }
        // While an answer is to be lost, none is begun before it is known what it says.
        let known = if shared.lost.waits() { answers.begins } else { answers.read };
        let bytes = answers.take(known);
        if !bytes.is_empty() && !carry(&bytes, &mut to, shared).await? {
            return Ok(());
        }
    }
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Something that was written is there to stay.
    Committed,
    /// Anything else.
    Other,
}

/// What the server said and was not passed on yet: whole messages, perhaps a part of one, and what they mean.
#[derive(Debug, Default)]
struct Answers {
    /// It begins with a message.
    came: Vec<u8>,
    /// How much of it was read: whole messages.
    read: usize,
    /// Where the newest answer that has an end began.
    began: usize,
    /// Where the one under way began.
    begins: usize,
    commits: bool,
    changes: bool,
}

impl Answers {
    /// Reads on to the end of the next answer, if it is there.
    fn next(&mut self) -> Option<End> {
        loop {
            let rest = &self.came[self.read..];
            let length: [u8; 4] = rest.get(1..5)?.try_into().ok()?;
            let length = 1 + u32::from_be_bytes(length) as usize;
            let (kind, body) = (rest[0], rest.get(5..length)?);
            self.read += length;
            match kind {
                b'C' if body.starts_with(b"COMMIT") => self.commits = true,
                b'C' => {
                    self.changes |= [b"INSERT", b"UPDATE", b"DELETE"].iter().any(|word| body.starts_with(*word))
                }
                b'Z' => {
                    let alone = body.first() == Some(&b'I');
                    let committed = self.commits || (self.changes && alone);
                    (self.commits, self.changes) = (false, false);
                    (self.began, self.begins) = (self.begins, self.read);
                    return Some(if committed { End::Committed } else { End::Other });
                }
                _ => {}
            }
        }
    }

    /// The first so many bytes, to be passed on.
    fn take(&mut self, count: usize) -> Vec<u8> {
        let rest = self.came.split_off(count);
        self.read -= count;
        self.began = self.began.saturating_sub(count);
        self.begins = self.begins.saturating_sub(count);
        std::mem::replace(&mut self.came, rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).expect("short");
        [&[kind], &length.to_be_bytes()[..], body].concat()
    }

    fn said(tag: &str, state: u8) -> Vec<u8> {
        [message(b'C', format!("{tag}\0").as_bytes()), message(b'Z', &[state])].concat()
    }

    #[test]
    fn an_answer_is_a_commit_if_the_server_says_so() {
        let end_of = |bytes: &[u8]| {
            let mut answers = Answers { came: bytes.to_vec(), ..Answers::default() };
            answers.next()
        };
        assert_eq!(end_of(&said("COMMIT", b'I')), Some(End::Committed));
        assert_eq!(end_of(&said("ROLLBACK", b'I')), Some(End::Other));
        assert_eq!(end_of(&said("UPDATE 3", b'I')), Some(End::Committed), "a statement on its own");
        assert_eq!(end_of(&said("UPDATE 3", b'T')), Some(End::Other), "within a transaction");
        assert_eq!(end_of(&said("COMMIT", b'I')[..10]), None, "not all of it came");
    }

    #[test]
    fn what_was_answered_before_a_commit_is_passed_on_and_the_rest_is_not() {
        let first = said("UPDATE 1", b'T');
        let mut answers = Answers { came: [first.clone(), said("COMMIT", b'I')].concat(), ..Answers::default() };
        assert_eq!((answers.next(), answers.next()), (Some(End::Other), Some(End::Committed)));
        assert_eq!(answers.take(answers.began), first);
        let begun = [first.clone(), said("COMMIT", b'I')[..7].to_vec()].concat();
        let mut answers = Answers { came: begun, ..Answers::default() };
        assert_eq!((answers.next(), answers.next()), (Some(End::Other), None));
        assert_eq!(answers.take(answers.begins), first, "the answer that has begun waits");
        answers.came.extend_from_slice(&said("COMMIT", b'I')[7..]);
        assert_eq!(answers.next(), Some(End::Committed));
        assert!(answers.take(answers.began).is_empty());
    }

    /// A server that answers each byte with an answer that says that it was committed.
    async fn server() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let address = listener.local_addr().expect("bound");
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut first = [0; 8];
                    client.read_exact(&mut first).await.expect("the first message");
                    while client.read_u8().await.is_ok() {
                        if client.write_all(&said("COMMIT", b'I')).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        address
    }

    async fn client_of(proxy: &Proxy) -> TcpStream {
        let mut client = TcpStream::connect(("127.0.0.1", proxy.port())).await.expect("connects");
        client.write_all(&[0, 0, 0, 8, 0, 3, 0, 0]).await.expect("written");
        client
    }

    /// What comes back for one byte; nothing when the connection is gone.
    async fn ask(client: &mut TcpStream) -> Vec<u8> {
        let mut answer = vec![0; said("COMMIT", b'I').len()];
        if client.write_u8(1).await.is_err() || client.read_exact(&mut answer).await.is_err() {
            return Vec::new();
        }
        answer
    }

    #[tokio::test]
    async fn a_commits_answer_is_lost_a_connection_is_cut_and_bytes_are_held_back_when_that_is_armed() {
        let hold = Duration::from_millis(200);
        let proxy = Proxy::start(server().await, hold, Chance::new(1)).await.expect("starts");
        let mut client = client_of(&proxy).await;
        assert_eq!(ask(&mut client).await, said("COMMIT", b'I'));
        proxy.arm(Wrong::LostAnswer);
        assert!(ask(&mut client).await.is_empty());
        assert_eq!((proxy.happened(Wrong::LostAnswer), proxy.waits()), (1, false));
        let mut client = client_of(&proxy).await;
        proxy.arm(Wrong::Hold);
        assert_eq!(ask(&mut client).await, said("COMMIT", b'I'), "late, but whole");
        proxy.arm(Wrong::Cut);
        assert!(ask(&mut client).await.is_empty());
        assert_eq!((proxy.happened(Wrong::Hold), proxy.happened(Wrong::Cut)), (1, 1));
        let mut client = client_of(&proxy).await;
        assert_eq!(ask(&mut client).await, said("COMMIT", b'I'), "nothing is wrong any more");
    }
}
