//! Modules import only modules of lower layers (ARCHITECTURE.md lists the layers). Crates import only what its table allows.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path.as_ref()).unwrap_or_else(|error| panic!("{}: {error}", path.as_ref().display()))
}

/// Returns the Rust files below `folder`.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| match path.is_dir() {
            true => sources(&path),
            false => Vec::from_iter((path.extension().is_some_and(|extension| extension == "rs")).then_some(path)),
        })
        .collect()
}

/// Splits the content of a `use` group at its top-level commas.
fn items(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, letter) in group.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(&group[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    found.push(&group[start..]);
    found
}

/// Returns the top-level modules that a file's text imports or names by `crate::`.
fn imports(text: &str) -> BTreeSet<String> {
    let code: String =
        text.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code)).collect::<Vec<_>>().join("\n");
    let name = |path: &str| {
        path.trim().chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect::<String>()
    };
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            None => {
                found.insert(name(rest));
            }
            Some(group) => {
                let mut depth = 1;
                let end = group.find(|letter| {
                    depth += i32::from(letter == '{') - i32::from(letter == '}');
                    depth == 0
                });
                found.extend(items(&group[..end.expect("a closed group")]).into_iter().map(name));
            }
        }
    }
    found.retain(|name| !name.is_empty());
    found
}

/// Returns the layer of each module: line 0 is the highest.
fn layers() -> HashMap<String, usize> {
    let text = read(Path::new(ROOT).join("ARCHITECTURE.md"));
    let (_, rest) = text.split_once("```layers\n").expect("the picture of layers");
    let (picture, _) = rest.split_once("```").expect("the end of the picture");
    let mut found = HashMap::new();
    for (layer, line) in picture.lines().enumerate() {
        let (names, _) = line.split_once("  ").expect("names, two spaces, a description");
        for name in names.split(' ') {
            assert!(found.insert(name.to_owned(), layer).is_none(), "{name} is in two layers");
        }
    }
    found
}

#[test]
fn modules_import_only_lower_layers() {
    let layers = layers();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    let mut modules = BTreeSet::new();
    for path in sources(&folder) {
        let inside = path.strip_prefix(&folder).unwrap();
        let module = inside.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs").to_owned();
        if module == "lib" {
            continue;
        }
        let layer = *layers.get(&module).unwrap_or_else(|| panic!("ARCHITECTURE.md's picture lacks {module}"));
        for other in imports(&read(&path)).into_iter().filter(|other| *other != module) {
            match layers.get(&other) {
                Some(lower) if *lower > layer => {}
                _ => wrong.push(format!("{} imports {other}", inside.display())),
            }
        }
        modules.insert(module);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let drawn: BTreeSet<_> = layers.into_keys().collect();
    assert_eq!(drawn, modules, "the picture's modules and those of trainer/src");
}

#[test]
fn crates_import_only_what_the_table_allows() {
    let project = ["benches", "comm", "data", "folder", "launch", "models", "ops", "trainer"];
    let allowed: [(&str, &[&str]); 6] = [
        ("trainer/comm", &[]),
        ("trainer/folder", &[]),
        ("trainer/launch", &["comm", "folder"]),
        ("models/ops", &[]),
        ("models", &["ops"]),
        ("data", &["folder"]),
    ];
    for (folder, allowed) in allowed {
        let manifest = read(Path::new(ROOT).join(folder).join("Cargo.toml"));
        let (_, rest) = manifest.split_once("[dependencies]\n").expect("dependencies");
        let names = rest.lines().take_while(|line| !line.starts_with('['));
        let names = names.filter_map(|line| line.split(['.', ' ', '=']).next());
        let found: Vec<_> = names.filter(|name| project.contains(name)).collect();
        assert_eq!(found, allowed, "{folder}/Cargo.toml");
    }
}

#[test]
fn imports_are_found_in_every_form() {
    let text = "use crate::{a::B, c::{D, E},\n f};\n// use crate::g;\nlet x = crate::h::i();\npub use crate::j;";
    assert_eq!(imports(text), ["a", "c", "f", "h", "j"].map(String::from).into());
}

#[test]
fn every_file_of_tests_is_in_an_executable() {
    for (package, executable) in [("trainer", "program"), ("models", "networks")] {
        let folder = Path::new(ROOT).join(package);
        let (modules, manifest) =
            (read(folder.join(format!("tests/{executable}.rs"))), read(folder.join("Cargo.toml")));
        for entry in fs::read_dir(folder.join("tests")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.file_stem().unwrap().to_str().unwrap();
                let module = modules.lines().any(|line| line == format!("mod {name};"));
                let own = manifest.lines().any(|line| line == format!("name = \"{name}\""));
                assert!(module || own, "{} is never run: add `mod {name};` to {executable}.rs", path.display());
            }
        }
    }
}
