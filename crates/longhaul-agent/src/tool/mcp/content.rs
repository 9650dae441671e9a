//! What an MCP tool gave: structured content when there is some, else its text. Images and other blobs
//! are stored where there is a storage, and described.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use longhaul::TaskError;
use rmcp::model::{CallToolResult, ContentBlock, ResourceContents};
use serde_json::{Value, json};

use crate::artifact::cut_to;
use crate::mask::Mask;
use crate::tool::collect::Keep;
use crate::tool::{MAX_COMPLAINT_BYTES, Output, answer};

/// The result of a call, or the failure that it is, without secrets.
pub(super) async fn output(
    tool: &str,
    result: CallToolResult,
    keep: Keep<'_>,
    mask: &Mask,
) -> Result<Output, TaskError> {
    let failed = result.is_error == Some(true);
    let mut texts = Vec::new();
    let mut attachments = Vec::new();
    for block in result.content {
        match block {
            ContentBlock::Text(text) => texts.push(text.text),
            ContentBlock::Image(image) => attachments.push(Blob::new("image", Some(image.mime_type), &image.data)),
            ContentBlock::Audio(audio) => attachments.push(Blob::new("audio", Some(audio.mime_type), &audio.data)),
            ContentBlock::Resource(embedded) => match embedded.resource {
                ResourceContents::TextResourceContents { text, .. } => texts.push(text),
                ResourceContents::BlobResourceContents { blob, mime_type, uri, .. } => {
                    let mut attachment = Blob::new("resource", mime_type, &blob);
                    attachment.description["uri"] = json!(uri);
                    attachments.push(attachment);
                }
                _ => {}
            },
            ContentBlock::ResourceLink(link) => {
                let description = json!({"type": "resource_link", "uri": link.uri, "name": link.name});
                attachments.push(Blob { description, bytes: None });
            }
            _ => {}
        }
    }
    let text = mask.text(&texts.join("\n"));
    if failed {
        let said = if text.is_empty() { "it did not say why" } else { cut_to(&text, MAX_COMPLAINT_BYTES) };
        return Err(TaskError::retryable("tool_failed", format!("{tool} failed: {said}")));
    }
    let value = mask.value(result.structured_content.unwrap_or_else(|| answer(text.as_bytes())));
    if attachments.is_empty() {
        return keep.value(value).await;
    }
    let mut described = Vec::new();
    for attachment in attachments {
        described.push(mask.value(attachment.store(keep, mask).await?));
    }
    keep.value(json!({"result": value, "attachments": described})).await
}

/// Something that is not text.
struct Blob {
    description: Value,
    bytes: Option<Vec<u8>>,
}

impl Blob {
    fn new(kind: &str, mime_type: Option<String>, data: &str) -> Self {
        let bytes = STANDARD.decode(data).ok();
        let size = bytes.as_ref().map(Vec::len);
        Self { description: json!({"type": kind, "mime_type": mime_type, "bytes": size}), bytes }
    }

    async fn store(mut self, keep: Keep<'_>, mask: &Mask) -> Result<Value, TaskError> {
        if let Some(bytes) = self.bytes
            && let Some(stored) = keep.attach(Bytes::from(mask.bytes(&bytes))).await?
        {
            self.description["artifact_id"] = json!(stored.artifact_id);
        }
        Ok(self.description)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::artifact::Artifacts;

    fn result(content: Value) -> CallToolResult {
        serde_json::from_value(content).expect("a result of the protocol")
    }

    async fn value(content: Value) -> Value {
        match output("look", result(content), Keep::in_memory(), &Mask::default()).await.expect("no failure") {
            Output::Value(value) => value,
            Output::Stored(stored) => panic!("stored: {stored:?}"),
        }
    }

    #[tokio::test]
    async fn structured_content_comes_first_and_texts_are_joined() {
        let text = |text: &str| json!({"type": "text", "text": text});
        assert_eq!(value(json!({"content": [text("a"), text("b")]})).await, json!("a\nb"));
        assert_eq!(value(json!({"content": [text("{\"a\": 1}")]})).await, json!({"a": 1}));
        assert_eq!(value(json!({"content": [text("a")], "structuredContent": {"n": 1}})).await, json!({"n": 1}));
        assert_eq!(value(json!({"content": []})).await, Value::Null);
    }

    #[tokio::test]
    async fn an_error_of_the_tool_is_a_known_failure() {
        let failed = result(json!({"content": [{"type": "text", "text": "no such file"}], "isError": true}));
        let error = output("look", failed, Keep::in_memory(), &Mask::default()).await.expect_err("failed");
        assert_eq!((error.code.as_str(), error.retryable, error.is_in_doubt()), ("tool_failed", true, false));
        assert_eq!(error.message, "look failed: no such file");
    }

    #[tokio::test]
    async fn images_are_stored_and_described() {
        let content = json!({"content": [{"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png"},
                                         {"type": "text", "text": "a picture"}]});
        let artifacts = Artifacts::open("memory:").expect("in memory");
        let keep = Keep::overflowing(1_000, &artifacts, "t");
        let Output::Value(given) =
            output("look", result(content.clone()), keep, &Mask::default()).await.expect("given")
        else {
            panic!("the description is short");
        };
        let image = &given["attachments"][0];
        assert_eq!((&given["result"], &image["bytes"]), (&json!("a picture"), &json!(8)));
        let id = image["artifact_id"].as_str().expect("stored");
        assert_eq!(artifacts.read("t", id, 0..8).await.expect("there").as_ref(), b"\x89PNG\r\n\x1a\n");
        assert_eq!(value(content).await["attachments"][0].get("artifact_id"), None);
    }
}
