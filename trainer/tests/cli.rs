//! Tests the binary's output and the files that it writes.

use std::{fs, path::Path, process::Command};

use crate::common::{self, Bench, CONFIG, Ended, checkpoint_file, entries, pictures::save_png};

#[test]
fn a_run_writes_every_file_that_the_readme_names() {
    let bench = Bench::new(CONFIG);
    let ended = bench.run(&["--config", "config.toml"]).expect(0);
    let run = bench.only_run("runs");
    for name in ["config.toml", "env.json", "metrics.jsonl", "summary.csv", "summary.json", "curves.svg", "checkpoints"]
    {
        assert!(run.join(name).exists(), "{name}");
    }
    assert!(entries(&run).iter().any(|p| p.file_name().unwrap().to_string_lossy().starts_with("events.out.tfevents")));
    let last = ended.stdout.trim_end().lines().last().unwrap().to_owned();
    assert!(last.starts_with("run folder:") && last.contains("runs/"), "the last line names the folder: {last}");
    let header = fs::read_to_string(run.join("summary.csv")).unwrap();
    assert!(header.starts_with("epoch,train_loss,train_top1,eval_loss,eval_top1,eval_top5,lr,images_per_s,seconds\n"));
    assert_eq!(header.lines().count(), 1 + 3);
    // A run's config.toml is a valid config and repeats the run
    bench.run(&["--config", run.join("config.toml").to_str().unwrap(), "--run-dir", "again"]).expect(0);
    assert_eq!(common::losses(&run), common::losses(&bench.only_run("again")));
}

#[test]
fn eval_of_a_run_and_of_its_weights_agree_with_the_summary() {
    let bench = Bench::new(CONFIG);
    let whole = ["--set", "data.limit_test=0", "--set", "data.limit_train=2000"];
    let quiet = bench.run(&[&["--config", "config.toml", "--quiet"], &whole[..]].concat()).expect(0);
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), ("", ""));
    let run = bench.only_run("runs");
    let summary: serde_json::Value = serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap();
    let best = &summary["best"];
    let of_run = json(bench.run(&["eval", "--run", run.to_str().unwrap(), "--json"]).expect(0));
    for key in ["top1", "top5", "loss", "correct", "total"] {
        assert_eq!(of_run[key], best[key], "{key}");
    }
    assert_eq!(of_run["total"], 1000);
    let weights = run.join("checkpoints/best/model.safetensors");
    let arguments = ["eval", "--model", "lenet", "--weights", weights.to_str().unwrap(), "--data", "fashion-mini"];
    assert_eq!(of_run, json(bench.run(&[&arguments[..], &["--json"]].concat()).expect(0)));
    let text = bench.run(&arguments).expect(0).stdout;
    assert!(text.contains("of 1,000 right") && text.contains("recall"), "{text}");

    // For a file of another model, the error names missing, unexpected or misshapen tensors
    let other = ["eval", "--model", "vgg11", "--weights", weights.to_str().unwrap(), "--data", "cifar10"];
    let ended = bench.run(&other).expect(2);
    assert!(ended.stderr.contains("hint:"), "{}", ended.stderr);
}

fn json(ended: Ended) -> serde_json::Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {}", ended.stdout))
}

#[test]
fn a_dry_run_writes_nothing() {
    let bench = Bench::new(CONFIG);
    let ended = bench.run(&["--config", "config.toml", "--dry-run"]).expect(0);
    assert!(ended.stdout.contains("44,426 parameters"), "{}", ended.stdout);
    assert!(!bench.path("runs").exists());
}

/// Checks that every shipped config can start: model, data set and values fit each other.
#[test]
fn every_shipped_config_passes_a_dry_run() {
    let bench = Bench::new(CONFIG);
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs");
    let mut seen = 0;
    for path in entries(folder.as_ref()).iter().filter(|path| path.extension().is_some_and(|e| e == "toml")) {
        bench.run(&["--config", path.to_str().unwrap(), "--dry-run"]).expect(0);
        seen += 1;
    }
    assert!(seen >= 24, "{seen} configs");
}

