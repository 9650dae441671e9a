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
//! [`request`] (as JSON from outside), [`client`] (how), [`store`] (where it lives), [`worker`] (who runs it), [`run`] (what a handler
//! is given), [`saga`] (how it is undone), `keeper` (what is due), [`lock`] (who else is excluded), `feed` (how others follow it),
//! [`subscriber`] (handlers of events), [`live`] (text as it comes), [`outbox`] (how others are told), [`relay`] (hints between
//! processes), `meter` (what is counted), [`trace`] (the traces it belongs to).

pub mod client;
mod engine;
pub mod error;
pub mod event;
#[cfg(feature = "faults")]
pub mod faults;
#[cfg(not(feature = "faults"))]
mod faults;
mod feed;
mod keeper;
mod leader;
pub mod live;
pub mod lock;
mod meter;
pub mod outbox;
mod record;
pub mod relay;
pub mod request;
mod retry;
pub mod run;
pub mod saga;
pub mod schedule;
mod sessions;
pub mod state;
mod steps;
pub mod store;
pub mod subscriber;
pub mod task;
pub mod trace;
mod why;
pub mod worker;

pub use client::{CheckpointInfo, Client, Error, Export, ExportedState};
pub use error::TaskError;
pub use event::{Event, Progress};
pub use feed::{AllEvents, Cursor, Events};
pub use live::{Live, LiveText};
pub use lock::{LockClaim, LockService, LockServiceError, Take};
pub use outbox::{Endpoint, Outbox, OutboxHandle, OutboxSettings, Replies, Reply, ReplyError, ReplyTo, Webhook};
pub use record::{Decision, Effect, UndoOn};
pub use relay::Relay;
pub use retry::RetryPolicy;
pub use run::{Approval, CheckpointPolicy, Child, Lock, OnRefused, Risk, Run, StepContext};
pub use saga::Saga;
pub use schedule::{Missed, Schedule, When};
pub use state::{AgentState, StatePatch};
pub use steps::{StepInfo, StepState};
pub use store::{
    Ask, AskKind, AskStatus, Delivery, DeliveryStatus, Filter, LockInfo, LockToken, NewToken, OutboxStats, Page,
    QueueSettings, Role, Settings, SubscriberInfo, TokenInfo,
    overview::{HandlerInfo, StateCounts, Stats},
};
pub use subscriber::{Subscriber, SubscriberHandle, SubscriberStats, Told};
pub use task::{NewTask, Priority, State, Task, TaskId};
pub use why::Why;
pub use worker::{Worker, WorkerHandle};
