//! Server-sent events out of bytes, whatever the pieces they arrive in.

/// An event larger than this is a fault of the server: tasks' inputs and results are smaller.
const MAX_EVENT_BYTES: usize = 64 * 1024 * 1024;

/// One event of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    /// The `id:` that came with it; frames without a number are live only.
    pub(crate) id: Option<String>,
    pub(crate) data: String,
}

/// The stream is not one of events.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooLarge;

/// Takes bytes and gives the frames that are complete.
#[derive(Debug)]
pub(crate) struct Parser {
    /// How many bytes an event may have.
    limit: usize,
    line: Vec<u8>,
    data: String,
    has_data: bool,
    id: Option<String>,
    /// The byte before was a carriage return, which a line feed may follow.
    after_return: bool,
    begun: bool,
}

impl Default for Parser {
    fn default() -> Self {
        Self::with_limit(MAX_EVENT_BYTES)
    }
}

impl Parser {
    fn with_limit(limit: usize) -> Self {
        Self {
            limit,
            line: Vec::new(),
            data: String::new(),
            has_data: false,
            id: None,
            after_return: false,
            begun: false,
        }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<Vec<Frame>, TooLarge> {
        let mut frames = Vec::new();
        for &byte in bytes {
            let second_half = std::mem::take(&mut self.after_return) && byte == b'\n';
            match byte {
                _ if second_half => {}
                b'\n' | b'\r' => {
                    self.after_return = byte == b'\r';
                    frames.extend(self.end_of_line());
                }
                _ if self.line.len() + self.data.len() >= self.limit => return Err(TooLarge),
                _ => self.line.push(byte),
            }
        }
        Ok(frames)
    }

    fn end_of_line(&mut self) -> Option<Frame> {
        let line = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&line);
        let line = if self.begun { &*line } else { line.trim_start_matches('\u{feff}') };
        self.begun = true;
        if line.is_empty() {
            let (id, data) = (self.id.take(), std::mem::take(&mut self.data));
            return std::mem::take(&mut self.has_data).then_some(Frame { id, data });
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => {
                if self.has_data {
                    self.data.push('\n');
                }
                self.has_data = true;
                self.data.push_str(value);
            }
            "id" if !value.contains('\0') => self.id = Some(value.to_owned()),
            // A comment (the heartbeat), or a field that means nothing to us.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = ": hello\r\n\r\nid: 1\ndata: {\"a\":\ndata: 1}\n\nevent: x\rdata:grün\r\rid: 2\n\ndata\n\nid: 3\ndata: cut";

    fn frames() -> Vec<Frame> {
        let frame = |id: Option<&str>, data: &str| Frame { id: id.map(str::to_owned), data: data.to_owned() };
        vec![frame(Some("1"), "{\"a\":\n1}"), frame(None, "grün"), frame(None, "")]
    }

    #[test]
    fn events_are_the_same_wherever_the_stream_is_cut_into_pieces() {
        for cut in 0..=STREAM.len() {
            let mut parser = Parser::default();
            let mut found = parser.push(&STREAM.as_bytes()[..cut]).expect("small");
            found.extend(parser.push(&STREAM.as_bytes()[cut..]).expect("small"));
            assert_eq!(found, frames(), "cut at {cut}");
        }
    }

    #[test]
    fn no_stream_is_so_strange_that_pieces_make_a_difference() {
        longhaul_hostile::check("events", 5_000, |stream| {
            let whole = Parser::default().push(stream).expect("small");
            let mut parser = Parser::default();
            let pieces: Vec<Frame> =
                stream.chunks(3).flat_map(|piece| parser.push(piece).expect("small")).collect();
            assert_eq!(pieces, whole);
            if whole.is_empty() { longhaul_hostile::Judged::Refused } else { longhaul_hostile::Judged::Accepted }
        });
    }

    #[test]
    fn an_event_that_is_not_complete_is_not_given() {
        let mut parser = Parser::default();
        assert_eq!(parser.push(b"id: 7\ndata: half").expect("small"), []);
        assert_eq!(parser.push(b" and half\n").expect("small"), []);
        assert_eq!(parser.push(b"\n").expect("small")[0].data, "half and half");
    }

    #[test]
    fn a_stream_without_line_ends_is_refused_instead_of_kept() {
        assert_eq!(Parser::with_limit(100).push(&[b'x'; 101]), Err(TooLarge));
        let mut parser = Parser::with_limit(100);
        let refused = (0..10).any(|_| parser.push(b"data: 0123456789\n").is_err());
        assert!(refused);
    }
}
