use std::{collections::BTreeMap, fs, path::PathBuf};

use models::{StateTensor, state_dict};
use proptest::prelude::*;
use serde::Deserialize;

use super::*;

const SPEC: models::Spec = models::Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/weights").join(name)
}

fn network(model: &str, seed: u64) -> models::Network {
    models::build(model, &SPEC, seed, &burn::tensor::Device::flex()).unwrap()
}

/// Loads `state` as if from a file.
fn load_state(model: &str, state: Vec<StateTensor>) -> Result<String, FileError> {
    load_for(Purpose::Evaluation, model, state).map(|loaded| loaded.origin)
}

fn load_for(purpose: Purpose, model: &str, state: Vec<StateTensor>) -> Result<LoadedWeights, FileError> {
    let file = WeightFile::of_state(Path::new("weights.pth"), state);
    load(network(model, 2), &target(purpose, model), &file)
}

fn target(purpose: Purpose, model: &str) -> WeightTarget<'_> {
    WeightTarget { model, spec: SPEC, data: "cifar10", purpose }
}

/// Loads a `state` that must not fit. Returns the cause and the hint.
fn refused(model: &str, state: Vec<StateTensor>) -> String {
    let error = load_state(model, state).unwrap_err();
    format!("{error}\n{}", error.hint)
}

#[derive(Deserialize)]
struct Layout {
    shape: Vec<usize>,
    values: Vec<u32>,
}

/// Types, strides, offsets and shared storages are bit for bit equal to PyTorch's.
#[test]
fn every_layout_of_pytorchs_files_is_read() {
    let expected: BTreeMap<String, Layout> =
        serde_json::from_slice(&fs::read(golden("layouts.json")).unwrap()).unwrap();
    for name in ["layouts.pth", "layouts_legacy.pth"] {
        let file = WeightFile::open(&golden(name)).unwrap();
        let mut others = Vec::new();
        for tensor in &file.tensors {
            match expected.get(&tensor.name) {
                Some(layout) => {
                    assert_eq!(tensor.shape, layout.shape, "{name}: {}", tensor.name);
                    let bits: Vec<_> = tensor.values().unwrap().iter().map(|value| value.to_bits()).collect();
                    assert_eq!(bits, layout.values, "{name}: {}", tensor.name);
                }
                None => others.push((tensor.name.as_str(), tensor.dtype)),
            }
        }
        assert_eq!(file.tensors.len(), expected.len() + 2);
        assert_eq!(
            others,
            [("bn.num_batches_tracked", WeightDType::Other("int64")), ("mask", WeightDType::Other("bool"))]
        );
    }
}

/// Opens arbitrary `bytes` and reads every tensor that a network could request. An error is allowed, a panic is not.
fn open_without_panic(name: &str, bytes: &[u8]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    let Ok(file) = WeightFile::open(&path) else { return };
    for tensor in &file.tensors {
        // A network requests only tensors of its own shape, so a larger claimed size is never allocated.
        if tensor.shape.iter().try_fold(1usize, |n, &side| n.checked_mul(side)).is_some_and(|n| n < 1 << 16) {
            let _ = tensor.values();
        }
    }
}

fn safetensors_bytes() -> Vec<u8> {
    let state =
        [StateTensor::new("a.weight", vec![2, 3], vec![0.5; 6]), StateTensor::new("a.running_var", vec![1], vec![1.0])];
    encode(&state, 7).unwrap()
}

#[test]
fn files_cut_short_are_refused() {
    for (name, bytes) in [
        ("layouts.pth", fs::read(golden("layouts.pth")).unwrap()),
        ("layouts_legacy.pth", fs::read(golden("layouts_legacy.pth")).unwrap()),
        ("a.safetensors", safetensors_bytes()),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        for length in (0..bytes.len()).step_by(1 + bytes.len() / 200) {
            fs::write(&path, &bytes[..length]).unwrap();
            let read = WeightFile::open(&path).map_err(|error| error.to_string()).and_then(|file| {
                // The other two tensors are refused in a complete file too.
                let mut floats = file.tensors.iter().filter(|tensor| !matches!(tensor.dtype, WeightDType::Other(_)));
                floats.try_for_each(|tensor| tensor.values().map(drop))
            });
            assert!(read.is_err(), "{name} cut to {length} of {} bytes", bytes.len());
        }
    }
}

