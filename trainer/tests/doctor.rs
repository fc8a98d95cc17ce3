//! Tests `trainer doctor` on machines without any equipment, and on machines with a stand-in for the driver (`cuda-on-cpu`).

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

/// Returns the stand-in for the driver. cargo has built this library next to the test.
fn driver() -> PathBuf {
    let test = env::current_exe().unwrap();
    // Cargo puts a dependency beside the test, and a package that is built by name in the folder above
    let folders: Vec<_> = test.ancestors().skip(1).take(2).collect();
    let found = folders.iter().map(|folder| folder.join("libcuda_on_cpu.so")).find(|library| library.exists());
    found.unwrap_or_else(|| panic!("no libcuda_on_cpu.so in {folders:?}: the crate cuda-on-cpu has not been built"))
}

/// A simulated machine: one folder that is the loader's path, PATH and the CUDA toolkit.
struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    /// Creates a machine with only the system's own libraries.
    fn bare() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    /// Creates a machine with a driver, NVRTC, NCCL, headers and mpirun.
    fn complete() -> Self {
        let machine = Self::bare();
        let folder = machine.folder.path();
        std::os::unix::fs::symlink(driver(), folder.join("libcuda.so.1")).unwrap();
        // The stand-in compiles kernels with `cc`, which needs the real PATH to find its own programs
        machine.program("cc", "#!/bin/sh\nPATH=$PATH_OF_CC\nexec cc \"$@\"\n");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doctor_support/versions.c");
        let library = folder.join("libnvrtc.so.13");
        // rustc links with `cc`, so every machine that builds this test has it
        let built = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source).status();
        assert!(built.expect("cc").success());
        fs::copy(&library, folder.join("libnccl.so")).unwrap();
        fs::create_dir_all(folder.join("include/crt")).unwrap();
        fs::create_dir_all(folder.join("include/cccl/cuda")).unwrap();
        for name in ["cuda_fp16.h", "cuda_bf16.h", "mma.h", "crt/mma.h", "cooperative_groups.h", "cccl/cuda/barrier"] {
            fs::write(folder.join("include").join(name), "").unwrap();
        }
        machine.program("mpirun", "#!/bin/sh\necho 'mpirun (Fake MPI) 4.1.4'\n");
        machine
    }

    fn program(&self, name: &str, text: &str) {
        use std::os::unix::fs::PermissionsExt;
        let path = self.folder.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn run(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
        let folder = self.folder.path();
        let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
        command.args(arguments).env_remove("CUDA_VISIBLE_DEVICES").env("LD_LIBRARY_PATH", folder);
        command.env("PATH", folder).env("PATH_OF_CC", env::var_os("PATH").unwrap_or_default()).env_remove("CC");
        command.env("CUDA_PATH", folder).env("CUDA_ON_CPU_CACHE", folder.join("kernels")).current_dir(folder);
        command.envs(variables.iter().copied()).output().unwrap()
    }

    fn doctor(&self, variables: &[(&str, &str)]) -> Value {
        let output = self.run(&["doctor", "--json"], variables);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is not a text"))
}

#[test]
fn a_machine_without_anything_is_reported_with_all_searched_places() {
    let machine = Machine::bare();
    let report = machine.doctor(&[]);
    // The loader may find the system's own libraries even here, so check only the parts that are missing
    if let Some(missing) = report["driver"]["missing"].as_str() {
        assert!(missing.contains("libcuda.so.1"), "{missing}");
        assert_eq!(report["gpus"], Value::Array(Vec::new()));
        assert!(text(&report["ipc"]).starts_with("not tried"));
    }
    if let Some(missing) = report["nvrtc"]["missing"].as_str() {
        assert!(missing.contains("libnvrtc.so.12"), "{missing}");
    }
    assert!(text(&report["headers"]["missing"]).contains("(CUDA_PATH) has no cuda_fp16.h"), "{}", report["headers"]);
    assert!(text(&report["mpi"]["missing"]).contains("mpirun"), "{}", report["mpi"]);
    assert!(report["cpu"]["cores"].as_u64().unwrap() > 0 && report["cpu"]["memory_bytes"].as_u64().unwrap() > 1 << 20);
    assert!(text(&report["cpu"]["kernels"]).contains("bf16"), "{}", report["cpu"]);
    assert!(text(&report["would_use"]["device"]).contains("CPU"), "without headers nothing else can be used");
    let names: Vec<_> = report["backends"].as_array().unwrap().iter().map(|row| text(&row["name"])).collect();
    assert_eq!(names, ["shm", "tcp", "cuda", "nccl", "mpi"]);
}

#[test]
fn a_complete_machine_is_described_and_its_parts_are_tested() {
    let machine = Machine::complete();
    let report = machine.doctor(&[
        ("CUDA_ON_CPU_GPUS", "3"),
        ("CUDA_ON_CPU_MEMORY", "3221225472"),
        ("CUDA_ON_CPU_CAPABILITY", "9.0"),
        ("CUDA_VISIBLE_DEVICES", "2,0,1"),
    ]);
    assert_eq!(report["driver"]["cuda"], "13.2");
    assert_eq!(report["driver"]["library"], "libcuda.so.1");
    assert_eq!(report["visible"], "CUDA_VISIBLE_DEVICES is `2,0,1`");
    let gpus = report["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), 3);
    for (index, (gpu, (letter, digits))) in gpus.iter().zip([("C", "12"), ("A", "10"), ("B", "11")]).enumerate() {
        assert_eq!(gpu["index"], index);
        assert_eq!(gpu["name"], format!("CPU as GPU {letter}"));
        assert_eq!(gpu["memory_bytes"], 3u64 << 30);
        assert_eq!(gpu["compute"], serde_json::json!([9, 0]));
        assert_eq!(gpu["multiprocessors"], 2);
        assert_eq!(gpu["memory_check"], "works");
        assert!(text(&gpu["uuid"]).starts_with(&format!("GPU-{digits}{digits}")), "{gpu}");
    }
    let peers = report["peers"].as_array().unwrap();
    assert_eq!(peers.len(), 6);
    for peer in peers {
        assert_eq!((&peer["driver_says"], &peer["check"]), (&Value::Bool(true), &Value::from("works")), "{peer}");
    }
    assert_eq!(report["ipc"], "works");
    assert_eq!(report["compiler"], "works");
    assert_eq!(report["nvrtc"]["version"], "13.2");
    assert_eq!(report["nvrtc"]["name"], "libnvrtc.so.13");
    assert!(text(&report["nvrtc"]["path"]).ends_with("libnvrtc.so.13"), "{}", report["nvrtc"]);
    assert_eq!(report["nccl"]["version"], "2.29.7");
    assert_eq!(report["mpi"]["version"], "mpirun (Fake MPI) 4.1.4");
    let threads = if cfg!(feature = "mpi") { "MPI_THREAD_" } else { "unknown, as this build has no MPI" };
    assert!(text(&report["mpi"]["threads"]).contains(threads), "{}", report["mpi"]);
    assert_eq!(Path::new(text(&report["headers"]["path"])), machine.folder.path().join("include"));

    let screen = machine.run(&["doctor"], &[("CUDA_ON_CPU_GPUS", "2")]);
    let screen = String::from_utf8(screen.stdout).unwrap();
    for word in ["CPU as GPU B", "peer 0>1", "works (the driver says yes)", "13.2", "NVRTC".to_lowercase().as_str()] {
        assert!(screen.contains(word), "{word}: {screen}");
    }
}

#[test]
fn a_driver_that_reports_peer_access_and_loses_writes_is_detected() {
    let machine = Machine::complete();
    let report = machine.doctor(&[("CUDA_ON_CPU_GPUS", "2"), ("CUDA_ON_CPU_PEERS", "lies")]);
    for peer in report["peers"].as_array().unwrap() {
        assert_eq!(peer["driver_says"], true);
        assert!(text(&peer["check"]).contains("values differ from the written ones"), "{peer}");
    }
    // The GPU's own memory works
    assert_eq!(report["gpus"][1]["memory_check"], "works");
}

#[test]
fn a_driver_without_peer_access_is_reported_and_no_error() {
    let report = Machine::complete().doctor(&[("CUDA_ON_CPU_GPUS", "2"), ("CUDA_ON_CPU_PEERS", "none")]);
    let peer = &report["peers"][0];
    assert_eq!(peer["driver_says"], false);
    assert!(text(&peer["check"]).contains("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)"), "{peer}");
}

#[test]
fn a_compiler_that_fails_is_quoted() {
    let machine = Machine::complete();
    let log = "doctor.cu(2): catastrophic error: cannot open source file \"cuda_fp16.h\"";
    let report = machine.doctor(&[("FAKE_NVRTC_LOG", log)]);
    assert_eq!(report["compiler"], format!("nvrtcCompileProgram: {log} (6)"));
    // PTX that the driver refuses.
    assert!(text(&machine.doctor(&[("CUDA_ON_CPU_DRIVER", "10.0")])["compiler"]).contains("PTX_VERSION (222)"));
}

#[test]
fn a_gpu_for_one_process_is_not_shared_with_another() {
    let machine = Machine::complete();
    let alone = machine.doctor(&[("CUDA_ON_CPU_MODE", "exclusive")]);
    assert!(text(&alone["ipc"]).contains("for one process only"), "{}", alone["ipc"]);
    assert_eq!(machine.doctor(&[("CUDA_ON_CPU_MODE", "exclusive"), ("CUDA_ON_CPU_GPUS", "2")])["ipc"], "works");
}

#[test]
fn a_gpu_whose_driver_ends_long_kernels_is_reported() {
    let machine = Machine::complete();
    let shown = |variables: &[(&str, &str)]| {
        let screen = String::from_utf8(machine.run(&["doctor"], variables).stdout).unwrap();
        screen
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
            .contains("drives a display: the driver ends long kernels")
    };
    assert!(shown(&[("CUDA_ON_CPU_DISPLAY", "yes")]) && !shown(&[]));
    assert_eq!(machine.doctor(&[("CUDA_ON_CPU_DISPLAY", "yes")])["gpus"][0]["limits_kernels"], true);
}

#[test]
fn refused_ipc_is_reported_and_no_error() {
    let report = Machine::complete().doctor(&[("CUDA_ON_CPU_GPUS", "2"), ("CUDA_ON_CPU_IPC", "refused")]);
    assert!(text(&report["ipc"]).contains("CUDA_ERROR_NOT_SUPPORTED (801)"), "{}", report["ipc"]);
}

#[test]
fn a_driver_that_shows_no_gpu_or_does_not_start_is_distinguished() {
    let machine = Machine::complete();
    let none = machine.doctor(&[("CUDA_VISIBLE_DEVICES", "")]);
    assert!(text(&none["driver"]["missing"]).contains("CUDA_ERROR_NO_DEVICE"), "{none}");
    assert!(text(&none["visible"]).contains("hides every GPU"), "{none}");
    let broken = machine.doctor(&[("CUDA_ON_CPU_INIT", "803")]);
    assert!(text(&broken["driver"]["missing"]).contains("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"), "{broken}");
    assert_eq!(broken["gpus"], Value::Array(Vec::new()));
}

#[test]
fn a_driver_that_is_older_than_nvrtc_or_this_program_is_reported_with_what_to_install() {
    let machine = Machine::complete();
    assert_eq!(machine.doctor(&[])["versions"], Value::Null);
    let newer = machine.doctor(&[("CUDA_ON_CPU_DRIVER", "13.0")]);
    let said = text(&newer["versions"]);
    for word in
        ["NVRTC 13.2 (", "libnvrtc.so.13) compiles kernels that the driver refuses", "nvidia-cuda-nvrtc==13.0.*"]
    {
        assert!(said.contains(word), "{word}: {said}");
    }
    let old = machine.doctor(&[("CUDA_ON_CPU_DRIVER", "12.4")]);
    assert!(text(&old["versions"]).contains("supports CUDA 12.4, and this program needs 12.8"), "{old}");
    let screen = String::from_utf8(machine.run(&["doctor"], &[("CUDA_ON_CPU_DRIVER", "13.0")]).stdout).unwrap();
    assert!(screen.contains("versions"), "{screen}");
}

/// Checks the errors of a GPU build. They must come before burn's backend is used.
#[cfg(feature = "cuda")]
#[test]
fn unavailable_gpus_are_errors_before_anything_starts() {
    let machine = Machine::complete();
    fs::write(
        machine.folder.path().join("config.toml"),
        "[model]\nname = \"lenet\"\n[data]\nname = \"fashion-mini\"\n",
    )
    .unwrap();
    let fails = |arguments: &[&str], variables: &[(&str, &str)], words: &[&str]| {
        let output = machine.run(&[&["--config", "config.toml", "--dry-run"], arguments].concat(), variables);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        for word in words.iter().chain(&["hint:"]) {
            assert!(said.contains(word), "{word}: {said}");
        }
        assert!(!said.contains("internal error"), "{said}");
    };
    fails(&["--gpus", "4"], &[("CUDA_ON_CPU_GPUS", "2")], &["4 processes", "there are 2 GPUs", "--oversubscribe"]);
    fails(&["--gpus", "2"], &[("CUDA_VISIBLE_DEVICES", "")], &["CUDA_VISIBLE_DEVICES is empty"]);
    fails(&["--gpus", "1"], &[("CUDA_PATH", "/nowhere")], &["/nowhere/include (CUDA_PATH) has no cuda_fp16.h"]);
    fails(&["--gpus", "1"], &[("CUDA_ON_CPU_DRIVER", "13.0")], &["NVRTC 13.2", "nvidia-cuda-nvrtc==13.0.*"]);
    fails(&["--gpus", "1"], &[("CUDA_ON_CPU_DRIVER", "12.4")], &["supports CUDA 12.4", "needs 12.8"]);
    fs::remove_file(machine.folder.path().join("libnvrtc.so.13")).unwrap();
    fails(&["--gpus", "1"], &[], &["no NVRTC", "libnvrtc.so.13", "LD_LIBRARY_PATH"]);
    fs::remove_file(machine.folder.path().join("libcuda.so.1")).unwrap();
    fails(&["--gpus", "1"], &[], &["no NVIDIA driver", "libcuda.so.1"]);
}
