//! All tools of an agent: those of its manifest, functions of the program around it, and whatever its MCP
//! servers have.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};

use futures_util::future::try_join_all;
use longhaul::TaskError;

use super::AgentTool;
use super::mcp::{Connection, Shelf};
use crate::manifest::agent::Agent;

/// The tools of an agent. Cheap to clone; its servers end with the last clone and the last call.
#[derive(Clone, Debug)]
pub struct Toolbox(Arc<Inner>);

struct Inner {
    own: Vec<Arc<AgentTool>>,
    /// What each server has, in the order of the manifest.
    shelves: Vec<Arc<Shelf>>,
    /// Kept also while a server has no tools: it may have some later.
    _connections: Vec<Arc<Connection>>,
    /// Tools that undo or verify others: not for the model.
    behind: HashSet<String>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Toolbox").field("own", &self.own).finish_non_exhaustive()
    }
}

impl Toolbox {
    /// Connects to the agent's servers and lists their tools. Fails when a server cannot be reached, or
    /// when a tool names an undo or verify that nobody has.
    pub async fn open(agent: &Agent, functions: Vec<AgentTool>) -> Result<Self, TaskError> {
        let own: Vec<Arc<AgentTool>> = agent.tools.iter().cloned().chain(functions).map(Arc::new).collect();
        let mut names = HashSet::new();
        if let Some(twice) = own.iter().find(|tool| !names.insert(tool.name.as_str())) {
            let message =
                format!("agent {} has two tools '{}'; give one of them another name", agent.name, twice.name);
            return Err(TaskError::fatal("duplicate_tool", message));
        }
        let shelves: Vec<Arc<Shelf>> = agent.mcp.iter().map(|_| Arc::default()).collect();
        let connections = agent.mcp.iter().zip(&shelves).map(|(server, shelf)| {
            let connection = Connection::new(server.clone(), shelf);
            async move { connection.open().await.map(|()| connection) }
        });
        let connections = try_join_all(connections).await?;
        let overrides = agent.mcp.iter().flat_map(|server| server.tools.values());
        let declared = overrides.flat_map(|own| [&own.undo, &own.verify]);
        let referred = own.iter().flat_map(|tool| [&tool.undo, &tool.verify]).chain(declared);
        let behind: HashSet<String> = referred.flatten().cloned().collect();
        let toolbox = Self(Arc::new(Inner { own, shelves, _connections: connections, behind }));
        for name in &toolbox.0.behind {
            if toolbox.get(name).is_none() {
                let message = format!(
                    "agent {} names the tool '{name}' as an undo or verify, but neither it nor its servers have one",
                    agent.name
                );
                return Err(TaskError::fatal("unknown_tool", message));
            }
        }
        Ok(toolbox)
    }

    /// What the model may call, as of now: a server's tools may change.
    pub fn tools(&self) -> Vec<Arc<AgentTool>> {
        let mut tools = self.all();
        tools.retain(|tool| !self.0.behind.contains(&tool.name));
        tools
    }

    /// The tool of this name, also one that is not for the model.
    pub fn get(&self, name: &str) -> Option<Arc<AgentTool>> {
        self.all().into_iter().find(|tool| tool.name == name)
    }

    /// Its own first; of two with the same name, the first counts.
    fn all(&self) -> Vec<Arc<AgentTool>> {
        let mut tools = self.0.own.clone();
        for shelf in &self.0.shelves {
            tools.extend(shelf.read().unwrap_or_else(PoisonError::into_inner).iter().cloned());
        }
        let mut names = HashSet::new();
        tools.retain(|tool| names.insert(tool.name.clone()));
        tools
    }
}
