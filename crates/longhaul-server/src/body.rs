//! Reading requests: bodies, query strings and paths, with every malformed one answered as a problem
//! before anything else happens, the same whatever the store.
//!
//! A JSON body is looked through before it is read into types: a duplicate member, a NUL, a lone surrogate or too
//! much nesting anywhere in it, also inside a task's input, is refused. What is stored can then be read
//! by everyone.

use std::collections::HashSet;
use std::fmt;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use longhaul::TaskId;
use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use crate::problem::Problem;
use crate::state::App;

/// The deepest nesting of arrays and objects.
const MAX_DEPTH: usize = 64;

/// A JSON body. No body at all is read as `{}`, so that requests whose fields are all optional need none.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<App> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, app: &App) -> Result<Self, Problem> {
        let headers = request.headers().clone();
        let bytes = read(request.into_body(), &headers, app).await?;
        parse(&bytes).map(Self)
    }
}

/// Reads a body within the server's bounds of size and time.
pub(crate) async fn read(body: Body, headers: &HeaderMap, app: &App) -> Result<Bytes, Problem> {
    let settings = app.settings();
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING)
        && encoding != "identity"
    {
        return Err(Problem::new("unsupported_media_type", "a body must come without Content-Encoding"));
    }
    let collected =
        tokio::time::timeout(settings.request_timeout, Limited::new(body, settings.max_body).collect());
    let bytes = match collected.await {
        Err(_) => {
            let seconds = settings.request_timeout.as_secs();
            return Err(Problem::new("request_timeout", format!("the body did not arrive within {seconds} s")));
        }
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let max = settings.max_body;
            return Err(Problem::new("too_large", format!("the body has more than {max} bytes")).with("max", max));
        }
        Ok(Err(_)) => return Err(Problem::new("invalid_json", "the body was cut off or malformed in transfer")),
        Ok(Ok(body)) => body.to_bytes(),
    };
    if !bytes.is_empty() && !is_json(headers) {
        return Err(Problem::new(
            "unsupported_media_type",
            "the body must be JSON, with Content-Type: application/json",
        ));
    }
    Ok(bytes)
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || kind == "application/merge-patch+json" || kind.ends_with("+json")
}

/// Reads JSON into a type, after looking through all of it.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let text = if bytes.is_empty() { b"{}" } else { bytes };
    let text = std::str::from_utf8(text)
        .map_err(|error| Problem::new("invalid_json", format!("the body is not UTF-8: {error}")))?;
    look_through(text)
        .map_err(|error| Problem::new("invalid_json", format!("the body cannot be read: {error}")))?;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let why = without_place(&error.into_inner());
        if path == "." {
            Problem::new("invalid_field", why)
        } else {
            Problem::field(&path, format!("is wrong: {why}"))
        }
    })
}

/// The message alone: a place in a line helps nobody when the field is named.
fn without_place(error: &serde_json::Error) -> String {
    let message = error.to_string();
    message.rsplit_once(" at line ").map_or(message.clone(), |(message, _)| message.to_owned())
}

fn look_through(text: &str) -> serde_json::Result<()> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    Sound { depth: 0 }.deserialize(&mut deserializer)?;
    deserializer.end()
}

/// Visits every value and keeps none.
#[derive(Clone, Copy)]
struct Sound {
    depth: usize,
}

impl Sound {
    fn inner<E: serde::de::Error>(self) -> Result<Self, E> {
        if self.depth == MAX_DEPTH {
            return Err(E::custom(format!("it is nested more than {MAX_DEPTH} levels deep")));
        }
        Ok(Self { depth: self.depth + 1 })
    }
}

