//! Sagas: steps that are undone when a later one fails.
//!
//! A saga is nothing but a handler whose steps say how they are undone; what undoes them is the
//! run (see [`Step::undo`]). What is here makes that read well, on the public [`Run`] alone.
//!
//! ```
//! # use longhaul::{Client, NewTask, Run, State, TaskError, Worker};
//! # use std::time::Duration;
//! async fn deploy(run: Run, app: String) -> Result<String, TaskError> {
//!     let saga = run.saga();
//!     let dns = saga
//!         .step("create_dns", || create_dns(app.clone()))
//!         .undo(delete_dns)
//!         .await?;
//!     saga.step("start", || start(dns.clone())).attempts(1).await
//! }
//!
//! async fn create_dns(app: String) -> Result<String, TaskError> {
//!     Ok(format!("{app}.example.com"))
//! }
//! async fn delete_dns(_name: String) -> Result<(), TaskError> {
//!     Ok(())
//! }
//! async fn start(_name: String) -> Result<String, TaskError> {
//!     Err(TaskError::fatal("no_room", "no machine has room for it"))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let client = Client::open("memory:").await?;
//! # let worker = Worker::new(&client).handler("deploy", deploy).start().await?;
//! let id = client.submit(NewTask::new("deploy", &"shop")).await?.id;
//! let task = client.wait(id, Duration::from_secs(10)).await?;
//! let error = task.error.unwrap();
//! assert_eq!(task.state, State::Failed);
//! assert_eq!(error.details["step"], "start");
//! assert_eq!(error.details["undone"], serde_json::json!(["create_dns"]));
//! # worker.stop().await;
//! # Ok(())
//! # }
//! ```

use std::future::Future;

use futures_util::future::join_all;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::TaskError;
use crate::run::{Run, Step, StepContext};

/// See the module.
pub struct Saga<'a> {
    run: &'a Run,
}

impl Run {
    /// Steps that are undone, the last completed first, when the task fails for good, is cancelled
    /// or misses its deadline.
    pub fn saga(&self) -> Saga<'_> {
        Saga { run: self }
    }
}

impl<'a> Saga<'a> {
    /// A step; say with [`Step::undo`] how it is undone. One without has nothing to undo.
    pub fn step<T, F, Fut, E>(&self, name: impl Into<String>, work: F) -> Step<'a, T>
    where
        T: Serialize + DeserializeOwned + Send + 'a,
        F: FnMut() -> Fut + Send + 'a,
        Fut: Future<Output = Result<T, E>> + Send + 'a,
        E: Into<TaskError>,
    {
        self.run.step(name, work)
    }

    /// A step whose function is told its idempotency key, attempt and fence.
    pub fn step_with<T, F, Fut, E>(&self, name: impl Into<String>, work: F) -> Step<'a, T>
    where
        T: Serialize + DeserializeOwned + Send + 'a,
        F: FnMut(StepContext) -> Fut + Send + 'a,
        Fut: Future<Output = Result<T, E>> + Send + 'a,
        E: Into<TaskError>,
    {
        self.run.step_with(name, work)
    }

    /// Runs steps at the same time. All of them are waited for, also when one has failed, so that
    /// whatever was completed can be undone; then the first error in their order counts.
    pub async fn all<T>(&self, steps: impl IntoIterator<Item = Step<'a, T>>) -> Result<Vec<T>, TaskError>
    where
        T: Serialize + DeserializeOwned + Send + 'a,
    {
        let steps: Vec<_> = steps.into_iter().map(IntoFuture::into_future).collect();
        join_all(steps).await.into_iter().collect()
    }
}
