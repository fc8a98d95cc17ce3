//! `trainer table`: what the models are published with, and what the runs reached.

use std::path::{Path, PathBuf};

use crate::cli::TableArgs;
use crate::config::Overrides;
use crate::failure::Failure;
use crate::report::table;
use crate::report::table::RunRecord;
use crate::run::plan;

/// Where committed summaries are, seen from the top of a checkout.
const RESULTS: &str = "results";

/// Prints the table of the runs named, or of `results/`.
///
/// # Errors
/// A path that is no run and holds none, or a damaged one.
pub(super) fn run(arguments: &TableArgs) -> Result<(), Failure> {
    let paths = match arguments.runs.as_slice() {
        [] if Path::new(RESULTS).is_dir() => vec![PathBuf::from(RESULTS)],
        [] => {
            let message = format!("no run is named, and there is no folder {RESULTS} here");
            return Err(Failure::usage(message, "name run folders, or folders of them: trainer table runs results"));
        }
        named => named.to_vec(),
    };
    let found = table::read_runs(&paths).map_err(|error| Failure::usage(&error, &error.hint))?;
    for path in &found.unfinished {
        eprintln!("note: {}: no result yet, left out", path.display());
    }
    if let Some(into) = &arguments.save {
        for run in &found.runs {
            println!("saved {}", table::save(run, &portable_config(run)?, into)?.display());
        }
        return Ok(());
    }
    let published: Vec<_> = models::entries().iter().map(|entry| (entry.name, entry.published_top1)).collect();
    let rows = table::rows(&published, &found.runs);
    match (arguments.json, arguments.markdown) {
        (true, _) => super::print_json(&rows)?,
        (_, true) => print!("{}", table::markdown(&rows)),
        _ => print!("{}", table::text(&rows)),
    }
    Ok(())
}

/// A run's configuration without the place of its data on this machine.
fn portable_config(run: &RunRecord) -> Result<String, Failure> {
    let mut plan = plan::load(&run.folder.config(), &Overrides::default(), true)?;
    plan.data.dir = None;
    Ok(plan.to_toml())
}
