//! Data on stdout. A reader that goes away (`| head`) ends the program quietly instead of in a panic.

use std::io::{ErrorKind, IsTerminal, Write};

use crate::exit::Failure;

/// Prints one line.
pub(crate) fn line(text: impl AsRef<str>) -> Result<(), Failure> {
    let mut text = text.as_ref().to_owned();
    text.push('\n');
    raw(text.as_bytes())
}

/// Writes bytes as they are.
pub(crate) fn raw(bytes: &[u8]) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|error| failed(&error))
}

fn failed(error: &std::io::Error) -> Failure {
    match error.kind() {
        ErrorKind::BrokenPipe => Failure::reader_gone(),
        _ => Failure::internal(format!("cannot write to stdout: {error}")),
    }
}

/// Says something that is not data.
pub(crate) fn note(text: impl AsRef<str>) {
    // When nobody can read it, nobody misses it.
    let _ = writeln!(std::io::stderr(), "{}", text.as_ref());
}

/// Whether a person looks at both stdout and stderr, so that something may be drawn.
pub(crate) fn for_eyes() -> bool {
    std::io::stdout().is_terminal() && std::io::stderr().is_terminal()
}

/// Text of others on one line: what could move the cursor or change the terminal is taken out.
pub(crate) fn clean(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\r' | '\t' => clean.push(' '),
            // Characters that turn the direction of writing could make one text look like another.
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {}
            c if c.is_control() => clean.push('\u{fffd}'),
            c => clean.push(c),
        }
    }
    clean
}

/// As [`clean`], but at most so many characters.
pub(crate) fn short(text: &str, most: usize) -> String {
    let text = clean(text);
    if text.chars().count() <= most {
        return text;
    }
    let mut cut: String = text.chars().take(most.saturating_sub(1)).collect();
    cut.push('…');
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_others_cannot_drive_the_terminal() {
        assert_eq!(clean("a\u{1b}[2Jb\nc\u{9b}d\u{202e}e"), "a\u{fffd}[2Jb c\u{fffd}de");
        assert_eq!(short("abcdef", 4), "abc…");
        assert_eq!(short("abcd", 4), "abcd");
    }
}
