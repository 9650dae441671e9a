//! Manifests: what is read, and how every mistake is told.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use common::Folder;
use longhaul::{Effect, Risk};
use longhaul_agent::Tool;

/// The contract's example, and every other key.
const FULL: &str = r#"
[saga]
name = "deploy_app"
description = "Puts an app online"

[[step]]
name = "create_dns"
command = ["./dns", "create", "{{input.app}}.example.com"]
undo    = ["./dns", "delete", "{{input.app}}.example.com", "{{result.id}}", "{{steps.create_dns.result}}"]
attempts = 5
timeout = "1h 30m"
effect = "compensable"
verify = ["./dns", "exists"]
undo_attempts = 9
undo_timeout = "10s"
env = ["DNS_TOKEN"]

[[step]]
name = "vm-1"
command = ["true", "{{steps.create_dns.result.0.id}}"]
group = "machines"

[[step]]
name = "vm-2"
command = ["true"]
group = "machines"

[[step]]
name = "go_live"
approve = "Put {{input.app}} live on {{steps.vm-2.result}}?"
risk = "write_local"
approval_timeout = "2h"
http = { method = "POST", url = "http://127.0.0.1:9000/live" }
undo_http = { method = "DELETE", url = "http://127.0.0.1:9000/live" }
"#;

fn broken(manifest: &str) -> Vec<String> {
    let folder = Folder::new();
    folder.write("a.toml", manifest);
    folder.problems()
}

/// The problems of a saga whose only step has these lines besides its name and command.
fn broken_step(lines: &str) -> Vec<String> {
    broken(&format!("[saga]\nname = \"s\"\n[[step]]\nname = \"one\"\ncommand = [\"true\"]\n{lines}\n"))
}

#[test]
fn a_saga_is_read_with_everything_it_says() {
    let folder = Folder::new();
    folder.script("dns", "true").write("deploy.toml", FULL);
    let saga = folder.saga();
    assert_eq!((saga.name.as_str(), saga.timeout), ("deploy_app", Duration::from_secs(86_400)));
    assert_eq!(saga.description.as_deref(), Some("Puts an app online"));
    assert_eq!(saga.file, folder.file("deploy.toml"));
    let dns = &saga.steps[0];
    assert_eq!((dns.attempts, dns.timeout, dns.effect), (5, Duration::from_secs(5_400), Effect::Compensable));
    assert_eq!((dns.undo_attempts, dns.undo_timeout), (9, Duration::from_secs(10)));
    assert!(matches!((&dns.action, &dns.undo, &dns.verify), (Tool::Command(_), Some(Tool::Command(_)), Some(_))));
    let stages: Vec<Vec<&str>> =
        saga.stages().map(|stage| stage.iter().map(|step| step.name.as_str()).collect()).collect();
    assert_eq!(stages, [vec!["create_dns"], vec!["vm-1", "vm-2"], vec!["go_live"]]);
    let live = &saga.steps[3];
    assert_eq!((live.attempts, live.timeout, live.effect), (3, Duration::from_secs(30), Effect::Idempotent));
    let approve = live.approve.as_ref().expect("an approval");
    assert_eq!((approve.risk, approve.expires), (Risk::WriteLocal, Some(Duration::from_secs(7_200))));
    assert!(matches!((&live.action, &live.undo), (Tool::Http(_), Some(Tool::Http(_)))));
}

#[test]
fn steps_without_a_group_are_never_together() {
    let folder = Folder::new();
    folder.write("a.toml", "[saga]\nname = \"s\"\n[[step]]\nname = \"a\"\ncommand = [\"true\"]\n[[step]]\nname = \"b\"\ncommand = [\"true\"]\n");
    assert_eq!(folder.saga().stages().count(), 2);
}

