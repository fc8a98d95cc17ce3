//! One command for several hosts: `-H` and `--hostfile` over a real ssh, between network namespaces.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::common::namespaces::ADDRESSES;
use crate::common::sshd::SshHosts;
use crate::common::{Bench, CONFIG, ENDLESS, Ended, entries, losses, signal, signal_process, wait_until};

const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// A folder with a program of its own, so that all processes of a test are known by their command lines.
struct Job {
    bench: Bench,
    hosts: SshHosts,
    trainer: PathBuf,
}

impl Job {
    fn new(tag: &str) -> Option<Self> {
        let hosts = SshHosts::start(tag)?;
        let bench = Bench::new(CONFIG);
        let trainer = bench.path("trainer");
        let program = env!("CARGO_BIN_EXE_trainer");
        fs::hard_link(program, &trainer).or_else(|_| fs::copy(program, &trainer).map(drop)).expect("a program");
        Some(Self { bench, hosts, trainer })
    }

    /// The command line as the first host's user types it.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.hosts.net.names[0], "env", "--default-signal=HUP,INT,QUIT,TERM"]);
        command.arg(&self.trainer).args(arguments).current_dir(self.bench.folder.path());
        command.env_remove("TRAINER_DATA_DIR").env("NO_COLOR", "1").env("TRAINER_SSH", self.hosts.ssh());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &[&str]) -> Ended {
        self.command(arguments).output().expect("ip starts").into()
    }

    /// The ids and command lines of all processes of the program, ssh included.
    fn processes(&self) -> Vec<(u32, String)> {
        let name = self.trainer.display().to_string();
        let pids =
            fs::read_dir("/proc").expect("/proc").filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let command = |pid: u32| {
            let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            (pid, String::from_utf8_lossy(&bytes).replace('\0', " "))
        };
        pids.map(command).filter(|(_, line)| line.contains(&name)).collect()
    }

    /// Starts an endless run, and waits until it trains.
    fn endless(&self, hosts: &str, timeout: &str) -> Child {
        let timeout = format!("parallel.timeout_s={timeout}");
        let start = ["--config", "config.toml", "-H", hosts, "--set", "log.every=1", "--set", &timeout];
        let mut command = self.command(&[&start[..], &ENDLESS].concat());
        let child = command.env("TRAINER_SECRET", "words of this test").spawn().expect("ip starts");
        let trains =
            |run: &PathBuf| fs::read_to_string(run.join("metrics.jsonl")).is_ok_and(|text| text.lines().count() > 2);
        wait_until("training", || entries(&self.bench.path("runs")).iter().any(trains));
        child
    }

    /// Waits for the end of the command and of all its processes on all hosts.
    fn end(&self, child: Child) -> Ended {
        let ended: Ended = child.wait_with_output().expect("output").into();
        wait_until("the end of all processes", || self.processes().is_empty());
        fs::remove_dir_all(self.bench.path("runs")).expect("the runs are there");
        ended
    }
}

/// The run folder with the results. Both hosts write to one file system here, and the second one's folder has its logs.
fn run_of_node_0(job: &Job, root: &str) -> PathBuf {
    let runs = entries(&job.bench.path(root));
    let found = runs.iter().find(|run| run.join("metrics.jsonl").exists());
    found.unwrap_or_else(|| panic!("no results in {runs:?}")).clone()
}

