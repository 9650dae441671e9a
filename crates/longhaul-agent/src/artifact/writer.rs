//! Writing an artifact while its bytes come.
//!
//! Its address is known only at its end. What fits into one part is kept until then and written at once;
//! more goes to a place of its own in `.incoming`, part by part, and is moved to its address. A writer that is dropped
//! removes what it wrote. The bytes are hashed and looked at ([`Outline`]) on their way.

use std::mem;

use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStoreExt};
use sha2::{Digest, Sha256};

use super::outline::{Outline, Stored};
use super::{ArtifactError, Artifacts};

/// The most that one artifact holds: an endless output ends here.
pub const MAX_BYTES: u64 = 1024 * 1024 * 1024;

/// Takes the bytes of one artifact. Dropped before [`Writer::finish`], it leaves nothing.
#[derive(Debug)]
pub struct Writer {
    artifacts: Artifacts,
    tenant: String,
    hash: Sha256,
    outline: Outline,
    bytes: u64,
    /// What is not sent yet: less than a part.
    buffer: Vec<u8>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Everything is in the buffer.
    Gathering,
    /// Parts are under way to this place.
    Uploading(Path, Upload),
    /// A part was lost: nothing can come of it any more.
    Broken,
}

impl Writer {
    pub(super) fn new(artifacts: Artifacts, tenant: &str) -> Self {
        Self {
            artifacts,
            tenant: tenant.to_owned(),
            hash: Sha256::new(),
            outline: Outline::default(),
            bytes: 0,
            buffer: Vec::new(),
            stage: Stage::Gathering,
        }
    }

    /// How much was written so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends `bytes`. When it fails or is dropped half-way, the writer is of no more use.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), ArtifactError> {
        let part_bytes = self.artifacts.0.part_bytes;
        // In pieces, so that a large one is not held twice.
        for piece in bytes.chunks(part_bytes) {
            if self.bytes + piece.len() as u64 > MAX_BYTES {
                self.stage = Stage::Broken;
                return Err(ArtifactError::TooLarge);
            }
            self.bytes += piece.len() as u64;
            self.hash.update(piece);
            self.outline.feed(piece);
            let room = part_bytes - self.buffer.len();
            let (now, later) = piece.split_at(piece.len().min(room));
            self.buffer.extend_from_slice(now);
            if !later.is_empty() {
                self.send().await?;
                self.buffer.extend_from_slice(later);
            }
        }
        Ok(())
    }

    /// Sends what was gathered as a part.
    async fn send(&mut self) -> Result<(), ArtifactError> {
        let failed = ArtifactError::storage("write an artifact");
        // Broken while this waits: who drops it half-way has lost the part.
        let (place, mut upload) = match mem::replace(&mut self.stage, Stage::Broken) {
            Stage::Uploading(place, upload) => (place, upload),
            Stage::Gathering => {
                let place = self.artifacts.incoming().await?;
                let upload = self.artifacts.0.store.put_multipart(&place).await.map_err(&failed)?;
                (place, Upload(Some(upload)))
            }
            Stage::Broken => return Err(ArtifactError::Interrupted),
        };
        if let Some(upload) = &mut upload.0 {
            upload.put_part(mem::take(&mut self.buffer).into()).await.map_err(&failed)?;
        }
        self.stage = Stage::Uploading(place, upload);
        Ok(())
    }

    /// Puts the artifact at its address. When this returns, it is on disk.
    pub async fn finish(mut self) -> Result<Stored, ArtifactError> {
        if matches!(self.stage, Stage::Broken) {
            return Err(ArtifactError::Interrupted);
        }
        let failed = ArtifactError::storage("write an artifact");
        let digest = self.hash.finalize_reset();
        let id = digest.iter().fold("sha256-".to_owned(), |id, byte| format!("{id}{byte:02x}"));
        let address = self.artifacts.address(&self.tenant, &id).await?;
        let store = self.artifacts.0.store.clone();
        // What is there already is replaced by the same bytes: they count as new to who removes old ones.
        if matches!(self.stage, Stage::Gathering) {
            store.put(&address, mem::take(&mut self.buffer).into()).await.map_err(&failed)?;
        } else {
            if !self.buffer.is_empty() {
                self.send().await?;
            }
            let Stage::Uploading(place, mut upload) = mem::replace(&mut self.stage, Stage::Broken) else {
                return Err(ArtifactError::Interrupted);
            };
            upload.complete().await.map_err(&failed)?;
            if let Err(error) = store.rename(&place, &address).await {
                // Else it is removed with what is old.
                let _ = store.delete(&place).await;
                return Err(failed(error));
            }
        }
        Ok(mem::take(&mut self.outline).stored(id))
    }
}

/// An upload that is aborted when it is dropped before its end.
#[derive(Debug)]
struct Upload(Option<Box<dyn MultipartUpload>>);

impl Upload {
    async fn complete(&mut self) -> object_store::Result<()> {
        if let Some(upload) = &mut self.0 {
            upload.complete().await?;
        }
        self.0 = None;
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(mut upload) = self.0.take() else { return };
        // Without a runtime there is no connection to abort it by.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if let Err(error) = upload.abort().await {
                    tracing::debug!(%error, "an artifact that was not finished could not be removed");
                }
            });
        }
    }
}