#[test]
fn every_problem_of_every_file_is_told_at_once_with_its_line() {
    let folder = Folder::new();
    folder.write(
        "a.toml",
        r#"[saga]
name = "s"
timeout = "soon"
colour = "red"

[[step]]
name = "one"
comand = ["true"]
attempts = 0

[[step]]
command = ["./gone"]
effect = "idempotant"
"#,
    );
    folder.write("b.toml", "[saga\nname = 1\n[[step]]\nname = \"x\"\ncommand = [true\n");
    let problems = folder.problems();
    assert_eq!(
        problems[..7],
        [
            "a.toml:3: 'timeout' is not a time: 'soon'\n    write hours, minutes and seconds, like \"24h\", \"5m\", \"30s\" or \"1h 30m\"",
            "a.toml:4: unknown key 'colour' in [saga]\n    [saga] may have name, timeout, description",
            "a.toml:6: [[step]] has no 'command' and no 'http'\n    add a line like command = [\"./dns\", \"create\", \"{{input.app}}\"]",
            "a.toml:8: unknown key 'comand' in [[step]]\n    did you mean 'command'?",
            "a.toml:9: 'attempts' is 0; it must be 1 to 1000 (tries in all)\n    write it like attempts = 3",
            "a.toml:11: [[step]] has no 'name'\n    add a line like name = \"create_dns\"",
            &format!(
                "a.toml:12: the program './gone' is not there\n    make {}/gone, or correct the path; it is relative to the manifest's folder",
                folder.path().display()
            )
            .replace(&format!("{}/", folder.path().display()), ""),
        ]
    );
    assert_eq!(
        problems[7],
        "a.toml:13: 'effect' is 'idempotant', which is none of read, idempotent, compensable, irreversible\n    did you mean 'idempotent'?"
    );
    assert!(problems.len() >= 10, "{problems:#?}");
    for (problem, line) in problems[8..].iter().zip([1, 5]) {
        assert!(problem.starts_with(&format!("b.toml:{line}: this is not TOML: ")), "{problem}");
    }
}

#[test]
fn a_manifest_with_a_problem_is_not_given_and_the_others_are() {
    let folder = Folder::new();
    let good = "[saga]\nname = \"good\"\n[[step]]\nname = \"a\"\ncommand = [\"true\"]\n";
    folder.write("bad.toml", "[saga]\nname = \"bad\"\n").write("good.toml", good);
    let loaded = folder.load();
    assert_eq!(loaded.manifests.iter().map(longhaul_agent::Manifest::name).collect::<Vec<_>>(), ["good"]);
    assert_eq!(loaded.problems.len(), 1);
    assert_eq!(loaded.problems[0].line, Some(1));
}

#[test]
fn values_of_another_type_are_told_with_an_example() {
    for (line, told) in [
        ("timeout = 30", "'timeout' must be a string, not a number\n    write it like timeout = \"30s\""),
        ("attempts = \"3\"", "'attempts' must be a whole number, not a string\n    write it like attempts = 3"),
        ("attempts = 1.5", "'attempts' must be a whole number, not a fraction\n    write it like attempts = 3"),
        ("attempts = -1", "'attempts' is -1; it must be 1 to 1000 (tries in all)\n    write it like attempts = 3"),
        (
            "undo = \"./x\"",
            "'undo' must be a list of strings, not a string\n    write it like undo = [\"./dns\", \"delete\", \"{{input.app}}\"]",
        ),
        (
            "undo = [\"true\", 1]",
            "'undo' must be a list of strings only, not a number\n    write it like undo = [\"./dns\", \"delete\", \"{{input.app}}\"]",
        ),
        (
            "env = true",
            "'env' must be a list of strings, not true or false\n    write it like env = [\"AWS_PROFILE\"]",
        ),
        (
            "undo_http = []",
            "'undo_http' must be a table, not a list\n    write it like undo_http = { method = \"DELETE\", url = \"http://127.0.0.1:9000/live\" }",
        ),
        ("group = {}", "'group' must be a string, not a table\n    write it like group = \"machines\""),
        (
            "approve = 2020-01-01",
            "'approve' must be a string, not a date\n    write it like approve = \"Put {{input.app}} live?\"",
        ),
    ] {
        assert_eq!(broken_step(line), [format!("a.toml:6: {told}")]);
    }
}

#[test]
fn times_that_make_no_sense_are_refused() {
    for (time, told) in [
        ("", "is not a time"),
        ("5 fortnights", "is not a time"),
        ("30", "is not a time"),
        ("0s", "must be more than nothing"),
        ("-5m", "must be more than nothing"),
        ("999999h", "is more than ten years"),
    ] {
        let problems = broken_step(&format!("timeout = \"{time}\""));
        assert_eq!(problems.len(), 1, "{time}");
        assert!(problems[0].starts_with(&format!("a.toml:6: 'timeout' {told}: '{time}'\n")), "{}", problems[0]);
    }
}

#[test]
fn a_step_does_exactly_one_thing() {
    let http = "http = { method = \"POST\", url = \"http://localhost/\" }";
    assert_eq!(
        broken_step(http),
        ["a.toml:6: there are both 'command' and 'http'\n    keep one of the two; each does one thing"]
    );
    let undos = "undo = [\"true\"]\nundo_http = { method = \"POST\", url = \"http://localhost/\" }";
    assert_eq!(
        broken_step(undos),
        ["a.toml:7: there are both 'undo' and 'undo_http'\n    keep one of the two; each does one thing"]
    );
}

