//! Downloads from a small local server that misbehaves on request.

mod files;
mod server;

use std::path::Path;
use std::sync::Mutex;

use sha2::{Digest, Sha256};

use super::sources::{Contents, KnownFile, file};
use super::*;
use crate::formats::tests::gzip;
use server::{Behaviour, Server};

/// Records what a progress bar would show.
#[derive(Default)]
struct Log(Mutex<Vec<String>>);

impl Log {
    fn push(&self, line: String) {
        self.0.lock().unwrap().push(line);
    }

    /// Returns the bytes since the last start, and all notes.
    fn read(&self) -> (u64, Vec<String>) {
        let lines = self.0.lock().unwrap();
        let mut bytes = 0;
        for line in lines.iter() {
            match line.split_once(' ') {
                Some(("start", _)) => bytes = 0,
                Some(("advance", n)) => bytes += n.parse::<u64>().unwrap(),
                _ => {}
            }
        }
        (bytes, lines.iter().filter_map(|line| line.strip_prefix("note ")).map(str::to_owned).collect())
    }
}

impl FetchProgress for Log {
    fn start(&self, file: &str, total: u64) {
        self.push(format!("start {file} {total}"));
    }
    fn advance(&self, bytes: u64) {
        self.push(format!("advance {bytes}"));
    }
    fn finish(&self) {
        self.push("finish".to_owned());
    }
    fn note(&self, message: &str) {
        self.push(format!("note {message}"));
    }
}

fn sha(bytes: &[u8]) -> &'static str {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect::<String>().leak()
}

const NAMES: [&str; 6] = [
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
    "test_batch.bin",
];

/// Makes incompressible bytes, different for each seed.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Makes an archive like CIFAR-10's with smaller files, and its source.
fn archive() -> (&'static DatasetSource, Vec<u8>) {
    let contents: Vec<Vec<u8>> = (1..=6).map(|seed| noise(seed, 20_000)).collect();
    let mut tar = tar::Builder::new(Vec::new());
    let mut add = |name: &str, bytes: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        tar.append_data(&mut header, format!("cifar-10-batches-bin/{name}"), bytes).unwrap();
    };
    add("readme.html", b"<html>");
    NAMES.iter().zip(&contents).for_each(|(name, bytes)| add(name, bytes));
    add("batches.meta.txt", "class\n".repeat(10).as_bytes());
    let packed = gzip(&tar.into_inner().unwrap());
    let mut files: Vec<KnownFile> =
        NAMES.iter().zip(&contents).map(|(name, bytes)| file(name, 20_000, sha(bytes))).collect();
    files.push(KnownFile { name: "batches.meta.txt", contents: Contents::ClassNames });
    let download =
        Download { file: "cifar-10-binary.tar.gz", bytes: packed.len() as u64, sha256: sha(&packed), archive: true };
    (leak("cifar10", "cifar-10-batches-bin", vec![download], files), packed)
}

fn leak(
    name: &'static str,
    folder: &'static str,
    downloads: Vec<Download>,
    files: Vec<KnownFile>,
) -> &'static DatasetSource {
    let source = DatasetSource {
        name,
        base: "http://official.invalid/",
        folder,
        downloads: downloads.leak(),
        files: files.leak(),
    };
    Box::leak(Box::new(source))
}

fn options(server: &Server) -> FetchOptions {
    // Long enough for a busy machine: only the test of the stall waits for it.
    FetchOptions {
        mirror: Some(server.url.clone()),
        retries: 3,
        busy_pause: Duration::ZERO,
        stall_timeout: Duration::from_secs(60),
    }
}

/// Fetches the archive from a server whose n-th answer has the behaviour `behaviour(n)`. Returns the result, the ranges of
/// the requests, and the log.
fn fetch_archive_from(
    dest: &Path,
    retries: u32,
    behaviour: impl Fn(usize) -> Behaviour + Send + 'static,
) -> (Result<Fetched, DataError>, Vec<String>, Log) {
    let (source, packed) = archive();
    let server = Server::start(vec![("cifar-10-binary.tar.gz".to_owned(), packed)], behaviour);
    let log = Log::default();
    let result = fetch_source(source, dest, &FetchOptions { retries, ..options(&server) }, &log);
    (result, server.ranges(), log)
}

fn assert_unpacked(dest: &Path) {
    let (source, _) = archive();
    let folder = dest.join("cifar-10-batches-bin");
    let report = verify::report(source, folder.clone());
    assert!(report.is_ok(), "{report:?}");
    assert_eq!(report.files.len(), 7);
    let mut left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left.len(), 7, "{left:?}");
    // Neither the archive nor a part of it is left.
    assert_eq!(std::fs::read_dir(dest).unwrap().count(), 1);
}

