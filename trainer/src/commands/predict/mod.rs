//! `trainer predict`: classifies images with a run's weights.

mod output;

use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::tensor::{Tensor, TensorData};
use data::DataError;
use data::augment::{AugmentParams, Pipeline};
use data::formats::single_images;
use data::{ImageShape, read_regular};
use indicatif::{ProgressBar, ProgressStyle};
use launch::signals;
use models::{Network, Spec};
use rayon::prelude::*;
use serde::Serialize;

use self::output::Output;
use super::saved_network;
use super::views::{Views, no_ten_crops};
use crate::cli::PredictArgs;
use crate::config::Overrides;
use crate::console;
use crate::device::{self, DeviceRequest, LocalRank, SelectedDevice};
use crate::failure::Failure;
use crate::files::FileError;
use crate::loss::{self, binary};
use crate::report::RunFolder;
use crate::report::screen::Screen;
use crate::run::{plan, run_data};
use crate::signals::StopFlag;
use crate::snapshot::DatasetRecord;
use crate::strategy::Logits;
use crate::text::thousands;
use crate::weights::{self, WeightFile, WeightTarget};

/// Maximum size of the list of paths in bytes.
const LARGEST_LIST: u64 = 1 << 30;

const LIST_HINT: &str = "--list names a file with one path per line, in UTF-8";

/// The most probable classes of one image.
#[derive(Debug, Serialize)]
struct Prediction<'a> {
    path: String,
    /// The classes with a probability above 0.5, in their order. Present only for multi-label images.
    #[serde(skip_serializing_if = "Option::is_none")]
    classes: Option<Vec<&'a str>>,
    predictions: Vec<Class<'a>>,
    /// The most probable class according to the mean of the logits over the views of `--tta`.
    #[serde(skip_serializing_if = "Option::is_none")]
    tta: Option<Class<'a>>,
}

#[derive(Debug, Serialize)]
struct Class<'a> {
    class: &'a str,
    index: usize,
    probability: f64,
}

/// A network with its preprocessing and its classes.
struct Classifier {
    network: Network,
    pipeline: Pipeline,
    /// Name of the data set of the run.
    data: String,
    /// `data.resize` of the run.
    resize: Option<usize>,
    classes: Vec<String>,
    /// The character between the class names of an image. `None` if each image has one class.
    label_delim: Option<char>,
    selected: SelectedDevice,
    tta: Views,
}

/// Classifies the images and writes the predictions.
///
/// # Errors
/// A run, a checkpoint or an image cannot be read, or the output cannot be written.
pub(super) fn run(arguments: &PredictArgs) -> Result<(), Failure> {
    if let Some(to) = &arguments.to {
        let instead = "name a regular file; without --to, predictions go to standard output";
        super::export::check_output_path(to, arguments.force, instead)?;
    }
    if let Some(threads) = arguments.threads {
        // Ignore the error: it means that the pool exists already, and nothing has used the pool before this line.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(threads.into()).build_global();
    }
    let paths = [arguments.paths.clone(), listed(arguments.list.as_deref())?].concat();
    if let (Some(list), []) = (&arguments.list, paths.as_slice()) {
        return Err(FileError::input(list, "the list is empty", LIST_HINT).into());
    }
    let (paths, errors) = single_images::list(&paths);
    let mut left_out = 0;
    let mut leave_out = |error: DataError| -> Result<(), Failure> {
        if !arguments.skip_errors {
            return Err(error.into());
        }
        console::eprint(format_args!("warning: left out: {error}"));
        left_out += 1;
        Ok(())
    };
    let missing = errors.len();
    errors.into_iter().try_for_each(&mut leave_out)?;
    let classifier = Classifier::open(arguments)?;
    let top_k = classifier.top_k(arguments)?;
    let stop = StopFlag::on_signals()?;
    let mut out = Output::new(arguments, &classifier, top_k)?;
    let bar = progress_bar(paths.len(), arguments);
    for (done, batch) in paths.chunks(arguments.batch_size as usize).enumerate() {
        if let Some(signal) = stop.signal() {
            let done = thousands((done * arguments.batch_size as usize) as u64);
            let message = format!("stopped by {} after {done} of {} images", signals::name(signal), paths.len());
            return Err(Failure::stopped(signal, message));
        }
        let (images, errors) = classifier.decode(batch);
        errors.into_iter().try_for_each(&mut leave_out)?;
        if !out.write(&classifier.predict(&images, top_k)?)? {
            break;
        }
        bar.inc(batch.len() as u64);
    }
    bar.finish_and_clear();
    out.finish()?;
    if left_out > 0 {
        let named = thousands((paths.len() + missing) as u64);
        console::eprint(format_args!("note: {left_out} of {named} images could not be read and were left out"));
    }
    Ok(())
}

