//! Takes a tool's output while it comes: a little stays in memory, the rest goes to artifact
//! storage, and an output without end is refused.

use bytes::Bytes;
use longhaul::TaskError;
use serde_json::Value;

use super::{MAX_OUTPUT_BYTES, Output, answer};
use crate::artifact::{ArtifactError, Artifacts, Stored, Writer};
use crate::mask::{Mask, Masking};

/// The most that one call may give, wherever it goes.
pub const MAX_STORED_BYTES: u64 = 256 * 1024 * 1024;

/// Where an output goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keep<'a> {
    /// What may stay in memory.
    inline: usize,
    /// Everything above ends the call.
    limit: u64,
    /// Where what does not stay goes; without it, `inline` is the limit.
    overflow: Option<(&'a Artifacts, &'a str)>,
}

impl<'a> Keep<'a> {
    /// All of it in memory, up to the limit for that.
    pub(super) fn in_memory() -> Self {
        Self { inline: MAX_OUTPUT_BYTES, limit: MAX_OUTPUT_BYTES as u64, overflow: None }
    }

    /// What is longer than `inline` becomes an artifact of the tenant.
    pub(super) fn overflowing(inline: usize, artifacts: &'a Artifacts, tenant: &'a str) -> Self {
        Self { inline, limit: MAX_STORED_BYTES, overflow: Some((artifacts, tenant)) }
    }

    /// Stores bytes beside the output, where there is a storage.
    pub(super) async fn attach(self, bytes: Bytes) -> Result<Option<Stored>, TaskError> {
        let Some((artifacts, tenant)) = self.overflow else { return Ok(None) };
        artifacts.put(tenant, bytes).await.map(Some).map_err(|error| not_stored(&error))
    }

    /// A value that is there already and shows no secret, as an output of this size.
    pub(super) async fn value(self, value: Value) -> Result<Output, TaskError> {
        // A text is stored as it is read, without quotes.
        let text = match &value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        if text.len() <= self.inline {
            return Ok(Output::Value(value));
        }
        let mut collector = Collector::new(self, &Mask::default());
        collector.take(text.as_bytes()).await.map_err(|refused| refused.told("the tool gave"))?;
        collector.finish("the tool gave").await
    }
}

/// Why output is not taken any more.
#[derive(Debug)]
pub(super) enum Refused {
    /// It is longer than this.
    TooLarge(u64),
    /// The storage did not take it.
    Storage(ArtifactError),
}

impl Refused {
    /// The error of the call. `what` is who gave or wrote it.
    pub(super) fn told(self, what: &str) -> TaskError {
        match self {
            Self::TooLarge(limit) => too_large(what, limit),
            Self::Storage(error) => not_stored(&error),
        }
    }
}

/// An output so far, without secrets.
#[derive(Debug)]
pub(super) struct Collector<'a> {
    keep: Keep<'a>,
    mask: Mask,
    masking: Masking,
    /// All of it, until it is too much to be kept.
    kept: Vec<u8>,
    writer: Option<Writer>,
    total: u64,
}

impl<'a> Collector<'a> {
    pub(super) fn new(keep: Keep<'a>, mask: &Mask) -> Self {
        Self { keep, mask: mask.clone(), masking: mask.stream(), kept: Vec::new(), writer: None, total: 0 }
    }

    pub(super) async fn take(&mut self, bytes: &[u8]) -> Result<(), Refused> {
        let shown = self.masking.take(bytes);
        self.add(&shown).await
    }

    async fn add(&mut self, bytes: &[u8]) -> Result<(), Refused> {
        self.total += bytes.len() as u64;
        if self.total > self.keep.limit {
            return Err(Refused::TooLarge(self.keep.limit));
        }
        if self.writer.is_none() && self.total <= self.keep.inline as u64 {
            self.kept.extend_from_slice(bytes);
            return Ok(());
        }
        let Some((artifacts, tenant)) = self.keep.overflow else {
            return Err(Refused::TooLarge(self.keep.inline as u64));
        };
        let writer = self.writer.get_or_insert_with(|| artifacts.writer(tenant));
        if !self.kept.is_empty() {
            let first = std::mem::take(&mut self.kept);
            writer.write(&first).await.map_err(Refused::Storage)?;
        }
        writer.write(bytes).await.map_err(Refused::Storage)
    }

    /// The output is whole. `what` is who gave it.
    pub(super) async fn finish(mut self, what: &str) -> Result<Output, TaskError> {
        let rest = self.masking.rest();
        self.add(&rest).await.map_err(|refused| refused.told(what))?;
        match self.writer {
            // JSON can write a secret in more than one way.
            None => Ok(Output::Value(self.mask.value(answer(&self.kept)))),
            Some(writer) => writer.finish().await.map(Output::Stored).map_err(|error| not_stored(&error)),
        }
    }
}