#[test]
fn two_hosts_train_to_the_same_bits_as_two_processes() {
    let Some(job) = Job::new("h") else { return };
    let limit = ["--set", "train.max_steps=12"];
    let ended =
        job.run(&[&["--config", "config.toml", "-H", "node1:1,node2:4", "--cpus", "2"][..], &limit].concat()).expect(0);
    assert!(ended.stdout.contains("run folder:"), "node 0's output is shown: {}", ended.stdout);
    fs::write(job.bench.path("hosts"), "localhost slots=1 # without ssh\nnode2 slots=1\n").unwrap();
    job.run(&[&["--config", "config.toml", "--hostfile", "hosts", "--run-dir", "file"][..], &limit].concat()).expect(0);
    // Each host has all cores for its one rank, and the number of threads decides the last bits.
    let threads = std::thread::available_parallelism().map_or(1, usize::from).to_string();
    let one = [&["--config", "config.toml", "--cpus", "2", "--run-dir", "one"][..], &limit].concat();
    Ended::from(job.command(&one).env("RAYON_NUM_THREADS", threads).output().expect("ip starts")).expect(0);
    let want = losses(&job.bench.only_run("one"));
    assert_eq!(want.len(), 12);
    assert_eq!(losses(&run_of_node_0(&job, "runs")), want, "over ssh");
    assert_eq!(losses(&run_of_node_0(&job, "file")), want, "with this host");

    // Any program, whose ranks are on both hosts
    let script = "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK on node $GROUP_RANK at $MASTER_ADDR in $PWD";
    let ended = job.run(&["launch", "-H", "node1:2,node2:1", "--", "sh", "-c", script]).expect(0);
    let mut lines: Vec<&str> = ended.stdout.lines().collect();
    lines.sort_unstable();
    let place = format!("at {} in {}", ADDRESSES[0], job.bench.folder.path().display());
    let want = [(0, 0, 0), (1, 1, 0), (2, 0, 1)]
        .map(|(rank, local, node)| format!("[{rank}]: rank {rank} of 3, {local} on node {node} {place}"));
    assert_eq!(lines, want, "{}", ended.stderr);
    let ended = job
        .run(&["launch", "-H", "node1:1,node2:1", "--", "sh", "-c", "[ $RANK = 0 ] || exit 9; sleep 1000"])
        .expect(3);
    assert!(ended.stderr.contains("error: node 1: rank 1 exited with code 9"), "{}", ended.stderr);
    wait_until("the end of all processes", || job.processes().is_empty());
}

#[test]
fn all_hosts_stop_after_a_signal_a_killed_launcher_or_an_outage() {
    let Some(job) = Job::new("e") else { return };
    // A signal stops all hosts at one step, with a checkpoint.
    let child = job.endless("node1:1,node2:1", "300");
    let leaks: Vec<_> = job.processes().into_iter().filter(|(_, line)| line.contains("words of")).collect();
    assert!(leaks.is_empty(), "the secret is on a command line: {leaks:?}");
    signal(&child, SIGTERM);
    let ended = job.end(child).expect(128 + SIGTERM);
    assert!(
        ended.stdout.contains("-H node1:1,node2:1") || ended.stderr.contains("-H node1:1,node2:1"),
        "how to continue: {}{}",
        ended.stdout,
        ended.stderr
    );

    // The shell is gone.
    let child = job.endless("node1:1,node2:1", "300");
    signal(&child, SIGKILL);
    job.end(child);

    // The second host's launcher dies.
    let child = job.endless("node1:1,node2:1", "300");
    let agents = job.processes();
    let launchers: Vec<u32> =
        agents.iter().filter(|(_, line)| line.contains(" --config ")).map(|(pid, _)| *pid).collect();
    let node = |pid: u32| {
        fs::read(format!("/proc/{pid}/environ"))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    };
    let victim = launchers.into_iter().find(|pid| {
        let environment = node(*pid);
        environment.contains("\"node_rank\":1") && !environment.contains("TRAINER_WORKER=")
    });
    signal_process(victim.expect("node 1's launcher"), SIGKILL);
    let ended = job.end(child).expect(3);
    assert!(ended.stderr.contains("the launcher of node 1 was killed by SIGKILL"), "{}", ended.stderr);

    // The network fails for longer than the timeout, and works again before ssh gives up.
    let mut child = job.endless("localhost:1,node2:1", "10");
    job.hosts.net.cable("down");
    let mut said = String::new();
    let mut err = std::io::BufReader::new(child.stderr.take().expect("a pipe"));
    // The launcher and rank 0 have the same timeout. Which of them ends the job depends on the machine's load.
    while !["node", "rank"].iter().any(|peer| said.contains(&format!("no answer from {peer} 1 for 10 s"))) {
        assert!(std::io::BufRead::read_line(&mut err, &mut said).expect("a line") > 0, "{said}");
    }
    job.hosts.net.cable("up");
    job.end(child).expect(3);
}

