//! Downloads one file to `NAME.part`. Resumes, restarts if necessary, and verifies the checksum.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;
use ureq::http::StatusCode;
use ureq::http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, RANGE};

use super::sources::Download;
use super::verify::hash;
use super::{FetchOptions, FetchProgress};

/// A failed download. The caller adds the hint.
#[derive(Debug)]
pub(super) struct DownloadError {
    pub(super) cause: String,
    pub(super) kind: FailureKind,
}

/// What can be done after a failed download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FailureKind {
    /// The same download would fail again.
    Final,
    /// The same download may succeed later. It resumes from the bytes of the .part file.
    Temporary,
    /// The file cannot be written. Files from elsewhere do not help then.
    Local,
    /// Another process downloads the file. The .part file belongs to that process.
    Locked,
}

impl DownloadError {
    /// Makes an error that would come again.
    fn last(cause: impl Into<String>) -> Self {
        Self { cause: cause.into(), kind: FailureKind::Final }
    }
}

/// The outcome of one request.
enum RequestOutcome {
    /// The file is complete.
    Complete,
    /// The connection was lost or stalled, with the cause.
    Cut {
        cause: String,
        /// Bytes that this request has received.
        received: u64,
    },
    /// The server cannot answer now, with the cause.
    Busy(String),
    /// The server does not continue from the end of the .part file.
    Restart,
}

/// The download of one file.
pub(super) struct Transfer<'a> {
    pub(super) url: &'a str,
    /// File for the bytes until the download is complete.
    pub(super) part: &'a Path,
    pub(super) download: &'a Download,
    pub(super) options: &'a FetchOptions,
    pub(super) progress: &'a dyn FetchProgress,
}

