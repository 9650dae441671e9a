//! A tool as an agent has it: what the model is told of it, and the rules by which it is called.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use jsonschema::Validator;
use longhaul::{Effect, Risk, StepContext, TaskError};
use serde_json::{Value, json};

use super::function::Function;
use super::{Tool, schema};
use crate::model::ToolSpec;

/// How long one try may take, unless something else is said.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// Tries in all, unless something else is said.
pub const DEFAULT_ATTEMPTS: u32 = 3;
/// What every agent has besides its own tools.
pub const BUILT_IN: [&str; 7] =
    ["update_plan", "remember", "ask_user", "read_artifact", "read_state", "publish_event", "delegate"];
/// The longest name that models accept.
pub(crate) const MAX_NAME_BYTES: usize = 64;

/// A tool of an agent.
#[derive(Clone)]
pub struct AgentTool {
    /// What the model calls it by: 1 to 64 letters, digits, `_` and `-`.
    pub name: String,
    /// What it does, for the model.
    pub description: String,
    /// The JSON schema of its arguments.
    pub parameters: Value,
    /// How dangerous it is; decides whether a person is asked first.
    pub risk: Risk,
    /// Whether it may be started again when its outcome is unknown.
    pub effect: Effect,
    /// How long one try may take.
    pub timeout: Duration,
    /// Tries in all.
    pub attempts: u32,
    /// The tool that undoes it; gets `{"arguments", "result"}`.
    pub undo: Option<String>,
    /// The tool that says whether it happened; gets the same arguments.
    pub verify: Option<String>,
    /// The lock that is held while it runs.
    pub lock: Option<String>,
    /// Whether it gives `{"result", "patch"}`.
    pub returns_patch: bool,
    /// Whether its failure is the task's.
    pub fatal: bool,
    /// What is called.
    pub action: Tool,
    pub(crate) schema: Arc<Validator>,
}

/// Why something cannot be a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadTool(pub String);

impl fmt::Display for BadTool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadTool {}

impl AgentTool {
    /// A tool with the most careful defaults: an external action that cannot be undone.
    pub fn new(
        name: impl Into<String>,
        description: impl Into<String>,
        parameters: Value,
        action: Tool,
    ) -> Result<Self, BadTool> {
        let name = name.into();
        check_name(&name).map_err(|why| BadTool(format!("the tool's name '{}' {why}", name.escape_debug())))?;
        let schema = schema::compile(&parameters)
            .map_err(|why| BadTool(format!("the parameters of tool '{name}': {why}")))?;
        Ok(Self {
            name,
            description: description.into(),
            parameters,
            risk: Risk::ExternalAction,
            effect: default_effect(Risk::ExternalAction),
            timeout: DEFAULT_TIMEOUT,
            attempts: DEFAULT_ATTEMPTS,
            undo: None,
            verify: None,
            lock: None,
            returns_patch: false,
            fatal: false,
            action,
            schema: Arc::new(schema),
        })
    }

    /// A tool that is a Rust function; it gets the arguments, which fit `parameters`. Dropped when
    /// its time is over or its task is cancelled.
    ///
    /// ```
    /// use longhaul::{Risk, StepContext};
    /// use longhaul_agent::AgentTool;
    /// use serde_json::{Value, json};
    ///
    /// let add = AgentTool::function(
    ///     "add",
    ///     "Adds two numbers",
    ///     json!({"type": "object", "required": ["a", "b"],
    ///            "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}),
    ///     async |arguments: Value, _: StepContext| {
    ///         Ok(json!(arguments["a"].as_f64().unwrap_or(0.0) + arguments["b"].as_f64().unwrap_or(0.0)))
    ///     },
    /// )?
    /// .risk(Risk::ReadOnly);
    /// assert_eq!(add.arguments(r#"{"a": 1, "b": 2}"#), Ok(json!({"a": 1, "b": 2})));
    /// # Ok::<(), longhaul_agent::tool::BadTool>(())
    /// ```
    pub fn function<F, Out>(
        name: impl Into<String>,
        description: impl Into<String>,
        parameters: Value,
        function: F,
    ) -> Result<Self, BadTool>
    where
        F: Fn(Value, StepContext) -> Out + Send + Sync + 'static,
        Out: Future<Output = Result<Value, TaskError>> + Send + 'static,
    {
        let name = name.into();
        let action = Tool::Function(Function::new(&name, function));
        Self::new(name, description, parameters, action)
    }

    /// How dangerous it is. Sets the effect to what is usual for that: `read` for what changes
    /// nothing, `irreversible` for all else.
    pub fn risk(mut self, risk: Risk) -> Self {
        self.risk = risk;
        self.effect = default_effect(risk);
        self
    }

