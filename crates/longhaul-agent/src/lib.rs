//! Agents and sagas as handlers, declared in manifests.
//!
//! [`manifest`] reads a folder of TOML files and says everything that is wrong with them, with
//! file, line and remedy; [`register`] makes handlers of them. [`saga`] runs a saga, [`agent`] an agent. [`tool`]
//! runs one call of a command, an HTTP endpoint, a function or an MCP server; [`template`] fills its
//! placeholders. [`model`] calls language models. [`artifact`] keeps what is too large for a state,
//! [`context`] chooses what a model sees.
//!
//! Built on the public API of `longhaul` alone.

pub mod agent;
pub mod artifact;
pub mod context;
pub mod manifest;
mod mask;
pub mod model;
mod net;
pub mod saga;
pub mod template;
pub mod tool;

use longhaul::Worker;

pub use agent::Host;
pub use artifact::{ArtifactError, Artifacts};
pub use context::{ContextSlice, condense};
pub use manifest::{Agent, Loaded, Manifest, Problem, Saga, load};
pub use model::Model;
pub use template::Template;
pub use tool::{AgentTool, Call, HowFar, Output, Tell, Tool, Toolbox};

/// Adds the handlers of the manifests to a worker.
pub fn register(worker: Worker, manifests: impl IntoIterator<Item = Manifest>, host: &Host) -> Worker {
    manifests.into_iter().fold(worker, |worker, manifest| match manifest {
        Manifest::Saga(saga) => {
            worker.timeout(saga.name.clone(), saga.timeout).handler(saga.name.clone(), saga::handler(saga))
        }
        Manifest::Agent(agent) => worker.handler(agent.name.clone(), agent::handler(*agent, host.clone())),
    })
}
