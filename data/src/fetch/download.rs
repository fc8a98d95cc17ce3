//! Downloads one file to `NAME.part`: resumes, restarts where it must, checks the checksum.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use ureq::http::StatusCode;
use ureq::http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, RANGE};

use super::sources::Download;
use super::verify::hash;
use super::{FetchOptions, Progress};

/// Why a file could not be had; the caller adds what to do.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) cause: String,
    /// True when what there is in the .part file is of use: another run goes on from there.
    pub(super) resumable: bool,
}

impl Failure {
    fn last(cause: impl Into<String>) -> Self {
        Self { cause: cause.into(), resumable: false }
    }
}

/// How one request ended.
enum End {
    /// All bytes are there.
    Complete,
    /// The connection was lost or stood still: the cause.
    Cut(String),
    /// The server does not go on from where the file ends.
    Restart,
}

/// One file on its way.
pub(super) struct Transfer<'a> {
    pub(super) url: &'a str,
    /// Where the bytes go until all are there.
    pub(super) part: &'a Path,
    pub(super) want: &'a Download,
    pub(super) options: &'a FetchOptions,
    pub(super) progress: &'a dyn Progress,
}

impl Transfer<'_> {
    /// Brings the .part file to hold exactly the file that is wanted.
    ///
    /// Bytes of an earlier try are kept and the rest is asked for with a `Range` header. A server that ignores it sends all;
    /// a file that is too long or has the wrong sum is thrown away.
    pub(super) fn run(&self) -> Result<(), Failure> {
        let client = client(self.options, self.url);
        let mut file = self.open()?;
        // Bytes in the file that an earlier run left: a wrong sum may be their fault.
        let mut old = self.len(&file)?;
        if old > self.want.bytes {
            old = self.truncate(&mut file)?;
        }
        self.progress.start(self.want.file, self.want.bytes);
        self.progress.advance(old);
        let mut tries = 0;
        loop {
            let before = self.len(&file)?;
            let end =
                if before == self.want.bytes { End::Complete } else { self.request(&client, &mut file, &mut old)? };
            match end {
                End::Complete => {
                    let sum = self.checksum(&mut file)?;
                    if sum == self.want.sha256 {
                        break;
                    }
                    if old == 0 {
                        return Err(self.wrong_sum(&sum));
                    }
                    self.note("the part of an earlier download is damaged, starting again");
                }
                End::Restart if before > 0 => self.note("the server does not resume, starting again"),
                End::Restart => return Err(Failure::last("the server does not send the file from its start")),
                End::Cut(cause) => {
                    let now = self.len(&file)?;
                    tries += 1;
                    // Without a new byte there is nothing to hope for.
                    if now == before || tries > self.options.retries {
                        return Err(Failure { cause, resumable: now > 0 });
                    }
                    self.note(&format!("{cause}; trying again"));
                    continue;
                }
            }
            old = self.truncate(&mut file)?;
            self.progress.start(self.want.file, self.want.bytes);
        }
        file.sync_all().map_err(|e| self.disk(&e))?;
        self.progress.finish();
        Ok(())
    }

    /// Asks for what the file lacks and appends what comes. Sets `old` to 0 when the server sends all anew.
    fn request(&self, client: &ureq::Agent, file: &mut File, old: &mut u64) -> Result<End, Failure> {
        let total = self.want.bytes;
        let have = self.len(file)?;
        // Compressed on the way, offsets and lengths would be those of another file.
        let mut get = client.get(self.url).header(ACCEPT_ENCODING, "identity");
        if have > 0 {
            get = get.header(RANGE, format!("bytes={have}-"));
        }
        let response = match get.call() {
            Ok(response) => response,
            Err(error) => return Ok(End::Cut(explain(&error, self.options))),
        };
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
        match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let sent = header(CONTENT_RANGE).unwrap_or("");
                let range = format!("bytes {have}-{}/", total - 1);
                if ![format!("{range}{total}"), format!("{range}*")].iter().any(|good| good == sent) {
                    return Ok(End::Restart);
                }
            }
            StatusCode::OK => {
                if let Some(length) = header(CONTENT_LENGTH)
                    && length != total.to_string()
                {
                    return Err(Failure::last(format!(
                        "the server's file has {length} bytes, the official one {total}"
                    )));
                }
                if have > 0 {
                    // The server ignores ranges and sends all: so from the start.
                    *old = self.truncate(file)?;
                    self.progress.start(self.want.file, total);
                }
            }
            StatusCode::RANGE_NOT_SATISFIABLE => return Ok(End::Restart),
            status => return Err(Failure::last(format!("the server answers {status}"))),
        }
        self.receive(response.into_body().into_reader(), file)
    }

    /// Appends the body to the file, never more than the file should have.
    fn receive(&self, mut body: impl Read, file: &mut File) -> Result<End, Failure> {
        let total = self.want.bytes;
        let mut have = file.seek(SeekFrom::End(0)).map_err(|e| self.disk(&e))?;
        let mut buffer = vec![0; 1 << 16];
        loop {
            match body.read(&mut buffer) {
                Ok(0) if have == total => return Ok(End::Complete),
                Ok(0) => return Ok(End::Cut(format!("the connection ended after {have} of {total} bytes"))),
                Ok(n) if have + n as u64 > total => {
                    return Err(Failure::last(format!("the server sends more than the {total} bytes of the file")));
                }
                Ok(n) => {
                    file.write_all(&buffer[..n]).map_err(|e| self.disk(&e))?;
                    have += n as u64;
                    self.progress.advance(n as u64);
                }
                Err(error) => {
                    let cause = explain(&ureq::Error::from(error), self.options);
                    return Ok(End::Cut(format!("after {have} of {total} bytes: {cause}")));
                }
            }
        }
    }

    /// Opens the .part file for this process alone.
    fn open(&self) -> Result<File, Failure> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(self.part);
        let file = file.map_err(|e| self.disk(&e))?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => Err(Failure::last("another process is downloading this file right now")),
            // A file system without locks: the checksum finds out whether two wrote at once.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
        }
    }

    fn checksum(&self, file: &mut File) -> Result<String, Failure> {
        let sum = file.rewind().and_then(|()| hash(&mut *file));
        sum.map(|(_, sum)| sum).map_err(|e| self.disk(&e))
    }

    /// Removes a complete file with a wrong sum: there is nothing in it to go on from.
    fn wrong_sum(&self, sum: &str) -> Failure {
        let removed = match std::fs::remove_file(self.part) {
            Ok(()) => "it was removed".to_owned(),
            Err(e) => format!("{} cannot be removed: {e}", self.part.display()),
        };
        let official = self.want.sha256;
        Failure::last(format!("the file that came has the sha256 {sum}, the official one {official}; {removed}"))
    }

    fn len(&self, file: &File) -> Result<u64, Failure> {
        file.metadata().map(|meta| meta.len()).map_err(|e| self.disk(&e))
    }

    /// Empties the file; its new length is 0.
    fn truncate(&self, file: &mut File) -> Result<u64, Failure> {
        file.set_len(0).and_then(|()| file.rewind()).map(|()| 0).map_err(|e| self.disk(&e))
    }

    fn note(&self, message: &str) {
        self.progress.note(&format!("{}: {message}", self.want.file));
    }

    fn disk(&self, error: &std::io::Error) -> Failure {
        Failure { cause: format!("{} cannot be written: {error}", self.part.display()), resumable: true }
    }
}