/// The call was ended in the middle, or its result cannot be kept: what it did is not known, and
/// trying again gives the same. `what` is who gave or wrote it.
fn too_large(what: &str, limit: u64) -> TaskError {
    let message =
        format!("{what} more than {limit} bytes and was stopped; let it write a file and say where that is");
    let mut error = TaskError::in_doubt("output_too_large", message);
    error.retryable = false;
    error.detail("limit", limit)
}

/// It happened, but its result is lost.
fn not_stored(error: &ArtifactError) -> TaskError {
    TaskError::in_doubt("artifact_storage", format!("the output could not be stored: {error}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn artifacts() -> Artifacts {
        Artifacts::open("memory:").expect("in memory")
    }

    fn keep(inline: usize, limit: u64, artifacts: &Artifacts) -> Keep<'_> {
        Keep { inline, limit, overflow: Some((artifacts, "t")) }
    }

    #[tokio::test]
    async fn a_short_output_is_given_and_a_long_one_stored() {
        let artifacts = artifacts();
        let mut short = Collector::new(keep(10, 100, &artifacts), &Mask::default());
        short.take(b"{\"a\": ").await.expect("taken");
        short.take(b"1}").await.expect("taken");
        assert_eq!(short.finish("it gave").await.expect("whole"), Output::Value(json!({"a": 1})));
        let mut long = Collector::new(keep(10, 100, &artifacts), &Mask::default());
        for _ in 0..3 {
            long.take(b"line 1\n").await.expect("taken");
            assert!(long.kept.len() <= 10, "no more than that is kept");
        }
        let Output::Stored(stored) = long.finish("it gave").await.expect("whole") else { panic!("not stored") };
        assert_eq!((stored.bytes, stored.lines), (21, 3));
        let all = artifacts.read("t", &stored.artifact_id, 0..100).await.expect("there");
        assert_eq!(all.as_ref(), b"line 1\nline 1\nline 1\n");
    }

    #[tokio::test]
    async fn an_output_without_end_is_refused() {
        let artifacts = artifacts();
        let mut endless = Collector::new(keep(10, 20, &artifacts), &Mask::default());
        endless.take(&[b'x'; 20]).await.expect("up to the limit");
        assert!(matches!(endless.take(b"x").await, Err(Refused::TooLarge(20))));
        let mut in_memory = Collector::new(Keep { inline: 4, limit: 4, overflow: None }, &Mask::default());
        assert!(matches!(in_memory.take(b"12345").await, Err(Refused::TooLarge(4))));
    }

    #[tokio::test]
    async fn a_secret_is_hidden_in_what_is_given_and_in_what_is_stored() {
        let artifacts = artifacts();
        let mask = Mask::new([("TOKEN".to_owned(), b"s3cret-token".to_vec())]);
        let mut short = Collector::new(keep(100, 100, &artifacts), &mask);
        short.take(br#"{"t": "s3cret\u002dtoken", "u": "s3c"#).await.expect("taken");
        short.take(br#"ret-token"}"#).await.expect("taken");
        let shown = json!({"t": "[TOKEN]", "u": "[TOKEN]"});
        assert_eq!(short.finish("it gave").await.expect("whole"), Output::Value(shown));
        let mut long = Collector::new(keep(4, 100, &artifacts), &mask);
        for piece in ["line 1 s3", "cret-t", "oken\nline 2 s3cret"] {
            long.take(piece.as_bytes()).await.expect("taken");
        }
        let Output::Stored(stored) = long.finish("it gave").await.expect("whole") else { panic!("not stored") };
        let all = artifacts.read("t", &stored.artifact_id, 0..100).await.expect("there");
        assert_eq!(all.as_ref(), b"line 1 [TOKEN]\nline 2 s3cret");
    }

    #[tokio::test]
    async fn a_text_is_stored_as_it_is_read() {
        let artifacts = artifacts();
        let output = keep(4, 100, &artifacts).value(json!("long text")).await.expect("stored");
        let Output::Stored(stored) = output else { panic!("not stored") };
        let all = artifacts.read("t", &stored.artifact_id, 0..100).await.expect("there");
        assert_eq!(all.as_ref(), b"long text");
        assert_eq!(
            keep(9, 100, &artifacts).value(json!("short")).await.expect("kept"),
            Output::Value(json!("short"))
        );
    }
}
