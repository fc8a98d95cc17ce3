//! Whole screens: the location, the excerpt with its caret, the hint. What the user reads is in `snapshots/`.

use std::path::Path;

use super::load;
use super::{BASE, read, registry, set};
use crate::config::Overrides;

#[test]
fn excerpts_and_carets() {
    let spaces = " ".repeat(300);
    let after_base = [
        ("two columns per character on the screen, one in the location", "[log]\n\"学習率\" = 1 # 学習\n"),
        ("tabs become four spaces", "[train]\n\t\tepochs\t=\t-1\t# few\n"),
        ("a long line is cut", &format!("[train]\nbatch_scope = {spaces}\"globe\" # {spaces}\n")),
        ("several mistakes in the order of the file", "[train]\nepochs = -1\nbatch = 2\n[log]\n[optimizer]\nlr = 0\n"),
    ];
    let whole = [
        ("accents", "[model]\nname = \"é\" # ok\n[data]\n\"学習\" = \"学習\" x\n"),
        ("line ends of Windows", "[model]\r\nname = \"x\"\r\n[data]\r\nname = \"mnist\"\r\n"),
        ("a byte-order mark", "\u{feff}name = \"lenet\"\n"),
        ("nested too deep", &format!("x = {}", "[".repeat(1000))),
    ];
    let texts = after_base.map(|(title, lines)| (title, format!("{BASE}{lines}"))).into_iter();
    let texts = texts.chain(whole.map(|(title, text)| (title, text.to_owned())));
    let screen = |(title, text): (&str, String)| {
        let errors = read(&text, &Overrides::default()).expect_err(title);
        format!("{title}:\n{errors}")
    };
    let mut screens: Vec<String> = texts.map(screen).collect();
    let errors = read(BASE, &set(&["log.every=0", "model.name=a\nb"])).unwrap_err();
    screens.push(format!("flags come last, control characters are spelt out:\n{errors}"));
    insta::assert_snapshot!(screens.join("\n\n"));
}

/// A file's name, then the files of its folder with their bytes.
type Case<'a> = (&'a str, &'a [(&'a str, &'a [u8])]);

#[test]
fn files_that_cannot_be_read_as_text() {
    let quickstart: (&str, &[u8]) = ("quickstart.toml", b"");
    let large = vec![b' '; (1 << 20) + 1];
    let cases: [Case; 8] = [
        ("cifar_resnet81.toml", &[("cifar_resnet18.toml", b""), quickstart]),
        ("mine.toml", &[quickstart]),
        ("mine.toml", &[]),
        ("none/mine.toml", &[]),
        ("", &[quickstart]),
        ("x.toml", &[("x.toml", b"[model]\nname = \"caf\xe9\"\n")]),
        ("x.toml", &[("x.toml", &large)]),
        ("x.toml", &[("x.toml", b"")]),
    ];
    let screen = |(name, files): Case| {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            std::fs::write(folder.path().join(name), bytes).unwrap();
        }
        let errors = load(&Path::join(folder.path(), name), &Overrides::default(), &registry()).unwrap_err();
        errors.to_string().replace(&folder.path().display().to_string(), "DIR")
    };
    insta::assert_snapshot!(cases.map(screen).join("\n\n"));
}