/// Makes an HTTP client that gives up on a server which is silent for `options.stall_timeout`.
fn client(options: &FetchOptions, url: &str) -> ureq::Agent {
    let stall = Some(options.stall_timeout);
    let mut config = ureq::Agent::config_builder()
        // Statuses are judged here: a 416 is a reason to restart.
        .http_status_as_error(false)
        .timeout_resolve(stall)
        .timeout_connect(stall)
        .timeout_recv_response(stall)
        .timeout_per_read(stall)
        .user_agent(concat!("trainer/", env!("CARGO_PKG_VERSION")));
    if is_loopback(url) {
        // A proxy from the environment cannot see this machine's own ports.
        config = config.proxy(None);
    }
    config.build().new_agent()
}

fn is_loopback(url: &str) -> bool {
    let host = url.split_once("://").map_or(url, |(_, rest)| rest);
    ["localhost", "127.", "[::1]"].iter().any(|start| host.starts_with(start))
}

/// Why there is no answer, or no more of it, for people.
fn explain(error: &ureq::Error, options: &FetchOptions) -> String {
    match error {
        ureq::Error::HostNotFound => "the name of the server cannot be resolved (no network?)".to_owned(),
        ureq::Error::Timeout(_) => format!("the server was silent for {:?}", options.stall_timeout),
        ureq::Error::Io(e) => format!("no connection to the server: {e}"),
        other => format!("no connection to the server: {other}"),
    }
}
