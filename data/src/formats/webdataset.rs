//! Tar archives of images and labels, in the layout of webdataset: `train-0000.tar` with `000001.jpg`, `000001.cls`, and so on.
//!
//! Members with the same name up to the first dot are one sample and follow each other. The label is a class number from 0: the
//! text of `.cls`, or `label` or `cls` of `.json`. Archives are sorted by name; samples keep their order in the archive. Each
//! archive is indexed once. Images can then be read in any order, so shuffling, sharding and resuming work as for every other
//! data set.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use serde_json::Value;

use super::file::{read_error, transient_or};
use super::image_folder::{READABLE_EXTENSIONS, UNREADABLE_EXTENSIONS};
use super::repeated::Inode;
use super::split_files::{Sample, SplitFiles, load_splits};
use super::{DatasetInfo, LoadRequest};
use crate::encoded::ImageFile;
use crate::label_sets::first_missing_class;
use crate::{DataError, Splits};

/// Hint: the files that the folder must contain.
pub(super) const LAYOUT: &str =
    "name a folder of train-*.tar and test-*.tar (or val-*.tar) with `dir` in [data] or --data-dir";

const DAMAGED: &str = "the archive is damaged: copy or make it again";
const LABEL: &str = "each image needs a member .cls with its class number from 0, or .json with a number `label`";

/// Bytes of a block of an archive.
const BLOCK: u64 = 512;

/// Maximum size of a label's text in bytes.
const MAX_LABEL: u64 = 1 << 20;

/// Reads the index of all archives, and their images.
pub(super) fn load(
    info: &DatasetInfo,
    dir: &Path,
    request: &LoadRequest,
    needs_test: bool,
) -> Result<Splits, DataError> {
    if dir.is_file() {
        return Err(DataError::new(dir, "is a file: the data set is a folder of archives", LAYOUT));
    }
    let [train, mut val, mut test] = archives(dir)?;
    if train.is_empty() {
        return Err(DataError::new(dir, "there is no archive train*.tar", LAYOUT));
    }
    if test.is_empty() {
        test = std::mem::take(&mut val);
    }
    if needs_test && test.is_empty() {
        let cause = "there is no archive test*.tar or val*.tar: there is nothing to evaluate";
        return Err(DataError::new(dir, cause, "add one, or set data.validation = 0.1 to hold images out"));
    }
    let (train, val, test) = (index(&train)?, index(&val)?, index(&test)?);
    if train.is_empty() {
        return Err(DataError::new(dir, "the archives train*.tar hold no image", LABEL));
    }
    if needs_test && test.is_empty() {
        return Err(DataError::new(dir, "the archives test*.tar or val*.tar hold no image", LABEL));
    }
    let classes = classes(dir, [&train, &val, &test])?;
    load_splits(info, dir, SplitFiles { train, val, test }, &classes, request)
}

/// Returns the archives of the splits train, val and test, each sorted by name.
pub(crate) fn archives(dir: &Path) -> Result<[Vec<PathBuf>; 3], DataError> {
    let mut splits = [const { Vec::new() }; 3];
    let entries = std::fs::read_dir(dir).map_err(|e| read_error(dir, &e))?;
    for entry in entries {
        let entry = entry.map_err(|e| read_error(dir, &e))?;
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if name.starts_with('.') {
            continue;
        }
        if [".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2"].iter().any(|end| name.ends_with(end)) {
            let cause = "a compressed archive cannot be read at any place";
            return Err(DataError::new(path, cause, "decompress it: JPEG and PNG are compressed already"));
        }
        if !name.ends_with(".tar") {
            continue;
        }
        let split = ["train", "val", "test"].iter().position(|split| name.starts_with(split));
        let hint = "the name of an archive begins with its split: train, val or test";
        splits[split.ok_or_else(|| DataError::new(&path, "the archive's name has no split", hint))?].push(path);
    }
    splits.iter_mut().for_each(|split| split.sort_unstable());
    check_repeated(&splits)?;
    Ok(splits)
}

/// Checks that no archive is in two splits, or twice in one split, also not through a link.
fn check_repeated(splits: &[Vec<PathBuf>; 3]) -> Result<(), DataError> {
    let mut seen: HashMap<Inode, (usize, &Path)> = HashMap::new();
    let archives = splits.iter().enumerate().flat_map(|(split, paths)| paths.iter().map(move |path| (split, path)));
    for (split, path) in archives {
        // A link to nothing is reported when it is opened.
        let Ok(metadata) = std::fs::metadata(path) else { continue };
        if let Some((other, first)) = seen.insert(Inode::of(&metadata), (split, path)) {
            let why = match other == split {
                true => "an archive is twice in one split",
                false => "an archive of one split is in another one",
            };
            let cause = format!("is the same file as {}: {why}", first.display());
            return Err(DataError::new(path, cause, "remove one of the two: each archive is in one split, once"));
        }
    }
    Ok(())
}

