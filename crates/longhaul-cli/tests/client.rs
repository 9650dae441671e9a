//! The command line against the real server: `longhaul up` in one process, client commands in others.

mod standin;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};
use standin::{longhaul, stderr, stdout};

/// One saga that needs an approval, one that hangs until a file is there, and one that fails.
const MANIFESTS: [(&str, &str); 3] = [
    (
        "greet.toml",
        "[saga]\nname = \"greet\"\n[[step]]\nname = \"hello\"\ncommand = [\"echo\", \"hello {{input.name}}\"]\n",
    ),
    (
        "gate.toml",
        "[saga]\nname = \"gate\"\n[[step]]\nname = \"before\"\ncommand = [\"true\"]\n\
         [[step]]\nname = \"open\"\napprove = \"Open the gate?\"\ncommand = [\"echo\", \"open\"]\n",
    ),
    ("fail.toml", "[saga]\nname = \"fail\"\n[[step]]\nname = \"no\"\nattempts = 1\ncommand = [\"false\"]\n"),
];

/// A server with workers, on a store that outlives it.
struct Up {
    folder: tempfile::TempDir,
    child: Option<Child>,
    url: String,
}

impl Up {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let manifests = folder.path().join("manifests");
        std::fs::create_dir(&manifests).expect("made");
        for (name, text) in MANIFESTS {
            std::fs::write(manifests.join(name), text).expect("written");
        }
        let mut up = Self { folder, child: None, url: String::new() };
        up.restart("127.0.0.1:0");
        up
    }

    fn restart(&mut self, listen: &str) {
        self.kill();
        let mut child =
            longhaul(&["up", "--listen", listen, "--store", &store(self.folder.path()), "--manifests"])
                .arg(self.folder.path().join("manifests"))
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .expect("it starts");
        let mut told = BufReader::new(child.stderr.take().expect("piped"));
        self.url = listening(&mut told);
        self.child = Some(child);
        // A pipe that nobody reads would stop the server in the end.
        std::thread::spawn(move || std::io::copy(&mut told, &mut std::io::sink()));
    }

    /// kill -9
    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("killed");
            child.wait().expect("gone");
        }
    }

    fn longhaul(&self, args: &[&str]) -> Command {
        let mut command = longhaul(args);
        command.env("LONGHAUL_SERVER", &self.url);
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.longhaul(args).output().expect("it starts")
    }

    /// Runs what must go well and gives its output.
    fn good(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
        stdout(&output)
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.good(&[args, &["--json"]].concat())).expect("JSON")
    }

    fn submit(&self, handler: &str, input: &str) -> String {
        self.good(&["submit", handler, input]).trim_end().to_owned()
    }

    /// Waits until the task is in a state.
    fn until(&self, id: &str, state: &str) {
        let begun = std::time::Instant::now();
        while self.json(&["show", id])["state"] != state {
            assert!(begun.elapsed().as_secs() < 120, "task {id} does not become {state}");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may be gone already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Waits until a server says that it listens, and where.
fn listening(told: &mut impl BufRead) -> String {
    let mut said = String::new();
    loop {
        let mut line = String::new();
        assert_ne!(told.read_line(&mut line).expect("text"), 0, "it ended instead of listening: {said}");
        if let Some(url) = line.trim_end().strip_prefix("listening on ") {
            return url.to_owned();
        }
        said.push_str(&line);
    }
}

fn store(folder: &Path) -> String {
    format!("sqlite:{}", folder.join("longhaul.db").display())
}

#[test]
fn a_server_says_once_that_it_listens_whatever_else_it_says() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (command, form) in [("up", "human"), ("up", "json"), ("serve", "human")] {
        let mut child = longhaul(&[command, "--listen", "127.0.0.1:0", "--store", &store(folder.path())])
            .env("HOME", folder.path())
            .env("LONGHAUL_LOG_FORMAT", form)
            .env("LONGHAUL_LOG", "debug")
            .env_remove("OPENAI_API_KEY")
            .env_remove("OPENAI_BASE_URL")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut told = BufReader::new(child.stderr.take().expect("piped"));
        let url = listening(&mut told);
        assert!(url.starts_with("http://127.0.0.1:"), "{url}");
        let id = child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().expect("sent").success());
        let mut rest = String::new();
        told.read_to_string(&mut rest).expect("text");
        assert!(child.wait().expect("it ends").success(), "{command}: {rest}");
        assert!(!rest.lines().any(|line| line.starts_with("listening on")), "{command}: {rest}");
        let mut data = String::new();
        child.stdout.take().expect("piped").read_to_string(&mut data).expect("text");
        assert_eq!(data, "", "{command}: stdout is for data");
    }
}

