//! What a task asks of an agent.

use longhaul::TaskError;
use longhaul::state::Budget;
use serde::Deserialize;
use serde_json::Value;

/// What is wanted, and what may be used for it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Order {
    pub(super) goal: String,
    pub(super) budget: Budget,
}

/// An order in its long form; the short one is just the goal.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Long {
    goal: String,
    #[serde(default)]
    budget: Less,
}

/// A budget smaller than the agent's own.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Less {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_steps: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_wall_time_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_llm_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_artifact_bytes_in_context: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_cost_usd: Option<f64>,
}

impl Less {
    /// The smaller of both, for each thing.
    fn of(&self, own: &Budget) -> Budget {
        Budget {
            max_steps: self.max_steps.unwrap_or(u32::MAX).min(own.max_steps),
            max_wall_time_ms: self.max_wall_time_ms.unwrap_or(u64::MAX).min(own.max_wall_time_ms),
            max_llm_tokens: self.max_llm_tokens.unwrap_or(u64::MAX).min(own.max_llm_tokens),
            max_artifact_bytes_in_context: self
                .max_artifact_bytes_in_context
                .unwrap_or(u64::MAX)
                .min(own.max_artifact_bytes_in_context),
            max_cost_usd: match (self.max_cost_usd, own.max_cost_usd) {
                (Some(less), Some(own)) => Some(less.min(own)),
                (less, own) => less.or(own),
            },
        }
    }
}

impl Order {
    /// Reads a task's input. An object with `goal` is the long form; a budget in it can only make the
    /// agent's own smaller. Any other JSON is the goal itself, as text.
    /// Money can only be counted where prices are known.
    pub(super) fn read(input: &Value, own: &Budget, priced: bool) -> Result<Self, TaskError> {
        let bad = |why: String| TaskError::fatal("bad_input", why);
        let order = match input {
            Value::String(goal) => Self { goal: goal.clone(), budget: own.clone() },
            Value::Object(fields) if fields.contains_key("goal") => {
                let long: Long = serde_json::from_value(input.clone()).map_err(|error| {
                    bad(format!(r#"the input must be a text or {{"goal": text, "budget": {{…}}}}: {error}"#))
                })?;
                if long.budget.max_cost_usd.is_some() && !priced {
                    return Err(bad("the budget 'max_cost_usd' cannot be kept: what tokens cost is not known; add \
                                    [agent.price] to the agent's manifest (0 for a model that is free), or leave it out"
                        .to_owned()));
                }
                Self { goal: long.goal, budget: long.budget.of(own) }
            }
            other => Self { goal: other.to_string(), budget: own.clone() },
        };
        if order.goal.trim().is_empty() {
            return Err(bad("the input is empty; say what the agent is to do".to_owned()));
        }
        Ok(order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_order_is_a_text_or_a_goal_with_a_smaller_budget() {
        let own = Budget { max_steps: 20, max_llm_tokens: 100, ..Budget::default() };
        let order = |input: Value| Order::read(&input, &own, false);
        assert_eq!(
            order(json!("Fix it.")).expect("an order"),
            Order { goal: "Fix it.".into(), budget: own.clone() }
        );
        let long = order(json!({"goal": "Fix it.", "budget": {"max_steps": 3, "max_llm_tokens": 1000}}));
        let long = long.expect("an order");
        assert_eq!((long.budget.max_steps, long.budget.max_llm_tokens), (3, 100), "never more than its own");
        assert_eq!(order(json!({"app": "web"})).expect("an order").goal, r#"{"app":"web"}"#);
        assert_eq!(order(json!(" ")).expect_err("nothing to do").code, "bad_input");
        assert_eq!(order(json!({"goal": "x", "bugdet": {}})).expect_err("a typo").code, "bad_input");
    }

    #[test]
    fn a_budget_of_money_is_refused_where_no_prices_are_known() {
        let input = json!({"goal": "x", "budget": {"max_cost_usd": 0.5}});
        let refused = Order::read(&input, &Budget::default(), false).expect_err("nothing can be counted");
        assert_eq!((refused.code.as_str(), refused.retryable), ("bad_input", false));
        assert!(refused.message.contains("[agent.price]"), "{}", refused.message);
        let order = Order::read(&input, &Budget::default(), true).expect("an order");
        assert_eq!(order.budget.max_cost_usd, Some(0.5));
    }
}
