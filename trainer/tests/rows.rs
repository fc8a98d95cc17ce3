//! `benches/rows.sh`, the queue of training runs: interruption, continuation, status and saved results; and
//! `benches/rows_in.py`, runs that share a GPU for a given time.

use std::{
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use crate::common::{Bench, CONFIG, Ended, entries, wait_until};

fn rows(bench: &Bench, arguments: &[&str]) -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=INT,QUIT,TERM", "bash"]);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/rows.sh")).args(arguments);
    command.current_dir(bench.folder.path()).env("TRAINER", env!("CARGO_BIN_EXE_trainer")).env("NO_COLOR", "1");
    // At the lowest priority a run waits for as long as other programs are busy.
    command.env("NICE", "0");
    for variable in ["DATA", "FLAGS", "LIMIT", "TRAINER_LOG", "TRAINER_DATA_DIR"] {
        command.env_remove(variable);
    }
    command
}

fn run(bench: &Bench, arguments: &[&str]) -> Ended {
    rows(bench, arguments).output().expect("bash starts").into()
}

/// Returns the status line of a configuration.
fn status(bench: &Bench, name: &str) -> String {
    let text = run(bench, &["status", "out"]).expect(0).stdout;
    text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no line of {name}: {text}")).to_owned()
}

fn start(bench: &Bench, arguments: &[&str]) -> Child {
    rows(bench, arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("bash starts")
}

/// Waits until the run of the first configuration has ended `epochs` epochs.
fn wait_for_epochs(bench: &Bench, epochs: usize) {
    wait_until("epochs", || {
        entries(&bench.path("out/runs/first")).first().is_some_and(|run| {
            std::fs::read_to_string(run.join("summary.csv")).is_ok_and(|text| text.lines().count() > epochs)
        })
    });
}

#[test]
fn a_queue_is_paused_stopped_and_continued_to_its_end() {
    let bench = Bench::new(CONFIG);
    std::fs::write(bench.path("first.toml"), CONFIG.replace("epochs = 3", "epochs = 60")).unwrap();
    std::fs::write(bench.path("the second.toml"), CONFIG).unwrap();

    let queue = start(&bench, &["train", "out", "first.toml", "the second.toml"]);
    wait_for_epochs(&bench, 2);
    run(&bench, &["pause", "out"]).expect(0);
    wait_until("the pause", || status(&bench, "first").ends_with("paused"));
    assert!(status(&bench, "the second").ends_with("waiting"));
    let refused = run(&bench, &["train", "out"]).expect(2);
    assert!(refused.stderr.contains("another rows.sh trains in"), "{}", refused.stderr);
    run(&bench, &["continue", "out"]).expect(0);
    wait_until("the run", || status(&bench, "first").ends_with("training"));
    run(&bench, &["stop", "out"]).expect(0);
    assert!(status(&bench, "first").ends_with("interrupted"), "`stop` waits for the end");
    let stopped = Ended::from(queue.wait_with_output().unwrap()).expect(0);
    assert!(stopped.stdout.contains("interrupted"), "{}", stopped.stdout);
    assert!(status(&bench, "the second").ends_with("waiting"), "the queue ends with the run that is stopped");
    let time_left = |name: &str| {
        let line = status(&bench, name).replace("the second", "second");
        line.split_whitespace().nth(4).unwrap_or_default().to_owned()
    };
    assert!(time_left("first").ends_with(['s', 'm']), "{}", status(&bench, "first"));
    assert_eq!(time_left("the second"), "-");

    // A start that failed before its first file is not a run to continue.
    std::fs::create_dir_all(bench.path("out/runs/the second/20200101-000000-lenet-singlex1")).unwrap();
    let done = run(&bench, &["train", "out"]).expect(0).stdout;
    assert_eq!(entries(&bench.path("out/runs/first")).len(), 1, "the run was continued");
    for name in ["first", "the second"] {
        let line = status(&bench, name);
        assert!(line.ends_with("finished") && done.contains(&line), "{line}\n{done}");
    }
    let summary = std::fs::read_to_string(entries(&bench.path("out/runs/first"))[0].join("summary.csv")).unwrap();
    assert_eq!(summary.lines().count(), 61, "every epoch once");
    let saved = entries(&bench.path("out/results")).into_iter().filter(|path| path.is_dir()).count();
    assert_eq!(saved, 2);
    run(&bench, &["train", "out"]).expect(0);
    assert_eq!(entries(&bench.path("out/runs/the second")).len(), 2, "a finished run is not repeated");
}

#[test]
fn training_has_the_lowest_priority() {
    let bench = Bench::new(CONFIG);
    std::fs::write(bench.path("first.toml"), CONFIG).unwrap();
    let program = bench.path("program");
    std::fs::write(&program, "#!/bin/sh\nnice\ncat /proc/self/autogroup\nexit 1\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    // Niceness adds up: these tests may run with low priority themselves.
    let nice = Ended::from(Command::new("nice").output().expect("nice starts")).expect(0).stdout;
    let nice: i32 = nice.trim().parse().unwrap();
    for (chosen, expected) in [(None, 19), (Some("7"), 7)] {
        let mut queue = rows(&bench, &["train", "out", "first.toml"]);
        queue.env("TRAINER", &program);
        match chosen {
            Some(nice) => queue.env("NICE", nice),
            None => queue.env_remove("NICE"),
        };
        Ended::from(queue.output().expect("bash starts")).expect(1);
        let log = bench.path("out/logs/first.log");
        let text = std::fs::read_to_string(&log).unwrap();
        assert_eq!(text.lines().next(), Some((nice + expected).min(19).to_string().as_str()), "{text}");
        // A kernel without autogroups has no such file.
        if Path::new("/proc/self/autogroup").exists() {
            assert!(text.trim_end().ends_with(&format!("nice {expected}")), "{text}");
        }
        std::fs::remove_file(log).unwrap();
    }
    let refused =
        Ended::from(rows(&bench, &["train", "out", "first.toml"]).env("NICE", "20").output().unwrap()).expect(2);
    assert!(refused.stderr.contains("NICE=20 is not") && refused.stderr.contains("hint:"), "{}", refused.stderr);
}

#[test]
fn a_broken_configuration_does_not_stop_the_queue() {
    let bench = Bench::new(CONFIG);
    std::fs::write(bench.path("broken.toml"), CONFIG.replace("lenet", "lenot")).unwrap();
    std::fs::write(bench.path("whole.toml"), CONFIG.replace("epochs = 3", "epochs = 1")).unwrap();
    let ended = run(&bench, &["train", "out", "broken.toml", "whole.toml"]).expect(1);
    assert!(ended.stdout.contains("broken failed with exit code 2"), "{}", ended.stdout);
    assert!(status(&bench, "broken").contains("failed, see"));
    assert!(status(&bench, "whole").ends_with("finished"));
    let nothing = run(&bench, &["pause", "out"]).expect(2);
    assert!(nothing.stderr.contains("hint:"), "{}", nothing.stderr);
    let missing = run(&bench, &["train", "out", "nowhere.toml"]).expect(2);
    assert!(missing.stderr.contains("nowhere.toml is not a file"), "{}", missing.stderr);
}

fn rows_in(bench: &Bench, arguments: &[&str]) -> Ended {
    let mut command = Command::new("python3");
    command.args(["-B", concat!(env!("CARGO_MANIFEST_DIR"), "/../benches/rows_in.py")]).args(arguments);
    command.current_dir(bench.folder.path()).env("TRAINER", env!("CARGO_BIN_EXE_trainer")).env("NO_COLOR", "1");
    command.env("FLAGS", "--cpus 1").env("PROBE", "1");
    for variable in ["DATA", "RESERVE", "TRAINER_LOG", "TRAINER_DATA_DIR"] {
        command.env_remove(variable);
    }
    command.output().expect("python3 starts").into()
}

#[test]
fn runs_that_share_a_gpu_keep_their_epochs_if_the_time_suffices() {
    let bench = Bench::new(CONFIG);
    std::fs::write(bench.path("first.toml"), CONFIG).unwrap();
    std::fs::write(bench.path("second.toml"), CONFIG).unwrap();
    let ended = rows_in(&bench, &["600", "out", "first.toml", "second.toml:train.epochs=2"]).expect(0);
    for (name, epochs) in [("first", 3), ("second", 2)] {
        assert!(ended.stdout.contains(&format!("{name}: {epochs} of {epochs} epochs")), "{}", ended.stdout);
        let saved = entries(&bench.path("out/results").join(name));
        let run = saved.iter().find(|path| path.is_dir()).expect("a saved run");
        let summary = std::fs::read_to_string(run.join("summary.csv")).unwrap();
        assert_eq!(summary.lines().count(), 1 + epochs, "{summary}");
    }
    let again = rows_in(&bench, &["600", "out", "first.toml"]).expect(2);
    assert!(again.stderr.contains("has runs of these configurations"), "{}", again.stderr);
    let broken = rows_in(&bench, &["600", "other", "first.toml:model.name=lenot", "second.toml"]).expect(1);
    assert!(broken.stdout.contains("first failed with exit code 2"), "{}", broken.stdout);
}

/// Four networks on one H200: their epochs, and the seconds of one alone and beside the others. The last one ended after 543 s.
#[test]
fn runs_that_share_a_gpu_are_shortened_by_one_factor() {
    let script = "import rows_in\nruns = [(65, 2.35, 12.0), (68, 2.16, 9.24), (50, 3.48, 6.87), (29, 7.81, 22.1)]\n\
                  print(round(rows_in.last_end(runs, 1)))\n\
                  for rest in (570, 543, 14, 13): print(rows_in.fit(runs, rest))";
    let mut command = Command::new("python3");
    command.args(["-B", "-c", script]).env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/../benches"));
    let fits = Ended::from(command.output().expect("python3 starts")).expect(0).stdout;
    assert_eq!(fits, "564\n[65, 68, 50, 29]\n[62, 65, 48, 28]\n[1, 1, 1, 1]\nNone\n");
}