#[test]
fn mistakes_exit_with_code_2_and_a_hint() {
    let bench = Bench::new(CONFIG);
    let cases: [(&[&str], &str); 10] = [
        (&["--config", "missing.toml"], "missing.toml"),
        (&["--config", "config.toml", "--set", "optimizer.lr=nan"], "--set optimizer.lr=nan"),
        (&["--config", "config.toml", "--set", "train.batch_size=0"], "batch_size"),
        (&["--config", "config.toml", "--set", "model.name=resnet81"], "resnet18"),
        (&["--config", "config.toml", "--set", "model.name=vgg16"], "data.image_size"),
        (&["--config", "config.toml", "--set", "model.num_classes=11"], "num_classes"),
        (&["--config", "config.toml", "--set", "parallel.mode=fsdp"], "single"),
        (&["--config", "config.toml", "--cpus", "0"], "--cpus 0"),
        (&["--config", "config.toml", "--gpus", "1"], "--gpus"),
        (&["--dry-run"], "--config"),
    ];
    for (arguments, named) in cases {
        let ended = bench.run(arguments).expect(2);
        assert!(ended.stderr.contains(named), "{arguments:?}: {}", ended.stderr);
        assert!(ended.stderr.contains("hint:"), "{arguments:?}: {}", ended.stderr);
        assert!(!ended.stderr.contains("panicked"), "{arguments:?}: {}", ended.stderr);
    }
    assert!(!bench.path("runs").exists(), "nothing was started");
}

#[test]
fn data_files_that_are_wrong_are_named() {
    let bench =
        Bench::new(&CONFIG.replace("fashion-mini", "cifar10").replace("limit_train = 520\nlimit_test = 200", ""));
    let folder = bench.path("cifar-10-batches-bin");
    let train = |bench: &Bench| bench.run(&["--config", "config.toml", "--data-dir", "."]).expect(2).stderr;
    let absent = train(&bench);
    assert!(absent.contains("cifar-10-batches-bin") && absent.contains("trainer data fetch cifar10"), "{absent}");
    fs::create_dir(&folder).unwrap();
    for name in ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"] {
        fs::write(folder.join(format!("{name}.bin")), vec![1; 3073 * 10_000]).unwrap();
    }
    fs::write(folder.join("data_batch_3.bin"), vec![1; 3073 * 10_000 - 5]).unwrap();
    let truncated = train(&bench);
    assert!(truncated.contains("data_batch_3.bin") && truncated.contains("hint:"), "{truncated}");
    let mut bytes = vec![1; 3073 * 10_000];
    bytes[3073 * 17] = 10;
    fs::write(folder.join("data_batch_3.bin"), bytes).unwrap();
    let label = train(&bench);
    assert!(label.contains("data_batch_3.bin") && label.contains("17"), "{label}");
}

#[test]
fn an_image_folder_trains_and_a_model_with_other_classes_is_refused() {
    let bench = Bench::new(
        "[model]\nname = \"lenet\"\n[data]\nname = \"image-folder\"\ndir = \"pictures\"\n\
         [train]\nepochs = 1\nbatch_size = 4\n",
    );
    for (split, count) in [("train", 6), ("test", 2)] {
        for (class, colour) in [("dark", 10u8), ("light", 240)] {
            let folder = bench.path(&format!("pictures/{split}/{class}"));
            fs::create_dir_all(&folder).unwrap();
            for i in 0..count {
                let pixel = |x, y| [colour, (x * 7 + i) as u8, (y * 5) as u8];
                save_png(folder.join(format!("{i}.png")), 20, 20, pixel);
            }
        }
    }
    let ended = bench.run(&["--config", "config.toml"]).expect(0);
    assert!(ended.stdout.contains("12 + 4 images 3x20x20"), "{}", ended.stdout);
    let refused = bench.run(&["--config", "config.toml", "--set", "model.num_classes=3"]).expect(2);
    assert!(refused.stderr.contains("num_classes") && refused.stderr.contains("hint:"), "{}", refused.stderr);
}

