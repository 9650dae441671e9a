//! The agent's state and the patches that change it. Pure: the stores apply patches, this says how.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What an agent knows about its task: small, readable by people and by other agents.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentState {
    /// What is to be reached.
    pub goal: String,
    /// What must be respected.
    pub constraints: Constraints,
    /// What may be used.
    pub budget: Budget,
    /// What is to be done, in order.
    pub plan: Vec<String>,
    /// The entry of the plan being worked on.
    pub current_step: String,
    /// What was found out, oldest first.
    pub known_facts: Vec<Fact>,
    /// What has to be asked.
    pub open_questions: Vec<String>,
    /// Large results kept elsewhere.
    pub artifacts: Vec<ArtifactRef>,
    /// Warnings: `budget_pressure`, …
    pub risk_flags: Vec<String>,
}

/// Rules the agent keeps to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Constraints {
    /// When a person must be asked first.
    pub human_in_the_loop: HumanInTheLoop,
}

/// When a person must be asked first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HumanInTheLoop {
    /// Tools of these risk levels run only with an approval.
    pub required_for_risk_levels: Vec<String>,
}

impl Default for HumanInTheLoop {
    fn default() -> Self {
        Self { required_for_risk_levels: vec!["write_local".to_owned(), "external_action".to_owned()] }
    }
}

/// What an agent may use up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Budget {
    /// Iterations of the loop.
    pub max_steps: u32,
    /// Running time; waiting for people is not counted.
    pub max_wall_time_ms: u64,
    /// Tokens of all model calls.
    pub max_llm_tokens: u64,
    /// Bytes of artifacts and facts one model call may see.
    pub max_artifact_bytes_in_context: u64,
    /// Money, when prices are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cost_usd: Option<f64>,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            max_steps: 20,
            max_wall_time_ms: 300_000,
            max_llm_tokens: 200_000,
            max_artifact_bytes_in_context: 8_000,
            max_cost_usd: None,
        }
    }
}

/// Something known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fact {
    /// About what.
    pub key: String,
    /// What.
    pub value: Value,
    /// From where.
    #[serde(default)]
    pub source: String,
}

/// A large result kept outside the state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArtifactRef {
    /// Its id.
    pub artifact_id: String,
    /// What it is: `tool_result.logs`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// What is in it, in a sentence.
    pub summary: String,
    /// How large it is.
    pub bytes: u64,
    /// The entry of the plan it belongs to.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub step: String,
}

/// A question and its answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resolved {
    /// The question, as it stands in `open_questions`.
    pub question: String,
    /// The answer.
    pub answer: String,
}

/// A change of an [`AgentState`]. Every field is optional; an unknown one is an error.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StatePatch {
    /// Sets the goal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub set_goal: Option<String>,
    /// Adds facts; one with a known key replaces the old one and counts as fresh.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub add_facts: Vec<Fact>,
    /// Sets the whole plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replace_plan: Option<Vec<String>>,
    /// Sets the current step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub current_step: Option<String>,
    /// Adds questions not yet open.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub add_questions: Vec<String>,
    /// Closes questions; each answer becomes a fact with the question as its key.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub resolve_questions: Vec<Resolved>,
    /// Adds artifacts; one with a known id replaces the old one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub add_artifacts: Vec<ArtifactRef>,
    /// Raises flags not yet raised.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub add_risk_flags: Vec<String>,
    /// Lowers flags.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub remove_risk_flags: Vec<String>,
}

/// How a task's state changes.
#[derive(Clone, Debug, PartialEq)]
pub enum StateChange {
    /// It begins with this.
    Begin(AgentState),
    /// It is patched.
    Patch(StatePatch),
}

impl From<StatePatch> for StateChange {
    fn from(patch: StatePatch) -> Self {
        Self::Patch(patch)
    }
}

impl AgentState {
    /// Makes a change. The same change twice gives the same state as once.
    pub fn change(&mut self, change: &StateChange) {
        match change {
            StateChange::Begin(state) => self.begin(state),
            StateChange::Patch(patch) => self.apply(patch),
        }
    }

    /// Begins with `state`. What others patched before that stays: they know more than who began it.
    fn begin(&mut self, state: &AgentState) {
        let known = std::mem::replace(self, state.clone());
        self.apply(&StatePatch {
            set_goal: Some(known.goal).filter(|goal| !goal.is_empty()),
            add_facts: known.known_facts,
            replace_plan: Some(known.plan).filter(|plan| !plan.is_empty()),
            current_step: Some(known.current_step).filter(|step| !step.is_empty()),
            add_questions: known.open_questions,
            resolve_questions: Vec::new(),
            add_artifacts: known.artifacts,
            add_risk_flags: known.risk_flags,
            remove_risk_flags: Vec::new(),
        });
    }

