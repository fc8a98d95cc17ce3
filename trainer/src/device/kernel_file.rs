//! The file of compiled kernels. It has records with checksums. All processes append records, one process at a time.

use std::collections::HashSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

/// First bytes of a file, with the version of its format.
const MAGIC: &[u8] = b"trainer kernels 1\n";
/// Bytes of a record's header: a checksum and the lengths of three parts.
const HEAD: usize = 16;
/// Largest file in bytes. A larger file is deleted and started again: each build of the program adds its own kernels, and a
/// process reads all of them.
const LARGEST: u64 = if cfg!(test) { 1 << 20 } else { 512 << 20 };

/// A file of records: namespace, key and value.
#[derive(Debug)]
pub(super) struct KernelFile {
    file: File,
    /// Bytes that this process has read or written.
    end: u64,
    /// Namespace and key of each record up to `end`.
    known: HashSet<(String, Vec<u8>)>,
}

/// A function that is called for each record: namespace, key, value.
pub(super) type RecordVisitor<'a> = dyn FnMut(&str, &[u8], &[u8]) + 'a;

impl KernelFile {
    /// Opens or creates the file with this name, and visits all its records.
    ///
    /// # Errors
    /// The file cannot be read, written or locked, or it has another format.
    pub(super) fn open(folder: &Path, name: &str, visit: &mut RecordVisitor) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let name = name.replace(|c: char| !(c.is_ascii_alphanumeric() || "-_.".contains(c)), "_");
        let path = folder.join(format!("{name}.kernels"));
        if std::fs::metadata(&path).is_ok_and(|file| file.is_file() && file.len() > LARGEST) {
            // Processes that have the old file open continue to use it. If several processes remove the file at the same time,
            // the kernels of one of them are lost.
            let _ = std::fs::remove_file(&path);
        }
        let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        let mut this = Self { file, end: 0, known: HashSet::new() };
        // Try the lock now, so that a file system without locks is reported at the start.
        if !this.exchange(visit, |_| {})? {
            this.read(visit)?;
        }
        Ok(this)
    }

    /// Visits the records that other processes have appended, and appends the records of `all` that the file does not have. If
    /// another process holds the file's lock, does nothing and returns false.
    ///
    /// # Errors
    /// The file cannot be read, written or locked, or it has another format.
    pub(super) fn exchange(
        &mut self,
        visit: &mut RecordVisitor,
        all: impl FnOnce(&mut RecordVisitor),
    ) -> io::Result<bool> {
        match self.file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let exchanged = self.read(visit).and_then(|()| self.append(all));
        self.file.unlock()?;
        exchanged.map(|()| true)
    }

    /// Visits the complete records after `end`. This needs no lock, since a partly written record has a wrong checksum.
    fn read(&mut self, visit: &mut RecordVisitor) -> io::Result<()> {
        let mut bytes = Vec::new();
        self.file.seek(SeekFrom::Start(self.end))?;
        self.file.read_to_end(&mut bytes)?;
        let mut rest = bytes.as_slice();
        if self.end == 0 {
            match rest.strip_prefix(MAGIC) {
                Some(records) => (rest, self.end) = (records, MAGIC.len() as u64),
                // A process was killed during its first write.
                None if MAGIC.starts_with(rest) => return Ok(()),
                None => return Err(io::Error::other("the file of kernels is not this program's: remove it")),
            }
        }
        while let Some(([namespace, key, value], after)) = decode(rest) {
            let Ok(namespace) = std::str::from_utf8(namespace) else { break };
            visit(namespace, key, value);
            self.known.insert((namespace.to_owned(), key.to_vec()));
            self.end += (rest.len() - after.len()) as u64;
            rest = after;
        }
        Ok(())
    }

    /// Appends the records that are not known. The caller holds the lock.
    fn append(&mut self, all: impl FnOnce(&mut RecordVisitor)) -> io::Result<()> {
        let (mut bytes, mut new) = (Vec::new(), Vec::new());
        if self.end == 0 {
            bytes.extend(MAGIC);
        }
        all(&mut |namespace, key, value| {
            let name = (namespace.to_owned(), key.to_vec());
            if !self.known.contains(&name) {
                encode([namespace.as_bytes(), key, value], &mut bytes);
                new.push(name);
            }
        });
        if bytes.is_empty() {
            return Ok(());
        }
        // Cut off the incomplete record of a process that was killed while it wrote.
        self.file.set_len(self.end)?;
        self.file.write_all(&bytes)?;
        self.end += bytes.len() as u64;
        self.known.extend(new);
        Ok(())
    }
}

/// Appends a record to `bytes`.
fn encode(parts: [&[u8]; 3], bytes: &mut Vec<u8>) {
    let start = bytes.len();
    bytes.extend([0; 4]);
    for part in parts {
        bytes.extend((part.len() as u32).to_le_bytes());
    }
    bytes.extend(parts.concat());
    let checksum = crc32c::crc32c(&bytes[start + 4..]);
    bytes[start..start + 4].copy_from_slice(&checksum.to_le_bytes());
}

