//! What an evaluation evaluates: the weights of a run or of a file, and the images.

use std::path::{Path, PathBuf};

use data::{
    Dataset, SplitOptions,
    formats::{DecodePolicy, LoadRequest},
    loader::OnError,
};
use models::Spec;

use crate::cli::{DataDir, EvalArgs, NamedBy};
use crate::commands::saved_network;
use crate::config::Overrides;
use crate::failure::Failure;
use crate::report::RunFolder;
use crate::run::{plan, run_data};
use crate::snapshot::{ClassDifference, DatasetRecord};
use crate::weights::WeightFile;

/// The weights to evaluate, and the images to evaluate them on.
pub(super) struct EvalTarget {
    pub model: String,
    pub weights: WeightFile,
    pub data: LoadRequest,
    pub mean: Option<Vec<f32>>,
    pub std: Option<Vec<f32>>,
    pub on_error: OnError,
    /// The checkpoint of a run, and the data set of its training. `None` for a weight file and for checkpoints of older versions.
    pub trained: Option<(PathBuf, DatasetRecord)>,
    /// The run, if its own data set is evaluated.
    pub run: Option<RunFolder>,
    /// `data.limit_test` of this run.
    pub limit: Option<usize>,
}

impl EvalTarget {
    /// Opens a checkpoint of a run: `--checkpoint`, or the best one, or the newest one if it has no best. Takes the averaged
    /// weights if the checkpoint has them.
    pub fn of_run(run: &Path, arguments: &EvalArgs) -> Result<Self, Failure> {
        let folder = RunFolder::open(run).map_err(|error| Failure::usage(&error, &error.hint))?;
        // The run keeps its own images, as a resumed run does: the variable is for other data sets.
        let data_dir = arguments.data_dir.clone().filter(|dir| arguments.data.is_some() || dir.by == NamedBy::Flag);
        let overrides = Overrides { data_dir, ..Overrides::default() };
        let plan = plan::load(&folder.config(), &overrides)?;
        let loaded = saved_network::load(&folder, arguments.checkpoint.as_deref())?;
        let own_data = arguments.data.as_ref().is_none_or(|name| *name == plan.data.name);
        let on_error = if own_data { run_data::on_error(&plan) } else { OnError::Fail };
        let snapshot = loaded.snapshot;
        // With another --image-size, scale `resize` too, so that the crop covers the same part of the image.
        let resize = plan.data.resize.map(|side| match (arguments.image_size, plan.data.image_size) {
            (Some(size), Some(own)) => (side * size).div_ceil(own),
            _ => side,
        });
        Ok(Self {
            model: plan.model.name.clone(),
            weights: WeightFile::of_state(&loaded.path, snapshot.ema.unwrap_or(snapshot.model)),
            data: LoadRequest {
                image_size: arguments.image_size.or(plan.data.image_size),
                resize: arguments.resize.or(resize),
                defer_missing: on_error == OnError::Replace,
                // If the manifest has no test images, evaluate on the images that the run did not train on.
                limit_train: Some(plan.data.limit_train).filter(|limit| own_data && *limit > 0),
                split: if own_data { run_data::validation_options(&plan) } else { SplitOptions::default() },
                label_delim: arguments.label_delim.or(plan.data.label_delim.filter(|_| own_data)),
                ..request(
                    arguments.data.as_ref().unwrap_or(&plan.data.name),
                    if own_data { plan.data.dir.as_deref() } else { DataDir::path(&arguments.data_dir) },
                )
            },
            // Use the run's mean and deviation for other data sets too: the network was trained with these values.
            mean: arguments.mean.clone().or(plan.data.mean),
            std: arguments.std.clone().or(plan.data.std),
            on_error,
            trained: loaded.dataset.map(|dataset| (loaded.path, dataset)),
            run: own_data.then_some(folder),
            limit: Some(plan.data.limit_test).filter(|limit| own_data && *limit > 0),
        })
    }

