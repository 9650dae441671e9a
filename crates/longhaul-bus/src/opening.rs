//! Connecting again for someone who may stop waiting: it goes on meanwhile, and who waits next gets what came of it.

use tokio::task::JoinHandle;

use crate::bus::BusError;

/// What is being opened, if anything is. Ends with its owner.
pub(crate) struct Opening<T>(Option<JoinHandle<Result<T, BusError>>>);

impl<T: Send + 'static> Opening<T> {
    pub(crate) fn new() -> Self {
        Self(None)
    }

    /// Opens it, or waits for what is being opened.
    pub(crate) async fn wait<F>(&mut self, bus: &str, open: impl FnOnce() -> F) -> Result<T, BusError>
    where
        F: Future<Output = Result<T, BusError>> + Send + 'static,
    {
        let opened = self.0.get_or_insert_with(|| tokio::spawn(open())).await;
        self.0 = None;
        opened.unwrap_or_else(|error| {
            Err(BusError::Failed { bus: bus.to_owned(), why: format!("connecting broke off: {error}") })
        })
    }
}

impl<T> Drop for Opening<T> {
    fn drop(&mut self) {
        if let Some(opening) = &self.0 {
            opening.abort();
        }
    }
}
