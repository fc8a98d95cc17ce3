//! A stand-in for the trainer in the launcher's tests. Workers take steps with a barrier in each, and fail on command.
//!
//! `launch-probe --workers N --logs DIR [--do FAULT@RANK]…`. A fault happens in step 3 unless its name says otherwise. The fault
//! `no-folder` is one of a launcher, and its number is that of the node.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use comm::CommError;
use launch::environment::{self, KubeflowNode, Variables, WorkerRole};
use launch::{
    JobFolder, JoinTimeouts, LaunchConfig, LaunchError, RendezvousParameters, Role, Worker, detect, secret, worker,
};
use rustix::process::{Signal, getpid, kill_process};

/// Longest wait for other workers. Only a hang lasts this long, also on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);

#[derive(Debug, Clone, Default)]
struct Arguments {
    workers: usize,
    logs: PathBuf,
    steps: usize,
    step_ms: u64,
    timeout: f64,
    barrier_timeout: f64,
    stop_timeout: f64,
    join_timeout: f64,
    notice: f64,
    restarts: usize,
    port: u16,
    launcher: String,
    nodes: usize,
    node_rank: usize,
    master_addr: String,
    secret_file: Option<PathBuf>,
    faults: Vec<(String, usize)>,
}

fn arguments() -> Arguments {
    let mut found = Arguments {
        workers: 1,
        steps: 6,
        step_ms: 20,
        timeout: LIMIT.as_secs_f64(),
        barrier_timeout: LIMIT.as_secs_f64(),
        stop_timeout: LIMIT.as_secs_f64(),
        join_timeout: LIMIT.as_secs_f64(),
        notice: LIMIT.as_secs_f64(),
        launcher: "auto".into(),
        master_addr: "127.0.0.1".into(),
        ..Arguments::default()
    };
    let mut words = std::env::args().skip(1);
    while let (Some(name), Some(value)) = (words.next(), words.next()) {
        let number = || value.parse::<usize>().expect("a number");
        match name.as_str() {
            "--workers" => found.workers = number(),
            "--logs" => found.logs = value.into(),
            "--steps" => found.steps = number(),
            "--step-ms" => found.step_ms = number() as u64,
            "--timeout" => found.timeout = value.parse().expect("seconds"),
            "--barrier-timeout" => found.barrier_timeout = value.parse().expect("seconds"),
            "--stop-timeout" => found.stop_timeout = value.parse().expect("seconds"),
            "--join-timeout" => found.join_timeout = value.parse().expect("seconds"),
            "--notice" => found.notice = value.parse().expect("seconds"),
            "--max-restarts" => found.restarts = number(),
            "--master-port" => found.port = number() as u16,
            "--master-addr" => found.master_addr = value,
            "--secret-file" => found.secret_file = Some(value.into()),
            "--nnodes" => found.nodes = number(),
            "--node-rank" => found.node_rank = number(),
            "--launcher" => found.launcher = value,
            "--do" => {
                let (fault, rank) = value.split_once('@').expect("FAULT@RANK");
                found.faults.push((fault.into(), rank.parse().expect("a rank")));
            }
            _ => panic!("{name}"),
        }
    }
    found
}

fn main() -> ExitCode {
    launch::explain_panics(|text| {
        text.starts_with("out of memory").then(|| ("the memory is used up".to_owned(), "a smaller batch".to_owned()))
    });
    let arguments = arguments();
    let run = || {
        let mut variables = environment::variables();
        if let Some(path) = &arguments.secret_file {
            secret::read_file(path, &mut variables)?;
        }
        let role = detect(&variables, arguments.launcher.parse()?, None)?;
        match role {
            Role::Worker(ref role) => work(&arguments, role, &variables),
            Role::Launcher | Role::KubeflowLauncher(_) => {
                eprintln!("{role}");
                launch(&arguments, role.kubeflow_node(), &variables)
            }
        }
    };
    run().map_or_else(
        |error: LaunchError| {
            eprintln!("error: {error}");
            ExitCode::from(error.code)
        },
        ExitCode::from,
    )
}

