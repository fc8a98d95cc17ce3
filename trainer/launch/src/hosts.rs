//! The hosts of a job that one command starts: `-H host1:4,host2:4`, or a host file, in the formats of mpirun and horovodrun.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::environment::Variables;
use super::error::{LaunchError, Result};
use super::rendezvous_parameters::MOST_MEMBERS;

/// The variable by which `ssh_launcher.rs` passes a node's part of the job to the node's launcher. The value is a [`SshNodePlan`].
pub const NODE: &str = "TRAINER_NODE";
/// Maximum size of a host file in bytes. A larger file was named by mistake.
const LARGEST_FILE: u64 = 1 << 20;
/// Hint about the format of hosts.
const HINT: &str = "-H host1:4,host2:4 names two hosts with 4 slots each; a file has a line `host1 slots=4` or `host1:4` for each host";

/// A host and its number of slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The argument for ssh: a name, an address, or `user@name`.
    pub name: String,
    /// Number of ranks.
    pub slots: usize,
}

/// A node's part of a job that `-H` starts over ssh.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshNodePlan {
    /// Number of nodes.
    pub nodes: usize,
    /// Index of this node.
    pub node_rank: usize,
    /// Number of workers on this node.
    pub workers: usize,
    /// Host of node 0.
    pub master_addr: String,
    /// Port on which node 0's launcher listens.
    pub master_port: u16,
    /// The flags that start the same hosts again.
    pub flags: Vec<String>,
}

impl SshNodePlan {
    /// Reads [`NODE`]. Returns `None` if the variable is not set.
    ///
    /// # Errors
    /// The value is not what this program sets.
    pub fn of(variables: &Variables) -> Result<Option<Self>> {
        let Some(text) = variables.get(NODE) else { return Ok(None) };
        let plan = serde_json::from_str(text).map_err(|error| {
            LaunchError::usage(format!("{NODE} is not a node's part of a job: {error}"), "only -H sets it: unset it")
        })?;
        Ok(Some(plan))
    }
}

/// Reads the value of `-H`: `host:slots`, separated by commas. A host without a number has one slot.
///
/// # Errors
/// A name or a number is malformed, a host is named twice, or there is none.
pub fn parse_list(text: &str) -> Result<Vec<Host>> {
    let hosts = text.split(',').map(|word| parse_word(word.trim()).map_err(|cause| refused("-H", &cause)));
    checked("-H", hosts.collect::<Result<Vec<Host>>>()?)
}

/// Reads the hosts of an LSF job from `LSB_MCPU_HOSTS`, which has each host's name and its number of slots: `a 4 b 4`.
///
/// # Errors
/// The variable is not set or malformed.
pub fn of_lsf(variables: &Variables) -> Result<Vec<Host>> {
    const PLACE: &str = "LSB_MCPU_HOSTS";
    let Some(text) = variables.get(PLACE).filter(|text| !text.trim().is_empty()) else {
        return Err(LaunchError::usage(
            format!("-H lsf: {PLACE} is not set"),
            "LSF sets it in a job that bsub starts; elsewhere name the hosts: -H host1:4,host2:4",
        ));
    };
    let malformed = |cause: String| LaunchError::usage(format!("{PLACE}: {cause}"), "LSF sets it: `host1 4 host2 4`");
    let words: Vec<&str> = text.split_whitespace().collect();
    let hosts = words.chunks(2).map(|pair| match pair {
        [name, number] => parse_host(name, number),
        _ => Err(format!("`{}` has no number of slots", pair[0])),
    });
    checked(PLACE, hosts.collect::<std::result::Result<_, _>>().map_err(malformed)?)
}

/// Reads a file of hosts: one on each line, as `host slots=4` (Open MPI) or `host:4` (Horovod). `#` begins a comment.
///
/// # Errors
/// The file cannot be read, a line is malformed, a host is named twice, or there is none.
pub fn read_file(path: &Path) -> Result<Vec<Host>> {
    let place = path.display().to_string();
    let unreadable = |error: std::io::Error| refused(&place, &format!("cannot read the hosts: {error}"));
    let bytes = folder::read_regular(path, LARGEST_FILE).map_err(unreadable)?;
    let text = String::from_utf8(bytes).map_err(|_| refused(&place, "not text (UTF-8)"))?;
    let mut hosts = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if !line.is_empty() {
            let host = parse_line(line).map_err(|cause| refused(&format!("{place}:{}", number + 1), &cause))?;
            hosts.push(host);
        }
    }
    checked(&place, hosts)
}

fn refused(place: &str, cause: &str) -> LaunchError {
    LaunchError::usage(format!("{place}: {cause}"), HINT)
}

