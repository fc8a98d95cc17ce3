//! ssh servers in network namespaces, for tests of jobs on several hosts. Included with `#[path]` after `shared.rs` and
//! `namespaces.rs`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::namespaces::{ADDRESSES, Namespaces, namespaces};
use super::shared::skip_or_fail;

/// Port of the servers. Each namespace has its own ports.
const PORT: u16 = 2200;
const SSHD: &str = "/usr/sbin/sshd";

/// Two hosts with an ssh server each, `node1` and `node2`, and the configuration of a client that reaches them.
pub struct SshHosts {
    pub net: Namespaces,
    pub folder: tempfile::TempDir,
    servers: Vec<Child>,
}

impl SshHosts {
    /// Starts the servers, or skips the test.
    #[track_caller]
    pub fn start(tag: &str) -> Option<Self> {
        if let Err(error) =
            Command::new("ssh-keygen").arg("-?").stderr(Stdio::null()).status().and_then(|_| fs::metadata(SSHD))
        {
            skip_or_fail("sshd", error);
            return None;
        }
        let net = namespaces(tag)?;
        let folder = tempfile::tempdir().unwrap();
        let mut hosts = Self { net, folder, servers: Vec::new() };
        for key in ["host_key", "user_key", "wrong_key", "missing_key", "version_key"] {
            let status =
                Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(hosts.path(key)).status();
            assert!(status.unwrap().success());
        }
        let public = |key: &str| fs::read_to_string(hosts.path(&format!("{key}.pub"))).unwrap();
        let other = r#"trainer-agent {\"version\": \"0.0.9\", \"build\": \"0\", \"port\": 1}"#;
        let authorized = format!(
            "{}command=\"/no/such/trainer launch-agent\" {}command=\"echo '{other}'\" {}",
            public("user_key"),
            public("missing_key"),
            public("version_key")
        );
        fs::write(hosts.path("authorized_keys"), authorized).unwrap();
        let known = ADDRESSES.map(|address| format!("[{address}]:{PORT} {}", public("host_key")));
        fs::write(hosts.path("known_hosts"), known.concat()).unwrap();
        fs::write(hosts.path("no_known_hosts"), "").unwrap();
        fs::write(hosts.path("ssh_config"), hosts.client()).unwrap();
        // The server's folder for its unprivileged part
        fs::create_dir_all("/run/sshd").unwrap();
        for node in 0..2 {
            hosts.serve(node);
        }
        Some(hosts)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the value of `TRAINER_SSH`.
    pub fn ssh(&self) -> String {
        format!("ssh -F {}", self.path("ssh_config").display())
    }

    fn client(&self) -> String {
        let path = |name: &str| self.path(name).display().to_string();
        // ssh uses the first value of a setting, but tries all keys
        format!(
            "Host wrong-key\n  IdentityFile {}\nHost unknown-key\n  UserKnownHostsFile {}\nHost refused\n  Port 1\n\
             Host missing\n  IdentityFile {}\nHost version\n  IdentityFile {}\n\
             Host node1\n  HostName {}\nHost node2 wrong-key unknown-key refused missing version\n  HostName {}\n\
             Host node1 node2 unknown-key refused {} {}\n  IdentityFile {}\n\
             Host *\n  User root\n  Port {PORT}\n  IdentitiesOnly yes\n  UserKnownHostsFile {}\n  \
             GlobalKnownHostsFile none\n  StrictHostKeyChecking yes\n",
            path("wrong_key"),
            path("no_known_hosts"),
            path("missing_key"),
            path("version_key"),
            ADDRESSES[0],
            ADDRESSES[1],
            ADDRESSES[0],
            ADDRESSES[1],
            path("user_key"),
            path("known_hosts")
        )
    }

    fn serve(&mut self, node: usize) {
        let (config, log) = (self.path(&format!("sshd_config-{node}")), self.path(&format!("sshd-{node}")));
        let settings = format!(
            "ListenAddress {}:{PORT}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nUsePAM no\nStrictModes no\n\
             PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n",
            ADDRESSES[node],
            self.path("host_key").display(),
            self.path("authorized_keys").display()
        );
        fs::write(&config, settings).unwrap();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.net.names[node], SSHD, "-D", "-e", "-f"]).arg(&config);
        command.stdin(Stdio::null()).stderr(fs::File::create(&log).unwrap());
        self.servers.push(command.spawn().unwrap());
        let until = Instant::now() + Duration::from_secs(300);
        while !said(&log).contains("Server listening") {
            assert!(Instant::now() < until, "{}", said(&log));
            assert!(self.servers[node].try_wait().unwrap().is_none(), "{}", said(&log));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn said(log: &Path) -> String {
    fs::read_to_string(log).unwrap_or_default()
}

impl Drop for SshHosts {
    fn drop(&mut self) {
        for server in &mut self.servers {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}
