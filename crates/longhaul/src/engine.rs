//! What clients, workers and the keeper of one process share: the store, the batches in front of
//! it, the hints behind it.

use std::sync::{Arc, OnceLock};

use crate::faults;
use crate::feed;
use crate::live::Lives;
use crate::lock::LockService;
use crate::meter::Meter;
use crate::outbox::reply::ReplyRule;
use crate::store::batch::{Batcher, Commits, Submits};
use crate::store::{self, Hints, Store, StoreError};

/// See the module.
pub(crate) struct Engine {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) hints: Arc<Hints>,
    pub(crate) submits: Batcher<Submits>,
    pub(crate) commits: Batcher<Commits>,
    pub(crate) meter: Arc<Meter>,
    /// Who listens to text as it comes.
    pub(crate) lives: Arc<Lives>,
    /// What excludes others than the tasks of this store, if something does.
    pub(crate) locks: OnceLock<Arc<dyn LockService>>,
    /// Which destinations of results are taken at submit; all, if nobody said.
    pub(crate) reply_rule: OnceLock<ReplyRule>,
    /// Ends with the engine.
    feed: tokio::task::JoinHandle<()>,
}

impl Engine {
    pub(crate) async fn open(url: &str) -> Result<Arc<Self>, StoreError> {
        let hints = Arc::new(Hints::default());
        let store = store::open(url, Arc::clone(&hints)).await?;
        Ok(Self::over(store, hints))
    }

    /// On a store that gives these hints.
    pub(crate) fn over(store: Arc<dyn Store>, hints: Arc<Hints>) -> Arc<Self> {
        let lanes = store.lanes();
        let meter = Arc::new(Meter::default());
        Arc::new(Self {
            submits: Batcher::start(Submits(Arc::clone(&store), Arc::clone(&meter)), lanes),
            commits: Batcher::start(Commits(Arc::clone(&store), Arc::clone(&meter)), lanes),
            feed: tokio::spawn(faults::of_process(feed::watch_others(Arc::clone(&store), Arc::clone(&hints)))),
            lives: Arc::new(Lives::relayed_by(hints.relayed())),
            store,
            hints,
            meter,
            locks: OnceLock::new(),
            reply_rule: OnceLock::new(),
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.feed.abort();
    }
}