impl Transfer<'_> {
    /// Completes the .part file to exactly the wanted file.
    ///
    /// Bytes of an earlier attempt are kept, and a `Range` header requests the rest. A server that ignores the header sends the
    /// whole file. A file that is too long or has a wrong checksum is discarded.
    pub(super) fn run(&self) -> Result<(), DownloadError> {
        let client = client(self.options, self.url);
        let mut file = self.open()?;
        // Bytes of an earlier run. They may be the cause of a wrong checksum.
        let mut old = self.len(&file)?;
        if old > self.download.bytes {
            old = self.truncate(&mut file)?;
        }
        self.progress.start(self.download.file, self.download.bytes);
        self.progress.advance(old);
        let mut tries = 0;
        loop {
            let before = self.len(&file)?;
            let end = if before == self.download.bytes {
                RequestOutcome::Complete
            } else {
                self.request(&client, &mut file, &mut old)?
            };
            match end {
                RequestOutcome::Complete => {
                    let sum = self.checksum(&mut file)?;
                    if sum == self.download.sha256 {
                        break;
                    }
                    if old == 0 {
                        return Err(self.wrong_sum(&sum));
                    }
                    self.note("the part of an earlier download is damaged, starting again");
                }
                RequestOutcome::Restart if before > 0 => self.note("the server does not resume, starting again"),
                RequestOutcome::Restart => {
                    return Err(DownloadError::last("the server does not send the file from its start"));
                }
                RequestOutcome::Cut { cause, received } => {
                    tries += 1;
                    // A request without a new byte would fail again.
                    if received == 0 || tries > self.options.retries {
                        let is_empty = self.len(&file)? == 0;
                        let kind = if is_empty { FailureKind::Final } else { FailureKind::Temporary };
                        return Err(DownloadError { cause, kind });
                    }
                    self.note(&format!("{cause}; trying again"));
                    continue;
                }
                RequestOutcome::Busy(cause) => {
                    tries += 1;
                    if tries > self.options.retries {
                        return Err(DownloadError { cause, kind: FailureKind::Temporary });
                    }
                    let pause = self.options.busy_pause * tries;
                    self.note(&format!("{cause}; trying again in {pause:?}"));
                    std::thread::sleep(pause);
                    continue;
                }
            }
            old = self.truncate(&mut file)?;
            self.progress.start(self.download.file, self.download.bytes);
        }
        file.sync_all().map_err(|e| self.disk(&e))?;
        self.progress.finish();
        Ok(())
    }

    /// Requests the missing bytes and appends them. Sets `old` to 0 if the server sends the whole file.
    fn request(&self, client: &ureq::Agent, file: &mut File, old: &mut u64) -> Result<RequestOutcome, DownloadError> {
        let total = self.download.bytes;
        let have = self.len(file)?;
        // With compression, offsets and lengths would be those of the compressed file.
        let mut get = client.get(self.url).header(ACCEPT_ENCODING, "identity");
        if have > 0 {
            get = get.header(RANGE, format!("bytes={have}-"));
        }
        let response = match get.call() {
            Ok(response) => response,
            Err(error) => return Ok(RequestOutcome::Cut { cause: explain(&error, self.options), received: 0 }),
        };
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
        match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let sent = header(CONTENT_RANGE).unwrap_or("");
                let range = format!("bytes {have}-{}/", total - 1);
                if ![format!("{range}{total}"), format!("{range}*")].iter().any(|good| good == sent) {
                    return Ok(RequestOutcome::Restart);
                }
            }
            StatusCode::OK => {
                if let Some(length) = header(CONTENT_LENGTH)
                    && length != total.to_string()
                {
                    return Err(DownloadError::last(format!(
                        "the server's file has {length} bytes, the official one {total}"
                    )));
                }
                if have > 0 {
                    // The server ignores ranges and sends the whole file, so start from 0.
                    *old = self.truncate(file)?;
                    self.progress.start(self.download.file, total);
                }
            }
            StatusCode::RANGE_NOT_SATISFIABLE => return Ok(RequestOutcome::Restart),
            status @ (StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT) => return Ok(RequestOutcome::Busy(format!("the server answers {status}"))),
            status => return Err(DownloadError::last(format!("the server answers {status}"))),
        }
        self.receive(response.into_body().into_reader(), file)
    }

    /// Appends the body to the file, but never more than the file's length.
    fn receive(&self, mut body: impl Read, file: &mut File) -> Result<RequestOutcome, DownloadError> {
        let total = self.download.bytes;
        let start = file.seek(SeekFrom::End(0)).map_err(|e| self.disk(&e))?;
        let mut have = start;
        let mut buffer = vec![0; 1 << 16];
        loop {
            match body.read(&mut buffer) {
                Ok(0) if have == total => return Ok(RequestOutcome::Complete),
                Ok(0) => {
                    let cause = format!("the connection ended after {have} of {total} bytes");
                    return Ok(RequestOutcome::Cut { cause, received: have - start });
                }
                Ok(n) if have + n as u64 > total => {
                    return Err(DownloadError::last(format!(
                        "the server sends more than the {total} bytes of the file"
                    )));
                }
                Ok(n) => {
                    file.write_all(&buffer[..n]).map_err(|e| self.disk(&e))?;
                    have += n as u64;
                    self.progress.advance(n as u64);
                }
                // All bytes are here; the checksum decides.
                Err(_) if have == total => return Ok(RequestOutcome::Complete),
                Err(error) => {
                    let cause = explain(&ureq::Error::from(error), self.options);
                    let cause = format!("after {have} of {total} bytes: {cause}");
                    return Ok(RequestOutcome::Cut { cause, received: have - start });
                }
            }
        }
    }

    /// Opens and locks the .part file. Another user may have put a link in a shared folder, so links are not followed.
    fn open(&self) -> Result<File, DownloadError> {
        let no_links = OFlags::NOFOLLOW.bits() as i32;
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).custom_flags(no_links);
        let file = options.open(self.part).map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::LOOP) => DownloadError::last(format!("{} is a symbolic link: remove it", self.part.display())),
            _ => self.disk(&error),
        })?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                let cause = "another process is downloading this file".to_owned();
                Err(DownloadError { cause, kind: FailureKind::Locked })
            }
            // On a file system without locks the checksum reveals two simultaneous writers.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
        }
    }

    fn checksum(&self, file: &mut File) -> Result<String, DownloadError> {
        let sum = file.rewind().and_then(|()| hash(&mut *file));
        sum.map(|(_, sum)| sum).map_err(|e| self.disk(&e))
    }

    /// Removes a complete file with a wrong checksum, because a download cannot resume from it.
    fn wrong_sum(&self, sum: &str) -> DownloadError {
        let removed = match std::fs::remove_file(self.part) {
            Ok(()) => "the file was removed".to_owned(),
            Err(e) => format!("{} cannot be removed: {e}", self.part.display()),
        };
        let official = self.download.sha256;
        DownloadError::last(format!(
            "the downloaded file has the sha256 {sum}, the official one has {official}; {removed}"
        ))
    }

    fn len(&self, file: &File) -> Result<u64, DownloadError> {
        file.metadata().map(|meta| meta.len()).map_err(|e| self.disk(&e))
    }

    /// Truncates the file and returns its new length, 0.
    fn truncate(&self, file: &mut File) -> Result<u64, DownloadError> {
        file.set_len(0).and_then(|()| file.rewind()).map(|()| 0).map_err(|e| self.disk(&e))
    }

    fn note(&self, message: &str) {
        self.progress.note(&format!("{}: {message}", self.download.file));
    }

    fn disk(&self, error: &std::io::Error) -> DownloadError {
        let cause = format!("{} cannot be written: {error}", self.part.display());
        DownloadError { cause, kind: FailureKind::Local }
    }
}

/// Makes an HTTP client that fails when the server is silent for `options.stall_timeout`.
fn client(options: &FetchOptions, url: &str) -> ureq::Agent {
    let stall = Some(options.stall_timeout);
    let mut config = ureq::Agent::config_builder()
        // `request` handles the statuses: a 416 means restart.
        .http_status_as_error(false)
        .timeout_resolve(stall)
        .timeout_connect(stall)
        .timeout_recv_response(stall)
        .timeout_per_read(stall)
        .user_agent(concat!("trainer/", env!("CARGO_PKG_VERSION")));
    if is_loopback(url) {
        // A proxy cannot reach this machine's own ports.
        config = config.proxy(None);
    }
    config.build().new_agent()
}

fn is_loopback(url: &str) -> bool {
    let host = url.split_once("://").map_or(url, |(_, rest)| rest);
    ["localhost", "127.", "[::1]"].iter().any(|start| host.starts_with(start))
}

/// Describes a failed request or a lost connection for the user.
fn explain(error: &ureq::Error, options: &FetchOptions) -> String {
    match error {
        ureq::Error::HostNotFound => "the name of the server cannot be resolved (no network?)".to_owned(),
        ureq::Error::Timeout(_) => format!("the server was silent for {:?}", options.stall_timeout),
        ureq::Error::Io(e) => format!("no connection to the server: {e}"),
        other => format!("no connection to the server: {other}"),
    }
}
