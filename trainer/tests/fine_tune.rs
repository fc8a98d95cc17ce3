//! Fine-tuning: weights from a file, a new classifier, frozen layers and factors of the learning rate.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::common::{self, Bench, CONFIG, Ended, assert_equal_runs, checkpoint_file, pictures::save_png};
use safetensors::SafeTensors;

/// Torchvision's ResNet-18 on a few images.
const RESNET: &str = r#"
[model]
name = "resnet18_imagenet"
[data]
name = "fashion-mini"
image_size = 32
limit_train = 32
limit_test = 8
[train]
epochs = 2
batch_size = 16
ema = 0.9
grad_clip = 1.0
[optimizer]
lr = 0.02
"#;

/// What the runs below add: frozen layers, factors, and a classifier of its own.
const TUNED: [&str; 6] = [
    "--set",
    "model.weights=start.safetensors",
    "--set",
    r#"model.freeze=["conv1", "bn1", "layer1", "layer2.0"]"#,
    "--set",
    "optimizer.lr_factors={ layer3 = 0.1, fc = 5 }",
];

fn tensors(bytes: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let file = SafeTensors::deserialize(bytes).expect("a safetensors file");
    file.iter().map(|(name, tensor)| (name.to_owned(), tensor.data().to_vec())).collect()
}

/// Trains `epochs` and exports the weights to `start.safetensors`.
fn start(bench: &Bench, extra: &[&str]) {
    let run = bench.train("base", &[&["--quiet", "--epochs", "1", "--set", "train.ema=0"], extra].concat());
    let run = run.to_str().unwrap();
    bench.run(&["export", "--run", run, "--checkpoint", "last", "--to", "start.safetensors"]).expect(0);
}

/// Checks which tensors of a fine-tuned run differ from those that it started with.
fn check_frozen(bench: &Bench, run: &Path, file: &str) {
    let (before, after) = (fs::read(bench.path("start.safetensors")).unwrap(), checkpoint_file(run, "last", file));
    let (before, after) = (tensors(&before), tensors(&after));
    let is_frozen = |name: &str| ["conv1.", "bn1.", "layer1.", "layer2.0."].iter().any(|layer| name.starts_with(layer));
    assert_eq!(after.keys().filter(|name| is_frozen(name)).count(), 5 + 4 * 5 + 3 * 5);
    for (name, value) in &after {
        assert_eq!(*value == before[name], is_frozen(name), "{file}: {name}");
    }
}

#[test]
fn frozen_layers_stay_as_they_are_in_every_mode_and_precision() {
    let bench = Bench::new(RESNET);
    start(&bench, &[]);
    for (root, extra) in [
        ("single", &[][..]),
        ("bf16", &["--set", "train.precision=bf16"]),
        ("ddp", &["--cpus", "2", "--set", "parallel.check_sync_every=1"]),
        ("ddp-bf16", &["--cpus", "3", "--set", "train.precision=bf16", "--set", "parallel.batch_norm=reduce"]),
        ("sync", &["--cpus", "2", "--set", "parallel.batch_norm=sync"]),
        ("dp", &["--cpus", "2", "--mode", "dp"]),
    ] {
        // Only the last checkpoint is looked at.
        let last = ["--epochs", "1", "--set", "checkpoint.every=0", "--set", "checkpoint.keep_best=false"];
        let run = bench.train(root, &[&TUNED[..], &last, extra].concat());
        check_frozen(&bench, &run, "model.safetensors");
        check_frozen(&bench, &run, "ema.safetensors");
        let optimizer = tensors(&checkpoint_file(&run, "last", "optimizer.safetensors"));
        assert!(optimizer.contains_key("momentum.layer2.1.conv1.weight"), "{root}");
        assert!(
            optimizer.keys().all(|name| !name.starts_with("momentum.layer1.")),
            "{root}: no state of frozen layers"
        );
    }
}

