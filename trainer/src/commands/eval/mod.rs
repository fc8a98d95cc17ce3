//! `trainer eval`: measures the exact accuracy of a run's weights or of a weight file.

mod target;

use std::sync::Arc;

use data::{
    Dataset, TEN_CROP, formats,
    loader::{Loader, LoaderConfig},
};
use launch::signals;
use models::{BuildError, Spec};
use serde::Serialize;

use self::target::EvalTarget;
use super::saved_network;
use super::views::{Views, ten_crop_failure};
use crate::cli::EvalArgs;
use crate::config;
use crate::console;
use crate::device::{self, DeviceRequest, LocalRank};
use crate::engine::{ReplacedImages, eval_record};
use crate::failure::Failure;
use crate::report::AveragePrecision;
use crate::report::confusion::{Confusion, confusion_table};
use crate::run::{by_class, run_data, split_file};
use crate::signals::StopFlag;
use crate::snapshot::EvalRecord;
use crate::strategy::Replica;
use crate::text::thousands;
use crate::weights::{LoadedWeights, Purpose, WeightTarget};

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct EvalReport {
    /// Accuracy in percent. Multi-label images count as correct only if all their classes are right.
    top1: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    top5: Option<f64>,
    loss: f64,
    correct: u64,
    total: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    balanced_accuracy: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mean_average_precision: Option<f64>,
    /// Average precision of each class.
    #[serde(skip_serializing_if = "Option::is_none")]
    average_precision: Option<AveragePrecision>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tta_top1: Option<f64>,
    /// Number of times that another image of the same class replaced a damaged image.
    #[serde(skip_serializing_if = "is_zero")]
    replaced_images: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Evaluates the weights and prints the result.
///
/// # Errors
/// A run, a weight file or a data set cannot be read, or the weights do not match the model or the data set.
pub(super) fn run(arguments: &EvalArgs) -> Result<(), Failure> {
    if arguments.batch_size == 0 {
        return Err(Failure::usage("--batch-size 0", "use at least 1"));
    }
    if let Some(name) = arguments.data.as_deref().filter(|name| formats::dataset_info(name).is_none()) {
        let names: Vec<_> = formats::dataset_names().collect();
        return Err(Failure::usage(format!("--data {name}: no such data set"), config::data_set_hint(name, &names)));
    }
    let target = match (&arguments.run, &arguments.model, &arguments.weights) {
        (Some(run), ..) => EvalTarget::of_run(run, arguments)?,
        (None, Some(model), Some(weights)) => EvalTarget::of_file(model, weights, arguments)?,
        _ => return Err(Failure::usage("nothing to evaluate", "give --run RUN, or --model NAME and --weights FILE")),
    };
    if target.is_multi_label() && arguments.tta.is_some() {
        let hint = "leave --tta out: multi-label images are evaluated as they are";
        return Err(Failure::usage("--tta needs one class per image", hint));
    }
    let TestImages { test, loader, held_out } = test_images(&target, arguments)?;
    target.check_trained(&test)?;
    target.check_image_size(&test)?;
    // `data.limit_test` does not apply to images that the run held out of its training images.
    if let Some(limit) = target.limit.filter(|limit| !held_out && *limit < test.len()) {
        let (limit, all) = (thousands(limit as u64), thousands(test.len() as u64));
        console::eprint(format_args!("note: evaluates all {all} images; the run had {limit} (data.limit_test)"));
    }
    let (replica, origin) = load_network(&target, &test, arguments)?;
    let stop = StopFlag::on_signals()?;
    let mut replaced = ReplacedImages::default();
    let mut batches = loader.epoch(1, 0).inspect(|batch| replaced.add(batch));
    let counts = replica.evaluate(&replica.inference(), &mut batches, &stop)?;
    drop(batches);
    if let Some(signal) = stop.signal() {
        return Err(stopped(signal, counts.samples, test.len()));
    }
    let record = eval_record(&counts);
    let (confusion, average_precision) = by_class(test.classes.clone(), counts);
    if arguments.json {
        return super::print_json(&EvalReport {
            top1: record.top1,
            top5: (!target.is_multi_label()).then_some(record.top5),
            loss: record.loss,
            correct: record.correct,
            total: record.total,
            balanced_accuracy: record.balanced_accuracy,
            mean_average_precision: record.mean_average_precision,
            average_precision,
            tta_top1: record.tta_top1,
            replaced_images: replaced.count(),
        });
    }
    let title = format!("{} ({origin}) on {}", target.model, target.data.name);
    match average_precision {
        Some(precision) => print_precisions(&title, &record, &precision),
        None => print_accuracy(&title, &record, views(arguments), confusion.as_ref()),
    }
    Ok(())
}

fn views(arguments: &EvalArgs) -> Views {
    Views::of(arguments.tta.as_deref())
}

/// The images to evaluate on, and the loader that prepares them.
struct TestImages {
    test: Arc<Dataset>,
    loader: Loader,
    /// Whether the images are those that the run held out of its training images (`data.validation`).
    held_out: bool,
}

/// Opens the test images.
fn test_images(target: &EvalTarget, arguments: &EvalArgs) -> Result<TestImages, Failure> {
    let splits = formats::load(&target.data).map_err(|error| match error.place.as_str() {
        "validation" => {
            let cause = format!("{}: no test images, and the run's data.validation: {}", target.data.name, error.cause);
            Failure::usage(cause, "give the data set test images")
        }
        _ => run_data::name_variable(error, &arguments.data_dir).into(),
    })?;
    if let (Some(run), Some(record)) = (&target.run, &splits.record) {
        split_file::check_validation(run, record)?;
    }
    if let (Some(side), None) = (arguments.resize, &splits.test.encoded) {
        let cause = format!("--resize {side}: it is for images in files, and {} is in memory", target.data.name);
        return Err(Failure::usage(cause, "leave --resize out"));
    }
    let facts = run_data::dataset_facts(&target.data.name, &splits);
    let test = Arc::new(splits.test);
    let channels = test.shape.channels;
    check_channels("--mean", arguments.mean.as_ref(), channels, "from 0 to 1", |mean| (0.0..=1.0).contains(&mean))?;
    check_channels("--std", arguments.std.as_ref(), channels, "above 0 and at most 1", |std| std > 0.0 && std <= 1.0)?;
    let ten_crop = views(arguments) == Views::TenCrop;
    let config = LoaderConfig {
        global_batch: if ten_crop { arguments.batch_size.div_ceil(TEN_CROP) } else { arguments.batch_size },
        ten_crop,
        shuffle: false,
        evaluation: true,
        mean: target.mean.clone().filter(|mean| mean.len() == channels).unwrap_or(facts.mean),
        std: target.std.clone().filter(|std| std.len() == channels).unwrap_or(facts.std),
        on_error: target.on_error,
        workers: rayon::current_num_threads(),
        ..LoaderConfig::default()
    };
    let loader = Loader::new(test.clone(), config).map_err(ten_crop_failure)?;
    // An evaluation splits the training images only if there are no test images.
    Ok(TestImages { test, loader, held_out: splits.record.is_some() })
}

/// Builds the network with the target's weights on the best device. Returns it with the origin of the weights.
fn load_network(target: &EvalTarget, test: &Dataset, arguments: &EvalArgs) -> Result<(Replica, String), Failure> {
    let image_size = [test.shape.height, test.shape.width];
    let spec = Spec { num_classes: test.classes.len(), in_channels: test.shape.channels, image_size };
    let selected = device::DeviceSet::of(DeviceRequest::Best)?.select(&LocalRank::ALONE)?;
    let weight_target =
        WeightTarget { model: &target.model, spec, data: &target.data.name, purpose: Purpose::Evaluation };
    let mistake = |error: BuildError| Failure::usage(format!("{}: {error}", error.key()), error.hint());
    let LoadedWeights { network, origin, .. } =
        saved_network::build(&weight_target, &target.weights, Some(&selected), mistake)?;
    let replica = Replica::new(network, selected.device(), spec.num_classes, 0.0, 0);
    Ok((replica.with_tta(views(arguments).on_device()).with_multi_label(target.is_multi_label()), origin))
}

/// Prints the result for images of several classes.
fn print_precisions(title: &str, record: &EvalRecord, precision: &AveragePrecision) {
    console::print(format_args!(
        "{title}: mAP {:.2} %, loss {:.4}, all classes of {} of {} images right\n\n{}",
        record.mean_average_precision.unwrap_or(f64::NAN),
        record.loss,
        thousands(record.correct),
        thousands(record.total),
        precision.table()
    ));
}

/// Prints the result for images of one class.
fn print_accuracy(title: &str, record: &EvalRecord, views: Views, confusion: Option<&Confusion>) {
    let balanced = record
        .distinct_balanced_accuracy()
        .map_or_else(String::new, |balanced| format!("; balanced accuracy {balanced:.2} %"));
    let tta = record.tta_top1.map_or_else(String::new, |top1| format!("; with {views} top-1 {top1:.2} %"));
    console::print(format_args!(
        "{title}: top-1 {:.2} %, top-5 {:.2} %, loss {:.4}, {} of {} right{balanced}{tta}\n\n",
        record.top1,
        record.top5,
        record.loss,
        thousands(record.correct),
        thousands(record.total)
    ));
    console::print(confusion.map(confusion_table).unwrap_or_default());
}

/// Returns the error for an evaluation that a signal stopped.
fn stopped(signal: i32, counted: u64, images: usize) -> Failure {
    let (name, counted, images) = (signals::name(signal), thousands(counted), thousands(images as u64));
    let message = format!("stopped by {name} after {counted} of {images} images; an evaluation saves nothing");
    Failure::stopped(signal, message)
}

/// Checks `--mean` or `--std`: one value per channel, as in the configuration.
fn check_channels(
    flag: &str,
    values: Option<&Vec<f32>>,
    channels: usize,
    limits: &str,
    is_possible: impl Fn(f32) -> bool,
) -> Result<(), Failure> {
    let Some(values) = values else { return Ok(()) };
    let given = values.iter().map(f32::to_string).collect::<Vec<_>>().join(",");
    if values.len() != channels {
        let hint = format!("give one value per channel, separated by commas: {channels}");
        return Err(Failure::usage(
            format!("{flag} {given}: {} values, the images have {channels} channels", values.len()),
            hint,
        ));
    }
    match values.iter().all(|value| is_possible(*value)) {
        true => Ok(()),
        false => Err(Failure::usage(
            format!("{flag} {given}: each value must be {limits}"),
            "pixels are in [0, 1], so divide values of 0 to 255 by 255; those of CIFAR-10 are 0.4914,0.4822,0.4465 and 0.2023,0.1994,0.2010",
        )),
    }
}
