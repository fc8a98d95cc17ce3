//! Shares a job's secret between processes of one user on one host, if neither the launcher nor the user has set a secret.
//!
//! One process offers a random secret on a Unix socket in the abstract namespace. The kernel reports the user of the process at
//! the other end (`SO_PEERCRED`), and both ends accept only their own user. So a process of another user can neither get the
//! secret nor offer another secret. Others may guess the name of the socket, which is therefore not a secret. The name is in no
//! file system, and the kernel frees it with its process.

use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use rustix::process::{Uid, geteuid};

use super::error::{LaunchError, Result};
use super::thread::start_thread;
use comm::{Secret, fnv};

/// Length of a secret's text.
const DIGITS: usize = 64;
/// Longest wait for the other side during an exchange. An exchange takes microseconds.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time until the next attempt to accept a connection after an error.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Offers a secret until this value is dropped.
#[derive(Debug)]
pub(super) struct SecretOffer {
    name: String,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Returns the name under which the processes of a job find each other. `words` distinguish the job from others.
pub(super) fn name(words: &[String]) -> String {
    let hash = fnv::hash(words.iter().flat_map(|word| word.bytes().chain([0])));
    format!("trainer/{}/{hash:016x}", geteuid().as_raw())
}

impl SecretOffer {
    /// Offers `secret` to this user's processes under `name`.
    ///
    /// # Errors
    /// The name is taken, or no thread is left.
    pub(super) fn new(name: &str, secret: &Secret) -> Result<Self> {
        let listener = SocketAddr::from_abstract_name(name).and_then(|address| UnixListener::bind_addr(&address));
        let listener = listener.map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => LaunchError::failed(
                "another process of this machine offers a secret for the same job",
                format!("does the job run already? If not, {}", super::secret::HINT),
            ),
            _ => LaunchError::failed(
                format!("cannot offer the job's secret to its other processes: {error}"),
                super::secret::HINT,
            ),
        })?;
        let stop = Arc::new(AtomicBool::new(false));
        let (text, stopped) = (secret.to_hex(), Arc::clone(&stop));
        let run = move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Acquire) {
                    return;
                }
                match stream {
                    // Ignore errors: if the peer belongs to the job, it asks again.
                    Ok(stream) => _ = answer(stream, &text),
                    // For example, no file descriptor is left. The peer stays in the listen queue.
                    Err(_) => std::thread::sleep(RETRY_INTERVAL),
                }
            }
        };
        let thread = start_thread("job-secret", "the job's secret", run)?;
        Ok(Self { name: name.to_owned(), stop, thread: Some(thread) })
    }
}

impl Drop for SecretOffer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Connecting wakes the thread. If no file descriptor is left for this, the thread ends with the process.
        if connect(&self.name).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

fn answer(mut stream: UnixStream, text: &str) -> io::Result<()> {
    stream.set_write_timeout(Some(EXCHANGE_TIMEOUT))?;
    if owner(&stream)? != geteuid() {
        return Ok(());
    }
    stream.write_all(text.as_bytes())
}

/// Connects without waiting: a process that has taken the name may never accept.
fn connect(name: &str) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Returns the user of the process at the other end, at the time when the process connected or began to listen.
fn owner(stream: &UnixStream) -> io::Result<Uid> {
    Ok(Uid::from_raw(comm::peer_user(stream)?))
}

/// Asks for the secret that is offered under `name`. Returns `None` while no process offers a secret.
///
/// # Errors
/// A process of another user offers a secret under this name.
pub(super) fn request(name: &str) -> Result<Option<Secret>> {
    let Ok(mut stream) = connect(name) else { return Ok(None) };
    let other = owner(&stream).map_err(|error| foreign(&format!("a process whose user is not known ({error})")))?;
    if other != geteuid() {
        return Err(foreign(&format!("a process of user {}", other.as_raw())));
    }
    let mut text = String::new();
    let read = stream
        .set_read_timeout(Some(EXCHANGE_TIMEOUT))
        .and_then(|()| Read::by_ref(&mut stream).take(DIGITS as u64).read_to_string(&mut text));
    // The offering process may have ended in between
    Ok(read.ok().and_then(|_| Secret::from_hex(&text)))
}

fn foreign(who: &str) -> LaunchError {
    LaunchError::failed(
        format!("{who} offers a secret for this job, and only this user may do that"),
        format!(
            "are all processes of the job started by one user? If they have to be different users, {}",
            super::secret::HINT
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_is_found_while_it_lasts_and_by_its_name_only() {
        let words = ["test".to_owned(), std::process::id().to_string()];
        let (ours, other) = (name(&words), name(&words[..1]));
        let secret = Secret::random().unwrap();
        assert_eq!(request(&ours), Ok(None));
        let offer = SecretOffer::new(&ours, &secret).unwrap();
        assert_eq!(request(&ours), Ok(Some(secret.clone())));
        assert_eq!(request(&ours), Ok(Some(secret.clone())), "every process of the job asks");
        assert_eq!(request(&other), Ok(None));
        assert!(SecretOffer::new(&ours, &secret).unwrap_err().message.contains("offers a secret for the same job"));
        drop(offer);
        assert_eq!(request(&ours), Ok(None));
    }

    /// Runs `body` as the user `nobody`. The credentials of a thread are its own.
    fn as_nobody<R: Send>(body: impl FnOnce() -> R + Send) -> R {
        let change = || {
            let nobody = Uid::from_raw(65534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            body()
        };
        std::thread::scope(|scope| scope.spawn(change).join().unwrap())
    }

    #[test]
    fn another_users_process_is_neither_answered_nor_believed() {
        if !geteuid().is_root() {
            crate::shared::skip_or_fail("root", "only root can become another user");
            return;
        }
        let ours = name(&["test of users".to_owned(), std::process::id().to_string()]);
        let offer = SecretOffer::new(&ours, &Secret::random().unwrap()).unwrap();
        let mut received = String::new();
        as_nobody(|| connect(&ours).unwrap().read_to_string(&mut received)).unwrap();
        assert_eq!(received, "");
        drop(offer);
        let _listener = as_nobody(|| UnixListener::bind_addr(&SocketAddr::from_abstract_name(&ours).unwrap()).unwrap());
        let error = request(&ours).unwrap_err();
        assert!(error.message.starts_with("a process of user 65534 offers a secret"), "{error}");
    }
}
