//! What a client asks of the outbox.

use uuid::Uuid;

use super::secret::WebhookSecret;
use super::target::{Endpoint, Webhook, check_endpoint};
use crate::client::{Client, Error};
use crate::store::{Delivery, OutboxStats, StoreError, SubmitRefused};
use crate::task::TaskId;

impl Client {
    /// Adds an endpoint of this tenant, or changes the one of the same name. It hears of tasks that
    /// are submitted from now on; a changed URL counts for what was not sent yet, too.
    pub async fn save_endpoint(&self, name: &str, webhook: Webhook) -> Result<Endpoint, Error> {
        check_endpoint(name, &webhook).map_err(SubmitRefused::from)?;
        let saved = self.engine.store.save_endpoint(&self.tenant, name, &webhook).await?;
        Ok(saved.map_err(SubmitRefused::from)?)
    }

    /// All endpoints of this tenant, by name.
    pub async fn endpoints(&self) -> Result<Vec<Endpoint>, Error> {
        Ok(self.engine.store.endpoints(&self.tenant).await?)
    }

    /// Removes an endpoint; nothing more is sent to it.
    pub async fn remove_endpoint(&self, name: &str) -> Result<(), Error> {
        let removed = self.engine.store.remove_endpoint(&self.tenant, name).await?;
        removed.then_some(()).ok_or_else(|| Error::NoEndpoint(name.to_owned()))
    }

    /// What became of the task's events that were sent, newest first, at most 1,000.
    pub async fn deliveries(&self, task: TaskId) -> Result<Vec<Delivery>, Error> {
        self.task(task).await?;
        Ok(self.engine.store.deliveries(&self.tenant, task).await?)
    }

    /// Sends one event again, also after it was delivered. One that waits for another try is tried
    /// at once.
    pub async fn redeliver(&self, task: TaskId, delivery: Uuid) -> Result<(), Error> {
        self.task(task).await?;
        let found = self.engine.store.redeliver(&self.tenant, task, delivery).await?;
        self.engine.hints.tell_events();
        found.then_some(()).ok_or(Error::NoDelivery { task, delivery })
    }

    /// The newest deliveries of this tenant that were given up, newest first, at most 1,000.
    pub async fn dead_deliveries(&self, limit: usize) -> Result<Vec<Delivery>, Error> {
        Ok(self.engine.store.dead_deliveries(&self.tenant, limit).await?)
    }

    /// How much is to be sent, of all tenants.
    pub async fn outbox_stats(&self) -> Result<OutboxStats, Error> {
        Ok(self.engine.store.outbox_stats().await?)
    }

    /// The secret that signs when none is configured. Made at the first call, the same for everyone
    /// who uses this store.
    pub async fn webhook_secret(&self) -> Result<WebhookSecret, Error> {
        let kept = self.engine.store.kept_secret("webhook_secret", &WebhookSecret::generate().reveal()).await?;
        let damaged = |_| StoreError::Incompatible("the webhook secret in the store is damaged".to_owned());
        Ok(kept.parse().map_err(damaged)?)
    }
}
