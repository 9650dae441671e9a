//! CloudEvents 1.0: how events look on the bus, and how tasks may come in.
//!
//! Structured: the body is JSON with everything in it. Binary: the body is the data, and the attributes are headers whose
//! names begin as the protocol binding of the broker says (`ce-`, `ce_`, `cloudEvents_`).

use longhaul::Event;
use percent_encoding::{AsciiSet, CONTROLS, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::bus::Message;

/// The content type of a structured one.
const STRUCTURED: &str = "application/cloudevents+json";
const JSON: &str = "application/json";
/// What the types of our events begin with.
const TYPE_PREFIX: &str = "dev.longhaul.";
/// What attributes begin with, as headers, at brokers of any kind.
const PREFIXES: [&str; 4] = ["ce-", "ce_", "cloudEvents_", "cloudEvents:"];
/// What a tenant's name is written as in a URI.
const IN_URI: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// What is not written into headers of NATS as it is, which are as those of HTTP.
const HEADER: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%');

/// How an event is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Everything in the body, as JSON.
    #[default]
    Structured,
    /// The data in the body, the rest in headers.
    Binary,
}

/// The id of an event, the same however often it is sent.
pub(crate) fn event_id(event: &Event) -> String {
    format!("{}/{}", event.task_id, event.seq)
}

/// Attributes of an event in the order in which people like to read them.
fn attributes(tenant: &str, event: &Event) -> Vec<(&'static str, Value)> {
    let tenant = utf8_percent_encode(tenant, IN_URI);
    let mut attributes = vec![
        ("specversion", json!("1.0")),
        ("id", json!(event_id(event))),
        ("source", json!(format!("/longhaul/{tenant}"))),
        ("type", json!(format!("{TYPE_PREFIX}{}", event.kind))),
        ("subject", json!(event.task_id)),
        ("time", json!(event.time)),
        ("sequence", json!(event.seq.to_string())),
        ("run", json!(event.run.to_string())),
    ];
    if let Some(step) = &event.step {
        attributes.push(("step", json!(step)));
    }
    attributes
}

/// An event as a message, for a broker whose headers begin with `prefix` and that takes bodies of `max_bytes`. Data that
/// are larger are left out, and the attribute `dataomitted` says how large they are: the event still tells that it
/// happened, and the task has the data.
pub(crate) fn message(tenant: &str, event: &Event, mode: Mode, prefix: &str, max_bytes: usize) -> Message {
    let mut attributes = attributes(tenant, event);
    attributes.push(("datacontenttype", json!(JSON)));
    let whole = written(&attributes, Some(&event.data), mode, prefix);
    let mut message = if whole.body.len() <= max_bytes {
        whole
    } else {
        let bytes = event.data.to_string().len();
        tracing::warn!(id = event_id(event), bytes, "an event's data are larger than the broker takes; left out");
        attributes.push(("dataomitted", json!(bytes.to_string())));
        written(&attributes, None, mode, prefix)
    };
    message.id = Some(event_id(event));
    message.key = Some(event.task_id.to_string());
    message
}

fn written(attributes: &[(&str, Value)], data: Option<&Value>, mode: Mode, prefix: &str) -> Message {
    match mode {
        Mode::Structured => {
            let mut body = Map::new();
            for (name, value) in attributes {
                body.insert((*name).to_owned(), value.clone());
            }
            if let Some(data) = data {
                body.insert("data".to_owned(), data.clone());
            }
            Message {
                content_type: Some(STRUCTURED.to_owned()),
                body: Value::Object(body).to_string().into(),
                ..Message::default()
            }
        }
        Mode::Binary => {
            let header = |(name, value): &(&str, Value)| {
                let text = value.as_str().unwrap_or_default();
                let text = match prefix {
                    "ce-" => utf8_percent_encode(text, HEADER).to_string(),
                    _ => text.to_owned(),
                };
                (format!("{prefix}{name}"), text)
            };
            Message {
                content_type: Some(JSON.to_owned()),
                headers: attributes.iter().map(header).collect(),
                body: data.map(Value::to_string).unwrap_or_default().into(),
                ..Message::default()
            }
        }
    }
}

/// A message as it comes in, CloudEvent or not.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// What it says, JSON.
    pub(crate) data: String,
    /// Source and id of a CloudEvent, which together are unique.
    pub(crate) identity: Option<(String, String)>,
    /// The trace that a CloudEvent belongs to.
    pub(crate) traceparent: Option<String>,
}

