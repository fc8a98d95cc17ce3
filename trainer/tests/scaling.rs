//! `trainer bench scaling`: real runs, and steps that are computed from one of them.

use crate::common::{Bench, CONFIG, entries};
use serde_json::Value;

#[test]
fn measured_and_computed_steps_are_on_one_page() {
    // The mode of the file does not count.
    let bench = Bench::new(&format!("{CONFIG}\n[parallel]\nmode = \"ddp\"\n"));
    let start = ["bench", "scaling", "--config", "config.toml", "--cpus", "1,2", "--steps", "8", "--out", "out"];
    let page = bench.run(&[&start[..], &["--link", "1ms,100Mbit"]].concat()).expect(0).stdout;
    assert!(page.contains("computed from that step, not measured: a link of 1000 us, 0.1 Gbit/s"), "{page}");
    let json: Value = serde_json::from_slice(&std::fs::read(bench.path("out/scaling.json")).unwrap()).unwrap();
    let measured = json["measured"].as_array().unwrap();
    let rows: Vec<_> =
        measured.iter().map(|row| (row["scaling"].as_str().unwrap(), row["workers"].as_u64().unwrap())).collect();
    assert_eq!(rows, [("weak", 1), ("weak", 2), ("strong", 1), ("strong", 2)]);
    for row in measured {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("step_ms") > 0.0 && number("images_per_s") > 0.0, "{row}");
        assert!(row["workers"] == 2 || number("efficiency") == 1.0 && number("exposed_ms") == 0.0, "{row}");
    }
    let second = bench.run(&start).expect(2).stderr;
    assert!(second.contains("out/scaling.json: exists already"), "{second}");
    // Two workers of 16 images each have 44,426 gradients in one bucket
    let profile = &json["profile"];
    assert_eq!(profile["images"], 16);
    assert_eq!(profile["buckets"].as_array().unwrap().len(), 1);
    assert_eq!(profile["buckets"][0]["bytes"], 4 * 44_426);
    let ready = profile["buckets"][0]["ready_ms"].as_f64().unwrap();
    assert!(ready > 0.0 && ready < 2.0 * profile["backward_ms"].as_f64().unwrap() + 1.0, "{profile}");
    // 32 workers cannot share a batch of 16 images
    let computed = json["computed"].as_array().unwrap();
    let workers = |scaling: &str| computed.iter().filter(|row| row["scaling"] == scaling).count();
    assert_eq!((workers("weak"), workers("strong")), (3 * 10, 3 * 5));
    let svg = std::fs::read_to_string(bench.path("out/scaling.svg")).unwrap();
    assert!(svg.contains("computed: two-level") && svg.contains("strong scaling"));
}

#[test]
fn workers_have_the_same_threads_and_the_page_has_the_steps_of_runs_that_end_early() {
    let bench =
        Bench::new(&CONFIG.replace("limit_train = 520", "limit_train = 160").replace("epochs = 3", "epochs = 1"));
    let start = ["bench", "scaling", "--config", "config.toml", "--cpus", "1,2", "--steps", "8", "--out", "out"];
    let page = bench.run(&[&start[..], &["--set", "parallel.threads=61"]].concat()).expect(0).stdout;
    assert!(page.starts_with("lenet on fashion-mini, batch 16: median of 3 to 6 steps\n"), "{page}");
    let json: Value = serde_json::from_slice(&std::fs::read(bench.path("out/scaling.json")).unwrap()).unwrap();
    let steps: Vec<_> = json["measured"].as_array().unwrap().iter().map(|row| row["steps"].as_u64().unwrap()).collect();
    // Two workers of 16 images each have 5 steps per epoch. The warm-up takes 2 steps.
    assert_eq!((steps, json["steps"].as_u64()), (vec![6, 3, 6, 6], Some(6)));
    for run in ["weak-2", "strong-2"] {
        let run = entries(&bench.path(&format!("out/runs/{run}")));
        let config = run.iter().find_map(|run| std::fs::read_to_string(run.join("config.toml")).ok()).unwrap();
        assert!(config.contains("\nthreads = ") && !config.contains("= 61\n"), "{config}");
    }
}

#[test]
fn mistakes_exit_with_code_2() {
    let bench = Bench::new(CONFIG);
    let cases: [(&[&str], &str); 9] = [
        (&["--cpus", "2,1"], "--cpus 2,1"),
        (&["--cpus", "0,1"], "--cpus 0,1"),
        (&["--gpus", "2,1"], "--gpus 2,1"),
        (&["--cpus", "1,2", "--steps", "3"], "--steps 3"),
        (&["--link", "10Gbit"], "--link 10Gbit"),
        (&["--local-link", "5us,80Gb"], "--local-link 5us,80Gb"),
        (&["--per-host", "0"], "--per-host 0"),
        (&["--cpus", "1,64"], "cannot be shared by 64 workers"),
        (&["--set", "train.batch=1"], "unknown key `batch`"),
    ];
    for (arguments, named) in cases {
        let ended = bench.run(&[&["bench", "scaling", "--config", "config.toml"], arguments].concat()).expect(2);
        assert!(ended.stderr.contains(named) && ended.stderr.contains("hint:"), "{arguments:?}: {}", ended.stderr);
    }
    let failed = bench.run(&["bench", "scaling", "--config", "config.toml", "--backend", "mpi", "--steps", "4"]);
    assert!(failed.code == Some(1) && failed.stderr.contains("the run with 2 workers failed"), "{}", failed.stderr);
    assert!(entries(&bench.path("runs")).len() == 1, "the folder of the measurement that failed");
}