#[test]
fn a_task_is_submitted_followed_and_waited_for() {
    let up = Up::start();
    let told = up.good(&["submit", "greet", r#"{"name": "Ann"}"#, "--wait"]);
    assert!(told.contains("hello Ann"), "{told}");
    let lines = up.good(&["submit", "greet", r#"{"name": "Bob"}"#, "--follow"]);
    assert!(
        lines
            .lines()
            .next()
            .is_some_and(|line| line.ends_with("task.submitted") || line.contains(" task.submitted ")),
        "{lines}"
    );
    assert!(lines.lines().last().is_some_and(|line| line.contains(" task.completed")), "{lines}");
    let output = up.run(&["submit", "fail", "{}", "--wait"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let table = up.good(&["ps"]);
    assert_eq!(table.lines().count(), 4, "{table}");
    assert_eq!(up.json(&["ps", "--state", "failed"])["tasks"].as_array().map(Vec::len), Some(1));
    assert_eq!(up.run(&["submit", "nobody", "{}"]).status.code(), Some(2), "no such handler");
    assert_eq!(up.run(&["show", "0198f0c2-0000-7000-8000-000000000000"]).status.code(), Some(2));
}

#[test]
fn the_same_key_is_the_same_task() {
    let up = Up::start();
    let one = up.good(&["submit", "greet", r#"{"name": "x"}"#, "--key", "k"]);
    assert_eq!(up.good(&["submit", "greet", r#"{"name": "x"}"#, "--key", "k"]), one);
    assert_eq!(up.run(&["submit", "greet", r#"{"name": "y"}"#, "--key", "k"]).status.code(), Some(2));
}

#[test]
fn a_person_finds_what_waits_for_them_and_decides() {
    let up = Up::start();
    let id = up.submit("gate", "{}");
    up.until(&id, "waiting");
    let why = up.good(&["why", &id]);
    assert!(why.contains("approv"), "{why}");
    assert_eq!(up.run(&["wait", &id, "--timeout", "10ms"]).status.code(), Some(5));
    assert_eq!(up.json(&["approvals"])["approvals"][0]["task_id"], json!(id));
    up.good(&["approve", &id, "--reason", "it is time"]);
    assert!(up.good(&["wait", &id]).contains("open"));
    let steps = up.json(&["steps", &id]);
    let done = |step: &Value| step["state"] == "completed";
    assert!(steps["steps"].as_array().is_some_and(|steps| steps.len() >= 2 && steps.iter().any(done)), "{steps}");
    let id = up.submit("gate", "{}");
    up.until(&id, "waiting");
    up.good(&["cancel", &id, "--reason", "changed my mind"]);
    assert_eq!(up.run(&["wait", &id]).status.code(), Some(1));
    up.good(&["resume", &id]);
    up.until(&id, "waiting");
    up.good(&["deny", &id]);
    assert_eq!(up.run(&["wait", &id]).status.code(), Some(1));
}

#[test]
fn watching_goes_on_over_a_server_that_is_killed_and_misses_nothing() {
    let mut up = Up::start();
    let id = up.submit("gate", "{}");
    up.until(&id, "waiting");
    let mut watch = up.longhaul(&["watch", &id, "--json"]).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut seen = BufReader::new(watch.stdout.take().expect("piped"));
    let mut first = String::new();
    seen.read_line(&mut first).expect("an event");
    let address = up.url.trim_start_matches("http://").to_owned();
    up.kill();
    up.restart(&address);
    up.good(&["approve", &id]);
    let mut rest = String::new();
    seen.read_to_string(&mut rest).expect("text");
    assert_eq!(watch.wait().expect("it ends").code(), Some(0));
    let numbers: Vec<u64> = format!("{first}{rest}")
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON")["seq"].as_u64().expect("a number"))
        .collect();
    assert!(numbers.iter().copied().eq(1..=numbers.len() as u64), "{numbers:?}");
    let stored = up.good(&["events", &id, "--json"]);
    assert_eq!(stored, format!("{first}{rest}"));
}

#[test]
fn queues_schedules_workers_and_exports_are_reached() {
    let up = Up::start();
    up.good(&["queues", "pause", "default"]);
    assert_eq!(up.json(&["queues"])["queues"][0]["paused"], true);
    let id = up.submit("greet", r#"{"name": "x"}"#);
    assert!(up.good(&["why", &id]).contains("paused"));
    up.good(&["queues", "resume", "default"]);
    up.good(&["wait", &id]);
    assert!(up.good(&["workers"]).contains("greet"));
    up.good(&[
        "schedules",
        "set",
        "nightly",
        "--cron",
        "30 2 * * *",
        "--handler",
        "greet",
        "--input",
        r#"{"name": "x"}"#,
    ]);
    assert!(up.good(&["schedules", "list"]).contains("30 2 * * * UTC"));
    up.good(&["schedules", "pause", "nightly"]);
    assert!(up.good(&["schedules", "show", "nightly"]).contains("paused"));
    up.good(&["schedules", "delete", "nightly"]);
    let export: Value = serde_json::from_str(&up.good(&["export", &id])).expect("JSON");
    assert_eq!(export["task"]["id"], json!(id));
    up.good(&["delete", &id]);
    assert_eq!(up.run(&["show", &id]).status.code(), Some(2));
}

#[test]
fn the_first_token_closes_a_server_that_runs_and_losing_the_last_one_does_not_open_it() {
    let mut up = Up::start();
    up.good(&["ps"]);
    let store = store(up.folder.path());
    let made = up.good(&["token", "create", "me", "--role", "admin", "--store", &store, "--json"]);
    let made: Value = serde_json::from_str(&made).expect("JSON");
    let begun = std::time::Instant::now();
    while up.run(&["ps"]).status.code() != Some(4) {
        assert!(begun.elapsed().as_secs() < 60, "it is still open");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let with_token = |up: &Up| {
        let secret = made["token"].as_str().expect("a secret");
        up.longhaul(&["ps"]).env("LONGHAUL_TOKEN", secret).output().expect("it starts").status.code()
    };
    assert_eq!(with_token(&up), Some(0));
    up.good(&["token", "revoke", made["id"].as_str().expect("an id"), "--store", &store]);
    up.restart("127.0.0.1:0");
    assert_eq!((up.run(&["ps"]).status.code(), with_token(&up)), (Some(4), Some(4)));
}
