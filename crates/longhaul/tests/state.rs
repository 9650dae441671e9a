//! The state a task begins with.

mod common;

use common::{Bed, at_once};
use longhaul::state::Budget;
use longhaul::{AgentState, CheckpointPolicy, NewTask, Run, State, StatePatch, TaskError, Worker, WorkerHandle};
use serde_json::json;

on_every_store!(
    a_task_begins_its_state_once,
    what_others_patched_before_the_state_began_stays,
    a_fork_and_an_undo_have_the_state,
);

fn beginning(goal: &str) -> AgentState {
    let mut state = AgentState { goal: goal.to_owned(), ..AgentState::default() };
    state.budget = Budget { max_steps: 7, ..Budget::default() };
    state.constraints.human_in_the_loop.required_for_risk_levels = vec!["external_action".to_owned()];
    state
}

/// Begins its state in every run, before and after its checkpoint; stumbles once.
async fn agent(run: Run, goal: String) -> Result<AgentState, TaskError> {
    let policy = CheckpointPolicy::default();
    let resumed = run.resume::<u32>(1, policy).await?;
    run.begin_state(beginning(&goal)).await?;
    if run.state().goal.is_empty() {
        return Err(TaskError::fatal("no_goal", "the state is not known"));
    }
    if resumed.is_none() {
        run.step("make", || async { Ok::<_, TaskError>(1) })
            .undo(|_: u32| async { Ok::<_, TaskError>(()) })
            .await?;
        run.patch(StatePatch { add_questions: vec!["why?".into()], ..StatePatch::default() }).await?;
        run.checkpoint(1, 1, &1, policy).await?;
    }
    run.begin_state(beginning("another")).await?;
    run.step("more", || async { Ok::<_, TaskError>(1) }).await?;
    if run.attempts() == 0 {
        return Err(TaskError::retryable("stumble", "once"));
    }
    Ok(run.state())
}

async fn start(bed: &Bed) -> WorkerHandle {
    Worker::new(&bed.client).retry(at_once(3)).handler("agent", agent).start().await.expect("starts")
}

async fn a_task_begins_its_state_once(bed: Bed) {
    let worker = start(&bed).await;
    let id = bed.client.submit(NewTask::new("agent", &"fix it")).await.expect("accepted").id;
    let task = bed.ended(id).await;
    assert_eq!(task.state, State::Completed, "{:?}", task.error);
    let (_, state) = bed.client.state(id).await.expect("the store answers").expect("a state");
    let wanted = AgentState { open_questions: vec!["why?".into()], ..beginning("fix it") };
    assert_eq!(state, wanted);
    assert_eq!(serde_json::from_str::<AgentState>(task.result.expect("a result").get()).expect("one"), wanted);
    let events = bed.events(id).await;
    let told: Vec<_> = events.iter().filter(|event| event.kind == "state.patched").collect();
    let begun: Vec<_> = told.iter().filter(|event| !event.data["state"].is_null()).collect();
    assert_eq!(begun.len(), 1);
    assert_eq!(
        (&begun[0].data["version"], &begun[0].data["state"]["budget"]["max_steps"]),
        (&json!(1), &json!(7))
    );
    let versions: Vec<u64> = told.iter().filter_map(|event| event.data["version"].as_u64()).collect();
    assert_eq!(versions, (1..=versions.len() as u64).collect::<Vec<_>>());
    worker.stop().await;
}

async fn what_others_patched_before_the_state_began_stays(bed: Bed) {
    bed.client.announce(&["agent"]).await.expect("known");
    let id = bed.client.submit(NewTask::new("agent", &"fix it")).await.expect("accepted").id;
    let early = StatePatch { set_goal: Some("look only".into()), ..StatePatch::default() };
    bed.client.patch_state(id, early, None).await.expect("patched");
    let worker = start(&bed).await;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    let (_, state) = bed.client.state(id).await.expect("the store answers").expect("a state");
    assert_eq!((state.goal.as_str(), state.budget.max_steps), ("look only", 7));
    worker.stop().await;
}

async fn a_fork_and_an_undo_have_the_state(bed: Bed) {
    let worker = start(&bed).await;
    let id = bed.client.submit(NewTask::new("agent", &"fix it")).await.expect("accepted").id;
    assert_eq!(bed.ended(id).await.state, State::Completed);
    let state = bed.client.state(id).await.expect("the store answers");
    let fork = bed.client.fork(id, "more", None).await.expect("accepted").id;
    let task = bed.ended(fork).await;
    assert_eq!(task.state, State::Completed, "{:?}", task.error);
    let (_, forked) = bed.client.state(fork).await.expect("the store answers").expect("a state");
    assert_eq!(forked.budget.max_steps, 7);
    let undo = bed.client.undo(id, None).await.expect("accepted").id;
    assert_eq!(bed.client.state(undo).await.expect("the store answers"), state);
    assert_eq!(bed.ended(undo).await.state, State::Completed);
    worker.stop().await;
}
