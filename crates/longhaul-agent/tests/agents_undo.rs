//! What agents do to the world and how it is undone; patches of tools; locks.

mod agent;
mod provider;

use agent::{Ledger, Reads, Stage, agent, anything, begins, calls, model, noting, says};
use longhaul::{Risk, State, TaskError};
use longhaul_agent::manifest::agent::UndoPolicy;
use longhaul_agent::{Agent, AgentTool};
use provider::{Asked, Gate, Part, Reply};
use serde_json::{Value, json};

/// An agent that makes things, which can be undone, and has a tool whose failure is the task's.
fn maker(ledger: &Ledger, undo: UndoPolicy) -> Agent {
    let broken = AgentTool::function("broken", "Breaks", anything(), |_: Value, _| async {
        Err(TaskError::fatal("broken", "it broke"))
    });
    let tools = vec![
        noting("make", Risk::WriteLocal, ledger).undo("unmake"),
        noting("unmake", Risk::WriteLocal, ledger),
        broken.expect("a tool").fatal(),
    ];
    Agent { tools, undo, ..agent("maker") }
}

/// Makes two things, and then something else.
fn makes_two(turn: usize, then: Reply) -> Reply {
    match turn {
        0 => calls(&[("make", json!({"n": 1})), ("make", json!({"n": 2}))]),
        _ => then,
    }
}

fn breaks(turn: usize, _: &Asked) -> Reply {
    makes_two(turn, calls(&[("broken", json!({}))]))
}