fn parse_line(line: &str) -> std::result::Result<Host, String> {
    let mut words = line.split_whitespace();
    let mut host = parse_word(words.next().unwrap_or_default())?;
    for word in words {
        match word.split_once('=') {
            Some(("slots", number)) => host.slots = slots(&host.name, number)?,
            _ => return Err(format!("`{word}` after a host: only slots=N is known")),
        }
    }
    Ok(host)
}

/// Reads `host`, `host:4` or `[::1]:4`.
fn parse_word(word: &str) -> std::result::Result<Host, String> {
    let (name, number) = match word.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) => (address, rest.strip_prefix(':').or(rest.is_empty().then_some("1"))),
        None if word.matches(':').count() > 1 => {
            return Err(format!("`{word}`: an IPv6 address is written in brackets, [::1]:4"));
        }
        None => word.split_once(':').map_or((word, Some("1")), |(name, number)| (name, Some(number))),
    };
    let number = number.ok_or_else(|| format!("`{word}`: only :SLOTS may follow the brackets"))?;
    if name.is_empty() {
        return Err(format!("`{word}` has no host name"));
    }
    parse_host(name, number)
}

/// Checks a host's name and number of slots.
fn parse_host(name: &str, number: &str) -> std::result::Result<Host, String> {
    let known = |symbol: char| symbol.is_ascii_alphanumeric() || "._-@:%".contains(symbol);
    // ssh would parse a leading `-` as an option.
    if name.starts_with('-') || !name.chars().all(known) {
        return Err(format!("`{name}` is not a host name"));
    }
    Ok(Host { name: name.to_owned(), slots: slots(name, number)? })
}

fn slots(host: &str, number: &str) -> std::result::Result<usize, String> {
    match number.parse() {
        Ok(0) => Err(format!("{host} has 0 slots: nothing would run there")),
        Ok(slots) if slots <= MOST_MEMBERS => Ok(slots),
        _ => Err(format!("{host}: `{number}` is not a number of slots, from 1 to {MOST_MEMBERS}")),
    }
}

fn checked(place: &str, hosts: Vec<Host>) -> Result<Vec<Host>> {
    if hosts.is_empty() {
        return Err(refused(place, "no host"));
    }
    let slots_of = |name: &str| hosts.iter().filter(|host| host.name == name).map(|host| host.slots).sum::<usize>();
    let mut seen = BTreeSet::new();
    match hosts.iter().find(|host| !seen.insert(&host.name)) {
        Some(twice) => Err(LaunchError::usage(
            format!("{place}: {} is named twice", twice.name),
            format!("name it once, with all its slots: {}:{}", twice.name, slots_of(&twice.name)),
        )),
        None => Ok(hosts),
    }
}

/// Fills the hosts' slots in order with `ranks` ranks, by default one per slot. Returns the hosts that get ranks, with their
/// numbers of ranks. `flag` is the name of the flag that sets `ranks`.
///
/// # Errors
/// There are more ranks than slots, or none.
pub fn fill(hosts: &[Host], ranks: Option<usize>, flag: &str) -> Result<Vec<Host>> {
    let room: usize = hosts.iter().map(|host| host.slots).sum();
    let mut left = ranks.unwrap_or(room);
    if left == 0 {
        return Err(LaunchError::usage(format!("{flag} 0: nothing would run"), "ask for at least one rank"));
    }
    if left > room {
        return Err(LaunchError::usage(
            format!("{flag} {left} are more ranks than the hosts' {room} slots"),
            format!("give the hosts more slots, or say {flag} {room}; without {flag} each slot gets a rank"),
        ));
    }
    let filled = hosts.iter().map(|host| {
        let slots = host.slots.min(left);
        left -= slots;
        Host { slots, ..host.clone() }
    });
    Ok(filled.filter(|host| host.slots > 0).collect())
}

