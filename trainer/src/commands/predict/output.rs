//! Writes predictions as CSV or JSON lines, to stdout or to a file.

use std::io::{self, Write};

use super::{Class, Classifier, Prediction};
use crate::cli::PredictArgs;
use crate::commands::views::Views;
use crate::console;
use crate::failure::Failure;
use crate::files::{FileError, PartialFile};

/// Writes the predictions batch by batch. A file gets its name when all of them are in it.
pub(super) struct Output {
    /// The file of `--to`. `None` for stdout.
    file: Option<PartialFile>,
    csv: bool,
    /// Names of the columns; `None` once they are written. The header is written together with the first predictions, so that
    /// an error in the first images leaves no header on stdout.
    header: Option<Vec<String>>,
    /// The character between the class names of an image. `None` if each image has one class.
    label_delim: Option<char>,
    buffer: Vec<u8>,
}

impl Output {
    /// Creates the file of `--to`, so that a folder that cannot be written is reported before the first image is classified.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(super) fn new(arguments: &PredictArgs, classifier: &Classifier, top_k: usize) -> Result<Self, Failure> {
        let file = arguments.to.as_deref().map(PartialFile::create).transpose().map_err(file_unwritten)?;
        let label_delim = classifier.label_delim;
        let csv = arguments.format == "csv";
        let mut header = vec!["path".to_owned()];
        if label_delim.is_some() {
            header.push("label".to_owned());
            header.extend(classifier.classes.iter().cloned());
        } else {
            for rank in 1..=top_k.min(classifier.classes.len()) {
                let end = if rank == 1 { String::new() } else { format!("_{rank}") };
                header.extend([format!("class{end}"), format!("probability{end}")]);
            }
            if classifier.tta != Views::One {
                header.extend(["tta_class".to_owned(), "tta_probability".to_owned()]);
            }
        }
        Ok(Self { file, csv, header: csv.then_some(header), label_delim, buffer: Vec::new() })
    }

    /// Writes some predictions. Returns `false` if the reader of stdout has exited (`| head`).
    ///
    /// # Errors
    /// The file or stdout cannot be written.
    pub(super) fn write(&mut self, predictions: &[Prediction]) -> Result<bool, Failure> {
        if let (true, Some(delim)) = (self.csv, self.label_delim) {
            return self.csv_lines(predictions.iter().map(|prediction| {
                let label = prediction.classes.iter().flatten().copied().collect::<Vec<_>>().join(&delim.to_string());
                // The columns have the order of the header. The predictions are sorted by probability.
                let mut classes: Vec<&Class> = prediction.predictions.iter().collect();
                classes.sort_by_key(|class| class.index);
                let columns = classes.into_iter().map(|class| format!("{:.6}", class.probability));
                [prediction.path.clone(), label].into_iter().chain(columns).collect::<Vec<_>>()
            }));
        }
        if self.csv {
            return self.csv_lines(predictions.iter().map(|prediction| {
                let classes = prediction.predictions.iter().chain(&prediction.tta);
                let columns = classes.flat_map(|c| [c.class.to_owned(), format!("{:.6}", c.probability)]);
                std::iter::once(prediction.path.clone()).chain(columns).collect::<Vec<_>>()
            }));
        }
        for prediction in predictions {
            serde_json::to_writer(&mut self.buffer, prediction).map_err(|error| unwritten(&error.into()))?;
            self.buffer.push(b'\n');
        }
        self.flush()
    }

    fn csv_lines(&mut self, lines: impl IntoIterator<Item = Vec<String>>) -> Result<bool, Failure> {
        let mut writer = csv::Writer::from_writer(&mut self.buffer);
        for line in self.header.take().into_iter().chain(lines) {
            writer.write_record(line).map_err(|error| unwritten(&error.into()))?;
        }
        writer.flush().map_err(|error| unwritten(&error))?;
        drop(writer);
        self.flush()
    }

    /// Writes the buffer to the file or to stdout. Returns `false` if the reader of stdout has exited.
    fn flush(&mut self) -> Result<bool, Failure> {
        if let Some(file) = &mut self.file {
            file.write(&self.buffer).map_err(file_unwritten)?;
            self.buffer.clear();
            return Ok(true);
        }
        let written = console::Stdout.write_all(&self.buffer).and_then(|()| console::Stdout.flush());
        self.buffer.clear();
        match written {
            Ok(()) => Ok(true),
            // A closed pipe is not an error.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Err(error) => Err(unwritten(&error)),
        }
    }

    /// Writes the header if it is still missing. With `--to`, renames the temporary file to the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn finish(mut self) -> Result<(), Failure> {
        if self.header.is_some() {
            self.csv_lines([])?;
        }
        self.file.map_or(Ok(()), PartialFile::finish).map_err(file_unwritten)
    }
}

fn file_unwritten(error: FileError) -> Failure {
    Failure::run(&error, "name a file in a folder that exists, is writable and has space: --to FILE")
}

fn unwritten(error: &io::Error) -> Failure {
    console::not_written(error).into()
}
