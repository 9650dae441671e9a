//! Agents whose model endpoint misbehaves: the run recovers, or ends with an error that says what was wrong;
//! only what was paid is counted.

mod agent;
mod provider;

use std::time::Duration;

use agent::{Ledger, Stage, agent, calls, calls_text, model, noting, says};
use longhaul::{Risk, State};
use longhaul_agent::Agent;
use longhaul_agent::model::{ModelSettings, Timeouts};
use provider::{Part, Reply, chunk, reply, stream_head, stream_then};
use serde_json::json;

/// What goes wrong first. After it, the model calls a tool, meets the same again, and answers.
async fn recovers(fault: impl Fn() -> Reply + Send + 'static, settings: ModelSettings) {
    let ledger = Ledger::default();
    let tools = vec![noting("make", Risk::WriteLocal, &ledger)];
    let stage = Stage::new([Agent { tools, model: settings, ..agent("a") }], move |turn, _| match turn {
        0 | 2 => fault(),
        1 => calls(&[("make", json!({}))]),
        _ => says("Made."),
    })
    .await;
    let (id, answer) = stage.answer("Make it.").await;
    assert_eq!((answer.as_str(), ledger.lines().len()), ("Made.", 1), "done once");
    let usage = stage.client.task(id).await.expect("the task").usage.expect("usage");
    assert_eq!(
        (&usage["steps"], &usage["input_tokens"], &usage["output_tokens"]),
        (&json!(2), &json!(22), &json!(6))
    );
}

#[tokio::test]
async fn a_run_recovers_from_rate_limits_and_errors_of_the_provider() {
    let body = r#"{"error": {"message": "slow down", "type": "rate_limit_error"}}"#;
    recovers(move || reply("429 Too Many Requests", "retry-after: 0\r\n", body), model("m-1")).await;
    recovers(|| reply("500 Internal Server Error", "", "oops"), model("m-1")).await;
    recovers(|| reply("503 Service Unavailable", "", ""), model("m-1")).await;
}

#[tokio::test]
async fn a_run_recovers_from_connections_and_answers_that_break() {
    recovers(|| vec![Part::Reset], model("m-1")).await;
    recovers(|| vec![Part::Close], model("m-1")).await;
    // Half a tool call, of another tool: it is not run.
    let half = calls_text(&[("make", r#"{"n": "#)]);
    let cut = half.clone();
    recovers(move || stream_then(&cut, Part::Close), model("m-1")).await;
    recovers(move || stream_then(&half, Part::Reset), model("m-1")).await;
    recovers(|| stream_then("data: {\"choices\": [{\"delta\n\n", Part::Close), model("m-1")).await;
    recovers(|| reply("200 OK", "content-type: application/json\r\n", "{\"choices\": "), model("m-1")).await;
}

#[tokio::test]
async fn a_run_recovers_from_silence() {
    let limit = Duration::from_secs(1);
    let timeouts = Timeouts { first_token: limit, silence: limit, ..Timeouts::default() };
    let hasty = || ModelSettings { timeouts, ..model("m-1") };
    recovers(|| vec![Part::Stall], hasty()).await;
    recovers(|| vec![Part::Bytes([stream_head(), chunk(b": hello\n\n")].concat()), Part::Stall], hasty()).await;
}

#[tokio::test]
async fn a_provider_that_stays_away_ends_the_task_with_an_error_of_the_model() {
    let stage = Stage::new([agent("a")], |_, _| reply("500 Internal Server Error", "", "the dog ate it")).await;
    let (id, error) = stage.failure("Talk.").await;
    assert_eq!((error.code.as_str(), error.retryable), ("model_unavailable", false), "{error}");
    assert!(error.message.contains("the dog ate it"), "{error}");
    assert_eq!(error.details["status"], 500);
    assert_eq!(error.details["spent"]["steps"], 0);
    let task = stage.client.task(id).await.expect("the task");
    assert_eq!(task.attempts, 1, "what may help was tried within the call");
    assert!(task.usage.is_none_or(|usage| usage["steps"] == 0), "nothing was paid");
}

#[tokio::test]
async fn what_no_second_try_can_help_ends_the_task_at_once() {
    let refused = r#"{"error": {"message": "no such key", "type": "invalid_request_error"}}"#;
    let unknown = r#"{"error": {"message": "no such model", "code": "model_not_found"}}"#;
    for (status, body, code) in
        [("401 Unauthorized", refused, "model_refused_key"), ("404 Not Found", unknown, "model_not_found")]
    {
        let stage = Stage::new([agent("a")], move |_, _| reply(status, "", body)).await;
        let (_, error) = stage.failure("Talk.").await;
        assert_eq!((error.code.as_str(), stage.asked().len()), (code, 1), "{error}");
    }
}

#[tokio::test]
async fn a_task_that_failed_by_its_model_goes_on_where_it_was_when_it_is_resumed() {
    let ledger = Ledger::default();
    let tools = vec![noting("make", Risk::WriteLocal, &ledger)];
    let stage = Stage::new([Agent { tools, ..agent("a") }], move |turn, _| match turn {
        0 => calls(&[("make", json!({}))]),
        1 => reply("401 Unauthorized", "", ""),
        _ => says("Made."),
    })
    .await;
    let (id, _) = stage.failure("Make it.").await;
    stage.client.resume(id).await.expect("resumed");
    let task = stage.end(id).await;
    assert_eq!((task.state, ledger.lines().len()), (State::Completed, 1), "{:?}", task.error);
    assert_eq!(task.usage.expect("usage")["steps"], 2);
}
