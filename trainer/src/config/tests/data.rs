//! Values that contradict the data set or the model registry.

use insta::assert_snapshot;

use super::{facts, mistake, mistake_after_base, read, set};
use crate::config::{DatasetFacts, Overrides};

#[test]
fn unknown_model() {
    assert_snapshot!(mistake("[model]\nname = \"ResNet-18\"\n[data]\nname = \"cifar10\"\n"), @r#"
    error: `model.name`: no model is called "ResNet-18"
     --> configs/x.toml:2:8
      |
    2 | name = "ResNet-18"
      |        ^^^^^^^^^^^
      hint: did you mean `resnet18`? names: resnet18, lenet, vgg11, vgg16, resnet50, resnet101
    "#);
}

#[test]
fn model_nobody_could_have_meant() {
    assert_snapshot!(mistake("[model]\nname = \"xyz\"\n[data]\nname = \"cifar10\"\n"), @r#"
    error: `model.name`: no model is called "xyz"
     --> configs/x.toml:2:8
      |
    2 | name = "xyz"
      |        ^^^^^
      hint: names: lenet, vgg11, vgg16, resnet18, resnet50, resnet101
    "#);
}

#[test]
fn unknown_data_set() {
    assert_snapshot!(mistake("[model]\nname = \"lenet\"\n[data]\nname = \"cifar\"\n"), @r#"
    error: `data.name`: no data set is called "cifar"
     --> configs/x.toml:4:8
      |
    4 | name = "cifar"
      |        ^^^^^^^
      hint: did you mean `cifar10`? names: cifar10, cifar100, mnist, fashion-mnist, fashion-mini, image-folder
    "#);
}

#[test]
fn image_folder_without_dir() {
    assert_snapshot!(mistake("[model]\nname = \"lenet\"\n[data]\nname = \"image-folder\"\n"), @r#"
    error: data set "image-folder" needs `data.dir`
     --> configs/x.toml:4:8
      |
    4 | name = "image-folder"
      |        ^^^^^^^^^^^^^^
      hint: add `dir = "path/to/folder"` below `[data]`, or give --data-dir path/to/folder
    "#);
}

#[test]
fn more_classes_than_the_data_set() {
    assert_snapshot!(mistake("[model]\nname = \"resnet18\"\nnum_classes = 100\n[data]\nname = \"cifar10\"\n"), @r#"
    error: `model.num_classes` is 100, but data set "cifar10" has 10 classes
     --> configs/x.toml:3:15
      |
    3 | num_classes = 100
      |               ^^^
      hint: remove `num_classes` (default: the data set's), or choose a data set with 100 classes
    "#);
}

#[test]
fn fewer_classes_than_the_data_set() {
    assert_snapshot!(mistake("[model]\nname = \"resnet18\"\nnum_classes = 10\n[data]\nname = \"cifar100\"\n"), @r#"
    error: `model.num_classes` is 10, but data set "cifar100" has 100 classes
     --> configs/x.toml:3:15
      |
    3 | num_classes = 10
      |               ^^
      hint: remove `num_classes` (default: the data set's), or choose a data set with 10 classes
    "#);
}

#[test]
fn mean_of_the_wrong_length() {
    assert_snapshot!(mistake_after_base("mean = [0.5]\n"), @r#"
    error: `data.mean` has 1 number, but images of "cifar10" have 3 channels
     --> configs/x.toml:5:8
      |
    5 | mean = [0.5]
      |        ^^^^^
      hint: give one number a channel, or remove the key: the default is [0.4914, 0.4822, 0.4465]
    "#);
}

#[test]
fn std_for_colours_on_grey_images() {
    assert_snapshot!(mistake("[model]\nname = \"lenet\"\n[data]\nname = \"mnist\"\nstd = [0.2, 0.2, 0.2]\n"), @r#"
    error: `data.std` has 3 numbers, but images of "mnist" have 1 channel
     --> configs/x.toml:5:7
      |
    5 | std = [0.2, 0.2, 0.2]
      |       ^^^^^^^^^^^^^^^
      hint: give one number a channel, or remove the key: the default is [0.3081]
    "#);
}

#[test]
fn std_of_zero() {
    assert_snapshot!(mistake_after_base("std = [0.2, 0.0, 0.2]\n"), @"
    error: `data.std`: expected a number above 0 and at most 1, found 0
     --> configs/x.toml:5:13
      |
    5 | std = [0.2, 0.0, 0.2]
      |             ^^^
      hint: one number a channel, of pixels scaled to 0..1; default the data set's
    ");
}

#[test]
fn mean_in_bytes() {
    assert_snapshot!(mistake_after_base("mean = [125.3, 123.0, 113.9]\n"), @"
    error: `data.mean`: expected a number from 0 to 1, found 125.3
     --> configs/x.toml:5:9
      |
    5 | mean = [125.3, 123.0, 113.9]
      |         ^^^^^
      hint: pixels are scaled to 0..1 first: divide by 255
    ");
}

#[test]
fn mean_that_is_not_a_number() {
    assert_snapshot!(mistake_after_base("mean = [0.5, nan, 0.5]\n"), @"
    error: `data.mean`: expected a finite number, found nan
     --> configs/x.toml:5:14
      |
    5 | mean = [0.5, nan, 0.5]
      |              ^^^
      hint: one number a channel, of pixels scaled to 0..1; default the data set's
    ");
}

#[test]
fn unknown_augmentation() {
    assert_snapshot!(mistake_after_base("augment = [\"crop\", \"flop\"]\n"), @r#"
    error: `data.augment`: unknown augmentation "flop"
     --> configs/x.toml:5:20
      |
    5 | augment = ["crop", "flop"]
      |                    ^^^^^^
      hint: did you mean `flip`? augmentations: flip, crop, reflect-crop, alternating-flip
    "#);
}

#[test]
fn torchvision_augmentation() {
    assert_snapshot!(mistake_after_base("augment = [\"RandomHorizontalFlip\"]\n"), @r#"
    error: `data.augment`: unknown augmentation "RandomHorizontalFlip"
     --> configs/x.toml:5:12
      |
    5 | augment = ["RandomHorizontalFlip"]
      |            ^^^^^^^^^^^^^^^^^^^^^^
      hint: did you mean `flip`? augmentations: flip, crop, reflect-crop, alternating-flip
    "#);
}

#[test]
fn cutout_among_the_augmentations() {
    assert_snapshot!(mistake_after_base("augment = [\"flip\", \"cutout:12\"]\n"), @r#"
    error: `data.augment`: "cutout" is not set here
     --> configs/x.toml:5:20
      |
    5 | augment = ["flip", "cutout:12"]
      |                    ^^^^^^^^^^^
      hint: set `cutout` below `[train]`
    "#);
}

#[test]
fn padding_that_is_no_number() {
    assert_snapshot!(mistake_after_base("augment = [\"crop:four\"]\n"), @r#"
    error: `data.augment`: expected a padding of 1 pixel or more, found "four"
     --> configs/x.toml:5:12
      |
    5 | augment = ["crop:four"]
      |            ^^^^^^^^^^^
      hint: write it like "crop:4"; leave the augmentation out for none
    "#);
}

#[test]
fn padding_of_zero() {
    assert_snapshot!(mistake_after_base("augment = [\"crop:0\"]\n"), @r#"
    error: `data.augment`: expected a padding of 1 pixel or more, found "0"
     --> configs/x.toml:5:12
      |
    5 | augment = ["crop:0"]
      |            ^^^^^^^^
      hint: write it like "crop:4"; leave the augmentation out for none
    "#);
}

#[test]
fn padding_of_a_flip() {
    assert_snapshot!(mistake_after_base("augment = [\"flip:2\"]\n"), @r#"
    error: `data.augment`: "flip:2": flip takes no parameter
     --> configs/x.toml:5:12
      |
    5 | augment = ["flip:2"]
      |            ^^^^^^^^
      hint: write "flip"
    "#);
}

#[test]
fn padding_of_the_whole_image() {
    assert_snapshot!(mistake_after_base("augment = [\"reflect-crop:32\"]\n"), @r#"
    error: `data.augment`: "reflect-crop:32" pads by the whole image or more: images are 32x32
     --> configs/x.toml:5:11
      |
    5 | augment = ["reflect-crop:32"]
      |           ^^^^^^^^^^^^^^^^^^^
      hint: use a padding of 31 or less; 4 is usual for 32x32
    "#);
}

#[test]
fn two_crops() {
    assert_snapshot!(mistake_after_base("augment = [\"crop\", \"reflect-crop\"]\n"), @r#"
    error: `data.augment`: more than one crop
     --> configs/x.toml:5:11
      |
    5 | augment = ["crop", "reflect-crop"]
      |           ^^^^^^^^^^^^^^^^^^^^^^^^
      hint: an image is cropped at most once and flipped by one rule
    "#);
}

#[test]
fn two_flips() {
    assert_snapshot!(mistake_after_base("augment = [\"flip\", \"alternating-flip\"]\n"), @r#"
    error: `data.augment`: more than one flip
     --> configs/x.toml:5:11
      |
    5 | augment = ["flip", "alternating-flip"]
      |           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
      hint: an image is cropped at most once and flipped by one rule
    "#);
}

#[test]
fn cutout_of_the_whole_image() {
    assert_snapshot!(mistake_after_base("[train]\ncutout = 32\n"), @"
    error: `train.cutout`: 32 pixels cut out the whole image: images are 32x32
     --> configs/x.toml:6:10
      |
    6 | cutout = 32
      |          ^^
      hint: use 31 or less; 8 to 16 is usual for 32x32
    ");
}

#[test]
fn images_smaller_than_they_are() {
    assert_snapshot!(mistake_after_base("image_size = 16\n"), @r#"
    error: `data.image_size` is 16, but images of "cifar10" are 32x32
     --> configs/x.toml:5:14
      |
    5 | image_size = 16
      |              ^^
      hint: images are padded, never shrunk: use 32 or more, or remove it
    "#);
}

#[test]
fn empty_dir() {
    assert_snapshot!(mistake_after_base("dir = \"\"\n"), @r#"
    error: `data.dir`: expected a folder's name, found none or one with control characters
     --> configs/x.toml:5:7
      |
    5 | dir = ""
      |       ^^
      hint: the folder that holds the files, in quotes
    "#);
}

const FOLDER: &str =
    "[model]\nname = \"resnet18\"\nnum_classes = 5\n[data]\nname = \"image-folder\"\ndir = \"photos\"\n";

fn photos(classes: usize) -> DatasetFacts {
    DatasetFacts { channels: 3, height: 48, width: 64, classes, mean: vec![0.5; 3], std: vec![0.25; 3] }
}

#[test]
fn contradiction_found_after_the_data_are_read() {
    let mut plan = read(&format!("{FOLDER}augment = [\"crop:48\"]\n"), &Overrides::default()).unwrap();
    assert_snapshot!(plan.check_against(&photos(7)).unwrap_err(), @r#"
    error: `model.num_classes` is 5, but data set "image-folder" has 7 classes
     --> configs/x.toml:3:15
      |
    3 | num_classes = 5
      |               ^
      hint: remove `num_classes` (default: the data set's), or choose a data set with 5 classes

    error: `data.augment`: "crop:48" pads by the whole image or more: images of "image-folder" are 48x64
     --> configs/x.toml:7:11
      |
    7 | augment = ["crop:48"]
      |           ^^^^^^^^^^^
      hint: use a padding of 47 or less; 4 is usual for 32x32
    "#);
}

#[test]
fn contradiction_of_a_flag_found_after_the_data_are_read() {
    let mut plan = read(FOLDER, &set(&["model.num_classes=6"])).unwrap();
    assert_snapshot!(plan.check_against(&photos(7)).unwrap_err(), @r#"
    error: `model.num_classes` is 6, but data set "image-folder" has 7 classes
      --> --set model.num_classes=6
      hint: remove `num_classes` (default: the data set's), or choose a data set with 6 classes
    "#);
}

#[test]
fn data_fill_in_what_is_left_to_them() {
    let mut plan = read(&FOLDER.replace("num_classes = 5\n", ""), &Overrides::default()).unwrap();
    assert_eq!((plan.model.num_classes, &plan.data.mean), (None, &None));
    plan.check_against(&photos(7)).unwrap();
    assert_eq!(plan.model.num_classes, Some(7));
    assert_eq!(plan.data.mean.as_deref(), Some([0.5; 3].as_slice()));
    assert_eq!(plan.data.std.as_deref(), Some([0.25; 3].as_slice()));
    assert_eq!(plan.data.image_size, None, "48x64 is no square");
    let before = plan.clone();
    plan.check_against(&photos(7)).unwrap();
    assert_eq!(plan, before);
}

#[test]
fn small_images_are_padded() {
    let text = "[model]\nname = \"lenet\"\n[data]\nname = \"mnist\"\nimage_size = 32\naugment = [\"crop:30\"]\n";
    let mut plan = read(text, &Overrides::default()).unwrap();
    let padded = DatasetFacts { height: 32, width: 32, ..facts("mnist").unwrap() };
    plan.check_against(&padded).unwrap();
    assert_eq!(plan.data.image_size, Some(32));
}