/// Reads the paths of a list, one per line; empty lines are skipped.
fn listed(list: Option<&Path>) -> Result<Vec<PathBuf>, Failure> {
    let Some(list) = list else { return Ok(Vec::new()) };
    let bad = |cause: String| FileError::input(list, cause, LIST_HINT);
    let bytes = read_regular(list, LARGEST_LIST).map_err(|error| bad(error.to_string()))?;
    // Windows programs begin a file with a byte order mark.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let text = str::from_utf8(bytes).map_err(|error| bad(error.to_string()))?;
    Ok(text.lines().filter(|line| !line.trim().is_empty()).map(PathBuf::from).collect())
}

/// Returns a bar if it cannot mix with the predictions: they go to a file or a pipe, and stderr is a terminal.
fn progress_bar(images: usize, arguments: &PredictArgs) -> ProgressBar {
    let screen = Screen::detect();
    match screen.bar.filter(|_| arguments.to.is_some() || screen.step_lines) {
        Some(target) => {
            let bar = if screen.colour { "{wide_bar:.cyan/dim}" } else { "{wide_bar}" };
            let style =
                ProgressStyle::with_template(&format!("images {bar} {{pos}}/{{len}} {{per_sec}}, {{eta}} left"))
                    .expect("the template is a constant and valid")
                    .progress_chars("━╸─");
            ProgressBar::with_draw_target(Some(images as u64), target).with_style(style)
        }
        None => ProgressBar::hidden(),
    }
}

impl Classifier {
    /// Opens a run's checkpoint. Takes the averaged weights if the checkpoint has them, as `trainer eval --run` does.
    fn open(arguments: &PredictArgs) -> Result<Self, Failure> {
        let folder = RunFolder::open(&arguments.run).map_err(|error| Failure::usage(&error, &error.hint))?;
        let plan = plan::load(&folder.config(), &Overrides::default())?;
        let loaded = saved_network::load(&folder, arguments.checkpoint.as_deref())?;
        let DatasetRecord { shape: [channels, height, width], classes, multi_label } =
            saved_network::dataset(&plan, &loaded)?;
        if multi_label && arguments.tta.is_some() {
            let hint = "leave --tta out: the probability of each class is that of the image as it is";
            return Err(Failure::usage("--tta needs one class per image, and the run's images have several", hint));
        }
        let shape = ImageShape { channels, height, width };
        let spec = Spec { num_classes: classes.len(), in_channels: channels, image_size: [height, width] };
        let selected = device::DeviceSet::of(DeviceRequest::Best)?.select(&LocalRank::ALONE)?;
        let tta = Views::of(arguments.tta.as_deref());
        if tta == Views::TenCrop && !plan.data.resize.is_some_and(|side| channels == 3 && side >= height.max(width)) {
            return Err(no_ten_crops("the run's images are not cut out of larger ones"));
        }
        let file = WeightFile::of_state(&loaded.path, loaded.snapshot.ema.unwrap_or(loaded.snapshot.model));
        let (model, data) = (&plan.model.name, &plan.data.name);
        let target = WeightTarget { model, spec, data, purpose: weights::Purpose::Evaluation };
        let mistake = |error| plan::model_mistake(&plan, &error);
        let network = saved_network::build(&target, &file, Some(&selected), mistake)?.network;
        let (mean, std) = run_data::normalisation(&plan)?;
        Ok(Self {
            network: network.valid(),
            pipeline: Pipeline::new(&[], &mean, &std, shape)?,
            data: plan.data.name,
            resize: plan.data.resize,
            classes,
            label_delim: multi_label.then(|| plan.data.label_delim.unwrap_or(';')),
            selected,
            tta,
        })
    }