const MADE: [&str; 2] = [r#"make {"n":1}"#, r#"make {"n":2}"#];
const UNMADE: [&str; 2] = [
    r#"unmake {"arguments":{"n":2},"result":{"ok":"make"}}"#,
    r#"unmake {"arguments":{"n":1},"result":{"ok":"make"}}"#,
];

#[tokio::test]
async fn what_an_agent_did_is_kept_unless_its_undo_is_asked_for() {
    let ledger = Ledger::default();
    let stage = Stage::new([maker(&ledger, UndoPolicy::default())], breaks).await;
    let (id, error) = stage.failure("Make.").await;
    assert_eq!((error.code.as_str(), error.cause.expect("a cause").code.as_str()), ("step_failed", "broken"));
    assert_eq!(ledger.lines(), MADE, "half an investigation is worth keeping");
    let undo = stage.client.undo(id, Some("clean up")).await.expect("accepted").id;
    let undone = stage.end(undo).await;
    assert_eq!((undone.state, undone.undo_of), (State::Completed, Some(id)), "{:?}", undone.error);
    assert_eq!(ledger.lines(), [MADE, UNMADE].concat(), "last first");
    assert_eq!(stage.asked().len(), 2, "no model was asked again");
}

#[tokio::test]
async fn what_other_agents_did_for_an_agent_is_undone_with_it() {
    let ledger = Ledger::default();
    let delegates = vec!["maker".to_owned()];
    let boss =
        Agent { name: "boss".into(), model: model("m-boss"), delegates, ..maker(&ledger, UndoPolicy::default()) };
    let stage = Stage::new([boss, maker(&ledger, UndoPolicy::default())], |_, asked| {
        let is_boss = asked.body["model"] == "m-boss";
        match (is_boss, asked.results().len()) {
            (true, 0) => {
                calls(&[("make", json!({"n": 0})), ("delegate", json!({"agent": "maker", "task": "Make."}))])
            }
            (false, 0) => makes_two(0, says("")),
            _ => says("Made."),
        }
    })
    .await;
    let (id, _) = stage.answer("Make three.").await;
    let undo = stage.client.undo(id, None).await.expect("accepted").id;
    let undone = stage.end(undo).await;
    assert_eq!(undone.state, State::Completed, "{:?}", undone.error);
    let first = r#"unmake {"arguments":{"n":0},"result":{"ok":"make"}}"#;
    assert_eq!(ledger.lines(), [&[r#"make {"n":0}"#][..], &MADE, &UNMADE, &[first]].concat(), "last first");
}

#[tokio::test]
async fn by_its_policy_an_agent_undoes_what_it_did_when_it_fails() {
    let ledger = Ledger::default();
    let policy = UndoPolicy { failed: true, cancelled: false };
    let stage = Stage::new([maker(&ledger, policy)], breaks).await;
    let (id, _) = stage.failure("Make.").await;
    assert_eq!(ledger.lines(), [MADE, UNMADE].concat());
    assert!(stage.events(id).await.iter().any(|event| event.kind == "saga.compensated"));
}

#[tokio::test]
async fn a_cancelled_agent_undoes_what_it_did_by_request_or_policy_only() {
    let policy = UndoPolicy { failed: false, cancelled: true };
    for (policy, by_request, undone) in
        [(UndoPolicy::default(), false, false), (UndoPolicy::default(), true, true), (policy, false, true)]
    {
        let ledger = Ledger::default();
        let thinking = Gate::new();
        let begun = thinking.clone();
        let stage = Stage::new([maker(&ledger, policy)], move |turn, _| {
            if turn == 1 {
                begun.open();
            }
            makes_two(turn, begins("Well", Part::Stall))
        })
        .await;
        let id = stage.begin("Make.").await;
        thinking.passed().await;
        let cancelled = match by_request {
            true => stage.client.cancel_with_undo(id, None).await,
            false => stage.client.cancel(id, None).await,
        };
        cancelled.expect("cancelled");
        assert_eq!(stage.end(id).await.state, State::Cancelled);
        let expected = if undone { [MADE, UNMADE].concat() } else { MADE.to_vec() };
        assert_eq!(ledger.lines(), expected, "{policy:?}, by request: {by_request}");
    }
}

#[tokio::test]
async fn what_undoes_is_not_the_models_to_call() {
    let ledger = Ledger::default();
    let stage = Stage::new([maker(&ledger, UndoPolicy::default())], |turn, asked| match turn {
        0 => {
            assert!(!asked.body["tools"].to_string().contains("unmake"));
            calls(&[("unmake", json!({}))])
        }
        _ => {
            assert!(asked.result().contains("There is no tool 'unmake'"), "{}", asked.result());
            says("Then not.")
        }
    })
    .await;
    stage.answer("Unmake.").await;
    assert!(ledger.lines().is_empty());
}

#[tokio::test]
async fn a_tool_may_change_the_state_beside_its_result() {
    let gives = |name: &str, given: Value| {
        AgentTool::function(name, "Looks", anything(), move |_: Value, _| {
            let given = given.clone();
            async move { Ok(given) }
        })
        .expect("a tool")
        .risk(Risk::ReadOnly)
        .returns_patch()
    };
    let fact = json!({"key": "disk", "value": "97 %", "source": "df"});
    let good =
        gives("good", json!({"result": "nearly full", "patch": {"add_facts": [fact], "current_step": "clean"}}));
    let bad = gives("bad", json!({"result": "x", "patch": {"add_fakts": []}})).attempts(1);
    let stage = Stage::new([Agent { tools: vec![good, bad], ..agent("a") }], |turn, asked| match turn {
        0 => calls(&[("good", json!({}))]),
        1 => {
            assert_eq!(asked.result(), "nearly full");
            assert!(asked.standing().contains("- disk: 97 % (df)"), "{}", asked.standing());
            calls(&[("bad", json!({}))])
        }
        _ => {
            assert!(asked.result().contains("add_fakts"), "{}", asked.result());
            says("Seen.")
        }
    })
    .await;
    let (id, _) = stage.answer("Look.").await;
    let state = stage.state(id).await;
    assert_eq!((state.known_facts.len(), state.current_step.as_str()), (1, "clean"));
}

#[tokio::test]
async fn a_lock_is_held_while_its_tool_runs_and_no_longer() {
    let ledger = Ledger::default();
    let (begun, go_on) = (Gate::new(), Gate::new());
    let work = {
        let (ledger, begun, go_on) = (ledger.clone(), begun.clone(), go_on.clone());
        AgentTool::function("work", "Works", anything(), move |arguments: Value, _| {
            let (ledger, begun, go_on) = (ledger.clone(), begun.clone(), go_on.clone());
            async move {
                ledger.note(format!("begins {}", arguments["who"]));
                begun.open();
                go_on.passed().await;
                ledger.note(format!("ends {}", arguments["who"]));
                Ok(json!("worked"))
            }
        })
        .expect("a tool")
        .lock("disk")
    };
    let stage = Stage::new([Agent { tools: vec![work], ..agent("a") }], |_, asked| match asked.results().len() {
        0 => calls(&[("work", json!({"who": asked.said()[0]}))]),
        _ => says("Worked."),
    })
    .await;
    let first = stage.begin("one").await;
    begun.passed().await;
    let second = stage.begin("two").await;
    let waits = stage.event(second, "task.waiting", 0).await;
    assert_eq!(waits.data["kind"], "lock", "{}", waits.data);
    assert_eq!(ledger.lines(), [r#"begins "one""#]);
    go_on.open();
    for id in [first, second] {
        assert_eq!(stage.end(id).await.state, State::Completed);
    }
    assert_eq!(ledger.lines(), [r#"begins "one""#, r#"ends "one""#, r#"begins "two""#, r#"ends "two""#]);
}
