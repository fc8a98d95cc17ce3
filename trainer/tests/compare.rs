//! Tests `trainer compare`: real runs of each mode, JSON for scripts, a failing mode, an interruption.

use std::path::Path;

use crate::common::{Bench, CONFIG, Ended, children, entries, signal, wait_until};
use serde_json::Value;

fn compare(bench: &Bench, code: i32, extra: &[&str]) -> (Value, String) {
    let arguments = ["compare", "--config", "config.toml", "--cpus", "2", "--out", "out", "--json"];
    let ended = bench.run(&[&arguments, extra].concat()).expect(code);
    (serde_json::from_str(&ended.stdout).expect("JSON on stdout"), ended.stderr)
}

#[test]
fn three_modes_are_compared_on_one_page() {
    let bench = Bench::new(CONFIG);
    let (json, said) = compare(&bench, 0, &["--steps", "8", "--rounds", "2"]);
    assert!(said.contains("round 2 of 2: ddp"), "{said}");
    // A second comparison does not replace the first one
    let second = bench.run(&["compare", "--config", "config.toml", "--cpus", "2", "--out", "out"]).expect(2).stderr;
    assert!(second.contains("out/compare.json: exists already\n  hint: name another folder with --out"), "{second}");
    let modes = json["modes"].as_array().unwrap();
    let names: Vec<_> =
        modes.iter().map(|mode| (mode["mode"].as_str().unwrap(), mode["workers"].as_u64().unwrap())).collect();
    assert_eq!(names, [("single", 1), ("dp", 2), ("ddp", 2)]);
    for (mode, processes) in modes.iter().zip([1, 1, 2]) {
        assert_eq!(mode["steps"], 8, "{mode}");
        assert_eq!(mode["images_per_s_rounds"].as_array().unwrap().len(), 2, "{mode}");
        assert!(mode["loss_difference"].as_f64().unwrap() < 1e-4, "{mode}");
        let peaks = mode["peak_bytes"].as_array().unwrap();
        assert!(peaks.len() == processes && peaks.iter().all(|peak| peak.as_u64().unwrap() > 1 << 20), "{mode}");
        // The times of the parts add up to the time of the step
        let parts = &mode["parts_ms"];
        let part = |name: &str| parts[name].as_f64().unwrap();
        let names = ["data", "forward", "backward", "communication", "optimizer", "other"];
        let (sum, step) = (names.map(part).iter().sum::<f64>(), mode["step_ms"].as_f64().unwrap());
        assert!((sum - step).abs() <= 0.02 * step, "{sum} {mode}");
        assert!(part("forward") > 0.0 && part("backward") > 0.0 && part("communication_hidden") <= part("backward"));
        let speed = 16.0 / step * 1e3;
        assert!((mode["images_per_s"].as_f64().unwrap() - speed).abs() <= 0.02 * speed, "{mode}");
    }
    let moved = |index: usize| modes[index]["bytes_moved"].as_u64().unwrap();
    let parameters = 44_426 * 4;
    assert_eq!((moved(0), moved(2)), (0, 2 * parameters));
    // 8 of 16 images go to the other device. The outputs of these images come back, and the gradients of the outputs go there.
    assert_eq!(moved(1), 2 * parameters + 8 * (28 * 28 + 2 * 10) * 4);
    assert_eq!(modes[1]["device_bytes"].as_array().unwrap().len(), 2);

    let file: Value = serde_json::from_slice(&std::fs::read(bench.path("out/compare.json")).unwrap()).unwrap();
    assert_eq!(file, json);
    assert!(std::fs::read_to_string(bench.path("out/compare.svg")).unwrap().contains("ddp x2"));
    let page =
        bench.run(&["compare", "--config", "config.toml", "--cpus", "2", "--steps", "4", "--rounds", "1"]).expect(0);
    assert!(page.stdout.contains("loss diff") && page.stdout.contains("folder: runs/"), "{}", page.stdout);
}

