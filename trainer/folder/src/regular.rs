//! Opens files that must be regular files.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a regular file for reading and returns it with its length in bytes.
///
/// # Errors
/// The file cannot be opened, or is of another kind: a pipe may let its reader wait for ever, and a device may never end.
pub fn open_regular(path: &Path) -> io::Result<(File, u64)> {
    // O_NONBLOCK: without it, opening a pipe waits for a writer. It has no effect on regular files.
    let nonblocking = OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(nonblocking).open(path)?;
    let metadata = file.metadata()?;
    let kind = metadata.file_type();
    let name = match () {
        () if kind.is_file() => return Ok((file, metadata.len())),
        () if kind.is_dir() => "a folder",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("it is {name}, not a file")))
}

/// Reads a whole regular file, of at most `most` bytes.
///
/// # Errors
/// The file cannot be read, is not a regular file, or is longer.
pub fn read_regular(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let (file, len) = open_regular(path)?;
    let too_long = |cause: String| io::Error::new(io::ErrorKind::InvalidData, cause);
    if len > most {
        return Err(too_long(format!("it has {len} bytes, {most} are possible here")));
    }
    let mut bytes = Vec::new();
    // A file of /proc has the length 0, and a file may grow meanwhile.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(too_long(format!("it has more than {most} bytes, which are possible here")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (file, pipe) = (dir.path().join("file"), dir.path().join("pipe"));
        std::fs::write(&file, "12345").unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(open_regular(&file).unwrap().1, 5);
        assert_eq!(read_regular(&file, 5).unwrap(), b"12345");
        let cause = |result: io::Result<Vec<u8>>| result.unwrap_err().to_string();
        assert_eq!(cause(read_regular(&file, 4)), "it has 5 bytes, 4 are possible here");
        #[cfg(target_os = "linux")]
        assert_eq!(
            cause(read_regular(Path::new("/proc/self/status"), 4)),
            "it has more than 4 bytes, which are possible here"
        );
        assert_eq!(cause(read_regular(&pipe, 9)), "it is a pipe, not a file");
        assert_eq!(cause(read_regular(Path::new("/dev/zero"), 9)), "it is a device, not a file");
        assert_eq!(cause(read_regular(dir.path(), 9)), "it is a folder, not a file");
        assert_eq!(read_regular(Path::new("nowhere"), 9).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
