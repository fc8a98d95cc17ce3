//! `trainer table`: compares the models' published accuracy with the accuracy of the runs.

use std::path::{Path, PathBuf};

use crate::cli::TableArgs;
use crate::config::Overrides;
use crate::console;
use crate::failure::Failure;
use crate::report::accuracy_table;
use crate::report::accuracy_table::RunRecord;
use crate::run::plan;

/// Folder of the committed summaries, relative to the root of a checkout.
const RESULTS: &str = "results";

/// Prints the table of the named runs, or of the runs in `results/`.
///
/// # Errors
/// A path is neither a run nor a folder of runs, or a run is damaged.
pub(super) fn run(arguments: &TableArgs) -> Result<(), Failure> {
    let paths = match arguments.runs.as_slice() {
        [] if Path::new(RESULTS).is_dir() => vec![PathBuf::from(RESULTS)],
        [] => {
            let message = format!("no run is named, and there is no folder {RESULTS} here");
            return Err(Failure::usage(message, "name run folders, or folders of them: trainer table runs results"));
        }
        named => named.to_vec(),
    };
    let found = accuracy_table::read_runs(&paths).map_err(|error| Failure::usage(&error, &error.hint))?;
    for path in &found.unfinished {
        console::eprint(format_args!("note: {}: no result yet, left out", path.display()));
    }
    if let Some(into) = &arguments.save {
        for run in &found.runs {
            console::print(format_args!(
                "saved {}",
                accuracy_table::save(run, &portable_config(run)?, into)?.display()
            ));
        }
        return Ok(());
    }
    let published: Vec<_> = models::entries().iter().map(|entry| (entry.name, entry.published_top1)).collect();
    let rows = accuracy_table::rows(&published, &found.runs);
    match (arguments.json, arguments.markdown) {
        (true, _) => super::print_json(&rows)?,
        (_, true) => console::print(accuracy_table::markdown(&rows)),
        _ => console::print(accuracy_table::text(&rows)),
    }
    Ok(())
}

/// Returns a run's configuration without the settings that belong to one machine: the data folder, the devices, and the folder of
/// the weights.
fn portable_config(run: &RunRecord) -> Result<String, Failure> {
    let mut plan = plan::load(&run.folder.config(), &Overrides::default())?;
    plan.data.dir = None;
    plan.model.weights = plan.model.weights.as_deref().map(accuracy_table::weights_name);
    plan.parallel.devices = None;
    Ok(plan.to_toml())
}
