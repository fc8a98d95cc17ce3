//! Runs whose folder was changed by others: links, missing lines, folders in place of links.

use std::{
    ffi::OsStr,
    fs,
    net::TcpListener,
    os::unix::{ffi::OsStrExt, fs::symlink},
    path::{Path, PathBuf},
};

use crate::common::{Bench, CONFIG, Ended, entries, free_port, losses};

/// Trains one epoch, and returns the run folder.
fn short_run(bench: &Bench) -> PathBuf {
    bench.run(&["--config", "config.toml", "--epochs", "1", "--quiet"]).expect(0);
    bench.only_run("runs")
}

fn resume(bench: &Bench, run: &Path, extra: &[&str]) -> Ended {
    bench.run(&[&["--resume", run.to_str().unwrap()], extra].concat())
}

/// A complete run has nothing left to train, which its screen does not show otherwise.
#[test]
fn a_complete_run_that_is_resumed_prints_a_note() {
    let bench = Bench::new(CONFIG);
    let said = |limit: &[&str], root: &str| {
        let run = bench.train(root, limit);
        bench.run(&["--resume", run.to_str().unwrap()]).expect(0).stderr
    };
    let epochs = said(&["--epochs", "1"], "epochs");
    let note = "note: the run is complete after 33 steps: it is only evaluated again; --epochs N with a larger N trains it further";
    assert!(epochs.contains(note), "{epochs}");
    let steps = said(&["--set", "train.max_steps=2"], "steps");
    assert!(steps.contains("after 2 steps") && steps.contains("--set train.max_steps=N"), "{steps}");
    let run = bench.only_run("epochs");
    let longer = bench.run(&["--resume", run.to_str().unwrap(), "--epochs", "2"]).expect(0).stderr;
    assert!(!longer.contains("complete"), "{longer}");
}

