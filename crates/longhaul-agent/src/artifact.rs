//! Artifacts: large results kept outside of a task's state, in a folder or an S3-compatible store.
//!
//! An artifact is known by what is in it: its id is the SHA-256 of its bytes, and each tenant has its own
//! (`TENANT/sha256-…`). The same bytes are stored once, nothing that is stored ever changes, and an id
//! that was given out is on disk. Ids are checked and tenants' names percent-encoded, so nothing outside
//! can be named; symbolic links in the folder are refused.
//!
//! What is still being written stands in `.incoming` ([`Writer`]); [`Artifacts::tidy`] removes what a kill left
//! there. Nothing here holds more of an artifact in memory than a part of it.

use std::fmt;
use std::ops::Range;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryStreamExt};
use longhaul::TaskError;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

mod outline;
mod paging;
mod pieces;
mod s3;
mod writer;

pub use outline::{EXCERPT_BYTES, Stored, is_binary};
pub use paging::{Match, Matches, Page, Text};
pub(crate) use pieces::cut_to;
pub use writer::{MAX_BYTES, Writer};

/// Where unfinished uploads stand. No tenant is encoded so: a dot never is a dot there.
const INCOMING: &str = ".incoming";
/// What of a tenant's name stays as it is.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_');

/// A store of artifacts. Cheap to clone.
#[derive(Clone)]
pub struct Artifacts(Arc<Inner>);

struct Inner {
    store: Arc<dyn ObjectStore>,
    /// Stands before every path.
    prefix: Option<String>,
    /// The folder, when it is one.
    folder: Option<PathBuf>,
    /// How much is gathered before it is sent on.
    part_bytes: usize,
    /// What it was opened by, for people.
    url: String,
}

/// What can be wrong with an artifact, or with asking for it.
#[derive(Debug)]
#[non_exhaustive]
pub enum ArtifactError {
    /// The storage cannot be opened.
    BadUrl {
        /// As it was given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// Not the id of an artifact.
    BadId(String),
    /// A tenant without a name.
    NoTenant,
    /// There is none of this id.
    NotFound(String),
    /// A pattern that cannot be searched for.
    BadPattern(String),
    /// More than an artifact may hold.
    TooLarge,
    /// A symbolic link where the storage has files.
    Link(PathBuf),
    /// Its writer was interrupted and has lost a piece.
    Interrupted,
    /// The storage did not do what it was asked.
    Storage {
        /// What was being done.
        doing: &'static str,
        /// Why it failed.
        source: object_store::Error,
    },
}

impl fmt::Display for ArtifactError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadUrl { url, why } => write!(f, "artifacts cannot be kept at {url}: {why}"),
            Self::BadId(id) => write!(
                f,
                "'{}' is not the id of an artifact; one is sha256- and 64 of 0-9a-f",
                cut_to(id, 100).escape_debug()
            ),
            Self::NoTenant => write!(f, "artifacts belong to a tenant, and its name is empty"),
            Self::NotFound(id) => write!(f, "there is no artifact {id}"),
            Self::BadPattern(why) => write!(f, "the pattern cannot be searched for: {why}"),
            Self::TooLarge => write!(f, "an artifact holds at most {MAX_BYTES} bytes; write less, or in several"),
            Self::Link(path) => write!(
                f,
                "{} is a symbolic link; the folder of artifacts has none, put the files themselves there",
                path.display()
            ),
            Self::Interrupted => {
                write!(f, "a write of this artifact was interrupted; write it again from the start")
            }
            Self::Storage { doing, source } => write!(f, "cannot {doing}: {source}"),
        }
    }
}

impl std::error::Error for ArtifactError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Storage { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl ArtifactError {
    /// The error of a step that met it: the storage may do better next time, a wrong question stays wrong.
    pub fn task_error(&self) -> TaskError {
        match self {
            Self::Storage { .. } | Self::Interrupted => TaskError::retryable("artifact_storage", self.to_string()),
            Self::NotFound(_) => TaskError::fatal("artifact_not_found", self.to_string()),
            Self::TooLarge => TaskError::fatal("output_too_large", self.to_string()).detail("limit", MAX_BYTES),
            Self::BadUrl { .. } | Self::Link(_) => TaskError::fatal("artifact_storage", self.to_string()),
            Self::BadId(_) | Self::NoTenant | Self::BadPattern(_) => {
                TaskError::fatal("bad_artifact_query", self.to_string())
            }
        }
    }

    fn storage(doing: &'static str) -> impl Fn(object_store::Error) -> Self {
        move |source| Self::Storage { doing, source }
    }
}

impl fmt::Debug for Artifacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Artifacts").field(&self.0.url).finish()
    }
}

