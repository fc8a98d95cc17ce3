//! `trainer export`: writes a run's weights to a file that PyTorch loads, or its network to an ONNX model.

use std::path::Path;

use models::graph::FoldedNorm;
use models::{Graph, Spec, StateTensor};

use super::saved_network;
use crate::cli::ExportArgs;
use crate::config::{Overrides, RunPlan};
use crate::console;
use crate::engine::checkpoint::LoadedCheckpoint;
use crate::failure::Failure;
use crate::files::write_atomic;
use crate::report::RunFolder;
use crate::run::{plan, run_data};
use crate::snapshot::DatasetRecord;
use crate::text::thousands;
use crate::weights::onnx::{self, OnnxDescription, OnnxModel};
use crate::weights::{self, Purpose, WeightFile, WeightTarget};

/// The format of the exported file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileFormat {
    Safetensors,
    Onnx,
}

/// The graph and the weights of a run's network, for ONNX and for `--fold`.
struct ExportedNetwork {
    graph: Graph,
    /// All weights, including the weights that the graph does not use.
    state: Vec<StateTensor>,
    /// The batch norms that were folded into convolutions; `None` without `--fold`.
    folded: Option<Vec<FoldedNorm>>,
    /// Number of batch norms before folding.
    norms: usize,
    dataset: DatasetRecord,
}

/// Writes the file and prints its content.
///
/// # Errors
/// A run or checkpoint cannot be read, or the file exists already or cannot be written.
pub(super) fn run(arguments: &ExportArgs) -> Result<(), Failure> {
    let to = &arguments.to;
    let format = check_target(to, arguments.format.as_deref(), arguments.force)?;
    let folder = RunFolder::open(&arguments.run).map_err(|error| Failure::usage(&error, &error.hint))?;
    let plan = plan::load(&folder.config(), &Overrides::default())?;
    let mut loaded = saved_network::load(&folder, arguments.checkpoint.as_deref())?;
    let snapshot = std::mem::take(&mut loaded.snapshot);
    let (state, which) = match snapshot.ema {
        Some(ema) if !arguments.no_ema => (ema, "averaged weights"),
        None if arguments.no_ema => {
            let message = format!("--no-ema: {} has no averaged weights", loaded.path.display());
            return Err(Failure::usage(message, "leave --no-ema out: the run was trained without train.ema"));
        }
        _ => (snapshot.model, "weights"),
    };
    if arguments.normalise && format != FileFormat::Onnx {
        let message = format!("--normalise: {} holds weights alone, which normalise nothing", to.display());
        return Err(Failure::usage(message, "leave --normalise out, or export the network: --to FILE.onnx"));
    }
    let file = match (format, arguments.fold) {
        (FileFormat::Safetensors, false) => safetensors(&plan, &loaded, &state, None, to)?,
        (FileFormat::Safetensors, true) => {
            let network = ExportedNetwork::of(&plan, &loaded, state, true)?;
            safetensors(&plan, &loaded, &network.state, Some(&network), to)?
        }
        (FileFormat::Onnx, fold) => {
            let network = ExportedNetwork::of(&plan, &loaded, state, fold)?;
            onnx(&plan, &loaded, &network, arguments.normalise, to)?
        }
    };
    write_atomic(to, &file.bytes).map_err(|error| {
        Failure::run(&error, "name a file in a folder that exists, is writable and has space: --to FILE")
    })?;
    console::print(format_args!(
        "{}: {which} of {} after {} steps, {}, {} bytes\n{}",
        to.display(),
        loaded.path.display(),
        thousands(loaded.progress.step),
        file.content,
        thousands(file.bytes.len() as u64),
        file.usage,
    ));
    Ok(())
}

/// A file to write.
struct Exported {
    bytes: Vec<u8>,
    /// Description of the content, for the screen.
    content: String,
    /// How to read the file in another program, for the screen.
    usage: String,
}

