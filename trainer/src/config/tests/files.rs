//! Files that cannot be read as text.

use std::path::Path;

use insta::assert_snapshot;

use super::registry;
use crate::config::{Overrides, load};

/// What the user reads about the file `name` of a folder that `fill` has filled; the folder's path is cut away.
fn unreadable(name: &str, fill: impl Fn(&Path)) -> String {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path());
    let path = folder.path().join(name);
    let errors = load(&path, &Overrides::default(), &registry()).unwrap_err();
    errors.to_string().replace(&folder.path().display().to_string(), "DIR")
}

fn write(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) {
    std::fs::write(folder.join(name), bytes).unwrap();
}

#[test]
fn missing_with_a_near_name() {
    let fill = |folder: &Path| {
        write(folder, "cifar_resnet18.toml", "");
        write(folder, "quickstart.toml", "");
    };
    assert_snapshot!(unreadable("cifar_resnet81.toml", fill), @"
    error: no such file
      --> DIR/cifar_resnet81.toml
      hint: did you mean `DIR/cifar_resnet18.toml`?
    ");
}

#[test]
fn missing_with_other_names() {
    assert_snapshot!(unreadable("mine.toml", |folder| write(folder, "quickstart.toml", "")), @"
    error: no such file
      --> DIR/mine.toml
      hint: `DIR` holds quickstart.toml
    ");
}

#[test]
fn missing_in_an_empty_folder() {
    assert_snapshot!(unreadable("mine.toml", |_| ()), @"
    error: no such file
      --> DIR/mine.toml
      hint: `DIR` holds no .toml file
    ");
}

#[test]
fn missing_folder() {
    assert_snapshot!(unreadable("none/mine.toml", |_| ()), @"
    error: no such file
      --> DIR/none/mine.toml
      hint: there is no folder `DIR/none`; paths are relative to the current directory
    ");
}

#[test]
fn folder() {
    assert_snapshot!(unreadable("", |folder| write(folder, "quickstart.toml", "")), @"
    error: this is a folder, not a configuration file
      --> DIR/
      hint: give one of its files: quickstart.toml
    ");
}

#[test]
fn not_utf8() {
    assert_snapshot!(unreadable("x.toml", |folder| write(folder, "x.toml", b"[model]\nname = \"caf\xe9\"\n")), @r#"
    error: not UTF-8 text: byte 0xe9
     --> DIR/x.toml:2:12
      |
    2 | name = "caf�"
      |            ^
      hint: save the file as UTF-8 text
    "#);
}

#[test]
fn too_large() {
    assert_snapshot!(unreadable("x.toml", |folder| write(folder, "x.toml", vec![b' '; (1 << 20) + 1])), @"
    error: larger than 1 MiB: not a configuration file
      --> DIR/x.toml
      hint: give the TOML file that describes the run, such as configs/quickstart.toml
    ");
}

#[test]
fn empty() {
    assert_snapshot!(unreadable("x.toml", |folder| write(folder, "x.toml", "")), @r#"
    error: missing section [model]
      --> DIR/x.toml
      hint: write `name = "lenet"` below `[model]`; names: lenet, vgg11, vgg16, resnet18, resnet50, resnet101

    error: missing section [data]
      --> DIR/x.toml
      hint: write `name = "cifar10"` below `[data]`; names: cifar10, cifar100, mnist, fashion-mnist, fashion-mini, image-folder
    "#);
}
