//! Training runs whose losses must depend neither on the device nor on the number of ranks.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Largest relative difference of a loss from the CPU's. The runs diverge slowly: the order of sums differs, and GPUs multiply in
/// TF32.
const TOLERANCE: f64 = 0.03;

const CONFIG: &str = r#"
[model]
name = "lenet"
[train]
epochs = 2
batch_size = 64
seed = 1
[optimizer]
lr = 0.05
[schedule]
kind = "constant"
[parallel]
first_bucket_mb = 0.01
bucket_mb = 0.05
check_sync_every = 5
# Each rank tunes kernels for its own GPU, and the kept ones are those of the GPU's index: the others may wait long for one of them.
timeout_s = 1400
[data]
name = "fashion-mini"
augment = ["crop", "flip"]
limit_test = 72
"#;

/// Runs the training and returns the loss of each step.
fn losses(trainer: &str, config: &Path, folder: &Path, name: &str, flags: &[String]) -> Result<Vec<f64>, String> {
    let runs = folder.join(name);
    let output = Command::new(trainer)
        .args(["train", "--config"])
        .arg(config)
        .arg("--run-dir")
        .arg(&runs)
        .args(flags)
        .output()
        .map_err(|e| format!("{trainer}: {e}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{name}: {}\n{}\n{said}", output.status, String::from_utf8_lossy(&output.stdout)));
    }
    let said = String::from_utf8_lossy(&output.stderr);
    said.lines().filter(|line| line.starts_with("gradients:")).for_each(|line| println!("{name}: {line}"));
    let metrics = find(&runs).ok_or_else(|| format!("{name}: there is no metrics.jsonl below {}", runs.display()))?;
    let text = std::fs::read_to_string(&metrics).map_err(|e| format!("{}: {e}", metrics.display()))?;
    let loss = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok()?.get("loss")?.as_f64();
    Ok(text.lines().filter_map(loss).collect())
}

fn find(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    entries.map(|entry| entry.path().join("metrics.jsonl")).find(|path| path.exists())
}

/// Returns whether the losses with each number of ranks on GPUs agree with those of the CPU. A run has two epochs of `steps / 2`
/// steps.
pub fn run(trainer: &str, worlds: &[usize], steps: usize) -> Result<bool, String> {
    let folder = std::env::temp_dir().join(format!("gpu-check-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|e| e.to_string())?;
    let config = folder.join("check.toml");
    std::fs::write(&config, format!("{CONFIG}limit_train = {}\n", steps / 2 * 64)).map_err(|e| e.to_string())?;
    let result = compare(trainer, worlds, steps, &config, &folder);
    let _ = std::fs::remove_dir_all(&folder);
    result
}

/// Name and flags of a run.
type Run = (String, Vec<String>);

/// Returns one run for each number of ranks, and for two ranks the variants that exchange gradients differently. NCCL and
/// one process with several devices need one GPU per rank.
fn runs(worlds: &[usize], gpus: usize) -> Vec<Run> {
    let mut all = Vec::new();
    for &world_size in worlds {
        let mut add = |name: String, flags: &[&str]| {
            let flags =
                ["--gpus", &world_size.to_string()].iter().chain(flags).map(|word| (*word).to_owned()).collect();
            all.push((name, flags));
        };
        let shared: &[&str] = if world_size > gpus { &["--oversubscribe"] } else { &[] };
        add(format!("{world_size} rank{}", if world_size == 1 { "" } else { "s" }), shared);
        if world_size == 2 {
            add("2 ranks, bf16 gradients".into(), &[shared, &["--set", "parallel.compression=bf16"]].concat());
            add("2 ranks, through the host".into(), &[shared, &["--backend", "shm"]].concat());
            if gpus >= 2 {
                add("2 devices of a process".into(), &["--mode", "dp"]);
                if trainer::device::nccl().is_ok() {
                    add("2 ranks, NCCL".into(), &["--backend", "nccl"]);
                }
            }
        }
    }
    all
}

fn compare(trainer: &str, worlds: &[usize], steps: usize, config: &Path, folder: &Path) -> Result<bool, String> {
    let gpus = trainer::device::find_gpus().map_err(|missing| missing.cause)?.all.len();
    let cpu = losses(trainer, config, folder, "cpu", &["--cpus".into(), "1".into()])?;
    println!("{:>28} {:>10} {:>10} {:>14}", "training on", "first loss", "last loss", "off the CPU's");
    println!("{:>28} {:>10.4} {:>10.4} {:>14}", "the CPU", cpu[0], cpu[cpu.len() - 1], "");
    let mut all_passed = cpu.len() == steps;
    for (index, (name, flags)) in runs(worlds, gpus).iter().enumerate() {
        let gpu = losses(trainer, config, folder, &format!("gpu-{index}"), flags)?;
        let off = cpu.iter().zip(&gpu).map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max);
        let passed = gpu.len() == cpu.len() && off < TOLERANCE;
        println!(
            "{name:>28} {:>10.4} {:>10.4} {:>13.3}%{}",
            gpu.first().copied().unwrap_or(f64::NAN),
            gpu.last().copied().unwrap_or(f64::NAN),
            off * 100.0,
            if passed { "" } else { "  WRONG" }
        );
        all_passed &= passed;
    }
    Ok(all_passed)
}
