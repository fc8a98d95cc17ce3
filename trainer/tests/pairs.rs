//! Combinations of two features: restarts and edits, time limits and checkpoints, ….

use std::{fs, path::Path, process::Command};

use serde_json::Value;

use crate::common::{Bench, CONFIG, ENDLESS, children, entries, pictures::save_png, signal_process, wait_until};

pub const PICTURES: &str = r#"
[model]
name = "shufflenetv2_x0_5"
[data]
name = "image-folder"
dir = "pictures"
decode = "epoch"
[train]
epochs = 2
batch_size = 8
"#;

/// Images of two classes: `count` per class in each of the splits.
pub fn pictures(bench: &Bench, splits: &[(&str, usize)], [width, height]: [u32; 2]) {
    for (split, count) in splits {
        for (class, colour) in [("dark", 10u8), ("light", 240)] {
            let folder = bench.path(&format!("pictures/{split}/{class}"));
            fs::create_dir_all(&folder).unwrap();
            for i in 0..*count {
                save_png(folder.join(format!("{i:02}.png")), width, height, |x, y| {
                    [colour, (x + i as u32) as u8, y as u8]
                });
            }
        }
    }
}

pub fn summary(run: &Path) -> Value {
    serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap()
}

pub fn checkpoints(run: &Path) -> Vec<String> {
    let names = entries(&run.join("checkpoints")).into_iter();
    names
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .filter(|name| !name.starts_with('.'))
        .collect()
}

/// A restarted run must train with the configuration with which it began.
#[test]
fn an_edit_of_the_configuration_does_not_change_a_run_that_is_restarted() {
    let bench = Bench::new(CONFIG);
    let flags = ["--config", "config.toml", "--cpus", "2", "--max-restarts", "1", "--set", "log.every=1"];
    let child = bench.spawn(&[&flags[..], &ENDLESS].concat());
    let lines = || {
        let run = entries(&bench.path("runs")).into_iter().next();
        run.and_then(|run| fs::read_to_string(run.join("metrics.jsonl")).ok()).map_or(0, |text| text.lines().count())
    };
    wait_until("a checkpoint", || {
        entries(&bench.path("runs")).first().is_some_and(|run| checkpoints(run).iter().any(|name| name == "epoch-1"))
    });
    let before = lines();
    fs::write(bench.path("config.toml"), CONFIG.replace("lr = 0.05", "lr = 1e-9")).unwrap();
    signal_process(children(child.id())[1], 9);
    wait_until("steps of the second attempt", || {
        let log = bench.only_run("runs").join("logs");
        entries(&log).iter().any(|rank| rank.to_string_lossy().contains("rank-0")) && lines() > before + 40
    });
    crate::common::signal(&child, 15);
    let ended = crate::common::Ended::from(child.wait_with_output().unwrap()).expect(143);
    assert!(ended.stderr.contains("starting all workers again"), "{}", ended.stderr);
    let text = fs::read_to_string(bench.only_run("runs").join("config.toml")).unwrap();
    assert!(text.contains("lr = 0.05"), "{text}");
}

#[test]
fn a_configuration_may_be_a_pipe() {
    let bench = Bench::new(CONFIG);
    for flags in ["", "--cpus 2"] {
        let line = format!(
            "exec {} --config <(cat config.toml) --run-dir runs --epochs 1 {flags}",
            env!("CARGO_BIN_EXE_trainer")
        );
        let output =
            Command::new("bash").args(["-c", &line]).current_dir(bench.folder.path()).output().expect("bash starts");
        crate::common::Ended::from(output).expect(0);
    }
}

/// Rank 0 writes the checkpoint while the other ranks wait. This time counts for the limit once, on rank 0.
#[test]
fn a_time_limit_counts_the_checkpoints_and_is_kept_by_a_resumed_run() {
    for flags in [&[][..], &["--cpus", "2"]] {
        let bench = Bench::new(&CONFIG.replace("epochs = 3", "epochs = 100000\nmax_time_s = 2"));
        let saves = ["--set", "checkpoint.every_steps=1", "--set", "checkpoint.keep_last=1"];
        let run = bench.train("runs", &[flags, &saves].concat());
        let first = summary(&run);
        assert!(first["seconds"].as_f64().unwrap() >= 2.0, "{first}");
        bench.run(&[&["--resume", run.to_str().unwrap()], flags].concat()).expect(0);
        assert_eq!(summary(&run)["steps"], first["steps"], "the time was over");
    }
}