#[test]
fn programs_that_cannot_be_started_are_found() {
    let folder = Folder::new();
    folder.write("plain", "text");
    std::fs::set_permissions(folder.file("plain"), std::fs::Permissions::from_mode(0o644)).expect("ours");
    std::fs::create_dir(folder.file("sub")).expect("made");
    for (command, told) in [
        (
            "[]",
            "'undo' is an empty list; its first element is the program\n    write it like undo = [\"./dns\", \"delete\", \"{{input.app}}\"]",
        ),
        ("[\"\"]", "'undo' has no program\n    its first element is the program"),
        ("[\"./plain\"]", "the program './plain' is not executable\n    chmod +x plain"),
        ("[\"./sub\"]", "the program './sub' is a folder\n    name the file in it"),
        (
            "[\"sub/no\"]",
            "the program 'sub/no' is not there\n    make sub/no, or correct the path; it is relative to the manifest's folder",
        ),
        (
            "[\"plain\"]",
            "there is no program 'plain' in PATH\n    install it, or write ./plain when it lies beside the manifest",
        ),
        (
            "[\"rm -rf x\"]",
            "there is no program 'rm -rf x' in PATH\n    write each argument as an element of its own: no shell reads this",
        ),
        (
            "[\"{{input.tool}}\"]",
            "the program '{{input.tool}}' has a placeholder\n    write the program itself; only its arguments may have placeholders",
        ),
    ] {
        folder.write(
            "a.toml",
            &format!("[saga]\nname = \"s\"\n[[step]]\nname = \"one\"\ncommand = [\"true\"]\nundo = {command}\n"),
        );
        assert_eq!(folder.problems(), [format!("a.toml:6: {told}")]);
    }
}

#[test]
fn http_calls_that_cannot_be_made_are_found() {
    for (http, told) in [
        ("{ method = \"POST\" }", "http has no 'url'"),
        ("{ url = \"http://localhost\" }", "http has no 'method'"),
        (
            "{ method = \"POTS\", url = \"http://localhost\" }",
            "'method' is 'POTS', which is none of GET, HEAD, POST, PUT, PATCH, DELETE",
        ),
        ("{ method = \"POST\", url = \"localhost\" }", "'url' is not a URL (relative URL without a base)"),
        (
            "{ method = \"POST\", url = \"ftp://localhost\" }",
            "'url' has the scheme ftp, but only http and https can be called",
        ),
        ("{ method = \"POST\", url = \"http://u:p@localhost\" }", "'url' has a user name or password in it"),
        ("{ method = \"POST\", url = \"http://localhost/a/../b\" }", "'url' has . or .. in its path"),
        ("{ method = \"POST\", url = \"{{input.url}}\" }", "'url' is not a URL (relative URL without a base)"),
        ("{ method = \"POST\", url = \"http://localhost\", header = {} }", "unknown key 'header' in http"),
        (
            "{ method = \"POST\", url = \"http://localhost\", headers = { Host = \"x\" } }",
            "'headers' must not have 'Host': it is set by Longhaul, or not a header",
        ),
        (
            "{ method = \"POST\", url = \"http://localhost\", headers = { X = 1 } }",
            "'headers' must have strings only; 'X' is not one",
        ),
        (
            "{ method = \"POST\", url = \"http://localhost\", headers = { X = \"{{env.SECRET}}\" } }",
            "{{env.SECRET}} is not listed in 'env'",
        ),
        (
            "{ method = \"POST\", url = \"http://localhost/{{env.SECRET}}\" }",
            "{{env.SECRET}} may stand in the headers of http only, where it stays secret",
        ),
        (
            "{ method = \"POST\", url = \"http://localhost\", body = { a = [\"{{steps.x.result}}\"] } }",
            "{{steps.x.result}} refers to a step 'x' that is not there",
        ),
        (
            "{ method = \"POST\", url = \"http://localhost\", body = 2020-01-01 }",
            "'body' has a number or date that JSON cannot hold",
        ),
    ] {
        let problems = broken_step(&format!("undo_http = {http}"));
        assert_eq!(problems.len(), 1, "{http}: {problems:#?}");
        assert!(problems[0].starts_with(&format!("a.toml:6: {told}\n")), "{}", problems[0]);
    }
}