    /// Whether it may be started again when its outcome is unknown; to be said after the risk.
    pub fn effect(mut self, effect: Effect) -> Self {
        self.effect = effect;
        self
    }

    /// How long one try may take.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Tries in all.
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts.max(1);
        self
    }

    /// The tool that undoes it, by name. Its effect can be undone from now on.
    pub fn undo(mut self, tool: impl Into<String>) -> Self {
        self.undo = Some(tool.into());
        self.effect = Effect::Compensable;
        self
    }

    /// The tool that says whether it happened, by name.
    pub fn verify(mut self, tool: impl Into<String>) -> Self {
        self.verify = Some(tool.into());
        self
    }

    /// The lock that is held while it runs.
    pub fn lock(mut self, name: impl Into<String>) -> Self {
        self.lock = Some(name.into());
        self
    }

    /// It gives `{"result": …, "patch": StatePatch}`.
    pub fn returns_patch(mut self) -> Self {
        self.returns_patch = true;
        self
    }

    /// Its failure is the task's.
    pub fn fatal(mut self) -> Self {
        self.fatal = true;
        self
    }

    /// What a model is told of it.
    pub fn spec(&self) -> ToolSpec {
        let (name, description) = (self.name.clone(), self.description.clone());
        ToolSpec { name, description, parameters: self.parameters.clone() }
    }

    /// What a model wrote, as arguments that fit the schema. The error is a text for the model: what
    /// was wrong, where, and what is wanted.
    pub fn arguments(&self, written: &str) -> Result<Value, String> {
        schema::read(&self.schema, &self.parameters, written)
    }

    /// A digest of the definition: an approval is for this very tool. Nothing secret is in it.
    pub fn digest(&self) -> String {
        let definition = json!({
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "risk": self.risk,
            "effect": self.effect,
            "action": self.action.definition(),
        });
        super::digest(&definition)
    }
}

impl fmt::Debug for AgentTool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentTool")
            .field("name", &self.name)
            .field("risk", &self.risk)
            .field("effect", &self.effect)
            .field("action", &self.action)
            .finish_non_exhaustive()
    }
}

/// The effect of a tool that does not say.
pub(crate) fn default_effect(risk: Risk) -> Effect {
    if risk == Risk::ReadOnly { Effect::Read } else { Effect::Irreversible }
}

/// Whether models accept this name, and nobody else has it.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.chars().all(fits) {
        return Err(format!(
            "must have 1 to {MAX_NAME_BYTES} characters, of a-z, A-Z, 0-9, _ and -: models accept no other"
        ));
    }
    if BUILT_IN.contains(&name) {
        return Err("is a built-in tool's; take another one".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(description: &str, parameters: Value) -> AgentTool {
        AgentTool::function("look", description, parameters, async |arguments, _| Ok(arguments)).expect("a tool")
    }

    #[test]
    fn a_function_is_a_careful_tool_until_more_is_said() {
        let careful = tool("Looks", schema::none());
        assert_eq!((careful.risk, careful.effect), (Risk::ExternalAction, Effect::Irreversible));
        assert_eq!((careful.timeout, careful.attempts), (Duration::from_secs(30), 3));
        let reads = careful.clone().risk(Risk::ReadOnly);
        assert_eq!(reads.effect, Effect::Read);
        let undone = careful.risk(Risk::WriteLocal).undo("unlook").verify("looked").lock("eyes").fatal();
        assert_eq!((undone.effect, undone.undo.as_deref()), (Effect::Compensable, Some("unlook")));
        assert!(undone.fatal && !undone.returns_patch);
        assert_eq!((undone.spec().name.as_str(), undone.spec().parameters), ("look", schema::none()));
    }

    #[test]
    fn the_digest_changes_with_the_definition_and_with_nothing_else() {
        let one = tool("Looks", schema::none());
        assert_eq!(one.digest(), tool("Looks", schema::none()).timeout(Duration::from_secs(1)).digest());
        assert!(one.digest().starts_with("sha256-") && one.digest().len() == 71);
        assert_ne!(one.digest(), tool("Looks around", schema::none()).digest());
        assert_ne!(one.digest(), tool("Looks", json!({"type": "object"})).digest());
        assert_ne!(one.digest(), one.clone().risk(Risk::ReadOnly).digest());
    }

    #[test]
    fn names_that_models_refuse_or_that_are_taken_cannot_be_given() {
        let bad =
            |name: &str| AgentTool::function(name, "", schema::none(), async |_, _| Ok(Value::Null)).is_err();
        let long = "x".repeat(65);
        assert!(["", "two words", "größe", "a.b", "a/b", &long, "ask_user", "delegate"].into_iter().all(bad));
        assert!(!bad("a-B_9"));
    }
}
