//! Images that are decoded in each epoch: the same bits as from memory, crops of the original images, damaged files, archives.

use std::path::Path;
use std::sync::Arc;

use data::augment::Augment;
use data::formats::{DecodePolicy, LoadRequest, load};
use data::loader::{Batch, Loader, LoaderConfig, OnError};
use data::{DataError, Dataset, SharedPixels, SplitOptions, Splits};
use tempfile::TempDir;

#[path = "../testing/pictures.rs"]
mod pictures;

/// Writes a folder of `count` images per class to train on and four to test: PNG and JPEG files of several sizes.
fn folder(count: u32) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (split, count) in [("train", count), ("test", 4)] {
        for (class, red) in [("cat", 30), ("dog", 220)] {
            let dir = folder.path().join(split).join(class);
            std::fs::create_dir_all(&dir).unwrap();
            for index in 0..count {
                let (width, height) = (40 + 3 * index, 52 - 2 * index);
                let pixel = |x: u32, y: u32| [red, (x * 5 + index * 20) as u8, ((x * y) / 8) as u8];
                if index % 2 == 0 {
                    pictures::save_png(dir.join(format!("{index}.png")), width, height, pixel);
                } else {
                    let pixels = pictures::rgb(width, height, pixel);
                    let jpeg = pictures::jpeg(width as u16, height as u16, &pixels);
                    std::fs::write(dir.join(format!("{index}.jpg")), jpeg).unwrap();
                }
            }
        }
    }
    folder
}

fn request(name: &str, dir: &Path, decode: DecodePolicy) -> LoadRequest {
    LoadRequest { name: name.into(), dir: Some(dir.to_owned()), image_size: Some(24), decode, ..LoadRequest::default() }
}

fn splits(dir: &Path, decode: DecodePolicy) -> Splits {
    load(&request("image-folder", dir, decode)).unwrap()
}

fn config(augment: &[Augment]) -> LoaderConfig {
    LoaderConfig {
        global_batch: 4,
        seed: 5,
        augment: augment.to_vec(),
        mean: vec![0.5; 3],
        std: vec![0.25; 3],
        ..LoaderConfig::default()
    }
}

fn batches(set: &Dataset, config: LoaderConfig, epoch: usize) -> Result<Vec<Batch>, DataError> {
    Loader::new(Arc::new(set.clone()), config).unwrap().epoch(epoch, 0).collect()
}

/// Returns each sample's id and pixels, of all ranks, by id.
fn samples(set: &Dataset, config: &LoaderConfig, world_size: usize, epoch: usize) -> Vec<(u32, Vec<f32>)> {
    let mut all = Vec::new();
    for rank in 0..world_size {
        for batch in batches(set, LoaderConfig { rank, world_size, ..config.clone() }, epoch).unwrap() {
            all.extend(batch.ids.iter().copied().zip(batch.images.chunks(set.shape.len()).map(<[f32]>::to_vec)));
        }
    }
    all.sort_by_key(|(id, _)| *id);
    all
}

