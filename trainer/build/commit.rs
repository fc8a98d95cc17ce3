//! The commit of a checkout, read from `.git` directly, so that a build needs no git program.

use std::fs;
use std::path::{Path, PathBuf};

/// A commit, and what changes when another commit is checked out.
#[derive(Debug, PartialEq, Eq)]
pub struct Commit {
    /// The full id, SHA-1 or SHA-256.
    pub id: String,
    /// Files and folders that exist.
    pub watched: Vec<PathBuf>,
}

/// Returns the commit of the checkout whose top folder is `folder`. `None` outside a checkout, before the first commit, and for
/// unknown layouts. Folders above are not searched: an archive of the sources may be unpacked inside another repository.
pub fn of_checkout(folder: &Path) -> Option<Commit> {
    let dot_git = folder.join(".git");
    // In a linked work tree or submodule, `.git` is a file with the path of the actual folder.
    let git = match fs::read_to_string(&dot_git) {
        Ok(link) => dot_git.parent()?.join(link.strip_prefix("gitdir:")?.trim()),
        Err(_) => dot_git,
    };
    let head = fs::read_to_string(git.join("HEAD")).ok()?;
    let Some(reference) = head.trim().strip_prefix("ref:").map(str::trim) else {
        return Some(Commit { id: hash(&head)?, watched: vec![git.join("HEAD")] });
    };
    // The branches of a linked work tree are in the main folder.
    let common = match fs::read_to_string(git.join("commondir")) {
        Ok(common) => git.join(common.trim()),
        Err(_) => git.clone(),
    };
    let packed = common.join("packed-refs");
    // A commit on a packed branch makes a file of the branch.
    let watched = [git.join("HEAD"), common.join(reference), packed.clone(), common.join("refs/heads")];
    let loose = |folder: &Path| fs::read_to_string(folder.join(reference)).ok().and_then(|text| hash(&text));
    let id = loose(&git).or_else(|| loose(&common)).or_else(|| {
        let text = fs::read_to_string(&packed).ok()?;
        let line = text.lines().find_map(|line| line.split_once(' ').filter(|(_, name)| *name == reference));
        line.and_then(|(id, _)| hash(id))
    });
    let is_loose = watched[1].exists();
    // Cargo runs a build script again and again because of a file that does not exist. Other branches' commits do not matter.
    let watched = watched.into_iter().enumerate().filter(|(at, path)| path.exists() && (*at < 3 || !is_loose));
    Some(Commit { id: id?, watched: watched.map(|(_, path)| path).collect() })
}

/// Returns `text` if it is a full commit id, SHA-1 or SHA-256.
fn hash(text: &str) -> Option<String> {
    let id = text.trim();
    (matches!(id.len(), 40 | 64) && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| id.to_owned())
}