/// The `config.toml` of a tuned run has `parallel.threads`, and only mode `ddp` uses this key.
#[test]
fn all_modes_take_the_same_batches_with_the_same_threads() {
    let bench = Bench::new(CONFIG);
    let settings = ["--set", "train.batch_scope=per_worker", "--set", "parallel.threads=61"];
    let (json, _) = compare(&bench, 0, &[&["--steps", "4", "--rounds", "1"], &settings[..]].concat());
    for mode in json["modes"].as_array().unwrap() {
        assert!(mode["loss_difference"].as_f64().unwrap() < 1e-4, "{mode}");
        let run = entries(&bench.path(&format!("out/runs/{}-1", mode["mode"].as_str().unwrap())));
        let config = run.iter().find_map(|run| std::fs::read_to_string(run.join("config.toml")).ok()).unwrap();
        assert!(config.contains("batch_scope = \"global\"\n"), "{config}");
        assert!(mode["mode"] != "ddp" || config.contains("\nthreads = ") && !config.contains("= 61\n"), "{config}");
    }
}

#[test]
fn a_mode_that_fails_is_shown_beside_the_others() {
    let bench = Bench::new(CONFIG);
    // With batch size 1, torch.chunk leaves a device of DP without work. DDP cannot leave a rank without work.
    let (json, _) = compare(&bench, 1, &["--steps", "6", "--rounds", "2", "--set", "train.batch_size=1"]);
    let modes = json["modes"].as_array().unwrap();
    for mode in &modes[..2] {
        assert!(mode["images_per_s"].as_f64().unwrap() > 0.0 && mode["error"].is_null(), "{mode}");
    }
    let error = modes[2]["error"].as_str().unwrap();
    assert!(error.contains("cannot be shared by 2 workers") && error.contains("hint:"), "{error}");
    assert!(modes[2]["images_per_s"].is_null());
}

#[test]
fn mistakes_exit_with_code_2() {
    let bench = Bench::new(CONFIG);
    let cases: [(&[&str], &str); 7] = [
        // This machine has too few GPUs, or this build has no GPU backend
        (&["--gpus", "64"], "--gpus"),
        (&["--gpus", "1"], "--gpus 1"),
        (&["--cpus", "2", "--modes", "single,dpp"], "no mode `dpp`"),
        (&["--cpus", "2", "--modes", "dp,dp"], "twice"),
        (&["--cpus", "1"], "--cpus 1"),
        (&["--cpus", "2", "--steps", "2"], "--steps 2"),
        (&["--cpus", "2", "--set", "train.batch_size=none"], "batch_size"),
    ];
    for (arguments, named) in cases {
        let ended = bench.run(&[&["compare", "--config", "config.toml"], arguments].concat()).expect(2);
        assert!(ended.stderr.contains(named) && ended.stderr.contains("hint:"), "{arguments:?}: {}", ended.stderr);
    }
    for contradiction in [&[][..], &["--cpus", "2", "--gpus", "2"], &["--cpus", "2", "--oversubscribe"]] {
        bench.run(&[&["compare", "--config", "config.toml"], contradiction].concat()).expect(2);
    }
    assert!(entries(&bench.path("runs")).is_empty());
}

#[test]
fn the_modes_agree_in_bf16() {
    let bench = Bench::new(CONFIG);
    let (json, _) = compare(&bench, 0, &["--steps", "4", "--rounds", "1", "--set", "train.precision=bf16"]);
    for mode in json["modes"].as_array().unwrap() {
        assert!(mode["loss_difference"].as_f64().unwrap() < 1e-2, "{mode}");
    }
}

#[test]
fn an_interruption_leaves_no_process() {
    let bench = Bench::new(CONFIG);
    let long = ["--modes", "ddp", "--steps", "1000000", "--set", "train.epochs=50000", "--out", "out"];
    let child = bench.spawn(&[&["compare", "--config", "config.toml", "--cpus", "2"], &long[..]].concat());
    wait_until("steps", || {
        let run = entries(&bench.path("out/runs/ddp-1")).into_iter().next();
        run.is_some_and(|run| {
            std::fs::read_to_string(run.join("metrics.jsonl")).is_ok_and(|text| text.lines().count() > 3)
        })
    });
    let launcher = children(child.id());
    let workers: Vec<u32> = launcher.iter().flat_map(|&process| children(process)).collect();
    assert_eq!((launcher.len(), workers.len()), (1, 2));
    signal(&child, 15);
    let ended: Ended = child.wait_with_output().unwrap().into();
    assert!(ended.expect(143).stderr.contains("stopped by SIGTERM, with the run in progress"));
    for process in launcher.into_iter().chain(workers) {
        assert!(!Path::new(&format!("/proc/{process}")).exists(), "{process} is left");
    }
}