#[test]
fn placeholders_refer_only_to_what_is_there_by_then() {
    let problems = broken(
        r#"[saga]
name = "s"
[[step]]
name = "first"
command = ["echo", "{{steps.first.result}}", "{{result}}", "{{steps.second.result}}"]
undo = ["echo", "{{steps.first.result}}", "{{result.x}}", "{{steps.second.result}}"]
[[step]]
name = "second"
group = "g"
command = ["echo", "{{steps.frist.result}}", "{{steps.other.result}}", "{{steps.first}}", "{{inptu}}", "{{env.HOME}}", "{{x"]
[[step]]
name = "third"
group = "g"
command = ["echo", "{{steps.second.result}}", "{{steps.first.result.a.0}}"]
undo = ["echo", "{{steps.second.result}}"]
approve = "{{steps.fourth.result}}?"
[[step]]
name = "fourth"
command = ["echo", "{{steps.second.result}}", "{{steps.third.result}}", "{{input}}"]
"#,
    );
    assert_eq!(
        problems,
        [
            "a.toml:5: {{steps.first.result}} refers to its own step, which has no result yet\n    refer to a step before this one",
            "a.toml:5: {{result}} has a value in an undo only\n    refer to a step before with {{steps.NAME.result}}",
            "a.toml:5: {{steps.second.result}} refers to a later step\n    move step 'second' before this one, or do not refer to it",
            "a.toml:6: {{steps.second.result}} refers to a later step\n    move step 'second' before this one, or do not refer to it",
            "a.toml:10: {{steps.frist.result}} refers to a step 'frist' that is not there\n    did you mean 'first'?",
            "a.toml:10: {{steps.other.result}} refers to a step 'other' that is not there\n    refer to a step before this one",
            "a.toml:10: {{steps.first}} does not say which result of which step\n    write {{steps.NAME.result}} or {{steps.NAME.result.FIELD}}",
            "a.toml:10: {{inptu}} refers to nothing\n    write {{input}}, {{input.FIELD}} or {{steps.NAME.result}}; a literal {{ is written {{{{",
            "a.toml:10: {{env.HOME}} may stand in the headers of http only, where it stays secret\n    list the name in env: a command then finds it in its environment",
            "a.toml:10: the placeholder '{{x' has no end\n    close it with }}, or write {{{{ for a literal {{",
            "a.toml:14: {{steps.second.result}} refers to a step of the same group, which runs at the same time\n    take one of the two out of the group",
            "a.toml:15: {{steps.second.result}} refers to a step of the same group, which runs at the same time\n    take one of the two out of the group",
            "a.toml:16: {{steps.fourth.result}} refers to a later step\n    move step 'fourth' before this one, or do not refer to it",
        ]
    );
}

#[test]
fn names_are_unique_and_can_stand_in_a_url() {
    let step = |name: &str| format!("[[step]]\nname = \"{name}\"\ncommand = [\"true\"]\n");
    let saga = |name: &str| format!("[saga]\nname = \"{name}\"\n");
    assert_eq!(
        broken(&format!("{}{}{}", saga("s"), step("a"), step("a"))),
        ["a.toml:7: there are two steps 'a': on line 4 and here\n    give one of them another name"]
    );
    for bad in ["a b", "a/b", "a.b", "a#2", "{{x}}", "tab\\t", ""] {
        let problems = broken(&format!("{}{}", saga("s"), step(bad)));
        assert_eq!(problems.len(), 1, "{bad}: {problems:#?}");
        assert!(problems[0].starts_with("a.toml:4: 'name' m"), "{}", problems[0]);
    }
    for bad in ["a b", "a/b", "bell\\u0007", "", &"x".repeat(129)] {
        let problems = broken(&format!("{}{}", saga(bad), step("a")));
        assert_eq!(problems.len(), 1, "{bad}: {problems:#?}");
        assert!(problems[0].starts_with("a.toml:2: 'name' must have"), "{}", problems[0]);
    }
}

#[test]
fn a_handler_declared_in_two_files_is_told_with_both_places() {
    let folder = Folder::new();
    let good = "[saga]\nname = \"same\"\n[[step]]\nname = \"a\"\ncommand = [\"true\"]\n";
    folder.write("a.toml", good).write("b.toml", &format!("# second\n\n{good}"));
    assert_eq!(
        folder.problems(),
        [
            "b.toml:4: the handler 'same' is declared twice: here and in a.toml:2\n    give one of them another name"
        ]
    );
    assert_eq!(folder.load().manifests.len(), 1);
}

