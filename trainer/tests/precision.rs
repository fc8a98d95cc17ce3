//! Training in bf16 on the CPU: repeats and resumes to the bit, agrees with f32, between workers and between instruction
//! sets within rounding.

use std::path::Path;

use crate::common::{self, Bench, assert_equal_runs, assert_same_curve, loss_values, losses};

/// LeNet with a learning rate that does not depend on the run's length.
const LENET: &str = r#"
[model]
name = "lenet"
[data]
name = "fashion-mini"
augment = ["crop", "flip"]
limit_train = 520
limit_test = 200
[train]
precision = "bf16"
epochs = 2
batch_size = 16
[optimizer]
lr = 0.02
[schedule]
kind = "constant"
"#;

/// A network with batch norm, of which all workers see the whole batch.
const VGG: &str = r#"
[model]
name = "vgg11"
[data]
name = "fashion-mini"
image_size = 32
limit_train = 96
limit_test = 32
[train]
precision = "bf16"
epochs = 1
batch_size = 16
[optimizer]
lr = 0.00001
[parallel]
batch_norm = "sync"
"#;

#[track_caller]
fn assert_close(what: &str, one: &Path, other: &Path, tolerance: f64) {
    assert_same_curve(what, &loss_values(one), &loss_values(other), tolerance);
}

#[test]
fn bf16_repeats_and_resumes_to_the_bit_and_follows_f32() {
    let bench = Bench::new(LENET);
    let whole = bench.train("whole", &[]);
    assert_eq!(losses(&whole).len(), 66);
    assert_equal_runs(&whole, &bench.train("again", &[]));
    let parts = bench.train("parts", &["--epochs", "1"]);
    bench.run(&["--resume", parts.to_str().unwrap(), "--epochs", "2"]).expect(0);
    assert_equal_runs(&whole, &parts);

    let wide = bench.train("wide", &["--set", "train.precision=f32"]);
    assert_ne!(losses(&whole), losses(&wide), "bf16 rounds");
    assert_close("bf16 against f32", &wide, &whole, 0.05);
}

#[test]
fn workers_and_modes_agree_within_rounding() {
    let bench = Bench::new(LENET);
    let limit = ["--set", "train.max_steps=15"];
    let run = |root: &str, extra: &[&str]| bench.train(root, &[&limit[..], extra].concat());
    let one = run("one", &[]);
    for (root, extra) in [
        ("ddp", &["--cpus", "2"][..]),
        ("dp", &["--mode", "dp", "--cpus", "2"]),
        ("narrow", &["--cpus", "2", "--set", "parallel.compression=bf16"]),
    ] {
        assert_close(root, &one, &run(root, extra), 0.02);
    }
    assert_equal_runs(&run("ddp-1", &["--cpus", "2"]), &run("ddp-2", &["--cpus", "2"]));

    let bench = Bench::new(VGG);
    let one = bench.train("one", &[]);
    assert_close("synchronised batch norm", &one, &bench.train("two", &["--cpus", "2"]), 0.02);
}

/// The results of all instruction sets that this processor has are equal within rounding, and a run says which one it uses.
#[test]
fn every_instruction_set_trains() {
    let bench = Bench::new(LENET);
    let train = |root: &str, isa: &str| {
        let arguments = ["--config", "config.toml", "--run-dir", root, "--set", "train.max_steps=10"];
        let output = bench.command().env("TRAINER_CPU_ISA", isa).args(arguments).output().expect("the binary starts");
        let ended = common::Ended::from(output);
        match ended.code {
            Some(2) => Err(ended.stderr),
            _ => Ok((ended.expect(0).stdout, bench.only_run(root))),
        }
    };
    let (said, best) = train("best", "").expect("the best set");
    assert!(said.contains("bf16"), "{said}");
    for (isa, shown) in [
        ("portable", "portable kernels"),
        ("avx2", "AVX2 (bf16 computes in f32)"),
        ("avx512", "AVX-512 (bf16 computes in f32)"),
        ("avx512_bf16", "AVX-512 (bf16 by AVX512-BF16)"),
        ("amx_bf16", "AVX-512 (bf16 by AMX)"),
    ] {
        match train(isa, isa) {
            Ok((said, run)) => {
                assert!(said.contains(shown), "{isa}: {said}");
                assert_close(isa, &best, &run, 0.02);
            }
            Err(said) => {
                assert!(isa != "portable" && said.contains("does not have these instructions"), "{isa}: {said}")
            }
        }
    }
}

#[test]
fn unknown_instruction_sets_and_kernels_are_refused() {
    let bench = Bench::new(LENET);
    let output = bench.command().env("TRAINER_CPU_ISA", "sse9").args(["--config", "config.toml"]).output();
    let ended = common::Ended::from(output.expect("the binary starts")).expect(2);
    assert!(ended.stderr.contains("TRAINER_CPU_ISA=\"sse9\" is not an instruction set"), "{}", ended.stderr);
    assert!(ended.stderr.contains("hint: unset TRAINER_CPU_ISA"), "{}", ended.stderr);
    let output = bench.command().env("TRAINER_GPU_CONV", "cudnn").args(["--config", "config.toml"]).output();
    let ended = common::Ended::from(output.expect("the binary starts")).expect(2);
    assert!(
        ended.stderr.contains("TRAINER_GPU_CONV=\"cudnn\" is not a set of convolution kernels"),
        "{}",
        ended.stderr
    );
    assert!(ended.stderr.contains("hint: unset TRAINER_GPU_CONV"), "{}", ended.stderr);
    assert!(!bench.path("runs").exists(), "nothing was written");
}