#[test]
fn checkpoints_by_steps_include_the_end_of_an_epoch() {
    let bench = Bench::new(&CONFIG.replace("limit_train = 520", "limit_train = 160"));
    let saves =
        ["--set", "checkpoint.every=0", "--set", "checkpoint.keep_best=false", "--set", "checkpoint.keep_last=10"];
    let run = bench.train("runs", &[&saves[..], &["--set", "checkpoint.every_steps=5"]].concat());
    assert_eq!(checkpoints(&run), ["epoch-1", "epoch-2", "epoch-3", "last", "step-15", "step-25", "step-5"]);
}

/// On the same processors the restarted run would take the same steps.
#[test]
fn a_run_that_diverges_is_not_restarted() {
    let bench = Bench::new(CONFIG);
    let flags = ["--config", "config.toml", "--cpus", "2", "--max-restarts", "2", "--set", "optimizer.lr=900"];
    let ended = bench.run(&flags).expect(3);
    assert!(ended.stderr.contains("training diverged") && !ended.stderr.contains("again"), "{}", ended.stderr);
}

#[test]
fn the_speed_of_a_run_counts_the_steps_of_its_last_epoch() {
    let bench = Bench::new(&CONFIG.replace("epochs = 3", "epochs = 0\nmax_steps = 34"));
    let run = bench.train("runs", &[]);
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let steps: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let seconds: f64 = steps.iter().map(|step| step["step_ms"].as_f64().unwrap() / 1e3).sum();
    let images = |step: &Value| step["images_per_s"].as_f64().unwrap() * step["step_ms"].as_f64().unwrap() / 1e3;
    let rate = steps.iter().map(images).sum::<f64>() / seconds;
    let said = summary(&run)["images_per_s"].as_f64().unwrap();
    assert!((said / rate - 1.0).abs() < 0.02, "{said} and {rate}");
}

/// The split of a run is by position, so another image would move trained ones into the validation split.
#[test]
fn a_changed_validation_split_is_refused() {
    let bench = Bench::new(&PICTURES.replace("decode = \"epoch\"", "validation = 0.25"));
    pictures(&bench, &[("train", 16)], [32, 32]);
    let run = bench.train("runs", &[]);
    let run = run.to_str().unwrap();
    // `limit_test` does not apply to the images that are held out.
    let limited = ["--config", "config.toml", "--run-dir", "limited", "--set", "data.limit_test=3"];
    bench.run(&limited).expect(0);
    for run in [run, bench.only_run("limited").to_str().unwrap()] {
        let ended = bench.run(&["eval", "--run", run, "--json"]).expect(0);
        let evaluated: Value = serde_json::from_str(&ended.stdout).unwrap();
        assert!(evaluated["total"] == 8 && !ended.stderr.contains("limit_test"), "{evaluated}: {}", ended.stderr);
    }
    let moved = bench.path("pictures/train/dark/zz.png");
    fs::rename(bench.path("pictures/train/dark/00.png"), &moved).unwrap();
    let ended = bench.run(&["eval", "--run", run]).expect(2);
    assert!(ended.stderr.contains("the validation split differs from that of the run"), "{}", ended.stderr);
    let ended = bench.run(&["--resume", run, "--epochs", "3"]).expect(2);
    assert!(ended.stderr.contains("have other names or labels"), "{}", ended.stderr);
    // Where there are test images, the training images are not split.
    fs::remove_file(moved).unwrap();
    pictures(&bench, &[("test", 3)], [32, 32]);
    bench.run(&["eval", "--run", run]).expect(0);
    let ended = bench.run(&["eval", "--run", bench.only_run("limited").to_str().unwrap()]).expect(0);
    assert!(ended.stderr.contains("note: evaluates all 6 images; the run had 3 (data.limit_test)"), "{}", ended.stderr);
}

#[test]
fn other_data_are_normalised_as_in_the_run() {
    let bench = Bench::new(PICTURES);
    pictures(&bench, &[("train", 8), ("test", 4)], [32, 32]);
    let own = ["--set", "data.mean=[0.2,0.3,0.4]", "--set", "data.std=[0.3,0.2,0.1]"];
    let run = bench.train("runs", &own);
    let mut lines = String::from("path,label,split\n");
    for (split, class, index) in [("train", "dark", 0), ("train", "light", 0)]
        .into_iter()
        .chain((0..8).map(|i| ("test", ["dark", "light"][i / 4], i % 4)))
    {
        lines += &format!("pictures/{split}/{class}/{index:02}.png,{class},{split}\n");
    }
    fs::write(bench.path("list.csv"), lines).unwrap();
    let loss = |more: &[&str]| -> f64 {
        let evaluated =
            bench.run(&[&["eval", "--run", run.to_str().unwrap(), "--json"], more].concat()).expect(0).stdout;
        serde_json::from_str::<Value>(&evaluated).unwrap()["loss"].as_f64().unwrap()
    };
    let listed = loss(&["--data", "manifest", "--data-dir", "list.csv"]);
    assert!((listed - loss(&[])).abs() < 1e-6, "{listed}");
}

