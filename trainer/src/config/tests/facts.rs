//! Plans that are compared with their data set after its folder is read.

use insta::assert_snapshot;

use super::{brief, facts, read, set};
use crate::config::{DatasetFacts, Overrides};

const FOLDER: &str =
    "[model]\nname = \"resnet18\"\nnum_classes = 5\n[data]\nname = \"image-folder\"\ndir = \"photos\"\n";

fn photos(classes: usize) -> DatasetFacts {
    DatasetFacts { channels: 3, height: 48, width: 64, classes, mean: vec![0.5; 3], std: vec![0.25; 3] }
}

#[test]
fn the_error_of_a_contradiction_has_the_line_or_the_flag() {
    let mut plan = read(&format!("{FOLDER}augment = [\"crop:48\"]\n"), &Overrides::default()).unwrap();
    assert_snapshot!(brief(&plan.check_against(&photos(7)).unwrap_err()), @r#"
    num_classes = 5
                  ^ 3:15 `model.num_classes` is 5, but data set "image-folder" has 7 classes
      hint: remove `num_classes` (default: the data set's), or choose a data set with 5 classes
    augment = ["crop:48"]
              ^^^^^^^^^^^ 7:11 `data.augment`: "crop:48" pads by the whole image or more: images of "image-folder" are 48x64
      hint: use a padding of 47 or less; 4 is usual for 32x32
    "#);
    let mut plan = read(FOLDER, &set(&["model.num_classes=6"])).unwrap();
    assert_snapshot!(brief(&plan.check_against(&photos(7)).unwrap_err()), @r#"
    --set model.num_classes=6
    `model.num_classes` is 6, but data set "image-folder" has 7 classes
      hint: remove `num_classes` (default: the data set's), or choose a data set with 6 classes
    "#);
}

#[test]
fn missing_values_come_from_the_data_set() {
    let mut plan = read(&FOLDER.replace("num_classes = 5\n", ""), &Overrides::default()).unwrap();
    assert_eq!((plan.model.num_classes, &plan.data.mean), (None, &None));
    plan.check_against(&photos(7)).unwrap();
    assert_eq!(plan.model.num_classes, Some(7));
    assert_eq!(plan.data.mean.as_deref(), Some([0.5; 3].as_slice()));
    assert_eq!(plan.data.std.as_deref(), Some([0.25; 3].as_slice()));
    assert_eq!(plan.data.image_size, None);
    let before = plan.clone();
    plan.check_against(&photos(7)).unwrap();
    assert_eq!(plan, before);
}

/// With `image_size` images in files are resized. A plan that had the size of the first image as `image_size` would resize the
/// images of other sizes, which are errors.
#[test]
fn square_images_in_files_leave_image_size_unset() {
    let mut plan = read(FOLDER, &Overrides::default()).unwrap();
    plan.check_against(&DatasetFacts { height: 64, ..photos(5) }).unwrap();
    assert_eq!(plan.data.image_size, None);
    assert!(!plan.to_toml().contains("image_size ="), "{}", plan.to_toml());
    let known = read("[model]\nname = \"lenet\"\n[data]\nname = \"mnist\"\n", &Overrides::default()).unwrap();
    assert_eq!(known.data.image_size, Some(28), "images that are not in files have one size");
}

#[test]
fn small_images_are_padded() {
    let text = "[model]\nname = \"lenet\"\n[data]\nname = \"mnist\"\nimage_size = 32\naugment = [\"crop:30\"]\n";
    let mut plan = read(text, &Overrides::default()).unwrap();
    let padded = DatasetFacts { height: 32, width: 32, ..facts("mnist").unwrap() };
    plan.check_against(&padded).unwrap();
    assert_eq!(plan.data.image_size, Some(32));
}