#[test]
fn hosts_that_cannot_take_part_are_named_at_once() {
    let Some(job) = Job::new("f") else { return };
    for (host, cause, hint) in [
        ("wrong-key", "wrong-key: ssh cannot connect:\n  root@10.231.17.2: Permission denied", "ssh-copy-id wrong-key"),
        ("unknown-key", "unknown-key: ssh cannot connect:", "the host's key is unknown"),
        ("refused", "refused: ssh cannot connect:", "is the host up"),
        ("no.such.host.invalid", "no.such.host.invalid: ssh cannot connect:", "is the name right"),
        ("missing", "missing: there is no ", "the same path"),
        ("version", "version: its trainer is version 0.0.9, this one is ", "copy this one"),
    ] {
        let ended = job.run(&["launch", "-H", &format!("node1:1,{host}:1"), "--", "touch", "started"]).expect(2);
        assert!(
            ended.stderr.contains(cause) && ended.stderr.contains("hint: ") && ended.stderr.contains(hint),
            "{host}: {}",
            ended.stderr
        );
    }
    // Mistakes in the plan are found here, before a host is reached
    let ended = job.run(&["--config", "config.toml", "-H", "node1:1,refused:1", "--set", "optimizer.lr=x"]).expect(2);
    assert!(ended.stderr.contains("optimizer.lr") && !ended.stderr.contains("ssh"), "{}", ended.stderr);
    let ended = job.run(&["--config", "config.toml", "-H", "node1:1,refused:1", "--dry-run"]).expect(0);
    assert!(!ended.stderr.contains("ssh"), "{}", ended.stderr);
    let folder = entries(job.bench.folder.path());
    assert!(!folder.iter().any(|path| path.ends_with("started") || path.ends_with("runs")), "{folder:?}");
    wait_until("the end of all processes", || job.processes().is_empty());
}

#[test]
fn one_host_needs_no_ssh_and_the_order_to_an_agent_is_checked() {
    let bench = Bench::new(CONFIG);
    let no_ssh = |arguments: &[&str]| -> Ended {
        bench.command().args(arguments).env("TRAINER_SSH", "/no/such/ssh").output().expect("the binary starts").into()
    };
    no_ssh(&["--config", "config.toml", "-H", "localhost:2", "--set", "train.max_steps=2"]).expect(0);
    let ended = no_ssh(&["launch", "-H", "localhost:2,far:1", "--", "true"]).expect(2);
    assert!(ended.stderr.contains("far: cannot start /no/such/ssh: No such file"), "{}", ended.stderr);
    let agent = |order: &str| -> Ended {
        let mut child = bench
            .command()
            .arg("launch-agent")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        std::io::Write::write_all(&mut child.stdin.take().expect("a pipe"), order.as_bytes()).expect("the agent reads");
        child.wait_with_output().expect("output").into()
    };
    let ended = agent("").expect(0);
    assert!(ended.stdout.starts_with("trainer-agent {\"version\":"), "{}", ended.stdout);
    assert!(agent("nonsense\n").expect(2).stderr.contains("this is not a start request"));
    let order = r#"{"directory": "/no/such/folder", "arguments": [], "secret": "", "plan": {"nodes": 1, "node_rank": 0, "workers": 1, "master_addr": "", "master_port": 1, "flags": []}}"#;
    let ended = agent(&format!("{order}\n")).expect(2);
    assert!(ended.stderr.contains("there is no folder /no/such/folder on this host"), "{}", ended.stderr);
}
