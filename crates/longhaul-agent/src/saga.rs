//! Runs a saga manifest: its steps in order, those of a group at the same time, each one recorded,
//! and undone by the run when the saga fails.
//!
//! Everything a step or an undo is given comes from the task's input and from recorded results, so
//! a replay gives the same.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;

use futures_util::future::{Either, join_all, select};
use longhaul::{Run, StepContext, TaskError};
use serde_json::{Map, Value, json};
use tokio::sync::watch;
use tokio::task::unconstrained;

use crate::manifest::{Approve, Saga, Step};
use crate::tool::{Call, Tool};

type BoxFuture<T> = Pin<Box<dyn Future<Output = Result<T, TaskError>> + Send>>;

/// The handler of a saga. Its input is any JSON, its result `{"steps": {NAME: {"result"}}}`.
pub fn handler(saga: Saga) -> impl Fn(Run, Value) -> BoxFuture<Value> + Send + Sync + 'static {
    let manifest = Arc::new(saga);
    move |run, input| {
        let manifest = Arc::clone(&manifest);
        Box::pin(async move { perform(&run, &manifest, &input).await })
    }
}

async fn perform(run: &Run, manifest: &Saga, input: &Value) -> Result<Value, TaskError> {
    let total = manifest.steps.len() as u32;
    let mut steps = Map::new();
    for stage_steps in manifest.stages() {
        let stage = Stage {
            run,
            values: Arc::new(json!({"input": input, "steps": steps})),
            total,
            failed: watch::Sender::new(None),
        };
        let first_number = steps.len() as u32 + 1;
        let branches = stage_steps.iter().zip(first_number..).map(|(step, number)| {
            let branch = Branch { stage: &stage, step, number };
            branch.perform()
        });
        let outcomes = join_all(branches).await;
        if let Some(error) = stage.failed.send_replace(None) {
            return Err(error);
        }
        for (step, result) in stage_steps.iter().zip(outcomes) {
            steps.insert(step.name.clone(), json!({"result": result}));
        }
    }
    Ok(json!({"steps": steps}))
}

/// Steps that run at the same time; most stages have one.
struct Stage<'a> {
    run: &'a Run,
    /// What their placeholders refer to.
    values: Arc<Value>,
    total: u32,
    /// The error of the first that failed.
    failed: watch::Sender<Option<TaskError>>,
}

/// One step of a stage.
struct Branch<'a> {
    stage: &'a Stage<'a>,
    step: &'a Step,
    /// Its place among all steps of the saga, from 1.
    number: u32,
}

impl Branch<'_> {
    /// The step's result; none when it failed, or was not begun because another one failed before.
    async fn perform(self) -> Option<Value> {
        let outcome = match &self.step.approve {
            None => self.act().await,
            Some(approve) => match self.ask_unless_failed(approve).await? {
                Ok(()) => self.act().await,
                Err(error) => Err(error.detail("step", self.step.name.clone())),
            },
        };
        match outcome {
            Ok(result) => Some(result),
            Err(error) => {
                self.stage.failed.send_if_modified(|first| {
                    let is_first = first.is_none();
                    first.get_or_insert(error);
                    is_first
                });
                None
            }
        }
    }

    /// `None`: another step failed meanwhile. What is waited for here but the approval itself is
    /// unconstrained, so that it is ready at the same moment in every replay.
    async fn ask_unless_failed(&self, approve: &Approve) -> Option<Result<(), TaskError>> {
        let mut others = self.stage.failed.subscribe();
        let stopped = pin!(unconstrained(others.wait_for(Option::is_some)));
        let approved = pin!(self.ask(approve));
        match select(approved, stopped).await {
            Either::Left((answer, _)) => Some(answer),
            Either::Right(_) => None,
        }
    }

    async fn ask(&self, approve: &Approve) -> Result<(), TaskError> {
        let values = &self.stage.values;
        let mut arguments = self.step.action.describe(values)?;
        arguments["step"] = json!(self.step.name);
        arguments["input"] = values["input"].clone();
        let question = approve.text.render(values)?;
        let run = &self.stage.run;
        let mut approval = run
            .approve(question, approve.risk)
            .key(&self.step.name)
            .step(&self.step.name)
            .arguments(&arguments)
            .definition(&self.step.action.digest());
        if let Some(expires) = approve.expires {
            approval = approval.expires(expires);
        }
        approval.await.map(drop)
    }

    async fn act(&self) -> Result<Value, TaskError> {
        let step = self.step;
        let mut action = caller(&step.action, &self.stage.values);
        let (run, number, total) = (self.stage.run.clone(), self.number, self.stage.total);
        let announced = move |context: StepContext| {
            let message = format!("Step {number} of {total}: {}", context.step);
            run.progress("tool_call", number, total, &message);
            action(context)
        };
        let saga = self.stage.run.saga();
        let mut saga_step = saga
            .step_with(step.name.clone(), announced)
            .attempts(step.attempts)
            .timeout(step.timeout)
            .effect(step.effect);
        if let Some(verify) = &step.verify {
            let mut ask = caller(verify, &self.stage.values);
            saga_step = saga_step.verify(move |context| {
                let asked = ask(context);
                async move { verdict(asked.await?) }
            });
        }
        if let Some(undo) = &step.undo {
            let undo = undoer(undo, &step.name, &self.stage.values);
            saga_step =
                saga_step.undo_with(undo).undo_attempts(step.undo_attempts).undo_timeout(step.undo_timeout);
        }
        saga_step.await
    }
}

/// Calls a tool for every try.
fn caller(tool: &Tool, values: &Arc<Value>) -> impl FnMut(StepContext) -> BoxFuture<Value> + Send + 'static {
    let tool = Arc::new(tool.clone());
    let values = Arc::clone(values);
    move |context| {
        let tool = Arc::clone(&tool);
        let call = Call { values: Arc::clone(&values), body: Arc::clone(&values), context, progress: None };
        Box::pin(async move { tool.run(&call).await })
    }
}

/// Calls an undo with what its step has given. It must not hold the run, which holds it.
fn undoer(
    undo: &Tool,
    name: &str,
    values: &Arc<Value>,
) -> impl FnMut(StepContext, Value) -> BoxFuture<()> + Send + 'static {
    let undo = Arc::new(undo.clone());
    let name = name.to_owned();
    let values = Arc::clone(values);
    move |context, result| {
        let undo = Arc::clone(&undo);
        let mut known = Value::clone(&values);
        known["steps"][&name] = json!({"result": result});
        known["result"] = result;
        let known = Arc::new(known);
        let call = Call { values: Arc::clone(&known), body: known, context, progress: None };
        Box::pin(async move { undo.run(&call).await.map(drop) })
    }
}

/// What a `verify` said: the result of what happened, or that it did not.
pub(crate) fn verdict(said: Value) -> Result<Option<Value>, TaskError> {
    match &said["done"] {
        Value::Bool(true) => Ok(Some(said["result"].clone())),
        Value::Bool(false) => Ok(None),
        _ => Err(TaskError::fatal(
            "bad_verify",
            r#"verify must say {"done": true, "result": …} or {"done": false}; it said neither"#,
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_is_done_not_done_or_none() {
        assert_eq!(verdict(json!({"done": true, "result": 7})).expect("done"), Some(json!(7)));
        assert_eq!(verdict(json!({"done": true})).expect("done"), Some(Value::Null));
        assert_eq!(verdict(json!({"done": false})).expect("not done"), None);
        assert_eq!(verdict(json!("yes")).expect_err("unclear").code, "bad_verify");
    }
}
