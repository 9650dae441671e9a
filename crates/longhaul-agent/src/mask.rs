//! Secrets in what tools and models say: a known value is replaced by the name of its variable, before
//! anything is kept, stored or told. A tool may print its token, or a provider repeat its key; neither must
//! reach a store, a log or a model.

use std::borrow::Cow;
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;

use serde_json::{Map, Value};

/// Shorter values are no secrets, and would be found everywhere.
pub(crate) const MIN_SECRET_BYTES: usize = 8;

/// Values that must not be shown, and what is shown instead.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mask {
    /// Longest first: one may begin with another.
    secrets: Arc<[Secret]>,
    /// What they begin with: most bytes need no closer look.
    firsts: Vec<u8>,
}

#[derive(Clone)]
struct Secret {
    value: Vec<u8>,
    shown: String,
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.shown)
    }
}

impl Mask {
    /// Hides the values that these variables have in the environment of this process, now.
    pub(crate) fn of_env(names: &[String]) -> Self {
        let value = |name: &String| Some((name.clone(), std::env::var_os(name)?.into_vec()));
        Self::new(names.iter().filter_map(value))
    }

    /// Hides these values, each behind the name that goes with it.
    pub(crate) fn new(secrets: impl IntoIterator<Item = (String, Vec<u8>)>) -> Self {
        let mut all: Vec<Secret> = Vec::new();
        for (name, value) in secrets {
            let shown = format!("[{name}]");
            // What is read from a file often ends with a line break, and is used without.
            for value in [value.trim_ascii().to_vec(), escaped(&value)] {
                if value.len() >= MIN_SECRET_BYTES && !all.iter().any(|known| known.value == value) {
                    all.push(Secret { value, shown: shown.clone() });
                }
            }
        }
        all.sort_by_key(|secret| std::cmp::Reverse(secret.value.len()));
        let mut firsts: Vec<u8> = all.iter().filter_map(|secret| secret.value.first().copied()).collect();
        firsts.sort_unstable();
        firsts.dedup();
        Self { secrets: all.into(), firsts }
    }

    fn is_empty(&self) -> bool {
        self.secrets.is_empty()
    }

    /// Bytes that are all there is.
    pub(crate) fn bytes(&self, bytes: &[u8]) -> Vec<u8> {
        let mut shown = Vec::with_capacity(bytes.len());
        self.replace(bytes, bytes.len(), &mut shown);
        shown
    }

    /// A text that is all there is.
    pub(crate) fn text(&self, text: &str) -> String {
        match self.is_empty() {
            true => text.to_owned(),
            // A secret that is not text can leave half a character behind.
            false => String::from_utf8_lossy(&self.bytes(text.as_bytes())).into_owned(),
        }
    }

    /// A value, with its names and texts.
    pub(crate) fn value(&self, value: Value) -> Value {
        match value {
            _ if self.is_empty() => value,
            Value::String(text) => Value::String(self.text(&text)),
            Value::Array(items) => items.into_iter().map(|item| self.value(item)).collect(),
            Value::Object(fields) => Value::Object(self.fields(fields)),
            // A secret may be a number.
            Value::Number(number) => {
                let text = number.to_string();
                let shown = self.text(&text);
                if shown == text { Value::Number(number) } else { Value::String(shown) }
            }
            plain @ (Value::Null | Value::Bool(_)) => plain,
        }
    }

    pub(crate) fn fields(&self, fields: Map<String, Value>) -> Map<String, Value> {
        fields.into_iter().map(|(name, value)| (self.text(&name), self.value(value))).collect()
    }

    /// For what comes piece by piece.
    pub(crate) fn stream(&self) -> Masking {
        Masking { mask: self.clone(), held: Vec::new() }
    }

    /// Shows everything that begins before `end`, and says up to where that went.
    fn replace(&self, bytes: &[u8], end: usize, shown: &mut Vec<u8>) -> usize {
        let mut from = 0;
        while let Some((at, secret)) = self.first(&bytes[from..], end.saturating_sub(from)) {
            shown.extend_from_slice(&bytes[from..from + at]);
            shown.extend_from_slice(secret.shown.as_bytes());
            from += at + secret.value.len();
        }
        let end = end.max(from);
        shown.extend_from_slice(&bytes[from..end]);
        end
    }

    /// The first secret that begins before `end`, and where.
    fn first(&self, bytes: &[u8], end: usize) -> Option<(usize, &Secret)> {
        let candidates = bytes.iter().take(end).enumerate().filter(|(_, byte)| self.firsts.contains(byte));
        candidates.map(|(at, _)| at).find_map(|at| {
            let secret = self.secrets.iter().find(|secret| bytes[at..].starts_with(&secret.value))?;
            Some((at, secret))
        })
    }

