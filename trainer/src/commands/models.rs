//! `trainer models`: lists the models.

use models::entries;
use serde::Serialize;

use crate::console;
use crate::failure::Failure;

/// One line of the list. `--json` prints an array of these. Sizes are for the images that the network is made for.
#[derive(Debug, Serialize)]
struct ModelRow {
    name: &'static str,
    family: &'static str,
    /// Channels, height and width of one image.
    image: [usize; 3],
    /// Learnable parameters.
    params: usize,
    /// Multiply-adds of one image.
    macs: u64,
    /// Test accuracy in percent from pytorch-cifar's README.
    published_top1: Option<f64>,
    /// Estimated memory of a training step with batch size [`BATCH`] in f32: see [`models::Cost::step_bytes`].
    step_bytes: u64,
}

/// Batch size of the step whose memory is estimated.
const BATCH: usize = 128;

/// Prints the list of models.
///
/// # Errors
/// A registered model that cannot be built.
pub(super) fn run(json: bool) -> Result<(), Failure> {
    let rows = entries()
        .iter()
        .map(|entry| {
            let spec = entry.spec;
            let network = models::skip_init(entry.name, &spec).map_err(|error| Failure::run(&error, error.hint()))?;
            let params = models::parameters(&network).iter().map(|parameter| parameter.len()).sum();
            let cost = models::cost(&network, &spec);
            Ok(ModelRow {
                name: entry.name,
                family: entry.family,
                image: [spec.in_channels, spec.image_size[0], spec.image_size[1]],
                params,
                macs: cost.macs,
                published_top1: entry.published_top1,
                step_bytes: cost.step_bytes(params, &spec, BATCH),
            })
        })
        .collect::<Result<Vec<_>, Failure>>()?;
    if json {
        return super::print_json(&rows);
    }
    console::print(format_args!(
        "{:<24} {:<13} {:<9} {:>11} {:>13} {:>12}  published CIFAR-10 top-1",
        "name", "family", "images", "parameters", "multiply-adds", "step memory"
    ));
    for row in rows {
        let published = row.published_top1.map_or("-".into(), |top1| format!("{top1:.2} %"));
        let image = row.image.map(|side| side.to_string()).join("x");
        let memory = format!("{:.0} MB", row.step_bytes as f64 / 1e6);
        console::print(format_args!(
            "{:<24} {:<13} {:<9} {:>11} {:>13} {memory:>12}  {published}",
            row.name, row.family, image, row.params, row.macs
        ));
    }
    console::print("images: those that the network is made for; the numbers are for them, and other sizes work too");
    console::print(format_args!(
        "step memory: estimate for batch {BATCH} in f32 with SGD and momentum (docs/training.md says what is in it)"
    ));
    Ok(())
}
