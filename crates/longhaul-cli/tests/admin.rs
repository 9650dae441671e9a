//! Commands that use the store itself, and those about the program: `token`, `webhooks`, `backup`, `doctor`,
//! `config`, `completions`, `man`.

mod standin;

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use standin::{Reply, StandIn, longhaul, stderr, stdout};

/// A working directory, a data folder and a configuration folder of its own.
struct Bed {
    folder: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn longhaul(&self, args: &[&str]) -> Command {
        let mut command = longhaul(args);
        command.current_dir(self.path()).env("HOME", self.path());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.longhaul(args).output().expect("it starts")
    }

    fn json(&self, args: &[&str]) -> Value {
        let output = self.run(args);
        serde_json::from_str(&stdout(&output)).unwrap_or_else(|error| panic!("{error}: {}", stderr(&output)))
    }

    fn doctor(&self) -> (Option<i32>, Value) {
        let output = self.run(&["doctor", "--json"]);
        (output.status.code(), serde_json::from_str(&stdout(&output)).expect("JSON"))
    }
}

fn check<'v>(found: &'v Value, name: &str) -> &'v Value {
    let checks = found["checks"].as_array().expect("a list");
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no check {name} in {found}"))
}

/// What is wrong, except with the disk of the machine that runs the tests.
fn faults(found: &Value) -> Vec<&str> {
    let checks = found["checks"].as_array().expect("a list").iter();
    let names = checks.filter(|check| check["status"] == "fault").filter_map(|check| check["name"].as_str());
    names.filter(|&name| name != "disk").collect()
}

