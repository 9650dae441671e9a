//! A receiver of webhooks: a small HTTP server that keeps what it was sent.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::PATIENCE;

/// What was sent.
#[derive(Clone, Debug)]
pub struct Hook {
    head: String,
    pub body: Vec<u8>,
}

impl Hook {
    pub fn header(&self, name: &str) -> &str {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        let mut found = lines.filter(|(header, _)| header.eq_ignore_ascii_case(name)).map(|(_, value)| value);
        found.next().unwrap_or_else(|| panic!("there is a header {name} in {}", self.head))
    }

    pub fn request(&self) -> &str {
        self.head.lines().next().unwrap_or_default()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("the body is JSON")
    }

    pub fn kind(&self) -> String {
        self.json()["type"].as_str().expect("a type").to_owned()
    }
}

/// What to answer: status line and headers, then the body.
type Answer = Pin<Box<dyn Future<Output = String> + Send>>;
type Answers = Arc<dyn Fn(usize) -> Answer + Send + Sync>;

pub struct Receiver {
    pub port: u16,
    hooks: Arc<Mutex<Vec<Hook>>>,
    task: JoinHandle<()>,
}

/// An answer without a body; `more` are further header lines.
pub fn status(status: &str, more: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n{more}\r\n")
}

impl Receiver {
    /// Says yes to everything.
    pub async fn start() -> Self {
        Self::answering(|_| status("204 No Content", "")).await
    }

    /// Answers by how many requests came before.
    pub async fn answering(answer: impl Fn(usize) -> String + Send + Sync + 'static) -> Self {
        Self::with(move |n| {
            let answer = answer(n);
            Box::pin(async move { answer })
        })
        .await
    }

    /// The same, in its own time.
    pub async fn with(answer: impl Fn(usize) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let hooks = Arc::<Mutex<Vec<Hook>>>::default();
        let (kept, answers): (_, Answers) = (Arc::clone(&hooks), Arc::new(answer));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (kept, answers) = (Arc::clone(&kept), Arc::clone(&answers));
                tokio::spawn(async move {
                    // One that goes away in the middle is no request.
                    let _ = serve(stream, &kept, &answers).await;
                });
            }
        });
        Self { port, hooks, task }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/hook", self.port)
    }

    pub fn hooks(&self) -> Vec<Hook> {
        self.hooks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until so many requests came; gives all.
    pub async fn got(&self, count: usize) -> Vec<Hook> {
        until(&format!("{count} requests"), async || {
            let hooks = self.hooks();
            (hooks.len() >= count).then_some(hooks)
        })
        .await
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut stream: TcpStream, kept: &Mutex<Vec<Hook>>, answers: &Answers) -> std::io::Result<()> {
    let mut read = Vec::new();
    let head_end = loop {
        if let Some(end) = read.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
        if stream.read_buf(&mut read).await? == 0 {
            return Ok(());
        }
    };
    let head = String::from_utf8_lossy(&read[..head_end]).into_owned();
    let mut hook = Hook { head, body: read.split_off(head_end + 4) };
    let length: usize = hook.header("content-length").parse().expect("a length");
    while hook.body.len() < length {
        if stream.read_buf(&mut hook.body).await? == 0 {
            return Ok(());
        }
    }
    let n = {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push(hook);
        kept.len() - 1
    };
    let answer = answers(n).await;
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

/// Waits until `look` finds something.
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let wait = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE * 2, wait).await.unwrap_or_else(|_| panic!("waited in vain for {what}"))
}
