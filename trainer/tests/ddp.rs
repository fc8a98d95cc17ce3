//! Several processes train as one: the same losses, the same stop, and the end of the run when a worker dies.

use std::{path::Path, process::Child};

use crate::common::{
    self, Bench, CONFIG, ENDLESS, checkpoint_file, children, entries, free_port, loss_values, losses, signal,
    signal_process, summary, wait_until,
};

fn train(bench: &Bench, root: &str, workers: &str, extra: &[&str]) -> std::path::PathBuf {
    bench.run(&[&["--config", "config.toml", "--run-dir", root, "--cpus", workers], extra].concat()).expect(0);
    bench.only_run(root)
}

/// LeNet has no batch norm: only the order of sums depends on the number of processes.
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

/// A job of one process, as `torchrun --nproc-per-node 1` starts it: alone, with restarts, and resumed.
#[test]
fn a_job_of_one_process_trains_restarts_and_resumes() {
    let bench = Bench::new(CONFIG);
    let limit = ["--set", "train.max_steps=20"];
    let one = loss_values(&train(&bench, "one", "1", &limit));
    let run = train(&bench, "job", "1", &["--mode", "ddp", "--max-restarts", "1", "--set", "train.max_steps=10"]);
    assert!(run.to_str().unwrap().ends_with("-ddpx1"), "{}", run.display());
    bench.run(&["--resume", run.to_str().unwrap(), limit[0], limit[1]]).expect(0);
    common::assert_same_curve("a job of one process", &one, &loss_values(&run), 1e-4);
    let unknown = bench.run(&["--config", "config.toml", "--mode", "ddp"]).expect(2).stderr;
    assert!(unknown.contains("mode ddp needs the number of processes") && unknown.contains("--cpus N"), "{unknown}");
}

