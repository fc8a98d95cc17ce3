//! Finds images that a data set lists more than once.

use std::collections::HashMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// The device and the inode of a file: two paths and a link may lead to the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Inode(u64, u64);

impl Inode {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self(metadata.dev(), metadata.ino())
    }
}

/// The split that an image is listed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Split {
    Train,
    Val,
    Test,
}

/// Why a data set may not list an image twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DuplicateKind {
    /// An image has one label.
    Label,
    /// A test image must not be trained on.
    Split,
    /// A validation split by `data.validation` would have images that are trained on.
    Validation,
}

/// Returns the first image that may not be listed twice: an earlier location, the later location, and the kind of mistake. An image
/// may not have two labels or two splits. If the training set will be split (`splits`), it may not have an image twice. `images`
/// has one item per listing: inode, label, split, location.
pub(super) fn first_duplicate<L: PartialEq, T: Copy>(
    images: impl IntoIterator<Item = (Inode, L, Split, T)>,
    splits: bool,
) -> Option<(T, T, DuplicateKind)> {
    let mut seen: HashMap<Inode, (L, Split, T)> = HashMap::new();
    for (inode, label, part, place) in images {
        let repeat = match seen.get(&inode) {
            None => None,
            Some((other, ..)) if *other != label => Some(DuplicateKind::Label),
            Some((_, other, _)) if *other != part => Some(DuplicateKind::Split),
            Some(_) => (splits && part == Split::Train).then_some(DuplicateKind::Validation),
        };
        let before = seen.insert(inode, (label, part, place));
        if let (Some(repeat), Some((.., first))) = (repeat, before) {
            return Some((first, place, repeat));
        }
    }
    None
}