    /// Applies `patch`. Applying the same patch twice gives the same state as once.
    pub fn apply(&mut self, patch: &StatePatch) {
        if let Some(goal) = &patch.set_goal {
            self.goal.clone_from(goal);
        }
        if let Some(plan) = &patch.replace_plan {
            self.plan.clone_from(plan);
        }
        if let Some(step) = &patch.current_step {
            self.current_step.clone_from(step);
        }
        for fact in &patch.add_facts {
            self.learn(fact.clone());
        }
        for question in &patch.add_questions {
            push_new(&mut self.open_questions, question);
        }
        for resolved in &patch.resolve_questions {
            self.open_questions.retain(|open| *open != resolved.question);
            self.learn(Fact {
                key: resolved.question.clone(),
                value: Value::String(resolved.answer.clone()),
                source: "answer".to_owned(),
            });
        }
        for artifact in &patch.add_artifacts {
            self.artifacts.retain(|known| known.artifact_id != artifact.artifact_id);
            self.artifacts.push(artifact.clone());
        }
        for flag in &patch.add_risk_flags {
            push_new(&mut self.risk_flags, flag);
        }
        self.risk_flags.retain(|flag| !patch.remove_risk_flags.contains(flag));
    }

    fn learn(&mut self, fact: Fact) {
        self.known_facts.retain(|known| known.key != fact.key);
        self.known_facts.push(fact);
    }
}

fn push_new(list: &mut Vec<String>, entry: &str) {
    if !list.iter().any(|known| known == entry) {
        list.push(entry.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn the_default_state_has_the_names_and_nesting_others_rely_on() {
        let mut state = AgentState { goal: "Deploy X".into(), ..AgentState::default() };
        state.artifacts.push(ArtifactRef {
            artifact_id: "log_123".into(),
            kind: "tool_result.logs".into(),
            summary: "nginx error log".into(),
            bytes: 48231,
            step: String::new(),
        });
        assert_eq!(
            serde_json::to_value(&state).expect("states serialise"),
            json!({
                "goal": "Deploy X",
                "constraints": {"human_in_the_loop": {"required_for_risk_levels": ["write_local", "external_action"]}},
                "budget": {"max_steps": 20, "max_wall_time_ms": 300000, "max_llm_tokens": 200000,
                           "max_artifact_bytes_in_context": 8000},
                "plan": [], "current_step": "", "known_facts": [], "open_questions": [],
                "artifacts": [{"artifact_id": "log_123", "type": "tool_result.logs",
                               "summary": "nginx error log", "bytes": 48231}],
                "risk_flags": []
            })
        );
    }

    #[test]
    fn a_state_begins_with_what_is_given_and_keeps_what_others_patched_before() {
        let mut begins = AgentState { goal: "fix it".into(), plan: vec!["look".into()], ..AgentState::default() };
        begins.budget.max_steps = 7;
        let mut state = AgentState::default();
        let begin = StateChange::Begin(begins.clone());
        state.change(&begin);
        assert_eq!(state, begins);
        let mut state = AgentState::default();
        let early = StatePatch { set_goal: Some("wait".into()), ..StatePatch::default() };
        state.change(&early.into());
        state.change(&begin);
        state.change(&begin);
        assert_eq!(state, AgentState { goal: "wait".into(), ..begins });
    }

    #[test]
    fn an_unknown_field_in_a_patch_is_an_error() {
        assert!(serde_json::from_value::<StatePatch>(json!({"add_fact": []})).is_err());
    }

    #[test]
    fn an_answered_question_is_closed_and_becomes_a_fact() {
        let mut state = AgentState { open_questions: vec!["Which namespace?".into()], ..AgentState::default() };
        state.apply(&StatePatch {
            resolve_questions: vec![Resolved { question: "Which namespace?".into(), answer: "shop".into() }],
            ..StatePatch::default()
        });
        assert!(state.open_questions.is_empty());
        assert_eq!(state.known_facts[0].value, json!("shop"));
    }

    fn any_patch() -> impl Strategy<Value = StatePatch> {
        let word = || proptest::sample::select(vec!["a", "b", "c"]).prop_map(str::to_owned);
        let words = || proptest::collection::vec(word(), 0..3);
        let maybe = || proptest::option::of(word());
        let plan = proptest::option::of(words());
        let lists = (words(), words(), words(), words(), words(), words());
        (maybe(), maybe(), plan, lists).prop_map(|(set_goal, current_step, replace_plan, lists)| {
            let (facts, add_questions, resolved, artifacts, add_risk_flags, remove_risk_flags) = lists;
            let fact = |key: String| Fact { value: json!(key), key, source: "t".into() };
            let answer = |question: String| Resolved { answer: format!("so {question}"), question };
            let artifact = |id: String| ArtifactRef {
                artifact_id: id.clone(),
                kind: "tool_result.logs".into(),
                summary: format!("the logs of {id}"),
                bytes: 7,
                step: id,
            };
            StatePatch {
                set_goal,
                add_facts: facts.into_iter().map(fact).collect(),
                replace_plan,
                current_step,
                add_questions,
                resolve_questions: resolved.into_iter().map(answer).collect(),
                add_artifacts: artifacts.into_iter().map(artifact).collect(),
                add_risk_flags,
                remove_risk_flags,
            }
        })
    }

    proptest! {
        #[test]
        fn a_patch_applied_twice_is_a_patch_applied_once(patches in proptest::collection::vec(any_patch(), 0..5)) {
            let mut once = AgentState::default();
            for patch in &patches { once.apply(patch); }
            let mut twice = once.clone();
            if let Some(last) = patches.last() { twice.apply(last); }
            prop_assert_eq!(once, twice);
        }

        #[test]
        fn a_patch_survives_its_stored_form(patch in any_patch()) {
            let text = serde_json::to_string(&patch).expect("patches serialise");
            prop_assert_eq!(serde_json::from_str::<StatePatch>(&text).expect("and parse"), patch);
        }
    }
}
