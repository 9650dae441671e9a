//! The scenarios over HTTP. The load is made with plain sockets: it shares the machine with what it measures.

use std::io::{BufRead as _, BufReader as LineReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use longhaul::{Client, NewTask, Run, TaskError, TaskId, Worker};
use longhaul_server::{App, ServerSettings, serve};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::scenarios::{CALLERS, open_gates, percentiles, take_one};
use super::{Measured, Progress, Streams};
use crate::args::BenchArgs;
use crate::exit::Failure;

/// Readers of each task of `sse`.
const READERS: usize = 10;
/// Steps of each task of `sse`.
const STEPS: usize = 10;
/// The longest a reader waits for anything.
const PATIENCE: Duration = Duration::from_secs(120);

fn broken(error: impl std::fmt::Display) -> Failure {
    Failure::internal(error.to_string())
}

/// Submits over keep-alive connections, one at a time on each.
pub(super) async fn submit(client: &Client, args: &BenchArgs, progress: &Progress) -> Result<Measured, Failure> {
    let total = args.tasks.unwrap_or(50_000);
    open_gates(client, &["noop"]).await?;
    let listener = TcpListener::bind("127.0.0.1:0").await.map_err(broken)?;
    let address = listener.local_addr().map_err(broken)?;
    let (stop, told) = oneshot::channel::<()>();
    let app = App::new(client.clone(), false, ServerSettings::default());
    let served = tokio::spawn(serve(listener, app, async move {
        let _ = told.await;
    }));
    progress.phase("submitting", total);
    let left = Arc::new(AtomicUsize::new(total));
    let started = Instant::now();
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        callers.spawn(caller(address, Arc::clone(&left)));
    }
    let (mut times, mut errors) = (Vec::with_capacity(total), 0);
    while let Some(called) = callers.join_next().await {
        let (some, failed) = called.map_err(broken)?.map_err(broken)?;
        times.extend(some);
        errors += failed;
    }
    let seconds = started.elapsed().as_secs_f64();
    let _ = stop.send(());
    served.await.map_err(broken)?;
    let tasks = times.len();
    Ok(Measured { tasks, seconds, per_second: tasks as f64 / seconds, errors, ..percentiles(times) })
}

/// One connection: how long each answer took, and how many were not 202.
async fn caller(address: SocketAddr, left: Arc<AtomicUsize>) -> std::io::Result<(Vec<Duration>, usize)> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let mut stream = BufReader::new(stream);
    let body = r#"{"handler":"noop"}"#;
    let request = format!(
        "POST /v1/tasks HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let (mut times, mut errors) = (Vec::new(), 0);
    let mut answer = Vec::new();
    while take_one(&left) {
        let asked = Instant::now();
        stream.get_mut().write_all(request.as_bytes()).await?;
        let accepted = read_answer(&mut stream, &mut answer).await?;
        times.push(asked.elapsed());
        errors += usize::from(!accepted);
    }
    Ok((times, errors))
}

/// Reads one answer to its end; gives whether it was 202.
async fn read_answer(stream: &mut BufReader<TcpStream>, buffer: &mut Vec<u8>) -> std::io::Result<bool> {
    let (mut length, mut accepted, mut first) = (0, false, true);
    loop {
        buffer.clear();
        if stream.read_until(b'\n', buffer).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if first {
            accepted = buffer.starts_with(b"HTTP/1.1 202");
            first = false;
        }
        if buffer.trim_ascii().is_empty() {
            break;
        }
        if buffer.to_ascii_lowercase().starts_with(b"content-length:") {
            let text = String::from_utf8_lossy(&buffer["content-length:".len()..]);
            length = text.trim().parse().unwrap_or(0);
        }
    }
    buffer.resize(length, 0);
    stream.read_exact(buffer).await?;
    Ok(accepted)
}

/// Readers that each follow a task to its end, on a server process of its own.
pub(super) async fn follow(
    client: &Client,
    store: &str,
    args: &BenchArgs,
    progress: &Progress,
) -> Result<Measured, Failure> {
    if store == "memory:" {
        return Err(Failure::usage("sse starts a server process; a store in memory cannot be shared with one"));
    }
    let readers = args.tasks.unwrap_or(5_000);
    let tasks = readers.div_ceil(READERS);
    open_files(readers + 500)?;
    open_gates(client, &["follow"]).await?;
    let worker = Worker::new(client).handler("follow", follow_me).slots(tasks.max(1)).start().await?;
    let ids = submit_all(client, tasks).await?;
    let server = ServerProcess::start(store)?;
    let idle = server.rss_kb();
    progress.phase("connecting", readers);
    let (connected, mut connections) = mpsc::channel(1_000);
    let mut streams = JoinSet::new();
    for reader in 0..readers {
        streams.spawn(reader_of(server.address, ids[reader % tasks], args.reconnects, connected.clone()));
        // So many at once as the system's queue for new connections holds.
        if reader % 100 == 99 {
            for _ in 0..100 {
                connections.recv().await;
            }
            progress.at(reader);
        }
    }
    for _ in 0..readers % 100 {
        connections.recv().await;
    }
    let per_client_kb = (server.rss_kb() - idle).max(0.0) / readers as f64;
    progress.phase("following", readers);
    let started = Instant::now();
    client.signal_many(&ids, "go", &()).await?;
    let (mut errors, mut events, mut ended) = (0, 0, 0);
    while let Some(read) = streams.join_next().await {
        match read.map_err(broken)? {
            Ok(count) => events += count,
            Err(_) => errors += 1,
        }
        ended += 1;
        progress.at(ended);
    }
    let seconds = started.elapsed().as_secs_f64();
    worker.stop().await;
    let streams = Some(Streams { per_client_kb, events });
    Ok(Measured {
        tasks: readers,
        seconds,
        per_second: events as f64 / seconds,
        errors,
        streams,
        ..Measured::default()
    })
}

