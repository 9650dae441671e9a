//! Agents and their turns: answers, the plan, tools that run together or one after the other, and models
//! that go astray.

mod agent;
mod provider;

use agent::{
    Ledger, Reads, Stage, USAGE, agent, anything, assert_pairs, calls, calls_raw, noting, says, says_for,
};
use longhaul::{Risk, TaskError};
use longhaul_agent::{Agent, AgentTool};
use provider::{Gate, stream};
use serde_json::{Value, json};

#[tokio::test]
async fn an_agent_answers_and_its_task_knows_what_that_cost() {
    let devops = Agent { system: "You are a DevOps agent.".into(), ..agent("devops") };
    let stage = Stage::new([devops], |_, _| says("Nothing to do.")).await;
    let (id, answer) = stage.answer("Look around.").await;
    assert_eq!(answer, "Nothing to do.");
    let asked = stage.server.only();
    assert!(asked.texts("system")[0].starts_with("You are a DevOps agent.\n\n"), "{:?}", asked.texts("system"));
    assert_eq!(asked.said(), ["Look around."]);
    assert!(asked.standing().contains("Goal: Look around."));
    let task = stage.client.task(id).await.expect("the task");
    let usage = task.usage.expect("usage");
    assert_eq!(
        (&usage["steps"], &usage["input_tokens"], &usage["output_tokens"]),
        (&json!(1), &json!(11), &json!(3))
    );
    let progress = task.progress.expect("progress");
    assert_eq!((progress.status.as_str(), progress.total_step), ("completed", 20));
    let state = stage.state(id).await;
    assert_eq!((state.goal.as_str(), state.budget.max_steps), ("Look around.", 20));
}

#[tokio::test]
async fn the_plan_and_the_facts_are_in_the_state_and_in_the_next_request() {
    let stage = Stage::new([agent("a")], |turn, asked| match turn {
        0 => calls(&[
            ("update_plan", json!({"plan": ["look", "clean"], "current_step": "look"})),
            ("remember", json!({"key": "disk", "value": "97 %", "source": "df"})),
        ]),
        1 => {
            let standing = asked.standing();
            for part in ["1. look\n2. clean", "Current step: look", "- disk: 97 % (df)"] {
                assert!(standing.contains(part), "{standing}");
            }
            calls(&[
                ("update_plan", json!({"plan": ["clean"]})),
                ("remember", json!({"key": "disk", "value": 12})),
            ])
        }
        _ => says("Done."),
    })
    .await;
    let (id, _) = stage.answer("Free the disk.").await;
    let state = stage.state(id).await;
    assert_eq!((state.plan.as_slice(), state.current_step.as_str()), (["clean".to_owned()].as_slice(), "clean"));
    assert_eq!(state.known_facts.len(), 1);
    assert_eq!((&state.known_facts[0].value, state.known_facts[0].source.as_str()), (&json!(12), "agent"));
    let patched = stage.events(id).await.into_iter().filter(|event| event.kind == "state.patched").count();
    assert_eq!(patched, 5, "the state it began with, and each change");
}

