//! Backups: a consistent copy of everything, made while the store is in use.
//!
//! A copy is written under another name, synced, and only then given its own, so that a file of that name is
//! always a whole backup. Nothing is ever overwritten.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use uuid::Uuid;

use super::StoreError;
use crate::task::Invalid;

/// Copying a store.
#[async_trait]
pub trait BackupStore: Send + Sync {
    /// Writes a copy of the store, as it is at one moment, to a new file.
    async fn backup(&self, path: &Path) -> Result<Result<(), Invalid>, StoreError>;
}

/// A backup in the making; removed unless it is finished.
#[derive(Debug)]
pub(crate) struct Draft {
    path: PathBuf,
    /// Where it is written.
    pub(crate) part: PathBuf,
    finished: bool,
}

impl Draft {
    /// Takes the name, so that nobody else does.
    pub(crate) fn begin(path: &Path) -> Result<Result<Self, Invalid>, StoreError> {
        match make_private(path) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let problem =
                    format!("'{}' exists; a backup overwrites nothing, use another name", path.display());
                return Ok(Err(Invalid::new("path", problem)));
            }
            Err(error) => {
                let problem = format!("'{}' cannot be written: {error}", path.display());
                return Ok(Err(Invalid::new("path", problem)));
            }
        }
        let mut part = path.as_os_str().to_owned();
        part.push(format!(".{}.part", Uuid::now_v7().simple()));
        make_private(Path::new(&part))
            .map_err(|error| StoreError::Failed(format!("'{}' cannot be written: {error}", path.display())))?;
        Ok(Ok(Self { path: path.to_owned(), part: part.into(), finished: false }))
    }

    /// Puts it on disk under its own name.
    pub(crate) fn finish(mut self) -> Result<(), StoreError> {
        let done = File::open(&self.part).and_then(|file| file.sync_all()).and_then(|()| {
            std::fs::rename(&self.part, &self.path)?;
            let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
            // So that the name is on disk too.
            File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
        });
        done.map_err(|error| {
            StoreError::Failed(format!("the backup '{}' could not be finished: {error}", self.path.display()))
        })?;
        self.finished = true;
        Ok(())
    }
}

/// Makes an empty file for its owner alone: it will hold everything that tasks are given and give.
pub(crate) fn make_private(path: &Path) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path).map(drop)
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.finished {
            // What cannot be removed stays, empty or under its other name; there is no one to tell.
            let _ = std::fs::remove_file(&self.part);
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
