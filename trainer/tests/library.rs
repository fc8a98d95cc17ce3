//! The examples: programs with a network or a data set of their own, and everything else of the trainer.

mod common;

use std::path::PathBuf;
use std::process::Command;

use burn::module::Module;
use burn::tensor::Tensor;
use clap::Parser;
use common::{Bench, Ended, assert_equal_runs, summary};
use models::layers::{Conv2d, Conv2dConfig, Linear, global_avg_pool};
use models::{BuildError, Context, CustomNetwork, Init, Spec};

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
fn a_registered_network_is_trained_resumed_evaluated_and_exported() {
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
fn a_registered_data_set_is_trained_on() {
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

/// A network that doubles its features by burn's own operation, which no graph has.
#[derive(Module, Debug)]
struct Doubling {
    conv1: Conv2d,
    fc: Linear,
}

impl CustomNetwork for Doubling {
    fn build(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        Ok(Self {
            conv1: Conv2dConfig::new([spec.in_channels, 4], 3).with_stride(2).init(&init.child("conv1")),
            fc: Linear::new([4, spec.num_classes], &init.child("fc")),
        })
    }

    fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        self.fc.forward(global_avg_pool(self.conv1.forward(images, cx).mul_scalar(2.0)), cx)
    }
}

/// The other tests run programs, so this process may register a network.
#[test]
fn a_network_with_custom_operations_is_trained_and_not_exported_as_a_graph() {
    models::register::<Doubling>("doubling", Spec { num_classes: 10, in_channels: 1, image_size: [28, 28] });
    let config = "[model]\nname = \"doubling\"\n[data]\nname = \"fashion-mini\"\nlimit_train = 16\nlimit_test = 16\n\
                  [train]\nepochs = 1\nbatch_size = 16\n";
    let bench = Bench::new(config);
    let command = |arguments: &[&str]| {
        let cli = trainer::cli::Cli::try_parse_from([&["trainer"], arguments].concat()).expect("arguments");
        trainer::commands::run(cli)
    };
    let path = |name: &str| bench.path(name).to_str().expect("UTF-8").to_owned();
    let code = command(&["--config", &path("config.toml"), "--run-dir", &path("runs"), "--quiet"]);
    assert_eq!(code.expect("the network trains"), 0);
    let run = bench.only_run("runs");
    let export =
        |arguments: &[&str]| command(&[&["export", "--run", run.to_str().unwrap(), "--to"], arguments].concat());
    for arguments in [vec![path("net.onnx")], vec![path("net.safetensors"), "--fold".into()]] {
        let failure = export(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).expect_err("no graph");
        assert!(failure.message.starts_with("doubling cannot be exported as a graph: "), "{failure}");
        assert_eq!(
            failure.hint.as_deref(),
            Some("export the weights alone, with --to FILE.safetensors and without --fold")
        );
        assert_eq!((failure.code, bench.path("net.onnx").exists()), (2, false));
    }
    assert_eq!(export(&[&path("net.safetensors")]).expect("weights need no graph"), 0);
}