#[test]
fn images_of_another_shape_are_refused() {
    for [width, height] in [[40, 32], [32, 32]] {
        let bench = Bench::new(PICTURES);
        pictures(&bench, &[("train", 8), ("test", 2)], [width, height]);
        let run = bench.train("runs", &[]);
        let run = run.to_str().unwrap();
        let [wide, high] = [2 * width, 2 * height];
        pictures(&bench, &[("train", 8), ("test", 2)], [wide, high]);
        let said = format!("was trained on images of 3x{height}x{width}, and these are 3x{high}x{wide}");
        for arguments in [&["eval", "--run", run][..], &["--resume", run, "--epochs", "3"]] {
            let ended = bench.run(arguments).expect(2);
            assert!(ended.stderr.contains(&said), "{}", ended.stderr);
        }
    }
}

#[test]
fn a_data_set_with_one_class_is_refused() {
    let bench = Bench::new(PICTURES);
    pictures(&bench, &[("train", 8), ("test", 2)], [32, 32]);
    for split in ["train", "test"] {
        fs::remove_dir_all(bench.path(&format!("pictures/{split}/light"))).unwrap();
    }
    let ended = bench.run(&["--config", "config.toml"]).expect(2);
    assert!(ended.stderr.contains("has 1 class, and a classifier needs two or more"), "{}", ended.stderr);
}

/// Checks that a prediction ends with an error about `named`, and with `--skip-errors` classifies the `others`.
#[track_caller]
fn leaves_out(bench: &Bench, predict: &[&str], named: &str, others: usize, counted: &str) {
    let ended = bench.run(predict).expect(2);
    assert!(ended.stderr.contains(named), "{}", ended.stderr);
    let ended = bench.run(&[predict, &["--skip-errors"]].concat()).expect(0);
    assert_eq!(ended.stdout.lines().count(), 1 + others, "{}", ended.stdout);
    assert!(ended.stderr.contains(&format!("{counted} images could not be read")), "{}", ended.stderr);
}

#[test]
fn paths_that_cannot_be_read_are_left_out_of_a_prediction() {
    let bench = Bench::new(PICTURES);
    pictures(&bench, &[("train", 8), ("test", 2)], [32, 32]);
    let run = bench.train("runs", &[]);
    fs::write(bench.path("list"), "\u{feff}pictures/test/dark/00.png\nnowhere.png\npictures/test/light\n").unwrap();
    let predict = ["predict", "--run", run.to_str().unwrap(), "--list", "list"];
    leaves_out(&bench, &predict, "nowhere.png", 3, "1 of 4");
}

#[test]
fn a_file_of_another_format_does_not_hide_its_folder_from_a_prediction() {
    let bench = Bench::new(PICTURES);
    pictures(&bench, &[("train", 8), ("test", 2)], [32, 32]);
    let run = bench.train("runs", &[]);
    fs::write(bench.path("pictures/test/dark/a.gif"), "GIF").unwrap();
    fs::write(bench.path("pictures/test/dark/b.png"), "no image").unwrap();
    let predict = ["predict", "--run", run.to_str().unwrap(), "pictures/test"];
    leaves_out(&bench, &predict, "a.gif", 4, "2 of 6");
}

/// A run of a machine with GPUs can be evaluated on a machine without GPUs.
#[test]
fn a_backend_that_is_not_built_ends_only_training() {
    if cfg!(feature = "mpi") {
        return;
    }
    let bench = Bench::new(CONFIG);
    let run = bench.train("runs", &["--cpus", "2", "--set", "train.max_steps=2"]);
    let text = fs::read_to_string(run.join("config.toml")).unwrap();
    fs::write(run.join("config.toml"), text.replace("backend = \"auto\"", "backend = \"mpi\"")).unwrap();
    bench.run(&["eval", "--run", run.to_str().unwrap()]).expect(0);
    let ended = bench.run(&["--resume", run.to_str().unwrap()]).expect(2);
    let said = "`parallel.backend`: \"mpi\" is not built in this version";
    assert!(ended.stderr.contains(said) && ended.stderr.contains("hint:"), "{}", ended.stderr);
}

