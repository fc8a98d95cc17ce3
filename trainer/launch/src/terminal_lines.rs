//! Converts output to the lines that a terminal finally shows: applies carriage returns and erasures, and removes colours.

use std::collections::VecDeque;

/// Longest line of a log or of the screen, in bytes. A program may write gigabytes without a newline.
const LONGEST: usize = 1 << 20;
/// Longest line of a failure report, in bytes.
const LONGEST_OF_TAIL: usize = 4096;

/// Converts a stream of bytes to complete lines. The end of a line that is too long is replaced by a mark.
#[derive(Debug)]
pub(super) struct TerminalLines {
    line: Vec<u8>,
    /// Most bytes of `line`.
    longest: usize,
    /// Bytes of this line that were left out.
    left_out: usize,
    /// Whether the cursor is at the start after a carriage return, so the next character starts the line again.
    rewind: bool,
    escape: EscapeState,
    /// The last digit of a control sequence's parameters; 0 without one.
    parameter: u8,
}

#[derive(Debug, Default, Clone, Copy, PartialEq)]
enum EscapeState {
    #[default]
    None,
    /// After ESC.
    Begun,
    /// After ESC [: parameters, then a letter.
    Control,
    /// After ESC ]: a title, until BEL or ESC \.
    Title,
}

impl Default for TerminalLines {
    fn default() -> Self {
        Self::up_to(LONGEST)
    }
}

impl TerminalLines {
    /// Keeps at most `longest` bytes of each line.
    fn up_to(longest: usize) -> Self {
        let escape = EscapeState::default();
        Self { line: Vec::new(), longest, left_out: 0, rewind: false, escape, parameter: 0 }
    }

    /// Takes `bytes` and passes each line that they complete, without its newline, to `finished`.
    pub(super) fn take(&mut self, bytes: &[u8], mut finished: impl FnMut(&str)) {
        for byte in bytes {
            self.byte(*byte, &mut finished);
        }
    }

    /// Returns the last line, which has no newline yet.
    pub(super) fn rest(&self) -> String {
        self.text()
    }

    /// Returns the line so far.
    fn text(&self) -> String {
        if self.left_out == 0 {
            return String::from_utf8_lossy(&self.line).into_owned();
        }
        let kept = whole_characters(&self.line);
        let left_out = self.left_out + self.line.len() - kept;
        format!("{} … ({left_out} more bytes)", String::from_utf8_lossy(&self.line[..kept]))
    }

    fn clear(&mut self) {
        self.line.clear();
        self.left_out = 0;
    }

    fn byte(&mut self, byte: u8, finished: &mut impl FnMut(&str)) {
        match (self.escape, byte) {
            (EscapeState::None, 0x1b) => self.escape = EscapeState::Begun,
            (EscapeState::None, b'\n') => {
                finished(&self.text());
                self.clear();
                self.rewind = false;
            }
            (EscapeState::None, b'\r') => self.rewind = true,
            (EscapeState::None, b'\t' | b' '..=0xff) => {
                if std::mem::take(&mut self.rewind) {
                    self.clear();
                }
                if self.line.len() < self.longest {
                    self.line.push(byte);
                } else {
                    self.left_out += 1;
                }
            }
            (EscapeState::None, _) => {}
            (EscapeState::Begun, b'[') => (self.escape, self.parameter) = (EscapeState::Control, b'0'),
            (EscapeState::Begun, b']') => self.escape = EscapeState::Title,
            // Of `ESC ( B`, which selects a character set, one more byte follows.
            (EscapeState::Begun, b' '..=b'/') => {}
            (EscapeState::Begun, _) => self.escape = EscapeState::None,
            (EscapeState::Control, b'0'..=b'9') => self.parameter = byte,
            (EscapeState::Control, b'@'..=b'~') => {
                // K erases in the line, J in the screen: without a parameter only from the cursor on, which erases nothing at the
                // end of the line. A moves up to a line that is then drawn again.
                let from_the_start = self.rewind || self.parameter != b'0';
                if byte == b'A' || (matches!(byte, b'K' | b'J') && from_the_start) {
                    self.clear();
                }
                self.escape = EscapeState::None;
            }
            (EscapeState::Control, _) => {}
            (EscapeState::Title, 0x07) => self.escape = EscapeState::None,
            (EscapeState::Title, 0x1b) => self.escape = EscapeState::Begun,
            (EscapeState::Title, _) => {}
        }
    }
}