    /// Returns the number of classes to write for each image.
    ///
    /// # Errors
    /// `--top-k` is set for a multi-label CSV file. This file always has a column for each class.
    fn top_k(&self, arguments: &PredictArgs) -> Result<usize, Failure> {
        match (self.label_delim, arguments.top_k) {
            (None, top_k) => Ok(top_k.unwrap_or(1).into()),
            (Some(_), None) => Ok(self.classes.len()),
            (Some(_), Some(top_k)) if arguments.format != "csv" => Ok(top_k.into()),
            (Some(_), Some(_)) => Err(Failure::usage(
                "--top-k: the run's images have several classes each, and the CSV file has a column for each class",
                "leave --top-k out, or use --format jsonl",
            )),
        }
    }

    /// Returns the classes that are predicted, as the exact match of an evaluation counts them, in their order.
    fn present(&self, logits: &[f32]) -> Vec<&str> {
        let all = logits.iter().zip(&self.classes);
        all.filter(|(logit, _)| binary::is_predicted(**logit)).map(|(_, class)| class.as_str()).collect()
    }

    /// Decodes and normalises images on all threads. Returns each image, `[C, H, W]` (`[10, C, H, W]` with ten crops), with its
    /// path, and the errors of the images that cannot be read.
    fn decode<'a>(&self, paths: &'a [PathBuf]) -> (Vec<(&'a Path, Vec<f32>)>, Vec<DataError>) {
        let shape = self.pipeline.shape();
        let decoded: Vec<Result<_, DataError>> = paths
            .par_iter()
            .map(|path| {
                let pixels = match self.tta {
                    Views::TenCrop => single_images::decode_ten_crops(path, shape, self.resize)?,
                    Views::One | Views::Flip => single_images::decode(path, &self.data, shape, self.resize)?,
                };
                let mut image = vec![0.0; pixels.len()];
                for (pixels, out) in pixels.chunks_exact(shape.len()).zip(image.chunks_exact_mut(shape.len())) {
                    self.pipeline.apply(pixels, &AugmentParams::default(), out);
                }
                Ok((path.as_path(), image))
            })
            .collect();
        let (mut images, mut errors) = (Vec::new(), Vec::new());
        for result in decoded {
            match result {
                Ok(image) => images.push(image),
                Err(error) => errors.push(error),
            }
        }
        (images, errors)
    }

    /// Returns the most probable classes of each image.
    ///
    /// # Errors
    /// A logit is not finite.
    fn predict(&self, images: &[(&Path, Vec<f32>)], top_k: usize) -> Result<Vec<Prediction<'_>>, Failure> {
        if images.is_empty() {
            return Ok(Vec::new());
        }
        let shape = self.pipeline.shape();
        let pixels: Vec<f32> = images.iter().flat_map(|(_, image)| image).copied().collect();
        let views = pixels.len() / shape.len();
        let data = TensorData::new(pixels, [views, shape.channels, shape.height, shape.width]);
        let batch = Tensor::from_data(data, &self.selected.device().inner());
        let Logits { plain, tta } = match self.tta {
            Views::TenCrop => Logits::of_ten_crops(&self.network, batch),
            Views::One | Views::Flip => Logits::of(&self.network, batch, self.tta.on_device()),
        };
        let count = self.classes.len();
        let mut tta = tta.iter().flat_map(|logits| logits.chunks_exact(count));
        plain
            .chunks_exact(count)
            .zip(images)
            .map(|(logits, (path, _))| {
                let path = path.display().to_string();
                let predictions = self.best(&path, logits, top_k)?;
                let tta = tta.next().map(|logits| self.best(&path, logits, 1)).transpose()?;
                let classes = self.label_delim.map(|_| self.present(logits));
                Ok(Prediction { path, classes, predictions, tta: tta.and_then(|mut best| best.pop()) })
            })
            .collect()
    }

    /// Returns the `top_k` classes with the largest logits. Among equal logits, the class with the lower index comes first.
    fn best(&self, path: &str, logits: &[f32], top_k: usize) -> Result<Vec<Class<'_>>, Failure> {
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err(Failure::run(
                format!("{path}: the network's output is not finite"),
                "the training has diverged: choose an earlier checkpoint with --checkpoint",
            ));
        }
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let largest = f64::from(logits[loss::argmax(logits)]);
        let exp = |logit: f32| (f64::from(logit) - largest).exp();
        let sum: f64 = logits.iter().map(|&logit| exp(logit)).sum();
        let class = |index: usize| {
            let probability = match self.label_delim {
                None => exp(logits[index]) / sum,
                Some(_) => binary::sigmoid(logits[index]),
            };
            Class { class: &self.classes[index], index, probability }
        };
        Ok(order.into_iter().take(top_k).map(class).collect())
    }
}