/// A structured CloudEvent, as far as it matters here.
#[derive(Deserialize)]
struct Structured<'a> {
    specversion: String,
    id: String,
    source: String,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    data_base64: Option<String>,
    traceparent: Option<String>,
}

/// Whether JSON that came without a content type is a structured CloudEvent.
#[derive(Deserialize)]
struct Probe {
    #[serde(default)]
    specversion: Option<Value>,
}

/// Reads a message; says what is wrong with it otherwise.
pub(crate) fn read(message: &Message) -> Result<Incoming, String> {
    let body = std::str::from_utf8(&message.body).map_err(|error| format!("the body is not UTF-8: {error}"))?;
    let kind = message.content_type.as_deref().unwrap_or_default().to_ascii_lowercase();
    if kind.starts_with("application/cloudevents") && !kind.starts_with(STRUCTURED) {
        return Err(format!("the content type is '{kind}'; of CloudEvents only {STRUCTURED} is read"));
    }
    let is_structured = kind.starts_with(STRUCTURED)
        || serde_json::from_str::<Probe>(body).is_ok_and(|probe| probe.specversion.is_some());
    if is_structured {
        return structured(body);
    }
    match attribute(message, "specversion") {
        Some(version) => binary(message, body, &version),
        None => Ok(Incoming { data: body.to_owned(), identity: None, traceparent: None }),
    }
}

fn structured(body: &str) -> Result<Incoming, String> {
    let event: Structured<'_> =
        serde_json::from_str(body).map_err(|error| format!("the CloudEvent cannot be read: {error}"))?;
    check_version(&event.specversion)?;
    let Some(data) = event.data else {
        return Err(match event.data_base64 {
            Some(_) => "the CloudEvent has 'data_base64'; its data must be JSON, in 'data'".to_owned(),
            None => "the CloudEvent has no 'data'; it must be the task that is asked for".to_owned(),
        });
    };
    identified(data.get().to_owned(), event.source, event.id, event.traceparent)
}

fn binary(message: &Message, body: &str, version: &str) -> Result<Incoming, String> {
    check_version(version)?;
    let needed =
        |name: &str| attribute(message, name).ok_or_else(|| format!("the CloudEvent has no attribute '{name}'"));
    identified(body.to_owned(), needed("source")?, needed("id")?, attribute(message, "traceparent"))
}

fn check_version(version: &str) -> Result<(), String> {
    if version == "1.0" {
        return Ok(());
    }
    Err(format!("the CloudEvent has the version '{}'; only 1.0 is read", version.escape_debug()))
}

fn identified(data: String, source: String, id: String, traceparent: Option<String>) -> Result<Incoming, String> {
    if source.is_empty() || id.is_empty() {
        return Err("the CloudEvent's 'source' and 'id' must not be empty".to_owned());
    }
    Ok(Incoming { data, identity: Some((source, id)), traceparent })
}