    /// Where the longest end of these bytes begins that may be the beginning of a secret.
    fn open_end(&self, bytes: &[u8]) -> usize {
        let longest = self.secrets.first().map_or(0, |secret| secret.value.len());
        let first = bytes.len().saturating_sub(longest.saturating_sub(1));
        let opens = |from: &usize| {
            let end = &bytes[*from..];
            self.firsts.contains(&end[0])
                && self
                    .secrets
                    .iter()
                    .any(|secret| secret.value.len() > end.len() && secret.value.starts_with(end))
        };
        (first..bytes.len()).find(opens).unwrap_or(bytes.len())
    }
}

/// Hides secrets in what comes piece by piece, also those that lie across pieces.
#[derive(Clone, Debug, Default)]
pub(crate) struct Masking {
    mask: Mask,
    /// What may be the beginning of a secret: shorter than the longest.
    held: Vec<u8>,
}

impl Masking {
    /// What can be shown now.
    pub(crate) fn take<'p>(&mut self, piece: &'p [u8]) -> Cow<'p, [u8]> {
        if self.mask.is_empty() {
            return Cow::Borrowed(piece);
        }
        self.held.extend_from_slice(piece);
        let mut shown = Vec::with_capacity(self.held.len());
        let end = self.mask.replace(&self.held, self.mask.open_end(&self.held), &mut shown);
        self.held.drain(..end);
        Cow::Owned(shown)
    }

    /// What was held back, once nothing more comes.
    pub(crate) fn rest(&self) -> Vec<u8> {
        self.mask.bytes(&self.held)
    }
}

/// The value as it stands within JSON.
fn escaped(value: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(value.trim_ascii());
    let quoted = Value::from(text.as_ref()).to_string();
    quoted.as_bytes()[1..quoted.len() - 1].to_vec()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn mask(secrets: &[(&str, &str)]) -> Mask {
        Mask::new(secrets.iter().map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec())))
    }

    #[test]
    fn a_secret_is_replaced_by_its_name_wherever_it_stands() {
        let mask = mask(&[("TOKEN", "s3cret-token\n"), ("LONGER", "s3cret-token-2"), ("SHORT", "abc")]);
        assert_eq!(mask.text("a s3cret-token, s3cret-token-2 abc"), "a [TOKEN], [LONGER] abc");
        let value = json!({"s3cret-token": ["x s3cret-token"], "n": 7});
        assert_eq!(mask.value(value), json!({"[TOKEN]": ["x [TOKEN]"], "n": 7}));
        assert_eq!(self::mask(&[("PIN", "12345678")]).value(json!(12345678)), json!("[PIN]"));
    }

    #[test]
    fn a_secret_is_found_as_json_writes_it_and_in_what_is_no_text() {
        let mask = mask(&[("PEM", "line \"one\"\nline two")]);
        assert_eq!(mask.text(r#"{"pem": "line \"one\"\nline two"}"#), r#"{"pem": "[PEM]"}"#);
        assert_eq!(mask.bytes(b"\xffline \"one\"\nline two\xfe"), b"\xff[PEM]\xfe");
        let bytes = Mask::new([("B".to_owned(), b"\xff\xfe\xff\xfe\xff\xfe\xff\xfe".to_vec())]);
        assert_eq!(bytes.bytes(b"a\xff\xfe\xff\xfe\xff\xfe\xff\xfeb"), b"a[B]b");
    }

    #[test]
    fn a_large_secret_is_hidden_too() {
        let large = "0123456789abcdef".repeat(8_192);
        let mask = mask(&[("LARGE", &large), ("OTHER", "s3cret-token")]);
        assert_eq!(mask.text(&format!("<{large}> <s3cret-token>")), "<[LARGE]> <[OTHER]>");
    }

    #[test]
    fn what_begins_like_a_secret_and_is_none_is_shown() {
        let mut masking = mask(&[("TOKEN", "s3cret-token")]).stream();
        assert_eq!(masking.take(b"a s3cret").as_ref(), b"a ");
        assert_eq!(masking.take(b"-tomato s3").as_ref(), b"s3cret-tomato ");
        assert_eq!(masking.rest(), b"s3");
        assert_eq!(Mask::default().stream().take(b"s3cret-token").as_ref(), b"s3cret-token");
    }

    proptest! {
        #[test]
        fn pieces_are_masked_as_the_whole_is(
            parts in prop::collection::vec(prop::sample::select(vec!["aaaaaaaab", "aaaaaaaabaaaaaaaab", "a", "b", "aaaa", "x"]), 0..12),
            cuts in prop::collection::vec(0usize..80, 0..8),
        ) {
            let mask = mask(&[("ONE", "aaaaaaaab"), ("TWO", "aaaaaaaabaaaaaaaab")]);
            let whole = parts.concat();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(whole.len())).collect();
            cuts.push(whole.len());
            cuts.sort_unstable();
            let mut masking = mask.stream();
            let mut shown = Vec::new();
            let mut from = 0;
            for cut in cuts {
                shown.extend_from_slice(&masking.take(&whole.as_bytes()[from..cut]));
                from = cut;
            }
            shown.extend(masking.rest());
            prop_assert_eq!(String::from_utf8(shown).expect("text"), mask.text(&whole));
        }
    }
}
