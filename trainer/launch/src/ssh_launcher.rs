//! Starts the launchers of several hosts from one shell, and ends them together, as mpirun and horovodrun do.
//!
//! ```text
//!   trainer -H a:4,b:4 ─▶ SshLauncher::run
//!        │  ssh a, ssh b: trainer launch-agent          (agent.rs; on this host without ssh)
//!        │  ◀── version, build, free port               all hosts are reached and compared before anything starts
//!        └──▶ folder, arguments, secret, node's part    each agent starts its node's launcher (SshNodePlan in TRAINER_NODE)
//! ```
//!
//! The launchers connect as those of `--nnodes` do (`node_rendezvous.rs`), and learn of each other's failures in the same way.
//! The ssh launcher shows their output and forwards signals. To end a launcher, it closes the standard input of the launcher's
//! agent. When the ssh launcher dies, or its shell is closed, the kernel closes this standard input.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::agent::{AgentHello, StartRequest};
use super::error::{LaunchError, Result, USAGE, WORKER_DIED};
use super::hosts::{self, Host, SshNodePlan};
use super::job_secret::random_secret;
use super::remote_host::{self, Event, RemoteHost, pump_err, pump_out};
use super::screen::{LineSink, Screen};
use super::signals::{self, STOPPING, Signals};
use super::{port, ssh};
use comm::Secret;

/// Interval between checks of signals and processes.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Longest wait for all agents, beyond ssh's own limit for a connection.
const GREETING_TIMEOUT: Duration = Duration::from_secs(120);
/// Time for the other nodes to end by themselves after one node has failed. They are notified, or notice the failure.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(20);
/// The same after a signal. All ranks stop after the same step, and rank 0 saves a checkpoint.
const STOPPED_TIMEOUT: Duration = Duration::from_secs(150);
/// Time from closing an agent's standard input to killing ssh. A host that the network does not reach never answers.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);
/// Number of lines of ssh that an error message shows.
const SSH_LINES: usize = 6;

/// The hosts of a job that this process starts.
#[derive(Debug)]
pub struct SshLauncher {
    /// The hosts, with the number of workers on each.
    pub hosts: Vec<Host>,
    /// `--master-addr`: an address of the first host that all hosts can reach. If `None`, the address is determined
    /// automatically.
    pub master_addr: Option<String>,
    /// `--master-port`. If `None`, a free port of the first host is used.
    pub master_port: Option<u16>,
    /// The user's secret. If `None`, a new secret is made.
    pub secret: Option<Secret>,
    /// The flags that start the same hosts again.
    pub flags: Vec<String>,
    /// Whether the lines of nodes other than node 0 get the host's name. Lines of any program already have their rank.
    pub name_lines: bool,
}

impl SshLauncher {
    /// Runs the job and returns its exit code: 128 + n after signal n, else 2 if a node has found wrong input, else the code of the
    /// first node that failed.
    ///
    /// # Errors
    /// A host cannot be reached, the host lacks the program or has another version of it, or the start request cannot be sent.
    pub fn run(&self) -> Result<u8> {
        let screen = Arc::new(Screen::start()?);
        let result = self.run_on(&screen);
        screen.end();
        result
    }

    fn run_on(&self, screen: &Arc<Screen>) -> Result<u8> {
        let mut signals = Signals::install()
            .map_err(|error| LaunchError::failed(format!("cannot catch signals: {error}"), "see `ulimit -a`"))?;
        let own = AgentHello::of_this_program().map_err(|error| {
            LaunchError::failed(format!("cannot read this program's own file: {error}"), "is /proc mounted?")
        })?;
        let program = std::env::current_exe()
            .map_err(|error| LaunchError::failed(format!("cannot find this program: {error}"), "is /proc mounted?"))?;
        let (events, happened) = channel();
        let mut nodes = Vec::with_capacity(self.hosts.len());
        for (index, host) in self.hosts.iter().enumerate() {
            nodes.push(self.start(index, host, &program, screen, &events)?);
        }
        drop(events);
        let greetings = match self.greetings(&mut nodes, &happened, &program, &own, &mut signals)? {
            Ok(greetings) => greetings,
            Err(signal) => {
                screen.say(&format!("stopped by {} before all hosts were reached", signals::name(signal)));
                return Ok(128 + signal as u8);
            }
        };
        // From now on, the output threads write lines to the screen.
        drop(happened);
        self.send_start_requests(&mut nodes, greetings[0].port)?;
        Ok(supervise(&mut nodes, &mut signals, screen))
    }

