//! `trainer models`.

use burn::tensor::Device;
use models::{Spec, entries};
use serde::Serialize;

use crate::failure::Failure;

/// One line of the list; `--json` prints an array of them.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    family: &'static str,
    /// Learnable parameters.
    params: usize,
    /// Multiply-adds of one image.
    macs: u64,
    /// Test accuracy in percent that pytorch-cifar's README states.
    published_top1: Option<f64>,
}

/// CIFAR-10's shape: what the published accuracies are for.
const CIFAR10: Spec = Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };

/// Prints the registry.
///
/// # Errors
/// A registered model that cannot be built for CIFAR-10.
pub(super) fn run(json: bool) -> Result<(), Failure> {
    let rows = entries()
        .iter()
        .map(|entry| {
            let network = models::build(entry.name, &CIFAR10, 0, &Device::flex())
                .map_err(|error| Failure::run(&error, error.hint()))?;
            Ok(Row {
                name: entry.name,
                family: entry.family,
                params: models::parameters(&network).iter().map(|parameter| parameter.len()).sum(),
                macs: models::macs(&network, &CIFAR10),
                published_top1: entry.published_top1,
            })
        })
        .collect::<Result<Vec<_>, Failure>>()?;
    if json {
        return super::print_json(&rows);
    }
    println!("{:<12} {:<8} {:>12} {:>14}  published CIFAR-10 top-1", "name", "family", "parameters", "multiply-adds");
    for row in rows {
        let published = row.published_top1.map_or("-".into(), |top1| format!("{top1:.2} %"));
        println!("{:<12} {:<8} {:>12} {:>14}  {published}", row.name, row.family, row.params, row.macs);
    }
    Ok(())
}