/// Processes that share the pixels decode parts of any size, which begin and end within an image.
#[test]
fn parts_of_all_pixels_are_those_in_memory() {
    let folder = folder(6);
    let split = SplitOptions { validation: Some(0.34), fraction: None, seed: 3 };
    let with = |defer_decoding| {
        let decode = DecodePolicy::Memory;
        load(&LoadRequest { defer_decoding, split, ..request("image-folder", folder.path(), decode) }).unwrap()
    };
    let (memory, mut shared) = (with(false).train, with(true).train);
    let encoded = shared.encoded.clone().unwrap();
    assert!(encoded.is_decoding_deferred() && shared.images.is_empty());
    assert!(!splits(folder.path(), DecodePolicy::Epoch).train.encoded.unwrap().is_decoding_deferred());
    let all = memory.all_pixels();
    for part in [1, 100, 24 * 24 * 3, 5000, all.len(), all.len() + 7] {
        let mut pixels = vec![0xaa; all.len().next_multiple_of(part)];
        for (index, out) in pixels.chunks_exact_mut(part).enumerate().filter(|(index, _)| part > 99 || index % 997 == 0)
        {
            encoded.decode_bytes(index * part, out).unwrap();
        }
        let same = |(index, (a, b)): (usize, (&u8, &u8))| (part < 100 && index % 997 != 0) || a == b;
        assert!(pixels.iter().zip(all).enumerate().all(same), "parts of {part}");
        assert!(pixels[all.len()..].iter().all(|byte| *byte == 0xaa), "after the last image");
        if part == all.len() {
            shared.share(SharedPixels::new(pixels));
        }
    }
    let same =
        |config: LoaderConfig| batches(&memory, config.clone(), 1).unwrap() == batches(&shared, config, 1).unwrap();
    assert!(same(config(&[Augment::Flip])) && shared.encoded.is_none());
    shared.truncate(3);
    assert_eq!(shared.all_pixels(), &all[..3 * memory.shape.len()]);
}

#[test]
fn batches_have_the_bits_of_images_in_memory() {
    let folder = folder(6);
    for (resize, validation) in [(None, None), (Some(30), None), (None, Some(0.34))] {
        let with = |decode| {
            let split = SplitOptions { validation, fraction: None, seed: 3 };
            load(&LoadRequest { resize, split, ..request("image-folder", folder.path(), decode) }).unwrap()
        };
        let (memory, epoch) = (with(DecodePolicy::Memory), with(DecodePolicy::Epoch));
        assert!(memory.train.encoded.is_none() && epoch.train.encoded.is_some() && epoch.train.images.is_empty());
        assert_eq!(epoch.val.is_some(), validation.is_some());
        let augment = [Augment::Crop { padding: 4, fill: Default::default() }, Augment::Flip, Augment::TrivialAugment];
        for config in [
            config(&augment),
            LoaderConfig { workers: 3, prefetch: 3, mixup: Some(0.5), ..config(&augment) },
            LoaderConfig { sampler_weights: vec![1.0, 2.0], ..config(&augment) },
            LoaderConfig { evaluation: true, ..config(&[]) },
        ] {
            for ((name, memory), (_, epoch)) in memory.iter().zip(epoch.iter()) {
                for number in [1, 2] {
                    let [memory, epoch] = [memory, epoch].map(|set| batches(set, config.clone(), number).unwrap());
                    assert!(memory == epoch && !memory.is_empty(), "{name}, epoch {number}, {config:?}");
                }
            }
        }
    }
}

#[test]
fn resized_crops_depend_on_seed_epoch_and_sample_alone() {
    let folder = folder(6);
    let set = splits(folder.path(), DecodePolicy::Epoch).train;
    let crop = Augment::RandomResizedCrop { scale: 0.08 };
    let config = config(&[crop, Augment::Flip]);
    let one = samples(&set, &config, 1, 1);
    assert_eq!(one.len(), 12);
    assert_eq!(samples(&set, &LoaderConfig { workers: 4, prefetch: 0, ..config.clone() }, 2, 1), one);
    for other in [samples(&set, &config, 1, 2), samples(&set, &LoaderConfig { seed: 6, ..config.clone() }, 1, 1)] {
        let same = one.iter().zip(&other).filter(|(one, other)| one.1 == other.1).count();
        assert_eq!(same, 0, "every image is cropped elsewhere");
    }
    // No other part has the whole area: after ten attempts the largest part around the centre is taken, which is the image.
    let whole = LoaderConfig { augment: vec![Augment::RandomResizedCrop { scale: 1.0 }], ..config.clone() };
    let plain = samples(&set, &LoaderConfig { augment: Vec::new(), ..config.clone() }, 1, 1);
    let same = samples(&set, &whole, 1, 1).into_iter().zip(plain).filter(|(a, b)| a == b).count();
    assert_eq!(same, 12);
    // Evaluation takes the whole image.
    let exact = LoaderConfig { evaluation: true, ..config.clone() };
    let memory = splits(folder.path(), DecodePolicy::Memory).train;
    assert_eq!(samples(&set, &exact, 1, 1), samples(&memory, &LoaderConfig { augment: Vec::new(), ..exact }, 1, 1));
    let error = Loader::new(Arc::new(memory), config).err().unwrap();
    let expected =
        "augment: `random-resized-crop:0.08` needs the images at their own sizes, and memory holds them at 3x24x24";
    assert_eq!(error.to_string(), expected);
    assert!(error.hint.contains("data.decode = \"epoch\""), "{}", error.hint);
}

