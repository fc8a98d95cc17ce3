//! Text as a terminal would show it in the end: carriage returns, erasures and colours of progress bars applied, not kept.

use std::collections::VecDeque;
use std::time::Instant;

/// Longest line that is kept; a program that writes megabytes without a newline is cut.
const LONGEST: usize = 4096;

/// Turns a stream of bytes into finished lines.
#[derive(Debug, Default)]
pub struct Lines {
    line: Vec<u8>,
    /// The cursor went back to the start: the next character begins the line anew.
    rewind: bool,
    escape: Escape,
}

#[derive(Debug, Default, Clone, Copy, PartialEq)]
enum Escape {
    #[default]
    None,
    /// After ESC.
    Begun,
    /// After ESC [: parameters, then a letter.
    Control,
    /// After ESC ]: a title, until BEL or ESC \.
    Title,
}

impl Lines {
    /// Takes `bytes` and gives each line that they finish, without its newline, to `finished`.
    pub fn take(&mut self, bytes: &[u8], mut finished: impl FnMut(&str)) {
        for byte in bytes {
            self.byte(*byte, &mut finished);
        }
    }

    /// What stands on the last line, which has no newline.
    pub fn rest(&self) -> String {
        String::from_utf8_lossy(&self.line).into_owned()
    }

    fn byte(&mut self, byte: u8, finished: &mut impl FnMut(&str)) {
        match (self.escape, byte) {
            (Escape::None, 0x1b) => self.escape = Escape::Begun,
            (Escape::None, b'\n') => {
                finished(&String::from_utf8_lossy(&self.line));
                self.line.clear();
                self.rewind = false;
            }
            (Escape::None, b'\r') => self.rewind = true,
            (Escape::None, b'\t' | b' '..=0xff) => {
                if std::mem::take(&mut self.rewind) {
                    self.line.clear();
                }
                if self.line.len() < LONGEST {
                    self.line.push(byte);
                }
            }
            (Escape::None, _) => {}
            (Escape::Begun, b'[') => self.escape = Escape::Control,
            (Escape::Begun, b']') => self.escape = Escape::Title,
            (Escape::Begun, _) => self.escape = Escape::None,
            (Escape::Control, b'@'..=b'~') => {
                // K erases the line, J the screen, A goes up to a line that is drawn again
                if matches!(byte, b'K' | b'J' | b'A') {
                    self.line.clear();
                }
                self.escape = Escape::None;
            }
            (Escape::Control, _) => {}
            (Escape::Title, 0x07) => self.escape = Escape::None,
            (Escape::Title, 0x1b) => self.escape = Escape::Begun,
            (Escape::Title, _) => {}
        }
    }
}

/// The last lines of a stream.
#[derive(Debug)]
pub struct Tail {
    lines: VecDeque<String>,
    most: usize,
    filter: Lines,
    /// When the stream last said something.
    pub last: Option<Instant>,
}

impl Tail {
    /// Keeps the last `most` lines.
    pub fn new(most: usize) -> Self {
        Self { lines: VecDeque::new(), most, filter: Lines::default(), last: None }
    }

    /// Takes what the stream said.
    pub fn take(&mut self, bytes: &[u8]) {
        let (lines, most) = (&mut self.lines, self.most);
        self.last = Some(Instant::now());
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

    /// The lines, oldest first, with the unfinished one.
    pub fn lines(&self) -> Vec<String> {
        let rest = Some(self.filter.rest()).filter(|rest| !rest.trim().is_empty());
        let all: Vec<String> = self.lines.iter().cloned().chain(rest).collect();
        all[all.len().saturating_sub(self.most)..].to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(bytes: &[u8]) -> (Vec<String>, String) {
        let (mut filter, mut found) = (Lines::default(), Vec::new());
        // byte by byte: a read may end anywhere
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
            ("grün\n".as_bytes(), &["grün"], ""),
            (b"bell\x07\n", &["bell"], ""),
        ] {
            assert_eq!(lines(bytes), (finished.iter().map(|s| s.to_string()).collect(), rest.to_owned()));
        }
        assert_eq!(lines(&vec![b'x'; 3 * LONGEST]).1.len(), LONGEST);
    }

    #[test]
    fn a_tail_keeps_the_last_lines_and_the_unfinished_one() {
        let mut tail = Tail::new(3);
        tail.take(b"a\nb\n\n  \nc\nd\ne");
        assert_eq!(tail.lines(), ["c", "d", "e"]);
        tail.take(b"\nf\n");
        assert_eq!(tail.lines(), ["d", "e", "f"]);
    }
}