/// With one image per rank and step, one process and two take the same steps, but for rounding: no batch norm is trained.
#[test]
fn two_processes_take_the_steps_of_one_process() {
    let bench = Bench::new(CONFIG);
    start(&bench, &[]);
    let tuned = [
        "--set",
        "model.weights=start.safetensors",
        "--set",
        r#"model.freeze=["conv1", "fc2.weight"]"#,
        "--set",
        "optimizer.lr_factors={ fc1 = 0.1, \"fc3.bias\" = 2 }",
        "--set",
        "train.max_steps=20",
    ];
    let losses = |root: &str, extra: &[&str]| common::loss_values(&bench.train(root, &[&tuned[..], extra].concat()));
    let one = losses("one", &[]);
    common::assert_same_curve("ddp", &one, &losses("ddp", &["--cpus", "2"]), 1e-4);
    common::assert_same_curve("dp", &one, &losses("dp", &["--cpus", "2", "--mode", "dp"]), 1e-4);
    // The settings matter.
    let free = losses("free", &["--set", "optimizer.lr_factors={ fc1 = 1 }"]);
    assert_ne!(one, free);
    assert_eq!(one[0], free[0], "the first loss is that of the weights");
}

/// The resumed run does not need the file of weights.
#[test]
fn a_resumed_run_equals_an_uninterrupted_run_and_does_not_read_the_weights_again() {
    let bench = Bench::new(RESNET);
    start(&bench, &[]);
    let (weights, hidden) = (bench.path("start.safetensors"), bench.path("hidden"));
    for (root, devices) in [("one", &[][..]), ("two", &["--cpus", "2"])] {
        let whole = bench.train(root, &[&TUNED[..], devices].concat());
        // A run that was killed in its second epoch, as far as its checkpoints tell.
        let run = bench.path(&format!("{root}-parts"));
        Ended::from(Command::new("cp").arg("-a").args([&whole, &run]).output().expect("cp starts")).expect(0);
        for gone in ["last", "best", "epoch-2"] {
            let path = run.join("checkpoints").join(gone);
            if path.is_symlink() { fs::remove_file(path).unwrap() } else { fs::remove_dir_all(path).unwrap() }
        }
        fs::rename(&weights, &hidden).unwrap();
        let screen = bench.run(&["--resume", run.to_str().unwrap()]).expect(0).stdout;
        // The plan has the file's name, and no row says that it was read.
        let said = screen.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains("8 batch norms keep their statistics"), "{screen}");
        assert_eq!(screen.matches("start.safetensors").count(), 1, "{screen}");
        assert_equal_runs(&whole, &run);
        assert_eq!(
            checkpoint_file(&whole, "last", "ema.safetensors"),
            checkpoint_file(&run, "last", "ema.safetensors")
        );
        let refused =
            bench.run(&["--resume", run.to_str().unwrap(), "--set", "model.weights=other.pth"]).expect(2).stderr;
        assert!(refused.contains("a resumed run continues with the weights of its checkpoint"), "{refused}");
        fs::rename(&hidden, &weights).unwrap();
    }
}