/// Encodes the weights for PyTorch. `network` is the network of the weights with `--fold`, and `None` without.
fn safetensors(
    plan: &RunPlan,
    loaded: &LoadedCheckpoint,
    state: &[StateTensor],
    network: Option<&ExportedNetwork>,
    to: &Path,
) -> Result<Exported, Failure> {
    // Estimate of `num_batches_tracked`. Each step has `accumulate` batches, but the last step of an epoch may have had fewer.
    // The difference has no effect: no result of PyTorch depends on this counter.
    let batches = loaded.progress.step * plan.train.accumulate as u64;
    let folded = network.and_then(|network| network.folded.as_deref()).unwrap_or_default();
    let encoded = match folded.is_empty() {
        true => weights::encode(state, batches),
        false => weights::encode_folded(state, batches, folded),
    };
    let failed =
        |error| Failure::run(format!("{}: cannot write the weights: {error}", to.display()), "please report this");
    let load = format!("model.load_state_dict(safetensors.torch.load_file({:?}))", to.display().to_string());
    Ok(Exported {
        bytes: encoded.map_err(failed)?,
        content: format!("{} tensors{}", state.len(), network.map_or_else(String::new, ExportedNetwork::folding)),
        usage: match folded.is_empty() {
            true => format!("in PyTorch: {load}"),
            false => format!("in PyTorch: fold the model too (docs/weights.md), then {load}"),
        },
    })
}

/// Encodes the network as an ONNX model. With `normalise`, the model normalises its input.
fn onnx(
    plan: &RunPlan,
    loaded: &LoadedCheckpoint,
    network: &ExportedNetwork,
    normalise: bool,
    to: &Path,
) -> Result<Exported, Failure> {
    let (mean, std) = run_data::normalisation(plan)?;
    let list = |values: &[f32]| format!("[{}]", values.iter().map(f32::to_string).collect::<Vec<_>>().join(", "));
    let classes = serde_json::json!(network.dataset.classes).to_string();
    let description = OnnxDescription {
        model: &plan.model.name,
        input: match normalise {
            false => {
                "images [batch, channels, height, width], RGB or grey: (pixel / 255 - mean) / std, mean and std of the metadata"
            }
            true => {
                "images [batch, channels, height, width], RGB or grey, in 0..1: pixel / 255. The model normalises them"
            }
        },
        normalise: normalise.then_some((&mean, &std)),
        metadata: &[
            ("classes", classes),
            ("normalised", if normalise { "in the model" } else { "by the caller" }.to_owned()),
            ("mean", list(&mean)),
            ("std", list(&std)),
            ("task", if network.dataset.multi_label { "multi-label" } else { "single-label" }.to_owned()),
            ("data", plan.data.name.clone()),
            ("step", loaded.progress.step.to_string()),
        ],
    };
    let OnnxModel { bytes, nodes } = onnx::encode(&network.graph, &network.state, &description).map_err(|bytes| {
        let message =
            format!("{}: the model has {} bytes, an ONNX file less than 2 GiB", to.display(), thousands(bytes as u64));
        Failure::usage(message, "export the weights alone, with --to FILE.safetensors")
    })?;
    let inputs = network.graph.image_shape.map(|side| side.to_string()).join(", ");
    Ok(Exported {
        bytes,
        content: format!("{nodes} nodes of ONNX opset {}{}", onnx::OPSET, network.folding()),
        usage: format!(
            "input {:?} [batch, {inputs}], {}; output {:?} [batch, {}]",
            onnx::IMAGES,
            if normalise { "pixels in 0..1, which the model normalises" } else { "normalised as in training" },
            onnx::LOGITS,
            network.dataset.classes.len()
        ),
    })
}

