//! Server-sent events out of bytes, however the network cuts them.
//!
//! Only the data of events matters here: both providers say in it what the event is.

/// Takes bytes, gives the data of events.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// The bytes of a line that has no end yet.
    line: Vec<u8>,
    /// The last byte was `\r`: a `\n` now belongs to the same line end.
    after_return: bool,
    /// The data lines of an event that has no end yet.
    data: Option<String>,
}

impl Events {
    /// Takes more bytes; `event` is called with the data of each event that they end.
    pub(super) fn take<E>(
        &mut self,
        bytes: &[u8],
        event: &mut impl FnMut(String) -> Result<(), E>,
    ) -> Result<(), E> {
        for &byte in bytes {
            let after_return = std::mem::replace(&mut self.after_return, byte == b'\r');
            match byte {
                b'\n' if after_return => {}
                b'\n' | b'\r' => {
                    if let Some(data) = self.end_line() {
                        event(data)?;
                    }
                }
                _ => self.line.push(byte),
            }
        }
        Ok(())
    }

    /// The data of the last event when the stream ended without ending it.
    pub(super) fn rest(mut self) -> Option<String> {
        if !self.line.is_empty() {
            self.end_line();
        }
        self.data
    }

    /// Takes the line for what it is; the data of an event, if the line ends one.
    fn end_line(&mut self) -> Option<String> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            return self.data.take();
        }
        let line = String::from_utf8_lossy(&line);
        let line = line.strip_prefix('\u{feff}').unwrap_or(&line);
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        if field == "data" {
            let value = value.strip_prefix(' ').unwrap_or(value);
            match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The events of these pieces, and what is left at the end.
    fn events<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<String>, Option<String>) {
        let mut events = Events::default();
        let mut seen = Vec::new();
        for piece in pieces {
            let taken = events.take(piece, &mut |data| {
                seen.push(data);
                Ok::<_, ()>(())
            });
            assert_eq!(taken, Ok(()));
        }
        (seen, events.rest())
    }

    fn whole(text: &str) -> (Vec<String>, Option<String>) {
        events([text.as_bytes()])
    }

    fn told(data: &[&str]) -> Vec<String> {
        data.iter().map(|&data| data.to_owned()).collect()
    }

    #[test]
    fn every_line_end_ends_a_line() {
        for end in ["\n", "\r\n", "\r"] {
            let text = format!("event: delta{end}data: 1{end}{end}data:2{end}data: 3{end}{end}");
            assert_eq!(whole(&text), (told(&["1", "2\n3"]), None), "{end:?}");
        }
    }

    #[test]
    fn comments_and_unknown_fields_are_no_events() {
        assert_eq!(whole("\u{feff}: keep-alive\n\nid: 7\nretry: 1\n\n\n\ndata\n\n"), (told(&[""]), None));
    }

    #[test]
    fn an_event_without_an_end_is_what_is_left() {
        assert_eq!(whole("data: 1\n\ndata: [DONE]"), (told(&["1"]), Some("[DONE]".to_owned())));
        assert_eq!(whole("data: 1\n\ndata: 2\n"), (told(&["1"]), Some("2".to_owned())));
    }

    #[test]
    fn an_error_ends_the_taking() {
        let mut seen = 0;
        let taken = Events::default().take(b"data: 1\n\ndata: 2\n\n", &mut |_| {
            seen += 1;
            Err("no")
        });
        assert_eq!((taken, seen), (Err("no"), 1));
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(
            text in r"(data: ?|: |event: |é|\{\}|\n|\r|\r\n){0,40}",
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
        ) {
            let bytes = text.as_bytes();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]);
            prop_assert_eq!(events(pieces), whole(&text));
        }
    }
}
