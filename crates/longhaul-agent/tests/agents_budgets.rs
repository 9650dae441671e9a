//! Agents and what they may use up: budgets, what a child shares of them, and delegation.

mod agent;
mod provider;

use std::time::Duration;

use agent::{Ledger, Reads, Stage, USAGE, agent, anything, calls, calls_raw, model, noting, says};
use longhaul::state::Budget;
use longhaul::{Filter, Risk, State, Task, TaskError};
use longhaul_agent::manifest::agent::Price;
use longhaul_agent::{Agent, AgentTool};
use provider::{Asked, Reply};
use serde_json::{Value, json};

/// An agent that notes something and then looks for ever, each time elsewhere.
fn restless(budget: Budget) -> Agent {
    Agent { tools: vec![noting("look", Risk::ReadOnly, &Ledger::default())], budget, ..agent("restless") }
}

fn looks(turn: usize, usage: (u64, u64)) -> Reply {
    let look = format!(r#"{{"n": {turn}}}"#);
    calls_raw(&[("remember", r#"{"key": "disk", "value": "97 %"}"#), ("look", &look)], usage)
}

/// The error says which budget was used up, and what was done is kept.
async fn exhausted(stage: &Stage, budget: &str) -> TaskError {
    let (id, error) = stage.failure("Look everywhere.").await;
    assert_eq!((error.code.as_str(), error.retryable), ("budget_exhausted", false), "{error}");
    assert_eq!(error.details["budget"], budget, "{error}");
    assert!(error.message.contains(budget), "{error}");
    assert_eq!(error.details["facts"], 1, "{error:?}");
    let state = stage.state(id).await;
    assert_eq!(state.known_facts.len(), 1, "what was found out is kept");
    assert_eq!(state.risk_flags, ["budget_pressure"]);
    error
}

#[tokio::test]
async fn no_more_model_calls_are_made_than_steps_are_allowed() {
    let budget = Budget { max_steps: 3, ..Budget::default() };
    let stage = Stage::new([restless(budget)], |turn, _| looks(turn, USAGE)).await;
    let error = exhausted(&stage, "max_steps").await;
    assert_eq!((stage.asked().len(), &error.details["spent"]["steps"]), (3, &json!(3)));
}

#[tokio::test]
async fn running_time_is_a_budget_and_calls_that_fail_cost_it_too() {
    let slow = |fails: bool| {
        AgentTool::function("slow", "Takes its time", anything(), move |_: Value, _| async move {
            tokio::time::sleep(Duration::from_millis(30)).await;
            if fails { Err(TaskError::fatal("no", "no")) } else { Ok(json!("ok")) }
        })
        .expect("a tool")
        .risk(Risk::ReadOnly)
    };
    for fails in [false, true] {
        let budget = Budget { max_wall_time_ms: 30, ..Budget::default() };
        let slow = Agent { tools: vec![slow(fails)], ..restless(budget) };
        let stage = Stage::new([slow], |_, _| {
            calls(&[("remember", json!({"key": "disk", "value": "97 %"})), ("slow", json!({}))])
        })
        .await;
        let (id, error) = stage.failure("Look everywhere.").await;
        assert_eq!(
            (error.code.as_str(), &error.details["budget"]),
            ("budget_exhausted", &json!("max_wall_time_ms"))
        );
        assert_eq!((stage.asked().len(), stage.state(id).await.known_facts.len()), (1, 1));
    }
}

#[tokio::test]
async fn a_tool_call_ends_with_the_budget_of_running_time() {
    let begun = Ledger::default();
    let hangs = {
        let begun = begun.clone();
        AgentTool::function("hangs", "Hangs", anything(), move |_: Value, _| {
            begun.note("begun");
            std::future::pending()
        })
    };
    let hangs = hangs.expect("a tool").risk(Risk::ReadOnly).timeout(Duration::from_secs(3_600)).attempts(5);
    let budget = Budget { max_wall_time_ms: 300, ..Budget::default() };
    let stage =
        Stage::new([Agent { tools: vec![hangs], ..restless(budget) }], |_, _| calls(&[("hangs", json!({}))]))
            .await;
    let (_, error) = stage.failure("Wait.").await;
    assert_eq!((error.code.as_str(), &error.details["budget"]), ("budget_exhausted", &json!("max_wall_time_ms")));
    let spent = error.details["spent"]["wall_time_ms"].as_u64().expect("counted");
    assert!((300..3_000).contains(&spent), "{spent}");
    assert_eq!(begun.lines().len(), 1, "nothing is begun again without time");
}

#[tokio::test]
async fn a_call_that_needs_more_tokens_than_are_left_is_not_made() {
    let budget = Budget { max_llm_tokens: 10_000, ..Budget::default() };
    let stage = Stage::new([restless(budget)], |turn, _| looks(turn, (9_800, 100))).await;
    let error = exhausted(&stage, "max_llm_tokens").await;
    assert_eq!(error.details["spent"]["input_tokens"], 9_800);
    let most = stage.server.only().body["max_tokens"].as_u64().expect("the answer is bounded");
    assert!(most < 10_000, "{most} tokens and the request are more than the budget");
}

#[tokio::test]
async fn money_is_a_budget_when_prices_are_known() {
    let budget = Budget { max_cost_usd: Some(0.2), ..Budget::default() };
    let priced =
        Agent { price: Some(Price { input_per_mtok: 100.0, output_per_mtok: 100.0 }), ..restless(budget) };
    let stage = Stage::new([priced], |turn, _| looks(turn, (1_800, 100))).await;
    let error = exhausted(&stage, "max_cost_usd").await;
    let cost = error.details["spent"]["cost_usd"].as_f64().expect("a cost");
    assert!((cost - 0.19).abs() < 1e-9, "{cost}");
}

#[tokio::test]
async fn a_warning_is_in_the_state_when_four_fifths_are_gone() {
    let budget = Budget { max_steps: 5, ..Budget::default() };
    let stage =
        Stage::new([restless(budget)], |turn, _| if turn < 4 { looks(turn, USAGE) } else { says("Done.") }).await;
    let (id, _) = stage.answer("Look everywhere.").await;
    let flagged: Vec<Value> = stage
        .events(id)
        .await
        .into_iter()
        .filter(|event| event.kind == "state.patched" && event.data.to_string().contains("budget_pressure"))
        .map(|event| event.data)
        .collect();
    assert_eq!(flagged.len(), 1, "told once: {flagged:#?}");
}

/// A boss that may hand work to a helper, and one that nobody runs.
fn team(helper: Agent) -> [Agent; 2] {
    let boss = Agent { delegates: vec!["helper".into(), "ghost".into()], ..agent("boss") };
    [boss, Agent { model: model("m-helper"), ..helper }]
}

fn is_helper(asked: &Asked) -> bool {
    asked.body["model"] == "m-helper"
}

async fn helpers_task(stage: &Stage) -> Task {
    let tasks = stage.client.list(&Filter::default()).await.expect("tasks");
    tasks.into_iter().find(|task| task.handler == "helper").expect("the helper had a task")
}

#[tokio::test]
async fn an_agent_hands_work_to_another_and_counts_what_that_used() {
    let stage = Stage::new(team(agent("helper")), |_, asked| match (is_helper(asked), asked.results().len()) {
        (false, 0) => {
            let tools = asked.body["tools"].to_string();
            assert!(tools.contains(r#""enum":["helper","ghost"]"#), "{tools}");
            calls(&[("delegate", json!({"agent": "helper", "task": "Count the files."}))])
        }
        (false, _) => {
            assert_eq!(asked.result(), "There are 42.");
            says("42 files.")
        }
        (true, 0) => {
            assert_eq!(asked.said(), ["Count the files."], "it knows only what it is told");
            calls(&[("remember", json!({"key": "files", "value": 42}))])
        }
        (true, _) => says("There are 42."),
    })
    .await;
    let (id, answer) = stage.answer("How many files?").await;
    assert_eq!(answer, "42 files.");
    let child = helpers_task(&stage).await;
    assert_eq!((child.parent_id, child.state), (Some(id), State::Completed));
    let usage = |task: Task| task.usage.expect("usage");
    let (own, childs) = (usage(stage.client.task(id).await.expect("a task")), usage(child.clone()));
    assert_eq!((&childs["steps"], &childs["input_tokens"]), (&json!(2), &json!(22)));
    assert_eq!((&own["steps"], &own["input_tokens"], &own["output_tokens"]), (&json!(4), &json!(44), &json!(12)));
    let budget = stage.state(child.id).await.budget;
    assert_eq!(budget.max_steps, 19, "what its parent had left");
    assert_eq!(budget.max_llm_tokens, 200_000 - 14);
}

#[tokio::test]
async fn an_agent_that_may_not_be_asked_or_is_not_there_is_told_to_the_model() {
    let stage = Stage::new(team(agent("helper")), |turn, asked| match turn {
        0 => calls(&[("delegate", json!({"agent": "stranger", "task": "Help."}))]),
        1 => {
            assert!(asked.result().contains("may not delegate to 'stranger'"), "{}", asked.result());
            calls(&[("delegate", json!({"agent": "ghost", "task": "Help."}))])
        }
        _ => {
            assert!(asked.result().contains("ghost"), "{}", asked.result());
            says("Nobody helps.")
        }
    })
    .await;
    assert_eq!(stage.answer("Get help.").await.1, "Nobody helps.");
    assert_eq!(stage.client.list(&Filter::default()).await.expect("tasks").len(), 1);
}

#[tokio::test]
async fn a_helper_that_fails_is_told_to_the_model_and_what_it_used_counts() {
    let budget = Budget { max_steps: 2, ..Budget::default() };
    let helper = Agent { name: "helper".into(), ..restless(budget) };
    let stage = Stage::new(team(helper), |turn, asked| match (is_helper(asked), asked.results().len()) {
        (true, _) => looks(turn, USAGE),
        (false, 0) => calls(&[("delegate", json!({"agent": "helper", "task": "Help."}))]),
        (false, _) => {
            assert!(asked.result().contains("budget"), "{}", asked.result());
            says("It could not.")
        }
    })
    .await;
    let (id, answer) = stage.answer("Get help.").await;
    assert_eq!(answer, "It could not.");
    assert_eq!(helpers_task(&stage).await.state, State::Failed);
    assert_eq!(stage.client.task(id).await.expect("a task").usage.expect("usage")["steps"], 4);
}