#[tokio::test]
async fn a_model_is_told_what_was_wrong_with_its_call_and_goes_on() {
    let ledger = Ledger::default();
    let schema = json!({"type": "object", "required": ["path"], "properties": {"path": {"type": "string"}}});
    let action = noting("look", Risk::ReadOnly, &ledger).action;
    let look = AgentTool::new("look", "Looks", schema, action).expect("a tool").risk(Risk::ReadOnly);
    let long = |bytes: usize| "x".repeat(bytes);
    let fact = json!({"key": "log", "value": long(9_000)}).to_string();
    let event = json!({"type": "log.read", "payload": long(70_000)}).to_string();
    let path = json!({"path": long(300_000)}).to_string();
    let wrong: [(&str, &str, &str); 9] = [
        ("wipe", "{}", "There is no tool 'wipe'. Your tools are: look, update_plan, remember"),
        ("remember", &fact, "at most 8192 are accepted. Say it in less"),
        ("publish_event", &event, "at most 65536 are accepted"),
        ("look", &path, "at most 262144 are accepted"),
        ("look", r#"{"path": "/"#, "JSON"),
        ("look", r#"{"path": 7}"#, "path"),
        ("look", "{}", "path"),
        ("update_plan", r#"{"plan": "look"}"#, "plan"),
        ("remember", "[]", "object"),
    ];
    let wrong = wrong.map(|(name, written, word)| (name, written.to_owned(), word));
    let stage = Stage::new([Agent { tools: vec![look], ..agent("a") }], move |turn, asked| {
        if let Some((_, written, word)) = turn.checked_sub(1).and_then(|before| wrong.get(before)) {
            assert!(asked.result().contains(word), "{written}: {}", asked.result());
        }
        match wrong.get(turn) {
            Some((name, written, _)) => calls_raw(&[(name, written)], USAGE),
            None if turn == wrong.len() => calls(&[("look", json!({"path": "/var"}))]),
            None => says("Seen."),
        }
    })
    .await;
    assert_eq!(stage.answer("Look.").await.1, "Seen.");
    assert_eq!(ledger.lines(), [r#"look {"path":"/var"}"#], "only what fitted was run");
    stage.asked().iter().for_each(assert_pairs);
}

#[tokio::test]
async fn tools_that_only_read_run_at_the_same_time() {
    let (one, two) = (Gate::new(), Gate::new());
    // Each ends only when the other has begun.
    let meet = |name: &str, own: &Gate, other: &Gate| {
        let (own, other) = (own.clone(), other.clone());
        let meet = move |_: Value, _| {
            let (own, other) = (own.clone(), other.clone());
            async move {
                own.open();
                other.passed().await;
                Ok(json!("met"))
            }
        };
        AgentTool::function(name, "Meets", anything(), meet).expect("a tool").risk(Risk::ReadOnly)
    };
    let tools = vec![meet("one", &one, &two), meet("two", &two, &one)];
    let stage = Stage::new([Agent { tools, ..agent("a") }], |turn, asked| match turn {
        0 => calls(&[("one", json!({})), ("two", json!({})), ("one", json!({}))]),
        _ => {
            assert_eq!(asked.results(), ["met"; 3]);
            says("Met.")
        }
    })
    .await;
    assert_eq!(stage.answer("Meet.").await.1, "Met.");
}

#[tokio::test]
async fn tools_that_change_something_run_in_the_order_of_the_model() {
    let ledger = Ledger::default();
    let slow = |name: &'static str, risk| {
        let ledger = ledger.clone();
        let work = move |_: Value, _| {
            let ledger = ledger.clone();
            async move {
                ledger.note(format!("{name} begins"));
                tokio::task::yield_now().await;
                ledger.note(format!("{name} ends"));
                Ok(json!(name))
            }
        };
        AgentTool::function(name, "Works", anything(), work).expect("a tool").risk(risk)
    };
    let tools =
        vec![slow("write", Risk::WriteLocal), slow("read", Risk::ReadOnly), slow("send", Risk::ExternalAction)];
    let stage = Stage::new([Agent { tools, ..agent("a") }], |turn, asked| match turn {
        0 => calls(&[("write", json!({})), ("read", json!({})), ("send", json!({}))]),
        _ => {
            assert_eq!(asked.results(), ["write", "read", "send"]);
            says("Done.")
        }
    })
    .await;
    stage.answer("Do it.").await;
    let expected: Vec<String> = ["write", "read", "send"]
        .iter()
        .flat_map(|name| [format!("{name} begins"), format!("{name} ends")])
        .collect();
    assert_eq!(ledger.lines(), expected);
}

#[tokio::test]
async fn a_tool_that_fails_is_told_to_the_model_and_one_that_is_fatal_ends_the_task() {
    let broken = |name: &str| {
        AgentTool::function(name, "Breaks", anything(), |_: Value, _| async {
            Err(TaskError::fatal("no_disk", "there is no disk"))
        })
        .expect("a tool")
    };
    let tools = vec![broken("soft"), broken("hard").fatal()];
    let stage = Stage::new([Agent { tools, ..agent("a") }], |turn, asked| match turn {
        0 => calls(&[("remember", json!({"key": "k", "value": 1})), ("soft", json!({}))]),
        1 => {
            assert!(asked.result().contains("there is no disk"), "{}", asked.result());
            calls(&[("hard", json!({}))])
        }
        _ => says("Never."),
    })
    .await;
    let (id, error) = stage.failure("Break.").await;
    assert_eq!((error.code.as_str(), &error.details["step"]), ("step_failed", &json!("hard")));
    assert_eq!(error.cause.as_ref().expect("a cause").code, "no_disk");
    assert_eq!(error.details["facts"], 1, "what was done is kept: {error:?}");
    assert_eq!(stage.asked().len(), 2);
    assert!(stage.events(id).await.iter().any(|event| event.kind == "agent.error"));
}

#[tokio::test]
async fn a_model_that_repeats_itself_is_stopped() {
    let look = AgentTool::function("look", "Looks", anything(), |_: Value, _| async { Ok(json!("97 %")) })
        .expect("a tool")
        .risk(Risk::ReadOnly);
    let stage =
        Stage::new([Agent { tools: vec![look], ..agent("a") }], |_, _| calls(&[("look", json!({}))])).await;
    let (_, error) = stage.failure("Look.").await;
    assert_eq!((error.code.as_str(), error.retryable), ("stuck", false));
    assert_eq!(error.details["tools"], json!(["look"]));
    assert_eq!(stage.asked().len(), 3);
}

#[tokio::test]
async fn an_empty_answer_is_asked_about_and_three_end_the_task() {
    let stage = Stage::new([agent("a")], |turn, _| says(["", "  ", "Well."][turn])).await;
    assert_eq!(stage.answer("Talk.").await.1, "Well.");
    assert!(stage.asked()[1].said().last().expect("a reminder").contains("empty"));
    let silent = Stage::new([agent("a")], |_, _| says("")).await;
    let (_, error) = silent.failure("Talk.").await;
    assert_eq!((error.code.as_str(), silent.asked().len()), ("empty_answer", 3));
}

#[tokio::test]
async fn a_refusal_ends_the_task_and_says_why() {
    let refusal = provider::delta(json!({"role": "assistant", "refusal": "I will not do that."}));
    let text = format!("{}{}", provider::events(&[refusal]), agent::ending("stop", USAGE));
    let stage = Stage::new([agent("a")], move |_, _| stream(&text)).await;
    let (_, error) = stage.failure("Do harm.").await;
    assert_eq!((error.code.as_str(), error.retryable), ("model_refused", false));
    assert!(error.message.contains("I will not do that."), "{}", error.message);
    let filtered = Stage::new([agent("a")], |_, _| says_for("I", "content_filter", USAGE)).await;
    assert_eq!(filtered.failure("Do harm.").await.1.code, "model_refused");
}

#[tokio::test]
async fn an_answer_that_was_cut_for_its_length_goes_on() {
    let stage = Stage::new([agent("a")], |turn, _| match turn {
        0 => says_for("One, two, ", "length", USAGE),
        1 => says_for("three, ", "length", USAGE),
        _ => says("four."),
    })
    .await;
    assert_eq!(stage.answer("Count.").await.1, "One, two, three, four.");
    let asked = stage.asked();
    assert_eq!(asked[2].texts("assistant"), ["One, two, ", "three, "]);
}

#[tokio::test]
async fn old_turns_are_condensed_when_the_window_fills_and_calls_keep_their_results() {
    const TURNS: usize = 12;
    let talk = AgentTool::function("talk", "Talks", anything(), |arguments: Value, _| async move {
        Ok(json!(format!("{arguments} {}", "blah ".repeat(500))))
    })
    .expect("a tool")
    .risk(Risk::ReadOnly);
    let talker = Agent { tools: vec![talk], context_window: 12_000, ..agent("a") };
    let stage = Stage::new([talker], |turn, _| match turn {
        0..TURNS => calls(&[("talk", json!({"n": turn, "part": 1})), ("talk", json!({"n": turn, "part": 2}))]),
        _ => says("Enough."),
    })
    .await;
    assert_eq!(stage.answer("Talk until it is enough.").await.1, "Enough.");
    let asked = stage.asked();
    asked.iter().for_each(assert_pairs);
    let last = asked.last().expect("asked");
    assert_eq!(last.said()[0], "Talk until it is enough.", "what is wanted stays");
    assert!(last.said()[1].starts_with("Notes on earlier turns"), "{:?}", last.said());
    let results = last.results();
    assert!(results.len() < 2 * TURNS && results.len() >= 2, "{}", results.len());
    assert!(results.last().expect("the newest").starts_with(r#"{"n":11,"part":2}"#));
    // Four bytes are a token by the estimate; the window is for the conversation and all else.
    for asked in &asked {
        assert!(asked.body.to_string().len() / 4 < 12_000, "{}", asked.body.to_string().len());
    }
}