#[test]
fn downloads_checks_and_unpacks() {
    let dest = tempfile::tempdir().unwrap();
    let (result, ranges, log) = fetch_archive_from(dest.path(), 0, |_| Behaviour::Good);
    let folder = dest.path().join("cifar-10-batches-bin");
    assert_eq!(result, Ok(Fetched::Done(folder.clone())));
    assert_eq!(ranges, [""]);
    assert_unpacked(dest.path());
    assert_eq!(log.read().0, archive().1.len() as u64);
    let (result, ranges, _) = fetch_archive_from(dest.path(), 0, |_| Behaviour::Good);
    assert_eq!(result, Ok(Fetched::AlreadyThere(folder.clone())));
    assert!(ranges.is_empty());
    // An altered file is fetched again.
    std::fs::write(folder.join("data_batch_2.bin"), noise(9, 20_000)).unwrap();
    let (result, ranges, _) = fetch_archive_from(dest.path(), 0, |_| Behaviour::Good);
    assert_eq!((result, ranges.len()), (Ok(Fetched::Done(folder)), 1));
    assert_unpacked(dest.path());
}

#[test]
fn a_lost_connection_is_resumed() {
    let dest = tempfile::tempdir().unwrap();
    let (result, ranges, log) =
        fetch_archive_from(dest.path(), 3, |n| if n < 2 { Behaviour::CutAfter(30_000) } else { Behaviour::Good });
    assert!(result.is_ok(), "{result:?}");
    assert_eq!(ranges, ["", "bytes=30000-", "bytes=60000-"]);
    assert_unpacked(dest.path());
    let (bytes, notes) = log.read();
    assert_eq!(bytes, archive().1.len() as u64);
    assert!(notes[0].contains("30000 of"), "{notes:?}");
}

#[test]
fn a_busy_server_is_asked_again() {
    const STATUS: &str = "503 Service Unavailable";
    let dest = tempfile::tempdir().unwrap();
    let behaviour = |n| match n {
        0 | 2 => Behaviour::Status(STATUS),
        1 => Behaviour::CutAfter(30_000),
        _ => Behaviour::Good,
    };
    let (result, ranges, log) = fetch_archive_from(dest.path(), 3, behaviour);
    assert!(result.is_ok(), "{result:?}");
    assert_eq!(ranges, ["", "", "bytes=30000-", "bytes=30000-"]);
    assert_unpacked(dest.path());
    let (_, notes) = log.read();
    assert_eq!(notes[0], "cifar-10-binary.tar.gz: the server answers 503 Service Unavailable; trying again in 0ns");

    let part = "cifar-10-binary.tar.gz.part";
    for status in [STATUS, "429 Too Many Requests", "502 Bad Gateway", "504 Gateway Timeout"] {
        let dest = tempfile::tempdir().unwrap();
        let (result, ranges, _) = fetch_archive_from(dest.path(), 1, move |_| Behaviour::Status(status));
        let error = result.unwrap_err();
        assert_eq!((error.cause, ranges.len()), (format!("the server answers {status}"), 2));
        let hint = "run the same command again later\n  or without a network, get by other means";
        assert!(error.hint.starts_with(hint), "{}", error.hint);
        assert!(!dest.path().join(part).exists());
        // With a part of the file, the next call resumes.
        std::fs::write(dest.path().join(part), &archive().1[..40_000]).unwrap();
        let error = fetch_archive_from(dest.path(), 0, move |_| Behaviour::Status(status)).0.unwrap_err();
        assert!(error.hint.starts_with("run the same command again: it resumes from "), "{}", error.hint);
        assert_eq!(std::fs::metadata(dest.path().join(part)).unwrap().len(), 40_000);
    }
}

/// The whole file is sent again, and the connection is cut where the earlier part ended: the bytes are new ones.
#[test]
fn a_cut_at_the_length_of_an_earlier_part_is_resumed() {
    let dest = tempfile::tempdir().unwrap();
    std::fs::write(dest.path().join("cifar-10-binary.tar.gz.part"), &archive().1[..70_000]).unwrap();
    let behaviour = |n| if n == 0 { Behaviour::NoRangesCutAfter(70_000) } else { Behaviour::Good };
    let (result, ranges, _) = fetch_archive_from(dest.path(), 1, behaviour);
    assert!(result.is_ok(), "{result:?}");
    assert_eq!(ranges, ["bytes=70000-", "bytes=70000-"]);
    assert_unpacked(dest.path());
}