/// These files are complete, and another copy would not help.
#[test]
fn files_without_a_state_dict_are_not_called_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let zip = folder.path().join("arrays.pth");
    // An archive of one empty file, `a`: local header, central directory (47 bytes, from byte 31 on) and the record at the end.
    let (local, central) = ([&[0; 22][..], &[1, 0, 0, 0]].concat(), [&[0; 24][..], &[1], &[0; 17]].concat());
    let end = [0, 0, 0, 0, 1, 0, 1, 0, 47, 0, 0, 0, 31, 0, 0, 0, 0, 0];
    let parts = [b"PK\x03\x04", &local[..], b"aPK\x01\x02", &central, b"aPK\x05\x06", &end];
    fs::write(&zip, parts.concat()).unwrap();
    for (path, cause) in [
        (golden("whole_model_legacy.pth"), "a PyTorch file that holds a whole model, not its weights"),
        (zip, "a zip archive, but not one that torch.save wrote"),
    ] {
        let error = WeightFile::open(&path).err().expect(cause);
        assert!(error.to_string().contains(cause) && error.hint.contains("torch.save(model.state_dict()"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn mutated_files_never_panic(
        which in 0..3usize,
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        is_cut in prop::bool::weighted(0.2),
    ) {
        let (name, mut bytes) = match which {
            0 => ("a.pth", fs::read(golden("layouts.pth")).unwrap()),
            1 => ("a.pth", fs::read(golden("layouts_legacy.pth")).unwrap()),
            _ => ("a.safetensors", safetensors_bytes()),
        };
        for (place, byte) in edits {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        if is_cut {
            let length = cut.index(bytes.len());
            bytes.truncate(length);
        }
        open_without_panic(name, &bytes);
    }

    #[test]
    fn random_bytes_never_panic(
        head in prop::sample::select(vec![&b"PK\x03\x04"[..], b"\x80\x02", b"\x80\x04", b"\x10\0\0\0\0\0\0\0{", b""]),
        tail in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        open_without_panic("a.pth", &[head, &tail].concat());
    }
}

/// A pickle that would run a command in Python is only data here.
#[test]
fn no_code_in_a_pickle_is_run() {
    let folder = tempfile::tempdir().unwrap();
    let (path, proof) = (folder.path().join("evil.pth"), folder.path().join("proof"));
    let command = format!("touch {}", proof.display());
    let pickle = format!("\u{80}\u{2}cos\nsystem\n(X{}{command}tR.", "\0\0\0\0");
    let mut bytes: Vec<u8> = pickle.chars().map(|c| c as u8).collect();
    let length = bytes.windows(4).position(|w| w == [0; 4]).unwrap();
    bytes[length..length + 4].copy_from_slice(&(command.len() as u32).to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let error = WeightFile::open(&path).err().expect("not a state dict");
    assert_eq!(error.cause, "a PyTorch file that holds no dictionary of weights");
    assert!(!proof.exists());
}

#[test]
fn a_file_without_weights_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.pth");
    let cause = |path: &Path| WeightFile::open(path).err().expect("refused").cause;
    assert_eq!(cause(Path::new("/dev/zero")), "it is a device, not a file");
    assert!(cause(&path).starts_with("No such file"));
    fs::write(&path, "").unwrap();
    assert_eq!(cause(&path), "the file is empty");
    fs::write(&path, "conv1.weight 0.5").unwrap();
    assert_eq!(cause(&path), "not a file of weights that this program knows");
    assert_eq!(cause(folder.path()), "is a folder without manifest.json, so it is not a checkpoint");
    fs::write(folder.path().join("config.toml"), "").unwrap();
    assert_eq!(cause(folder.path()), "is a run folder, not a file of weights");
    fs::write(&path, safetensors::serialize(Vec::<(&str, safetensors::tensor::TensorView)>::new(), None).unwrap())
        .unwrap();
    assert_eq!(cause(&path), "a safetensors file without a tensor");
}

#[test]
fn names_of_wrappers_and_counters_are_ignored() {
    let state = state_dict(&network("resnet18", 1));
    let renamed = |prefix: &str| -> Vec<StateTensor> {
        let with_counters = encode(&state, 5).unwrap();
        let file = safetensors::SafeTensors::deserialize(&with_counters).unwrap();
        assert_eq!(file.len(), 122, "as PyTorch's state_dict()");
        let counters = file.names().into_iter().filter(|name| name.ends_with("num_batches_tracked"));
        let counters = counters.map(|name| StateTensor::new(format!("{prefix}{name}"), vec![], vec![5.0]));
        let tensors = state.iter().cloned().map(|t| StateTensor { name: format!("{prefix}{}", t.name), ..t });
        tensors.chain(counters).collect()
    };
    assert_eq!(load_state("resnet18", renamed("module.")).unwrap(), "weights.pth");
    let mut ema = renamed("model_ema.module.");
    ema.push(StateTensor::new("model_ema.n_averaged", vec![], vec![3.0]));
    assert_eq!(load_state("resnet18", ema).unwrap(), "weights.pth, its `model_ema`");
    // The segment is skipped anywhere in a path: `model.layer1 = DataParallel(model.layer1)`.
    let inside = state.iter().cloned().map(|t| StateTensor { name: t.name.replace("layer1.", "layer1.module."), ..t });
    assert_eq!(load_state("resnet18", inside.collect()).unwrap(), "weights.pth");
    // Two tensors with one name: neither is taken.
    let twice: Vec<_> = [renamed(""), renamed("module.")].concat();
    let error = load_state("resnet18", twice).unwrap_err();
    assert!(error.cause.contains("unexpected") && error.cause.contains("98 more"), "{error}");
}

#[test]
fn tensors_that_do_not_fit_are_named_with_a_model_that_they_fit() {
    let state = |model: &str| state_dict(&network(model, 1));
    insta::assert_snapshot!(refused("resnet18", state("resnet34")), @r"
    weights.pth: the weights are not this network's: unexpected layer1.2.conv1.weight, layer1.2.bn1.weight, layer1.2.bn1.bias, layer1.2.bn1.running_mean and 76 more
    they are weights of resnet34: give --model resnet34
    ");
    insta::assert_snapshot!(refused("lenet", state("resnet50")), @r"
    weights.pth: the weights are not this network's: missing conv1.bias, conv2.weight, conv2.bias, fc1.weight and 5 more; unexpected bn1.weight, bn1.bias, bn1.running_mean, bn1.running_var and 262 more; wrong shape: conv1.weight is [64, 3, 3, 3], the network's is [6, 3, 5, 5]
    they are weights of resnet50: give --model resnet50
    ");

    let mut partial = state("lenet");
    partial.truncate(7);
    insta::assert_snapshot!(refused("lenet", partial), @r"
    weights.pth: the weights are not this network's: missing fc2.bias, fc3.weight, fc3.bias
    the file holds 7 of the network's 10 tensors: save the whole of it, model.state_dict()
    ");

    let classes = |classes| {
        let spec = models::Spec { num_classes: classes, ..SPEC };
        state_dict(&models::build("resnet18", &spec, 1, &burn::tensor::Device::flex()).unwrap())
    };
    insta::assert_snapshot!(refused("resnet18", classes(100)), @r"
    weights.pth: the weights are not this network's: wrong shape: linear.weight is [100, 512], the network's is [10, 512], linear.bias is [100], the network's is [10]
    they are weights of resnet18 for 100 classes and images 3x32x32, as in cifar100: give --data cifar100
    ");
    insta::assert_snapshot!(refused("resnet18", classes(7)), @r"
    weights.pth: the weights are not this network's: wrong shape: linear.weight is [7, 512], the network's is [10, 512], linear.bias is [7], the network's is [10]
    they were trained on 7 classes, cifar10 has 10: name their own data set with --data
    ");

    let mut other = state("lenet");
    other.push(StateTensor::new("head.weight", vec![3], vec![0.0; 3]));
    other[4].shape = vec![400, 120];
    insta::assert_snapshot!(refused("lenet", other), @r"
    weights.pth: the weights are not this network's: unexpected head.weight; wrong shape: fc1.weight is [400, 120], the network's is [120, 400]
    no model of `trainer models` has exactly these tensors; compare the names above with the model's code
    ");
}

#[test]
fn a_tensor_that_is_not_of_floats_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    let state = state_dict(&network("lenet", 1));
    let bytes: Vec<Vec<u8>> = state.iter().map(|t| vec![0; 8 * t.values.len()]).collect();
    let views = state.iter().zip(&bytes).map(|(t, bytes)| {
        (
            t.name.as_str(),
            safetensors::tensor::TensorView::new(safetensors::Dtype::I64, t.shape.clone(), bytes).unwrap(),
        )
    });
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    let target = target(Purpose::Evaluation, "lenet");
    let error = load(network("lenet", 2), &target, &WeightFile::open(&path).unwrap()).unwrap_err();
    assert_eq!(error.cause, "tensor `conv1.weight` is of type int64, weights are floats");
}

#[test]
fn an_exported_state_is_loaded_again_and_has_counters() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    let state = state_dict(&network("resnet18", 1));
    let bytes = encode(&state, 391).unwrap();
    assert_eq!(bytes, encode(&state, 391).unwrap(), "equal states give equal files");
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let counter = file.tensor("layer4.1.bn2.num_batches_tracked").unwrap();
    assert_eq!(
        (counter.dtype(), counter.shape(), counter.data()),
        (safetensors::Dtype::I64, &[][..], &391i64.to_le_bytes()[..])
    );
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    fs::write(&path, bytes).unwrap();
    let target = target(Purpose::Evaluation, "resnet18");
    let loaded = load(network("resnet18", 2), &target, &WeightFile::open(&path).unwrap()).unwrap();
    assert_eq!(state_dict(&loaded.network), state);
}

fn classes(model: &str, num_classes: usize) -> Vec<StateTensor> {
    let spec = models::Spec { num_classes, ..SPEC };
    state_dict(&models::build(model, &spec, 1, &burn::tensor::Device::flex()).unwrap())
}

#[test]
fn training_keeps_the_initial_classifier_if_the_number_of_classes_differs() {
    for (model, head) in [("resnet18", "linear"), ("vgg16", "classifier"), ("mobilenet_v2_imagenet", "classifier.1")] {
        let file = classes(model, 100);
        let loaded = load_for(Purpose::Training, model, file.clone()).unwrap();
        assert_eq!(loaded.new_head, Some(NewHead { name: head.to_owned(), file_classes: 100 }));
        let initial = state_dict(&network(model, 2));
        for ((tensor, of_file), initial) in state_dict(&loaded.network).into_iter().zip(file).zip(initial) {
            let of_head = tensor.name.starts_with(head);
            let expected = if of_head { initial.values } else { of_file.values };
            assert_eq!(tensor.values, expected, "{model} {}", tensor.name);
        }
        // As many classes: the file's classifier.
        let same = load_for(Purpose::Training, model, classes(model, 10)).unwrap();
        assert_eq!((same.new_head, state_dict(&same.network)), (None, classes(model, 10)));
    }
}

#[test]
fn training_refuses_every_other_difference() {
    let refused = |model: &str, state: Vec<StateTensor>| {
        let error = load_for(Purpose::Training, model, state).unwrap_err();
        format!("{error}\n{}", error.hint)
    };
    // Two differences: the classifier and the images' channels.
    let grey = models::Spec { num_classes: 100, in_channels: 1, image_size: [32, 32] };
    let grey = state_dict(&models::build("resnet18", &grey, 1, &burn::tensor::Device::flex()).unwrap());
    insta::assert_snapshot!(refused("resnet18", grey), @r#"
    weights.pth: the weights are not this network's: wrong shape: conv1.weight is [64, 1, 3, 3], the network's is [64, 3, 3, 3], linear.weight is [100, 512], the network's is [10, 512], linear.bias is [100], the network's is [10]
    they are weights of resnet18 for images 1x28x28, as in mnist, fashion-mnist, fashion-mini: train on such images
    "#);
    let grey = models::Spec { num_classes: 10, in_channels: 1, image_size: [28, 28] };
    let grey = state_dict(&models::build("lenet", &grey, 1, &burn::tensor::Device::flex()).unwrap());
    insta::assert_snapshot!(refused("lenet", grey), @r#"
    weights.pth: the weights are not this network's: wrong shape: conv1.weight is [6, 1, 5, 5], the network's is [6, 3, 5, 5], fc1.weight is [120, 256], the network's is [120, 400]
    they are weights of lenet for images 1x28x28, as in mnist, fashion-mnist, fashion-mini: train on such images
    "#);
    insta::assert_snapshot!(refused("resnet18", classes("resnet34", 1000)), @r#"
    weights.pth: the weights are not this network's: unexpected layer1.2.conv1.weight, layer1.2.bn1.weight, layer1.2.bn1.bias, layer1.2.bn1.running_mean and 76 more; wrong shape: linear.weight is [1000, 512], the network's is [10, 512], linear.bias is [1000], the network's is [10]
    they are weights of resnet34: set `model.name = "resnet34"`
    "#);
    insta::assert_snapshot!(refused("resnet18_imagenet", classes("resnet18", 10)), @r#"
    weights.pth: the weights are not this network's: missing layer2.0.downsample.0.weight, layer2.0.downsample.1.weight, layer2.0.downsample.1.bias, layer2.0.downsample.1.running_mean and 13 more; unexpected layer2.0.shortcut.0.weight, layer2.0.shortcut.1.weight, layer2.0.shortcut.1.bias, layer2.0.shortcut.1.running_mean and 13 more; wrong shape: conv1.weight is [64, 3, 3, 3], the network's is [64, 3, 7, 7]
    they are weights of resnet18: set `model.name = "resnet18"`
    "#);
    // A first dimension that differs elsewhere is not a classifier.
    let mut other = classes("lenet", 10);
    other[4] = StateTensor::new("fc1.weight", vec![100, 400], vec![0.0; 40_000]);
    other[5] = StateTensor::new("fc1.bias", vec![100], vec![0.0; 100]);
    insta::assert_snapshot!(refused("lenet", other), @r#"
    weights.pth: the weights are not this network's: wrong shape: fc1.weight is [100, 400], the network's is [120, 400], fc1.bias is [100], the network's is [120]
    no model of `trainer models` has exactly these tensors; compare the names above with the model's code
    "#);
}
