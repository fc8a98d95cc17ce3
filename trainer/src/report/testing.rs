//! Helpers that the tests of this module share.

use std::{
    io::{self, Write},
    sync::Arc,
};

use parking_lot::Mutex;

/// A buffer for a screen's lines, which tests read afterwards.
#[derive(Clone, Default)]
pub(crate) struct TestOutput(Arc<Mutex<Vec<u8>>>);

impl TestOutput {
    /// Returns a writer to the same buffer.
    pub(crate) fn writer(&self) -> Option<Box<dyn Write + Send>> {
        Some(Box::new(self.clone()))
    }

    /// Returns all text written so far.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock()).into_owned()
    }
}

impl Write for TestOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
