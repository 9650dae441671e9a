//! A server that answers what a test tells it to, also what a good server never would: it refuses, breaks
//! off in the middle, says the same twice.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

/// What was asked of it.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    /// Path and query.
    pub target: String,
    headers: Vec<(String, String)>,
    pub body: String,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).expect("the body is JSON")
    }
}

/// What it answers.
pub enum Reply {
    Whole {
        status: u16,
        headers: Vec<(&'static str, String)>,
        body: String,
    },
    /// A stream of events: these pieces, one after the other, and then the end.
    Events(Vec<String>),
    /// An answer that ends before it is whole.
    Half(String),
    /// Nothing: the connection ends.
    Cut,
}

impl Reply {
    pub fn json(status: u16, body: impl Into<String>) -> Self {
        Self::Whole { status, headers: vec![("content-type", "application/json".to_owned())], body: body.into() }
    }

    pub fn problem(status: u16, code: &str, detail: &str) -> Self {
        let body = serde_json::json!({"type": "about:blank", "title": "No", "status": status, "detail": detail, "code": code});
        let headers = vec![("content-type", "application/problem+json".to_owned())];
        Self::Whole { status, headers, body: body.to_string() }
    }

    pub fn with(mut self, name: &'static str, value: &str) -> Self {
        if let Self::Whole { headers, .. } = &mut self {
            headers.push((name, value.to_owned()));
        }
        self
    }
}

/// See the module. Its threads end with the test program.
pub struct StandIn {
    pub url: String,
    asked: Arc<Mutex<Vec<Request>>>,
}

impl StandIn {
    /// `answer` is given each request and how many came before it.
    pub fn start(answer: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let asked: Arc<Mutex<Vec<Request>>> = Arc::default();
        let (answer, all) = (Arc::new(answer), Arc::clone(&asked));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answer, all) = (Arc::clone(&answer), Arc::clone(&all));
                std::thread::spawn(move || {
                    let Some(request) = read(&stream) else { return };
                    let before = {
                        let mut all = all.lock().expect("no test panics with it");
                        all.push(request.clone());
                        all.len() - 1
                    };
                    // The client may be gone.
                    let _ = write(&stream, answer(&request, before));
                });
            }
        });
        Self { url, asked }
    }

    /// All that was asked so far.
    pub fn asked(&self) -> Vec<Request> {
        self.asked.lock().expect("no test panics with it").clone()
    }

    /// The command line, told to talk to this server.
    pub fn longhaul(&self, args: &[&str]) -> Command {
        let mut command = longhaul(args);
        command.env("LONGHAUL_SERVER", &self.url);
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.longhaul(args).output().expect("it starts")
    }
}

/// The command line without anything of the surroundings.
pub fn longhaul(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longhaul"));
    for (name, _) in std::env::vars_os() {
        let ours = name.to_str().is_some_and(|name| name.starts_with("LONGHAUL_") || name.starts_with("XDG_"));
        if ours {
            command.env_remove(name);
        }
    }
    command.args(args).env_remove("NO_COLOR").env_remove("HOME").stdin(Stdio::null());
    command
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("text")
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("text")
}

fn read(mut stream: &TcpStream) -> Option<Request> {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    let head = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
        let count = stream.read(&mut buffer).ok().filter(|&count| count > 0)?;
        bytes.extend_from_slice(&buffer[..count]);
    };
    let text = String::from_utf8_lossy(&bytes[..head]).into_owned();
    let mut lines = text.split("\r\n");
    let mut first = lines.next()?.split(' ');
    let (method, target) = (first.next()?.to_owned(), first.next()?.to_owned());
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()))
        .collect();
    let length =
        headers.iter().find(|(name, _)| name == "content-length").map_or(0, |(_, n)| n.parse().unwrap_or(0));
    let mut body = bytes[head + 4..].to_vec();
    while body.len() < length {
        let count = stream.read(&mut buffer).ok().filter(|&count| count > 0)?;
        body.extend_from_slice(&buffer[..count]);
    }
    Some(Request { method, target, headers, body: String::from_utf8_lossy(&body).into_owned() })
}

fn write(mut stream: &TcpStream, reply: Reply) -> std::io::Result<()> {
    match reply {
        Reply::Cut => Ok(()),
        Reply::Half(body) => {
            let length = body.len() + 1;
            let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
            stream.write_all(format!("{head}{body}").as_bytes())
        }
        Reply::Whole { status, headers, body } => {
            let mut text = format!("HTTP/1.1 {status} Status\r\nconnection: close\r\n");
            if status != 204 {
                text.push_str(&format!("content-length: {}\r\n", body.len()));
            }
            for (name, value) in headers {
                text.push_str(&format!("{name}: {value}\r\n"));
            }
            stream.write_all(format!("{text}\r\n{body}").as_bytes())
        }
        Reply::Events(pieces) => {
            let head = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n";
            stream.write_all(head.as_bytes())?;
            for piece in pieces {
                stream.write_all(piece.as_bytes())?;
                stream.flush()?;
            }
            Ok(())
        }
    }
}

/// One event of task `t`, as the server sends it.
pub fn event(seq: u64, kind: &str, data: serde_json::Value) -> String {
    let event = serde_json::json!({"seq": seq, "task_id": "t", "type": kind, "time": "2026-01-02T12:00:01Z",
        "run": 1, "step": null, "data": data});
    format!("id: {seq}\ndata: {event}\n\n")
}
