//! Strict reading of JSON from outside: a duplicate member, a NUL, a lone surrogate or too much nesting anywhere in it, also
//! inside a task's input, is refused. What is stored can then be read by everyone.

use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{
    Deserialize, DeserializeOwned, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor,
};

/// The deepest nesting of arrays and objects.
const MAX_DEPTH: usize = 64;

/// What is wrong with a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// It is no JSON that is accepted.
    #[error("{0}")]
    Json(String),
    /// It is JSON, but not what is asked for.
    #[error("{0}")]
    Shape(String),
    /// A field of it is wrong.
    #[error("'{field}' {why}")]
    Field {
        /// Which.
        field: String,
        /// What is wrong with it.
        why: String,
    },
}

/// Reads an object into a type, after looking through all of it. Nothing at all is read as `{}`, so that requests whose
/// fields are all optional need no body.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, BadRequest> {
    read_value::<Object<T>>(bytes).map(|object| object.0)
}

/// As [`read`], for what may be any JSON.
pub fn read_value<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, BadRequest> {
    let text = if bytes.is_empty() { b"{}" } else { bytes };
    let text =
        std::str::from_utf8(text).map_err(|error| BadRequest::Json(format!("the body is not UTF-8: {error}")))?;
    look_through(text).map_err(|error| BadRequest::Json(format!("the body cannot be read: {error}")))?;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let field = error.path().to_string();
        let why = without_place(&error.into_inner());
        if field == "." {
            BadRequest::Shape(why)
        } else {
            BadRequest::Field { field, why: format!("is wrong: {why}") }
        }
    })
}

/// A value that comes as an object with named members. Serde would also take an array for a struct, by the places of
/// its fields, and the next field that is added would change what such a request means.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Members(PhantomData))
    }
}

struct Members<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Members<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<Object<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(members)).map(Object)
    }
}

/// Reads a field that is an object, or not there: `#[serde(default, deserialize_with = …)]`.
pub(super) fn object_or_nothing<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    Ok(Option::<Object<T>>::deserialize(deserializer)?.map(|object| object.0))
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

    fn refused(text: &str) -> BadRequest {
        read::<Sample>(text.as_bytes()).expect_err("must be refused")
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
            assert!(matches!(refused(hostile), BadRequest::Json(_)), "{hostile}");
        }
        let deep = format!("{{\"input\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000));
        assert!(matches!(refused(&deep), BadRequest::Json(_)));
        assert!(read::<Sample>(b"\xff").is_err());
    }

    #[test]
    fn a_wrong_field_is_named() {
        for (text, field) in [
            (r#"{"priority": 300}"#, "priority"),
            (r#"{"priority": 99999999999999999999999}"#, "priority"),
            (r#"{"priority": "high"}"#, "priority"),
            (r#"{"priorty": 1}"#, "priorty"),
        ] {
            let error = refused(text);
            assert!(!matches!(error, BadRequest::Json(_)) && error.to_string().contains(field), "{error:?}");
        }
    }

    #[test]
    fn an_array_is_no_object_whose_members_are_in_order() {
        for text in ["[1, 2]", "[]", r#"[null, {}]"#, "7", "\"a\"", "null", "true"] {
            let error = refused(text);
            assert!(
                matches!(&error, BadRequest::Shape(why) if why.ends_with("expected an object")),
                "{text}: {error:?}"
            );
        }
        assert!(read::<Sample>(b"").expect("nothing is an empty object").input.is_none());
        assert_eq!(read_value::<Vec<u8>>(b"[1, 2]").expect("any JSON"), [1, 2]);
        let nested = br#"{"handler": "h", "webhook": ["http://127.0.0.1/", []]}"#;
        let error = read::<crate::request::Submit>(nested).expect_err("no object either");
        assert!(matches!(&error, BadRequest::Field { field, .. } if field == "webhook"), "{error:?}");
    }

    #[test]
    fn input_is_kept_as_it_was_written() {
        let sample: Sample = read(br#"{"input": {"b":1.10,  "a":[]}}"#).expect("can be read");
        assert_eq!(sample.input.expect("is there").get(), r#"{"b":1.10,  "a":[]}"#);
    }
}
