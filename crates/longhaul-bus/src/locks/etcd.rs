//! Locks at etcd, by the recipe of its own clients: whoever wants one puts a key under the lock's name, bound to a
//! lease, and the oldest key has it. So `etcdctl lock longhaul/locks/TENANT/NAME` and the mutex of etcd's Go client
//! take part, all in the order in which they came.
//!
//! Spoken by etcd's JSON gateway ([`gateway`]). The lease's id is made from the owner, so any process can keep
//! it or give it back.

use std::time::Duration;

use async_trait::async_trait;
use longhaul::lock::{LockClaim, LockService, LockServiceError, Take};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Common;
use gateway::{Gateway, encoded, number, text};

mod gateway;

/// How often a change of the largest token is tried anew that someone else made in between.
const TRIES: usize = 8;

/// etcd.
pub(super) struct Etcd {
    gateway: Gateway,
    ttl: Duration,
    prefix: String,
}

impl Etcd {
    pub(super) async fn connect(url: &str) -> Result<Self, LockServiceError> {
        let Common { address, ttl, prefix } = Common::parse(url, 2379)?;
        let etcd = Self { gateway: Gateway::new(&address)?, ttl, prefix };
        etcd.gateway.ask("kv/range", &json!({"key": encoded(&etcd.token_key()), "keys_only": true})).await?;
        Ok(etcd)
    }

    fn token_key(&self) -> String {
        format!("{}/token", self.prefix)
    }

    fn lease(&self, claim: &LockClaim<'_>) -> i64 {
        lease_of(&format!("{}/{}/{}", self.prefix, claim.name, claim.owner))
    }

    /// The key of an owner, which is also in its lease's id.
    fn key(&self, claim: &LockClaim<'_>) -> String {
        format!("{}/{}/{:x}", self.prefix, claim.name, self.lease(claim))
    }

    /// The request for the oldest key under a lock's name: whose the lock is.
    fn oldest(&self, claim: &LockClaim<'_>) -> Value {
        let name = format!("{}/{}", self.prefix, claim.name);
        // '0' comes after '/'.
        let (from, to) = (encoded(&format!("{name}/")), encoded(&format!("{name}0")));
        json!({"key": from, "range_end": to, "sort_order": "ASCEND", "sort_target": "CREATE", "limit": "1"})
    }

    /// Keeps the lease; `false` when there is none (any more).
    async fn keep_lease(&self, claim: &LockClaim<'_>) -> Result<bool, LockServiceError> {
        let lease = self.lease(claim).to_string();
        let answer = self.gateway.ask("lease/keepalive", &json!({"ID": lease})).await?;
        Ok(number(&answer["result"]["TTL"]).is_some_and(|ttl| ttl > 0))
    }

    async fn grant_lease(&self, claim: &LockClaim<'_>) -> Result<(), LockServiceError> {
        // etcd counts whole seconds; longer than asked for is safe.
        let ttl = claim.ttl.as_secs() + u64::from(claim.ttl.subsec_nanos() > 0);
        let asked = json!({"ID": self.lease(claim).to_string(), "TTL": ttl.to_string()});
        match self.gateway.try_ask("lease/grant", &asked).await? {
            Ok(_) => Ok(()),
            // Another process of ours was faster.
            Err(refused) if refused.why.contains("lease already exists") => Ok(()),
            Err(refused) => Err(refused.into()),
        }
    }

    /// Puts the owner's key, unless it is there; gives whether it is the oldest.
    async fn stand_in_line(&self, claim: &LockClaim<'_>) -> Result<bool, LockServiceError> {
        let key = encoded(&self.key(claim));
        let lease = self.lease(claim).to_string();
        let oldest = json!({"request_range": self.oldest(claim)});
        let asked = json!({
            "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
            "success": [{"request_put": {"key": key, "value": encoded(claim.owner), "lease": lease}}, oldest],
            "failure": [oldest],
        });
        let answer = self.gateway.ask("kv/txn", &asked).await?;
        let found = answer["responses"].as_array().and_then(|all| all.last());
        let first = found.map(|found| &found["response_range"]["kvs"][0]["key"]);
        Ok(first.and_then(Value::as_str) == Some(key.as_str()))
    }