fn launch(arguments: &Arguments, kubeflow: Option<&KubeflowNode>, variables: &Variables) -> Result<u8, LaunchError> {
    let mut job = LaunchConfig::of_this_program(arguments.workers)?;
    job.timeouts.stall = Duration::from_secs_f64(arguments.timeout);
    job.timeouts.join = Duration::from_secs_f64(arguments.join_timeout);
    job.timeouts.stop = Duration::from_secs_f64(arguments.stop_timeout);
    job.timeouts.notice = Duration::from_secs_f64(arguments.notice);
    job.timeouts.grace = Duration::from_secs(1);
    job.max_restarts = arguments.restarts;
    job.address.1 = arguments.port;
    let secret = secret::of_job(variables)?;
    job.rendezvous = match kubeflow {
        Some(node) if node.nodes > 1 => {
            job.workers = node.workers.unwrap_or(arguments.workers);
            let address = node.master_addr.clone();
            Some(RendezvousParameters::new(node.nodes, node.node_rank, address, node.master_port, secret)?)
        }
        _ if arguments.nodes > 1 => {
            let address = arguments.master_addr.clone();
            Some(RendezvousParameters::new(arguments.nodes, arguments.node_rank, address, arguments.port, secret)?)
        }
        _ => None,
    };
    let no_folder = arguments.faults.contains(&("no-folder".to_owned(), arguments.node_rank));
    job.run(|_| match no_folder {
        true => Err(LaunchError::failed("cannot make the folder", "free some space")),
        false => Ok(JobFolder { logs: arguments.logs.clone(), variables: Vec::new() }),
    })
}

fn work(arguments: &Arguments, role: &WorkerRole, variables: &Variables) -> Result<u8, LaunchError> {
    let status = worker::attach(role, variables)?;
    let stop = Arc::new(AtomicUsize::new(0));
    let faults: Vec<&str> =
        arguments.faults.iter().filter(|(_, rank)| *rank == role.rank).map(|(fault, _)| fault.as_str()).collect();
    let caught: &[i32] = if faults.contains(&"no-handlers") { &[] } else { &[1, 2, 3, 15] };
    for &signal in caught {
        signal_hook::flag::register_usize(signal, Arc::clone(&stop), signal as usize).expect("signals can be caught");
    }
    println!("hello from rank {} of {}", role.rank, role.world_size);
    show_place();
    for fault in &faults {
        match *fault {
            "kill-before" => signal_myself(Signal::KILL),
            "stop-before" => signal_myself(Signal::STOP),
            "exit-before" => std::process::exit(9),
            "sleep-before" => {
                println!("asleep");
                std::thread::sleep(Duration::from_secs(1000));
            }
            "child" => drop(Command::new("sleep").arg("1000").spawn().expect("sleep is installed")),
            _ => {}
        }
    }
    let timeouts = JoinTimeouts {
        join: Duration::from_secs_f64(arguments.join_timeout),
        answer: Duration::from_secs_f64(arguments.timeout),
        notice: Duration::from_secs_f64(arguments.notice),
    };
    let worker = Worker::join(role, variables, status, timeouts)?;
    println!("joined at {}:{}", role.master_addr.as_deref().unwrap_or(""), role.master_port.unwrap_or(0));
    if faults.contains(&"sleep-joined") {
        println!("asleep");
        std::thread::sleep(Duration::from_secs(1000));
    }
    worker.status.set_training();
    let code = match steps(arguments, &worker, &faults, &stop) {
        Ok(code) => code,
        Err(error) => {
            worker.status.record_comm_error(&error);
            eprintln!("error: {error}");
            1
        }
    };
    let fails_late = faults.contains(&"exit-late") && worker.attempt == 0;
    worker.leave(LIMIT);
    if fails_late {
        // The test writes the file when the other nodes are done.
        while !arguments.logs.join("go").exists() {
            std::thread::sleep(Duration::from_millis(20));
        }
        return Ok(7);
    }
    Ok(code)
}