/// Returns the samples of archives in their order.
fn index(archives: &[PathBuf]) -> Result<Vec<Sample>, DataError> {
    // Collected first, so that every run reports the first mistake in order.
    let indexed: Vec<_> = archives.par_iter().map(|archive| index_archive(archive)).collect();
    let mut samples = Vec::new();
    for archive in indexed {
        samples.extend(archive?);
    }
    Ok(samples)
}

/// Returns the names of the classes, which are numbers.
fn classes(dir: &Path, splits: [&Vec<Sample>; 3]) -> Result<Vec<String>, DataError> {
    let most = splits.iter().flat_map(|split| split.iter()).map(|sample| sample.label).max().unwrap_or(0);
    match first_missing_class(usize::from(most) + 1, splits[0].iter().map(|sample| &sample.label)) {
        None => Ok((0..=most).map(|class| class.to_string()).collect()),
        Some(class) => {
            let cause = format!("the class {class} has no training image, and labels go up to {most}");
            Err(DataError::new(dir, cause, "number the classes from 0 without gaps"))
        }
    }
}

/// Bytes of an archive.
#[derive(Debug, Clone, Copy)]
struct Span {
    offset: u64,
    len: u64,
}

/// The members of a sample.
#[derive(Default)]
struct Members {
    key: String,
    /// The image and its name.
    image: Option<(Span, String)>,
    /// The first image that is not used, such as a mask `1.mask.png` or a depth image `1.exr`. The two texts are the cause and the
    /// hint of the error that is reported if the sample has no readable image.
    unread: Option<(Span, String, &'static str)>,
    cls: Option<Span>,
    json: Option<Span>,
}

/// An archive that is being indexed.
struct Indexer<'a> {
    path: &'a Path,
    archive: Arc<Path>,
    file: &'a File,
    /// The members of the sample so far.
    members: Members,
    keys: HashSet<String>,
    samples: Vec<Sample>,
}

/// Returns the samples of an archive in their order.
fn index_archive(path: &Path) -> Result<Vec<Sample>, DataError> {
    let (file, len) = super::open(path)?;
    let mut first = [0; 2];
    if file.read_exact_at(&mut first, 0).is_ok() && first == [0x1f, 0x8b] {
        let hint = "decompress it (gunzip): JPEG and PNG are compressed already";
        return Err(DataError::new(path, "is compressed with gzip, and cannot be read at any place", hint));
    }
    let mut indexer = Indexer {
        path,
        archive: path.into(),
        file: &file,
        members: Members::default(),
        keys: HashSet::new(),
        samples: Vec::new(),
    };
    // The end of the members so far.
    let mut end = 0;
    let mut archive = tar::Archive::new(&file);
    for entry in archive.entries_with_seek().map_err(|e| read_error(path, &e))? {
        // The text of the error has the bytes of the header.
        let entry = entry.map_err(|error| {
            let damaged = || DataError::new(path, "is not a tar archive here", DAMAGED);
            transient_or(path, &error, damaged).at(format!("byte {end}"))
        })?;
        let span = Span { offset: entry.raw_file_position(), len: entry.size() };
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let Some(last) = span.offset.checked_add(span.len).filter(|&last| last <= len) else {
            let cause = format!("the archive ends early, in `{name}` of {} bytes: the file has {len} bytes", span.len);
            return Err(indexer.error(span, cause, DAMAGED));
        };
        end = last.next_multiple_of(BLOCK);
        let kind = entry.header().entry_type();
        // `git archive` writes a global header with the commit.
        if kind.is_dir() || kind.is_pax_global_extensions() {
            continue;
        }
        if !kind.is_file() {
            let hint = "an archive of images holds files only, no links: make it again with tar --dereference";
            return Err(indexer.error(span, format!("`{name}` is not a file"), hint));
        }
        indexer.add(span, &name)?;
    }
    let mut marker = [1; BLOCK as usize];
    let ends_early = || DataError::new(path, "the archive ends early: its end marker is missing", DAMAGED);
    file.read_exact_at(&mut marker, end)
        .map_err(|error| transient_or(path, &error, ends_early).at(format!("byte {end}")))?;
    if marker.iter().any(|&byte| byte != 0) {
        return Err(ends_early().at(format!("byte {end}")));
    }
    indexer.finish()?;
    match data_after(&file, end + BLOCK).map_err(|e| read_error(path, &e))? {
        None => Ok(indexer.samples),
        Some(at) => {
            Err(DataError::new(path, "there are more data after the end of the archive", "pack one archive per file")
                .at(format!("byte {at}")))
        }
    }
}

/// Returns the position of the first byte from `start` on that is not 0.
fn data_after(file: &File, start: u64) -> std::io::Result<Option<u64>> {
    let (mut at, mut block) = (start, [0; 1 << 13]);
    loop {
        let count = file.read_at(&mut block, at)?;
        if count == 0 {
            return Ok(None);
        }
        if let Some(index) = block[..count].iter().position(|&byte| byte != 0) {
            return Ok(Some(at + index as u64));
        }
        at += count as u64;
    }
}

