//! Damaged images that were replaced by other images of their class (`data.on_error = "skip"`).

use std::collections::HashSet;
use std::path::PathBuf;

use data::loader::Batch;

use crate::console;

/// Maximum number of damaged images that a process names. Further damaged images are only counted.
const NAMED: usize = 20;

/// Counts replaced images, and names each damaged file once.
#[derive(Debug, Default)]
pub struct ReplacedImages {
    count: u64,
    /// The files, and the positions in archives, that were named.
    named: HashSet<(PathBuf, String)>,
}

impl ReplacedImages {
    /// Counts the replaced images of batches.
    pub fn add<'a>(&mut self, batches: impl IntoIterator<Item = &'a Batch>) {
        for error in batches.into_iter().flat_map(|batch| &batch.replaced) {
            self.count += 1;
            if self.named.len() < NAMED && self.named.insert((error.file.clone(), error.place.clone())) {
                let last = if self.named.len() == NAMED { "; more are not named" } else { "" };
                console::eprint(format_args!("warning: replaced by the next image of its class: {error}{last}"));
            }
        }
    }

    /// Returns the number of replacements. An image counts once per use.
    pub fn count(&self) -> u64 {
        self.count
    }
}
