//! `trainer data list | fetch | verify`.

use data::{
    fetch::{self, FetchOptions, FetchProgress},
    formats,
};

use crate::cli::{DataCommand, DataDir};
use crate::console;
use crate::failure::{FAILED, Failure};
use crate::report::download::DownloadBar;
use crate::run::run_data;
use crate::text::thousands;

/// Runs the subcommand and returns the exit code.
///
/// # Errors
/// The server cannot be reached, a checksum is wrong, or a file is missing.
pub(super) fn run(command: DataCommand) -> Result<u8, Failure> {
    match command {
        DataCommand::List => list(),
        DataCommand::Fetch { name, data_dir, mirror } => {
            let folder = data_dir.map_or_else(run_data::cache_folder, |dir| dir.path);
            let options = FetchOptions { mirror, ..FetchOptions::default() };
            let fetched = fetch::fetch(&name, &folder, &options, &Bar(DownloadBar::new(&name)))?;
            console::print(&fetched);
            Ok(0)
        }
        DataCommand::Verify { name, data_dir, label_delim } => verify(&name, data_dir, label_delim),
    }
}

fn list() -> Result<u8, Failure> {
    console::print(format_args!(
        "{:<15} {:>9} {:>8} {:>8}  {:<10} what it is",
        "name", "train", "test", "classes", "shape"
    ));
    let number = |count: Option<usize>| count.map_or("-".to_owned(), |count| thousands(count as u64));
    for info in formats::dataset_names().filter_map(formats::dataset_info) {
        let shape = match (info.channels, info.height, info.width) {
            (Some(channels), Some(height), Some(width)) => format!("{channels}x{height}x{width}"),
            _ => "any".to_owned(),
        };
        console::print(format_args!(
            "{:<15} {:>9} {:>8} {:>8}  {shape:<10} {} [{}]",
            info.name,
            number(info.train_len),
            number(info.test_len),
            number(info.classes),
            info.description,
            info.license
        ));
    }
    console::print(format_args!(
        "\nfiles are looked for in the first of these that is set: --data-dir, the variable TRAINER_DATA_DIR, data.dir of the TOML; or else in {}",
        run_data::cache_folder().display()
    ));
    Ok(0)
}

fn verify(name: &str, data_dir: Option<DataDir>, label_delim: Option<char>) -> Result<u8, Failure> {
    let folder = data_dir.as_ref().map_or_else(run_data::cache_folder, |dir| dir.path.clone());
    let report =
        fetch::verify(name, &folder, label_delim).map_err(|error| run_data::name_variable(error, &data_dir))?;
    for file in &report.files {
        console::print(format_args!("{}: {}", file.path.display(), file.status));
    }
    match report.is_ok() {
        true => {
            console::print(format_args!("{name}: verified"));
            Ok(0)
        }
        false => {
            let (cause, hint) = match fetch::can_be_fetched(name) {
                true => ("files are missing or altered", format!("`trainer data fetch {name}` fetches them again")),
                false => {
                    let hint = "correct what is named above: replace damaged files, convert images to PNG or JPEG, or remove \
                                them";
                    ("files cannot be used", hint.to_owned())
                }
            };
            console::eprint(format_args!("error: {name}: {cause}\n  hint: {hint}"));
            Ok(FAILED)
        }
    }
}

/// The progress bar of a download.
struct Bar(DownloadBar);

impl FetchProgress for Bar {
    fn start(&self, file: &str, total: u64) {
        self.0.rename(file);
        self.0.start(Some(total));
    }

    fn advance(&self, bytes: u64) {
        self.0.advance(bytes);
    }

    fn finish(&self) {
        self.0.finish();
    }

    fn note(&self, message: &str) {
        console::eprint(message);
    }
}