/// A run may freeze and unfreeze layers, and start and end its weight average, when it is resumed.
#[test]
fn a_resumed_run_may_train_other_layers_and_average_its_weights_or_not() {
    let bench = Bench::new(
        "[model]\nname = \"lenet\"\n[data]\nname = \"fashion-mini\"\nlimit_train = 64\nlimit_test = 8\n[train]\nepochs = 1\n\
         batch_size = 16\n[optimizer]\nkind = \"adamw\"\n",
    );
    let run = bench.train("runs", &["--set", r#"model.freeze=["conv1"]"#]);
    let resume = |more: &[&str]| {
        let more = more.iter().flat_map(|value| ["--set", *value]);
        bench.run(&["--resume", run.to_str().unwrap()].into_iter().chain(more).collect::<Vec<_>>())
    };
    let read = |file: &str| tensors(&checkpoint_file(&run, "last", file));
    let step_of = |name: &str| {
        let steps = read("optimizer.safetensors").remove(&format!("step.{name}"))?;
        Some(f32::from_le_bytes(steps.try_into().unwrap()))
    };
    let first = read("model.safetensors");

    // Epoch 2 trains conv1 too. AdamW counts its four steps on their own.
    let screen = resume(&["train.epochs=2", "model.freeze=[]", "train.ema=0.9"]).expect(0).stderr;
    assert!(screen.contains("has no weight average: `train.ema` starts from its weights"), "{screen}");
    let second = read("model.safetensors");
    assert_ne!(first["conv1.weight"], second["conv1.weight"]);
    assert_eq!((step_of("conv1.weight"), step_of("fc1.weight")), (Some(4.0), None));
    assert_ne!(read("ema.safetensors")["conv1.weight"], second["conv1.weight"]);

    // Epoch 3 freezes conv1 and fc1.
    let screen = resume(&["train.epochs=3", r#"model.freeze=["conv1", "fc1"]"#, "train.ema=0"]).expect(0).stderr;
    assert!(screen.contains("10 tensors of the optimizer's state in"), "2 moments of 4 parameters, 2 steps: {screen}");
    assert!(screen.contains("`train.ema` is off: the weight average in"), "{screen}");
    let third = read("model.safetensors");
    let changed: Vec<_> = third.iter().filter(|(name, value)| second[*name] != **value).map(|(name, _)| name).collect();
    assert_eq!(changed.len(), 10 - 4, "{changed:?}");
    assert!(!run.join("checkpoints/last/ema.safetensors").exists());

    // A layer that is frozen while the average is on: the average has the layer's weights, not older ones.
    resume(&["train.epochs=4", "model.freeze=[]", "train.ema=0.9"]).expect(0);
    assert_ne!(read("ema.safetensors")["conv2.weight"], read("model.safetensors")["conv2.weight"]);
    resume(&["train.epochs=5", r#"model.freeze=["conv1", "conv2"]"#]).expect(0);
    let (average, weights) = (read("ema.safetensors"), read("model.safetensors"));
    let equal: Vec<_> =
        weights.iter().filter(|(name, value)| average[*name] == **value).map(|(name, _)| name).collect();
    assert_eq!(equal, ["conv1.bias", "conv1.weight", "conv2.bias", "conv2.weight"]);

    // Another optimizer cannot use the moments.
    let refused = resume(&["train.epochs=6", "optimizer.kind=sgd"]).expect(2).stderr;
    assert!(refused.contains("is state of another optimizer, which sgd cannot continue"), "{refused}");
    assert!(refused.contains("checkpoints/epoch-5: ") && refused.contains("hint: a run keeps its model"), "{refused}");
}

/// The best checkpoint is one from before the change. Its averaged weights were evaluated.
#[test]
fn the_test_images_are_evaluated_after_a_change_of_average_or_frozen_layers() {
    let bench = Bench::new(
        "[model]\nname = \"lenet\"\n[data]\nname = \"fashion-mini\"\nvalidation = 0.2\n[train]\nepochs = 2\nema = 0.5\n\
         [schedule]\nkind = \"constant\"\n",
    );
    let run = bench.train("runs", &[]);
    let best = || std::fs::read_link(run.join("checkpoints/best")).unwrap();
    let first = best();
    for (epochs, change) in [("3", "train.ema=0"), ("4", "train.ema=0.9"), ("5", r#"model.freeze=["conv1"]"#)] {
        // Steps of this size make the network worse.
        let worse = ["--set", "optimizer.lr=5", "--set", "train.grad_clip=1", "--set", change];
        let arguments = [&["--resume", run.to_str().unwrap(), "--epochs", epochs], &worse[..]].concat();
        bench.run(&arguments).expect(0);
        assert_eq!(best(), first, "{change}");
        let summary: serde_json::Value =
            serde_json::from_slice(&std::fs::read(run.join("summary.json")).unwrap()).unwrap();
        assert!(summary["test"]["top1"].as_f64().unwrap() > 40.0, "{change}: {summary}");
    }
}

/// Writes a folder of pictures with three classes.
fn pictures(bench: &Bench) {
    for split in ["train", "test"] {
        for (index, class) in ["cat", "dog", "emu"].iter().enumerate() {
            let folder = bench.path(&format!("pictures/{split}/{class}"));
            fs::create_dir_all(&folder).unwrap();
            for picture in 0..8_u32 {
                let shade = |x: u32, y: u32| ((x * 7 + y * 3 + picture * 11) % 60 + 80 * index as u32) as u8;
                save_png(folder.join(format!("{picture}.png")), 32, 32, |x, y| [shade(x, y), shade(y, x), 90]);
            }
        }
    }
}

#[test]
fn for_another_number_of_classes_the_classifier_is_new_and_the_start_table_names_it() {
    let bench = Bench::new(
        "[model]\nname = \"resnet18_imagenet\"\n[data]\nname = \"image-folder\"\ndir = \"pictures\"\n[train]\nepochs = 1\nbatch_size = 8\n",
    );
    pictures(&bench);
    // Weights of torchvision's form, for ten classes, as a program in PyTorch would save them.
    let spec = models::Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };
    let network = models::build("resnet18_imagenet", &spec, 3, &burn::tensor::Device::flex()).unwrap();
    let bytes = |state: &[models::StateTensor]| {
        let data: Vec<Vec<u8>> =
            state.iter().map(|t| t.values.iter().flat_map(|v| v.to_le_bytes()).collect()).collect();
        let views = state.iter().zip(&data).map(|(tensor, bytes)| {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, tensor.shape.clone(), bytes);
            (format!("module.{}", tensor.name), view.unwrap())
        });
        safetensors::serialize(views, None).unwrap()
    };
    fs::write(bench.path("ten.safetensors"), bytes(&models::state_dict(&network))).unwrap();
    let tuned = ["--set", "model.weights=ten.safetensors", "--set", r#"model.freeze=["conv1", "bn1", "layer1"]"#];
    let screen = bench.run(&[&["--config", "config.toml"], &tuned[..]].concat()).expect(0).stdout;
    let said = screen.split_whitespace().collect::<Vec<_>>().join(" ");
    for text in [
        "weights ten.safetensors",
        "new head fc: 3 classes, the file has 10; its initial weights are random",
        "frozen 157,504 of 11,178,051 parameters; 5 batch norms keep their statistics",
    ] {
        assert!(said.contains(text), "{text}\n{screen}");
    }
    // `eval` and `export` know no frozen layers: the run's weights are complete.
    let run = bench.only_run("runs");
    bench.run(&["eval", "--run", run.to_str().unwrap()]).expect(0);
    bench.run(&["export", "--run", run.to_str().unwrap(), "--to", "three.safetensors"]).expect(0);
    let eval = ["eval", "--model", "resnet18_imagenet", "--weights", "three.safetensors", "--data", "image-folder"];
    bench.run(&[&eval[..], &["--data-dir", "pictures"]].concat()).expect(0);
    // A dry run says the same.
    let dry = bench.run(&[&["--config", "config.toml", "--dry-run"], &tuned[..]].concat()).expect(0).stdout;
    assert!(dry.contains("built once the images are read"), "{dry}");
}

/// Runs a configuration that must be refused with exit code 2, and returns the message.
fn refused(bench: &Bench, extra: &[&str]) -> String {
    let ended = bench.run(&[&["--config", "config.toml"], extra].concat()).expect(2);
    assert_eq!(ended.stdout, "");
    assert!(!bench.path("runs").exists(), "nothing was written");
    ended.stderr
}

#[test]
fn impossible_settings_are_refused_with_a_hint() {
    let resnet = RESNET.replace("[optimizer]\n", "[optimizer]\nlr_factors = { layer5 = 0.1 }\n");
    let freeze = |names: &str| RESNET.replace("[model]\n", &format!("[model]\nfreeze = {names}\n"));
    insta::assert_snapshot!(refused(&Bench::new(&freeze("[\"conv1\", \"layr1\"]")), &[]), @r#"
    error: `model.freeze`: resnet18_imagenet has no layer "layr1"
     --> config.toml:3:10
      |
    3 | freeze = ["conv1", "layr1"]
      |          ^^^^^^^^^^^^^^^^^^
      hint: did you mean `layer1`? layers: conv1, bn1, layer1, layer2, layer3, layer4, fc, and parts of them, such as layer1.0
    "#);
    insta::assert_snapshot!(refused(&Bench::new(&freeze("[\"stem\"]")), &[]), @r#"
    error: `model.freeze`: resnet18_imagenet has no layer "stem"
     --> config.toml:3:10
      |
    3 | freeze = ["stem"]
      |          ^^^^^^^^
      hint: layers: conv1, bn1, layer1, layer2, layer3, layer4, fc, and parts of them, such as layer1.0
    "#);
    insta::assert_snapshot!(refused(&Bench::new(&freeze("[\"layer1.0.conv\"]")), &[]), @r#"
    error: `model.freeze`: resnet18_imagenet has no layer "layer1.0.conv"
     --> config.toml:3:10
      |
    3 | freeze = ["layer1.0.conv"]
      |          ^^^^^^^^^^^^^^^^^
      hint: did you mean `layer1.0.conv1`? layers: conv1, bn1, layer1, layer2, layer3, layer4, fc, and parts of them, such as layer1.0
    "#);
    insta::assert_snapshot!(refused(&Bench::new(&freeze("[\"bn1.running_mean\"]")), &[]), @r#"
    error: `model.freeze`: resnet18_imagenet has no layer "bn1.running_mean"
     --> config.toml:3:10
      |
    3 | freeze = ["bn1.running_mean"]
      |          ^^^^^^^^^^^^^^^^^^^^
      hint: did you mean `bn1`? layers: conv1, bn1, layer1, layer2, layer3, layer4, fc, and parts of them, such as layer1.0
    "#);
    insta::assert_snapshot!(refused(&Bench::new(&resnet), &[]), @r#"
    error: `optimizer.lr_factors`: resnet18_imagenet has no layer "layer5"
      --> config.toml:15:14
       |
    15 | lr_factors = { layer5 = 0.1 }
       |              ^^^^^^^^^^^^^^^^
      hint: did you mean `layer1`? layers: conv1, bn1, layer1, layer2, layer3, layer4, fc, and parts of them, such as layer1.0
    "#);
    let all = "[\"conv1\", \"bn1\", \"layer1\", \"layer2\", \"layer3\", \"layer4\", \"fc\"]";
    insta::assert_snapshot!(refused(&Bench::new(&freeze(all)), &[]), @r#"
    error: `model.freeze`: every weight of resnet18_imagenet is frozen, nothing is left to train
     --> config.toml:3:10
      |
    3 | freeze = ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"]
      |          ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
      hint: leave out the classifier, `fc`
    "#);
    let both = ["--set", "optimizer.lr_factors={ \"layer1.0\" = 0.1 }"];
    insta::assert_snapshot!(refused(&Bench::new(&freeze("[\"layer1\"]")), &both), @r#"
    error: `optimizer.lr_factors`: all of "layer1.0" is frozen
      --> --set optimizer.lr_factors={ "layer1.0" = 0.1 }
      hint: remove the factor of "layer1.0", or remove the layer from `model.freeze`
    "#);
    let single = ["--set", "train.batch_size=31"];
    insta::assert_snapshot!(refused(&Bench::new(RESNET), &single), @r#"
    error: a step has a single image on a device, and resnet18_imagenet reduces 32x32 pixels to one: batch norm needs two values
      --> --set train.batch_size=31
      hint: use larger images, such as data.image_size = 64, another batch_size, or drop_last = true
    "#);
    insta::assert_snapshot!(refused(&Bench::new(RESNET), &["--set", "model.weights=none.pth"]), @r#"
    error: `model.weights`: none.pth: No such file or directory (os error 2)
      --> --set model.weights=none.pth
      hint: name a PyTorch state dict (.pth, .pt), a safetensors file, or a checkpoint's folder
    "#);
}

/// The launcher finds a mistake in the file of weights before it starts a process.
#[test]
fn a_job_ends_with_the_message_about_its_weights() {
    let bench = Bench::new(CONFIG);
    let resnet = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/weights/net_module.pth"));
    fs::copy(resnet, bench.path("lenet.pth")).unwrap();
    let job = ["--cpus", "2", "--set", "model.name=resnet18", "--set", "model.weights=lenet.pth"];
    let said = bench.run(&[&["--config", "config.toml"], &job[..]].concat()).expect(2).stderr;
    assert!(said.starts_with("error: `model.weights`: lenet.pth: the weights are not this network's"), "{said}");
    assert!(said.contains("hint: they are weights of lenet: set `model.name = \"lenet\"`"), "{said}");
}