impl Artifacts {
    /// Opens a storage: `file:PATH` or a plain path (the folder is made), `s3://BUCKET/PREFIX` (with the `AWS_…`
    /// variables of the environment; `AWS_ENDPOINT_URL` for a store that is not Amazon's), or `memory:`, which is
    /// one of its own each time.
    pub fn open(url: &str) -> Result<Self, ArtifactError> {
        let bad = |why: String| ArtifactError::BadUrl { url: url.to_owned(), why };
        if url == "memory:" {
            return Ok(Self::new(Arc::new(InMemory::new()), None, url));
        }
        if let Some(place) = url.strip_prefix("s3://") {
            let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
            let store = s3::open(bucket).map_err(bad)?;
            let prefix = prefix.trim_matches('/');
            if !prefix.is_empty() {
                Path::parse(prefix).map_err(|error| bad(error.to_string()))?;
            }
            let mut inner = Self::new(store, None, url).0;
            if let Some(inner) = Arc::get_mut(&mut inner) {
                inner.prefix = Some(prefix.to_owned()).filter(|prefix| !prefix.is_empty());
                inner.part_bytes = s3::PART_BYTES;
            }
            return Ok(Self(inner));
        }
        let folder = url.strip_prefix("file://").or_else(|| url.strip_prefix("file:")).unwrap_or(url);
        if folder.is_empty() || folder.contains("://") {
            return Err(bad("it must be a folder, file:PATH, s3://BUCKET/PREFIX or memory:".to_owned()));
        }
        let folder = make_folder(FilePath::new(folder)).map_err(|error| bad(error.to_string()))?;
        let store = LocalFileSystem::new_with_prefix(&folder).map_err(|error| bad(error.to_string()))?;
        Ok(Self::new(Arc::new(store.with_fsync(true)), Some(folder), url))
    }

    fn new(store: Arc<dyn ObjectStore>, folder: Option<PathBuf>, url: &str) -> Self {
        let url = url.to_owned();
        Self(Arc::new(Inner { store, prefix: None, folder, part_bytes: 256 * 1024, url }))
    }

    /// What it was opened by.
    pub fn url(&self) -> &str {
        &self.0.url
    }

    /// Stores `bytes`.
    pub async fn put(&self, tenant: &str, bytes: Bytes) -> Result<Stored, ArtifactError> {
        let mut writer = self.writer(tenant);
        writer.write(&bytes).await?;
        writer.finish().await
    }

    /// Stores what comes piece by piece. Nothing is there before [`Writer::finish`].
    pub fn writer(&self, tenant: &str) -> Writer {
        Writer::new(self.clone(), tenant)
    }