#[test]
fn a_damaged_image_is_an_error_or_replaced_by_the_next_of_its_class() {
    let folder = folder(6);
    let (cat, dog) = (folder.path().join("train/cat/2.png"), folder.path().join("train/dog/5.jpg"));
    let set = splits(folder.path(), DecodePolicy::Epoch).train;
    let good = samples(&set, &config(&[Augment::Flip]), 1, 1);
    std::fs::write(&cat, "no image").unwrap();
    std::fs::remove_file(&dog).unwrap();
    // Order: cat 0.png, 1.jpg, 2.png, … are 0 to 5, dogs 6 to 11.
    for workers in [1, 4] {
        let unshuffled = LoaderConfig { shuffle: false, workers, ..config(&[]) };
        let error = batches(&set, unshuffled, 1).unwrap_err();
        let expected = format!("{}: cannot be decoded: neither a PNG nor a JPEG begins like this", cat.display());
        assert_eq!(error.to_string(), expected);
        assert!(error.hint.starts_with("the image is damaged"), "{}", error.hint);
    }
    let replace = LoaderConfig { on_error: OnError::Replace, ..config(&[Augment::Flip]) };
    let replaced = samples(&set, &replace, 1, 1);
    assert_eq!(samples(&set, &replace, 2, 1), replaced);
    let changed: Vec<u32> =
        good.iter().zip(&replaced).filter(|(good, replaced)| good != replaced).map(|(good, _)| good.0).collect();
    assert_eq!(changed, [2, 11]);
    // Without augmentation the replacement is the other image: the next one, and the first after the last.
    let plain = samples(&set, &LoaderConfig { augment: Vec::new(), ..replace.clone() }, 1, 1);
    assert_eq!((&plain[2].1, &plain[11].1), (&plain[3].1, &plain[6].1));
    let all = batches(&set, replace.clone(), 1).unwrap();
    let mut named: Vec<_> =
        all.iter().flat_map(|batch| batch.replaced.iter().map(|error| error.file.clone())).collect();
    named.sort();
    assert_eq!((named, all.iter().map(Batch::len).sum::<usize>()), (vec![cat, dog], 12));
    for index in 0..6 {
        let name = format!("train/cat/{index}.{}", if index % 2 == 0 { "png" } else { "jpg" });
        std::fs::write(folder.path().join(name), "").unwrap();
    }
    let error = batches(&set, replace, 1).unwrap_err();
    assert!(error.cause.ends_with("; 5 other images of its class cannot be decoded either"), "{error}");
}

/// An image of another size is whole: the configuration lacks `image_size`.
#[test]
fn only_damaged_and_missing_images_are_replaced() {
    let folder = folder(6);
    let request = request("image-folder", folder.path(), DecodePolicy::Epoch);
    let as_they_are = load(&LoadRequest { image_size: None, ..request }).unwrap().train;
    let error = batches(&as_they_are, LoaderConfig { on_error: OnError::Replace, ..config(&[]) }, 1).unwrap_err();
    assert!(error.hint.contains("image_size"), "{error}: {}", error.hint);
}

