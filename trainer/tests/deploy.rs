//! The files in `trainer/deploy`: each is read, and its command is run here with the environment that its cluster would set.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::namespaces::ADDRESSES;
use crate::common::sshd::SshHosts;
use crate::common::{Bench, CONFIG, Ended, entries, first_entry, free_port, losses, signal, skip_or_fail, wait_until};
use yaml_rust2::{Yaml, YamlLoader};

/// Reads a file in `trainer/deploy`.
fn deploy(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A folder like the one in which the files expect to run: the program in `bin`, and the configuration that they name, which
/// trains a small network for 12 steps here.
fn working_folder() -> Bench {
    let bench = Bench::new(CONFIG);
    fs::create_dir_all(bench.path("bin")).unwrap();
    fs::create_dir_all(bench.path("configs")).unwrap();
    symlink(env!("CARGO_BIN_EXE_trainer"), bench.path("bin/trainer")).unwrap();
    let short = CONFIG.replace("[train]", "[train]\nmax_steps = 12");
    fs::write(bench.path("configs/cifar_resnet18.toml"), &short).unwrap();
    fs::write(bench.path("config.toml"), short).unwrap();
    bench
}

/// Prepares a command: it runs in the folder, finds the program on its path, and each rank has one thread, on which the last bits
/// of a sum depend.
fn prepare<'c>(command: &'c mut Command, bench: &Bench) -> &'c mut Command {
    let path = std::env::var("PATH").unwrap_or_default();
    command.current_dir(bench.folder.path()).env("PATH", format!("{}:{path}", bench.path("bin").display()));
    command.env_remove("TRAINER_DATA_DIR").env("NO_COLOR", "1").env("RAYON_NUM_THREADS", "1").stdin(Stdio::null())
}

/// Trains with two processes of the program's own launcher.
fn reference(bench: &Bench, flags: &[&str]) -> Vec<(u64, u64)> {
    let mut command = bench.command();
    prepare(&mut command, bench).args(["--config", "config.toml", "--cpus", "2", "--run-dir", "reference"]).args(flags);
    Ended::from(command.output().unwrap()).expect(0);
    losses(&bench.only_run("reference"))
}

/// The run folder with the results, of several in `root`: nodes on one file system have a folder each.
fn results(bench: &Bench, root: &str) -> PathBuf {
    let runs = entries(&bench.path(root));
    runs.iter().find(|run| run.join("metrics.jsonl").exists()).unwrap_or_else(|| panic!("no results: {runs:?}")).clone()
}

/// The values of `#SBATCH --name=value` or `#BSUB -n value` lines, by name.
fn directive<'t>(script: &'t str, marker: &str, name: &str) -> &'t str {
    let lines = script.lines().filter_map(|line| line.strip_prefix(marker)?.trim().strip_prefix(name));
    let values: Vec<&str> = lines.map(|rest| rest.trim_start_matches(['=', ' '])).collect();
    assert_eq!(values.len(), 1, "{marker} {name} in\n{script}");
    values[0]
}

/// Starts as many tasks as there are nodes, with srun's variables for one task per node, and passes SIGTERM on to them.
const SRUN: &str = "#!/bin/sh
children=
trap 'kill -TERM $children' TERM
for id in 0 1; do
    SLURM_PROCID=$id SLURM_LOCALID=0 SLURM_NODEID=$id SLURM_STEP_ID=0 \"$@\" &
    children=\"$children $!\"
done
code=0
for child in $children; do
    # A signal interrupts `wait`
    while kill -0 $child 2>/dev/null; do wait $child; status=$?; done
    [ $status = 0 ] || code=$status
done
exit $code
";