/// An empty variable counts as unset.
#[test]
fn the_environment_variable_sets_the_data_folder() {
    let bench = Bench::new(CONFIG);
    let run = |value: &str, arguments: &[&str]| -> Ended {
        bench.command().env("TRAINER_DATA_DIR", value).args(arguments).output().unwrap().into()
    };
    run("", &["data", "list"]).expect(0);
    run("", &["--config", "config.toml", "--dry-run"]).expect(0);
    let cifar = ["--config", "config.toml", "--set", "data.name=cifar10", "--set", "data.augment=[]"];
    let missing = run("from-variable", &cifar).expect(2).stderr;
    assert!(
        missing.contains("from-variable: there is no such folder\n  --> TRAINER_DATA_DIR=from-variable"),
        "{missing}"
    );
    let flag = run("from-variable", &[&cifar[..], &["--data-dir", "from-flag"]].concat()).expect(2).stderr;
    assert!(flag.contains("--> --data-dir from-flag") && !flag.contains("from-variable"), "{flag}");
    // The command line takes precedence over the variable, and the variable over the file.
    let set = run("from-variable", &[&cifar[..], &["--set", "data.dir=from-set"]].concat()).expect(2).stderr;
    assert!(set.contains("--> --set data.dir=from-set") && !set.contains("from-variable"), "{set}");
    let text = "[model]\nname = \"lenet\"\n[data]\nname = \"cifar10\"\ndir = \"from-file\"\n";
    fs::write(bench.path("file.toml"), text).unwrap();
    let file = run("", &["--config", "file.toml"]).expect(2).stderr;
    assert!(file.contains("--> file.toml:5:7") && file.contains("from-file: there is no such folder"), "{file}");
    let over = run("from-variable", &["--config", "file.toml"]).expect(2).stderr;
    assert!(over.contains("TRAINER_DATA_DIR=from-variable") && !over.contains("from-file"), "{over}");
    let verify = run("from-variable", &["data", "verify", "cifar10"]).expect(2).stderr;
    assert!(verify.contains("the variable TRAINER_DATA_DIR=from-variable names this folder"), "{verify}");
    // A sweep that continues takes no folder.
    let resumed = run("from-variable", &["sweep", "--resume", "nowhere"]).expect(2).stderr;
    assert!(resumed.contains("nowhere") && resumed.contains("hint:"), "{resumed}");
}

#[test]
fn eval_of_other_data_does_not_search_the_folder_of_the_run() {
    let bench = Bench::new(CONFIG);
    fs::create_dir(bench.path("data-of-the-run")).unwrap();
    let run = bench.train("runs", &["--epochs", "1", "--data-dir", "data-of-the-run"]);
    let eval = ["eval", "--run", run.to_str().unwrap()];
    let missing = bench.run(&[&eval[..], &["--data", "mnist"]].concat()).expect(2).stderr;
    assert!(!missing.contains("data-of-the-run"), "{missing}");
    let resize = bench.run(&[&eval[..], &["--resize", "20"]].concat()).expect(2).stderr;
    assert!(resize.contains("--resize 20: it is for images in files"), "{resize}");
}

#[test]
fn the_environment_variable_does_not_replace_the_images_of_a_run() {
    let bench = Bench::new(
        "[model]\nname = \"lenet\"\n[data]\nname = \"image-folder\"\ndir = \"pictures\"\n\
         [train]\nepochs = 1\nbatch_size = 4\n",
    );
    // The folders differ in the number of test images.
    for (set, tests) in [("pictures", 2), ("others", 3), ("third", 4)] {
        for (split, count) in [("train", 4), ("test", tests)] {
            for (class, colour) in [("dark", 10u8), ("light", 240)] {
                let folder = bench.path(&format!("{set}/{split}/{class}"));
                fs::create_dir_all(&folder).unwrap();
                (0..count).for_each(|i| save_png(folder.join(format!("{i}.png")), 20, 20, |x, _| [colour, x as u8, i]));
            }
        }
    }
    let run = bench.train("runs", &[]);
    let total = |flags: &[&str]| {
        let mut command = bench.command();
        command.env("TRAINER_DATA_DIR", "others").args(["eval", "--run", run.to_str().unwrap(), "--json"]).args(flags);
        json(Ended::from(command.output().unwrap()).expect(0))["total"].as_u64().unwrap()
    };
    assert_eq!(total(&[]), 4, "the run's own images");
    assert_eq!(total(&["--data-dir", "third"]), 8);
    assert_eq!(total(&["--data", "image-folder"]), 6);
}

/// Such a run has no `data.dir` in its config.toml.
#[test]
fn the_environment_variable_does_not_replace_the_default_folder_of_a_run() {
    let bench = Bench::new(CONFIG);
    let run = bench.train("runs", &["--epochs", "1"]);
    let config = run.join("config.toml");
    let text = fs::read_to_string(&config).unwrap();
    assert!(!text.contains("\ndir = "), "{text}");
    // The built-in data set needs no folder.
    fs::write(&config, text.replace("name = \"fashion-mini\"", "name = \"mnist\"")).unwrap();
    for arguments in [&["eval", "--run"][..], &["--epochs", "2", "--resume"]] {
        let mut command = bench.command();
        command.env("XDG_CACHE_HOME", bench.path("cache")).env("TRAINER_DATA_DIR", "from-variable");
        let missing = Ended::from(command.args(arguments).arg(&run).output().unwrap()).expect(2).stderr;
        assert!(missing.contains("cache/trainer") && !missing.contains("from-variable"), "{missing}");
    }
}

