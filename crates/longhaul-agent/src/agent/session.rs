//! The loop: think, act, and again, until there is an answer or a reason to stop.

use std::future::{Future, IntoFuture};
use std::pin::pin;

use futures_util::future::{Either, select};
use longhaul::run::{CheckpointPolicy, OnRefused};
use longhaul::state::{AgentState, Constraints, HumanInTheLoop};
use longhaul::{Run, StatePatch, TaskError};
use serde_json::json;

use super::Prepared;
use super::memory::{Memory, VERSION, size};
use super::order::Order;
use crate::manifest::agent::Strategy;
use crate::model::{Answer, Finish, Model};
use crate::tool::Toolbox;

/// The signal that carries clarifying messages.
const MESSAGE: &str = "message";
/// No checkpoint is taken before so many turns have passed since the last.
const CHECKPOINT_TURNS: u32 = 10;
/// A checkpoint is taken when the conversation has grown by this part of what the last one held. So the
/// checkpoints of a task together stay within a few times its conversation, however long that gets.
const CHECKPOINT_GROWTH: usize = 4;
/// Answers in a row that may say nothing.
const MAX_SILENCES: u32 = 3;
/// How much of the last words an error keeps.
const LAST_WORDS_BYTES: usize = 2_000;
pub(super) const BUDGET_PRESSURE: &str = "budget_pressure";

/// Where a task is worked on: everything that does not change while it is.
#[derive(Clone, Copy)]
pub(super) struct Site<'a> {
    pub(super) run: &'a Run,
    pub(super) prepared: &'a Prepared,
    pub(super) toolbox: &'a Toolbox,
    pub(super) model: &'a Model,
}

/// One run of an agent.
pub(super) struct Session<'a> {
    pub(super) site: Site<'a>,
    pub(super) memory: Memory,
    /// What people said while something else was done.
    pub(super) heard: Vec<String>,
}

impl<'a> Session<'a> {
    /// Begins, or goes on from a checkpoint.
    pub(super) async fn open(run: &'a Run, prepared: &'a Prepared, order: &Order) -> Result<Self, TaskError> {
        let toolbox = prepared.toolbox().await?;
        let model = prepared.model().await?;
        let site = Site { run, prepared, toolbox, model };
        let memory = run.resume(VERSION, site.checkpoints()).await?;
        let memory = memory.unwrap_or_else(|| Memory::new(&order.goal));
        let risks = &prepared.agent.human_in_the_loop.required_for_risk_levels;
        let required_for_risk_levels = risks.iter().map(|risk| risk.name().to_owned()).collect();
        run.begin_state(AgentState {
            goal: order.goal.clone(),
            constraints: Constraints { human_in_the_loop: HumanInTheLoop { required_for_risk_levels } },
            budget: order.budget.clone(),
            ..AgentState::default()
        })
        .await?;
        Ok(Self { site, memory, heard: Vec::new() })
    }

    /// Works until there is an answer.
    pub(super) async fn work(&mut self) -> Result<String, TaskError> {
        loop {
            self.memory.iteration += 1;
            let answer = self.think().await?;
            if answer.tool_calls.is_empty() {
                if let Some(text) = self.conclude(&answer)? {
                    return Ok(text);
                }
            } else {
                self.memory.silences = 0;
                self.act(&answer.tool_calls).await?;
            }
            self.keep().await?;
        }
    }

    /// The final answer, unless the model has to go on.
    fn conclude(&mut self, answer: &Answer) -> Result<Option<String>, TaskError> {
        let text = answer.text.as_deref().unwrap_or_default();
        if answer.refusal.is_some() || answer.finish == Finish::Refused {
            let why = answer.refusal.as_deref().unwrap_or("the provider's filter stopped the answer");
            return Err(TaskError::fatal("model_refused", format!("the model refused: {why}")));
        }
        if answer.finish == Finish::Length {
            self.memory.cut.push_str(text);
            self.memory.hear("Your answer was cut for its length. Go on exactly where it ended.".to_owned());
            return Ok(None);
        }
        if text.trim().is_empty() && self.memory.cut.is_empty() {
            self.memory.silences += 1;
            if self.memory.silences >= MAX_SILENCES {
                let message = format!("the model said nothing {MAX_SILENCES} times in a row");
                return Err(TaskError::fatal("empty_answer", message));
            }
            let ask = "Your last answer was empty. Call a tool, or give your final answer.";
            self.memory.hear(ask.to_owned());
            return Ok(None);
        }
        if !self.heard.is_empty() {
            // Someone said something meanwhile: it may change the answer.
            self.memory.cut.clear();
            return Ok(None);
        }
        Ok(Some(std::mem::take(&mut self.memory.cut) + text))
    }