fn steps(arguments: &Arguments, worker: &Worker, faults: &[&str], stop: &AtomicUsize) -> Result<u8, CommError> {
    let (status, client, rank) = (&worker.status, &worker.client, worker.role.rank);
    for step in 0..arguments.steps {
        status.set_status(format_args!("step {step}, forward"));
        println!("step {step}");
        std::thread::sleep(Duration::from_millis(arguments.step_ms));
        // Only the step with the faults has the job's limit: the others must not end because the machine is busy.
        let limit = if step == 3 { Duration::from_secs_f64(arguments.barrier_timeout) } else { LIMIT };
        if step == 3 {
            faults.iter().for_each(|fault| fail(fault, worker));
        }
        status.set_status(format_args!("all_reduce #{step}, bucket 0"));
        if step == 3 && faults.contains(&"kill-in") {
            // The signal comes while this rank enters the barrier or waits in it for a late rank.
            std::thread::spawn(|| signal_myself(Signal::KILL));
        }
        client.barrier(&format!("step-{step}"), limit)?;
        // Rank 0's flag decides, as the step's reduction does in the trainer.
        let key = format!("stop-{step}");
        if rank == 0 {
            client.set(&key, &[stop.load(Ordering::Relaxed) as u8])?;
        }
        let signal = client.wait(&key, limit)?.first().copied().unwrap_or(0);
        if signal > 0 && !faults.contains(&"never-stop") {
            std::fs::write(arguments.logs.join(format!("saved-{rank}")), step.to_string())
                .expect("logs can be written");
            return Ok(128 + signal);
        }
    }
    Ok(0)
}

fn fail(fault: &str, worker: &Worker) {
    let first = worker.attempt == 0;
    match fault {
        "kill-between" => signal_myself(Signal::KILL),
        "kill-first-attempt" if first => signal_myself(Signal::KILL),
        "segv" => {
            eprintln!("about to access invalid memory");
            signal_myself(Signal::SEGV);
        }
        "stop" => signal_myself(Signal::STOP),
        "exit" => {
            eprintln!("giving up");
            std::process::exit(7);
        }
        "exit-138" => std::process::exit(138),
        "usage" => std::process::exit(2),
        "panic" => panic!("the loss is {}", f32::NAN),
        "panic-explained" => panic!("out of memory\nCaused by:\n  a library"),
        "panic-thread" => {
            let thread = std::thread::Builder::new().name("loader".into()).spawn(|| panic!("no more images"));
            thread.expect("threads start").join().expect("the loader ends well");
        }
        "error" | "error-without-logs" => {
            if fault == "error-without-logs" {
                let report = std::env::var_os(worker::FAILURE_FILE).expect("the launcher names the file");
                let logs = Path::new(&report).parent().expect("the file is in a folder");
                std::fs::remove_dir_all(logs).expect("the logs can be removed");
            }
            worker.status.record_error("cannot write checkpoint: disk full", "free some space", false);
            std::process::exit(1);
        }
        // Ends only by SIGKILL.
        "hang" => loop {
            std::thread::sleep(Duration::from_secs(1));
        },
        _ => {}
    }
}

fn signal_myself(signal: Signal) {
    // Rust's handler of SIGSEGV catches the first signal and restores the default action for the second.
    loop {
        kill_process(getpid(), signal).expect("a process may signal itself");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Prints what tests check about this process.
fn show_place() {
    use std::io::IsTerminal;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let cores = status.lines().find(|line| line.starts_with("Cpus_allowed_list")).unwrap_or_default();
    println!("cores {}", cores.split_whitespace().last().unwrap_or_default());
    for name in ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "RAYON_NUM_THREADS"] {
        println!("{name}={}", std::env::var(name).unwrap_or_default());
    }
    let width = rustix::termios::tcgetwinsize(rustix::stdio::stderr()).map_or(0, |size| size.ws_col);
    eprintln!("terminal {} {width}", std::io::stderr().is_terminal());
    let group = rustix::process::getpgrp() == getpid();
    let stdin = std::fs::read_link(Path::new("/proc/self/fd/0")).unwrap_or_default();
    println!("own group {group}, stdin {}", stdin.display());
}