impl ExportedNetwork {
    /// Builds the run's network with the weights of `state` and traces its evaluation.
    fn of(plan: &RunPlan, loaded: &LoadedCheckpoint, state: Vec<StateTensor>, fold: bool) -> Result<Self, Failure> {
        let dataset = saved_network::dataset(plan, loaded)?;
        let [channels, height, width] = dataset.shape;
        let spec = Spec { num_classes: dataset.classes.len(), in_channels: channels, image_size: [height, width] };
        let (model, data) = (&plan.model.name, &plan.data.name);
        let target = WeightTarget { model, spec, data, purpose: Purpose::Evaluation };
        let file = WeightFile::of_state(&loaded.path, state);
        let mistake = |error| plan::model_mistake(plan, &error);
        let network = saved_network::build(&target, &file, None, mistake)?.network;
        let graph = Graph::from_network(&network, &spec).map_err(|error| {
            let message = format!("{model} cannot be exported as a graph: {error}");
            Failure::usage(message, "export the weights alone, with --to FILE.safetensors and without --fold")
        })?;
        let state = models::state_dict(&network);
        let norms = graph.batch_norms();
        let (graph, state, folded) = match fold {
            true => {
                let (graph, state, folded) = graph.fold_batch_norms(state);
                (graph, state, Some(folded))
            }
            false => (graph, state, None),
        };
        Ok(Self { graph, state, folded, norms, dataset })
    }

    /// Describes the folding, for the screen; empty without `--fold`.
    fn folding(&self) -> String {
        let folded = self.folded.as_ref().map(Vec::len);
        folded.map_or_else(String::new, |folded| format!(" ({folded} of {} batch norms folded)", self.norms))
    }
}

/// Returns the format of the file. Refuses a file name that does not match the format, and a file that must not be overwritten.
fn check_target(to: &Path, format: Option<&str>, force: bool) -> Result<FileFormat, Failure> {
    let ending = to.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    let named = |ending: &str| to.with_extension(ending).display().to_string();
    let chosen = match (ending, format) {
        ("safetensors", None | Some("safetensors")) => FileFormat::Safetensors,
        ("onnx", None | Some("onnx")) => FileFormat::Onnx,
        (_, Some(format)) => {
            let message = format!("--to {}: --format {format} writes a file with the ending .{format}", to.display());
            return Err(Failure::usage(message, format!("name the file {}", named(format))));
        }
        (_, None) => {
            let message = format!("--to {}: unknown file extension", to.display());
            let hint =
                format!("name the file {} (weights for PyTorch) or {} (ONNX)", named("safetensors"), named("onnx"));
            return Err(Failure::usage(message, hint));
        }
    };
    check_output_path(to, force, "name a regular file: --to FILE")?;
    Ok(chosen)
}

/// Refuses a folder, a device and a pipe, and without `force` a file that exists already. `instead` is the hint for a device or a
/// pipe.
pub(super) fn check_output_path(to: &Path, force: bool, instead: &str) -> Result<(), Failure> {
    if to.is_dir() {
        return Err(Failure::usage(format!("--to {}: is a folder", to.display()), "name a file"));
    }
    // A rename would replace the device or the pipe itself.
    if is_below_system_folder(to) || to.metadata().is_ok_and(|metadata| !metadata.is_file()) {
        return Err(Failure::usage(format!("--to {}: is not a regular file", to.display()), instead));
    }
    if !force && to.symlink_metadata().is_ok() {
        return Err(Failure::usage(
            format!("--to {}: the file exists already", to.display()),
            "choose another name, or add --force to replace it",
        ));
    }
    Ok(())
}

/// Returns whether the path is below /dev or /proc. /dev/shm holds regular files.
fn is_below_system_folder(to: &Path) -> bool {
    let is_below =
        |path: &Path| (path.starts_with("/dev") && !path.starts_with("/dev/shm")) || path.starts_with("/proc");
    // The folder may be a link, or be written with `..`.
    let folder = to.parent().and_then(|folder| folder.canonicalize().ok());
    std::path::absolute(to).is_ok_and(|path| is_below(&path)) || folder.is_some_and(|folder| is_below(&folder))
}