/// `-q` leaves out how another launcher has started the rank.
#[test]
fn a_quiet_rank_of_another_launcher_prints_nothing() {
    let bench = Bench::new(CONFIG);
    let run = |flags: &[&str]| -> common::Ended {
        let mut command = bench.command();
        command.envs([("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &free_port().to_string())]);
        command.args(["--config", "config.toml", "--set", "train.max_steps=2"]).args(flags);
        let ended: common::Ended = command.output().unwrap().into();
        ended.expect(0)
    };
    assert!(run(&[]).stderr.contains("rank 0"));
    let quiet = run(&["-q"]);
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), ("", ""));
}

/// A network with batch norm after each of its eight convolutions, on images of its size. The learning rate is small, because
/// a rounding difference flips a ReLU somewhere in nearly every step. With larger steps that difference grows tenfold per step,
/// also between different numbers of threads of one process. The tests of the layer check the gradients of the whole batch.
const VGG: &str = r#"
[model]
name = "vgg11"
[data]
name = "fashion-mini"
image_size = 32
augment = ["crop", "flip"]
limit_train = 80
limit_test = 8
[train]
epochs = 1
batch_size = 8
[optimizer]
lr = 0.00001
[parallel]
batch_norm = "sync"
"#;

#[test]
fn synchronised_batch_norm_makes_the_losses_independent_of_the_number_of_processes() {
    let bench = Bench::new(VGG);
    let one = loss_values(&train(&bench, "one", "1", &[]));
    assert_eq!(one.len(), 10);
    for (workers, extra) in [("2", &[][..]), ("4", &[]), ("2", &["--set", "parallel.backend=tcp"])] {
        let root = format!("{workers}{}", extra.len());
        let several = loss_values(&train(&bench, &root, workers, extra));
        for (step, (a, b)) in one.iter().zip(&several).enumerate() {
            assert!((a - b).abs() <= 1e-4 * a.abs(), "{workers} processes {extra:?}, step {step}: {a} against {b}");
        }
        assert_eq!(one.len(), several.len());
    }
    let local = loss_values(&train(&bench, "local", "2", &["--set", "parallel.batch_norm=local"]));
    assert!(one.iter().zip(&local).any(|(a, b)| (a - b).abs() > 1e-3), "it does make a difference");
}

/// When and in which buckets gradients are sent does not change the losses. Compression changes them within its precision.
#[test]
fn overlap_buckets_accumulation_and_compression_do_not_change_the_training() {
    let bench = Bench::new(CONFIG);
    let limit = ["--set", "train.max_steps=15"];
    let run = |root: &str, extra: &[&str]| loss_values(&train(&bench, root, "2", &[&limit[..], extra].concat()));
    let plain = run("plain", &[]);
    let same: [(&str, &[&str]); 3] = [
        ("late", &["--set", "parallel.overlap=false"]),
        ("small", &["--set", "parallel.first_bucket_mb=0.001", "--set", "parallel.bucket_mb=0.01"]),
        ("checked", &["--set", "parallel.check_sync_every=2"]),
    ];
    for (root, extra) in same {
        assert_eq!(run(root, extra), plain, "{extra:?}: two ranks' sums do not depend on it");
    }
    for (root, extra) in [("half", "parallel.compression=fp16"), ("brain", "parallel.compression=bf16")] {
        let losses = run(root, &["--set", extra]);
        assert_ne!(losses, plain, "{extra} rounds");
        for (a, b) in plain.iter().zip(&losses) {
            assert!((a - b).abs() < 0.02, "{extra}: {a} against {b}");
        }
    }
    // Gradients of two batches of half the size, reduced once.
    let halves = ["--set", "train.accumulate=2", "--set", "train.batch_size=8"];
    let two = loss_values(&train(&bench, "accumulate-2", "2", &[&limit[..], &halves].concat()));
    let one = loss_values(&train(&bench, "accumulate-1", "1", &[&limit[..], &halves].concat()));
    for (a, b) in one.iter().zip(&two) {
        assert!((a - b).abs() <= 1e-4 * a.abs(), "accumulation: {a} against {b}");
    }
}

/// As in Horovod, each worker has its own batch, and the learning rate grows with the number of workers.
#[test]
fn a_batch_per_worker_and_a_scaled_learning_rate_equal_one_large_batch() {
    let bench = Bench::new(CONFIG);
    let run = |root: &str, workers: &str, values: [&str; 4]| {
        let sets = values.map(|value| ["--set", value]).concat();
        // The last learning rate is not scaled.
        let steps = ["train.max_steps=20", "schedule.kind=cosine", "schedule.min_lr=0.015"]
            .map(|value| ["--set", value])
            .concat();
        loss_values(&train(&bench, root, workers, &[&sets[..], &steps[..]].concat()))
    };
    let scaled =
        ["optimizer.lr_scale=linear", "optimizer.lr=0.02", "train.batch_scope=per_worker", "train.batch_size=8"];
    let plain = ["optimizer.lr_scale=none", "optimizer.lr=0.04", "train.batch_scope=global", "train.batch_size=16"];
    let (two, one) = (run("scaled", "2", scaled), run("plain", "1", plain));
    for (step, (a, b)) in one.iter().zip(&two).enumerate() {
        assert!((a - b).abs() <= 1e-4 * a.abs(), "step {step}: {a} against {b}");
    }
}

/// Starts `--config config.toml` as two ranks, as a launcher like torchrun does, the second with `extra`.
pub fn two_ranks_of_a_foreign_launcher(bench: &Bench, extra: &[&str]) -> [common::Ended; 2] {
    let port = free_port().to_string();
    let start = |rank: &str, extra: &[&str]| {
        let mut command = bench.command();
        command.args(["--config", "config.toml", "--run-dir", "runs"]).args(extra);
        command.env("RANK", rank).env("LOCAL_RANK", rank).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.env("WORLD_SIZE", "2").env("LOCAL_WORLD_SIZE", "2");
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    [start("0", &[]), start("1", extra)].map(|child| child.wait_with_output().unwrap().into())
}

#[test]
fn ranks_that_were_started_differently_are_reported() {
    let bench = Bench::new(CONFIG);
    let cases = [
        ("optimizer.lr=0.5", "rank 0 has optimizer.lr = 0.05 where rank 1 has optimizer.lr = 0.5"),
        ("model.name=vgg11", "image"),
        ("data.limit_train=500", "rank 0 has data.limit_train = 520 where rank 1 has data.limit_train = 500"),
        ("log.timeline=true", "rank 0 has log.timeline = false where rank 1 has log.timeline = true"),
    ];
    for (set, said) in cases {
        let ended = two_ranks_of_a_foreign_launcher(&bench, &["--set", set]);
        assert!(ended.iter().all(|rank| rank.code.is_some_and(|code| code != 0)), "{set}");
        let all = ended.map(|rank| rank.stderr).join("\n");
        assert!(all.contains(said) && all.contains("hint:"), "{set}: {all}");
    }
}

#[test]
fn a_dry_run_trains_nothing_under_another_launcher() {
    let bench = Bench::new(CONFIG);
    for rank in ["0", "1"] {
        let mut command = bench.command();
        command.args(["--config", "config.toml", "--run-dir", "runs", "--dry-run"]);
        command.envs([("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "4711")]);
        let ended = common::Ended::from(command.output().unwrap()).expect(0);
        assert_eq!(ended.stdout.contains("ddp"), rank == "0", "{}", ended.stdout);
        assert!(!bench.path("runs").exists());
    }
}

/// A job of one pod has as many workers as the variable says.
#[test]
fn one_pod_of_kubeflow_starts_its_workers_and_prints_each_note_once() {
    let bench = Bench::new(CONFIG);
    let mut pod = bench.command();
    pod.args(["--config", "config.toml", "--run-dir", "runs", "--set", "train.max_steps=2"]);
    pod.args(["--set", "optimizer.lr_scale=linear"]);
    pod.envs([("PET_NNODES", "1"), ("PET_NODE_RANK", "0"), ("PET_NPROC_PER_NODE", "2")]);
    pod.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &free_port().to_string())]);
    let ended = common::Ended::from(pod.output().unwrap()).expect(0);
    let run = bench.only_run("runs");
    assert!(run.to_string_lossy().ends_with("ddpx2"), "{}", run.display());
    let notes = ended.stderr.lines().filter(|line| line.starts_with("note: ") && line.contains("lr_scale")).count();
    assert_eq!(notes, 1, "{}", ended.stderr);
}

#[test]
fn early_stopping_and_the_time_limit_end_all_ranks_alike() {
    let bench = Bench::new(CONFIG);
    // The network learns nothing: the first epoch stays the best.
    let patient =
        ["--cpus", "2", "--set", "train.patience=2", "--set", "optimizer.lr=1e-30", "--set", "train.epochs=9"];
    let ended = bench.run(&[&["--config", "config.toml", "--run-dir", "patient"], &patient[..]].concat()).expect(0);
    let said = "done: stopped after epoch 3: no better top-1 since epoch 1 (train.patience)";
    assert!(ended.stdout.contains(said), "{}", ended.stdout);
    assert_eq!(summary(&bench.only_run("patient")).len(), 1 + 3);

    let limits = ["--cpus", "2", "--set", "train.epochs=100000", "--set", "train.max_time_s=1"];
    let ended = bench.run(&[&["--config", "config.toml", "--run-dir", "timed"], &limits[..]].concat()).expect(0);
    assert!(ended.stdout.contains("train.max_time_s is over; continue with: "), "{}", ended.stdout);
    let run = bench.only_run("timed");
    let steps = losses(&run).len();
    // A step may have taken more than a second, so the next limit counts from the time used.
    let result: serde_json::Value = serde_json::from_slice(&std::fs::read(run.join("summary.json")).unwrap()).unwrap();
    let longer = format!("train.max_time_s={}", result["seconds"].as_f64().unwrap().ceil() + 1.0);
    bench.run(&["--resume", run.to_str().unwrap(), "--cpus", "2", "--set", &longer]).expect(0);
    assert!(losses(&run).len() > steps, "the run continued for another second");
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
    for (number, code, root) in [(2, 130, "sigint"), (15, 143, "sigterm")] {
        let child = start(&bench, root, &ENDLESS);
        signal(&child, number);
        let ended: common::Ended = child.wait_with_output().unwrap().into();
        let said = ended.expect(code);
        assert!(said.stdout.contains(" --resume "), "{}\n{}", said.stdout, said.stderr);
        let run = bench.only_run(root);
        let end = format!("train.max_steps={}", losses(&run).len() + 15);
        bench.run(&["--resume", run.to_str().unwrap(), "--cpus", "2", "--set", &end]).expect(0);
        let undisturbed = [&ENDLESS[..], &["--set", &end]].concat();
        assert_equal_ends(&train(&bench, &format!("undisturbed-{root}"), "2", &undisturbed), &run);
    }
}

#[test]
fn a_worker_that_is_killed_is_named_and_restarts_continue_to_the_same_end() {
    let bench = Bench::new(CONFIG);
    let child = start(&bench, "killed", &ENDLESS);
    let all = children(child.id());
    assert_eq!(all.len(), 2);
    signal_process(all[1], 9);
    let ended: common::Ended = child.wait_with_output().unwrap().into();
    let said = ended.expect(3).stderr;
    assert!(said.contains("rank ") && said.contains("SIGKILL") && said.contains("step "), "{said}");
    for worker in all {
        assert!(!Path::new(&format!("/proc/{worker}")).exists(), "no worker is left");
    }

    // The restarted run has to end by itself: hundreds of steps after those that `start` waits for. A restart repeats the command,
    // also with a flag that only a new run takes.
    let weights = format!("model.weights={}", bench.only_run("killed").join("checkpoints/last").display());
    let length = [&ENDLESS[..], &["--set", "train.max_steps=600", "--set", &weights]].concat();
    let undisturbed = train(&bench, "undisturbed", "2", &length);
    let child = start(&bench, "again", &[&length[..], &["--max-restarts", "1"]].concat());
    let worker = children(child.id())[0];
    signal_process(worker, 9);
    let ended: common::Ended = child.wait_with_output().unwrap().into();
    ended.expect(0);
    assert_equal_ends(&undisturbed, &bench.only_run("again"));
}

#[test]
fn mistakes_of_several_processes_exit_with_code_2() {
    let bench = Bench::new(CONFIG);
    let cases: [(&[&str], &str); 7] = [
        (&["--cpus", "2", "--set", "train.batch_size=1"], "batch_size"),
        (&["--cpus", "20000"], "from 1 to 1024"),
        (&["--cpus", "2", "--nnodes", "0"], "--nnodes 0: a job needs at least one machine"),
        (&["--cpus", "2", "--node-rank", "3"], "--node-rank 3 is not below --nnodes 1"),
        (&["--max-restarts", "3"], "--max-restarts 3: this run is one process"),
        (&["--set", "parallel.devices=two"], "from 1 to 1024"),
        (&["--set", "parallel.mode=ddp"], "--cpus N"),
    ];
    for (arguments, named) in cases {
        let ended = bench.run(&[&["--config", "config.toml"], arguments].concat()).expect(2);
        assert!(ended.stderr.contains(named) && ended.stderr.contains("hint:"), "{arguments:?}: {}", ended.stderr);
    }
}

#[test]
fn flags_that_another_launcher_decides_are_refused() {
    let bench = Bench::new(CONFIG);
    for (flag, value) in [("--nnodes", "2"), ("--node-rank", "0"), ("--master-port", "4711"), ("--max-restarts", "1")] {
        let mut command = bench.command();
        command.args(["--config", "config.toml", flag, value]);
        command.envs([("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")]);
        let ended: common::Ended = command.output().unwrap().into();
        let said = ended.expect(2).stderr;
        assert!(said.contains(&format!("{flag} {value} has no effect: started by RANK")), "{said}");
        assert!(said.contains("rank 1 of 2") && said.contains("hint:"), "{said}");
    }
    let mut pod = bench.command();
    pod.args(["--config", "config.toml", "--cpus", "2", "--nnodes", "3"]);
    pod.envs([("PET_NNODES", "2"), ("PET_NODE_RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "4711")]);
    let ended: common::Ended = pod.output().unwrap().into();
    let said = ended.expect(2).stderr;
    assert!(said.contains("--nnodes 3, but Kubeflow's variables (PET_…) say 2"), "{said}");
}