    /// How large an artifact is, if there is one of this id.
    pub async fn info(&self, tenant: &str, id: &str) -> Result<Option<u64>, ArtifactError> {
        let path = self.address(tenant, id).await?;
        match self.0.store.head(&path).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(source) => Err(ArtifactError::Storage { doing: "look for an artifact", source }),
        }
    }

    /// The bytes of a range, as far as there are any.
    pub async fn read(&self, tenant: &str, id: &str, range: Range<u64>) -> Result<Bytes, ArtifactError> {
        let mut stream = self.stream(tenant, id, range).await?;
        let mut bytes = Vec::new();
        while let Some(chunk) = stream.try_next().await? {
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes.into())
    }

    /// The bytes of a range, as far as there are any, piece by piece.
    pub async fn stream(
        &self,
        tenant: &str,
        id: &str,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes, ArtifactError>>, ArtifactError> {
        let size = self.info(tenant, id).await?.ok_or_else(|| ArtifactError::NotFound(id.to_owned()))?;
        let range = range.start..range.end.min(size);
        if range.is_empty() {
            return Ok(stream::empty().boxed());
        }
        let path = self.address(tenant, id).await?;
        let options = GetOptions { range: Some(GetRange::Bounded(range)), ..GetOptions::default() };
        let failed = ArtifactError::storage("read an artifact");
        let found = self.0.store.get_opts(&path, options).await.map_err(&failed)?;
        Ok(found
            .into_stream()
            .map(move |chunk| match chunk {
                // A file that is shorter than it said would be read for ever.
                Ok(chunk) if chunk.is_empty() => Err(failed(object_store::Error::Generic {
                    store: "artifacts",
                    source: "it is shorter than it was".into(),
                })),
                Ok(chunk) => Ok(chunk),
                Err(source) => Err(failed(source)),
            })
            .boxed())
    }

    /// Writes, reads and removes a small object, to see whether the storage works.
    pub async fn probe(&self) -> Result<(), ArtifactError> {
        let path = self.incoming().await?;
        let said = Bytes::from_static(b"longhaul");
        self.0
            .store
            .put(&path, said.clone().into())
            .await
            .map_err(ArtifactError::storage("write to the storage"))?;
        let read = async { self.0.store.get(&path).await?.bytes().await };
        let read = read.await.map_err(ArtifactError::storage("read from the storage"));
        let removed = self.0.store.delete(&path).await.map_err(ArtifactError::storage("remove from the storage"));
        if read? != said {
            let source = "it gave back something else than was written".into();
            let source = object_store::Error::Generic { store: "artifacts", source };
            return Err(ArtifactError::Storage { doing: "read from the storage", source });
        }
        removed
    }

    /// Removes what was being written for longer than `older_than`: its writer is gone. Gives how many there were.
    ///
    /// Parts of an upload to S3 that was never completed are not listed there; a lifecycle rule of the bucket
    /// (`AbortIncompleteMultipartUpload`) removes those that a kill left.
    pub async fn tidy(&self, older_than: Duration) -> Result<usize, ArtifactError> {
        let failed = ArtifactError::storage("remove unfinished artifacts");
        if let Some(folder) = &self.0.folder {
            // The store does not list its own files that are not finished.
            let folder = folder.join(INCOMING);
            let removed = tokio::task::spawn_blocking(move || tidy_folder(&folder, older_than)).await;
            let removed = removed.map_err(std::io::Error::other).and_then(|removed| removed);
            return removed.map_err(|error| {
                failed(object_store::Error::Generic { store: "artifacts", source: error.into() })
            });
        }
        let mut removed = 0;
        let mut listed = self.0.store.list(Some(&self.path(INCOMING, "")?));
        let limit = SystemTime::now() - older_than;
        while let Some(found) = listed.try_next().await.map_err(&failed)? {
            if SystemTime::from(found.last_modified) < limit {
                self.0.store.delete(&found.location).await.map_err(&failed)?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    /// Where an artifact stands.
    async fn address(&self, tenant: &str, id: &str) -> Result<Path, ArtifactError> {
        if !is_id(id) {
            return Err(ArtifactError::BadId(id.to_owned()));
        }
        if tenant.is_empty() {
            return Err(ArtifactError::NoTenant);
        }
        let tenant = utf8_percent_encode(tenant, PLAIN).to_string();
        self.refuse_links(&tenant, id).await?;
        self.path(&tenant, id)
    }

    /// A new place for something unfinished.
    async fn incoming(&self) -> Result<Path, ArtifactError> {
        let name = uuid::Uuid::now_v7().to_string();
        self.refuse_links(INCOMING, &name).await?;
        self.path(INCOMING, &name)
    }

    fn path(&self, folder: &str, name: &str) -> Result<Path, ArtifactError> {
        let parts = self.0.prefix.as_deref().into_iter().chain([folder, name]);
        let text = parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/");
        Path::parse(&text).map_err(|error| ArtifactError::BadUrl { url: text.clone(), why: error.to_string() })
    }

    /// The store would follow them, wherever they lead.
    async fn refuse_links(&self, folder: &str, name: &str) -> Result<(), ArtifactError> {
        let Some(root) = &self.0.folder else { return Ok(()) };
        for path in [root.join(folder), root.join(folder).join(name)] {
            if tokio::fs::symlink_metadata(&path).await.is_ok_and(|found| found.is_symlink()) {
                return Err(ArtifactError::Link(path));
            }
        }
        Ok(())
    }
}

/// Whether this is the id of an artifact: `sha256-` and 64 of 0-9a-f.
pub fn is_id(id: &str) -> bool {
    let digits = id.strip_prefix("sha256-").unwrap_or_default().as_bytes();
    digits.len() == 64 && digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// The folder, made if need be, for its owner alone; absolute.
fn make_folder(folder: &FilePath) -> std::io::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;

    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    std::fs::canonicalize(folder)
}

fn tidy_folder(folder: &FilePath, older_than: Duration) -> std::io::Result<usize> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let limit = SystemTime::now() - older_than;
    let mut removed = 0;
    for entry in entries {
        let entry = entry?;
        let old = entry.metadata().and_then(|found| found.modified()).is_ok_and(|modified| modified < limit);
        // Another process may be tidying too.
        if old && std::fs::remove_file(entry.path()).is_ok() {
            removed += 1;
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_digest_is_an_id() {
        assert!(is_id(&format!("sha256-{}", "0f".repeat(32))));
        for wrong in ["", "sha256-", "../../etc/passwd", "log_123"] {
            assert!(!is_id(wrong), "{wrong}");
        }
        assert!(!is_id(&format!("sha256-{}", "0F".repeat(32))));
        assert!(!is_id(&format!("sha256-{}/", "0f".repeat(32))));
        assert!(!is_id(&format!("sha512-{}", "0f".repeat(32))));
    }

    #[test]
    fn an_unknown_kind_of_storage_is_an_error_that_names_the_known_ones() {
        let error = Artifacts::open("gs://bucket").expect_err("not a kind we have");
        assert!(error.to_string().contains("s3://BUCKET/PREFIX"), "{error}");
        assert!(Artifacts::open("").is_err());
        assert!(Artifacts::open("s3://").is_err());
    }
}