#[test]
fn the_next_call_resumes() {
    let dest = tempfile::tempdir().unwrap();
    let (result, _, _) = fetch_archive_from(dest.path(), 0, |_| Behaviour::CutAfter(50_000));
    let error = result.unwrap_err();
    assert!(error.cause.contains("50000 of"), "{error}");
    assert!(error.hint.starts_with("run the same command again: it resumes from"), "{}", error.hint);
    assert_eq!(std::fs::metadata(dest.path().join("cifar-10-binary.tar.gz.part")).unwrap().len(), 50_000);
    let (result, ranges, log) = fetch_archive_from(dest.path(), 0, |_| Behaviour::Good);
    assert!(result.is_ok(), "{result:?}");
    assert_eq!(ranges, ["bytes=50000-"]);
    assert_eq!(log.read().0, archive().1.len() as u64);
    assert_unpacked(dest.path());
}

#[test]
fn a_server_without_ranges_sends_all_again() {
    for behaviour in [Behaviour::NoRanges, Behaviour::RangeRefused, Behaviour::WrongRange] {
        let dest = tempfile::tempdir().unwrap();
        let part = dest.path().join("cifar-10-binary.tar.gz.part");
        std::fs::write(&part, &archive().1[..70_000]).unwrap();
        let (result, ranges, log) = fetch_archive_from(dest.path(), 0, move |_| behaviour);
        assert!(result.is_ok(), "{behaviour:?}: {result:?}");
        assert_eq!(ranges[0], "bytes=70000-");
        assert_eq!(log.read().0, archive().1.len() as u64, "{behaviour:?}");
        assert_unpacked(dest.path());
    }
}