#[tokio::test]
async fn a_token_is_shown_once_works_and_is_revoked() {
    let bed = Bed::new();
    let output = bed.run(&["token", "create", "ci", "--role", "operator", "--expires", "90d"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let secret = stdout(&output).trim_end().to_owned();
    assert!(secret.starts_with("lh_") && !secret.contains(char::is_whitespace), "the secret alone: {secret}");
    let url = format!("sqlite:{}", bed.path().join(".local/share/longhaul/longhaul.db").display());
    let client = longhaul::Client::open(&url).await.expect("the store of the command");
    let info = client.authenticate(&secret).await.expect("asked").expect("it is good");
    assert_eq!((info.name.as_str(), info.role), ("ci", longhaul::Role::Operator));
    let listed = bed.run(&["token", "list", "--json"]);
    assert!(!stdout(&listed).contains(&secret), "never again");
    let tokens: Value = serde_json::from_str(&stdout(&listed)).expect("JSON");
    let id = tokens["tokens"][0]["id"].as_str().expect("an id").to_owned();
    assert!(stdout(&bed.run(&["token", "list"])).contains("operator"));
    assert_eq!(bed.run(&["token", "revoke", &id]).status.code(), Some(0));
    assert!(client.authenticate(&secret).await.expect("asked").is_none(), "it is not good any more");
    assert!(stdout(&bed.run(&["token", "list"])).contains("revoked"));
    assert_eq!(bed.run(&["token", "revoke", "nonsense"]).status.code(), Some(2));
    assert_eq!(bed.run(&["token", "revoke", "0198f0c2-0000-7000-8000-000000000000"]).status.code(), Some(2));
}

#[test]
fn a_token_of_another_tenant_is_revoked_too() {
    let bed = Bed::new();
    let made = bed.json(&["token", "create", "x", "--tenant", "acme", "--json"]);
    assert!(made["token"].as_str().is_some_and(|secret| secret.starts_with("lh_")));
    let output = bed.run(&["token", "revoke", made["id"].as_str().expect("an id")]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let tokens = bed.json(&["token", "list", "--tenant", "acme", "--json"]);
    assert!(tokens["tokens"][0]["revoked_at"].is_string());
}

#[test]
fn endpoints_are_added_listed_and_removed() {
    let bed = Bed::new();
    let add =
        ["webhooks", "add", "ops", "https://ops.example.com/hook", "--event", "task.failed", "--event", "step.*"];
    assert_eq!(bed.run(&add).status.code(), Some(0));
    let listed = bed.json(&["webhooks", "list", "--json"]);
    assert_eq!(listed["endpoints"][0]["url"], "https://ops.example.com/hook");
    assert_eq!(listed["endpoints"][0]["events"], serde_json::json!(["task.failed", "step.*"]));
    assert!(stdout(&bed.run(&["webhooks", "list"])).contains("task.failed,step.*"));
    assert_eq!(bed.json(&["webhooks", "list", "--tenant", "acme", "--json"])["endpoints"], serde_json::json!([]));
    assert_eq!(bed.run(&["webhooks", "remove", "ops"]).status.code(), Some(0));
    assert_eq!(bed.run(&["webhooks", "remove", "ops"]).status.code(), Some(2), "there is none any more");
    assert_eq!(bed.run(&["webhooks", "add", "bad", "ftp://x"]).status.code(), Some(2));
}

/// A subscriber of this name that nobody runs, and a task that it has not heard of.
async fn left_behind(client: &longhaul::Client, name: &str, max_behind: std::time::Duration) {
    client.announce(&["h"]).await.expect("announced");
    let subscriber = client.subscriber(name).all_tenants().max_behind(max_behind);
    let subscriber = subscriber.start_batches(async |_| Ok(())).await.expect("it starts");
    subscriber.stop().await;
    client.submit(longhaul::NewTask::new("h", &1)).await.expect("accepted");
}

#[tokio::test]
async fn a_subscriber_that_nobody_runs_is_seen_told_and_removed() {
    let bed = Bed::new();
    let url = format!("sqlite:{}", bed.path().join("a.db").display());
    let client = longhaul::Client::open(&url).await.expect("opens");
    left_behind(&client, "bus", std::time::Duration::from_secs(86_400)).await;

    let listed = bed.json(&["subscribers", "--json", "--store", &url]);
    let bus = &listed["subscribers"][0];
    assert_eq!((&bus["name"], &bus["held_by"]), (&json!("bus"), &Value::Null), "{listed}");
    assert!(bus["rows_behind"].as_u64().is_some_and(|rows| rows >= 1), "{listed}");
    let shown = stdout(&bed.run(&["subscribers", "--store", &url]));
    assert!(shown.contains("bus") && shown.contains("nobody"), "{shown}");

    let output = bed.run(&["doctor", "--json", "--store", &url]);
    let found: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let told = check(&found, "subscribers");
    assert_eq!(told["status"], "warning", "{told}");
    assert!(told["message"].as_str().is_some_and(|text| text.contains("no process runs it")), "{told}");
    assert!(
        told["remedy"].as_str().is_some_and(|text| text.contains("longhaul subscribers remove bus")),
        "{told}"
    );

    assert_eq!(
        bed.run(&["subscribers", "remove", "bsu", "--store", &url]).status.code(),
        Some(2),
        "there is none"
    );
    let output = bed.run(&["subscribers", "remove", "bus", "--store", &url]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(bed.json(&["subscribers", "--json", "--store", &url])["subscribers"], json!([]));
}

#[tokio::test]
async fn a_subscriber_that_refuses_submits_is_a_fault_and_one_that_runs_is_not_removed() {
    let bed = Bed::new();
    let url = format!("sqlite:{}", bed.path().join("a.db").display());
    let client = longhaul::Client::open(&url).await.expect("opens");
    left_behind(&client, "late", std::time::Duration::from_secs(1)).await;
    tokio::time::sleep(std::time::Duration::from_millis(1_100)).await;
    let output = bed.run(&["doctor", "--json", "--store", &url]);
    let found: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let told = check(&found, "subscribers");
    assert_eq!(told["status"], "fault", "{told}");
    assert!(told["message"].as_str().is_some_and(|text| text.contains("submits are refused")), "{told}");

    let running =
        client.subscriber("late").all_tenants().start_batches(async |_| Ok(())).await.expect("it starts");
    let held = async || client.subscribers().await.expect("asked").iter().any(|known| known.held_by.is_some());
    while !held().await {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let output = bed.run(&["subscribers", "remove", "late", "--store", &url]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("is run by"), "{}", stderr(&output));
    running.stop().await;
    assert_eq!(bed.run(&["subscribers", "remove", "late", "--store", &url]).status.code(), Some(0));
}

#[test]
fn the_webhook_secret_is_the_configured_one_or_the_stores() {
    let bed = Bed::new();
    let first = stdout(&bed.run(&["webhooks", "secret"]));
    assert!(first.starts_with("whsec_"), "{first}");
    assert_eq!(stdout(&bed.run(&["webhooks", "secret"])), first, "the same each time");
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let output =
        bed.longhaul(&["webhooks", "secret"]).env("LONGHAUL_WEBHOOK_SECRET", secret).output().expect("it starts");
    assert_eq!(stdout(&output), format!("{secret}\n"));
}

#[tokio::test]
async fn a_backup_is_a_store_of_its_own_and_never_overwrites() {
    let bed = Bed::new();
    assert_eq!(bed.run(&["backup", "copy.db"]).status.code(), Some(2), "there is nothing to copy");
    assert_eq!(std::fs::read_dir(bed.path()).expect("a folder").count(), 0, "and no store was made");
    let url = format!("sqlite:{}", bed.path().join("a.db").display());
    let client = longhaul::Client::open(&url).await.expect("opens");
    client.announce(&["h"]).await.expect("announced");
    let id = client.submit(longhaul::NewTask::new("h", &1)).await.expect("accepted").id;
    let output = bed.run(&["backup", "copy.db", "--store", &url]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let copy = format!("sqlite:{}", bed.path().join("copy.db").display());
    let copy = longhaul::Client::open(&copy).await.expect("the copy is a store");
    assert_eq!(copy.task(id).await.expect("it has the task").id, id);
    let output = bed.run(&["backup", "copy.db", "--store", &url]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

#[test]
fn a_store_in_memory_is_refused_where_it_makes_no_sense() {
    let output = Bed::new().run(&["token", "create", "x", "--store", "memory:"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn what_only_looks_or_removes_makes_no_store_at_a_wrong_path() {
    let bed = Bed::new();
    let id = "01890000-0000-7000-8000-000000000000";
    for command in [
        &["token", "list"][..],
        &["token", "revoke", id],
        &["webhooks", "list"],
        &["webhooks", "remove", "ours"],
        &["subscribers"],
        &["subscribers", "remove", "x"],
        &["backup", "copy.db"],
    ] {
        let output = bed.run(&[command, &["--store", "sqlite:wrong.db"]].concat());
        assert_eq!(output.status.code(), Some(2), "{command:?}: {}", stderr(&output));
        assert!(stderr(&output).contains("there is no store at wrong.db"), "{command:?}: {}", stderr(&output));
    }
    assert_eq!(std::fs::read_dir(bed.path()).expect("a folder").count(), 0, "no store was made");
}

#[test]
fn doctor_on_a_fresh_machine_finds_nothing_wrong_and_makes_nothing() {
    let bed = Bed::new();
    let server = StandIn::start(|_, _| Reply::json(200, "{}"));
    let found = bed.json(&["doctor", "--json", "--server", &server.url]);
    assert_eq!(faults(&found), [""; 0], "{found}");
    let output = bed.run(&["doctor", "--server", &server.url]);
    assert!(stdout(&output).contains("worker.slots"), "{}", stdout(&output));
    assert_eq!(std::fs::read_dir(bed.path()).expect("a folder").count(), 0, "no store was made");
}

/// Root may write everywhere; where the tests are run by root, doctor is run by nobody.
#[test]
fn doctor_says_when_the_store_cannot_be_written_to() {
    use std::os::unix::fs::PermissionsExt;
    let bed = Bed::new();
    std::fs::set_permissions(bed.path(), PermissionsExt::from_mode(0o755)).expect("its own folder");
    let folder = bed.path().join("closed");
    std::fs::create_dir(&folder).expect("made");
    std::fs::write(folder.join("old.db"), "").expect("made");
    std::fs::set_permissions(folder.join("old.db"), PermissionsExt::from_mode(0o444)).expect("its own file");
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o555)).expect("its own folder");
    // A copy, because the folder of the build may be closed to others.
    let program = bed.path().join("longhaul");
    std::fs::copy(env!("CARGO_BIN_EXE_longhaul"), &program).expect("copied");
    for (store, problem) in [("new.db", "closed cannot be written to"), ("old.db", "old.db cannot be written to")]
    {
        let store = format!("sqlite:{}", folder.join(store).display());
        let mut command = match rustix::process::geteuid().is_root() {
            true => {
                let mut command = std::process::Command::new("runuser");
                command.args(["-u", "nobody", "--"]).arg(&program);
                command
            }
            false => std::process::Command::new(&program),
        };
        let output = command
            .args(["doctor", "--json", "--store", &store])
            .current_dir(bed.path())
            .env("HOME", bed.path())
            .output()
            .expect("it starts");
        let found: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
        let told = found["checks"].as_array().expect("a list").iter().any(|check| {
            check["status"] == "fault" && check["message"].as_str().is_some_and(|told| told.ends_with(problem))
        });
        assert!(told && output.status.code() == Some(1), "{store}: {found}");
    }
}

#[tokio::test]
async fn doctor_counts_on_no_worker_that_was_not_heard_of_for_long() {
    let bed = Bed::new();
    let path = bed.path().join("a.db");
    let url = format!("sqlite:{}", path.display());
    let client = longhaul::Client::open(&url).await.expect("opens");
    let handler = |_: longhaul::Run, (): ()| async { Ok::<_, longhaul::TaskError>(()) };
    let worker = longhaul::Worker::new(&client).queues(["other"]).handler("h", handler);
    let worker = worker.start().await.expect("it starts");
    client.submit(longhaul::NewTask::new("h", &())).await.expect("accepted");
    let workers = || {
        let output = bed.run(&["doctor", "--json", "--store", &url]);
        let found: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
        let told = check(&found, "workers");
        (told["status"].clone(), told["message"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(workers(), (json!("ok"), "1 worker running".to_owned()));
    // As kill -9 does; and half a minute later.
    worker.abort();
    let store = rusqlite::Connection::open(&path).expect("opens");
    store.execute("UPDATE workers SET seen_at = seen_at - 30000000", []).expect("written");
    let told = "none is running, with 1 task pending; 1 worker not heard of any more";
    assert_eq!(workers(), (json!("fault"), told.to_owned()));
}

#[test]
fn doctor_says_where_values_come_from_and_what_is_wrong() {
    let bed = Bed::new();
    let manifests = bed.path().join("manifests");
    std::fs::create_dir(&manifests).expect("made");
    std::fs::write(manifests.join("a.toml"), "[saga]\nnam = \"x\"\n").expect("written");
    let file = "[server]\nlisten = \"0.0.0.0:7171\"\n[worker]\nmanifests = \"manifests\"\n";
    std::fs::write(bed.path().join("longhaul.toml"), file).expect("written");
    let server = StandIn::start(|request, _| match request.target.as_str() {
        "/openapi.json" => Reply::json(200, r#"{"info": {"version": "99.0.0"}}"#),
        "/v1/stats" => Reply::problem(401, "unauthorized", "a token is needed"),
        _ => Reply::json(200, "{}"),
    });
    let output = bed
        .longhaul(&["doctor", "--json", "--server", &server.url])
        .env("LONGHAUL_WORKERS", "3")
        .env("LONGHAUL_STROE", "memory:")
        .output()
        .expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let found: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let row = |key: &str| {
        let rows = found["configuration"].as_array().expect("a list");
        rows.iter().find(|row| row["key"] == key).expect("every key is there").clone()
    };
    assert_eq!(row("server.listen")["origin"]["from"], "file");
    assert_eq!(row("server.listen")["origin"]["line"], 2);
    assert_eq!(row("worker.slots")["origin"]["name"], "LONGHAUL_WORKERS");
    assert_eq!(row("worker.lease")["origin"]["from"], "default");
    assert_eq!(check(&found, "access")["status"], "fault");
    assert_eq!(check(&found, "manifests")["status"], "fault");
    assert_eq!(check(&found, "token")["status"], "fault");
    assert_eq!(check(&found, "server")["status"], "warning", "another version");
    assert_eq!(check(&found, "environment")["remedy"], "did you mean LONGHAUL_STORE?");
    assert_eq!(faults(&found), ["access", "manifests", "token"]);
}

#[test]
fn doctor_says_whether_artifacts_can_be_kept() {
    let bed = Bed::new();
    std::fs::create_dir(bed.path().join("large")).expect("made");
    let found = |url: &str| {
        let output =
            bed.longhaul(&["doctor", "--json"]).env("LONGHAUL_ARTIFACTS", url).output().expect("it starts");
        let found: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
        check(&found, "artifacts").clone()
    };
    assert_eq!(
        (&found("large")["status"], &found("large")["message"]),
        (&json!("ok"), &json!("large can be written to and read"))
    );
    assert_eq!(found("elsewhere")["message"], "elsewhere is made at the first start");
    std::fs::write(bed.path().join("file"), "").expect("written");
    for (url, status) in [("memory:", "warning"), ("file", "fault"), ("gs://bucket", "fault")] {
        assert_eq!(found(url)["status"], status, "{url}");
        assert!(found(url)["remedy"].is_string());
    }
}

#[test]
fn doctor_tells_a_wrong_configuration_with_its_line() {
    let bed = Bed::new();
    std::fs::write(bed.path().join("longhaul.toml"), "[worker]\nslot = 3\n").expect("written");
    let (code, found) = bed.doctor();
    assert_eq!(code, Some(1));
    assert_eq!(check(&found, "configuration")["message"], "longhaul.toml:2: unknown key 'slot' in [worker]");
    assert_eq!(check(&found, "configuration")["remedy"], "did you mean 'slots'?");
}

#[tokio::test]
async fn doctor_sees_tasks_that_nobody_will_run() {
    let bed = Bed::new();
    let url = format!("sqlite:{}", bed.path().join("a.db").display());
    let client = longhaul::Client::open(&url).await.expect("opens");
    client.announce(&["h"]).await.expect("announced");
    client.submit(longhaul::NewTask::new("h", &1)).await.expect("accepted");
    let output = bed.run(&["doctor", "--json", "--store", &url]);
    let found: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(
        (output.status.code(), check(&found, "workers")["status"].as_str()),
        (Some(1), Some("fault")),
        "{found}"
    );
    let store =
        found["checks"].as_array().expect("a list").iter().rfind(|check| check["name"] == "store").expect("there");
    assert!(store["message"].as_str().expect("text").starts_with("SQLite 3."), "{store}");
    let output = bed.run(&["doctor", "--json", "--store", "postgres://nobody@127.0.0.1:1/x"]);
    let found: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!((output.status.code(), check(&found, "store")["status"].as_str()), (Some(1), Some("fault")));
}

#[test]
fn the_configuration_that_is_printed_can_be_used_as_it_is() {
    let bed = Bed::new();
    let printed = stdout(&bed.run(&["config"]));
    std::fs::write(bed.path().join("longhaul.toml"), printed).expect("written");
    let (_, found) = bed.doctor();
    assert_eq!(check(&found, "configuration")["status"], "ok");
}

#[test]
fn completions_and_man_pages_know_the_commands() {
    let bed = Bed::new();
    for shell in ["bash", "zsh", "fish"] {
        let output = bed.run(&["completions", shell]);
        assert_eq!(output.status.code(), Some(0), "{shell}");
        assert!(stdout(&output).contains("approvals"), "{shell}");
    }
    assert!(
        stdout(&bed.run(&["man"])).contains("EXIT CODES") || stdout(&bed.run(&["man"])).contains("Exit codes")
    );
    assert_eq!(bed.run(&["man", "pages"]).status.code(), Some(0));
    for page in ["longhaul.1", "longhaul-submit.1", "longhaul-token-create.1"] {
        assert!(bed.path().join("pages").join(page).exists(), "{page}");
    }
}

#[test]
fn help_lists_the_exit_codes() {
    let help = stdout(&longhaul(&["--help"]).output().expect("it starts"));
    for code in ["  1  ", "  2  ", "  3  ", "  4  ", "  5  ", "  130  "] {
        assert!(help.contains(code), "{code} in {help}");
    }
}
