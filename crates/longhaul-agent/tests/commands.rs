//! Commands: what they are given, how their end is told, and that nothing of them is left.

mod common;

use std::path::Path;
use std::pin::pin;

use common::{Folder, PATIENCE, TRACEPARENT, alive, arguments, call, until};
use futures_util::poll;
use longhaul_agent::{Artifacts, Output};
use serde_json::{Value, json};

#[tokio::test]
async fn the_result_is_what_the_command_prints() {
    let folder = Folder::new();
    for (prints, result) in [
        (r#"echo '{"id": 7}'"#, json!({"id": 7})),
        ("echo created", json!("created")),
        ("printf 'two\\nlines\\n'", json!("two\nlines")),
        ("true", Value::Null),
        ("echo 42; echo warning >&2", json!(42)),
    ] {
        folder.script("run", prints);
        assert_eq!(folder.tool(r#"command = ["./run"]"#).run(&call(Value::Null)).await.expect("exit 0"), result);
    }
}

#[tokio::test]
async fn one_element_is_one_argument_whatever_its_value() {
    let folder = Folder::new();
    folder.script("run", r#"printf '%s\n' "$#" "$@""#);
    let tool = folder.tool(r#"command = ["./run", "{{input.name}}", "--tag={{input.tag}}", "a b", "{{{{x}}"]"#);
    let hostile = "x; touch /tmp/pwned $(id) `id` \"' * \\ -rf";
    let result = tool.run(&call(json!({"name": hostile, "tag": [1, null]}))).await.expect("exit 0");
    assert_eq!(result, json!(format!("4\n{hostile}\n--tag=[1,null]\na b\n{{{{x}}}}")));
}

#[tokio::test]
async fn the_input_comes_as_json_on_stdin() {
    let folder = Folder::new();
    folder.script("run", "cat");
    let result = folder.tool(r#"command = ["./run"]"#).run(&call(json!({"app": "shop"}))).await.expect("exit 0");
    assert_eq!(result, json!({"input": {"app": "shop"}, "steps": {}}));
}

#[tokio::test]
async fn a_command_that_does_not_read_its_input_is_fine() {
    let folder = Folder::new();
    folder.script("run", "exec <&-; echo done");
    let large = "x".repeat(512 * 1024);
    let result = folder.tool(r#"command = ["./run"]"#).run(&call(json!(large))).await.expect("exit 0");
    assert_eq!(result, json!("done"));
}

#[tokio::test]
async fn the_environment_is_clean_and_names_the_call() {
    let folder = Folder::new();
    folder.script(
        "run",
        "env | grep -v -e ^PWD= -e ^SHLVL= -e ^_= -e ^OLDPWD= | cut -d= -f1 | sort | tr '\\n' ' '; pwd",
    );
    // Cargo sets this one for tests.
    assert!(std::env::var_os("CARGO_PKG_NAME").is_some() && std::env::var_os("CARGO_PKG_VERSION").is_some());
    let tool = folder.tool("command = [\"./run\"]\nenv = [\"CARGO_PKG_NAME\", \"NOT_THERE\"]");
    let result = tool.run(&call(Value::Null)).await.expect("exit 0");
    let text = result.as_str().expect("text");
    let (names, place) = text.split_once('/').expect("a path");
    let mut expected = vec![
        "CARGO_PKG_NAME",
        "LONGHAUL_FENCE",
        "LONGHAUL_IDEMPOTENCY_KEY",
        "LONGHAUL_STEP",
        "LONGHAUL_TASK_ID",
        "PATH",
        "TRACEPARENT",
    ];
    expected.extend(["HOME", "LANG"].into_iter().filter(|name| std::env::var_os(name).is_some()));
    expected.sort_unstable();
    assert_eq!(names.split_whitespace().collect::<Vec<_>>(), expected);
    assert_eq!(std::path::Path::new(&format!("/{place}")), folder.path().canonicalize().expect("there"));
}

#[tokio::test]
async fn the_call_is_named_by_task_step_key_and_fence() {
    let folder = Folder::new();
    folder.script(
        "run",
        r#"echo "$LONGHAUL_TASK_ID $LONGHAUL_STEP $LONGHAUL_IDEMPOTENCY_KEY $LONGHAUL_FENCE $TRACEPARENT""#,
    );
    let result = folder.tool(r#"command = ["./run"]"#).run(&call(Value::Null)).await.expect("exit 0");
    let id = "0198f000-0000-7000-8000-000000000001";
    assert_eq!(result, json!(format!("{id} one {id}/one 7 {TRACEPARENT}")));
}

#[tokio::test]
async fn another_exit_code_is_a_known_failure_with_what_was_said() {
    let folder = Folder::new();
    folder.script("run", "echo some output; echo 'no such zone' >&2; exit 3");
    let error = folder.tool(r#"command = ["./run"]"#).run(&call(Value::Null)).await.expect_err("exit 3");
    assert_eq!(error.message, "./run ended with exit code 3: no such zone");
    assert_eq!((error.code.as_str(), error.retryable, error.is_in_doubt()), ("exit_status", true, false));
    assert_eq!(error.details["exit_code"], 3);
}

#[tokio::test]
async fn only_the_end_of_a_long_complaint_is_kept() {
    let folder = Folder::new();
    folder.script("run", "seq 1 100000 >&2; exit 1");
    let error = folder.tool(r#"command = ["./run"]"#).run(&call(Value::Null)).await.expect_err("exit 1");
    assert!(error.message.len() < 5_000, "{} bytes", error.message.len());
    assert!(error.message.starts_with("./run ended with exit code 1: … 9"), "{}", error.message);
    assert!(error.message.ends_with("\n99999\n100000"));
}

#[tokio::test]
async fn a_command_killed_by_a_signal_leaves_its_outcome_in_doubt() {
    let folder = Folder::new();
    folder.script("run", "kill -9 $$");
    let error = folder.tool(r#"command = ["./run"]"#).run(&call(Value::Null)).await.expect_err("killed");
    assert_eq!(error.message, "./run was killed by signal 9");
    assert_eq!((error.code.as_str(), error.is_in_doubt()), ("killed", true));
    assert_eq!(error.details["signal"], 9);
}

#[tokio::test]
async fn a_command_that_prints_too_much_is_stopped() {
    let folder = Folder::new();
    folder.script("run", "echo $$ > pid; yes");
    let run = folder.tool(r#"command = ["./run"]"#);
    let error =
        tokio::time::timeout(PATIENCE, run.run(&call(Value::Null))).await.expect("in time").expect_err("too much");
    assert_eq!((error.code.as_str(), error.retryable, error.is_in_doubt()), ("output_too_large", false, true));
    assert!(error.message.contains("1048576 bytes"), "{}", error.message);
    let pid = std::fs::read_to_string(folder.file("pid")).expect("it started");
    assert!(!alive(&pid), "it goes on");
}

#[tokio::test]
async fn exactly_the_limit_is_not_too_much() {
    let folder = Folder::new();
    folder.script("run", "head -c 1048576 /dev/zero | tr '\\0' x");
    let result = folder.tool(r#"command = ["./run"]"#).run(&call(Value::Null)).await.expect("exit 0");
    assert_eq!(result.as_str().map(str::len), Some(1_048_576));
}

#[tokio::test]
async fn a_program_that_is_gone_is_said_to_be_with_what_to_do() {
    let folder = Folder::new();
    folder.script("run", "true");
    let tool = folder.tool(r#"command = ["./run"]"#);
    std::fs::remove_file(folder.file("run")).expect("removed");
    let error = tool.run(&call(Value::Null)).await.expect_err("gone");
    assert_eq!((error.code.as_str(), error.retryable, error.is_in_doubt()), ("not_startable", false, false));
    assert_eq!(
        error.message,
        "cannot start ./run: No such file or directory (os error 2); check that the file, the program its first \
         line names (#!) and the manifest's folder are there"
    );
}

#[tokio::test]
async fn a_file_that_is_no_program_is_said_to_be() {
    let folder = Folder::new();
    folder.script("run", "true");
    let tool = folder.tool(r#"command = ["./run"]"#);
    folder.write("run", "just text");
    let error = tool.run(&call(Value::Null)).await.expect_err("not a program");
    assert_eq!((error.code.as_str(), error.retryable), ("not_startable", false));
    assert!(error.message.contains("#!/bin/sh"), "{}", error.message);
}

#[tokio::test]
async fn an_argument_that_no_program_can_have_is_refused() {
    let folder = Folder::new();
    folder.script("run", "true");
    let tool = folder.tool(r#"command = ["./run", "{{input}}"]"#);
    let error = tool.run(&call(json!("a\u{0}b"))).await.expect_err("NUL");
    assert_eq!((error.code.as_str(), error.retryable), ("not_startable", false));
    assert!(error.message.contains("NUL"), "{}", error.message);
}

#[tokio::test]
async fn a_dropped_call_ends_everything_it_started() {
    let folder = Folder::new();
    folder.script("run", "sleep 60 & echo $! > child; echo $$ > parent; wait");
    let tool = folder.tool(r#"command = ["./run"]"#);
    let call = call(Value::Null);
    let run = tool.run(&call);
    let started = until("the command runs", || folder.file("parent").metadata().is_ok_and(|meta| meta.len() > 0));
    tokio::select! {
        ended = run => panic!("it ended: {ended:?}"),
        () = started => {}
    }
    for file in ["parent", "child"] {
        let pid = std::fs::read_to_string(folder.file(file)).expect("written");
        until("the process ends", || !alive(&pid)).await;
    }
}

#[tokio::test]
async fn what_a_command_leaves_in_its_group_ends_with_it() {
    let folder = Folder::new();
    folder.script("run", "sleep 60 & echo $!");
    let tool = folder.tool(r#"command = ["./run"]"#);
    let result =
        tokio::time::timeout(PATIENCE, tool.run(&call(Value::Null))).await.expect("in time").expect("exit 0");
    until("the sleeper ends", || !alive(&result.to_string())).await;
}

#[tokio::test]
async fn a_program_that_left_the_group_may_live_on_and_holds_nothing_up() {
    let folder = Folder::new();
    folder.script(
        "run",
        "setsid sh -c 'echo $$ > pid; exec sleep 60' & until test -s pid; do :; done; echo started",
    );
    let tool = folder.tool(r#"command = ["./run"]"#);
    let result =
        tokio::time::timeout(PATIENCE, tool.run(&call(Value::Null))).await.expect("in time").expect("exit 0");
    assert_eq!(result, json!("started"));
    let pid = std::fs::read_to_string(folder.file("pid")).expect("written");
    assert!(alive(&pid));
    let pid = rustix::process::Pid::from_raw(pid.trim().parse().expect("a number")).expect("not 0");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("ours");
}

#[tokio::test]
async fn many_commands_at_once_each_get_their_own_answer() {
    let folder = Folder::new();
    folder.script("run", "cat >/dev/null; echo \"$1\"");
    let tool = folder.tool(r#"command = ["./run", "n{{input}}"]"#);
    let runs = (0..50).map(|n| {
        let tool = tool.clone();
        tokio::spawn(async move { tool.run(&call(json!(n))).await })
    });
    for (n, run) in runs.collect::<Vec<_>>().into_iter().enumerate() {
        assert_eq!(run.await.expect("no panic").expect("exit 0"), json!(format!("n{n}")));
    }
}

#[tokio::test]
async fn an_output_up_to_the_limit_stays_a_value() {
    let folder = Folder::new();
    let artifacts = Artifacts::open("memory:").expect("in memory");
    folder.script("run", "cat");
    let tool = folder.agent_tool("command = [\"./run\"]").action;
    let short = tool.run_long(&arguments(json!({"a": 1})), 7, &artifacts, "t").await.expect("exit 0");
    assert_eq!(short, Output::Value(json!({"a": 1})));
    let long = tool.run_long(&arguments(json!({"a": 12})), 7, &artifacts, "t").await.expect("exit 0");
    assert!(matches!(long, Output::Stored(stored) if stored.bytes == 8));
}

#[tokio::test]
async fn the_output_of_a_command_that_fails_is_not_a_result() {
    let folder = Folder::new();
    let artifacts = Artifacts::open("memory:").expect("in memory");
    folder.script("run", "head -c 100000 /dev/zero; echo broken >&2; exit 4");
    let tool = folder.agent_tool("command = [\"./run\"]").action;
    let error = tool.run_long(&arguments(json!({})), 16, &artifacts, "t").await.expect_err("exit 4");
    assert_eq!(
        (error.code.as_str(), error.message.as_str()),
        ("exit_status", "./run ended with exit code 4: broken")
    );
}

/// Whether commands can be confined here; a test that needs it says so and is skipped otherwise.
fn confined() -> bool {
    let flags =
        ["--ro-bind", "/", "/", "--unshare-pid", "--unshare-net", "--dev", "/dev", "--proc", "/proc", "true"];
    let works = std::process::Command::new("bwrap").args(flags).output().is_ok_and(|tried| tried.status.success());
    if !works {
        eprintln!("skipped: bubblewrap is not installed, or does not work here");
    }
    works
}

#[tokio::test]
async fn the_command_of_an_agent_can_change_only_its_folder_and_what_it_names() {
    if !confined() {
        return;
    }
    let (folder, other, named) = (Folder::new(), Folder::new(), Folder::new());
    let name = format!("longhaul-test-{}", std::process::id());
    let (place, allowed) = (other.path().display(), named.path().display());
    folder.script(
        "run",
        &format!(
            "for place in . '{place}' '{allowed}' /tmp; do (: > \"$place/{name}\") 2>&1 >/dev/null | wc -l; done"
        ),
    );
    let sandbox = format!("command = [\"./run\"]\nsandbox = {{ write = [\"{allowed}\"] }}");
    let failures = folder.agent_tool(&sandbox).action.run(&arguments(json!({}))).await.expect("exit 0");
    assert_eq!(failures, json!("0\n1\n0\n0"));
    assert!(folder.file(&name).exists() && named.file(&name).exists() && !other.file(&name).exists());
    assert!(!Path::new("/tmp").join(&name).exists(), "/tmp is its own");
    let open = "command = [\"./run\"]\nsandbox = false";
    folder.agent_tool(open).action.run(&arguments(json!({}))).await.expect("exit 0");
    std::fs::remove_file(Path::new("/tmp").join(&name)).expect("written there");
    assert!(other.file(&name).exists());
}

#[tokio::test]
async fn a_confined_command_sees_no_other_process_and_no_network_if_it_says_so() {
    if !confined() {
        return;
    }
    let folder = Folder::new();
    folder.script("run", r#"ls -d /proc/[0-9]* | wc -l; tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ' | tr '\n' ' '; env | cut -d= -f1 | sort | tr '\n' ' '"#);
    let tool = folder.agent_tool("command = [\"./run\"]\nsandbox = { network = false }").action;
    let said = tool.run(&arguments(json!({}))).await.expect("exit 0");
    let mut lines = said.as_str().expect("text").lines();
    let processes: u32 = lines.next().and_then(|line| line.trim().parse().ok()).expect("a number");
    assert!(processes < 10, "it sees {processes} processes");
    let rest = lines.next().expect("the rest");
    assert!(rest.starts_with("lo "), "{rest}");
    assert!(rest.contains("LONGHAUL_FENCE") && !rest.contains("CARGO_PKG_NAME"), "{rest}");
}

#[tokio::test]
async fn a_confined_command_fails_and_dies_like_any_other() {
    if !confined() {
        return;
    }
    let folder = Folder::new();
    folder.script("run", "echo 'no such zone' >&2; exit 3");
    let error =
        folder.agent_tool("command = [\"./run\"]").action.run(&arguments(json!({}))).await.expect_err("exit 3");
    assert_eq!(error.message, "./run ended with exit code 3: no such zone");
    folder.script("run", "kill -9 $$");
    let error =
        folder.agent_tool("command = [\"./run\"]").action.run(&arguments(json!({}))).await.expect_err("killed");
    assert_eq!((error.code.as_str(), error.is_in_doubt()), ("killed", true), "{error}");
}

#[tokio::test]
async fn a_dropped_call_ends_a_confined_command_and_what_left_its_group() {
    if !confined() {
        return;
    }
    let folder = Folder::new();
    // Only the marker in its arguments names it from outside: numbers of processes are others in there.
    let marker = format!("longhaul-{}", std::process::id());
    folder.script("run", &format!("setsid sh -c 'sleep 60; : {marker}' & touch started; wait"));
    let tool = folder.agent_tool("command = [\"./run\"]").action;
    let there = || {
        let entries = std::fs::read_dir("/proc").expect("there").flatten();
        let mut lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
        lines.any(|line| String::from_utf8_lossy(&line).contains(&marker))
    };
    let call = arguments(json!({}));
    tokio::select! {
        ended = tool.run(&call) => panic!("it ended: {ended:?}"),
        () = until("the command runs", || folder.file("started").exists() && there()) => {}
    }
    until("everything ends", || !there()).await;
}

/// The worker of the tests below: this test program again. It starts the saga's first command, then
/// loses its watchdog if it is told to, then starts the second.
#[tokio::test]
async fn worker_to_be_killed() {
    let Ok(place) = std::env::var("LONGHAUL_TEST_FOLDER") else { return };
    let loaded = longhaul_agent::load(Path::new(&place));
    let Some(longhaul_agent::Manifest::Saga(saga)) = loaded.manifests.first() else { panic!("no saga") };
    let call = call(Value::Null);
    let mut first = pin!(saga.steps[0].action.run(&call));
    assert!(poll!(&mut first).is_pending());
    if std::env::var_os("LONGHAUL_TEST_NO_WATCHDOG").is_some() {
        kill_watchdog();
    }
    let mut second = pin!(saga.steps[1].action.run(&call));
    assert!(poll!(&mut second).is_pending());
    std::fs::write(Path::new(&place).join("watched"), "").expect("written");
    let _ = tokio::join!(first, second);
}

/// The watchdog of this process, not one of another test's.
fn kill_watchdog() {
    let own = std::process::id().to_string();
    let is_watchdog = |pid: &String| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        line.contains("longhaul-watchdog") && parent == Some(own.as_str())
    };
    let entries = std::fs::read_dir("/proc").expect("there").flatten();
    let mut pids = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let pid = pids.find(is_watchdog).expect("there is one").parse().expect("a number");
    let pid = rustix::process::Pid::from_raw(pid).expect("not 0");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("ours");
    while alive(&pid.to_string()) {
        std::thread::yield_now();
    }
}

/// Starts the worker above, kills it, and waits until its commands are gone too.
async fn commands_end_with_their_worker(settings: &[(&str, &str)]) {
    let folder = Folder::new();
    folder.script("run", "sleep 60 & echo $! > \"child-$1\"; echo $$ > \"parent-$1\"; wait");
    let step = |name: &str| format!("[[step]]\nname = \"{name}\"\ncommand = [\"./run\", \"{name}\"]\n");
    folder.write("s.toml", &format!("[saga]\nname = \"s\"\n{}{}", step("one"), step("two")));
    let mut worker = tokio::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "worker_to_be_killed"])
        .env("LONGHAUL_TEST_FOLDER", folder.path())
        .envs(settings.iter().copied())
        .stdout(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("starts");
    let written = |name: &str| folder.file(name).metadata().is_ok_and(|meta| meta.len() > 0);
    until("the commands run", || {
        folder.file("watched").exists() && written("parent-one") && written("parent-two")
    })
    .await;
    worker.kill().await.expect("SIGKILL");
    for file in ["parent-one", "child-one", "parent-two", "child-two"] {
        let pid = std::fs::read_to_string(folder.file(file)).expect("written");
        until("the process ends", || !alive(&pid)).await;
    }
}

#[tokio::test]
async fn commands_end_with_a_worker_that_is_killed() {
    commands_end_with_their_worker(&[]).await;
}

#[tokio::test]
async fn a_watchdog_that_was_killed_is_replaced() {
    commands_end_with_their_worker(&[("LONGHAUL_TEST_NO_WATCHDOG", "1")]).await;
}