    /// Opens a weight file with PyTorch's names, or the folder of a checkpoint.
    pub fn of_file(model: &str, weights: &Path, arguments: &EvalArgs) -> Result<Self, Failure> {
        let data = arguments
            .data
            .as_deref()
            .ok_or_else(|| Failure::usage("--weights: no data set to evaluate on", "name one: --data cifar10"))?;
        models::find(model).map_err(|error| Failure::usage(format!("--model {model}: {error}"), error.hint()))?;
        Ok(Self {
            model: model.to_owned(),
            weights: WeightFile::open(weights)?,
            data: LoadRequest {
                image_size: arguments.image_size,
                resize: arguments.resize,
                label_delim: arguments.label_delim,
                ..request(data, DataDir::path(&arguments.data_dir))
            },
            mean: arguments.mean.clone(),
            std: arguments.std.clone(),
            on_error: OnError::Fail,
            trained: None,
            run: None,
            limit: None,
        })
    }

    /// Returns whether an image may have several classes.
    pub fn is_multi_label(&self) -> bool {
        self.data.label_delim.is_some()
    }

    /// Checks that the images have the size and the classes of the run.
    pub fn check_trained(&self, test: &Dataset) -> Result<(), Failure> {
        let Some((checkpoint, trained)) = &self.trained else { return Ok(()) };
        let data = DatasetRecord::of(test);
        if let (None, Some(cause)) = (self.data.image_size, trained.shape_difference(&data)) {
            let hint = "resize the files to the size of the run's images; --image-size resizes them to a square";
            return Err(Failure::usage(format!("{}: {cause}", checkpoint.display()), hint));
        }
        let Some((difference, cause)) = trained.class_difference(&data) else { return Ok(()) };
        let hint = match difference {
            ClassDifference::MultiLabel if trained.multi_label => {
                "say what separates the classes of an image: --label-delim ';'".into()
            }
            ClassDifference::MultiLabel => "leave --label-delim out: each image of the run has one class".into(),
            ClassDifference::Number => "evaluate the run on images of its classes".into(),
            ClassDifference::Name => format!(
                "give the classes the names and the order of the run's; to compare labels by their numbers, replace --run: trainer \
                 eval --model {} --weights {} --data {}",
                self.model,
                checkpoint.display(),
                self.data.name
            ),
        };
        Err(Failure::usage(format!("{}: {cause}", checkpoint.display()), hint))
    }

    /// Checks that the run's network has the same weights for images of `--image-size`: those of some networks depend on the size.
    pub fn check_image_size(&self, test: &Dataset) -> Result<(), Failure> {
        let Some((checkpoint, trained)) = &self.trained else { return Ok(()) };
        let [channels, height, width] = trained.shape;
        let (num_classes, own) = (trained.classes.len(), [height, width]);
        let lengths = |image_size: [usize; 2]| {
            let spec = Spec { num_classes, in_channels: channels, image_size };
            let network = models::skip_init(&self.model, &spec).ok()?;
            Some(models::state_dict(&network).iter().map(|tensor| tensor.values.len()).collect::<Vec<_>>())
        };
        let given = [test.shape.height, test.shape.width];
        if given == own {
            return Ok(());
        }
        // Other mistakes are explained when the network is built.
        let (Some(given_lengths), Some(own_lengths)) = (lengths(given), lengths(own)) else { return Ok(()) };
        if given_lengths == own_lengths {
            return Ok(());
        }
        let cause = format!(
            "{}: {} for images of {}x{} pixels has other weights than for the run's {height}x{width}",
            checkpoint.display(),
            self.model,
            given[0],
            given[1]
        );
        let hint = match self.data.image_size {
            Some(side) if height == width => format!("use --image-size {height} instead of {side}, or leave it out"),
            _ => format!("evaluate the run on images of {height}x{width} pixels"),
        };
        Err(Failure::usage(cause, hint))
    }
}

fn request(name: &str, dir: Option<&Path>) -> LoadRequest {
    let dir = dir.map_or_else(run_data::cache_folder, Path::to_owned);
    // Decode in the epoch, not at the start: an evaluation needs each test image once and no training image.
    LoadRequest {
        name: name.to_owned(),
        dir: Some(dir),
        decode: DecodePolicy::Epoch,
        only_for_evaluation: true,
        ..LoadRequest::default()
    }
}