#[test]
fn a_group_that_is_interrupted_is_told() {
    let step = |name: &str, group: &str| format!("[[step]]\nname = \"{name}\"\ncommand = [\"true\"]\n{group}\n");
    let steps = [step("a", "group = \"g\""), step("b", ""), step("c", "group = \"g\"")].concat();
    assert_eq!(
        broken(&format!("[saga]\nname = \"s\"\n{steps}")),
        [
            "a.toml:14: the group 'g' is interrupted: its step before is on line 3\n    put the steps of a group one after the other, or give this one another group"
        ]
    );
}

#[test]
fn keys_that_contradict_each_other_are_told() {
    for (lines, told) in [
        ("effect = \"irreversible\"\nundo = [\"true\"]", "a.toml:7: an irreversible step cannot have an undo"),
        ("verify = [\"true\"]", "a.toml:6: 'verify' is never asked here"),
        ("risk = \"read_only\"", "a.toml:6: 'risk' does nothing without 'approve'"),
        ("approval_timeout = \"1h\"", "a.toml:6: 'approval_timeout' does nothing without 'approve'"),
        ("approve = \" \"", "a.toml:6: 'approve' is empty"),
        ("env = [\"A=B\"]", "a.toml:6: 'env' has 'A=B', which cannot be a variable's name"),
        ("env = [\"LONGHAUL_FENCE\"]", "a.toml:6: 'env' must not have LONGHAUL_FENCE"),
    ] {
        let problems = broken_step(lines);
        assert_eq!(problems.len(), 1, "{lines}: {problems:#?}");
        assert!(problems[0].starts_with(told), "{}", problems[0]);
    }
}

#[test]
fn files_that_are_no_sagas_are_told() {
    let saga = "[saga]\nname = \"s\"\n";
    for (manifest, told) in [
        ("", "a.toml:1: no [agent] and no [saga] table, so there is nothing to run"),
        (saga, "a.toml:1: the saga has no steps"),
        ("saga = 1\n", "a.toml:1: 'saga' must be a table"),
        ("[saga]\nname = \"s\"\n[step]\nname = \"a\"\n", "a.toml:3: 'step' must be a list of tables"),
        ("step = [1]\n[saga]\nname = \"s\"\n", "a.toml:1: a step must be a table"),
    ] {
        let problems = broken(manifest);
        assert_eq!(problems.len(), 1, "{manifest}: {problems:#?}");
        assert!(problems[0].starts_with(told), "{}", problems[0]);
    }
    let step = "[[step]]\nname = \"a\"\ncommand = [\"true\"]\n";
    assert_eq!(
        broken(&format!("{saga}{step}[[setp]]\n")),
        ["a.toml:6: unknown table or key 'setp'\n    did you mean 'step'?"]
    );
    assert_eq!(
        broken(&format!("{saga}{step}[[tool]]\n")),
        [
            "a.toml:6: [[tool]] belongs to an agent, and there is no [agent]\n    begin the file with [agent]; a saga has [[step]]s instead"
        ]
    );
}

#[test]
fn files_that_cannot_be_read_are_told() {
    let folder = Folder::new();
    std::fs::write(folder.file("a.toml"), b"[saga]\nname = \"\xff\"\n").expect("written");
    folder.write("b.toml", &"#".repeat(1024 * 1024 + 1));
    std::fs::create_dir(folder.file("c.toml")).expect("made");
    assert_eq!(
        folder.problems(),
        [
            "a.toml:2: is not UTF-8 text\n    save it with the encoding UTF-8",
            "b.toml: has 1048577 bytes; at most 1048576 are read\n    a manifest only declares; move data into files of its own",
            "c.toml: is not a file\n    only files can end in .toml here; rename it",
        ]
    );
}

#[test]
fn a_folder_that_is_missing_or_has_no_manifest_is_told() {
    let folder = Folder::new();
    folder.write("longhaul.toml", "[server]").write(".hidden.toml", "nonsense").write("notes.txt", "");
    let problems = folder.load().problems;
    assert_eq!(problems.len(), 1);
    assert_eq!((problems[0].file.as_path(), problems[0].line), (folder.path(), None));
    assert_eq!(problems[0].message, "no manifests (*.toml) in this folder");
    let gone = longhaul_agent::load(&folder.file("gone")).problems;
    assert_eq!(gone[0].message, "cannot read the folder: No such file or directory (os error 2)");
}
