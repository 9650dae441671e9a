//! Agent manifests: what is read, with which defaults, and how every mistake is told.

mod common;

use std::time::Duration;

use common::Folder;
use longhaul::{Effect, Risk};
use longhaul_agent::manifest::agent::{McpTransport, Strategy};
use longhaul_agent::model::Provider;
use longhaul_agent::{Manifest, Tool, Toolbox};
use serde_json::json;

/// The contract's example.
const EXAMPLE: &str = r#"
[agent]
name = "devops"
model = "gpt-4o-mini"
system = "You are an autonomous DevOps agent."

[[tool]]
name = "check_disk"
description = "Check current disk usage"
command = ["df", "-h"]
risk = "read_only"
effect = "read"
timeout = "30s"
attempts = 3

[[tool]]
name = "clean_logs"
description = "Delete old logs to free space"
command = ["./clean_logs.sh"]
risk = "write_local"
effect = "compensable"
undo = "restore_logs"
verify = "logs_cleaned"
lock = "disk"
env = ["AWS_PROFILE"]

[[tool]]
name = "restore_logs"
description = "Brings them back"
command = ["./clean_logs.sh"]

[[tool]]
name = "logs_cleaned"
description = "Are they gone?"
command = ["./clean_logs.sh"]
risk = "read_only"

[[tool]]
name = "page_oncall"
description = "Page the person on call"
http = { method = "POST", url = "http://127.0.0.1:9000/page" }
risk = "external_action"
effect = "irreversible"

[[mcp]]
name = "files"
command = ["./clean_logs.sh"]
risk = "write_local"
"#;

/// Every other key.
const FULL: &str = r#"
[agent]
name = "full"
model = "claude"
provider = "anthropic"
fallback_model = "other"
context_window = 200_000
temperature = 1
stream = false
description = "Does everything"
queue = "ops"
max_attempts = 7
undo = ["failed", "cancelled"]
delegates = ["devops", "devops", "researcher"]

[agent.budget]
max_steps = 5
max_wall_time_ms = 1000
max_llm_tokens = 0x1000
max_artifact_bytes_in_context = 100
max_cost_usd = 0.5

[agent.price]
input_per_mtok = 3
output_per_mtok = 15.5

[agent.human_in_the_loop]
required_for_risk_levels = []
approval_timeout = "2h"

[agent.checkpoint]
strategy = "on_state_change"
max_age = "1h"
max_count = 3
on_refused = "fail"

[[tool]]
name = "list"
description = "Lists files"
command = ["ls", "{{path}}", "{{depth}}", "--{{{{x"]
parameters = { type = "object", properties = { path = { type = "string" }, depth = { type = "integer", default = 1 } } }
risk = "read_only"
returns = "patch"
fatal = true
sandbox = false

[[tool]]
name = "write"
description = "Writes a file"
command = ["true", "{{path}}"]
risk = "write_local"
undo = "unwrite"
verify = "written"
sandbox = { write = ["sub"], network = false }
[tool.parameters]
type = "object"
required = ["path"]
[tool.parameters.properties.path]
type = "string"

[[tool]]
name = "unwrite"
description = "Removes it"
command = ["true", "{{arguments.path}}", "{{result.id}}"]

[[tool]]
name = "written"
description = "Is it there?"
command = ["true", "{{path}}"]

[[mcp]]
name = "web"
url = "http://127.0.0.1:1/mcp"
headers = { Authorization = "Bearer {{env.TOKEN}}" }
env = ["TOKEN"]
timeout = "5s"
attempts = 1
connect_timeout = "1s"
[mcp.tools.fetch]
risk = "read_only"
timeout = "1m"
[mcp.tools.post]
undo = "web__delete"
lock = "site"
fatal = true
"#;

fn broken(manifest: &str) -> Vec<String> {
    let folder = Folder::new();
    folder.write("a.toml", manifest);
    folder.problems()
}

/// The problems of an agent with these lines in `[agent]`, from line 4 on.
fn broken_agent(lines: &str) -> Vec<String> {
    broken(&format!("[agent]\nname = \"a\"\nmodel = \"m\"\n{lines}\n"))
}

