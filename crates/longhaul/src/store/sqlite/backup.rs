//! Copying the database while it is in use.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OpenFlags};

use super::{SqliteStore, store_error};
use crate::store::StoreError;
use crate::store::backup::{BackupStore, Draft};
use crate::task::Invalid;

#[async_trait]
impl BackupStore for SqliteStore {
    async fn backup(&self, path: &Path) -> Result<Result<(), Invalid>, StoreError> {
        let draft = match Draft::begin(path)? {
            Ok(draft) => draft,
            Err(invalid) => return Ok(Err(invalid)),
        };
        match self.readers.as_ref().map(|readers| readers.path.clone()) {
            Some(from) => {
                let copy = tokio::task::spawn_blocking(move || {
                    // One of its own: it reads for as long as the copy takes, beside all others.
                    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
                    let connection = Connection::open_with_flags(from, flags).map_err(store_error)?;
                    connection.busy_timeout(Duration::from_secs(10)).map_err(store_error)?;
                    copy(&connection, draft)
                });
                copy.await.map_err(|error| StoreError::Failed(error.to_string()))??;
            }
            None => self.writer.call(false, move |connection| copy(connection, draft)).await?,
        }
        Ok(Ok(()))
    }
}

/// `VACUUM INTO` copies what one read sees, keeps the rows' numbers (which cursors of readers name), and
/// writes them close together.
fn copy(connection: &Connection, draft: Draft) -> Result<(), StoreError> {
    let part = draft.part.to_str().ok_or_else(|| StoreError::Failed("the path is not UTF-8".to_owned()))?;
    connection.execute("VACUUM INTO ?1", [part]).map_err(store_error)?;
    draft.finish()
}
