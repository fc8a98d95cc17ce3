//! A local HTTP server with one thread per connection.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// How the server answers one request.
#[derive(Debug, Clone, Copy)]
pub(super) enum Behaviour {
    /// Serves ranges.
    Good,
    /// Ignores ranges and sends the whole file.
    NoRanges,
    /// Ignores ranges, and closes the connection after this many bytes of the body.
    NoRangesCutAfter(usize),
    /// Answers a range with 416.
    RangeRefused,
    /// Answers a range with another one.
    WrongRange,
    /// Closes the connection after this many bytes of the body.
    CutAfter(usize),
    /// Sends nothing after this many bytes of the body, but keeps the connection.
    StallAfter(usize),
    /// Sends nothing, not even the header.
    Mute,
    /// Changes a byte of the body.
    Corrupt,
    /// Answers 404.
    NotFound,
    /// Answers with another status.
    Status(&'static str),
    /// Sends another length in the header.
    Length(usize),
}

type Files = HashMap<String, Vec<u8>>;

/// Requests seen: path and `Range` header.
type Seen = Arc<Mutex<Vec<(String, String)>>>;

pub(super) struct Server {
    pub(super) url: String,
    address: SocketAddr,
    seen: Seen,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `files` by name. The n-th request, from 0, is answered with `behaviour(n)`.
    pub(super) fn start(
        files: Vec<(String, Vec<u8>)>,
        behaviour: impl Fn(usize) -> Behaviour + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, stop) = (Seen::default(), Arc::new(AtomicBool::new(false)));
        let (log, stopped) = (seen.clone(), stop.clone());
        let files: Arc<Files> = Arc::new(files.into_iter().collect());
        let count = AtomicUsize::new(0);
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                let Ok(stream) = stream else { continue };
                let (files, log) = (files.clone(), log.clone());
                let behaviour = behaviour(count.fetch_add(1, Ordering::SeqCst));
                std::thread::spawn(move || {
                    // The client may close the connection early.
                    let _ = answer(stream, &files, &log, behaviour);
                });
            }
        });
        Self { url: format!("http://{address}"), address, seen, stop, thread: Some(thread) }
    }

    /// Returns the `Range` headers of all requests, empty for a request without one.
    pub(super) fn ranges(&self) -> Vec<String> {
        self.seen.lock().unwrap().iter().map(|(_, range)| range.clone()).collect()
    }

    /// Returns the paths of the requests since the last call.
    pub(super) fn take_paths(&self) -> Vec<String> {
        self.seen.lock().unwrap().drain(..).map(|(path, _)| path).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes the thread out of accept().
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// Answers one request.
fn answer(mut stream: TcpStream, files: &Files, seen: &Seen, behaviour: Behaviour) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let path = lines.next().unwrap()?.split(' ').nth(1).unwrap().to_owned();
    let mut range = String::new();
    let mut plain = false;
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("range: ") {
            range = value.to_owned();
        }
        plain |= line == "accept-encoding: identity";
    }
    if !plain {
        // A compressed answer has other offsets, so a client that requests a range must not allow compression.
        return stream.write_all(b"HTTP/1.1 406 Not Acceptable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    }
    seen.lock().unwrap().push((path.clone(), range.clone()));
    let start: usize = range.strip_prefix("bytes=").map_or(0, |r| r.trim_end_matches('-').parse().unwrap());
    let file = files.get(path.trim_start_matches('/'));
    let (Some(file), false) = (file, matches!(behaviour, Behaviour::NotFound)) else {
        return stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\nConnection: close\r\n\r\ngone");
    };
    let mut body = file.clone();
    let total = body.len();
    let mut status = "200 OK".to_owned();
    match behaviour {
        Behaviour::Mute => return wait(&mut stream),
        Behaviour::Status(status) => {
            return write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
        Behaviour::RangeRefused if start > 0 => {
            return stream
                .write_all(b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
        Behaviour::Corrupt => body[total / 2] ^= 1,
        _ => {}
    }
    if start > 0 && !matches!(behaviour, Behaviour::NoRanges | Behaviour::NoRangesCutAfter(_)) {
        let start = if matches!(behaviour, Behaviour::WrongRange) { start - 1 } else { start };
        body.drain(..start);
        status = format!("206 Partial Content\r\nContent-Range: bytes {start}-{}/{total}", total - 1);
    }
    let length = if let Behaviour::Length(length) = behaviour { length } else { body.len() };
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n")?;
    match behaviour {
        Behaviour::CutAfter(n) | Behaviour::NoRangesCutAfter(n) => stream.write_all(&body[..n.min(body.len())]),
        Behaviour::StallAfter(n) => {
            stream.write_all(&body[..n.min(body.len())])?;
            wait(&mut stream)
        }
        _ => stream.write_all(&body),
    }
}

/// Waits until the client closes the connection.
fn wait(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.read(&mut [0; 1]).map(|_| ())
}
