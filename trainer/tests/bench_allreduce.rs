//! Tests `trainer bench allreduce`: one row per size, exact sums, and mistakes that are reported before any process starts.

use crate::common::{Bench, CONFIG};
use serde_json::Value;

#[test]
fn the_sums_of_every_backend_and_type_are_exact() {
    let bench = Bench::new(CONFIG);
    let cases: [&[&str]; 4] = [
        &[],
        &["--backend", "tcp", "--cpus", "3"],
        &["--dtype", "bf16", "--memory", "ordinary"],
        &["--dtype", "u8", "--cpus", "1"],
    ];
    for case in cases {
        let ended = bench.run(&[&["bench", "allreduce", "--sizes", "4,70002", "--ms", "5", "--json"], case].concat());
        let json: Value = serde_json::from_str(&ended.expect(0).stdout).expect("JSON on stdout");
        let rows = json["results"].as_array().unwrap();
        let size =
            [("bf16", 2), ("u8", 1), ("f32", 4)].into_iter().find(|(name, _)| rows[0]["type"] == *name).unwrap().1;
        assert!(case.iter().all(|word| !["bf16", "u8"].contains(word)) || rows[0]["type"] == case[1], "{case:?}");
        let counts: Vec<_> = rows.iter().map(|row| row["count"].as_u64().unwrap()).collect();
        assert_eq!(counts, [4 / size, 70_002 / size], "{case:?}");
        for row in rows {
            assert_eq!((&row["wrong"], &row["redop"]), (&Value::from(0), &Value::from("sum")), "{case:?}: {row}");
            let (bytes, us) = (row["bytes"].as_f64().unwrap(), row["time_us"].as_f64().unwrap());
            assert!((row["algbw_gbs"].as_f64().unwrap() / (bytes / us / 1e3) - 1.0).abs() < 1e-9, "{case:?}: {row}");
        }
    }
    let table = bench.run(&["bench", "allreduce", "--sizes", "4", "--ms", "5"]).expect(0).stdout;
    let columns: Vec<_> = table.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(columns, ["size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong"]);
    assert_eq!(table.lines().count(), 3, "{table}");
}

#[test]
fn mistakes_exit_with_code_2() {
    let bench = Bench::new(CONFIG);
    let cases: [(&[&str], &str); 5] = [
        (&["--backend", "cuda"], "\"cuda\" is not a transport between CPUs"),
        (&["--gpus", "2", "--backend", "tcp"], "--backend tcp does not sum on GPUs"),
        (&["--gpus", "2", "--dtype", "i32"], "--dtype i32"),
        (&["--dtype", "int"], "--dtype int"),
        // This machine has too few GPUs, or this build has no GPU backend
        (&["--gpus", "64"], "--gpus"),
    ];
    for (arguments, named) in cases {
        let ended = bench.run(&[&["bench", "allreduce"], arguments].concat()).expect(2);
        assert!(ended.stderr.contains(named) && ended.stderr.contains("hint:"), "{arguments:?}: {}", ended.stderr);
    }
    for contradiction in
        [&["--cpus", "2", "--gpus", "2"][..], &["--oversubscribe"], &["--gpus", "2", "--memory", "shared"]]
    {
        bench.run(&[&["bench", "allreduce"], contradiction].concat()).expect(2);
    }
}

#[test]
fn impossible_sizes_are_refused() {
    let bench = Bench::new(CONFIG);
    for (size, cause) in [("3", "an element of f32 has 4 bytes"), ("18446744073709551612", "this machine has ")] {
        let refused = bench.run(&["bench", "allreduce", "--sizes", size]).expect(2).stderr;
        assert!(refused.contains(cause) && refused.contains("hint:"), "{refused}");
    }
    // The smallest default size is that of an f32.
    let of_f64 = ["bench", "allreduce", "--dtype", "f64", "--cpus", "1", "--ms", "1", "--json"];
    let json: Value = serde_json::from_str(&bench.run(&of_f64).expect(0).stdout).unwrap();
    assert_eq!(json["results"][0]["bytes"], 16);
}
