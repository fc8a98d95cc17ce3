//! Damaged images that others of their class replaced (`data.on_error = "skip"`).

use std::collections::HashSet;
use std::path::PathBuf;

use data::loader::Batch;

use crate::console;

/// Damaged images that a process names. More of them are counted only.
const NAMED: usize = 20;

/// Counts replaced images, and names each damaged file once.
#[derive(Debug, Default)]
pub struct ReplacedImages {
    count: u64,
    /// The files, and the places in archives.
    named: HashSet<(PathBuf, String)>,
}

impl ReplacedImages {
    /// Counts the images that batches replaced.
    pub fn add<'a>(&mut self, batches: impl IntoIterator<Item = &'a Batch>) {
        for error in batches.into_iter().flat_map(|batch| &batch.replaced) {
            self.count += 1;
            if self.named.len() < NAMED && self.named.insert((error.file.clone(), error.place.clone())) {
                let last = if self.named.len() == NAMED { "; more are not named" } else { "" };
                console::eprint(format_args!("warning: replaced by the next image of its class: {error}{last}"));
            }
        }
    }

    /// Returns the number of replaced images, each counted as often as it was needed.
    pub fn count(&self) -> u64 {
        self.count
    }
}