/// LeNet's first linear layer depends on the size of the images.
#[test]
fn an_evaluation_at_another_size_is_refused_where_weights_depend_on_it() {
    let bench = Bench::new(CONFIG);
    let run = bench.train("runs", &["--epochs", "1"]);
    let eval =
        |flags: &[&str]| bench.run(&[&["eval", "--run", run.to_str().unwrap()], flags].concat()).expect(2).stderr;
    let larger = eval(&["--image-size", "32"]);
    assert!(larger.contains("lenet for images of 32x32 pixels has other weights than for the run's 28x28"), "{larger}");
    assert!(larger.contains("hint: use --image-size 28 instead of 32, or leave it out"), "{larger}");
    let misspelt = eval(&["--data", "fashion_mini"]);
    assert!(misspelt.contains("--data fashion_mini: no such data set"), "{misspelt}");
    assert!(misspelt.contains("did you mean `fashion-mini`?"), "{misspelt}");
}

/// The last step of an epoch has the batches that are left, so an epoch's batches are the most that are in memory.
#[test]
fn an_accumulation_longer_than_an_epoch_needs_no_more_memory() {
    let bench = Bench::new(CONFIG);
    let arguments = ["--config", "config.toml", "--epochs", "1", "--set", "train.accumulate=65536"];
    bench.run(&arguments).expect(0);
}

/// Keys that only several processes use are not a mistake, but they change nothing.
#[test]
fn one_process_notes_the_keys_that_it_does_not_use() {
    let bench = Bench::new(CONFIG);
    let run = |flags: &[&str]| bench.run(&[&["--config", "config.toml", "--epochs", "1"], flags].concat()).expect(0);
    let keys = ["--set", "parallel.bucket_mb=3", "--set", "parallel.threads=1"];
    let said = run(&keys).stderr;
    let note = "note: `parallel.bucket_mb`, `parallel.threads`: no effect in mode single, which is one process; RAYON_NUM_THREADS=N";
    assert!(said.contains(note), "{said}");
    let batch_norm = ["--mode", "dp", "--cpus", "2", "--set", "parallel.batch_norm=sync"];
    assert!(!run(&batch_norm).stderr.contains("no effect"));
    let job = run(&[&["--cpus", "2"], &keys[..]].concat());
    assert!(!job.stderr.contains("no effect"), "{}", job.stderr);
    assert!(job.stdout.contains("CPU, burn-flex, 1 thread, "), "{}", job.stdout);
    // The run folder has all keys, with their defaults.
    let plain = bench.train("plain", &["--epochs", "1"]);
    let resumed = bench.run(&["--resume", plain.to_str().unwrap()]).expect(0).stderr;
    assert!(!resumed.contains("no effect"), "{resumed}");
}

#[test]
fn models_and_data_lists_are_machine_readable() {
    let bench = Bench::new(CONFIG);
    let models = json(bench.run(&["models", "--json"]).expect(0));
    let resnet = models.as_array().unwrap().iter().find(|model| model["name"] == "resnet18").unwrap();
    assert_eq!((&resnet["params"], &resnet["macs"]), (&11_173_962.into(), &555_422_720u64.into()));
    assert_eq!(resnet["published_top1"], 93.02);
    let list = bench.run(&["data", "list"]).expect(0).stdout;
    for name in ["cifar10", "cifar100", "mnist", "fashion-mnist", "image-folder", "manifest", "fashion-mini"] {
        assert!(list.contains(name), "{name}: {list}");
    }
    assert!(bench.run(&["data", "verify", "fashion-mini"]).expect(0).stdout.contains("verified"));
    bench.run(&["data", "verify", "imagenet"]).expect(2);
}

/// Checks that TensorBoard reads the event files.
#[test]
fn tensorboard_reads_the_events() {
    let Some(python) = common::python_with(&["tensorboard"]) else { return };
    let bench = Bench::new(CONFIG);
    bench.run(&["--config", "config.toml", "--quiet"]).expect(0);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tensorboard_check.py");
    let output = Command::new(python).arg(script).arg(bench.only_run("runs")).output().expect("python starts");
    Ended::from(output).expect(0);
}

