//! What the loop remembers and has spent; a checkpoint is a snapshot of it. Pure: no I/O.

use longhaul::TaskError;
use longhaul::state::Budget;
use serde::{Deserialize, Serialize};

use crate::manifest::agent::Price;
use crate::model::{Message, Usage};

/// The form of [`Memory`] in checkpoints.
pub(super) const VERSION: u32 = 1;
/// A warning is given when so much of a budget is gone, in percent.
const PRESSURE_PERCENT: f64 = 80.0;
/// The same call with the same result, so many times in a row, is a loop.
const STUCK_AFTER: u32 = 3;
/// Excerpts are kept of so many artifacts, the newest.
const MAX_EXCERPTS: usize = 16;

/// What the loop remembers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Memory {
    /// The conversation, old turns condensed.
    pub(super) messages: Vec<Message>,
    /// Turns so far; the number of the one under way.
    pub(super) iteration: u32,
    /// What was used up.
    pub(super) spent: Spent,
    /// Excerpts of the newest artifacts, by id, oldest first.
    pub(super) excerpts: Vec<(String, String)>,
    /// What was called last with which result, and how often in a row.
    last: Option<(String, u32)>,
    /// A warning was given that a budget is nearly used up.
    pub(super) pressed: bool,
    /// Answers in a row that said nothing.
    pub(super) silences: u32,
    /// The beginning of a final answer that was cut.
    pub(super) cut: String,
    /// When the last checkpoint was taken, in turns, and how large it was.
    pub(super) kept: (u32, usize),
    /// Bytes of messages since then.
    pub(super) grown: usize,
}

/// What an agent and its children have used up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Spent {
    /// Model calls.
    pub(super) steps: u32,
    /// Running time of model and tool calls; waiting for people is not counted.
    pub(super) wall_time_ms: u64,
    pub(super) input_tokens: u64,
    pub(super) output_tokens: u64,
    /// Dollars, when prices are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cost_usd: Option<f64>,
}

impl Spent {
    pub(super) fn tokens(&self) -> u64 {
        self.input_tokens.saturating_add(self.output_tokens)
    }

    /// Settles one model call. What a provider counts may be anything: sums end at the largest number.
    pub(super) fn settle(&mut self, usage: &Usage, took_ms: u64, price: Option<&Price>) {
        self.steps = self.steps.saturating_add(1);
        self.wall_time_ms = self.wall_time_ms.saturating_add(took_ms);
        self.input_tokens = self.input_tokens.saturating_add(usage.input_tokens);
        self.output_tokens = self.output_tokens.saturating_add(usage.output_tokens);
        if let Some(price) = price {
            let cost = usage.input_tokens as f64 * price.input_per_mtok
                + usage.output_tokens as f64 * price.output_per_mtok;
            *self.cost_usd.get_or_insert(0.0) += cost / 1e6;
        }
    }

    /// Adds what a child has used.
    pub(super) fn add(&mut self, child: &Self) {
        self.steps = self.steps.saturating_add(child.steps);
        self.wall_time_ms = self.wall_time_ms.saturating_add(child.wall_time_ms);
        self.input_tokens = self.input_tokens.saturating_add(child.input_tokens);
        self.output_tokens = self.output_tokens.saturating_add(child.output_tokens);
        if let Some(cost) = child.cost_usd {
            *self.cost_usd.get_or_insert(0.0) += cost;
        }
    }

    /// Reserves a model call of about `input` tokens: how long its answer may be, or which budget does not
    /// allow it.
    pub(super) fn reserve(&self, input: u64, budget: &Budget, price: Option<&Price>) -> Result<u64, TaskError> {
        let exhausted = |name: &str, used: String, most: String| {
            let message = format!("the budget is used up: {name} is {most}, used are {used}");
            Err(TaskError::fatal("budget_exhausted", message).detail("budget", name))
        };
        if self.steps >= budget.max_steps {
            return exhausted("max_steps", self.steps.to_string(), budget.max_steps.to_string());
        }
        if self.wall_time_ms >= budget.max_wall_time_ms {
            let (used, most) = (self.wall_time_ms.to_string(), budget.max_wall_time_ms.to_string());
            return exhausted("max_wall_time_ms", used, most);
        }
        let left = budget.max_llm_tokens.saturating_sub(self.tokens());
        if left <= input {
            let used = format!("{}, and the next call needs about {input} more", self.tokens());
            return exhausted("max_llm_tokens", used, budget.max_llm_tokens.to_string());
        }
        let mut answer = left - input;
        if let (Some(most), Some(price)) = (budget.max_cost_usd, price) {
            let left = most - self.cost_usd.unwrap_or(0.0) - input as f64 * price.input_per_mtok / 1e6;
            if left <= 0.0 {
                let used = format!("{:.4}", self.cost_usd.unwrap_or(0.0));
                return exhausted("max_cost_usd", used, most.to_string());
            }
            if price.output_per_mtok > 0.0 {
                // A float too large becomes the largest number.
                answer = answer.min((left / price.output_per_mtok * 1e6) as u64);
            }
        }
        match answer {
            0 => exhausted("max_cost_usd", "all of it".to_owned(), "that".to_owned()),
            answer => Ok(answer),
        }
    }

    /// Whether so much of some budget is gone that people should know.
    pub(super) fn presses(&self, budget: &Budget) -> bool {
        let gone = |used: f64, most: f64| used >= most * PRESSURE_PERCENT / 100.0;
        gone(self.steps.into(), budget.max_steps.into())
            || gone(self.wall_time_ms as f64, budget.max_wall_time_ms as f64)
            || gone(self.tokens() as f64, budget.max_llm_tokens as f64)
            || budget.max_cost_usd.is_some_and(|most| gone(self.cost_usd.unwrap_or(0.0), most))
    }
}