/// Returns the length of `bytes` without an incomplete UTF-8 character at their end.
fn whole_characters(bytes: &[u8]) -> usize {
    let last = bytes.iter().rposition(|byte| byte & 0xc0 != 0x80).unwrap_or(0);
    match std::str::from_utf8(&bytes[last..]) {
        Err(error) if error.error_len().is_none() => last,
        _ => bytes.len(),
    }
}

/// The last lines of a stream.
#[derive(Debug)]
pub(super) struct OutputTail {
    lines: VecDeque<String>,
    most: usize,
    filter: TerminalLines,
}

impl OutputTail {
    /// Keeps the last `most` lines.
    pub(super) fn new(most: usize) -> Self {
        Self { lines: VecDeque::new(), most, filter: TerminalLines::up_to(LONGEST_OF_TAIL) }
    }

    /// Takes bytes of the stream.
    pub(super) fn take(&mut self, bytes: &[u8]) {
        let (lines, most) = (&mut self.lines, self.most);
        self.filter.take(bytes, |line| {
            if line.trim().is_empty() {
                return;
            }
            if lines.len() == most {
                lines.pop_front();
            }
            lines.push_back(line.to_owned());
        });
    }

    /// Returns the lines, oldest first, the incomplete one last.
    pub(super) fn lines(&self) -> Vec<String> {
        let rest = Some(self.filter.rest()).filter(|rest| !rest.trim().is_empty());
        let all: Vec<String> = self.lines.iter().cloned().chain(rest).collect();
        all[all.len().saturating_sub(self.most)..].to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(bytes: &[u8]) -> (Vec<String>, String) {
        let (mut filter, mut found) = (TerminalLines::default(), Vec::new());
        // Byte by byte: a read may end anywhere
        bytes.chunks(1).for_each(|byte| filter.take(byte, |line| found.push(line.to_owned())));
        (found, filter.rest())
    }

    #[test]
    fn progress_bars_leave_their_last_state() {
        for (bytes, finished, rest) in [
            (&b"one\ntwo\r\nthree"[..], &["one", "two"][..], "three"),
            (b"\r\x1b[2K 10 %\r\x1b[2K 20 %\r\x1b[2Kepoch 1\n\r\x1b[2K 30 %", &["epoch 1"], " 30 %"),
            (b"10 %\r20 %\rdone\n", &["done"], ""),
            (b"\x1b[1;31mred\x1b[0m plain\n", &["red plain"], ""),
            (b"\x1b]0;title\x07text\n", &["text"], ""),
            (b"x.c:1: \x1b[01;31m\x1b[Kerror: \x1b[m\x1b[Kmissing ;\n", &["x.c:1: error: missing ;"], ""),
            (b"\r[3/9] a.o\x1b[K\r\x1b[K[4/9] b.o\x1b[K", &[], "[4/9] b.o"),
            (b"\x1b[1mbold\x1b(B\x1b[m\n", &["bold"], ""),
            ("grün\n".as_bytes(), &["grün"], ""),
            (b"bell\x07\n", &["bell"], ""),
        ] {
            assert_eq!(lines(bytes), (finished.iter().map(|s| s.to_string()).collect(), rest.to_owned()));
        }
    }

    #[test]
    fn the_end_of_a_line_that_is_too_long_is_marked() {
        let (mut filter, mut found) = (TerminalLines::up_to(4), Vec::new());
        filter.take("abcd\nabcdef\nab€€\nabcdef\rgh\nabcdefg".as_bytes(), |line| found.push(line.to_owned()));
        assert_eq!(found, ["abcd", "abcd … (2 more bytes)", "ab … (6 more bytes)", "gh"]);
        assert_eq!(filter.rest(), "abcd … (3 more bytes)");
    }

    /// A line of JSON may have more bytes than a report shows.
    #[test]
    fn long_lines_are_whole_on_the_screen_and_cut_in_reports() {
        let long = vec![b'x'; 100_000];
        assert_eq!(lines(&long).1.len(), long.len());
        let mut tail = OutputTail::new(1);
        tail.take(&long);
        assert!(tail.lines()[0].ends_with("x … (95904 more bytes)"));
    }

    #[test]
    fn a_tail_keeps_the_last_lines_and_the_unfinished_one() {
        let mut tail = OutputTail::new(3);
        tail.take(b"a\nb\n\n  \nc\nd\ne");
        assert_eq!(tail.lines(), ["c", "d", "e"]);
        tail.take(b"\nf\n");
        assert_eq!(tail.lines(), ["d", "e", "f"]);
    }
}
