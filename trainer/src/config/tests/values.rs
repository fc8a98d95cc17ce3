//! Values out of range, or not to be had in this version.

use insta::assert_snapshot;

use super::mistake_after_base;

#[test]
fn nan_lr() {
    assert_snapshot!(mistake_after_base("[optimizer]\nlr = nan\n"), @"
    error: `optimizer.lr`: expected a finite number, found nan
     --> configs/x.toml:6:6
      |
    6 | lr = nan
      |      ^^^
      hint: the schedule's highest learning rate; default 0.1
    ");
}

#[test]
fn infinite_lr() {
    assert_snapshot!(mistake_after_base("[optimizer]\nlr = inf\n"), @"
    error: `optimizer.lr`: expected a finite number, found inf
     --> configs/x.toml:6:6
      |
    6 | lr = inf
      |      ^^^
      hint: the schedule's highest learning rate; default 0.1
    ");
}

#[test]
fn overflowing_lr() {
    assert_snapshot!(mistake_after_base("[optimizer]\nlr = 1e999\n"), @"
    error: `optimizer.lr`: expected a finite number, found 1e999
     --> configs/x.toml:6:6
      |
    6 | lr = 1e999
      |      ^^^^^
      hint: the schedule's highest learning rate; default 0.1
    ");
}

#[test]
fn zero_lr() {
    assert_snapshot!(mistake_after_base("[optimizer]\nlr = 0\n"), @"
    error: `optimizer.lr`: expected a number above 0 and at most 1000, found 0
     --> configs/x.toml:6:6
      |
    6 | lr = 0
      |      ^
      hint: the schedule's highest learning rate; default 0.1
    ");
}

#[test]
fn negative_lr() {
    assert_snapshot!(mistake_after_base("[optimizer]\nlr = -0.1\n"), @"
    error: `optimizer.lr`: expected a number above 0 and at most 1000, found -0.1
     --> configs/x.toml:6:6
      |
    6 | lr = -0.1
      |      ^^^^
      hint: the schedule's highest learning rate; default 0.1
    ");
}

#[test]
fn zero_batch() {
    assert_snapshot!(mistake_after_base("[train]\nbatch_size = 0\n"), @"
    error: `train.batch_size`: expected an integer from 1 to 1000000, found 0
     --> configs/x.toml:6:14
      |
    6 | batch_size = 0
      |              ^
      hint: samples a step; default 128
    ");
}

#[test]
fn absurd_batch() {
    assert_snapshot!(mistake_after_base("[train]\nbatch_size = 128_000_000\n"), @"
    error: `train.batch_size`: expected an integer from 1 to 1000000, found 128_000_000
     --> configs/x.toml:6:14
      |
    6 | batch_size = 128_000_000
      |              ^^^^^^^^^^^
      hint: samples a step; default 128
    ");
}

#[test]
fn zero_epochs() {
    assert_snapshot!(mistake_after_base("[train]\nepochs = 0\n"), @"
    error: `train.epochs`: 0 epochs train nothing
     --> configs/x.toml:6:10
      |
    6 | epochs = 0
      |          ^
      hint: give 1 or more, or limit the run by `max_steps`
    ");
}

#[test]
fn negative_seed() {
    assert_snapshot!(mistake_after_base("[train]\nseed = -1\n"), @"
    error: `train.seed`: expected an integer of at least 0, found -1
     --> configs/x.toml:6:8
      |
    6 | seed = -1
      |        ^^
      hint: of weights, shuffling and augmentation; default 0
    ");
}

#[test]
fn label_smoothing_of_one() {
    assert_snapshot!(mistake_after_base("[train]\nlabel_smoothing = 1.0\n"), @"
    error: `train.label_smoothing`: expected a number of at least 0 and below 1, found 1.0
     --> configs/x.toml:6:19
      |
    6 | label_smoothing = 1.0
      |                   ^^^
      hint: share of the target spread over all classes; default 0
    ");
}

#[test]
fn ema_of_one() {
    assert_snapshot!(mistake_after_base("[train]\nema = 1\n"), @"
    error: `train.ema`: expected a number of at least 0 and below 1, found 1
     --> configs/x.toml:6:7
      |
    6 | ema = 1
      |       ^
      hint: decay of the weights' moving average such as 0.999, 0 = off; default 0
    ");
}

#[test]
fn negative_values() {
    assert_snapshot!(mistake_after_base("[train]\nmixup = -1\ncutmix = -0.5\ncutout = -2\ngrad_clip = -1\n[optimizer]\nweight_decay = -5e-4\n"), @"
    error: `train.mixup`: expected a number from 0 to 100, found -1
     --> configs/x.toml:6:9
      |
    6 | mixup = -1
      |         ^^
      hint: alpha of the Beta distribution, 0 = off; default 0

    error: `train.cutmix`: expected a number from 0 to 100, found -0.5
     --> configs/x.toml:7:10
      |
    7 | cutmix = -0.5
      |          ^^^^
      hint: alpha of the Beta distribution, 0 = off; default 0

    error: `train.cutout`: expected an integer from 0 to 16384, found -2
     --> configs/x.toml:8:10
      |
    8 | cutout = -2
      |          ^^
      hint: side of the square cut out, in pixels, 0 = off; default 0

    error: `train.grad_clip`: expected a number from 0 to 1000000000, found -1
     --> configs/x.toml:9:13
      |
    9 | grad_clip = -1
      |             ^^
      hint: largest global norm of the gradients, 0 = off; default 0

    error: `optimizer.weight_decay`: expected a number from 0 to 1000, found -5e-4
      --> configs/x.toml:11:16
       |
    11 | weight_decay = -5e-4
       |                ^^^^^
      hint: pull of the weights to zero; default 0.0005
    ");
}

#[test]
fn accumulate_zero() {
    assert_snapshot!(mistake_after_base("[train]\naccumulate = 0\n"), @"
    error: `train.accumulate`: expected an integer from 1 to 65536, found 0
     --> configs/x.toml:6:14
      |
    6 | accumulate = 0
      |              ^
      hint: batches an optimizer step; default 1
    ");
}

#[test]
fn keep_last_zero() {
    assert_snapshot!(mistake_after_base("[checkpoint]\nkeep_last = 0\n"), @"
    error: `checkpoint.keep_last`: expected an integer from 1 to 1000000, found 0
     --> configs/x.toml:6:13
      |
    6 | keep_last = 0
      |             ^
      hint: newest checkpoints kept: a run can resume from one; default 2
    ");
}

#[test]
fn eval_every_zero() {
    assert_snapshot!(mistake_after_base("[train]\neval_every = 0\n"), @"
    error: `train.eval_every`: expected an integer from 1 to 1000000, found 0
     --> configs/x.toml:6:14
      |
    6 | eval_every = 0
      |              ^
      hint: epochs between evaluations; default 1
    ");
}

#[test]
fn betas_out_of_range() {
    assert_snapshot!(mistake_after_base("[optimizer]\nkind = \"adamw\"\nbetas = [0.9, 1.0]\n"), @"
    error: `optimizer.betas`: expected numbers of at least 0 and below 1, found 1
     --> configs/x.toml:7:15
      |
    7 | betas = [0.9, 1.0]
      |               ^^^
      hint: decay of the two moments of adamw; default [0.9, 0.999]
    ");
}

#[test]
fn three_betas() {
    assert_snapshot!(mistake_after_base("[optimizer]\nkind = \"adamw\"\nbetas = [0.9, 0.99, 0.999]\n"), @"
    error: `optimizer.betas`: expected two numbers, found 3
     --> configs/x.toml:7:9
      |
    7 | betas = [0.9, 0.99, 0.999]
      |         ^^^^^^^^^^^^^^^^^^
      hint: decay of the two moments of adamw; default [0.9, 0.999]
    ");
}

#[test]
fn momentum_of_one() {
    assert_snapshot!(mistake_after_base("[optimizer]\nmomentum = 1.0\n"), @"
    error: `optimizer.momentum`: expected a number of at least 0 and below 1, found 1.0
     --> configs/x.toml:6:12
      |
    6 | momentum = 1.0
      |            ^^^
      hint: momentum of sgd; default 0.9
    ");
}

#[test]
fn pct_start_of_zero() {
    assert_snapshot!(mistake_after_base("[schedule]\nkind = \"one-cycle\"\npct_start = 0\n"), @"
    error: `schedule.pct_start`: expected a number above 0 and below 1, found 0
     --> configs/x.toml:7:13
      |
    7 | pct_start = 0
      |             ^
      hint: share of the run that rises; default 0.3
    ");
}

#[test]
fn unsorted_milestones() {
    assert_snapshot!(mistake_after_base("[schedule]\nkind = \"multi-step\"\nmilestones = [0.75, 0.5]\n"), @"
    error: `schedule.milestones`: expected rising milestones, found 0.75 before 0.5
     --> configs/x.toml:7:14
      |
    7 | milestones = [0.75, 0.5]
      |              ^^^^^^^^^^^
      hint: sort them; each may be there once
    ");
}

#[test]
fn milestones_of_two_sorts() {
    assert_snapshot!(mistake_after_base("[schedule]\nkind = \"multi-step\"\nmilestones = [0.5, 80]\n"), @"
    error: `schedule.milestones`: expected all milestones below 1 (fractions of the run) or all above 1 (epochs)
     --> configs/x.toml:7:14
      |
    7 | milestones = [0.5, 80]
      |              ^^^^^^^^^
      hint: fractions of the run, or epochs where above 1; default [0.5, 0.75]
    ");
}

#[test]
fn no_milestones() {
    assert_snapshot!(mistake_after_base("[schedule]\nkind = \"multi-step\"\nmilestones = []\n"), @r#"
    error: `schedule.milestones`: expected at least one milestone, found none
     --> configs/x.toml:7:14
      |
    7 | milestones = []
      |              ^^
      hint: kind = "constant" has none
    "#);
}

#[test]
fn warmup_longer_than_the_run() {
    assert_snapshot!(mistake_after_base("[train]\nepochs = 5\n[schedule]\nwarmup_epochs = 5\n"), @"
    error: `schedule.warmup_epochs`: 5 epochs of warm-up in a run of 5
     --> configs/x.toml:8:17
      |
    8 | warmup_epochs = 5
      |                 ^
      hint: shorten the warm-up (0 = none) or train for more epochs
    ");
}

#[test]
fn bf16_without_a_gpu() {
    assert_snapshot!(mistake_after_base("[train]\nprecision = \"bf16\"\n"), @r#"
    error: `train.precision`: "bf16" needs a GPU, and this run is on the CPU
     --> configs/x.toml:6:13
      |
    6 | precision = "bf16"
      |             ^^^^^^
      hint: use precision = "f32", or train on GPUs: --gpus N, of a build with --features cuda
    "#);
}

#[test]
fn dp_has_no_statistics_to_average() {
    assert_snapshot!(mistake_after_base("[parallel]\nmode = \"dp\"\nbatch_norm = \"reduce\"\n"), @r#"
    error: `parallel.batch_norm`: "reduce" has nothing to average in mode "dp": only device 0's statistics persist
     --> configs/x.toml:7:14
      |
    7 | batch_norm = "reduce"
      |              ^^^^^^^^
      hint: use "local" (PyTorch's DataParallel), or "sync"
    "#);
}

#[test]
fn drop_last_that_drops_all() {
    assert_snapshot!(mistake_after_base("limit_train = 100\n[train]\ndrop_last = true\n"), @"
    error: `train.drop_last`: 100 images (`data.limit_train`) make no full batch of 128, and the incomplete one is left out
     --> configs/x.toml:7:13
      |
    7 | drop_last = true
      |             ^^^^
      hint: use a smaller batch_size, or drop_last = false
    ");
}