/// The problems of an agent with one tool, with these lines from line 8 on.
fn broken_tool(lines: &str) -> Vec<String> {
    broken_agent(&format!("[[tool]]\nname = \"one\"\ndescription = \"Does it\"\ncommand = [\"true\"]\n{lines}"))
}

fn told(problems: &[String], starts: &str) {
    assert_eq!(problems.len(), 1, "{starts}: {problems:#?}");
    assert!(problems[0].starts_with(starts), "{starts}: {}", problems[0]);
}

#[test]
fn the_example_is_read_with_every_default() {
    let folder = Folder::new();
    folder.script("clean_logs.sh", "true").write("devops.toml", EXAMPLE);
    let agent = folder.agent();
    assert_eq!((agent.name.as_str(), agent.system.as_str()), ("devops", "You are an autonomous DevOps agent."));
    assert_eq!(
        (agent.model.provider, agent.model.model.as_str(), agent.model.stream),
        (Provider::OpenAi, "gpt-4o-mini", true)
    );
    assert_eq!((agent.temperature, agent.context_window, agent.max_attempts), (None, 128_000, None));
    assert!(!agent.undo.failed && !agent.undo.cancelled && agent.delegates.is_empty() && agent.queue.is_none());
    assert_eq!(agent.budget, longhaul::state::Budget::default());
    let people = &agent.human_in_the_loop;
    assert_eq!(people.required_for_risk_levels, [Risk::WriteLocal, Risk::ExternalAction]);
    assert_eq!((people.approval_timeout, agent.price), (Duration::from_secs(86_400), None));
    let checkpoint = agent.checkpoint;
    assert_eq!(
        (checkpoint.strategy, checkpoint.max_count, checkpoint.fail_when_refused),
        (Strategy::EveryStep, 10, false)
    );
    assert_eq!((checkpoint.max_age, agent.folder), (Duration::from_secs(86_400), folder.path().to_owned()));
    let clean = &agent.tools[1];
    assert_eq!((clean.risk, clean.effect, clean.attempts), (Risk::WriteLocal, Effect::Compensable, 3));
    assert_eq!((clean.undo.as_deref(), clean.verify.as_deref()), (Some("restore_logs"), Some("logs_cleaned")));
    assert_eq!((clean.lock.as_deref(), clean.timeout), (Some("disk"), Duration::from_secs(30)));
    assert!(!clean.fatal && !clean.returns_patch);
    let Tool::Command(command) = &clean.action else { panic!("not a command") };
    assert_eq!((command.env.as_slice(), command.sandbox.is_some()), (["AWS_PROFILE".to_owned()].as_slice(), true));
    assert_eq!((agent.tools[2].risk, agent.tools[2].effect), (Risk::ExternalAction, Effect::Irreversible));
    assert_eq!(agent.tools[3].effect, Effect::Read);
    assert!(matches!(agent.tools[4].action, Tool::Http(_)));
    assert_eq!(clean.arguments(""), Ok(json!({})));
    let files = &agent.mcp[0];
    assert_eq!((files.name.as_str(), files.risk, files.effect), ("files", Risk::WriteLocal, Effect::Irreversible));
    assert!(matches!(&files.transport, McpTransport::Stdio(command) if command.sandbox.is_none()));
}

