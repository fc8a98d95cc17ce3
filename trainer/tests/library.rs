//! The examples: programs with a network or a data set of their own, and everything else of the trainer.

mod common;

use std::path::PathBuf;
use std::process::Command;

use common::{Bench, Ended, assert_equal_runs, summary};

/// Returns an example's program, which `cargo test` has built with the tests.
fn example(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_trainer")).with_file_name("examples").join(name);
    assert!(path.is_file(), "cargo build --release --example {name} makes {}", path.display());
    path
}

/// Runs an example in the folder of `bench`.
fn run(bench: &Bench, name: &str, arguments: &[&str]) -> Ended {
    let mut command = Command::new(example(name));
    command.args(arguments).current_dir(bench.folder.path()).env("NO_COLOR", "1").env_remove("TRAINER_DATA_DIR");
    command.output().expect("the example starts").into()
}

const OWN_MODEL: &str = r#"
[model]
name = "small_net"
[data]
name = "fashion-mini"
augment = ["crop", "flip"]
limit_train = 512
limit_test = 200
[train]
epochs = 2
batch_size = 32
ema = 0.9
[optimizer]
lr = 0.05
[schedule]
kind = "constant"
"#;

#[test]
fn an_own_network_is_trained_resumed_evaluated_and_exported_like_any_other() {
    let bench = Bench::new(OWN_MODEL);
    let own = |arguments: &[&str]| run(&bench, "own_model", arguments);
    let train = |root: &str, extra: &[&str]| {
        own(&[&["--config", "config.toml", "--quiet", "--cpus", "2", "--run-dir", root], extra].concat()).expect(0);
        bench.only_run(root)
    };
    let through = train("through", &[]);
    // In two parts.
    let stopped = train("stopped", &["--epochs", "1"]);
    let stopped = stopped.to_str().unwrap();
    own(&["--resume", stopped, "--quiet", "--cpus", "2", "--epochs", "2"]).expect(0);
    assert_equal_runs(&through, stopped.as_ref());

    let evaluated = own(&["eval", "--run", stopped, "--json"]).expect(0).stdout;
    let evaluated: serde_json::Value = serde_json::from_str(&evaluated).unwrap();
    assert_eq!(evaluated["total"], 1000, "all test images");
    let said = own(&["export", "--run", stopped, "--fold", "--to", "own.onnx"]).expect(0).stdout;
    assert!(said.contains("(2 of 2 batch norms folded)"), "{said}");
    assert!(own(&["models"]).expect(0).stdout.contains("small_net"));

    // The program without the network says so.
    let said = bench.run(&["eval", "--run", stopped]).expect(2).stderr;
    assert!(said.contains("no model is called \"small_net\"") && said.contains("hint:"), "{said}");
}

const OWN_DATASET: &str = r#"
[model]
name = "lenet"
[data]
name = "stripes"
[train]
epochs = 2
batch_size = 32
[optimizer]
lr = 0.02
"#;

#[test]
fn an_own_data_set_is_trained_on_like_any_other() {
    let bench = Bench::new(OWN_DATASET);
    let own = |arguments: &[&str]| run(&bench, "own_dataset", arguments);
    own(&["--config", "config.toml", "--quiet", "--cpus", "2", "--run-dir", "runs"]).expect(0);
    let folder = bench.only_run("runs");
    assert_eq!(summary(&folder).len(), 3, "a head and two epochs");
    let evaluated = own(&["eval", "--run", folder.to_str().unwrap(), "--json"]).expect(0).stdout;
    let evaluated: serde_json::Value = serde_json::from_str(&evaluated).unwrap();
    assert_eq!(evaluated["total"], 128);
    assert!(evaluated["top1"].as_f64().unwrap() > 90.0, "{evaluated}");
    assert!(own(&["data", "list"]).expect(0).stdout.contains("stripes"));
    let said = own(&["--config", "config.toml", "--set", "data.image_size=8"]).expect(2).stderr;
    assert!(said.contains("image_size") && said.contains("hint:"), "{said}");
}
