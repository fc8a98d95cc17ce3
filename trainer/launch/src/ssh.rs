//! Reaches other hosts through the system's ssh client, with the user's ssh configuration.

use std::ffi::OsString;
use std::net::{ToSocketAddrs, UdpSocket};
use std::path::Path;
use std::process::{Command, Stdio};

use super::error::{LaunchError, Result};
use super::helper::AGENT;
use super::shell::quoted;

/// The variable that replaces `ssh`: a program and its first arguments, separated by spaces (`ssh -F file`).
pub const VARIABLE: &str = "TRAINER_SSH";
/// Exit code of ssh for its own failures.
const FAILED: i32 = 255;
/// Seconds until a host counts as unreachable.
const CONNECT_TIMEOUT: u32 = 10;

/// Returns ssh's command line up to the options.
fn ssh() -> Command {
    let words = std::env::var_os(VARIABLE).unwrap_or_else(|| "ssh".into());
    let words = words.to_string_lossy().into_owned();
    let mut words = words.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or("ssh"));
    command.args(words);
    command
}

/// Returns the command that runs the agent on `host`, in that host's login shell. ssh never asks for a password or about a key,
/// and opens no terminal.
pub(super) fn agent_on(host: &str, program: &Path) -> Command {
    let mut command = ssh();
    command.args(["-T", "-o", "BatchMode=yes", "-o", &format!("ConnectTimeout={CONNECT_TIMEOUT}")]);
    command.args(["--", host]).arg(format!("{} {AGENT}", quoted(&program.to_string_lossy())));
    command
}

/// Returns the name that ssh connects to for `host`. ssh's configuration may map `host` to another name (`HostName`).
pub(super) fn host_name(host: &str) -> String {
    let plain = host.rsplit('@').next().unwrap_or(host).to_owned();
    let answer = ssh().args(["-G", "--", host]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let text = answer.map(|answer| String::from_utf8_lossy(&answer.stdout).into_owned()).unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("hostname ")).map_or(plain, |name| name.trim().to_owned())
}

/// Returns the address of this machine from which it connects to `host`.
///
/// # Errors
/// The name cannot be resolved, or there is no route to the host.
pub(super) fn own_address(host: &str) -> Result<String> {
    let name = host_name(host);
    let find = || {
        let to = (name.as_str(), 9).to_socket_addrs()?.next().ok_or_else(|| std::io::Error::other("no address"))?;
        let any = if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
        // Connecting a datagram socket sends nothing
        let socket = UdpSocket::bind(any)?;
        socket.connect(to)?;
        socket.local_addr()
    };
    find().map(|address| address.ip().to_string()).map_err(|error| {
        LaunchError::usage(
            format!("cannot tell how {host} reaches this machine: {error}"),
            "say it: --master-addr ADDRESS, an address of the first host that all hosts reach",
        )
    })
}

/// Returns the error for an agent that did not start on `host`. `code` is ssh's exit code, `ssh_lines` are ssh's last lines.
pub(super) fn failure(host: &str, program: &Path, code: Option<i32>, ssh_lines: &[String]) -> LaunchError {
    let text = ssh_lines.join("\n  ");
    let program = program.display();
    let with_lines = |cause: String| if text.is_empty() { cause } else { format!("{cause}:\n  {text}") };
    let (cause, hint) = match code {
        Some(FAILED) => ("ssh cannot connect".to_owned(), ssh_hint(host, &text)),
        Some(127) => (
            format!("there is no {program}"),
            "all hosts need this program at the same path: use a shared file system, or copy it".to_owned(),
        ),
        Some(126) => (format!("{program} cannot be executed"), "is it a program for that machine? chmod +x".to_owned()),
        _ => (
            format!("{program} did not answer as this program does"),
            "another version of this program, or another program, has that path: copy this one there".to_owned(),
        ),
    };
    LaunchError::usage(with_lines(format!("{host}: {cause}")), hint)
}

/// Returns the hint for a message of ssh.
fn ssh_hint(host: &str, text: &str) -> String {
    let try_it = format!("`ssh -o BatchMode=yes {host} true` must work without a question");
    let cause = match text {
        _ if text.contains("IDENTIFICATION HAS CHANGED") => {
            "the host has another key than before: if that is right, `ssh-keygen -R HOST` forgets the old one"
        }
        _ if text.contains("Host key verification failed") => {
            "the host's key is unknown: connect once by hand, compare the fingerprint, and accept it"
        }
        _ if text.contains("Permission denied") => {
            "log in by key: `ssh-copy-id HOST`, and an agent for a key with a passphrase"
        }
        _ if text.contains("Could not resolve") => {
            "is the name right? ssh's configuration may define it (Host, HostName)"
        }
        _ => "is the host up, does sshd run there, and may this machine reach it?",
    };
    format!("{}; {try_it}", cause.replace("HOST", host))
}

/// Returns this process's arguments for the launchers of other hosts.
///
/// # Errors
/// An argument is not UTF-8.
pub(super) fn own_arguments() -> Result<Vec<String>> {
    let texts = std::env::args_os().skip(1).map(OsString::into_string);
    texts.collect::<std::result::Result<_, _>>().map_err(|argument| {
        LaunchError::usage(
            format!("{}: an argument for other hosts must be UTF-8", argument.to_string_lossy()),
            "rename the file",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ssh_never_asks_and_the_path_is_one_word() {
        let command = agent_on("me@b", Path::new("/it's here/trainer"));
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        let want = [
            "-T",
            "-o",
            "BatchMode=yes",
            "-o",
            "ConnectTimeout=10",
            "--",
            "me@b",
            r"'/it'\''s here/trainer' launch-agent",
        ];
        assert_eq!(words, want);
    }

    #[test]
    fn failures_of_ssh_have_their_own_hints() {
        for (code, said, cause, hint) in [
            (255, "me@b: Permission denied (publickey).", "b: ssh cannot connect:\n  me@b", "ssh-copy-id b"),
            (255, "Host key verification failed.", "b: ssh cannot connect", "the host's key is unknown"),
            (255, "@ REMOTE HOST IDENTIFICATION HAS CHANGED!", "b: ssh", "ssh-keygen -R b"),
            (255, "ssh: Could not resolve hostname b", "b: ssh", "is the name right"),
            (255, "ssh: connect to host b port 22: No route to host", "b: ssh", "is the host up"),
            (127, "sh: 1: /x/trainer: not found", "b: there is no /x/trainer", "same path"),
            (126, "", "b: /x/trainer cannot be executed", "chmod"),
            (2, "error: unrecognized subcommand", "b: /x/trainer did not answer", "another version"),
        ] {
            let error = failure("b", Path::new("/x/trainer"), Some(code), &[said.to_owned()]);
            assert!(
                error.code == 2 && error.message.starts_with(cause) && error.hint.contains(hint),
                "{said}: {error}"
            );
        }
    }

    #[test]
    fn a_host_is_reached_from_the_loopback() {
        assert_eq!(own_address("127.0.0.1").unwrap(), "127.0.0.1");
    }
}
