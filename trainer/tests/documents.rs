//! Checks the documents for users: the links, flags, keys and files that they name exist.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Flags of other programs (cargo, torchrun, timm) and of the benches that the documents name.
const FOREIGN_FLAGS: [&str; 39] = [
    "amp",
    "amp-dtype",
    "bench",
    "bins",
    "clip-mode",
    "crop-pct",
    "cutmix",
    "dist-bn",
    "example",
    "examples",
    "features",
    "grad-accum-steps",
    "help",
    "initial-checkpoint",
    "layer-decay",
    "lr",
    "master_addr",
    "min-lr",
    "mixup",
    "model-ema",
    "model-ema-decay",
    "model-ema-warmup",
    "module",
    "no-fail-fast",
    "no-python",
    "nproc-per-node",
    "nproc_per_node",
    "rdzv-backend",
    "rdzv-conf",
    "rdzv-endpoint",
    "redirects",
    "release",
    "remode",
    "reprob",
    "smoothing",
    "standalone",
    "target",
    "tee",
    "warmup-epochs",
];
/// Sections of a configuration.
const SECTIONS: [&str; 8] = ["model", "data", "train", "optimizer", "schedule", "parallel", "checkpoint", "log"];

/// Returns the top folder of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the pages that users read.
fn pages() -> Vec<PathBuf> {
    let fixed =
        ["README.md", "benches/RESULTS.md", "configs/README.md", "results/README.md"].map(|page| root().join(page));
    let docs = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<_> =
        fixed.into_iter().chain(docs.filter(|path| path.extension().is_some_and(|e| e == "md"))).collect();
    pages.sort();
    pages
}

/// Splits a text into words. Paths, flags and keys stay whole.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && !"-_./".contains(c)).map(|word| word.trim_end_matches('.'))
}

/// Returns GitHub's anchor of a heading: lower case, blanks as hyphens, no other signs.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

#[test]
fn the_targets_of_links_exist() {
    for page in pages().into_iter().chain([root().join("ARCHITECTURE.md")]) {
        let text = read(&page);
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.starts_with("http") {
                continue;
            }
            let (file, fragment) = target.split_once('#').unwrap_or((target, ""));
            let file = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            assert!(file.exists(), "{}: {target}", page.display());
            let headings = || {
                read(&file)
                    .lines()
                    .filter(|line| line.starts_with('#'))
                    .map(|l| anchor(l.trim_start_matches('#')))
                    .collect::<Vec<_>>()
            };
            assert!(
                fragment.is_empty() || headings().iter().any(|heading| heading == fragment),
                "{}: {target}",
                page.display()
            );
        }
    }
}

#[test]
fn files_that_are_named_exist() {
    for page in pages() {
        let text = read(&page);
        let source = |word: &&str| {
            let (top, rest) = word.split_once('/').unwrap_or_default();
            ["benches", "configs", "docs", "models", "trainer"].contains(&top) && !rest.is_empty()
        };
        // `NAME` and `MODEL` stand for many files.
        for path in words(&text).filter(source).filter(|path| !path.contains("NAME") && !path.contains("MODEL")) {
            assert!(root().join(path).exists(), "{}: {path}", page.display());
        }
    }
}

/// Returns the flags that the help of the commands names, and those of the chaos script.
fn flags() -> BTreeSet<String> {
    let commands = [
        "train",
        "eval",
        "predict",
        "export",
        "compare",
        "models",
        "table",
        "data fetch",
        "data verify",
        "bench allreduce",
        "bench scaling",
        "sweep",
        "launch",
        "doctor",
    ];
    let mut flags = BTreeSet::new();
    for command in commands {
        let output =
            Command::new(env!("CARGO_BIN_EXE_trainer")).args(command.split(' ')).arg("--help").output().unwrap();
        assert!(output.status.success(), "{command}");
        let help = String::from_utf8(output.stdout).unwrap();
        flags.extend(words(&help).filter_map(|word| word.strip_prefix("--")).map(str::to_owned));
    }
    let chaos = read(&root().join("benches/chaos/__main__.py"));
    flags.extend(words(&chaos).filter_map(|word| word.strip_prefix("--")).map(str::to_owned));
    flags
}

#[test]
fn flags_that_are_named_exist() {
    let flags = flags();
    assert!(flags.contains("max-restarts") && flags.contains("mirror"), "{flags:?}");
    // RESULTS.md names flags of the benches.
    for page in pages().into_iter().filter(|page| !page.ends_with("RESULTS.md")) {
        let text = read(&page);
        let named = words(&text)
            .filter_map(|word| word.strip_prefix("--"))
            .filter(|flag| flag.starts_with(|c: char| c.is_ascii_lowercase()));
        for flag in named.filter(|flag| !FOREIGN_FLAGS.contains(flag)) {
            assert!(flags.contains(flag), "{}: --{flag}", page.display());
        }
    }
}

#[test]
fn keys_that_are_named_are_in_the_table_of_keys() {
    let table = read(&root().join("configs/README.md"));
    for page in pages() {
        let text = read(&page);
        // The exception is a call of PyTorch.
        let dotted =
            words(&text).filter(|word| *word != "model.load_state_dict").filter_map(|word| word.split_once('.'));
        for (section, key) in dotted.filter(|(section, _)| SECTIONS.contains(section)) {
            let file = ["json", "md", "py", "rs", "safetensors", "svg", "toml"].contains(&key);
            let listed = [format!("`{key}`"), format!("`{section}.{key}`")].iter().any(|name| table.contains(name));
            assert!(file || listed, "{}: {section}.{key}", page.display());
        }
    }
}

#[test]
fn the_readme_is_short_and_its_test_command_is_the_one_of_ci() {
    let readme = read(&root().join("README.md"));
    assert!(readme.lines().count() <= 120, "{} lines", readme.lines().count());
    let command = readme
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .find(|line| line.starts_with("cargo test"));
    let command = command.expect("README names the test command");
    let line = format!("part {command}");
    assert!(read(&root().join(".ci/run")).lines().any(|found| found == line), "`{line}` is not in .ci/run");
}
