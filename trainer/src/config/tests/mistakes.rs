//! Every kind of mistake with its line, caret, cause and hint: the cases are here, what the user reads is in `snapshots/`.
//! `INSTA_UPDATE=always cargo test --release -p trainer --lib config` writes the snapshots.

use super::{BASE, brief, read, set};
use crate::config::Overrides;

/// Compares what the user reads about each of the texts with the snapshot of that name.
fn check(name: &str, texts: &[&str]) {
    let mistakes: Vec<String> =
        texts.iter().map(|text| brief(&read(text, &Overrides::default()).expect_err(text))).collect();
    insta::assert_snapshot!(name, mistakes.join("\n"));
}

/// [`check`] with lines that follow a complete configuration.
fn check_after_base(name: &str, lines: &[&str]) {
    let texts: Vec<String> = lines.iter().map(|lines| format!("{BASE}{lines}")).collect();
    check(name, &texts.iter().map(String::as_str).collect::<Vec<_>>());
}

#[test]
fn numbers() {
    check_after_base(
        "numbers",
        &[
            "[optimizer]\nlr = nan",
            "[optimizer]\nlr = inf",
            "[optimizer]\nlr = 1e999",
            "[optimizer]\nlr = 0",
            "[optimizer]\nlr = -0.1",
            "[train]\nbatch_size = 0",
            "[train]\nbatch_size = 128_000_000",
            "[train]\nseed = -1",
            "[train]\nseed = 18446744073709551616",
            "[train]\nlabel_smoothing = 1.0",
            "[train]\nema = 1",
            "[train]\nmixup = -1\ncutmix = -0.5\ncutout = -2\ngrad_clip = -1\n[optimizer]\nweight_decay = -5e-4",
            "[train]\naccumulate = 0\neval_every = 0\n[checkpoint]\nkeep_last = 0",
            "[optimizer]\nkind = \"adamw\"\nbetas = [0.9, 1.0]",
            "[optimizer]\nkind = \"adamw\"\nbetas = [0.9, 0.99, 0.999]",
            "[optimizer]\nmomentum = 1.0",
            "[schedule]\nkind = \"one-cycle\"\npct_start = 0",
        ],
    );
}

#[test]
fn layers() {
    check(
        "layers",
        &[
            "[model]\nname = \"resnet18\"\nfreeze = \"layer1, layer2\"\n[data]\nname = \"cifar10\"",
            "[model]\nname = \"resnet18\"\nfreeze = [\"layer1\", 2]\n[data]\nname = \"cifar10\"",
            "[model]\nname = \"resnet18\"\nweights = \"\"\n[data]\nname = \"cifar10\"",
        ],
    );
    check_after_base(
        "lr_factors",
        &[
            "[optimizer]\nlr_factors = [\"layer1:0.1\"]",
            "[optimizer]\nlr_factors = { layer1 = 0 }",
            "[optimizer.lr_factors]\nlayer1 = 0.1\n\"layer2.0\" = -1",
            "[optimizer]\nlr_factors = { layer1 = \"0.1\" }",
            "[optimizer.lr_factors.layer1]\n0 = 0.1",
        ],
    );
}

#[test]
fn types() {
    check_after_base(
        "types",
        &[
            "[train]\nepochs = \"abc\"",
            "[optimizer]\nlr = \"0.1\"",
            "[train]\nbatch_size = 128.0",
            "[train]\ndrop_last = 1",
            "augment = \"crop\"",
            "augment = [\"crop\", 4]",
            "[optimizer]\nlr = { peak = 0.1 }",
            "[train]\nseed = 2024-01-01",
            "dir = \"\"",
        ],
    );
    check("type_of_a_name", &["[model]\nname = 18\n[data]\nname = \"cifar10\""]);
}

#[test]
fn keywords() {
    check_after_base(
        "keywords",
        &[
            "[schedule]\nkind = \"onecycle_lr\"",
            "[train]\nprecision = \"fp32\"",
            "[train]\nprecision = \"bfloat16\"",
            "[optimizer]\nkind = \"lion\"",
            // A kind that was misspelt blames no other key.
            "[schedule]\nkind = \"onecicle\"\npct_start = 0.2",
        ],
    );
}