#[test]
fn the_slurm_script_trains_and_resumes_after_a_signal() {
    let script = deploy("slurm.sbatch");
    let tasks = |name: &str| directive(&script, "#SBATCH", name).parse::<usize>().unwrap();
    assert_eq!((tasks("--nodes"), tasks("--ntasks-per-node")), (2, 4));
    assert_eq!(directive(&script, "#SBATCH", "--signal"), "TERM@120");
    let bench = working_folder();
    fs::write(bench.path("bin/srun"), SRUN).unwrap();
    fs::set_permissions(bench.path("bin/srun"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(bench.path("slurm.sbatch"), &script).unwrap();
    let endless = "--set train.epochs=5000 --set log.every=1 --set train.max_steps";
    // As with `sbatch --ntasks-per-node=1`, on two nodes that are both this machine
    let job = |max_steps: usize| {
        let mut command = Command::new("env");
        prepare(&mut command, &bench).args(["--default-signal=TERM", "bash", "slurm.sbatch"]);
        command.env("TRAINER", "trainer").env("FLAGS", format!("{endless}={max_steps}"));
        for (name, value) in [
            ("SLURM_JOB_ID", "31"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_NNODES", "2"),
            ("SLURM_TASKS_PER_NODE", "1(x2)"),
            ("SLURM_JOB_NODELIST", "localhost,localhost"),
            ("MASTER_PORT", &free_port().to_string()),
        ] {
            command.env(name, value);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let runs = bench.path("runs/slurm-31");
    let steps = || first_entry(&runs).map_or(0, |run| losses_so_far(&run));
    let first = job(0);
    wait_until("training", || steps() > 2);
    signal(&first, 15);
    let ended = Ended::from(first.wait_with_output().unwrap()).expect(143);
    assert!(ended.stderr.contains("started by Slurm: rank 0 of 2"), "{}", ended.stderr);
    // Slurm starts the job again: it continues in the same folder.
    let end = steps() + 9;
    Ended::from(job(end).wait_with_output().unwrap()).expect(0);
    let flags = format!("{endless}={end}");
    let want = reference(&bench, &flags.split(' ').collect::<Vec<_>>());
    assert_eq!(losses(&bench.only_run("runs/slurm-31")), want);
}

/// The number of steps that a run has logged.
fn losses_so_far(run: &Path) -> usize {
    fs::read_to_string(run.join("metrics.jsonl")).map_or(0, |text| text.lines().count())
}

#[test]
fn the_lsf_script_trains_on_two_hosts() {
    let script = deploy("lsf.bsub");
    let slots: usize = directive(&script, "#BSUB", "-n").parse().unwrap();
    assert!(directive(&script, "#BSUB", "-R").contains(&format!("ptile={}", slots / 2)));
    let Some(hosts) = SshHosts::start("d") else { return };
    let bench = working_folder();
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &hosts.net.names[0], "bash", "-s"]);
    prepare(&mut command, &bench).stdin(script_file(&bench, &script));
    command.env("LSB_JOBID", "7").env("LSB_MCPU_HOSTS", "node1 1 node2 1").env("TRAINER", "trainer");
    let ended = Ended::from(command.env("TRAINER_SSH", hosts.ssh()).output().unwrap()).expect(0);
    assert!(ended.stdout.contains("ddp x2"), "{}", ended.stdout);
    assert_eq!(entries(&bench.path("runs")).len(), 2, "one folder of logs per node");
    let want = reference(&bench, &[]);
    let found = losses(&results(&bench, "runs"));
    assert_eq!(found.len(), want.len());
    // Threads of the other host are not set from here, so the last bits may differ.
    for ((step, a), (_, b)) in found.into_iter().zip(want) {
        let (a, b) = (f64::from_bits(a), f64::from_bits(b));
        assert!((a - b).abs() <= 1e-4 * b, "step {step}: {a}, {b}");
    }
}

/// `bsub < script` reads the script from its standard input.
fn script_file(bench: &Bench, script: &str) -> fs::File {
    fs::write(bench.path("script"), script).unwrap();
    fs::File::open(bench.path("script")).unwrap()
}

fn manifest(name: &str) -> Yaml {
    let mut documents = YamlLoader::load_from_str(&deploy(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(documents.len(), 1, "{name}");
    documents.remove(0)
}

/// The only container of a pod, and checks that its volumes are those of the pod.
fn container(replica: &Yaml) -> &Yaml {
    let pod = &replica["template"]["spec"];
    let names = |list: &Yaml| {
        let mut names: Vec<String> =
            list.as_vec().into_iter().flatten().map(|entry| entry["name"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    };
    let containers = pod["containers"].as_vec().unwrap();
    assert_eq!(containers.len(), 1);
    assert_eq!(names(&containers[0]["volumeMounts"]), names(&pod["volumes"]));
    &containers[0]
}

/// The strings of a list.
fn words(list: &Yaml) -> Vec<String> {
    list.as_vec().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
}

/// The names of a container's variables, all of which come from the Secret.
fn secrets(container: &Yaml) -> Vec<&str> {
    let variables = container["env"].as_vec().unwrap();
    let name = |entry: &'_ Yaml| {
        assert_eq!(entry["valueFrom"]["secretKeyRef"]["name"].as_str(), Some("trainer"));
        assert!(deploy("mpijob.yaml").contains("create secret generic trainer --from-literal=secret="));
        assert_eq!(entry["valueFrom"]["secretKeyRef"]["key"].as_str(), Some("secret"));
    };
    variables.iter().for_each(name);
    variables.iter().map(|entry| entry["name"].as_str().unwrap()).collect()
}

/// Replaces the folders that volumes provide by those of the test.
fn local(bench: &Bench, word: &str) -> String {
    let path = |name: &str| bench.path(name).display().to_string();
    // ssh passes neither the test's path nor its variables on.
    let mpirun = format!("-x RAYON_NUM_THREADS {} --config", path("bin/trainer"));
    let word = word.replace("/etc/mpi/hostfile", &path("hostfile")).replace("trainer --config", &mpirun);
    match word.as_str() {
        "/data" => path("data"),
        "/runs" => path("pods"),
        _ => word.replace(" /data", &format!(" {}", path("data"))).replace(" /runs", &format!(" {}", path("pods"))),
    }
}

/// The operator starts the launcher's command with its list of hosts; mpirun reaches the hosts over ssh.
#[test]
fn the_kubernetes_mpi_job_trains() {
    let job = manifest("mpijob.yaml");
    assert_eq!(job["apiVersion"].as_str(), Some("kubeflow.org/v2beta1"));
    assert_eq!(job["kind"].as_str(), Some("MPIJob"));
    let replicas = &job["spec"]["mpiReplicaSpecs"];
    assert_eq!(words(&container(&replicas["Worker"])["command"]), ["/usr/sbin/sshd", "-De"]);
    let launcher = container(&replicas["Launcher"]);
    assert_eq!(secrets(launcher), ["TRAINER_SECRET"]);

    if let Err(error) = Command::new("mpirun").arg("--version").stdout(Stdio::null()).status() {
        return skip_or_fail("mpirun", error);
    }
    let Some(hosts) = SshHosts::start("k") else { return };
    let bench = working_folder();
    let list: Vec<String> = ADDRESSES.iter().map(|address| format!("{address} slots=1\n")).collect();
    fs::write(bench.path("hostfile"), list.concat()).unwrap();
    let command: Vec<String> = [words(&launcher["command"]), words(&launcher["args"])]
        .concat()
        .iter()
        .map(|word| local(&bench, word))
        .collect();
    let mut mpirun = Command::new("ip");
    prepare(mpirun.args(["netns", "exec", &hosts.net.names[0]]).args(&command), &bench);
    mpirun.env("TRAINER_SECRET", "words of this test");
    bench.own_mpi_session(&mut mpirun);
    // What the operator sets, and this test's keys
    mpirun
        .env("OMPI_MCA_orte_default_hostfile", bench.path("hostfile"))
        .env("OMPI_MCA_orte_keep_fqdn_hostnames", "true");
    mpirun.env("OMPI_MCA_plm_rsh_agent", hosts.ssh());
    let ended = Ended::from(mpirun.output().unwrap()).expect(0);
    assert!(ended.stderr.contains("started by Open MPI: rank 0 of 2, local rank 0 of 1"), "{}", ended.stderr);
    assert_eq!(losses(&results(&bench, "pods")), reference(&bench, &[]));
}

/// The operator sets the number of each pod and the address of the first pod in environment variables.
#[test]
fn the_kubernetes_pytorch_job_trains() {
    let job = manifest("pytorchjob.yaml");
    assert_eq!(job["apiVersion"].as_str(), Some("kubeflow.org/v1"));
    assert_eq!(job["kind"].as_str(), Some("PyTorchJob"));
    assert_eq!(job["spec"]["nprocPerNode"].as_str(), Some("4"));
    let replicas = &job["spec"]["pytorchReplicaSpecs"];
    let pods = [&replicas["Master"], &replicas["Worker"]];
    assert_eq!(pods.map(|pod| pod["replicas"].as_i64()), [Some(1), Some(1)]);

    let bench = working_folder();
    let port = free_port().to_string();
    let started: Vec<_> = (0..2)
        .map(|index| {
            let container = container(pods[index]);
            assert_eq!(container["name"].as_str(), Some("pytorch"), "the operator looks for this name");
            assert_eq!(secrets(container), ["TRAINER_SECRET"]);
            let mut pod = bench.command();
            prepare(&mut pod, &bench).args(words(&container["args"]).iter().map(|word| local(&bench, word)));
            pod.env("TRAINER_SECRET", "words of this test").stdout(Stdio::piped()).stderr(Stdio::piped());
            // One worker per pod here
            for (name, value) in [("PET_NNODES", "2"), ("PET_NPROC_PER_NODE", "1"), ("WORLD_SIZE", "2")] {
                pod.env(name, value);
            }
            let index = index.to_string();
            pod.env("PET_NODE_RANK", &index).env("RANK", &index).env("MASTER_ADDR", "localhost");
            pod.env("MASTER_PORT", &port).spawn().unwrap()
        })
        .collect();
    for pod in started {
        Ended::from(pod.wait_with_output().unwrap()).expect(0);
    }
    assert_eq!(losses(&results(&bench, "pods")), reference(&bench, &[]));
}

/// The instructions of the Dockerfile, with continued lines joined.
fn instructions() -> Vec<(String, String)> {
    let text = deploy("Dockerfile").replace("\\\n", " ");
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    lines.map(|line| line.split_once(' ').unwrap()).map(|(a, b)| (a.to_owned(), b.trim().to_owned())).collect()
}

#[test]
fn the_dockerfile_names_existing_files_and_its_command_trains() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let features = fs::read_to_string(root.join("trainer/Cargo.toml")).unwrap();
    let instructions = instructions();
    let mut stages = Vec::<String>::new();
    for (name, rest) in &instructions {
        let words: Vec<&str> = rest.split_whitespace().collect();
        match name.as_str() {
            "FROM" => {
                if let Some(version) = words[0].strip_prefix("rust:") {
                    let version = version.split('-').next().unwrap();
                    assert!(manifest.contains(&format!("rust-version = \"{version}\"")), "{rest}");
                } else {
                    let known = [
                        "gcr.io/distroless/cc-debian12",
                        "debian:bookworm-slim",
                        "nvidia/cuda:12.8.1-devel-ubuntu24.04",
                    ];
                    assert!(stages.iter().any(|stage| stage == words[0]) || known.contains(&words[0]), "{rest}");
                }
                assert_eq!(words[1], "AS");
                stages.push(words[2].to_owned());
            }
            "COPY" => match words[0].strip_prefix("--from=") {
                Some(stage) => assert!(stages.iter().any(|known| known == stage), "{rest}"),
                None => assert!(root.join(words[0]).exists(), "{rest}"),
            },
            "RUN" => {
                if let Some((_, feature)) = rest.split_once("--features ") {
                    assert!(features.contains(&format!("\n{feature} = [")), "{rest}");
                }
            }
            "WORKDIR" | "ENV" | "ENTRYPOINT" | "CMD" => {}
            _ => panic!("{name} {rest}"),
        }
    }
    for target in ["cpu", "mpi", "gpu"] {
        assert!(stages.iter().any(|stage| stage == target));
    }

    // The command of the image `cpu`, in a folder like its own
    let list = |name: &str| {
        let (_, text) = instructions.iter().find(|(instruction, _)| instruction == name).unwrap();
        serde_json::from_str::<Vec<String>>(text).unwrap()
    };
    let bench = Bench::new("");
    fs::create_dir(bench.path("bin")).unwrap();
    symlink(env!("CARGO_BIN_EXE_trainer"), bench.path("bin/trainer")).unwrap();
    symlink(root.canonicalize().unwrap().join("configs"), bench.path("configs")).unwrap();
    let command = [list("ENTRYPOINT"), list("CMD")].concat();
    let mut image = Command::new("env");
    prepare(&mut image, &bench).args(&command).args(["--set", "train.max_steps=3"]);
    Ended::from(image.output().unwrap()).expect(0);
}
