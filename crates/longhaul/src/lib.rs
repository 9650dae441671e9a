//! Longhaul runs tasks that outlive the process that runs them.
//!
//! A client submits a task; a worker claims it and runs its handler step by step; every step is
//! recorded in the store. Kill the worker at any moment: another one goes on from the last
//! recorded step.
//!
//! ```
//! use longhaul::{Client, NewTask, Run, TaskError, Worker};
//! use std::time::Duration;
//!
//! async fn greet(run: Run, name: String) -> Result<String, TaskError> {
//!     // Recorded once; after a crash the recorded greeting is used again.
//!     run.step("greet", async || Ok::<_, TaskError>(format!("Hello, {name}!"))).await
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::open("memory:").await?; // or sqlite:longhaul.db, or postgres://…
//! let worker = Worker::new(&client).handler("greet", greet).start().await?;
//!
//! let id = client.submit(NewTask::new("greet", &"world")).await?.id;
//! let task = client.wait(id, Duration::from_secs(10)).await?;
//! assert_eq!(task.result.unwrap().get(), r#""Hello, world!""#);
//!
//! worker.stop().await;
//! # Ok(())
//! # }
//! ```
//!
//! The rooms, in the order in which a task goes through them: [`task`] (what is submitted),
//! [`client`] (how), [`store`] (where it lives), [`worker`] (who runs it), [`run`] (what a handler
//! is given), [`saga`] (how it is undone), `keeper` (what is due), `feed` (how others follow it).

pub mod client;
mod engine;
pub mod error;
pub mod event;
mod feed;
mod keeper;
mod record;
mod retry;
pub mod run;
pub mod saga;
pub mod schedule;
pub mod state;
pub mod store;
pub mod task;
pub mod worker;

pub use client::{Client, Error};
pub use error::TaskError;
pub use event::{Event, Progress};
pub use feed::Events;
pub use record::{Decision, Effect};
pub use retry::RetryPolicy;
pub use run::{Approval, Child, Lock, Risk, Run, StepContext};
pub use saga::Saga;
pub use schedule::{Missed, Schedule, When};
pub use state::{AgentState, StatePatch};
pub use store::{Ask, AskKind, AskStatus, Filter, QueueSettings, Settings};
pub use task::{NewTask, Priority, State, Task, TaskId};
pub use worker::{Worker, WorkerHandle};