/// In a folder that others can write to, a link could lead to any file of the user.
#[test]
fn links_are_not_followed() {
    let (dest, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let victim = other.path().join("victim");
    std::fs::write(&victim, "precious").unwrap();
    let part = dest.path().join("cifar-10-binary.tar.gz.part");
    std::os::unix::fs::symlink(&victim, &part).unwrap();
    let (result, ranges, _) = fetch_archive_from(dest.path(), 0, |_| Behaviour::Good);
    let error = result.unwrap_err().to_string();
    assert!(error.contains("cifar-10-binary.tar.gz.part is a symbolic link: remove it"), "{error}");
    assert!(ranges.is_empty(), "{ranges:?}");

    // A folder in the place of the file: files from elsewhere would not help.
    std::fs::remove_file(&part).unwrap();
    std::fs::create_dir(&part).unwrap();
    let error = fetch_archive_from(dest.path(), 0, |_| Behaviour::Good).0.unwrap_err();
    assert!(error.cause.contains("cifar-10-binary.tar.gz.part"), "{error}");
    assert!(!error.hint.contains("by other means"), "{error}");
    std::fs::remove_dir(&part).unwrap();
    std::fs::write(&part, "").unwrap();

    // The temporary file of a file of the archive is replaced.
    std::fs::remove_file(&part).unwrap();
    let folder = dest.path().join("cifar-10-batches-bin");
    std::fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink(&victim, folder.join("test_batch.bin.part")).unwrap();
    let (result, ..) = fetch_archive_from(dest.path(), 0, |_| Behaviour::Good);
    assert!(result.is_ok(), "{result:?}");
    assert_unpacked(dest.path());
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
}

#[test]
fn an_invalid_part_file_is_discarded() {
    let packed = archive().1;
    let mut wrong = packed.clone();
    wrong[1000] ^= 1;
    let long = [&packed[..], &[0; 10]].concat();
    // A part with a wrong start, a complete but wrong file, a file that is too long: each leads to a request for the whole
    // file.
    for part in [&wrong[..60_000], &wrong[..], &long[..]] {
        let dest = tempfile::tempdir().unwrap();
        std::fs::write(dest.path().join("cifar-10-binary.tar.gz.part"), part).unwrap();
        let (result, ranges, _) = fetch_archive_from(dest.path(), 0, |_| Behaviour::Good);
        assert!(result.is_ok(), "{result:?}");
        assert_eq!(ranges.last().unwrap(), "", "{ranges:?}");
        assert_unpacked(dest.path());
    }
    // A complete part needs no server.
    let dest = tempfile::tempdir().unwrap();
    std::fs::write(dest.path().join("cifar-10-binary.tar.gz.part"), &packed).unwrap();
    let (result, ranges, _) = fetch_archive_from(dest.path(), 0, |_| Behaviour::NotFound);
    assert!(result.is_ok() && ranges.is_empty(), "{result:?}");
}

#[test]
fn a_corrupt_payload_is_refused_and_removed() {
    let dest = tempfile::tempdir().unwrap();
    let (result, ranges, _) = fetch_archive_from(dest.path(), 3, |_| Behaviour::Corrupt);
    let error = result.unwrap_err();
    assert!(error.cause.starts_with("the downloaded file has the sha256 "), "{error}");
    assert!(error.cause.ends_with("; the file was removed"), "{error}");
    assert_eq!(ranges.len(), 1);
    assert!(!dest.path().join("cifar-10-binary.tar.gz.part").exists());
    assert_eq!(std::fs::read_dir(dest.path()).unwrap().count(), 0);
}

#[test]
fn http_errors_name_the_address_and_the_manual_download() {
    let dest = tempfile::tempdir().unwrap();
    let (result, ranges, _) = fetch_archive_from(dest.path(), 3, |_| Behaviour::NotFound);
    let error = result.unwrap_err();
    assert_eq!((error.cause.as_str(), ranges.len()), ("the server answers 404 Not Found", 1));
    let file = error.file.to_str().unwrap();
    assert!(file.starts_with("http://127.0.0.1:") && file.ends_with("/cifar-10-binary.tar.gz"), "{file}");
    assert_eq!(
        error.hint.replace(dest.path().to_str().unwrap(), "DEST"),
        format!(
            "without a network, get by other means\n    DEST/cifar-10-binary.tar.gz ({} bytes)\n  from \
             http://official.invalid/ and run `trainer data fetch cifar10` again: it checks and unpacks them",
            archive().1.len()
        )
    );
    let (result, _, _) = fetch_archive_from(dest.path(), 3, |_| Behaviour::Length(17));
    let expected = format!("the server's file has 17 bytes, the official one {}", archive().1.len());
    assert_eq!(result.unwrap_err().cause, expected);
    // No useless part is left.
    assert!(!dest.path().join("cifar-10-binary.tar.gz.part").exists());
}

#[test]
fn a_refused_connection_is_an_error_at_once() {
    let dest = tempfile::tempdir().unwrap();
    // Nobody listens on tcpmux, port 1. A port that is free now could be taken by another process.
    let url = "http://127.0.0.1:1".to_owned();
    let options = FetchOptions { mirror: Some(url.clone()), ..FetchOptions::default() };
    for name in ["cifar100", "fashion-mnist"] {
        let error = fetch(name, dest.path(), &options, &()).unwrap_err();
        assert!(error.file.to_str().unwrap().starts_with(&url), "{error}");
        assert!(error.cause.starts_with("no connection to the server: "), "{error}");
        assert!(error.hint.contains("without a network, get by other means"), "{}", error.hint);
    }
}

#[test]
fn a_stalled_server_is_an_error() {
    let dest = tempfile::tempdir().unwrap();
    let (source, packed) = archive();
    for (after, left) in [(None, 0), (Some(40_000), 40_000)] {
        let files = vec![("cifar-10-binary.tar.gz".to_owned(), packed.clone())];
        let server = Server::start(files, move |_| after.map_or(Behaviour::Mute, Behaviour::StallAfter));
        let options = FetchOptions { stall_timeout: Duration::from_secs(6), retries: 0, ..options(&server) };
        let error = fetch_source(source, dest.path(), &options, &()).unwrap_err();
        assert!(error.cause.ends_with("the server was silent for 6s"), "{error}");
        let part = std::fs::metadata(dest.path().join("cifar-10-binary.tar.gz.part"));
        assert_eq!(part.map_or(0, |meta| meta.len()), left);
    }
}

#[test]
fn an_archive_put_there_by_hand_is_used_and_kept() {
    let dest = tempfile::tempdir().unwrap();
    let path = dest.path().join("cifar-10-binary.tar.gz");
    std::fs::write(&path, &archive().1).unwrap();
    let (result, ranges, _) = fetch_archive_from(dest.path(), 0, |_| Behaviour::NotFound);
    assert!(result.is_ok() && ranges.is_empty(), "{result:?}");
    assert!(path.exists());
    std::fs::remove_file(path).unwrap();
    assert_unpacked(dest.path());
}

#[test]
fn two_processes_do_not_write_one_file() {
    let dest = tempfile::tempdir().unwrap();
    let path = dest.path().join("cifar-10-binary.tar.gz.part");
    let part = std::fs::File::create(&path).unwrap();
    part.lock().unwrap();
    let (result, ranges, _) = fetch_archive_from(dest.path(), 0, |_| Behaviour::Good);
    let error = result.unwrap_err();
    assert_eq!(error.cause, "another process is downloading this file");
    assert!(
        error.hint.starts_with("wait until the other process") && !error.hint.contains("network"),
        "{}",
        error.hint
    );
    assert!(ranges.is_empty());
    // The file of the other process is still empty, and stays.
    assert!(path.exists());
}
