//! What no simulated process uses goes straight to the store.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::Unreliable;
use crate::outbox::{Endpoint, Webhook};
use crate::store::access::TokenRow;
use crate::store::outbox::{Settle, TakeDue, Taken};
use crate::store::overview::Facts;
use crate::store::sessions::{Look, Note, Which};
use crate::store::{
    AccessStore, BackupStore, Delivery, LockInfo, OutboxStats, OutboxStore, OverviewStore, SessionStore,
    StateCounts, StoreError, TokenInfo,
};
use crate::task::{Invalid, TaskId};

#[async_trait]
impl AccessStore for Unreliable {
    async fn save_token(&self, token: &TokenRow) -> Result<Result<TokenInfo, Invalid>, StoreError> {
        self.store.save_token(token).await
    }

    async fn tokens(&self, tenant: Option<&str>) -> Result<Vec<TokenInfo>, StoreError> {
        self.store.tokens(tenant).await
    }

    async fn revoke_token(&self, tenant: &str, id: Uuid) -> Result<Option<TokenInfo>, StoreError> {
        self.store.revoke_token(tenant, id).await
    }

    async fn use_token(&self, hash: &[u8; 32]) -> Result<Option<TokenInfo>, StoreError> {
        self.store.use_token(hash).await
    }

    async fn has_tokens(&self) -> Result<bool, StoreError> {
        self.store.has_tokens().await
    }
}

#[async_trait]
impl BackupStore for Unreliable {
    async fn backup(&self, path: &Path) -> Result<Result<(), Invalid>, StoreError> {
        self.store.backup(path).await
    }
}

#[async_trait]
impl OutboxStore for Unreliable {
    async fn save_endpoint(
        &self,
        tenant: &str,
        name: &str,
        webhook: &Webhook,
    ) -> Result<Result<Endpoint, Invalid>, StoreError> {
        self.store.save_endpoint(tenant, name, webhook).await
    }

    async fn remove_endpoint(&self, tenant: &str, name: &str) -> Result<bool, StoreError> {
        self.store.remove_endpoint(tenant, name).await
    }

    async fn endpoints(&self, tenant: &str) -> Result<Vec<Endpoint>, StoreError> {
        self.store.endpoints(tenant).await
    }

    async fn take_due(&self, ask: &TakeDue) -> Result<Taken, StoreError> {
        self.store.take_due(ask).await
    }

    async fn settle(&self, batch: &[Settle]) -> Result<Vec<bool>, StoreError> {
        self.store.settle(batch).await
    }

    async fn next_due(&self) -> Result<Option<i64>, StoreError> {
        self.store.next_due().await
    }

    async fn deliveries(&self, tenant: &str, task: TaskId) -> Result<Vec<Delivery>, StoreError> {
        self.store.deliveries(tenant, task).await
    }

    async fn dead_deliveries(&self, tenant: &str, limit: usize) -> Result<Vec<Delivery>, StoreError> {
        self.store.dead_deliveries(tenant, limit).await
    }

    async fn redeliver(&self, tenant: &str, task: TaskId, delivery: Uuid) -> Result<bool, StoreError> {
        self.store.redeliver(tenant, task, delivery).await
    }

    async fn outbox_stats(&self) -> Result<OutboxStats, StoreError> {
        self.store.outbox_stats().await
    }

    async fn bound_outbox(&self, max_due: u64) -> Result<(), StoreError> {
        self.store.bound_outbox(max_due).await
    }

    async fn kept_secret(&self, name: &str, fresh: &str) -> Result<String, StoreError> {
        self.store.kept_secret(name, fresh).await
    }
}

#[async_trait]
impl OverviewStore for Unreliable {
    async fn pause_queue(&self, queue: &str, pause: bool, by: &str) -> Result<bool, StoreError> {
        self.store.pause_queue(queue, pause, by).await
    }

    async fn handlers(&self) -> Result<Vec<(String, i64)>, StoreError> {
        self.store.handlers().await
    }

    async fn facts(&self, task: TaskId, lock: Option<&str>) -> Result<Option<Facts>, StoreError> {
        self.store.facts(task, lock).await
    }

    async fn count_states(&self, tenant: &str) -> Result<StateCounts, StoreError> {
        self.store.count_states(tenant).await
    }
}

#[async_trait]
impl SessionStore for Unreliable {
    async fn choose_lock_service(&self, service: Option<&str>) -> Result<(), StoreError> {
        self.store.choose_lock_service(service).await
    }

    async fn lock_service(&self) -> Result<Option<String>, StoreError> {
        self.store.lock_service().await
    }

    async fn due_sessions(
        &self,
        service: &str,
        patience: Duration,
        limit: usize,
    ) -> Result<Vec<Look>, StoreError> {
        self.store.due_sessions(service, patience, limit).await
    }

    async fn note_sessions(&self, notes: &[Note]) -> Result<(), StoreError> {
        self.store.note_sessions(notes).await
    }

    async fn locks(&self, tenant: &str, which: &Which) -> Result<Vec<LockInfo>, StoreError> {
        self.store.locks(tenant, which).await
    }
}