/// Returns the label in the text of a member `.json`.
fn json_label(text: &[u8]) -> Option<Value> {
    let value: Value = serde_json::from_slice(text).ok()?;
    value.get("label").or_else(|| value.get("cls")).cloned()
}

impl Indexer<'_> {
    /// Adds a file of the archive to its sample. Files that are neither image nor label are ignored.
    fn add(&mut self, span: Span, name: &str) -> Result<(), DataError> {
        let folder = name.rfind('/').map_or(0, |slash| slash + 1);
        let Some((base, extension)) = name[folder..].split_once('.').filter(|(base, _)| !base.is_empty()) else {
            return Ok(());
        };
        let (key, extension) = (&name[..folder + base.len()], extension.to_ascii_lowercase());
        if key != self.members.key {
            self.finish()?;
            self.members.key = key.to_owned();
        }
        let members = &mut self.members;
        let twice = match extension.as_str() {
            image if READABLE_EXTENSIONS.contains(&image) => members.image.replace((span, name.to_owned())).is_some(),
            "cls" => members.cls.replace(span).is_some(),
            "json" => members.json.replace(span).is_some(),
            image if UNREADABLE_EXTENSIONS.contains(&image) => {
                let cause = format!("`{name}`: images of the format {image} cannot be read");
                members.unread.get_or_insert((span, cause, "convert it to PNG or JPEG"));
                false
            }
            other if other.rsplit_once('.').is_some_and(|(_, last)| READABLE_EXTENSIONS.contains(&last)) => {
                let cause =
                    format!("the sample `{key}` has no image but `{name}`: the key of a sample ends at the first dot");
                members.unread.get_or_insert((
                    span,
                    cause,
                    "rename the members so that only one dot is in their names",
                ));
                false
            }
            _ => false,
        };
        if twice {
            let cause = format!("`{name}` is the second image or label of its sample");
            return Err(self.error(span, cause, "a sample has one image and one label"));
        }
        Ok(())
    }

    /// Adds the sample of the members so far.
    fn finish(&mut self) -> Result<(), DataError> {
        let Members { key, image, unread, cls, json } = std::mem::take(&mut self.members);
        let Some((image, name)) = image else {
            if let Some((span, cause, hint)) = unread {
                return Err(self.error(span, cause, hint));
            }
            let label = match (cls, json) {
                (Some(span), _) => Some(span),
                // Other JSON files have other contents.
                (None, Some(span)) if json_label(&self.text(span)?).is_some() => Some(span),
                (None, _) => None,
            };
            return match label {
                Some(span) => {
                    Err(self.error(span, format!("the sample `{key}` has no image"), "add it, or remove the label"))
                }
                None => Ok(()),
            };
        };
        let label = match (cls, json) {
            (Some(span), _) => self.label(span, &format!("{key}.cls"), |text| {
                std::str::from_utf8(text).ok().and_then(|text| text.trim().parse().ok())
            })?,
            (None, Some(span)) => self.label(span, &format!("{key}.json"), |text| json_label(text)?.as_u64())?,
            (None, None) => return Err(self.error(image, format!("the image `{name}` has no label"), LABEL)),
        };
        if self.keys.contains(&key) {
            let cause = format!("two samples have the key `{key}`");
            return Err(self.error(
                image,
                cause,
                "the members of a sample follow each other, and no other sample has their name",
            ));
        }
        self.keys.insert(key);
        let Span { offset, len } = image;
        let file = ImageFile::Member { archive: Arc::clone(&self.archive), offset, len };
        self.samples.push(Sample { file, label, label_set: None });
        Ok(())
    }

    /// Reads a class number.
    fn label(&self, span: Span, name: &str, parse: impl Fn(&[u8]) -> Option<u64>) -> Result<u16, DataError> {
        let text = self.text(span)?;
        parse(&text).and_then(|label| u16::try_from(label).ok()).ok_or_else(|| {
            let text = String::from_utf8_lossy(&text).trim().chars().take(40).collect::<String>();
            self.error(span, format!("`{name}` has no class number from 0 to {}: {text:?}", u16::MAX), LABEL)
        })
    }

    /// Reads the text of a label.
    fn text(&self, span: Span) -> Result<Vec<u8>, DataError> {
        let mut text = vec![0; span.len.min(MAX_LABEL) as usize];
        self.file.read_exact_at(&mut text, span.offset).map_err(|e| read_error(self.path, &e))?;
        Ok(text)
    }

    /// Makes an error about a member.
    fn error(&self, span: Span, cause: impl Into<String>, hint: &str) -> DataError {
        DataError::new(self.path, cause, hint).at(format!("byte {}", span.offset))
    }
}
