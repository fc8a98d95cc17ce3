//! Unpacks the known files of a data set from a .tar.gz, and nothing else.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Component, Path};

use flate2::bufread::GzDecoder;

use super::sources::{Contents, DatasetSource};
use crate::DataError;

/// Maximum size of a file of class names, in bytes.
const MAX_NAMES: u64 = 64 << 10;

/// Writes the files of `source` from the archive to `dir`, each complete or not at all.
///
/// Only regular files `FOLDER/NAME` with a known name and length are written. The path is made of the known name, so the
/// archive cannot write outside `dir`. Other files are skipped. Links and paths that lead up are refused, because no official
/// archive contains any.
pub(super) fn unpack(archive: &Path, source: &DatasetSource, dir: &Path) -> Result<(), DataError> {
    let damaged = |cause: String| {
        DataError::new(
            archive,
            cause,
            format!("remove the file, then run `trainer data fetch {}` to download it again", source.name),
        )
    };
    let file = File::open(archive).map_err(|e| damaged(format!("cannot be read: {e}")))?;
    let mut tar = tar::Archive::new(GzDecoder::new(BufReader::new(file)));
    let entries = tar.entries().map_err(|e| damaged(format!("is not a tar archive: {e}")))?;
    let mut written = Vec::new();
    for entry in entries {
        let mut entry = entry.map_err(|e| damaged(format!("is damaged: {e}")))?;
        let path = entry.path().map_err(|e| damaged(format!("is damaged: {e}")))?.into_owned();
        let shown = path.display();
        if !path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
            return Err(damaged(format!("holds the path {shown}, which leads out of its folder")));
        }
        match entry.header().entry_type() {
            tar::EntryType::Regular | tar::EntryType::Continuous => {}
            tar::EntryType::Directory | tar::EntryType::XGlobalHeader => continue,
            kind => return Err(damaged(format!("holds {shown}, which is neither a file nor a folder ({kind:?})"))),
        }
        let known = source.files.iter().find(|file| path == Path::new(source.folder).join(file.name));
        let Some(known) = known else { continue };
        let size = entry.size();
        let (good, expected) = match known.contents {
            Contents::Official { bytes, .. } => (size == bytes, bytes),
            Contents::ClassNames => (size <= MAX_NAMES, MAX_NAMES),
        };
        if !good {
            return Err(damaged(format!("holds {shown} with {size} bytes, not {expected}")));
        }
        write_whole(&mut entry, size, &dir.join(known.name)).map_err(|e| {
            DataError::new(
                dir.join(known.name),
                format!("cannot be unpacked: {e}"),
                "check the disk space and permissions",
            )
        })?;
        written.push(known.name);
    }
    match source.files.iter().find(|file| file.is_required() && !written.contains(&file.name)) {
        Some(file) => Err(damaged(format!("does not hold {}/{}", source.folder, file.name))),
        None => Ok(()),
    }
}

/// Writes to a temporary file beside `target` and renames it, so that no process ever sees half a file. Replaces a temporary
/// file or link that is there already.
fn write_whole(input: &mut impl Read, size: u64, target: &Path) -> io::Result<()> {
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    let part = target.with_file_name(name);
    let removed = match std::fs::remove_file(&part) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    let result = removed.and_then(|()| File::create_new(&part)).and_then(|mut file| {
        let copied = io::copy(input, &mut file)?;
        if copied != size {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{copied} bytes of {size}")));
        }
        file.sync_all()
    });
    match result.and_then(|()| std::fs::rename(&part, target)) {
        Ok(()) => Ok(()),
        Err(error) => {
            // The first error is the one to report.
            let _ = std::fs::remove_file(&part);
            Err(error)
        }
    }
}
