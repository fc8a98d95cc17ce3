//! Several processes train as one: the same losses, the same stop, and an end to it when a worker dies.

mod common;

use std::{path::Path, process::Child};

use common::{Bench, CONFIG, checkpoint_file, children, entries, losses, signal, signal_process, summary, wait_until};

fn train(bench: &Bench, root: &str, workers: &str, extra: &[&str]) -> std::path::PathBuf {
    bench.run(&[&["--config", "config.toml", "--run-dir", root, "--cpus", workers], extra].concat()).expect(0);
    bench.only_run(root)
}

fn loss_values(run: &Path) -> Vec<f64> {
    losses(run).into_iter().map(|(_, bits)| f64::from_bits(bits)).collect()
}

/// LeNet has no batch norm: nothing but the order of sums depends on the number of processes.
#[test]
fn the_losses_do_not_depend_on_the_number_of_processes() {
    let bench = Bench::new(CONFIG);
    let limit = ["--set", "train.max_steps=20"];
    let one = loss_values(&train(&bench, "one", "1", &limit));
    assert_eq!(one.len(), 20);
    for (workers, extra) in [("2", &[][..]), ("3", &[]), ("4", &[]), ("2", &["--set", "parallel.backend=tcp"])] {
        let root = format!("{workers}{}", extra.len());
        let several = loss_values(&train(&bench, &root, workers, &[&limit[..], extra].concat()));
        for (step, (a, b)) in one.iter().zip(&several).enumerate() {
            assert!((a - b).abs() <= 1e-4 * a.abs(), "{workers} processes {extra:?}, step {step}: {a} against {b}");
        }
        assert_eq!(one.len(), several.len());
    }
}

#[test]
fn two_processes_evaluate_every_image_once_and_repeat_bit_for_bit() {
    let bench = Bench::new(CONFIG);
    let (one, two) = (train(&bench, "one", "2", &[]), train(&bench, "two", "2", &[]));
    assert_eq!(losses(&one), losses(&two));
    assert_eq!(summary(&one), summary(&two));
    let result: serde_json::Value = serde_json::from_slice(&std::fs::read(one.join("summary.json")).unwrap()).unwrap();
    assert_eq!(result["last"]["total"], 200);
    let counted: u64 = result["confusion"]["counts"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum();
    assert_eq!(counted, 200);
}

/// Starts two workers and waits until they have taken some steps.
fn start(bench: &Bench, root: &str, extra: &[&str]) -> Child {
    let arguments = ["--config", "config.toml", "--run-dir", root, "--cpus", "2", "--set", "log.every=1"];
    let child = bench.spawn(&[&arguments[..], extra].concat());
    wait_until("metrics", || {
        let Some(run) = entries(&bench.path(root)).into_iter().next() else { return false };
        std::fs::read_to_string(run.join("metrics.jsonl")).is_ok_and(|text| text.lines().count() >= 45)
    });
    child
}

fn assert_equal_ends(one: &Path, other: &Path) {
    assert_eq!(losses(one), losses(other));
    for file in ["model.safetensors", "optimizer.safetensors"] {
        assert_eq!(checkpoint_file(one, "last", file), checkpoint_file(other, "last", file), "{file}");
    }
}

#[test]
fn a_signal_stops_all_ranks_at_the_same_step_and_the_run_continues_to_the_same_end() {
    let bench = Bench::new(CONFIG);
    let undisturbed = train(&bench, "undisturbed", "2", &[]);
    for (number, code, root) in [(2, 130, "sigint"), (15, 143, "sigterm")] {
        let child = start(&bench, root, &[]);
        signal(&child, number);
        let ended: common::Ended = child.wait_with_output().unwrap().into();
        let said = ended.expect(code);
        assert!(said.stdout.contains("continue with: trainer --resume"), "{}\n{}", said.stdout, said.stderr);
        let run = bench.only_run(root);
        bench.run(&["--resume", run.to_str().unwrap(), "--cpus", "2"]).expect(0);
        assert_equal_ends(&undisturbed, &run);
    }
}

#[test]
fn a_worker_that_is_killed_is_named_and_restarts_continue_to_the_same_end() {
    let bench = Bench::new(CONFIG);
    let undisturbed = train(&bench, "undisturbed", "2", &[]);

    let child = start(&bench, "killed", &[]);
    let all = children(child.id());
    assert_eq!(all.len(), 2);
    signal_process(all[1], 9);
    let ended: common::Ended = child.wait_with_output().unwrap().into();
    let said = ended.expect(3).stderr;
    assert!(said.contains("rank ") && said.contains("SIGKILL") && said.contains("step "), "{said}");
    for worker in all {
        assert!(!Path::new(&format!("/proc/{worker}")).exists(), "no worker is left");
    }

    let child = start(&bench, "again", &["--max-restarts", "1"]);
    let worker = children(child.id())[0];
    signal_process(worker, 9);
    let ended: common::Ended = child.wait_with_output().unwrap().into();
    ended.expect(0);
    assert_equal_ends(&undisturbed, &bench.only_run("again"));
}

#[test]
fn mistakes_of_several_processes_end_with_2() {
    let bench = Bench::new(CONFIG);
    let cases: [(&[&str], &str); 4] = [
        (&["--cpus", "2", "--set", "parallel.batch_norm=sync"], "batch_norm"),
        (&["--cpus", "2", "--set", "parallel.compression=fp16"], "compression"),
        (&["--cpus", "2", "--set", "train.batch_size=1"], "batch_size"),
        (&["--set", "parallel.mode=ddp"], "--cpus N"),
    ];
    for (arguments, named) in cases {
        let ended = bench.run(&[&["--config", "config.toml"], arguments].concat()).expect(2);
        assert!(ended.stderr.contains(named) && ended.stderr.contains("hint:"), "{arguments:?}: {}", ended.stderr);
    }
}