impl Memory {
    pub(super) fn new(goal: &str) -> Self {
        let mut memory = Self::default();
        memory.hear(goal.to_owned());
        memory
    }

    /// Adds what a person said.
    pub(super) fn hear(&mut self, text: String) {
        self.add(Message::User { text });
    }

    /// Adds to the conversation.
    pub(super) fn add(&mut self, message: Message) {
        self.grown += size(&message);
        self.messages.push(message);
    }

    /// Keeps an excerpt, and forgets the oldest.
    pub(super) fn keep_excerpt(&mut self, artifact: &str, excerpt: &str) {
        self.excerpts.retain(|(known, _)| known != artifact);
        self.excerpts.push((artifact.to_owned(), excerpt.to_owned()));
        let surplus = self.excerpts.len().saturating_sub(MAX_EXCERPTS);
        self.excerpts.drain(..surplus);
    }

    pub(super) fn excerpt(&self, artifact: &str) -> Option<&str> {
        self.excerpts.iter().find(|(known, _)| known == artifact).map(|(_, excerpt)| excerpt.as_str())
    }

    /// Notes what was called and what came of it; true when that is a loop.
    pub(super) fn is_stuck(&mut self, turn: String) -> bool {
        let times = match &self.last {
            Some((last, times)) if *last == turn => times + 1,
            _ => 1,
        };
        self.last = Some((turn, times));
        times >= STUCK_AFTER
    }
}

/// Roughly what a message takes in a snapshot.
pub(super) fn size(message: &Message) -> usize {
    const FRAME: usize = 40;
    FRAME
        + match message {
            Message::User { text } => text.len(),
            Message::Assistant { text, tool_calls, .. } => {
                let calls = tool_calls.iter().map(|call| FRAME + call.name.len() + call.arguments.len());
                text.as_deref().map_or(0, str::len) + calls.sum::<usize>()
            }
            Message::ToolResult { content, name, call_id, .. } => content.len() + name.len() + call_id.len(),
        }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn budget() -> Budget {
        Budget { max_steps: 10, max_wall_time_ms: 1_000, max_llm_tokens: 1_000, ..Budget::default() }
    }

    const PRICE: Price = Price { input_per_mtok: 10.0, output_per_mtok: 100.0 };

    #[test]
    fn a_call_that_a_budget_does_not_allow_is_not_made_and_the_error_names_it() {
        let fresh = Spent::default();
        assert_eq!(fresh.reserve(400, &budget(), None).expect("allowed"), 600);
        let name = |spent: &Spent, input, budget: &Budget, price| {
            spent.reserve(input, budget, price).expect_err("used up").details["budget"].clone()
        };
        assert_eq!(name(&fresh, 1_000, &budget(), None), "max_llm_tokens");
        assert_eq!(name(&Spent { steps: 10, ..Spent::default() }, 1, &budget(), None), "max_steps");
        assert_eq!(
            name(&Spent { wall_time_ms: 1_000, ..Spent::default() }, 1, &budget(), None),
            "max_wall_time_ms"
        );
        let poor = Budget { max_cost_usd: Some(0.01), ..budget() };
        assert_eq!(
            name(&Spent { cost_usd: Some(0.01), ..Spent::default() }, 1, &poor, Some(&PRICE)),
            "max_cost_usd"
        );
        assert_eq!(fresh.reserve(100, &poor, Some(&PRICE)).expect("allowed"), 90, "what the money is enough for");
    }

    #[test]
    fn a_budget_presses_at_four_fifths() {
        assert!(!Spent { steps: 7, ..Spent::default() }.presses(&budget()));
        assert!(Spent { steps: 8, ..Spent::default() }.presses(&budget()));
        assert!(Spent { input_tokens: 700, output_tokens: 100, ..Spent::default() }.presses(&budget()));
    }

    #[test]
    fn the_same_call_with_the_same_result_three_times_in_a_row_is_a_loop() {
        let mut memory = Memory::new("x");
        let turns = ["a", "a", "b", "a", "a", "a"].map(|turn| memory.is_stuck(turn.to_owned()));
        assert_eq!(turns, [false, false, false, false, false, true]);
    }

    #[test]
    fn a_provider_that_counts_beyond_all_numbers_uses_the_budget_up() {
        let usage = Usage { input_tokens: u64::MAX, output_tokens: u64::MAX, estimated: false };
        let mut spent = Spent::default();
        spent.settle(&usage, u64::MAX, None);
        spent.settle(&usage, 1, None);
        let child = spent.clone();
        spent.add(&child);
        assert_eq!((spent.tokens(), spent.wall_time_ms), (u64::MAX, u64::MAX));
        let spent = Spent { wall_time_ms: 0, ..spent };
        assert_eq!(spent.reserve(1, &budget(), None).expect_err("nothing is left").code, "budget_exhausted");
        assert!(spent.presses(&budget()));
    }

    proptest! {
        #[test]
        fn what_is_reserved_is_never_more_than_is_left(
            used in 0u64..2_000, input in 0u64..2_000, cost in 0.0f64..2.0, most in 0.0f64..1.0,
        ) {
            let spent = Spent { input_tokens: used, cost_usd: Some(cost), ..Spent::default() };
            let budget = Budget { max_cost_usd: Some(most), ..budget() };
            if let Ok(answer) = spent.reserve(input, &budget, Some(&PRICE)) {
                prop_assert!(used + input + answer <= budget.max_llm_tokens);
                let mut settled = spent.clone();
                let usage = Usage { input_tokens: input, output_tokens: answer, estimated: false };
                settled.settle(&usage, 0, Some(&PRICE));
                prop_assert!(settled.cost_usd.unwrap_or(0.0) <= most + 1e-9);
            }
        }
    }
}
