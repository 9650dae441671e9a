//! What the tests of the lock services share: where they are, and ways to wait.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use longhaul::lock::LockService;

/// No test waits longer than this for anything.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How long sessions last in tests; etcd gives none that are shorter.
pub const TTL: Duration = Duration::from_secs(2);

/// A lock service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Store,
    Redis,
    Etcd,
}

impl Kind {
    fn variable(self) -> &'static str {
        match self {
            Self::Store => "STORE",
            Self::Redis => "REDIS",
            Self::Etcd => "ETCD",
        }
    }

    /// Its URL, with names that no other test uses; `None`, with one line that says so, when it is not here.
    pub fn url(self) -> Option<String> {
        if self == Self::Store {
            return Some("store:".to_owned());
        }
        let name = format!("LONGHAUL_TEST_{}", self.variable());
        let Ok(url) = std::env::var(&name) else {
            eprintln!("skipped: needs a lock service; set {name} or use ./dev test");
            return None;
        };
        let url = url.replacen("http://", "etcd://", 1);
        Some(format!("{url}?ttl=2s&prefix=test-{}", uuid::Uuid::now_v7().simple()))
    }

    /// Does something to the service itself; `false` when it is none that tests may touch.
    pub fn control(self, what: &str) -> bool {
        let Ok(script) = std::env::var(format!("LONGHAUL_TEST_{}_CTL", self.variable())) else {
            eprintln!("skipped: needs a lock service that can be stopped; use ./dev test");
            return false;
        };
        let status = Command::new(script).arg(what).status().expect("the script of the service runs");
        assert!(status.success(), "{self:?} did not {what}");
        true
    }
}

/// Starts the service again when a test ends, however it ends.
pub struct Restart(pub Kind);

impl Drop for Restart {
    fn drop(&mut self) {
        self.0.control("start");
    }
}

pub async fn connect(url: &str) -> Arc<dyn LockService> {
    longhaul_bus::locks::connect(url).await.expect("the service answers").expect("not the store")
}

/// Waits until a condition holds.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{what}"));
}