    /// Starts the agent of a host.
    fn start(
        &self,
        index: usize,
        host: &Host,
        program: &Path,
        screen: &Arc<Screen>,
        events: &Sender<Event>,
    ) -> Result<RemoteHost> {
        let mut command = match is_here(&host.name) {
            true => {
                let mut command = Command::new(program);
                command.arg(super::helper::AGENT);
                command
            }
            false => ssh::agent_on(&host.name, program),
        };
        // Run outside of the terminal's foreground group: Ctrl-C must reach only this process, which forwards it. `LC_ALL=C`
        // keeps ssh's messages in English, so that the hints recognise them.
        command.process_group(0).env("LC_ALL", "C").env_remove(hosts::NODE).env_remove(super::secret::VARIABLE);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let cannot = |error: std::io::Error| {
            let name = command_name(&host.name);
            LaunchError::usage(
                format!("{}: cannot start {name}: {error}", host.name),
                "install an ssh client (Debian: openssh-client), or start the launchers yourself: --nnodes, --node-rank",
            )
        };
        let mut child = command.spawn().map_err(cannot)?;
        let (input, out, err) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let prefix = (self.name_lines && index > 0).then(|| format!("[{}] ", host.name));
        let mut pumps = Vec::new();
        if let (Some(out), Some(err)) = (out, err) {
            pumps.push(pump_out(index, out, LineSink::stdout(screen, prefix.clone()), events.clone())?);
            pumps.push(pump_err(index, err, LineSink::stderr(screen, prefix), events.clone())?);
        }
        Ok(RemoteHost {
            name: host.name.clone(),
            child,
            input,
            pumps,
            status: None,
            ssh_lines: Vec::new(),
            start_sent: false,
        })
    }

    /// Waits for the first lines of all agents, and compares the programs. `Err` inside has a signal that ended the wait.
    fn greetings(
        &self,
        nodes: &mut [RemoteHost],
        happened: &Receiver<Event>,
        program: &Path,
        own: &AgentHello,
        signals: &mut Signals,
    ) -> Result<std::result::Result<Vec<AgentHello>, i32>> {
        let mut greetings: Vec<Option<AgentHello>> = vec![None; nodes.len()];
        let until = Instant::now() + GREETING_TIMEOUT;
        while greetings.iter().any(Option::is_none) {
            if let Some(signal) = signals.take().into_iter().find(|signal| STOPPING.contains(signal)) {
                return Ok(Err(signal));
            }
            match happened.recv_timeout(POLL_INTERVAL) {
                Ok(Event::PreambleLine(node, line)) => {
                    nodes[node].ssh_lines.push(line);
                    let extra = nodes[node].ssh_lines.len().saturating_sub(SSH_LINES);
                    nodes[node].ssh_lines.drain(..extra);
                }
                Ok(Event::AgentHello(node, Some(text))) => {
                    greetings[node] = Some(AgentHello::parse(&text, &nodes[node].name, own)?);
                }
                Ok(Event::AgentHello(node, None)) => {
                    let node = &mut nodes[node];
                    // ssh ends after its output. It does not end if a login shell has printed too much before the agent's line.
                    node.close(CLOSE_TIMEOUT);
                    let late = happened.try_iter().filter_map(|event| match event {
                        Event::PreambleLine(_, line) => Some(line),
                        Event::AgentHello(..) => None,
                    });
                    node.ssh_lines.extend(late);
                    return Err(ssh::failure(&node.name, program, node.status.and_then(|s| s.code()), &node.ssh_lines));
                }
                Err(_) if Instant::now() >= until => {
                    let missing = greetings.iter().position(Option::is_none).unwrap_or_default();
                    return Err(LaunchError::usage(
                        format!("{}: no answer within {:.0} s", nodes[missing].name, GREETING_TIMEOUT.as_secs_f64()),
                        "the host was reached, but the program did not answer: does its login shell wait for something?",
                    ));
                }
                Err(_) => {}
            }
        }
        Ok(Ok(greetings.into_iter().flatten().collect()))
    }