async fn follow_me(run: Run, (): ()) -> Result<(), TaskError> {
    run.signal::<()>("go").await?;
    for step in 0..STEPS {
        run.step(format!("step {step}"), async || Ok::<_, TaskError>(step)).await?;
    }
    Ok(())
}

async fn submit_all(client: &Client, count: usize) -> Result<Vec<TaskId>, Failure> {
    let tasks = (0..count).map(|_| NewTask::new("follow", &())).collect();
    let answers = client.submit_many(tasks).await?;
    answers.into_iter().map(|answer| Ok(answer?.id)).collect()
}

/// Follows a task to its end, over connections that are cut off at random bytes `cuts` times; gives the number of
/// its events, each of which came once and in order.
async fn reader_of(
    address: SocketAddr,
    task: TaskId,
    cuts: usize,
    connected: mpsc::Sender<()>,
) -> std::io::Result<usize> {
    let mut reader = Reader { address, task, seen: 0, connected: Some(connected) };
    for _ in 0..cuts {
        if reader.read(Some(rand::random_range(1..2_000))).await? {
            return Ok(reader.seen);
        }
    }
    match reader.read(None).await? {
        true => Ok(reader.seen),
        false => Err(wrong("the stream ended before its task")),
    }
}

fn wrong(what: &str) -> std::io::Error {
    std::io::Error::other(what.to_owned())
}

struct Reader {
    address: SocketAddr,
    task: TaskId,
    /// The number of the last event that came whole.
    seen: usize,
    /// Told once the first event is there.
    connected: Option<mpsc::Sender<()>>,
}

impl Reader {
    /// Reads from where it was, to the end or up to so many bytes; gives whether the final event came.
    async fn read(&mut self, bytes: Option<usize>) -> std::io::Result<bool> {
        let (address, task, seen) = (self.address, self.task, self.seen);
        let mut stream = TcpStream::connect(address).await?;
        let request = format!(
            "GET /v1/tasks/{task}/events HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nLast-Event-ID: {seen}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await?;
        // Small: thousands of these share the machine with the server.
        let mut lines = BufReader::with_capacity(1_024, stream);
        let (mut line, mut read, mut number) = (Vec::new(), 0, 0);
        loop {
            line.clear();
            let came = tokio::time::timeout(PATIENCE, lines.read_until(b'\n', &mut line)).await;
            let came = came.map_err(|_| wrong("nothing came for a long time"))??;
            read += came;
            if came == 0 || bytes.is_some_and(|bytes| read > bytes) {
                return Ok(false);
            }
            if let Some(text) = line.strip_prefix(b"id: ") {
                number = String::from_utf8_lossy(text).trim().parse().map_err(|_| wrong("not a number"))?;
            } else if line.starts_with(b"data: ") {
                if number != self.seen + 1 {
                    return Err(wrong("an event was lost or came twice"));
                }
                self.seen = number;
                if let Some(connected) = self.connected.take() {
                    // Of use to nobody once the scenario has given up.
                    let _ = connected.send(()).await;
                }
                if line.windows(16).any(|part| part == br#""task.completed""#) {
                    return Ok(true);
                }
            }
        }
    }
}

/// Each connection is a file.
fn open_files(wanted: usize) -> Result<(), Failure> {
    let limit = getrlimit(Resource::Nofile);
    let wanted = wanted as u64;
    if limit.current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum }).map_err(|error| {
        Failure::usage(format!("{wanted} connections need as many open files: {error}; raise 'ulimit -n'"))
    })
}

/// A server of its own, ended with this value.
struct ServerProcess {
    child: Child,
    address: SocketAddr,
}

impl ServerProcess {
    fn start(store: &str) -> Result<Self, Failure> {
        let program = std::env::current_exe().map_err(broken)?;
        let mut child = Command::new(program)
            .args(["serve", "--store", store, "--listen", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(broken)?;
        let stderr = child.stderr.take().ok_or_else(|| broken("the server has no stderr"))?;
        let mut lines = LineReader::new(stderr).lines();
        let listening = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| line.strip_prefix("listening on http://").and_then(|address| address.parse().ok()));
        // Whatever else it says must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        match listening {
            Some(address) => Ok(Self { child, address }),
            None => Err(broken("the server did not start")),
        }
    }

    fn rss_kb(&self) -> f64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.child.id())).unwrap_or_default();
        let pages: f64 = statm.split_whitespace().nth(1).and_then(|text| text.parse().ok()).unwrap_or(0.0);
        pages * rustix::param::page_size() as f64 / 1024.0
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
