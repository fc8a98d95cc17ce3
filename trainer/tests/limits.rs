//! Limits of the shell (`ulimit`): an error with a hint in all modes.

use std::process::Command;

use crate::common::{Bench, CONFIG, ENDLESS, Ended, MODES};

/// Runs the program in a shell with a limit.
fn run_limited(bench: &Bench, limit: &str, arguments: &[&str]) -> Ended {
    let mut command = Command::new("sh");
    let script = format!("ulimit {limit} && exec \"$@\"");
    command.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_trainer")]).args(arguments);
    command.current_dir(bench.folder.path()).output().unwrap().into()
}

/// `ulimit -f` counts blocks of 512 bytes in `sh`.
#[test]
fn a_file_size_limit_is_an_error_like_a_full_disk() {
    let bench = Bench::new(CONFIG);
    for (mode, flags) in MODES {
        let arguments = ["--config", "config.toml", "--run-dir", mode, "--quiet"];
        let ended = run_limited(&bench, "-f 200", &[&arguments[..], &ENDLESS, flags].concat());
        let code = if mode == "ddp" { 3 } else { 1 };
        let said = ended.expect(code).stderr;
        assert!(said.contains("File too large") && said.contains("ulimit -f"), "{mode}: {said}");
    }
}

/// Each limit is reached at another place.
#[test]
fn a_limit_of_open_files_is_an_error_with_a_hint() {
    let bench = Bench::new(CONFIG);
    for (mode, flags) in MODES {
        let mut failures = 0;
        for limit in 5..26 {
            let arguments = [
                "--config",
                "config.toml",
                "--run-dir",
                mode,
                "--quiet",
                "--epochs",
                "1",
                "--set",
                "data.limit_train=64",
            ];
            let ended = run_limited(&bench, &format!("-n {limit}"), &[&arguments[..], flags].concat());
            if ended.code == Some(0) {
                continue;
            }
            failures += 1;
            let said = &ended.stderr;
            assert!(said.contains("Too many open files") && said.contains("ulimit"), "{mode}, {limit}: {said}");
            assert!(!said.contains("internal error"), "{mode}, {limit}: {said}");
        }
        assert!(failures > 2, "{mode}");
    }
}