#[test]
fn every_other_key_is_read() {
    let folder = Folder::new();
    std::fs::create_dir(folder.file("sub")).expect("made");
    folder.write("full.toml", FULL);
    let agent = folder.agent();
    assert_eq!(
        (agent.model.provider, agent.model.fallback_model.as_deref()),
        (Provider::Anthropic, Some("other"))
    );
    assert_eq!((agent.model.stream, agent.temperature, agent.context_window), (false, Some(1.0), 200_000));
    assert_eq!((agent.queue.as_deref(), agent.max_attempts), (Some("ops"), Some(7)));
    assert_eq!((agent.undo.failed, agent.undo.cancelled), (true, true));
    assert_eq!(agent.delegates, ["devops", "researcher"]);
    assert_eq!(
        (agent.budget.max_steps, agent.budget.max_llm_tokens, agent.budget.max_cost_usd),
        (5, 4_096, Some(0.5))
    );
    let price = agent.price.expect("a price");
    assert_eq!((price.input_per_mtok, price.output_per_mtok), (3.0, 15.5));
    assert_eq!(agent.human_in_the_loop.required_for_risk_levels, []);
    assert_eq!((agent.checkpoint.strategy, agent.checkpoint.fail_when_refused), (Strategy::OnStateChange, true));
    let list = &agent.tools[0];
    assert!(list.returns_patch && list.fatal);
    assert_eq!(list.parameters["required"], json!(["path"]), "a placeholder needs it");
    assert_eq!(list.arguments(r#"{"path": "/"}"#), Ok(json!({"path": "/", "depth": 1})));
    assert!(matches!(&list.action, Tool::Command(command) if command.sandbox.is_none()));
    let write = &agent.tools[1];
    assert_eq!(write.effect, Effect::Compensable, "it has an undo");
    let Tool::Command(command) = &write.action else { panic!("not a command") };
    let sandbox = command.sandbox.as_ref().expect("confined");
    assert_eq!((sandbox.write.as_slice(), sandbox.network), ([folder.file("sub")].as_slice(), false));
    let web = &agent.mcp[0];
    assert_eq!((web.risk, web.attempts, web.connect_timeout), (Risk::ExternalAction, 1, Duration::from_secs(1)));
    let (fetch, post) = (&web.tools["fetch"], &web.tools["post"]);
    assert_eq!((fetch.risk, fetch.effect, fetch.timeout), (Risk::ReadOnly, Effect::Read, Duration::from_secs(60)));
    assert_eq!((post.risk, post.effect, post.attempts), (Risk::ExternalAction, Effect::Compensable, 1));
    assert_eq!(
        (post.undo.as_deref(), post.lock.as_deref(), post.fatal),
        (Some("web__delete"), Some("site"), true)
    );
}

#[tokio::test]
async fn tools_that_undo_or_verify_are_not_for_the_model() {
    let folder = Folder::new();
    folder.script("clean_logs.sh", "true").write("a.toml", EXAMPLE.split("[[mcp]]").next().expect("the rest"));
    let toolbox = Toolbox::open(&folder.agent(), Vec::new()).await.expect("nothing to connect");
    let names: Vec<String> = toolbox.tools().iter().map(|tool| tool.name.clone()).collect();
    assert_eq!(names, ["check_disk", "clean_logs", "page_oncall"]);
    assert!(toolbox.get("restore_logs").is_some() && toolbox.get("nothing").is_none());
}

#[test]
fn what_undoes_is_not_undone_itself() {
    let tools = |undo: &str| {
        let tool = |name: &str, undo: &str| {
            format!("[[tool]]\nname = \"{name}\"\ndescription = \"Does it\"\ncommand = [\"true\"]\n{undo}\n")
        };
        format!("{}{}", tool("make", "undo = \"unmake\""), tool("unmake", undo))
    };
    assert_eq!(broken_agent(&tools("")), [""; 0]);
    let problems = broken_agent(&tools("undo = \"make\""));
    assert_eq!(problems.len(), 2, "{problems:#?}");
    assert!(
        problems[1].starts_with("a.toml:13: 'unmake' undoes 'make' and is itself undone by 'make'"),
        "{problems:#?}"
    );
}

#[test]
fn an_agent_beside_a_saga_is_read_too() {
    let folder = Folder::new();
    folder.write("a.toml", "[agent]\nname = \"a\"\nmodel = \"m\"\n");
    folder.write("s.toml", "[saga]\nname = \"s\"\n[[step]]\nname = \"x\"\ncommand = [\"true\"]\n");
    let loaded = folder.load();
    let kinds: Vec<_> = loaded.manifests.iter().map(|manifest| (manifest.kind(), manifest.name())).collect();
    assert_eq!(kinds, [("agent", "a"), ("saga", "s")]);
    assert!(matches!(loaded.manifests[0], Manifest::Agent(_)));
    assert_eq!(loaded.manifests[0].file(), folder.file("a.toml"));
}

#[test]
fn every_problem_is_told_at_once_with_its_line() {
    assert_eq!(
        broken(
            r#"[agent]
name = "a b"
modle = "m"
temperature = 9
undo = ["fialed"]
[agent.budget]
max_stpes = 5
max_steps = 0
max_cost_usd = 1
[agent.price]
input_per_mtok = -1
[agent.human_in_the_loop]
required_for_risk_levels = ["write"]
[agent.checkpoint]
strategy = "every_hour"
max_age = "soon"
on_refused = "panic"
[[tool]]
name = "ask_user"
comand = ["true"]
effect = "compensable"
fatal = 1
"#
        ),
        [
            "a.toml:1: [agent] has no 'model'\n    add a line like model = \"gpt-4o-mini\"",
            "a.toml:2: 'name' must have no spaces, slashes or control characters: 'a b'\n    write it like name = \"devops\"",
            "a.toml:3: unknown key 'modle' in [agent]\n    did you mean 'model'?",
            "a.toml:4: 'temperature' is 9; it must be 0 to 2\n    write it like temperature = 0.2",
            "a.toml:5: 'undo' is 'fialed', which is none of failed, cancelled\n    did you mean 'failed'?",
            "a.toml:7: unknown key 'max_stpes' in [agent.budget]\n    did you mean 'max_steps'?",
            "a.toml:8: 'max_steps' is 0; it must be 1 to 4294967295\n    write it like max_steps = 20",
            "a.toml:10: [agent.price] has no 'output_per_mtok'\n    add a line like output_per_mtok = 0.6",
            "a.toml:11: 'input_per_mtok' is -1; it must be 0 to 1000000\n    write it like input_per_mtok = 0.15",
            "a.toml:13: 'required_for_risk_levels' is 'write', which is none of read_only, write_local, external_action\n    write it like required_for_risk_levels = [\"write_local\", \"external_action\"]",
            "a.toml:15: 'strategy' is 'every_hour', which is none of every_step, every_iteration, on_state_change\n    write it like strategy = \"every_step\"",
            "a.toml:16: 'max_age' is not a time: 'soon'\n    write hours, minutes and seconds, like \"24h\", \"5m\", \"30s\" or \"1h 30m\"",
            "a.toml:17: 'on_refused' is 'panic', which is none of go_on, fail\n    write it like on_refused = \"fail\"",
            "a.toml:18: [[tool]] has no 'description'\n    add a line like description = \"Check current disk usage\"",
            "a.toml:18: [[tool]] has no 'command' and no 'http'\n    add a line like command = [\"df\", \"-h\", \"{{path}}\"]",
            "a.toml:19: 'name' 'ask_user' is a built-in tool's; take another one\n    write it like name = \"check_disk\"",
            "a.toml:20: unknown key 'comand' in [[tool]]\n    did you mean 'command'?",
            "a.toml:21: a compensable tool needs 'undo', the tool that undoes it\n    add undo = \"NAME\" and a [[tool]] of that name, or write effect = \"irreversible\"",
            "a.toml:22: 'fatal' must be true or false, not a number\n    write it like fatal = true",
        ]
    );
}

#[test]
fn what_an_agent_cannot_be_is_told() {
    for (lines, starts) in [
        ("system = 1", "a.toml:4: 'system' must be a string, not a number"),
        (
            "provider = \"open-ai\"",
            "a.toml:4: 'provider' is 'open-ai', which is none of openai, anthropic\n    did you mean 'openai'?",
        ),
        ("fallback_model = \" \"", "a.toml:4: 'fallback_model' is empty"),
        ("context_window = 10", "a.toml:4: 'context_window' is 10; it must be 1000 to 100000000"),
        ("stream = \"yes\"", "a.toml:4: 'stream' must be true or false, not a string"),
        ("max_attempts = 0", "a.toml:4: 'max_attempts' is 0; it must be 1 to 1000 (tries in all)"),
        ("delegates = [\"\"]", "a.toml:4: 'delegates' has an empty name"),
        ("budget = 1", "a.toml:4: 'budget' must be a table, not a number"),
        (
            "[agent.budget]\nmax_cost_usd = 1.0",
            "a.toml:5: 'max_cost_usd' cannot be kept: what tokens cost is not known\n    add [agent.price]",
        ),
        (
            "[tool]\nname = \"x\"",
            "a.toml:4: 'tool' must be a list of tables\n    write [[tool]] with two brackets",
        ),
        ("[saga]\nname = \"s\"", "a.toml:4: 'saga' belongs to a saga, not to an agent"),
        ("[[step]]\nname = \"s\"", "a.toml:4: 'step' belongs to a saga, not to an agent"),
        ("[[tools]]", "a.toml:4: unknown table or key 'tools'\n    did you mean 'tool'?"),
    ] {
        told(&broken_agent(lines), starts);
    }
    told(&broken("agent = 1"), "a.toml:1: 'agent' must be a table");
    told(&broken("[agent]\nmodel = \"m\"\n"), "a.toml:1: [agent] has no 'name'");
}

#[test]
fn what_a_tool_cannot_be_is_told() {
    for (lines, starts) in [
        (
            "http = { method = \"GET\", url = \"http://localhost\" }",
            "a.toml:8: there are both 'command' and 'http'",
        ),
        ("risk = \"low\"", "a.toml:8: 'risk' is 'low', which is none of read_only, write_local, external_action"),
        (
            "returns = \"pach\"",
            "a.toml:8: 'returns' is 'pach', which is none of result, patch\n    did you mean 'patch'?",
        ),
        ("parameters = \"string\"", "a.toml:8: 'parameters' must have type = \"object\""),
        (
            "parameters = { type = \"object\", properties = { a = { type = \"strin\" } } }",
            "a.toml:8: 'parameters' is not a JSON schema at /properties/a/type: ",
        ),
        (
            "parameters = { type = \"object\", properties = { a = { \"$ref\" = \"http://x/y\" } } }",
            "a.toml:8: 'parameters' refers to 'http://x/y', but only its own parts",
        ),
        ("lock = \"\"", "a.toml:8: 'lock' is empty"),
        ("env = [\"LONGHAUL_STEP\"]", "a.toml:8: 'env' must not have LONGHAUL_STEP"),
        ("sandbox = 1", "a.toml:8: 'sandbox' must be true, false or a table"),
        ("sandbox = { wirte = [] }", "a.toml:8: unknown key 'wirte' in sandbox\n    did you mean 'write'?"),
        (
            "sandbox = { write = [\"gone\"] }",
            "a.toml:8: the folder 'gone' that the sandbox may write is not there",
        ),
        (
            "effect = \"irreversible\"\nundo = \"two\"\n[[tool]]\nname = \"two\"\ndescription = \"x\"\ncommand = [\"true\"]",
            "a.toml:9: an irreversible tool cannot have an undo",
        ),
        (
            "risk = \"read_only\"\nundo = \"two\"\n[[tool]]\nname = \"two\"\ndescription = \"x\"\ncommand = [\"true\"]",
            "a.toml:9: a tool that only reads has nothing to undo",
        ),
        (
            "effect = \"idempotent\"\nverify = \"two\"\n[[tool]]\nname = \"two\"\ndescription = \"x\"\ncommand = [\"true\"]",
            "a.toml:9: 'verify' is never asked here",
        ),
        ("undo = \"one\"", "a.toml:8: the tool 'one' cannot be its own undo or verify"),
        (
            "undo = \"restore\"",
            "a.toml:8: there is no tool 'restore'\n    add a [[tool]] with name = \"restore\", or SERVER__TOOL",
        ),
        (
            "verify = \"twoo\"\n[[tool]]\nname = \"two\"\ndescription = \"x\"\ncommand = [\"true\"]",
            "a.toml:8: there is no tool 'twoo'\n    did you mean 'two'?",
        ),
        (
            "[[tool]]\nname = \"one\"\ndescription = \"x\"\ncommand = [\"true\"]",
            "a.toml:9: there are two tools 'one': on line 5 and here",
        ),
        (
            "[[tool]]\nname = \"two words\"\ndescription = \"x\"\ncommand = [\"true\"]",
            "a.toml:9: 'name' 'two words' must have 1 to 64 characters",
        ),
    ] {
        told(&broken_tool(lines), starts);
    }
}

#[test]
fn placeholders_refer_to_parameters() {
    let tool = |rest: &str| broken_agent(&format!("[[tool]]\nname = \"one\"\ndescription = \"x\"\n{rest}"));
    told(
        &tool("command = [\"cat\", \"{{path}}\"]"),
        "a.toml:7: {{path}} is not a parameter of the tool\n    declare it, like parameters = { type = \"object\", properties = { path = ",
    );
    told(
        &tool("command = [\"cat\", \"{{pth}}\"]\nparameters = { type = \"object\", properties = { path = {} } }"),
        "a.toml:7: {{pth}} is not a parameter of the tool\n    did you mean 'path'?",
    );
    told(
        &tool("command = [\"cat\", \"{{env.HOME}}\"]"),
        "a.toml:7: {{env.HOME}} may stand in the headers of http only",
    );
    let undone = |argument: &str| {
        let one = "command = [\"true\", \"{{path}}\"]\nundo = \"two\"\nparameters = { type = \"object\", properties = { path = {} } }";
        tool(&format!(
            "{one}\n[[tool]]\nname = \"two\"\ndescription = \"x\"\ncommand = [\"true\", \"{argument}\"]"
        ))
    };
    assert_eq!(undone("{{arguments.path}} {{result}}"), [""; 0]);
    told(
        &undone("{{path}}"),
        "a.toml:13: {{path}} refers to nothing: 'two' is an undo\n    an undo gets {{arguments.NAME}} and {{result}}",
    );
    told(
        &undone("{{arguments.pth}}"),
        "a.toml:13: {{arguments.pth}} is not a parameter of the tool\n    did you mean 'path'?",
    );
}

#[test]
fn what_a_server_cannot_be_is_told() {
    for (lines, starts) in [
        ("command = [\"true\"]", "a.toml:4: [[mcp]] has no 'name'"),
        ("name = \"s\"", "a.toml:4: [[mcp]] has no 'command' and no 'url'"),
        ("name = \"a b\"\ncommand = [\"true\"]", "a.toml:5: 'name' must have 1 to 32 characters"),
        (
            "name = \"s\"\ncommand = [\"true\"]\nurl = \"http://localhost\"",
            "a.toml:7: there are both 'command' and 'url'",
        ),
        ("name = \"s\"\nurl = \"localhost\"", "a.toml:6: 'url' is not a URL"),
        (
            "name = \"s\"\nurl = \"http://localhost\"\nsandbox = true",
            "a.toml:7: 'sandbox' goes with 'command' only",
        ),
        ("name = \"s\"\ncommand = [\"true\"]\nheaders = {}", "a.toml:7: 'headers' goes with 'url' only"),
        (
            "name = \"s\"\ncommand = [\"true\", \"{{x}}\"]",
            "a.toml:6: {{x}} refers to nothing: a server is started before",
        ),
        (
            "name = \"s\"\nurl = \"http://localhost\"\nheaders = { A = \"{{env.T}}\" }",
            "a.toml:7: {{env.T}} is not listed in 'env'\n    add env = [\"T\"] beside it",
        ),
        (
            "name = \"s\"\ncommand = [\"true\"]\neffect = \"compensable\"",
            "a.toml:7: the tools of a server cannot all be compensable",
        ),
        (
            "name = \"s\"\ncommand = [\"true\"]\n[mcp.tools]\nx = 1",
            "a.toml:8: 'tools' must have tables only; 'x' is not one",
        ),
        (
            "name = \"s\"\ncommand = [\"true\"]\n[mcp.tools.x]\nrisc = \"read_only\"",
            "a.toml:8: unknown key 'risc' in [mcp.tools.NAME]\n    did you mean 'risk'?",
        ),
        (
            "name = \"s\"\ncommand = [\"true\"]\n[mcp.tools.x]\neffect = \"compensable\"",
            "a.toml:8: a compensable tool needs 'undo'",
        ),
        (
            "name = \"s\"\ncommand = [\"true\"]\n[mcp.tools.x]\nundo = \"t__y\"",
            "a.toml:8: there is no tool 't__y'",
        ),
        (
            "name = \"s\"\ncommand = [\"true\"]\n[[mcp]]\nname = \"s\"\ncommand = [\"true\"]",
            "a.toml:8: there are two servers 's': on line 5 and here",
        ),
    ] {
        told(&broken_agent(&format!("[[mcp]]\n{lines}")), starts);
    }
}