/// An attribute of a binary CloudEvent.
fn attribute(message: &Message, name: &str) -> Option<String> {
    PREFIXES.iter().find_map(|prefix| {
        let value = message.header(&format!("{prefix}{name}"))?;
        match *prefix {
            "ce-" => Some(percent_decode_str(value).decode_utf8_lossy().into_owned()),
            _ => Some(value.to_owned()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul::TaskId;

    fn event() -> Event {
        Event {
            seq: 7,
            task_id: TaskId("01890a5d-ac96-774b-bcce-b302099a8057".parse().expect("an id")),
            kind: "task.completed".to_owned(),
            time: "2026-01-02T03:04:05.5Z".parse().expect("a time"),
            run: 3,
            step: Some("ein Schritt ä".to_owned()),
            data: json!({"result": [1, 2]}),
        }
    }

    #[test]
    fn an_event_is_a_cloud_event_with_an_id_that_stays() {
        let message = message("a team", &event(), Mode::Structured, "ce-", 10_000);
        let body: Value = serde_json::from_slice(&message.body).expect("JSON");
        assert_eq!(
            body,
            json!({
                "specversion": "1.0",
                "id": "01890a5d-ac96-774b-bcce-b302099a8057/7",
                "source": "/longhaul/a%20team",
                "type": "dev.longhaul.task.completed",
                "subject": "01890a5d-ac96-774b-bcce-b302099a8057",
                "time": "2026-01-02T03:04:05.5Z",
                "datacontenttype": "application/json",
                "sequence": "7",
                "run": "3",
                "step": "ein Schritt ä",
                "data": {"result": [1, 2]},
            })
        );
        assert_eq!(message.content_type.as_deref(), Some("application/cloudevents+json"));
        assert_eq!(message.id.as_deref(), Some("01890a5d-ac96-774b-bcce-b302099a8057/7"));
        assert_eq!(message.key.as_deref(), Some("01890a5d-ac96-774b-bcce-b302099a8057"));
    }

    #[test]
    fn a_binary_one_has_its_attributes_in_headers() {
        for prefix in ["ce-", "ce_", "cloudEvents_"] {
            let message = message("default", &event(), Mode::Binary, prefix, 10_000);
            assert_eq!(&message.body[..], br#"{"result":[1,2]}"#);
            assert_eq!(message.content_type.as_deref(), Some("application/json"));
            let header = |name: &str| message.header(&format!("{prefix}{name}")).map(str::to_owned);
            assert_eq!(header("type").as_deref(), Some("dev.longhaul.task.completed"));
            assert_eq!(header("datacontenttype").as_deref(), Some("application/json"));
            assert_eq!(attribute(&message, "step").as_deref(), Some("ein Schritt ä"));
            assert!(prefix != "ce-" || header("step").is_some_and(|step| step.is_ascii()));
        }
    }

    #[test]
    fn data_that_the_broker_does_not_take_are_left_out_and_that_is_said() {
        let mut event = event();
        event.data = json!("x".repeat(5_000));
        for mode in [Mode::Structured, Mode::Binary] {
            let message = message("default", &event, mode, "ce_", 1_000);
            assert!(message.body.len() <= 1_000);
            let said = message.header("ce_dataomitted").map(str::to_owned).or_else(|| {
                let body: Value = serde_json::from_slice(&message.body).expect("JSON");
                assert_eq!(body.get("data"), None);
                body["dataomitted"].as_str().map(str::to_owned)
            });
            assert_eq!(said.as_deref(), Some("5002"));
        }
    }

    fn incoming(content_type: Option<&str>, headers: &[(&str, &str)], body: &str) -> Result<Incoming, String> {
        read(&Message {
            content_type: content_type.map(str::to_owned),
            headers: headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            body: body.to_owned().into(),
            ..Message::default()
        })
    }

    #[test]
    fn a_task_comes_as_json_or_in_either_form_of_a_cloud_event() {
        let task = r#"{"handler": "x"}"#;
        let plain = incoming(None, &[], task).expect("can be read");
        assert_eq!((plain.data.as_str(), plain.identity), (task, None));
        let event = format!(r#"{{"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": {task}}}"#);
        let headers = [("ce_specversion", "1.0"), ("ce_id", "1"), ("ce_source", "/s"), ("ce_type", "t")];
        for read in [
            incoming(Some("application/cloudevents+json; charset=utf-8"), &[], &event),
            incoming(None, &[], &event),
            incoming(Some("application/json"), &headers, task),
        ] {
            let read = read.expect("can be read");
            assert_eq!(read.data, task);
            assert_eq!(read.identity, Some(("/s".to_owned(), "1".to_owned())));
        }
    }

    #[test]
    fn what_is_wrong_with_a_cloud_event_is_said() {
        for (content_type, headers, body, said) in [
            (Some("application/cloudevents+avro"), &[][..], "{}", "application/cloudevents+json"),
            (Some(STRUCTURED), &[], "{", "cannot be read"),
            (None, &[], r#"{"specversion": "0.3", "id": "1", "source": "s", "data": 1}"#, "0.3"),
            (None, &[], r#"{"specversion": "1.0", "id": "1", "source": "s"}"#, "no 'data'"),
            (
                None,
                &[],
                r#"{"specversion": "1.0", "id": "1", "source": "s", "data_base64": "eA=="}"#,
                "data_base64",
            ),
            (None, &[], r#"{"specversion": "1.0", "id": "", "source": "s", "data": 1}"#, "empty"),
            (None, &[("ce_specversion", "1.0"), ("ce_id", "1")], "1", "'source'"),
        ] {
            let error = incoming(content_type, headers, body).expect_err("must be refused");
            assert!(error.contains(said), "{error}");
        }
        assert!(read(&Message { body: vec![0xff].into(), ..Message::default() }).is_err());
    }
}
