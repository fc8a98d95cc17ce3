//! The environment of workers: variables, cores, terminal, port, unauthenticated peers, foreign launchers.

mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use comm::{Secret, StoreClient, StoreConfig};
use launch::cores;
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use support::{LIMIT, PROBE, Run, free_port, probe, read};

fn value(log: &str, name: &str) -> String {
    let line = log.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name}: {log}"));
    line.trim_start_matches(['=', ' ']).to_owned()
}

#[test]
fn each_worker_has_its_variables_and_cores() {
    let all = cores::available();
    let ended = Run::start(&["--workers", "2"]).end();
    ended.said(0, &[]);
    let logs = [0, 1].map(|rank| ended.log(&format!("rank-{rank}/stdout.log")));
    for (rank, log) in logs.iter().enumerate() {
        let rank = rank.to_string();
        for (name, expected) in [
            ("RANK", rank.as_str()),
            ("LOCAL_RANK", &rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("GROUP_RANK", "0"),
            ("RAYON_NUM_THREADS", &(cores::quota().min(all.len()) / 2).max(1).to_string()),
            ("own group", "true, stdin /dev/null"),
        ] {
            assert_eq!(value(log, name), expected, "{name}");
        }
    }
    if all.len() >= 2 {
        assert_ne!(value(&logs[0], "cores"), value(&logs[1], "cores"), "each has separate cores");
    }
    let crowd = Run::start(&["--workers", &(all.len() + 1).to_string()]).end();
    assert_eq!(value(&crowd.log("rank-0/stdout.log"), "cores"), value(&crowd.log("rank-1/stdout.log"), "cores"));

    // `Run` removes the variable, so `env` sets it again.
    let mut shell = std::process::Command::new("env");
    shell.args(["RAYON_NUM_THREADS=7", PROBE, "--workers", "1"]);
    assert_eq!(value(&Run::of(shell).end().stdout, "RAYON_NUM_THREADS"), "7", "the user's value takes precedence");
}

#[test]
fn rank_0_has_a_terminal_where_the_launcher_has_one() {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = openpt(flags).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let slave = ioctl_tiocgptpeer(&master, flags).unwrap();
    tcsetwinsize(&master, Winsize { ws_row: 30, ws_col: 123, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut command = probe(&["--workers", "2", "--logs"]);
    command.arg(folder.path()).stdin(std::process::Stdio::null()).stdout(slave.try_clone().unwrap()).stderr(slave);
    let mut child = command.spawn().unwrap();
    drop(command);
    let mut screen = String::new();
    let mut bytes = [0; 4096];
    let mut master = File::from(master);
    // EIO when the launcher has ended.
    while let Ok(read) = master.read(&mut bytes) {
        screen += &String::from_utf8_lossy(&bytes[..read]);
    }
    assert!(child.wait().unwrap().success(), "{screen}");
    assert!(screen.contains("terminal true 123"), "{screen}");
    // Both streams in the order of their writes.
    let at = |text: &str| screen.find(text).unwrap_or_else(|| panic!("{text}: {screen}"));
    assert!(at("GROUP_RANK=0") < at("terminal true") && at("terminal true") < at("own group"), "{screen}");
    assert!(screen.contains("step 5\r\n"), "the terminal adds the carriage returns: {screen:?}");
    let log = |name: &str| read(&folder.path().join(name));
    assert!(log("rank-0/stdout.log").contains("terminal true 123\n") && log("rank-0/stdout.log").contains("step 5\n"));
    assert!(log("rank-0/stderr.log").contains("see stdout.log"));
    assert!(log("rank-1/stderr.log").contains("terminal false 0"));
}

#[test]
fn a_port_that_is_taken_is_named_with_its_holder() {
    let port = free_port();
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let ended = Run::start(&["--workers", "2", "--master-port", &port.to_string()]).end();
    let own = std::process::id();
    ended.said(
        3,
        &[
            &format!("error: port {port} of 127.0.0.1 (MASTER_PORT) is taken: process {own} ("),
            "hint: ",
            "--master-port",
        ],
    );
    assert!(!ended.folder.path().join("rank-0").exists(), "no worker was started");
    drop(listener);
    Run::start(&["--workers", "2", "--master-port", &port.to_string()]).end().said(0, &[]);
}

#[test]
fn unauthenticated_peers_are_refused_and_the_secret_is_on_no_command_line() {
    let mut run = Run::start(&["--workers", "2", "--steps", "1000000"]);
    let stdout = run.wait_for("stdout", "step 1\n");
    let address = value(&stdout, "joined at");
    let mut peer = TcpStream::connect(&address).unwrap();
    peer.write_all(b"GET / HTTP/1.0\r\nHost: somebody\r\nAccept: everything\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    peer.set_read_timeout(Some(LIMIT)).unwrap();
    // An answer, if any, contains no more than the refusal.
    let _ = peer.read_to_end(&mut answer);
    let wrong = StoreConfig::new(Secret::random().unwrap(), 2);
    let error = StoreClient::connect(address.as_str(), &wrong, 1, Duration::ZERO).unwrap_err();
    assert!(error.message.contains("secret"), "{error}");
    run.wait_for("stderr", "was refused at the rendezvous");
    for pid in run.workers() {
        let line = read(format!("/proc/{}/cmdline", pid.as_raw_nonzero()).as_ref());
        let is_secret = |word: &str| word.len() >= 64 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert!(line.contains("launch-probe") && !line.split('\0').any(is_secret), "{line}");
    }
    let steps = read(&run.folder.path().join("stdout")).lines().count();
    run.wait_for("stdout", &format!("step {}", steps + 10));
    run.signal(Signal::TERM);
    run.end().said(143, &["note: 127.0.0.1:"]);
}

/// Starts workers as a foreign launcher does; returns their output when all have succeeded.
fn foreign(variables: &[&[(&str, &str)]]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let start = |(at, variables): (usize, &&[(&str, &str)])| {
        let file = File::create(folder.path().join(at.to_string())).unwrap();
        let mut command = probe(&["--logs"]);
        command.arg(folder.path()).envs(variables.iter().copied()).stdout(file.try_clone().unwrap()).stderr(file);
        command.spawn().unwrap()
    };
    let children: Vec<_> = variables.iter().enumerate().map(start).collect();
    let until = Instant::now() + LIMIT;
    for (at, mut child) in children.into_iter().enumerate() {
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > until => {
                    child.kill().unwrap();
                    panic!("rank {at} hangs: {}", read(&folder.path().join(at.to_string())));
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        assert!(status.success(), "rank {at}: {}", read(&folder.path().join(at.to_string())));
    }
    (0..variables.len()).map(|at| read(&folder.path().join(at.to_string()))).collect()
}

#[test]
fn torchrun_like_workers_meet_at_their_port() {
    let port = free_port().to_string();
    let common = [("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
    let worker = |rank| [&common[..], &[("RANK", rank), ("LOCAL_RANK", rank)]].concat();
    let logs = foreign(&[&worker("0"), &worker("1")]);
    assert!(logs.iter().all(|log| log.contains("step 5")), "{logs:?}");
}

/// Rank `rank` of two, as torchrun starts it, alone.
fn torchrun_worker(rank: &str, variables: &[(&str, &str)], more: &[&str]) -> Run {
    let mut env = std::process::Command::new("env");
    env.args(
        [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")].map(|(name, value)| format!("{name}={value}")),
    );
    env.args(variables.iter().map(|(name, value)| format!("{name}={value}"))).arg(PROBE).args(more);
    Run::of(env)
}

/// Returns the local addresses of sockets that listen on a port, as `/proc/net/tcp` writes them.
fn listening(port: &str) -> Vec<String> {
    let port = format!(":{:04X}", port.parse::<u16>().unwrap());
    let table = read("/proc/net/tcp".as_ref());
    let local = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        (fields.get(3) == Some(&"0A")).then(|| fields[1].to_owned())
    };
    table.lines().filter_map(local).filter(|address| address.ends_with(&port)).collect()
}

#[test]
fn a_peer_that_knows_only_address_and_port_is_not_admitted() {
    let port = free_port().to_string();
    let place = [("MASTER_ADDR", "localhost"), ("MASTER_PORT", port.as_str()), ("LOCAL_WORLD_SIZE", "2")];
    let mut first = torchrun_worker("0", &place, &["--notice", "0.2"]);
    // Rank 0 reports again and again that it listens. It can be reached on this machine only.
    first.wait_for("stderr", &format!("waiting for rank 1 at localhost:{port} ("));
    assert_eq!(listening(&port), [format!("0100007F:{:04X}", port.parse::<u16>().unwrap())]);
    // The secret of such jobs was derived from words that anybody knows.
    for guess in [&["env", "localhost", &port][..], &["env", "127.0.0.1", &port], &["localhost", &port]] {
        let guess = StoreConfig::new(Secret::from_words(guess), 2);
        let address = format!("127.0.0.1:{port}");
        let error = StoreClient::connect(address.as_str(), &guess, 1, Duration::ZERO).unwrap_err();
        assert!(error.message.contains("secret"), "{error}");
    }
    first.wait_for("stderr", "was refused at the rendezvous: it does not know this run's secret");
    // The right rank joins: it is this user's.
    let second = torchrun_worker("1", &place, &[]);
    for ended in [first, second].map(Run::end) {
        ended.said(0, &[]);
    }
}

#[test]
fn ranks_of_several_hosts_insist_on_a_secret() {
    let place = [("MASTER_ADDR", "192.0.2.1"), ("MASTER_PORT", "29500"), ("LOCAL_WORLD_SIZE", "1")];
    let worker = |rank: &str, more: &[(&str, &str)]| {
        let variables = [&place[..], &[("LOCAL_RANK", "0")], more].concat();
        torchrun_worker(rank, &variables, &["--join-timeout", "1"]).end()
    };
    for rank in ["0", "1"] {
        worker(rank, &[]).said(
            2,
            &[
                "error: ranks of several hosts need a secret, and TRAINER_SECRET is not set: anybody who reaches 192.0.2.1 \
                 could join",
                "hint: set TRAINER_SECRET to the same words on all hosts",
                "openssl rand -hex 32",
            ],
        );
    }
    worker("0", &[("TRAINER_SECRET", "the right words")])
        .said(3, &["192.0.2.1 (MASTER_ADDR) is not an address of this"]);
}

#[test]
fn a_world_size_that_no_job_has_is_refused_at_once() {
    let place = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500"), ("WORLD_SIZE", "1000000000")];
    torchrun_worker("0", &place, &[]).end().said(
        2,
        &["error: WORLD_SIZE=1000000000 is more ranks than a job may have, 65536", "hint: WORLD_SIZE comes from"],
    );
}

#[test]
fn slurm_jobs_without_a_port_meet_by_their_id_and_do_not_mix() {
    let worker = |job, rank| {
        [
            ("SLURM_JOB_ID", job),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", rank),
            ("SLURM_LOCALID", rank),
            ("SLURM_NTASKS", "2"),
            ("SLURM_JOB_NODELIST", "somewhere[3-4]"),
            ("SLURM_NNODES", "1"),
        ]
    };
    let (first, second) = (["0", "1"].map(|rank| worker("4711", rank)), ["0", "1"].map(|rank| worker("4712", rank)));
    let logs = foreign(&[&first[0], &second[0], &second[1], &first[1]]);
    assert!(logs.iter().all(|log| log.contains("step 5") && log.contains("of 2")), "{logs:?}");
}

#[test]
fn contradictions_end_with_code_2_before_anything_starts() {
    let mut command = probe(&[]);
    command.args(["--workers", "2"]).env("SLURM_PROCID", "1");
    let ended = Run::of(command).end();
    ended.said(2, &["error: SLURM_PROCID=1 is set but SLURM_NTASKS is not", "hint: "]);
}

#[test]
fn a_worker_without_its_launcher_does_not_run() {
    let mut shell = std::process::Command::new("env");
    shell.args(["RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1"]);
    shell.args(["TRAINER_WORKER=1", "LOCAL_WORLD_SIZE=1", "GROUP_RANK=0", PROBE]);
    Run::of(shell).end().said(3, &["error: the launcher (process 1) has ended before its worker began"]);
}