    /// Sends each agent the start request with its node's part of the job.
    fn send_start_requests(&self, nodes: &mut [RemoteHost], free_port: u16) -> Result<()> {
        let directory = std::env::current_dir().map_err(|error| {
            LaunchError::failed(format!("cannot tell the working folder: {error}"), "change to a folder that exists")
        })?;
        let arguments = ssh::own_arguments()?;
        let secret = self.secret.clone().map_or_else(random_secret, Ok)?.to_hex();
        let (master_addr, master_port) = (self.master_addr()?, self.master_port.unwrap_or(free_port));
        tracing::info!(place = port::host_port(&master_addr, master_port), "rendezvous of the launchers of all hosts");
        for (node_rank, (node, host)) in nodes.iter_mut().zip(&self.hosts).enumerate() {
            let (nodes, workers, flags) = (self.hosts.len(), host.slots, self.flags.clone());
            let plan = SshNodePlan { nodes, node_rank, workers, master_addr: master_addr.clone(), master_port, flags };
            let (directory, arguments) = (directory.clone(), arguments.clone());
            node.send_start_request(&StartRequest { directory, arguments, secret: secret.clone(), plan })?;
        }
        Ok(())
    }

    /// Returns the address of the first host.
    fn master_addr(&self) -> Result<String> {
        match (&self.master_addr, self.hosts.as_slice()) {
            (Some(address), _) => Ok(address.clone()),
            (None, [_]) | (None, []) => Ok("127.0.0.1".to_owned()),
            (None, [first, second, ..]) if is_here(&first.name) => ssh::own_address(&second.name),
            (None, [first, ..]) => Ok(ssh::host_name(&first.name)),
        }
    }
}

/// Watches the nodes until all have ended, and returns the job's exit code.
fn supervise(nodes: &mut [RemoteHost], signals: &mut Signals, screen: &Screen) -> u8 {
    let mut shutdown = Shutdown::default();
    while nodes.iter().any(RemoteHost::is_alive) {
        std::thread::sleep(POLL_INTERVAL);
        for signal in signals.take().into_iter().filter(|signal| STOPPING.contains(signal)) {
            shutdown.forward_signal(signal, nodes);
        }
        let ended: Vec<usize> = (0..nodes.len()).filter(|index| nodes[*index].reap()).collect();
        remote_host::drain(ended.iter().map(|index| &nodes[*index]));
        for index in ended {
            shutdown.node_has_ended(index, &nodes[index], screen);
        }
        shutdown.end_overdue(nodes, screen);
    }
    shutdown.exit_code()
}

/// The end of a job: its cause, and the time at which launchers that still run are ended.
#[derive(Default)]
struct Shutdown {
    /// Exit code of the first node that failed, or of one that has found wrong input.
    first_failure: Option<u8>,
    /// The first signal.
    stopped_by: Option<i32>,
    /// When to close the standard input of all agents, which ends their launchers. `None` while nothing has ended the job.
    close_at: Option<Instant>,
    /// Whether the standard input of all agents is closed.
    closed: bool,
}

