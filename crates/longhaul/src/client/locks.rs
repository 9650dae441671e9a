//! Locks from outside of runs: who keeps them, who has them, and writing under one.

use std::sync::Arc;

use super::{Client, Error};
use crate::lock::{LockService, checked};
use crate::state::StatePatch;
use crate::store::sessions::{LockInfo, Which};
use crate::store::{Action, LockToken};
use crate::task::{Invalid, TaskId, check_name};

/// How many locks a list gives at most.
const MOST: usize = 1_000;

impl Client {
    /// From now on, locks of this store's tasks are taken at `service` too, which excludes whoever else uses
    /// it, and schedules are fired by one process at a time. This is kept in the store and holds for all its
    /// processes. Those that are to do the asking are given the service too: this client, its clones, and
    /// their workers started from now on. Locks that are held stay where they are until they end.
    ///
    /// A client is given one service in its life.
    pub async fn use_lock_service(&self, service: Arc<dyn LockService>) -> Result<(), Error> {
        let service = checked(service)?;
        let name = service.name().to_owned();
        if self.engine.locks.set(service).is_err() {
            return Err(
                Invalid::new("lock service", "was given before; open another client for another one").into()
            );
        }
        Ok(self.engine.store.choose_lock_service(Some(&name)).await?)
    }

    /// From now on, locks of this store's tasks are kept by the store alone, in all its processes: how it is
    /// in the beginning.
    pub async fn use_store_locks(&self) -> Result<(), Error> {
        Ok(self.engine.store.choose_lock_service(None).await?)
    }

    /// The name of the service where locks are taken too; `None` when the store keeps them alone.
    pub async fn lock_service(&self) -> Result<Option<String>, Error> {
        Ok(self.engine.store.lock_service().await?)
    }

    /// A lock as it is: who has it, with which token, and how many wait. `None` when nobody does.
    pub async fn lock(&self, name: &str) -> Result<Option<LockInfo>, Error> {
        check_name("lock", name)?;
        Ok(self.engine.store.locks(&self.tenant, &Which::One(name.to_owned())).await?.pop())
    }

    /// Locks that are held or waited for, by name, those after the name `after` (`""`: from the first), at most
    /// `most` and at most 1,000.
    pub async fn locks(&self, after: &str, most: usize) -> Result<Vec<LockInfo>, Error> {
        let which = Which::After(after.to_owned(), most.min(MOST));
        Ok(self.engine.store.locks(&self.tenant, &which).await?)
    }

    /// As [`Client::patch_state`], under a lock: refused
    /// ([`LockLost`](crate::store::ControlRefused::LockLost)) unless the lock is held with this very token
    /// in the moment of the change. So the state of a task can be what a lock protects: a holder that was
    /// cut off for too long cannot change it any more.
    pub async fn patch_state_under(
        &self,
        lock: &LockToken,
        id: TaskId,
        patch: StatePatch,
        version: Option<u64>,
    ) -> Result<u64, Error> {
        check_name("lock", &lock.name)?;
        let action = Action::Patch { patch, version, under: Some(lock.clone()) };
        Ok(self.control(id, action).await?.version)
    }
}
