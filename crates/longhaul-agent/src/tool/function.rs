//! A Rust function as a tool, for programs that embed Longhaul.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use longhaul::{StepContext, TaskError};
use serde_json::Value;

use super::Call;

type BoxFuture = Pin<Box<dyn Future<Output = Result<Value, TaskError>> + Send>>;

/// A function that can be called. Its errors are its own: known failures unless it says
/// [`TaskError::in_doubt`].
#[derive(Clone)]
pub struct Function {
    name: String,
    function: Arc<dyn Fn(Value, StepContext) -> BoxFuture + Send + Sync>,
}

impl Function {
    pub(super) fn new<F, Out>(name: &str, function: F) -> Self
    where
        F: Fn(Value, StepContext) -> Out + Send + Sync + 'static,
        Out: Future<Output = Result<Value, TaskError>> + Send + 'static,
    {
        let boxed = move |body, context| Box::pin(function(body, context)) as BoxFuture;
        Self { name: name.to_owned(), function: Arc::new(boxed) }
    }

    /// What it is known by.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) async fn run(&self, call: &Call) -> Result<Value, TaskError> {
        (self.function)(Value::clone(&call.body), call.context.clone()).await
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Function").field(&self.name).finish()
    }
}