impl Shutdown {
    /// Ends the launchers after `limit` at the latest.
    fn close_within(&mut self, limit: Duration) {
        let at = Instant::now() + limit;
        self.close_at = Some(self.close_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// Forwards a signal to all launchers.
    fn forward_signal(&mut self, signal: i32, nodes: &mut [RemoteHost]) {
        if self.stopped_by.is_some() {
            if !signals::ends_at_once(signal) {
                return;
            }
            self.close_within(OTHERS_TIMEOUT);
        }
        self.stopped_by = self.stopped_by.or(Some(signal));
        nodes.iter_mut().for_each(|node| _ = node.send(&format!("signal {signal}")));
    }

    /// Limits the time of the other nodes after the end of node 0, or of a node that failed.
    fn node_has_ended(&mut self, index: usize, node: &RemoteHost, screen: &Screen) {
        let limit = if self.stopped_by.is_some() { STOPPED_TIMEOUT } else { OTHERS_TIMEOUT };
        match node.code() {
            // Node 0 has waited for the others, so they end now.
            Some(0) if index == 0 => self.close_within(limit),
            Some(code @ 1..) if self.first_failure.is_none() => {
                self.first_failure = Some(code);
                self.close_within(limit);
                // 255 is ssh's own exit code: the connection has ended, or the agent has died.
                let is_lost = code == u8::MAX || node.status.is_some_and(|status| status.signal().is_some());
                if is_lost && self.stopped_by.is_none() {
                    screen.say(&format!(
                        "error: {}: the connection is gone, or its agent was killed\n  hint: see the messages above; the \
                         other hosts end too",
                        node.name
                    ));
                    self.first_failure = Some(WORKER_DIED);
                }
            }
            // The other nodes fail because of it, and may end first.
            Some(USAGE) => self.first_failure = Some(USAGE),
            _ => {}
        }
    }

    /// Ends the launchers whose time is over, and then kills the ssh processes of hosts that do not answer.
    fn end_overdue(&mut self, nodes: &mut [RemoteHost], screen: &Screen) {
        let Some(at) = self.close_at else { return };
        if Instant::now() >= at && !self.closed {
            self.closed = true;
            nodes.iter_mut().for_each(|node| node.input = None);
        }
        if Instant::now() >= at + CLOSE_TIMEOUT {
            for node in nodes.iter_mut().filter(|node| node.is_alive()) {
                screen.say(&format!("error: {} does not answer: its ssh is ended", node.name));
                let _ = node.child.kill();
            }
        }
    }

    /// Returns the exit code of the job.
    fn exit_code(&self) -> u8 {
        match (self.stopped_by, self.first_failure) {
            (Some(signal), Some(_)) => 128 + signal as u8,
            (_, failure) => failure.unwrap_or(0),
        }
    }
}

/// Returns whether `host` is this machine, where no ssh is needed.
fn is_here(host: &str) -> bool {
    let own = rustix::system::uname();
    super::environment::is_loopback(host) || own.nodename().to_str() == Ok(host)
}

fn command_name(host: &str) -> String {
    if is_here(host) {
        "this program".to_owned()
    } else {
        std::env::var(ssh::VARIABLE).unwrap_or_else(|_| "ssh".into())
    }
}

#[cfg(test)]
mod tests {
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn wrong_input_on_any_node_decides_the_exit_code() {
        for (codes, expected) in [([3, 2], 2), ([2, 3], 2), ([3, 1], 3), ([1, 3], 1), ([0, 0], 0)] {
            let mut shutdown = Shutdown::default();
            for (index, code) in codes.into_iter().enumerate() {
                let node = RemoteHost {
                    name: "a".into(),
                    child: Command::new("true").spawn().unwrap(),
                    input: None,
                    pumps: Vec::new(),
                    status: Some(ExitStatus::from_raw(code << 8)),
                    ssh_lines: Vec::new(),
                    start_sent: false,
                };
                shutdown.node_has_ended(index, &node, &Screen::default());
            }
            assert_eq!(shutdown.exit_code(), expected, "{codes:?}");
        }
    }
}
