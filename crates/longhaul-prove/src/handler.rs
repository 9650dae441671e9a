//! The handler that does what a program says, and notes in the ledger what it really does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use longhaul::run::Step as RunStep;
use longhaul::{AgentState, NewTask, Risk, Run, StepContext, TaskError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::ledger::{Call, Ledger, What, World, boot_micros};
use crate::program::{Ends, HANDLER, Op, PAUSES, Program, Step, TRIES};

/// What the handler writes to.
#[derive(Debug)]
pub struct Outside {
    /// What happened.
    pub ledger: Ledger,
    /// What was changed.
    pub world: World,
    /// How many results were made here.
    pub results: AtomicU64,
    /// What tells results of this process from those of others.
    pub own: u64,
}

/// What a step gives: a number that no other call gives, and the tenant's marker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Given {
    /// The number.
    pub result: u64,
    /// The marker.
    pub marker: String,
}

impl Outside {
    /// Of a process of the host.
    pub fn of_host(ledger: Ledger, world: World) -> Self {
        Self { ledger, world, results: AtomicU64::new(0), own: u64::from(std::process::id()) << 40 }
    }

    /// In memory, for all processes of a simulation.
    pub fn in_memory() -> Self {
        let (ledger, world) = (Ledger::in_memory(), World::in_memory());
        Self { ledger, world, results: AtomicU64::new(0), own: 0 }
    }

    /// A number that no other call gives.
    fn new_result(&self) -> u64 {
        let own = self.own | self.results.fetch_add(1, Ordering::Relaxed);
        own ^ (boot_micros().unsigned_abs() << 20)
    }

    /// A step's function.
    async fn act(&self, step: &Step, context: &StepContext, approval: Option<&str>) -> Result<u64, TaskError> {
        let call = call(&step.name, context, approval);
        self.ledger.note(What::Begin(call.clone()))?;
        tokio::time::sleep(Duration::from_millis(step.ms)).await;
        if context.attempt <= step.fails {
            self.ledger.note(What::Failed(call))?;
            return Err(TaskError::retryable("not_yet", "it fails at first"));
        }
        // What may happen again gives another result each time, so that it shows which one was recorded.
        let mut result = self.new_result();
        if step.effect.needs_intent() {
            result = self.world.make(&context.idempotency_key, result)?;
        }
        self.ledger.note(What::Did(call))?;
        Ok(result)
    }

    /// A step's undo.
    async fn undo(&self, step: &Step, context: &StepContext) -> Result<(), TaskError> {
        let call = call(&step.name, context, None);
        self.ledger.note(What::UndoBegin(call.clone()))?;
        tokio::time::sleep(Duration::from_millis(step.ms / 2)).await;
        if step.undo.as_ref().is_some_and(|undo| context.attempt <= undo.fails) {
            self.ledger.note(What::UndoFailed(call))?;
            return Err(TaskError::retryable("not_yet", "the undo fails at first"));
        }
        self.ledger.note(What::Undid(call))?;
        Ok(())
    }

    async fn verify(&self, step: &Step, context: &StepContext) -> Result<Option<u64>, TaskError> {
        let found = self.world.find(&context.idempotency_key)?;
        let call = call(&step.name, context, None);
        self.ledger.note(What::Verified { call, happened: found.is_some() })?;
        Ok(found)
    }
}

fn call(step: &str, context: &StepContext, approval: Option<&str>) -> Call {
    Call {
        task: context.task,
        step: step.to_owned(),
        key: context.idempotency_key.clone(),
        attempt: context.attempt,
        fence: context.fence,
        approval: approval.map(str::to_owned),
    }
}

/// The policy of steps, undos and runs.
pub fn retries() -> longhaul::RetryPolicy {
    longhaul::RetryPolicy { attempts: TRIES, first: PAUSES.0, cap: PAUSES.1, jitter: true }
}