    /// Ends a turn: writes what may have waited for it, and takes a checkpoint when it is time.
    async fn keep(&mut self) -> Result<(), TaskError> {
        let Site { run, .. } = self.site;
        let (taken_at, held) = self.memory.kept;
        let due =
            self.memory.iteration - taken_at >= CHECKPOINT_TURNS && self.memory.grown * CHECKPOINT_GROWTH >= held;
        if due {
            let held = self.memory.messages.iter().map(size).sum();
            self.memory.kept = (self.memory.iteration, held);
            self.memory.grown = 0;
            run.checkpoint(VERSION, self.memory.iteration, &self.memory, self.site.checkpoints()).await
        } else if self.site.strategy() == Strategy::EveryIteration {
            run.flush().await
        } else {
            Ok(())
        }
    }

    pub(super) fn tell_progress(&self, status: &str, tool: Option<&str>, message: &str) {
        let total = self.site.run.state().budget.max_steps;
        self.site.run.progress_with_tool(status, self.memory.iteration, total, tool, message);
    }

    /// Does something while hearing what people say.
    pub(super) async fn listening<T>(&mut self, work: impl Future<Output = T>) -> Result<T, TaskError> {
        listening(self.site.run, &mut self.heard, work).await
    }

    /// Changes the state, if there is anything to change.
    pub(super) async fn patch(&self, patch: StatePatch) -> Result<(), TaskError> {
        match patch == StatePatch::default() {
            true => Ok(()),
            false => self.site.run.patch(patch).await,
        }
    }

    /// The error the task ends with: what was done so far is kept in it.
    pub(super) fn final_error(&self, error: TaskError) -> TaskError {
        let state = self.site.run.state();
        let mut error = error
            .detail("iteration", self.memory.iteration)
            .detail("spent", json!(self.memory.spent))
            .detail("plan", state.plan)
            .detail("facts", state.known_facts.len())
            .detail("artifacts", state.artifacts.len());
        if let Some(last) = self.last_words() {
            error = error.detail("last_words", last);
        }
        let most = self.site.prepared.agent.max_attempts;
        if most.is_some_and(|most| self.site.run.attempts() + 1 >= most) {
            error.retryable = false;
        }
        error
    }

    fn last_words(&self) -> Option<&str> {
        self.memory.messages.iter().rev().find_map(|message| match message {
            crate::model::Message::Assistant { text: Some(text), .. } if !text.is_empty() => {
                Some(crate::artifact::cut_to(text, LAST_WORDS_BYTES))
            }
            _ => None,
        })
    }
}

/// Does something while hearing what people say. What comes is in the task's log before what is done, or
/// after it, and a replay hears it at the same moment.
pub(super) async fn listening<T>(
    run: &Run,
    heard: &mut Vec<String>,
    work: impl Future<Output = T>,
) -> Result<T, TaskError> {
    let mut work = pin!(work);
    loop {
        let said = run.signal::<String>(MESSAGE).into_future();
        match select(work.as_mut(), said).await {
            Either::Left((done, _)) => return Ok(done),
            Either::Right((said, _)) => heard.push(said?),
        }
    }
}

impl Site<'_> {
    pub(super) fn strategy(&self) -> Strategy {
        self.prepared.agent.checkpoint.strategy
    }

    /// Whether records of what may run again can wait.
    pub(super) fn defers(&self) -> bool {
        self.strategy() != Strategy::EveryStep
    }

    fn checkpoints(&self) -> CheckpointPolicy {
        let own = &self.prepared.agent.checkpoint;
        let on_refused = if own.fail_when_refused { OnRefused::Fail } else { OnRefused::GoOn };
        CheckpointPolicy { max_count: own.max_count, max_age: own.max_age, on_refused }
    }
}
