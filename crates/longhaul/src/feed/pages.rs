//! Reading the log of all tasks page by page, and waiting for more.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::engine::Engine;
use crate::store::StoreError;
use crate::store::feed::{FIRST_SPAN, FeedPage, Place};

/// How long to the next look without a hint, at first and at most.
const FIRST_LOOK: Duration = Duration::from_millis(20);
const LAST_LOOK: Duration = Duration::from_secs(1);
/// How long after a hint to look.
const GATHER: Duration = Duration::from_millis(5);

/// A reader of the log of all tasks.
pub(crate) struct Pages {
    engine: Arc<Engine>,
    news: watch::Receiver<u64>,
    /// Where the next read begins.
    pub(crate) next: Place,
    span: i64,
    /// How many rows are read at a time.
    most: usize,
    pause: Duration,
}

impl Pages {
    /// Hears from now on of what happens.
    pub(crate) fn new(engine: Arc<Engine>, next: Place, most: usize) -> Self {
        let news = engine.hints.on_told();
        Self { engine, news, next, span: FIRST_SPAN, most, pause: FIRST_LOOK }
    }

    /// The place before which is everything there is.
    pub(crate) async fn now(&self) -> Result<Place, StoreError> {
        self.engine.store.feed_now().await
    }

    /// The next page, which may be empty. Dropped while it reads, it has lost nothing.
    pub(crate) async fn read(&mut self) -> Result<FeedPage, StoreError> {
        let page = self.engine.store.feed(self.next, self.span, self.most).await?;
        (self.next, self.span) = (page.next, page.span);
        if page.more || !page.rows.is_empty() {
            self.pause = FIRST_LOOK;
        }
        Ok(page)
    }

    /// Waits until there may be more than this page, which had nothing of use.
    pub(crate) async fn rest(&mut self, page: &FeedPage) {
        if page.more {
            return;
        }
        if !page.held {
            self.pause = LAST_LOOK;
        }
        // A hint, or the time; either way it is time to look.
        if let Ok(Ok(())) = tokio::time::timeout(self.pause, self.news.changed()).await {
            // What comes together is read together.
            tokio::time::sleep(GATHER).await;
            self.pause = FIRST_LOOK;
        } else {
            self.pause = (self.pause * 2).min(LAST_LOOK);
        }
    }
}