/// Does what the program says.
pub async fn prove(outside: Arc<Outside>, run: Run, program: Program) -> Result<Value, TaskError> {
    for op in &program.ops {
        match op {
            Op::Step(step) => {
                let given = one(&outside, &run, step, &program, None).await?;
                note_given(&outside, &run, step, &given)?;
            }
            Op::Together(steps) => together(&outside, &run, steps, &program).await?,
            Op::Sleep { ms } => run.sleep(Duration::from_millis(*ms)).await?,
            Op::Signal { name } => {
                let marker: String = run.signal(name).await?;
                check_marker(&program, &marker)?;
            }
            Op::Ask => {
                run.ask(format!("Which way, {}?", program.marker)).await?;
            }
            Op::Dangerous { step, amount } => {
                let approval = run
                    .approve(format!("Do {}", step.name), Risk::ExternalAction)
                    .arguments(&json!({"amount": amount}))
                    .key(step.name.clone())
                    .step(step.name.clone())
                    .await?;
                let given = one(&outside, &run, step, &program, Some(&approval.id)).await?;
                note_given(&outside, &run, step, &given)?;
            }
            Op::Child(child) => {
                let child = run.spawn(NewTask::new(HANDLER, child)).await?;
                let result: Value = run.join(child).await?;
                check_marker(&program, result["marker"].as_str().unwrap_or_default())?;
            }
            Op::Publish => run.publish("prove.passed", &json!({"marker": program.marker})).await?,
            Op::Locked { lock, step } => {
                let held = run.lock(lock.clone()).await?;
                let (task, fence, name) = (run.id(), run.fence(), step.name.clone());
                let token = held.token();
                outside.ledger.note(What::Locked { task, fence, step: name, lock: lock.clone(), token })?;
                let given = one(&outside, &run, step, &program, None).await?;
                note_given(&outside, &run, step, &given)?;
                let held = held.release().await?;
                outside.ledger.note(What::Released { task, lock: lock.clone(), held })?;
            }
            Op::Note => run.begin_state(AgentState { goal: "0".to_owned(), ..AgentState::default() }).await?,
            Op::Tell { count, bytes, every_ms } => tell(&run, &program.marker, *count, *bytes, *every_ms).await?,
        }
    }
    match program.ends {
        Ends::Badly { runs } if run.attempts() < runs => {
            Err(TaskError::retryable("bad", "it ends badly at first"))
        }
        Ends::Fatally => Err(TaskError::fatal("fatal", "it ends badly")),
        _ => Ok(json!({"marker": program.marker, "number": program.number})),
    }
}

/// Tells of itself, for readers.
async fn tell(run: &Run, marker: &str, count: u64, bytes: usize, every_ms: u64) -> Result<(), TaskError> {
    let text = "x".repeat(bytes);
    for number in 0..count {
        run.publish("prove.told", &json!({"marker": marker, "number": number, "text": text})).await?;
        tokio::time::sleep(Duration::from_millis(every_ms)).await;
    }
    Ok(())
}

fn check_marker(program: &Program, marker: &str) -> Result<(), TaskError> {
    if marker == program.marker {
        return Ok(());
    }
    Err(TaskError::fatal("foreign", format!("{marker:?} came to {}", program.marker)))
}

fn note_given(outside: &Outside, run: &Run, step: &Step, given: &Given) -> Result<(), TaskError> {
    let (task, fence, step) = (run.id(), run.fence(), step.name.clone());
    outside.ledger.note(What::Given { task, fence, step, result: given.result })?;
    Ok(())
}

fn one<'a>(
    outside: &Arc<Outside>,
    run: &'a Run,
    step: &'a Step,
    program: &Program,
    approval: Option<&str>,
) -> RunStep<'a, Given> {
    let given = |result, marker: &str| Given { result, marker: marker.to_owned() };
    let (acting, marker, approval) = (Arc::clone(outside), program.marker.clone(), approval.map(str::to_owned));
    let mut made = run
        .step_with(step.name.clone(), move |context: StepContext| {
            let (acting, marker, approval) = (Arc::clone(&acting), marker.clone(), approval.clone());
            async move { acting.act(step, &context, approval.as_deref()).await.map(|result| given(result, &marker)) }
        })
        .effect(step.effect)
        .retry(retries())
        .deferred(step.deferred);
    if step.verify {
        let (verifying, marker) = (Arc::clone(outside), program.marker.clone());
        made = made.verify(move |context: StepContext| {
            let (verifying, marker) = (Arc::clone(&verifying), marker.clone());
            async move {
                let found = verifying.verify(step, &context).await?;
                Ok::<_, TaskError>(found.map(|result| given(result, &marker)))
            }
        });
    }
    if step.undo.is_some() {
        let (undoing, step) = (Arc::clone(outside), step.clone());
        made = made
            .undo_with(move |context, _: Given| {
                let (undoing, step) = (Arc::clone(&undoing), step.clone());
                async move { undoing.undo(&step, &context).await }
            })
            .undo_retry(retries());
    }
    made
}

/// Steps side by side; all are waited for, and the first error in their order counts.
async fn together(outside: &Arc<Outside>, run: &Run, steps: &[Step], program: &Program) -> Result<(), TaskError> {
    let mut waiting: Vec<_> =
        steps.iter().map(|step| (step, IntoFuture::into_future(one(outside, run, step, program, None)))).collect();
    let mut outcomes: Vec<Option<Result<Given, TaskError>>> = waiting.iter().map(|_| None).collect();
    std::future::poll_fn(|cx| {
        for ((_, step), outcome) in waiting.iter_mut().zip(&mut outcomes) {
            if outcome.is_none()
                && let std::task::Poll::Ready(done) = step.as_mut().poll(cx)
            {
                *outcome = Some(done);
            }
        }
        if outcomes.iter().all(Option::is_some) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    for (step, outcome) in steps.iter().zip(outcomes) {
        // All are there by now.
        let Some(outcome) = outcome else { continue };
        note_given(outside, run, step, &outcome?)?;
    }
    Ok(())
}