#[test]
fn files_are_never_written_through_links() {
    let bench = Bench::new(CONFIG);
    let run = short_run(&bench);
    let victim = bench.path("victim");
    fs::write(&victim, "precious").unwrap();
    for name in ["config.toml.tmp", "env.json.tmp", "curves.svg.tmp", "summary.json.tmp"] {
        symlink(&victim, run.join(name)).unwrap();
    }
    resume(&bench, &run, &["--epochs", "2"]).expect(0);
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert!(entries(&run).iter().all(|path| path.extension().is_none_or(|extension| extension != "tmp")));
    for (name, extra, code) in [
        ("metrics.jsonl", &["--epochs", "3"][..], 1),
        ("summary.csv", &["--epochs", "3"], 1),
        ("logs/diagnostics.log", &["--epochs", "3", "--log-level", "info"], 1),
        ("logs/rank-0/stdout.log", &["--epochs", "3", "--cpus", "2"], 3),
        ("logs/rank-1/error.json.tmp", &["--epochs", "3", "--cpus", "2"], 0),
    ] {
        let path = run.join(name);
        let kept = fs::read(&path).ok();
        let _ = fs::remove_file(&path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let precious = kept.clone().unwrap_or_else(|| b"precious".to_vec());
        fs::write(&victim, &precious).unwrap();
        symlink(&victim, &path).unwrap();
        let said = resume(&bench, &run, extra).expect(code).stderr;
        assert!(code == 0 || said.contains("it is a symbolic link") && said.contains("hint:"), "{name}: {said}");
        assert_eq!(fs::read(&victim).unwrap(), precious, "{name}");
        fs::remove_file(&path).unwrap();
        if let Some(kept) = kept {
            fs::write(&path, kept).unwrap();
        }
    }
    for name in ["logs", "checkpoints"] {
        let (path, moved) = (run.join(name), bench.path("moved"));
        fs::rename(&path, &moved).unwrap();
        symlink(&moved, &path).unwrap();
        let said = resume(&bench, &run, &["--epochs", "4"]).expect(2).stderr;
        assert!(said.contains(name) && said.contains("is a symbolic link"), "{said}");
        fs::remove_file(&path).unwrap();
        fs::rename(&moved, &path).unwrap();
    }
}

/// burn looks for this file in the working folder and in all folders above it.
#[test]
fn burn_does_not_read_configuration_files() {
    let bench = Bench::new(CONFIG);
    let log = bench.path("log-of-burn");
    let text = format!("[autodiff.logger]\nlevel = \"full\"\nfile = {:?}\nstdout = true\n", log.display().to_string());
    fs::write(bench.path("burn.toml"), text).unwrap();
    let ended = bench.run(&["--config", "config.toml", "--epochs", "1"]).expect(0);
    assert!(!log.exists());
    assert!(!ended.stdout.contains("autodiff"), "{}", ended.stdout);
}

#[test]
fn lines_that_are_missing_before_a_resume_are_counted() {
    let bench = Bench::new(CONFIG);
    let run = short_run(&bench);
    let path = run.join("metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.split_inclusive('\n').take(10).collect::<String>()).unwrap();
    let said = resume(&bench, &run, &["--epochs", "2"]).expect(0).stderr;
    assert!(said.contains("metrics.jsonl: 23 of the 33 steps before this checkpoint are missing"), "{said}");
    assert!(said.contains("hint:"), "{said}");
    assert_eq!(losses(&run).len(), 10 + 33, "the run goes on");
    fs::remove_file(&path).unwrap();
    fs::remove_file(run.join("summary.csv")).unwrap();
    let said = resume(&bench, &run, &["--epochs", "3", "--quiet"]).expect(0).stderr;
    assert!(said.contains("metrics.jsonl: 66 of the 66 steps"), "{said}");
}

#[test]
fn a_folder_in_place_of_a_checkpoint_link_does_not_end_the_run() {
    let bench = Bench::new(CONFIG);
    let run = short_run(&bench);
    let last = run.join("checkpoints/last");
    fs::remove_file(&last).unwrap();
    fs::create_dir(&last).unwrap();
    fs::copy(run.join("checkpoints/epoch-1/model.safetensors"), last.join("model.safetensors")).unwrap();
    let said = resume(&bench, &run, &["--epochs", "2"]).expect(0).stderr;
    assert!(said.contains("checkpoints/last was a folder") && said.contains("last.old"), "{said}");
    assert_eq!(fs::read_link(&last).unwrap(), Path::new("epoch-2"));
    assert!(run.join("checkpoints/last.old/model.safetensors").is_file());
}

#[test]
fn a_port_that_is_taken_leaves_no_run_folder() {
    let bench = Bench::new(CONFIG);
    let port = free_port();
    let _listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let said =
        bench.run(&["--config", "config.toml", "--cpus", "2", "--master-port", &port.to_string()]).expect(3).stderr;
    assert!(said.contains("is taken") && said.contains("hint:"), "{said}");
    assert!(entries(&bench.path("runs")).is_empty());
    bench.run(&["--resume", "--cpus", "2"]).expect(2);
}

#[test]
fn a_batch_too_small_for_the_workers_leaves_no_run_folder() {
    let bench = Bench::new(CONFIG);
    let said = bench.run(&["--config", "config.toml", "--cpus", "2", "--set", "train.batch_size=1"]).expect(2).stderr;
    assert!(said.contains("a batch of 1 cannot be shared by 2 workers") && said.contains("hint:"), "{said}");
    assert!(entries(&bench.path("runs")).is_empty());
}

#[test]
fn the_path_of_the_runs_need_not_be_utf8() {
    let bench = Bench::new(CONFIG);
    let root = OsStr::from_bytes(b"bad\xff");
    let mut command = bench.command();
    command.args(["--config", "config.toml", "--epochs", "1", "--cpus", "2", "--run-dir"]).arg(root);
    Ended::from(command.output().unwrap()).expect(0);
    let runs = entries(&bench.folder.path().join(root));
    assert!(runs[0].join("summary.json").is_file() && runs[0].join("logs/rank-1/stdout.log").is_file(), "{runs:?}");
}

/// As in a folder that cannot be written. Unlike permissions, a file in the way works for root too.
#[test]
fn the_error_of_logs_that_cannot_be_written_names_the_logs_not_the_program() {
    let bench = Bench::new(CONFIG);
    let run = short_run(&bench);
    fs::remove_dir_all(run.join("logs")).unwrap();
    fs::write(run.join("logs"), "").unwrap();
    let said = resume(&bench, &run, &["--epochs", "2", "--cpus", "2"]).expect(3).stderr;
    assert!(said.contains("logs/rank-0: cannot write the logs of rank 0: Not a directory"), "{said}");
    assert!(said.contains("make the folder writable") && !said.contains("cannot start"), "{said}");
}