/// Returns the parts of the first record and the bytes after it; `None` if the record is incomplete or damaged.
fn decode(bytes: &[u8]) -> Option<([&[u8]; 3], &[u8])> {
    let head: &[u8; HEAD] = bytes.first_chunk()?;
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let [a, b, c] = [word(4) as usize, word(8) as usize, word(12) as usize];
    let (record, after) = bytes.split_at_checked(HEAD + a + b + c)?;
    let (checksum, body) = record.split_at(4);
    if crc32c::crc32c(body).to_le_bytes() != checksum {
        return None;
    }
    let (namespace, rest) = record[HEAD..].split_at(a);
    let (key, value) = rest.split_at(b);
    Some(([namespace, key, value], after))
}

#[cfg(test)]
mod tests {
    use super::{KernelFile, MAGIC};
    use std::fs;
    use std::path::Path;

    type Record = (String, Vec<u8>, Vec<u8>);

    fn record(key: u8) -> Record {
        ("cuda/ptx".into(), vec![key; 3], vec![key; 100])
    }

    /// Opens the file in `folder`. Returns it with its records.
    fn open(folder: &Path) -> (KernelFile, Vec<Record>) {
        let mut records = Vec::new();
        let file = KernelFile::open(folder, "gpu", &mut |n, k, v| records.push((n.to_owned(), k.to_vec(), v.to_vec())))
            .unwrap();
        (file, records)
    }

    /// Appends records. Returns those of other processes.
    fn exchange(file: &mut KernelFile, keys: &[u8]) -> Option<Vec<Record>> {
        let mut others = Vec::new();
        let all = |visit: &mut super::RecordVisitor| {
            for (namespace, key, value) in keys.iter().map(|key| record(*key)) {
                visit(&namespace, &key, &value);
            }
        };
        let exchanged = file.exchange(&mut |n, k, v| others.push((n.to_owned(), k.to_vec(), v.to_vec())), all).unwrap();
        exchanged.then_some(others)
    }

    #[test]
    fn processes_have_each_others_records() {
        let folder = tempfile::tempdir().unwrap();
        let ((mut one, none), (mut other, _)) = (open(folder.path()), open(folder.path()));
        assert!(none.is_empty());
        assert_eq!(exchange(&mut one, &[1, 2]), Some(Vec::new()));
        assert_eq!(exchange(&mut other, &[2, 3]), Some(vec![record(1), record(2)]));
        assert_eq!(exchange(&mut one, &[1, 2]), Some(vec![record(3)]));
        assert_eq!(exchange(&mut other, &[2, 3]), Some(Vec::new()), "a record is written once");
        assert_eq!(open(folder.path()).1, [record(1), record(2), record(3)]);
    }

    #[test]
    fn a_process_does_not_wait_while_another_one_appends() {
        let folder = tempfile::tempdir().unwrap();
        let (mut one, _) = open(folder.path());
        exchange(&mut one, &[1]).unwrap();
        one.file.lock().unwrap();
        let (mut other, records) = open(folder.path());
        assert_eq!((records, exchange(&mut other, &[2])), (vec![record(1)], None));
        one.file.unlock().unwrap();
        assert_eq!(exchange(&mut other, &[2]), Some(Vec::new()));
    }

    #[test]
    fn a_process_that_is_killed_while_it_writes_loses_only_its_last_record() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gpu.kernels");
        exchange(&mut open(folder.path()).0, &[1, 2]).unwrap();
        let whole = fs::read(&path).unwrap();
        let one = MAGIC.len() + (whole.len() - MAGIC.len()) / 2;
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len]).unwrap();
            let (mut file, records) = open(folder.path());
            assert_eq!(records, if len < one { vec![] } else { vec![record(1)] }, "{len} bytes");
            exchange(&mut file, &[3]).unwrap();
            assert_eq!(open(folder.path()).1.last(), Some(&record(3)), "{len} bytes");
        }
        // A wrong byte is found wherever it is.
        for at in one..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&path, bytes).unwrap();
            assert_eq!(open(folder.path()).1, [record(1)], "byte {at}");
        }
    }

    #[test]
    fn a_file_above_the_limit_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gpu.kernels");
        let (mut old, _) = open(folder.path());
        exchange(&mut old, &[1]).unwrap();
        let whole = fs::read(&path).unwrap();
        for (len, expected) in [(super::LARGEST, vec![record(1)]), (super::LARGEST + 1, vec![])] {
            // What follows the record is a hole, which is not a record.
            old.file.set_len(len).unwrap();
            assert_eq!(open(folder.path()).1, expected, "{len} bytes");
        }
        assert_eq!(exchange(&mut old, &[2]), Some(Vec::new()), "the process that has the old file goes on");
        fs::write(&path, whole).unwrap();
        assert_eq!(open(folder.path()).1, [record(1)]);
    }

    #[test]
    fn an_unusable_folder_or_file_is_an_error() {
        let open = |folder: &Path| KernelFile::open(folder, "gpu", &mut |_, _, _| {}).map(|_| ()).unwrap_err();
        open(Path::new("/dev/null/cubecl"));
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("gpu.kernels"), "something else").unwrap();
        assert!(open(folder.path()).to_string().contains("remove it"));
    }
}