#[test]
fn keys_that_contradict_each_other() {
    check_after_base(
        "contradictions",
        &[
            "[train]\nepochs = 0",
            "[train]\nepochs = 5\n[schedule]\nwarmup_epochs = 5",
            "[schedule]\nmin_lr = 0.2",
            "[schedule]\nkind = \"multi-step\"\nmilestones = [0.75, 0.5]",
            "[schedule]\nkind = \"multi-step\"\nmilestones = [0.5, 80]",
            "[schedule]\nkind = \"multi-step\"\nmilestones = []",
            "[schedule]\nkind = \"multi-step\"\nmilestones = [0.0, 0.5]",
            "[train]\nimage_sizes = [16, 24]\nimage_milestones = [0.5]",
            "[train]\nimage_sizes = [24, 16]\nimage_milestones = [0.3, 0.6]",
            "[train]\nimage_sizes = [16, 24]\nimage_milestones = [0.6, 0.3]",
            "[train]\nimage_sizes = [16, 24]\nimage_milestones = [0.3, 8]",
            "[train]\nepochs = 0\nmax_steps = 100\nimage_sizes = [16]\nimage_milestones = [0.5]",
            "[optimizer]\nmomentum = 0\nnesterov = true",
            "[parallel]\nmode = \"dp\"\nbatch_norm = \"reduce\"",
            "limit_train = 100\n[train]\ndrop_last = true",
        ],
    );
}

#[test]
fn keys_of_another_kind() {
    check_after_base(
        "kinds",
        &[
            "[optimizer]\nkind = \"adamw\"\nnesterov = true",
            "[optimizer]\nbetas = [0.9, 0.99]",
            "[schedule]\nkind = \"cosine\"\nmilestones = [0.5]",
            "[schedule]\nkind = \"one-cycle\"\nwarmup_epochs = 5",
            "[schedule]\nkind = \"constant\"\npct_start = 0.2\ndiv = 5",
        ],
    );
}

#[test]
fn augmentations() {
    check_after_base(
        "augmentations",
        &[
            "augment = [\"crop\", \"flop\"]",
            "augment = [\"RandomHorizontalFlip\"]",
            "augment = [\"flip\", \"cutout:12\"]",
            "augment = [\"crop:four\"]",
            "augment = [\"crop:0\"]",
            "augment = [\"flip:2\"]",
            "augment = [\"reflect-crop:32\"]",
            "augment = [\"crop\", \"reflect-crop\"]",
            "augment = [\"flip\", \"alternating-flip\"]",
            "augment = [\"RandAugment\"]",
            "augment = [\"rand-augment:31\"]",
            "augment = [\"color-jitter:much\"]",
            "augment = [\"auto-augment:mnist\"]",
            "augment = [\"rotation:200\"]",
            "augment = [\"random-erasing:0\"]",
            "augment = [\"trivial-augment:9\"]",
            "augment = [\"trivial-augment\", \"color-jitter\"]",
            "augment = [\"random-erasing:0.25\"]\n[train]\ncutout = 8",
        ],
    );
}

#[test]
fn names_and_facts_of_the_data_set() {
    check(
        "names",
        &[
            "[model]\nname = \"ResNet-18\"\n[data]\nname = \"cifar10\"",
            "[model]\nname = \"xyz\"\n[data]\nname = \"cifar10\"",
            "[model]\nname = \"lenet\"\n[data]\nname = \"cifar\"",
            "[model]\nname = \"lenet\"\n[data]\nname = \"image-folder\"",
            "[model]\nname = \"resnet18\"\nnum_classes = 100\n[data]\nname = \"cifar10\"",
            "[model]\nname = \"lenet\"\n[data]\nname = \"mnist\"\nstd = [0.2, 0.2, 0.2]",
            "[model]\nnum_classes = 10\n[data]\nname = \"cifar10\"",
            "[model]\nname = \"lenet\"",
            "# nothing yet",
        ],
    );
    check_after_base(
        "facts",
        &[
            "mean = [0.5]",
            "std = [0.2, 0.0, 0.2]",
            "mean = [125.3, 123.0, 113.9]",
            "mean = [0.5, nan, 0.5]",
            "[train]\ncutout = 32",
            "image_size = 16",
        ],
    );
}