    /// Writes down the owner's token as the largest, if it is; the owner's key must still be there then.
    async fn note_token(&self, claim: &LockClaim<'_>, token: u64) -> Result<Take, LockServiceError> {
        let (key, owner_key) = (encoded(&self.token_key()), encoded(&self.key(claim)));
        for _ in 0..TRIES {
            let found = self.gateway.ask("kv/range", &json!({"key": key})).await?;
            let known = &found["kvs"][0];
            let (largest, by) = match text(&known["value"]) {
                None => (0, String::new()),
                Some(value) => read_token(&value).ok_or_else(|| {
                    Gateway::refused(format!("the key '{}' is not a token; who else writes it?", self.token_key()))
                })?,
            };
            if largest == token && by == claim.owner {
                return Ok(Take::Taken);
            }
            if largest >= token {
                return Ok(Take::Outdated { largest });
            }
            let revision = number(&known["mod_revision"]).unwrap_or(0).to_string();
            let asked = json!({
                "compare": [
                    {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision},
                    {"key": owner_key, "target": "CREATE", "result": "GREATER", "create_revision": "0"},
                ],
                "success": [{"request_put": {"key": key, "value": encoded(&format!("{token} {}", claim.owner))}}],
                "failure": [{"request_range": {"key": owner_key, "keys_only": true}}],
            });
            let answer = self.gateway.ask("kv/txn", &asked).await?;
            if answer["succeeded"] == true {
                return Ok(Take::Taken);
            }
            if answer["responses"][0]["response_range"]["kvs"].is_null() {
                return Ok(Take::Busy);
            }
        }
        Ok(Take::Busy)
    }
}

/// A lease for an owner of something: a number from 1 on.
fn lease_of(owned: &str) -> i64 {
    let digest = Sha256::digest(owned.as_bytes());
    let first = digest.iter().take(8).fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    i64::try_from(first >> 1).unwrap_or(1).max(1)
}

/// The largest token and whose it is.
fn read_token(value: &str) -> Option<(u64, String)> {
    let (token, owner) = value.split_once(' ')?;
    Some((token.parse().ok()?, owner.to_owned()))
}

#[async_trait]
impl LockService for Etcd {
    fn name(&self) -> &str {
        "etcd"
    }

    fn ttl(&self) -> Duration {
        self.ttl
    }

    async fn take(&self, claim: &LockClaim<'_>) -> Result<Take, LockServiceError> {
        if !self.keep_lease(claim).await? {
            self.grant_lease(claim).await?;
        }
        if !self.stand_in_line(claim).await? {
            return Ok(Take::Busy);
        }
        match claim.token {
            Some(token) => self.note_token(claim, token).await,
            None => Ok(Take::Taken),
        }
    }

    async fn keep(&self, claim: &LockClaim<'_>) -> Result<bool, LockServiceError> {
        if !self.keep_lease(claim).await? {
            return Ok(false);
        }
        // The lease can outlive the key, when somebody removed that.
        let found = self.gateway.ask("kv/range", &self.oldest(claim)).await?;
        Ok(text(&found["kvs"][0]["key"]) == Some(self.key(claim)))
    }

    async fn release(&self, claim: &LockClaim<'_>) -> Result<(), LockServiceError> {
        let lease = self.lease(claim).to_string();
        match self.gateway.try_ask("lease/revoke", &json!({"ID": lease})).await? {
            Ok(_) => Ok(()),
            Err(refused) if refused.why.contains("lease not found") => Ok(()),
            Err(refused) => Err(refused.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_are_of_their_owner_and_positive() {
        let owners: Vec<String> = (0..1_000).map(|number| format!("owner {number}")).collect();
        let leases: std::collections::BTreeSet<i64> = owners.iter().map(|owner| lease_of(owner)).collect();
        assert_eq!(leases.len(), 1_000);
        assert!(leases.iter().all(|lease| *lease > 0));
        assert_eq!(lease_of("owner 1"), lease_of("owner 1"));
    }
}