/// Formats hosts as a value of `-H`.
pub fn list(hosts: &[Host]) -> String {
    let word = |host: &Host| match host.name.contains(':') {
        true => format!("[{}]:{}", host.name, host.slots),
        false => format!("{}:{}", host.name, host.slots),
    };
    hosts.iter().map(word).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(of: &[(&str, usize)]) -> Vec<Host> {
        of.iter().map(|(name, slots)| Host { name: (*name).to_owned(), slots: *slots }).collect()
    }

    fn file(content: impl AsRef<[u8]>) -> Result<Vec<Host>> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("hosts"), content).unwrap();
        read_file(&folder.path().join("hosts"))
    }

    #[test]
    fn lists_and_files_are_read() {
        let want = hosts(&[("a", 4), ("me@b.example", 1), ("fe80::1%eth0", 2)]);
        assert_eq!(parse_list("a:4, me@b.example,[fe80::1%eth0]:2").unwrap(), want);
        assert_eq!(parse_list(&list(&want)).unwrap(), want);
        assert_eq!(file("# hosts\na slots=4\n\n me@b.example # one\n[fe80::1%eth0]:2\n").unwrap(), want);
        assert_eq!(file("a:4\r\nb:2 \n").unwrap(), hosts(&[("a", 4), ("b", 2)]));
    }

    #[test]
    fn mistakes_name_place_and_cause() {
        for (text, cause) in [
            ("", "-H: `` has no host name"),
            ("a:4,", "-H: `` has no host name"),
            ("a:0", "-H: a has 0 slots: nothing would run there"),
            ("a:four", "-H: a: `four` is not a number of slots, from 1 to 65536"),
            ("a:-1", "-H: a: `-1` is not a number"),
            ("a:70000", "-H: a: `70000` is not a number of slots"),
            (":4", "-H: `:4` has no host name"),
            ("a:1,a:2", "-H: a is named twice"),
            ("-oProxyCommand=x:1", "-H: `-oProxyCommand=x` is not a host name"),
            ("a b:1", "-H: `a b` is not a host name"),
            ("::1:4", "-H: `::1:4`: an IPv6 address is written in brackets, [::1]:4"),
            ("[::1]4", "-H: `[::1]4`: only :SLOTS may follow"),
        ] {
            let error = parse_list(text).unwrap_err();
            assert!(error.code == 2 && error.message.starts_with(cause) && !error.hint.is_empty(), "{text}: {error}");
        }
        assert_eq!(parse_list("a:4,b:1,a:2").unwrap_err().hint, "name it once, with all its slots: a:6");
        for (content, cause) in [
            (&b""[..], "hosts: no host"),
            (b"# none\n", "hosts: no host"),
            (b"a slots=4\nb slots=x\n", "hosts:2: b: `x` is not a number of slots"),
            (b"a max_slots=4\n", "hosts:1: `max_slots=4` after a host: only slots=N is known"),
            (b"a 4\n", "hosts:1: `4` after a host"),
            (b"a\na\n", "hosts: a is named twice"),
            (b"a\xff\n", "hosts: not text (UTF-8)"),
            (&[b'a'; (1 << 20) + 1], "hosts: cannot read the hosts: it has 1048577 bytes"),
        ] {
            let error = file(content).unwrap_err();
            assert!(error.code == 2 && error.message.contains(cause), "{error}");
        }
        let refusal = |path: &Path| read_file(path).unwrap_err().message;
        assert_eq!(refusal(Path::new("/")), "/: cannot read the hosts: it is a folder, not a file");
        assert!(refusal(Path::new("/none")).contains("No such file"));
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(refusal(&fifo).ends_with("cannot read the hosts: it is a pipe, not a file"));
    }

    #[test]
    fn the_hosts_of_an_lsf_job_come_from_its_variable() {
        let read = |text: &str| of_lsf(&Variables::from([("LSB_MCPU_HOSTS".to_owned(), text.to_owned())]));
        assert_eq!(read("a 4 b.example 2 ").unwrap(), hosts(&[("a", 4), ("b.example", 2)]));
        for (text, cause) in [
            (" ", "-H lsf: LSB_MCPU_HOSTS is not set"),
            ("a 4 b", "LSB_MCPU_HOSTS: `b` has no number of slots"),
            ("a b", "LSB_MCPU_HOSTS: a: `b` is not a number of slots"),
            ("a 1 a 1", "LSB_MCPU_HOSTS: a is named twice"),
            ("-x 1", "LSB_MCPU_HOSTS: `-x` is not a host name"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.code == 2 && error.message.starts_with(cause) && !error.hint.is_empty(), "{text}: {error}");
        }
        assert_eq!(of_lsf(&Variables::new()).unwrap_err().message, "-H lsf: LSB_MCPU_HOSTS is not set");
    }

    #[test]
    fn slots_are_filled_in_order() {
        let all = hosts(&[("a", 4), ("b", 2), ("c", 1)]);
        assert_eq!(fill(&all, None, "--cpus").unwrap(), all);
        assert_eq!(fill(&all, Some(5), "--cpus").unwrap(), hosts(&[("a", 4), ("b", 1)]));
        let error = fill(&all, Some(8), "--cpus").unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (2, "--cpus 8 are more ranks than the hosts' 7 slots"));
        assert_eq!(fill(&all, Some(0), "--cpus").unwrap_err().code, 2);
    }

    #[test]
    fn a_nodes_part_of_the_job_comes_from_the_environment() {
        assert_eq!(SshNodePlan::of(&Variables::new()).unwrap(), None);
        let broken = Variables::from([(NODE.to_owned(), "1".to_owned())]);
        assert_eq!(SshNodePlan::of(&broken).unwrap_err().code, 2);
    }
}
