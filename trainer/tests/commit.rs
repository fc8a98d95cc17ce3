//! The commit that `build.rs` passes to the program.

#[path = "../build/commit.rs"]
mod checkout;

use std::fs;

use checkout::of_checkout;

const COMMIT: &str = "8d5a1f6f0c6e4b6d9a3f2e1d0c9b8a7968574635";

#[test]
fn the_commit_is_found_in_every_layout_of_a_git_folder() {
    let dir = tempfile::tempdir().unwrap();
    let git = dir.path().join(".git");
    let top = dir.path().to_owned();
    let inner = top.join("a/b");
    let commit = |folder: &std::path::Path| of_checkout(folder).map(|commit| commit.id);
    fs::create_dir_all(&inner).unwrap();
    assert_eq!(commit(&top), None, "no checkout");
    fs::create_dir_all(git.join("refs/heads")).unwrap();
    fs::write(git.join("HEAD"), "ref: refs/heads/main\n").unwrap();
    assert_eq!(commit(&top), None, "a repository without a commit");
    fs::write(git.join("packed-refs"), format!("# pack-refs with: peeled\n{COMMIT} refs/heads/main\n")).unwrap();
    assert_eq!(commit(&top).as_deref(), Some(COMMIT), "packed");
    let watched = of_checkout(&top).unwrap().watched;
    assert_eq!(
        watched,
        ["HEAD", "packed-refs", "refs/heads"].map(|name| git.join(name)),
        "the next commit makes a file"
    );
    let newer = COMMIT.replace('8', "9");
    fs::write(git.join("refs/heads/main"), format!("{newer}\n")).unwrap();
    assert_eq!(commit(&top), Some(newer.clone()), "loose comes before packed");
    assert_eq!(commit(&inner), None, "sources below another repository");
    let watched = of_checkout(&top).unwrap().watched;
    assert_eq!(watched, ["HEAD", "refs/heads/main", "packed-refs"].map(|name| git.join(name)));
    // A linked work tree.
    let tree = dir.path().join("tree");
    fs::create_dir_all(git.join("worktrees/tree")).unwrap();
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join(".git"), "gitdir: ../.git/worktrees/tree\n").unwrap();
    fs::write(git.join("worktrees/tree/HEAD"), "ref: refs/heads/main\n").unwrap();
    fs::write(git.join("worktrees/tree/commondir"), "../..\n").unwrap();
    assert_eq!(commit(&tree), Some(newer));
    fs::write(git.join("HEAD"), format!("{COMMIT}\n")).unwrap();
    assert_eq!(commit(&top).as_deref(), Some(COMMIT), "detached");
}