impl<'de> DeserializeSeed<'de> for Sound {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Sound {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        if text.contains('\0') {
            return Err(E::custom("a string has the character U+0000"));
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        let inner = self.inner()?;
        while elements.next_element_seed(inner)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let inner = self.inner()?;
        let mut names: HashSet<String> = HashSet::new();
        while let Some(name) = members.next_key::<String>()? {
            if name.contains('\0') {
                return Err(A::Error::custom("a name has the character U+0000"));
            }
            if names.contains(&name) {
                return Err(A::Error::custom(format!("the member '{}' is there twice", name.escape_debug())));
            }
            names.insert(name);
            members.next_value_seed(inner)?;
        }
        Ok(())
    }
}

/// The query string.
pub(crate) struct Params<T>(pub(crate) T);

impl<T: DeserializeOwned + Send> FromRequestParts<App> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let query = parts.uri.query().unwrap_or_default();
        if query.contains("%00") {
            return Err(Problem::new("invalid_parameter", "the query string has the character U+0000"));
        }
        match Query::<T>::from_request_parts(parts, app).await {
            Ok(Query(params)) => Ok(Self(params)),
            Err(error) => Err(Problem::new("invalid_parameter", error.body_text())),
        }
    }
}

/// The task that the path names, and the path's other segments.
pub(crate) struct OfTask<T = ()>(pub(crate) TaskId, pub(crate) T);

impl FromRequestParts<App> for OfTask {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let segment = Segment::from_request_parts(parts, app).await?;
        Ok(Self(task_id(&segment.0)?, ()))
    }
}

impl FromRequestParts<App> for OfTask<String> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let path = Path::<(String, String)>::from_request_parts(parts, app).await;
        let Path((id, other)) = path.map_err(|_| Problem::new("not_found", "there is no such path"))?;
        Ok(Self(task_id(&id)?, other))
    }
}

/// The only variable segment of the path.
pub(crate) struct Segment(pub(crate) String);

impl FromRequestParts<App> for Segment {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let path = Path::<String>::from_request_parts(parts, app).await;
        let Path(segment) = path.map_err(|_| Problem::new("not_found", "there is no such path"))?;
        Ok(Self(segment))
    }
}

/// What is not an id names no task.
pub(crate) fn task_id(text: &str) -> Result<TaskId, Problem> {
    text.parse().map_err(|_| Problem::no_task(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        #[allow(dead_code, reason = "only whether it can be read matters")]
        priority: Option<u8>,
        input: Option<Box<serde_json::value::RawValue>>,
    }

    fn code(text: &str) -> &'static str {
        parse::<Sample>(text.as_bytes()).expect_err("must be refused").code()
    }

    #[test]
    fn what_could_not_be_kept_the_same_everywhere_is_refused_wherever_it_stands() {
        for hostile in [
            r#"{"input": {"a": 1, "a": 2}}"#,
            r#"{"input": ["\u0000"]}"#,
            r#"{"input": {"\u0000": 1}}"#,
            r#"{"input": "\ud800"}"#,
            r#"{"input": NaN}"#,
            r#"{"input": 1e999}"#,
            r#"{"input": 1} x"#,
            r#"{"input": "#,
            "\u{feff}{}",
        ] {
            assert_eq!(code(hostile), "invalid_json", "{hostile}");
        }
        let deep = format!("{{\"input\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000));
        assert_eq!(code(&deep), "invalid_json");
        assert!(parse::<Sample>(b"\xff").is_err());
    }

    #[test]
    fn a_wrong_field_is_named() {
        for (text, field) in [
            (r#"{"priority": 300}"#, "priority"),
            (r#"{"priority": 99999999999999999999999}"#, "priority"),
            (r#"{"priority": "high"}"#, "priority"),
            (r#"{"priorty": 1}"#, "priorty"),
        ] {
            let problem = parse::<Sample>(text.as_bytes()).expect_err("must be refused");
            assert_eq!(problem.code(), "invalid_field");
            assert!(problem.to_json()["detail"].as_str().expect("a sentence").contains(field), "{problem:?}");
        }
    }

    #[test]
    fn input_is_kept_as_it_was_written() {
        let sample: Sample = parse(br#"{"input": {"b":1.10,  "a":[]}}"#).expect("can be read");
        assert_eq!(sample.input.expect("is there").get(), r#"{"b":1.10,  "a":[]}"#);
    }
}