#[test]
fn a_complete_run_keeps_its_record() {
    let bench = Bench::new(CONFIG);
    let run = bench.train("runs", &[]);
    let files = || ["config.toml", "summary.json"].map(|name| fs::read_to_string(run.join(name)).unwrap());
    let before = files();
    for (setting, said) in
        [("data.limit_train=256", "of this run had 33 steps"), ("train.max_steps=5", "has taken 99 steps, more than 5")]
    {
        let ended = bench.run(&["--resume", run.to_str().unwrap(), "--set", setting]).expect(2);
        assert!(ended.stderr.contains(said), "{}", ended.stderr);
        assert_eq!(files(), before, "{setting}");
    }
}

#[test]
fn a_resumed_run_keeps_its_data_folder() {
    let bench = Bench::new(PICTURES);
    pictures(&bench, &[("train", 8), ("test", 2)], [32, 32]);
    let run = bench.train("runs", &[]);
    let mut command = bench.command();
    command.args(["--resume", run.to_str().unwrap(), "--epochs", "3"]).env("TRAINER_DATA_DIR", bench.path("elsewhere"));
    crate::common::Ended::from(command.output().unwrap()).expect(0);
}

/// In a shell of Slurm, `bench allreduce --cpus 2` measured one process.
#[test]
fn variables_of_a_launcher_do_not_decide_what_other_commands_start() {
    let bench = Bench::new(CONFIG);
    let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_LOCALID", "0"), ("SLURM_JOB_ID", "7")];
    let run = |arguments: &[&str]| -> crate::common::Ended {
        bench.command().envs(slurm).args(arguments).output().unwrap().into()
    };
    let sizes = ["bench", "allreduce", "--cpus", "2", "--sizes", "4", "--ms", "10"];
    let ended = run(&sizes).expect(2);
    assert!(ended.stderr.contains("--launcher local"), "{}", ended.stderr);
    run(&[&sizes[..], &["--launcher", "local"]].concat()).expect(0);
    run(&[
        "sweep",
        "--config",
        "config.toml",
        "--cpus",
        "2",
        "--set",
        "train.epochs=1",
        "--set",
        "optimizer.lr=0.1,0.01",
    ])
    .expect(0);
    // The folder of a sweep is not that of a run.
    let sweep = bench.only_run("runs");
    let ended = bench.run(&["--resume", sweep.to_str().unwrap()]).expect(2);
    assert!(ended.stderr.contains("is the folder of a sweep"), "{}", ended.stderr);
    let ended = bench.run(&["--resume"]).expect(2);
    assert!(ended.stderr.contains("holds no run folder"), "{}", ended.stderr);
}

/// There is nothing to save before the ranks have joined.
#[test]
fn a_signal_ends_a_rank_that_waits_for_the_others() {
    let bench = Bench::new(CONFIG);
    let port = crate::common::free_port().to_string();
    let mut command = bench.command();
    command.args(["--config", "config.toml"]).env("RANK", "0").env("WORLD_SIZE", "2").env("LOCAL_RANK", "0");
    command.env("LOCAL_WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
    let log = bench.path("log");
    let file = fs::File::create(&log).unwrap();
    let child = command.stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
    wait_until("the rank", || fs::read_to_string(&log).is_ok_and(|text| text.contains("rank 0 of 2")));
    // Until the program catches signals, they end it too.
    crate::common::signal(&child, 15);
    let code = child.wait_with_output().unwrap().status;
    use std::os::unix::process::ExitStatusExt;
    assert!(code.code() == Some(143) || code.signal() == Some(15), "{code}: {}", fs::read_to_string(&log).unwrap());
}

#[test]
fn numbers_of_threads_have_limits() {
    let bench = Bench::new(CONFIG);
    for threads in ["abc", "-1", "99999"] {
        let output =
            bench.command().args(["--config", "config.toml"]).env("RAYON_NUM_THREADS", threads).output().unwrap();
        let ended = crate::common::Ended::from(output).expect(2);
        assert!(ended.stderr.contains("from 0 to 1024") && ended.stderr.contains("hint:"), "{}", ended.stderr);
    }
}

/// The kernel would end the program without a message.
#[test]
fn a_batch_that_does_not_fit_into_memory_is_refused() {
    let bench = Bench::new(
        &CONFIG
            .replace("lenet", "resnet18")
            .replace("limit_train = 520", "")
            .replace("limit_test", "image_size = 120\nlimit_test"),
    );
    let ended = bench.run(&["--config", "config.toml", "--set", "train.batch_size=100000"]).expect(2);
    assert!(ended.stderr.contains("of memory, this machine has"), "{}", ended.stderr);
}