#[test]
fn the_size_decides_when_images_are_decoded() {
    let folder = folder(2);
    let decode = |most| splits(folder.path(), DecodePolicy::BySize(most)).train.encoded.is_some();
    let images = splits(folder.path(), DecodePolicy::Memory);
    let bytes = (images.train.len() + images.test.len()) * images.train.shape.len();
    assert!(!decode(bytes as u64));
    assert!(decode(bytes as u64 - 1));
}

#[test]
fn resizing_needs_a_smaller_image_size() {
    let folder = folder(2);
    for (image_size, cause) in
        [(Some(24), "resize is 20 and image_size is 24"), (None, "resize is 20 and image_size is not set")]
    {
        let request = request("image-folder", folder.path(), DecodePolicy::Epoch);
        let error = load(&LoadRequest { image_size, resize: Some(20), ..request }).unwrap_err();
        assert_eq!(error.cause, cause);
    }
}

/// Packs the images of a folder's split into archives of at most five samples, with the class numbers `cat` 0 and `dog` 1.
fn pack(folder: &Path, archives: &Path, split: &str) {
    let mut members = Vec::new();
    for (label, class) in ["cat", "dog"].iter().enumerate() {
        let mut names: Vec<_> =
            std::fs::read_dir(folder.join(split).join(class)).unwrap().map(|e| e.unwrap().path()).collect();
        names.sort();
        members.extend(names.into_iter().map(|name| (name, label)));
    }
    for (shard, samples) in members.chunks(5).enumerate() {
        let file = std::fs::File::create(archives.join(format!("{split}-{shard:03}.tar"))).unwrap();
        let mut archive = tar::Builder::new(file);
        for (index, (path, label)) in samples.iter().enumerate() {
            let key = format!("images/{shard}-{index}");
            archive.append_path_with_name(path, format!("{key}.{}", path.extension().unwrap().display())).unwrap();
            let (name, text) = match index % 2 {
                0 => (format!("{key}.cls"), format!("{label}\n")),
                _ => (format!("{key}.json"), format!("{{\"label\": {label}, \"width\": 7}}")),
            };
            let mut header = tar::Header::new_ustar();
            header.set_size(text.len() as u64);
            archive.append_data(&mut header, name, text.as_bytes()).unwrap();
        }
        archive.finish().unwrap();
    }
}

#[test]
fn archives_have_the_batches_of_the_folder() {
    let folder = folder(6);
    let archives = tempfile::tempdir().unwrap();
    pack(folder.path(), archives.path(), "train");
    pack(folder.path(), archives.path(), "test");
    let expected = splits(folder.path(), DecodePolicy::Memory);
    for decode in [DecodePolicy::Memory, DecodePolicy::Epoch] {
        let packed = load(&request("webdataset", archives.path(), decode)).unwrap();
        assert_eq!(packed.train.classes, ["0", "1"]);
        assert_eq!(packed.train.labels, expected.train.labels);
        for (packed, expected) in [(&packed.train, &expected.train), (&packed.test, &expected.test)] {
            let config = config(&[Augment::Flip]);
            assert!(batches(packed, config.clone(), 1).unwrap() == batches(expected, config, 1).unwrap());
        }
    }
    let packed = load(&request("webdataset", archives.path(), DecodePolicy::Epoch)).unwrap().train;
    let names: Vec<String> = packed.encoded.as_ref().unwrap().names().collect();
    assert!(names[0].starts_with("train-000.tar:512+"), "{}", names[0]);
    assert!(names[5].starts_with("train-001.tar:512+"), "{}", names[5]);
    // An archive that is cut later is an error of the batch.
    let path = archives.path().join("train-000.tar");
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1000).unwrap();
    let error = batches(&packed, LoaderConfig { shuffle: false, ..config(&[]) }, 1).unwrap_err();
    assert!(error.to_string().starts_with(&format!("{}: byte 512: cannot be read", path.display())), "{error}");
}