#[test]
fn checkpoints_are_pytorch_state_dicts() {
    let bench = Bench::new(CONFIG);
    bench.run(&["--config", "config.toml", "--quiet", "--epochs", "1"]).expect(0);
    let bytes = checkpoint_file(&bench.only_run("runs"), "last", "model.safetensors");
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names: Vec<_> = file.names().into_iter().collect();
    names.sort();
    assert_eq!(names.len(), 10);
    assert_eq!(file.tensor("fc1.weight").unwrap().shape(), [120, 256]);
    assert_eq!(names[0], "conv1.bias");
}

#[test]
fn the_table_reads_runs_and_their_committed_summaries() {
    let bench = Bench::new(CONFIG);
    for seed in ["0", "1"] {
        let whole = ["--set", "data.limit_test=0", "--set", "data.limit_train=0", "--set", "train.batch_size=256"];
        let run = ["--config", "config.toml", "--quiet", "--epochs", "1", "--seed", seed];
        bench.run(&[&run[..], &whole].concat()).expect(0);
    }
    let table = |path: &str| json(bench.run(&["table", path, "--json"]).expect(0));
    let rows = table("runs");
    let row = |rows: &serde_json::Value, model: &str| {
        rows.as_array().unwrap().iter().find(|row| row["model"] == model).unwrap().clone()
    };
    let lenet = row(&rows, "lenet");
    assert_eq!((&lenet["dataset"], &lenet["runs"], &lenet["epochs"]), (&"fashion-mini".into(), &2.into(), &1.into()));
    assert!(lenet["top1"].as_f64().unwrap() > 10.0 && lenet["deviation"].is_f64() && lenet["device"].is_string());
    let resnet = row(&rows, "resnet18");
    assert_eq!(
        (&resnet["published_top1"], &resnet["top1"], &resnet["runs"]),
        (&93.02.into(), &serde_json::Value::Null, &0.into())
    );

    let own = bench.run(&["table", "runs", "--save", "./runs"]).expect(2).stderr;
    assert!(own.contains("is the run itself") && own.contains("such as results"), "{own}");
    bench.run(&["table", "runs", "--save", "results"]).expect(0);
    fs::remove_dir_all(bench.path("runs")).unwrap();
    assert_eq!(rows, table("results"));
    let text = bench.run(&["table"]).expect(0).stdout;
    assert!(text.contains("no run") && text.contains("(n=2)"), "{text}");
    assert!(bench.run(&["table", "--markdown"]).expect(0).stdout.starts_with("| model | data | published | reached |"));
    // A summary's config.toml is a valid config
    let saved = &entries(&bench.path("results"))[0];
    bench.run(&["--config", saved.join("config.toml").to_str().unwrap(), "--dry-run"]).expect(0);
}

/// Checks that the committed summaries are readable and name no machine.
#[test]
fn committed_results_are_readable_and_name_no_machine() {
    let bench = Bench::new(CONFIG);
    let results = concat!(env!("CARGO_MANIFEST_DIR"), "/../results");
    let rows = json(bench.run(&["table", results, "--json"]).expect(0));
    assert!(rows.as_array().unwrap().iter().any(|row| row["runs"].as_u64() > Some(0)), "{rows}");
    for run in entries(results.as_ref()).iter().filter(|path| path.is_dir()) {
        for file in ["config.toml", "env.json", "summary.csv", "summary.json"] {
            let text = fs::read_to_string(run.join(file)).unwrap();
            assert!(!text.contains("\"/") && !text.contains("=/"), "{}/{file} names a path", run.display());
        }
        let config = run.join("config.toml");
        // The weights that a run started from are those of another committed run
        let text = fs::read_to_string(&config).unwrap();
        let weights = text.lines().find_map(|line| line.strip_prefix("weights = "));
        let run_of = |path: &str| path.trim_matches('"').split('/').next().unwrap().to_owned();
        let started_from = weights.map(|path| Path::new(results).join(run_of(path)));
        assert!(started_from.as_ref().is_none_or(|other| other.is_dir()), "{}: {weights:?}", run.display());
        let said = bench.run(&["--config", config.to_str().unwrap(), "--dry-run"]);
        match started_from {
            None => assert_eq!(said.code, Some(0), "{}", said.stderr),
            Some(_) => assert!(said.expect(2).stderr.contains("No such file"), "the weights are not committed"),
        }
    }
}
