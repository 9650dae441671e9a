//! Where the parts of a JSON text are. Tolerant: of a text that is none, what looks like parts is given.

/// What a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The name of a member, with its quotes.
    Name,
    /// A value.
    Value,
    /// A name and its value.
    Member,
}

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) kind: Kind,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// Parts looked at; a longer text has enough of them at its beginning.
const MOST: usize = 4_096;

/// Finds them.
pub(crate) fn parts(text: &[u8]) -> Vec<Part> {
    let mut parts = Vec::new();
    // Where each open array or object began.
    let mut open: Vec<usize> = Vec::new();
    // The name that waits for its value, at each depth.
    let mut names: Vec<Option<usize>> = vec![None];
    let mut at = 0;
    while at < text.len() && parts.len() < MOST {
        let start = at;
        let ended = match text[at] {
            b'{' | b'[' => {
                open.push(at);
                names.push(None);
                at += 1;
                continue;
            }
            b'}' | b']' => {
                at += 1;
                if names.len() > 1 {
                    names.pop();
                }
                open.pop()
            }
            b'"' => {
                at = string_end(text, at);
                let after =
                    text[at..].iter().position(|byte| !byte.is_ascii_whitespace()).map(|skip| text[at + skip]);
                if after == Some(b':') {
                    parts.push(Part { kind: Kind::Name, start, end: at });
                    if let Some(name) = names.last_mut() {
                        *name = Some(start);
                    }
                    continue;
                }
                Some(start)
            }
            byte if byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'+' => {
                let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"+-.".contains(byte);
                at += text[at..].iter().position(|byte| !plain(byte)).unwrap_or(text.len() - at);
                Some(start)
            }
            _ => {
                at += 1;
                None
            }
        };
        if let Some(start) = ended {
            parts.push(Part { kind: Kind::Value, start, end: at });
            if let Some(name) = names.last_mut().and_then(Option::take) {
                parts.push(Part { kind: Kind::Member, start: name, end: at });
            }
        }
    }
    parts
}

/// After the string that begins here.
fn string_end(text: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < text.len() {
        match text[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, kind: Kind) -> Vec<&str> {
        parts(text.as_bytes())
            .iter()
            .filter(|part| part.kind == kind)
            .map(|part| &text[part.start..part.end])
            .collect()
    }

    #[test]
    fn the_parts_of_a_text_are_found() {
        let text = r#"{"a": [1, {"b\"": null}], "c": "x:y"}"#;
        assert_eq!(of(text, Kind::Name), [r#""a""#, r#""b\"""#, r#""c""#]);
        assert_eq!(of(text, Kind::Member), [r#""b\"": null"#, r#""a": [1, {"b\"": null}]"#, r#""c": "x:y""#]);
        assert_eq!(
            of(text, Kind::Value),
            ["1", "null", r#"{"b\"": null}"#, r#"[1, {"b\"": null}]"#, r#""x:y""#, text]
        );
    }

    #[test]
    fn what_is_no_json_does_no_harm() {
        for text in ["", "\"", "\"\\", "]]]]", "{{{{", "{\"a\":", "[1,,]", "\u{feff}{}"] {
            parts(text.as_bytes());
        }
    }
}
