//! Manifests whose images have several classes or none.

use std::path::PathBuf;
use std::sync::Arc;

use super::{load, request};
use crate::loader::{Loader, LoaderConfig, OnError};
use crate::pictures::save_png;
use crate::{DataError, Dataset, SplitOptions, Splits};

struct Manifest(tempfile::TempDir);

impl Manifest {
    /// Makes the manifest `labels.csv` and the images `0.png` to `9.png`, 4x3 pixels of their number.
    fn new(text: &str) -> Self {
        let manifest = Self(tempfile::tempdir().unwrap());
        for index in 0..10 {
            save_png(manifest.path(&format!("{index}.png")), 4, 3, |_, _| [index; 3]);
        }
        std::fs::write(manifest.path("labels.csv"), text).unwrap();
        manifest
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn load(&self, delim: char, split: SplitOptions) -> Result<Splits, DataError> {
        load(&super::LoadRequest { label_delim: Some(delim), split, ..request("manifest", self.path("labels.csv")) })
    }
}

fn error(text: &str) -> String {
    let manifest = Manifest::new(text);
    let error = manifest.load(';', SplitOptions::default()).unwrap_err();
    format!("{error}; {}", error.hint).replace(&format!("{}/", manifest.0.path().display()), "")
}

/// Returns the classes of each image.
fn sets(set: &Dataset) -> Vec<Vec<u16>> {
    assert_eq!(set.labels, vec![0; set.len()]);
    set.label_sets.as_ref().unwrap().iter().map(<[u16]>::to_vec).collect()
}

/// fastai: `ImageDataLoaders.from_df(df, label_delim=";")` has the vocabulary `["cat", "dog", "sea"]`.
const TEXT: &str =
    "path,label,split\n0.png,dog;cat,train\n1.png,,train\n2.png, sea ,train\n3.png,sea; dog,val\n4.png,,test\n";

#[test]
fn an_image_has_any_number_of_classes() {
    let splits = Manifest::new(TEXT).load(';', SplitOptions::default()).unwrap();
    assert_eq!(splits.train.classes, ["cat", "dog", "sea"]);
    assert_eq!(sets(&splits.train), [vec![0, 1], vec![], vec![2]]);
    assert_eq!((sets(splits.val.as_ref().unwrap()), sets(&splits.test)), (vec![vec![1, 2]], vec![vec![]]));
    assert_eq!(splits.train.class_sizes(), [1, 1, 1]);
    // Numbers, and the delimiter of fastai's Planet data set.
    let numbers = "path,label\n0.png,2 0\n1.png,1\n2.png,\n3.png,0 1 2\n4.png,0\n5.png,1\n";
    let split = SplitOptions { validation: Some(0.4), ..SplitOptions::default() };
    let splits = Manifest::new(numbers).load(' ', split).unwrap();
    let all = [vec![0, 2], vec![1], vec![], vec![0, 1, 2], vec![0], vec![1]];
    for set in [&splits.train, &splits.test] {
        let of_pixels: Vec<_> = (0..set.len()).map(|index| all[usize::from(set.image(index)[0])].clone()).collect();
        assert_eq!(sets(set), of_pixels, "each image keeps its classes");
    }
    assert_eq!((splits.train.len(), splits.test.len()), (4, 2));
}

#[test]
fn batches_have_a_row_per_image_and_a_damaged_image_is_replaced_by_one_with_the_same_classes() {
    let text = TEXT.replace("1.png,,train", "1.png,,train\n5.png,cat;dog,train\n6.png,dog,train");
    let manifest = Manifest::new(&text);
    std::fs::write(manifest.path("0.png"), "no image").unwrap();
    let request = super::LoadRequest {
        label_delim: Some(';'),
        decode: crate::formats::DecodePolicy::Epoch,
        image_size: Some(4),
        ..request("manifest", manifest.path("labels.csv"))
    };
    let train = Arc::new(load(&request).unwrap().train);
    let (mean, std) = (vec![0.0; 3], vec![1.0 / 255.0; 3]);
    let config = LoaderConfig {
        global_batch: 4,
        rank: 1,
        world_size: 2,
        shuffle: false,
        on_error: OnError::Replace,
        mean,
        std,
        ..LoaderConfig::default()
    };
    let rank = |rank| {
        let loader = Loader::new(Arc::clone(&train), LoaderConfig { rank, ..config.clone() }).unwrap();
        loader.epoch(1, 0).next().unwrap().unwrap()
    };
    let (first, second) = (rank(0), rank(1));
    assert_eq!(first.multi_hot, [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]);
    assert_eq!(second.multi_hot, [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
    assert_eq!(second.clone().padded(3).multi_hot, [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]);
    // Not 6.png, which is a dog alone.
    assert_eq!((first.images[0].round(), first.replaced.len()), (5.0, 1));
    for (name, config) in [
        ("cutmix", LoaderConfig { cutmix: Some(1.0), ..config.clone() }),
        ("class_weights", LoaderConfig { class_weights: vec![1.0; 3], ..config.clone() }),
    ] {
        let error = Loader::new(Arc::clone(&train), config).err().unwrap();
        assert_eq!((error.cause, &*error.place), (format!("{name} needs one class per image"), name));
    }
}

#[test]
fn mistakes_name_the_line() {
    let with = |line: &str| error(&TEXT.replace("0.png,dog;cat,train", line));
    assert_eq!(
        with("0.png,dog;cat;dog,train"),
        "labels.csv: line 2: the label \"dog;cat;dog\" names the class `dog` twice; name each class of an image once"
    );
    let nameless = with("0.png,dog;;cat,train");
    assert!(
        nameless.starts_with("labels.csv: line 2: the label \"dog;;cat\" has a class without a name; "),
        "{nameless}"
    );
    assert!(with("0.png,;,train").contains("has a class without a name"));
    let unknown = with("0.png,cat,train");
    assert!(unknown.starts_with("labels.csv: line 5: the class `dog` has no training image; "), "{unknown}");
    let mixed = with("0.png,dog;1,train");
    assert!(
        mixed.starts_with("labels.csv: line 2: the label \"1\" is a number, that of line 2 is a name; "),
        "{mixed}"
    );
    let none = error("path,label,split\n0.png,,train\n1.png,,test\n");
    assert!(none.starts_with("labels.csv: no image has a class: all labels are empty; "), "{none}");
    let one = error("path,label,split\n0.png,cat,train\n1.png,,test\n");
    assert!(one.starts_with("labels.csv: all labels name one class, `cat`; "), "{one}");
    // Without the delimiter.
    let manifest = Manifest::new(TEXT);
    let plain = load(&request("manifest", manifest.path("labels.csv"))).unwrap_err();
    assert_eq!((plain.cause.as_str(), plain.place.as_str()), ("the label is empty", "line 3"));
    assert!(plain.hint.contains("label_delim = \";\""), "{}", plain.hint);
    let built_in = super::LoadRequest { name: "fashion-mini".into(), label_delim: Some(';'), ..Default::default() };
    let other = load(&built_in).unwrap_err();
    assert_eq!(
        (other.cause.as_str(), other.place.as_str()),
        ("each image of the data set `fashion-mini` has one class", "label_delim")
    );
}

#[test]
fn letters_and_quotes_separate_no_classes() {
    let manifest = Manifest::new(TEXT);
    for delim in ['a', '7', '"', '\n'] {
        let error = manifest.load(delim, SplitOptions::default()).unwrap_err();
        assert!(error.cause.ends_with("cannot separate classes") && !error.hint.is_empty(), "{error}");
    }
    // As a class of its own, `sea; dog` is in the validation split alone.
    let error = manifest.load('|', SplitOptions::default()).unwrap_err();
    assert_eq!(error.cause, "the class `sea; dog` has no training image");
}

#[test]
fn a_split_that_leaves_a_class_without_training_images_is_refused() {
    let rows: String = (0..9).map(|i| format!("{i}.png,{}\n", if i == 4 { "a;b" } else { "a" })).collect();
    let manifest = Manifest::new(&format!("path,label\n{rows}"));
    let split = |seed, fraction| SplitOptions { validation: Some(0.5), fraction, seed };
    let outcomes: Vec<_> = (0..12).map(|seed| manifest.load(';', split(seed, None))).collect();
    let refused: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert!(!refused.is_empty() && refused.len() < 12, "the seed chooses");
    for error in refused {
        assert_eq!(error.cause, "none of the 1 training images of the class `b` is left to train on");
        assert_eq!((error.place.as_str(), error.hint.is_empty()), ("validation", false));
    }
    let error = manifest.load(';', split(0, Some(0.01))).unwrap_err();
    assert!(error.cause == "0.01 of the 4 training images is none", "{error}");
}
