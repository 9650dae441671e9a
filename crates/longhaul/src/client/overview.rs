//! Queues, handlers and the whole at a glance.

use super::{Client, Error};
use crate::store::{HandlerInfo, Stats};
use crate::task::{check_name, timestamp};

impl Client {
    /// A name that all processes on this store agree on and no others have; made when it is first asked for.
    pub async fn store_name(&self) -> Result<String, Error> {
        let fresh = uuid::Uuid::now_v7().simple().to_string();
        Ok(self.engine.store.kept_secret("store_name", &fresh).await?)
    }

    /// Lets the tasks of a queue rest, or go on. Tasks that run already go on either way; those that wait
    /// stay in line, and their deadlines pass. The queue need not be known. Says whether that changed
    /// anything.
    pub async fn pause_queue(&self, queue: &str, pause: bool) -> Result<bool, Error> {
        check_name("queue", queue)?;
        Ok(self.engine.store.pause_queue(queue, pause, &self.actor).await?)
    }

    /// Every handler that some worker once had, by name.
    pub async fn handlers(&self) -> Result<Vec<HandlerInfo>, Error> {
        let known = self.engine.store.handlers().await?;
        let workers = self.engine.store.workers().await?;
        let having = |name: &String| workers.iter().filter(|worker| worker.handlers.contains(name)).count();
        let info = |(name, first_seen): (String, i64)| HandlerInfo {
            workers: having(&name),
            name,
            first_seen: timestamp(first_seen),
        };
        Ok(known.into_iter().map(info).collect())
    }

    /// This tenant's tasks by state, all queues and all workers.
    pub async fn stats(&self) -> Result<Stats, Error> {
        let tasks = self.engine.store.count_states(&self.tenant).await?;
        let queues = self.engine.store.queues().await?;
        let workers = self.engine.store.workers().await?;
        let oldest_ready = queues.iter().filter_map(|queue| queue.oldest).min().map(timestamp);
        Ok(Stats { tasks, queues, workers, oldest_ready })
    }
}