#[test]
fn text_that_is_not_toml() {
    check(
        "syntax",
        &[
            "[model]\nname = resnet18",
            "[train]\ndrop_last = True",
            "[model]\nname: \"resnet18\"",
            "[model\nname = \"resnet18\"",
            "[data]\naugment = [\"crop\",\n",
            "[model]\nname = \"resnet18\n",
            "[optimizer]\nlr = .1",
            "[train]\nepochs = 1\nepochs = 2",
            "[train]\nepochs = 1\n[log]\n[train]\nseed = 2",
            "[train]\nepochs = \"\u{1b}[31m\"",
        ],
    );
}

#[test]
fn unknown_keys_and_sections() {
    check_after_base(
        "unknown",
        &[
            "[optimizer]\nlearning_rate = 0.1",
            "[optimizer]\nmomentun = 0.9",
            "[train]\nlr = 0.1",
            "[optimiser]\nlr = 0.1\nmomentum = 0.9",
            "[[train]]\nepochs = 3",
            "[train.optimizer]\nlr = 3",
        ],
    );
    let base = "[model]\nname = \"lenet\"\n[data]\nname = \"mnist\"";
    check("unknown_at_the_top", &[&format!("lr = 0.1\n{base}"), &format!("train = 3\n{base}")]);
}

/// One mistake is one error: a section that has another form or a similar name is not reported as missing too.
#[test]
fn misspelt_sections() {
    let texts = [
        "model = \"lenet\"\n[data]\nname = \"mnist\"",
        "model = 3\n[data]\nname = \"mnist\"",
        "[Model]\nname = \"lenet\"\n[data]\nname = \"mnist\"",
        "[model]\nname = \"lenet\"\n[dataset]\nname = \"mnist\"",
    ];
    check("misspelt_sections", &texts);
    for text in texts {
        assert_eq!(read(text, &Overrides::default()).unwrap_err().0.len(), 1, "{text}");
    }
}

#[test]
fn flags() {
    let long = Overrides { seed: Some(u64::MAX), ..Overrides::default() };
    let word = |mode: &str, backend: &str| Overrides {
        mode: Some(mode.to_owned()),
        backend: Some(backend.to_owned()),
        ..Overrides::default()
    };
    let flags = [
        set(&["optimizer.lr=nan"]),
        set(&["train.epoch=3"]),
        set(&["optimiser.lr=3"]),
        set(&["lr=3"]),
        set(&["train=1"]),
        set(&["train={epochs=3}"]),
        set(&["train.optimizer.lr=3"]),
        set(&["optimizer.lr"]),
        set(&["optimizer.lr="]),
        set(&[""]),
        set(&["optimizer.lr=0,1"]),
        set(&["data.augment=crop"]),
        set(&["data.augment=[crop]"]),
        set(&[r#"data.augment=["crop", "flop"]"#]),
        set(&["model.name=a\nb"]),
        set(&["schedule.gamma=0.5"]),
        Overrides { epochs: Some(0), ..Overrides::default() },
        long,
        word("ddpp", "gloo"),
    ];
    let mistakes: Vec<String> =
        flags.iter().map(|flags| brief(&read(BASE, flags).expect_err("a wrong flag"))).collect();
    insta::assert_snapshot!("flags", mistakes.join("\n"));
}

#[test]
fn image_files() {
    let folder = "[model]\nname = \"lenet\"\n[data]\nname = \"image-folder\"\ndir = \"photos\"\n";
    let texts = [
        format!("{BASE}decode = \"epoch\"\nresize = 40\non_error = \"skip\"\naugment = [\"random-resized-crop\"]"),
        format!("{folder}augment = [\"random-resized-crop\"]"),
        format!("{folder}image_size = 64\naugment = [\"random-resized-crop:0\"]"),
        format!("{folder}image_size = 64\naugment = [\"random-resized-crop\", \"crop\"]"),
        format!(
            "{folder}image_size = 64\ndecode = \"memory\"\non_error = \"skip\"\naugment = [\"random-resized-crop\"]"
        ),
        format!("{folder}image_size = 224\nresize = 200"),
        format!("{folder}resize = 200"),
        format!("{folder}decode = \"cache\"\non_error = \"stop\""),
    ];
    check("image_files", &texts.each_ref().map(String::as_str));
}
