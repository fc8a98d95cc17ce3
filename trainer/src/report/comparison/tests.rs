//! Tests of the figures, the page and the chart.

use super::*;

fn steps(count: usize, step_ms: f64) -> Vec<StepRecord> {
    (0..count)
        .map(|index| StepRecord {
            step: index as u64,
            loss: 2.0 - 0.1 * index as f64,
            // The first two steps are slow.
            step_ms: if index < 2 { 50.0 * step_ms } else { step_ms },
            images_per_s: 128.0 / (if index < 2 { 50.0 * step_ms } else { step_ms } * 1e-3),
            data_ms: 0.01 * step_ms,
            forward_ms: 0.3 * step_ms,
            backward_ms: 0.5 * step_ms,
            communication_ms: 0.1 * step_ms,
            communication_hidden_ms: 0.2 * step_ms,
            optimizer_ms: 0.05 * step_ms,
            bytes_moved: 89_396_128,
            ..StepRecord::default()
        })
        .collect()
}

fn round(step_ms: f64) -> Round {
    Round::new(&steps(10, step_ms), 2, vec![400_000_000, 380_000_000], Vec::new()).unwrap()
}

fn mode(name: &str, workers: usize, rounds: &[Round], reference: Option<&[f64]>) -> ModeResult {
    ModeResult { mode: name.into(), workers, figures: ModeStats::of(rounds, reference), error: None }
}

fn comparison() -> Comparison {
    let single = Round { peak_bytes: vec![700_000_000], bytes_moved: 0, ..round(1000.0) };
    let losses = single.losses.clone();
    let mut dp = Round { peak_bytes: vec![900_000_000], device_bytes: vec![96_000_000, 90_000_000], ..round(1200.0) };
    dp.losses[3] *= 1.0 + 3e-6;
    let failed = ModeResult {
        mode: "ddp".into(),
        workers: 2,
        figures: None,
        error: Some("error: rank 1 was killed by SIGKILL\n  hint: look".into()),
    };
    Comparison {
        model: "resnet18".into(),
        data: "cifar10".into(),
        batch_size: 128,
        steps: 10,
        warmup: 2,
        rounds: 1,
        machine: "EPYC, 2 threads".into(),
        modes: vec![mode("single", 1, &[single], Some(&losses)), mode("dp", 2, &[dp], Some(&losses)), failed],
    }
}

#[test]
fn a_round_leaves_the_first_steps_out_and_its_parts_add_up() {
    let round = round(100.0);
    assert!((round.step_ms - 100.0).abs() < 1e-9 && (round.images_per_s - 1280.0).abs() < 1e-6, "{round:?}");
    let parts = round.parts;
    assert!((parts.measured() + parts.other - 100.0).abs() < 1e-9, "{parts:?}");
    assert!((parts.other - 4.0).abs() < 1e-9, "{parts:?}");
    assert_eq!((round.losses.len(), round.bytes_moved), (10, 89_396_128));
    assert_eq!(Round::new(&steps(3, 1.0), 2, Vec::new(), Vec::new()), None);
    assert_eq!(Round::new(&[], 2, Vec::new(), Vec::new()), None);
}

#[test]
fn the_median_round_is_shown_with_all_rounds_beside_it() {
    let figures = ModeStats::of(&[round(100.0), round(300.0), round(200.0)], None).unwrap();
    assert!((figures.step_ms - 200.0).abs() < 1e-9);
    assert_eq!(figures.images_per_s_rounds.len(), 3);
    assert_eq!(figures.loss_difference, None);
    assert!((figures.imbalance - 400.0 / 390.0).abs() < 1e-12);
    assert_eq!(ModeStats::of(&[], None), None);
}

#[test]
fn differences_of_losses_are_relative_and_a_nan_shows() {
    assert_eq!(largest_difference(&[2.0, 4.0], &[2.0, 4.0]), 0.0);
    assert_eq!(largest_difference(&[2.0, 4.0], &[1.0, 5.0]), 0.5);
    assert!(largest_difference(&[2.0, 4.0], &[f64::NAN, 4.0]).is_nan());
}

#[test]
fn the_page() {
    insta::assert_snapshot!(comparison().render(), @r"
    resnet18 on cifar10, batch 128: 8 steps after 2 of warm-up, one round
    EPYC, 2 threads

    mode    workers  images/s         step ms  data  forward  backward  communication  (hidden)  optimizer  other
    single        1       128  1.00x     1000  10.0      300       500            100       200       50.0   40.0
    dp            2       107  0.83x     1200  12.0      360       600            120       240       60.0   48.0
    times in ms of rank 0; hidden communication runs under backward and is part of it

    mode                           peak memory  imbalance  bytes/step    loss  loss diff
    single                              700 MB       1.00           0  1.1000          0
    dp      900 MB (devices 96.0 MB + 90.0 MB)       1.03     89.4 MB  1.1000     3.0e-6
    loss after 10 steps; the largest relative difference of a step's loss to that of single
    imbalance: the largest memory of a device over the mean of all; of a process, if each device has its own
    devices: the memory that each GPU has reserved; in dp on the CPU, the tensors of each device

    ddp failed:
      error: rank 1 was killed by SIGKILL
        hint: look
    ");
}

#[test]
fn the_json_has_the_keys_that_scripts_rely_on() {
    let json = serde_json::to_value(comparison()).unwrap();
    let modes = json["modes"].as_array().unwrap();
    assert_eq!(modes[0]["mode"], "single");
    assert_eq!(modes[0]["workers"], 1);
    assert_eq!(modes[1]["peak_bytes"], serde_json::json!([900_000_000]));
    assert!(modes[1]["images_per_s"].is_f64() && modes[1]["step_ms"].is_f64() && modes[1]["loss"].is_f64());
    assert!(modes[1]["parts_ms"]["communication_hidden"].is_f64());
    assert!(modes[2]["error"].as_str().unwrap().contains("SIGKILL") && modes[2]["images_per_s"].is_null());
}

#[test]
fn the_chart_has_a_bar_per_part_and_an_empty_slot_for_a_failed_mode() {
    let svg = chart(&comparison()).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    for word in
        ["resnet18 on cifar10, batch 128", "single x1", "dp x2", "ddp x2", "failed", "communication under backward"]
    {
        assert!(svg.contains(word), "{word} is missing");
    }
    // Two stacks of six rectangles, each with its hidden part, two speeds, seven in the legend.
    assert!(svg.matches("<rect").count() >= 2 * 7 + 2 + 7, "{svg}");
    let nothing = Comparison { modes: Vec::new(), ..comparison() };
    assert!(chart(&nothing).unwrap().contains("images per second"));
}
