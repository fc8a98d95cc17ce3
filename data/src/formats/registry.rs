//! The facts about each data set that are known before its files are read: shape, classes, normalisation, licence.

use super::custom::{self, Reader};

/// The layout of a data set's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DatasetFormat {
    /// Records of label bytes and 3 planes of 32x32 pixels.
    Cifar(&'static CifarLayout),
    /// Four IDX files, as for MNIST.
    Idx,
    /// One folder per class.
    ImageFolder,
    /// A CSV file that lists images with labels.
    Manifest,
    /// Tar archives of images and labels.
    Webdataset,
    /// Compiled into the program.
    BuiltIn,
    /// A function of another crate.
    Custom(Reader),
}

/// The files of CIFAR-10 or CIFAR-100.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CifarLayout {
    /// Number of classes of each label byte of a record. The last byte is the label used.
    pub(crate) label_bytes: &'static [u8],
    /// Training files in order.
    pub(crate) train: &'static [&'static str],
    /// Test file.
    pub(crate) test: &'static str,
    /// Records in each training file.
    pub(crate) train_records: usize,
    /// Records in the test file.
    pub(crate) test_records: usize,
    /// File of class names, one per line.
    pub(crate) names: &'static str,
    /// Files that users often have instead: the archive, and the folder of pickles.
    pub(crate) lookalikes: [&'static str; 2],
}

/// The facts about a data set that are known before its files are read. `None` for those that depend on the files.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DatasetInfo {
    /// Name in the configuration file, e.g. `cifar10`.
    pub name: &'static str,
    /// One line that describes the data set.
    pub description: &'static str,
    /// Terms of use, one line.
    pub license: &'static str,
    /// Home page or paper; empty for the user's own images.
    pub homepage: &'static str,
    /// Colour planes.
    pub channels: Option<usize>,
    /// Rows, in pixels.
    pub height: Option<usize>,
    /// Columns, in pixels.
    pub width: Option<usize>,
    /// Number of classes.
    pub classes: Option<usize>,
    /// Names of the classes in label order; empty for the user's own images.
    pub class_names: &'static [&'static str],
    /// Mean of each channel of the training images, in [0, 1].
    pub default_mean: &'static [f32],
    /// Standard deviation of each channel of the training images, in [0, 1].
    pub default_std: &'static [f32],
    /// Number of training images.
    pub train_len: Option<usize>,
    /// Number of test images.
    pub test_len: Option<usize>,
    /// Whether the files must be in a folder. False for fashion-mini and for data sets that a program registers.
    pub needs_dir: bool,
    /// Folders below the data folder that may contain the files, best first.
    pub(crate) folders: &'static [&'static str],
    /// Layout of the files.
    pub(crate) format: DatasetFormat,
}

/// The facts about the user's own images that do not depend on the layout of the files.
const OWN_IMAGES: DatasetInfo = DatasetInfo {
    name: "",
    description: "",
    license: "that of your images",
    homepage: "",
    channels: Some(3),
    height: None,
    width: None,
    classes: None,
    class_names: &[],
    // ImageNet's, as in torchvision's models.
    default_mean: &[0.485, 0.456, 0.406],
    default_std: &[0.229, 0.224, 0.225],
    train_len: None,
    test_len: None,
    needs_dir: true,
    folders: &[],
    format: DatasetFormat::ImageFolder,
};

const DIGITS: [&str; 10] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];

const CLOTHES: [&str; 10] =
    ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"];

const CIFAR10_CLASSES: [&str; 10] =
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

#[rustfmt::skip]
const CIFAR100_CLASSES: [&str; 100] = [
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle",
    "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle",
    "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur",
    "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard",
    "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
    "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree",
    "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket",
    "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider",
    "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor",
    "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
];

const CIFAR10: CifarLayout = CifarLayout {
    label_bytes: &[10],
    train: &["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"],
    test: "test_batch.bin",
    train_records: 10_000,
    test_records: 10_000,
    names: "batches.meta.txt",
    lookalikes: ["cifar-10-binary.tar.gz", "cifar-10-batches-py"],
};

const CIFAR100: CifarLayout = CifarLayout {
    label_bytes: &[20, 100],
    train: &["train.bin"],
    test: "test.bin",
    train_records: 50_000,
    test_records: 10_000,
    names: "fine_label_names.txt",
    lookalikes: ["cifar-100-binary.tar.gz", "cifar-100-python"],
};

const CIFAR_LICENSE: &str =
    "no licence stated; cite Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009";

pub(super) static DATASETS: [DatasetInfo; 8] = [
    DatasetInfo {
        name: "cifar10",
        description: "CIFAR-10: 60,000 colour photographs in 10 classes (official binary files)",
        license: CIFAR_LICENSE,
        homepage: "https://www.cs.toronto.edu/~kriz/cifar.html",
        channels: Some(3),
        height: Some(32),
        width: Some(32),
        classes: Some(10),
        class_names: &CIFAR10_CLASSES,
        // From pytorch-cifar. Its deviations are means of per-image deviations.
        default_mean: &[0.4914, 0.4822, 0.4465],
        default_std: &[0.2023, 0.1994, 0.2010],
        train_len: Some(50_000),
        test_len: Some(10_000),
        needs_dir: true,
        folders: &["cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin"],
        format: DatasetFormat::Cifar(&CIFAR10),
    },
    DatasetInfo {
        name: "cifar100",
        description: "CIFAR-100: 60,000 colour photographs in 100 classes (official binary files, fine labels)",
        license: CIFAR_LICENSE,
        homepage: "https://www.cs.toronto.edu/~kriz/cifar.html",
        channels: Some(3),
        height: Some(32),
        width: Some(32),
        classes: Some(100),
        class_names: &CIFAR100_CLASSES,
        default_mean: &[0.5071, 0.4867, 0.4408],
        default_std: &[0.2675, 0.2565, 0.2761],
        train_len: Some(50_000),
        test_len: Some(10_000),
        needs_dir: true,
        folders: &["cifar-100-binary", "cifar100", "cifar100/cifar-100-binary"],
        format: DatasetFormat::Cifar(&CIFAR100),
    },
    DatasetInfo {
        name: "mnist",
        description: "MNIST: 70,000 handwritten digits (IDX files, gzipped or not)",
        license: "CC BY-SA 3.0 (Yann LeCun, Corinna Cortes)",
        homepage: "http://yann.lecun.com/exdb/mnist/",
        channels: Some(1),
        height: Some(28),
        width: Some(28),
        classes: Some(10),
        class_names: &DIGITS,
        default_mean: &[0.1307],
        default_std: &[0.3081],
        train_len: Some(60_000),
        test_len: Some(10_000),
        needs_dir: true,
        folders: &["mnist", "MNIST/raw", "mnist/raw", "MNIST"],
        format: DatasetFormat::Idx,
    },
    DatasetInfo {
        name: "fashion-mnist",
        description: "Fashion-MNIST: 70,000 grey images of clothing in 10 classes (IDX files, gzipped or not)",
        license: "MIT (Zalando SE)",
        homepage: "https://github.com/zalandoresearch/fashion-mnist",
        channels: Some(1),
        height: Some(28),
        width: Some(28),
        classes: Some(10),
        class_names: &CLOTHES,
        default_mean: &[0.2860],
        default_std: &[0.3530],
        train_len: Some(60_000),
        test_len: Some(10_000),
        needs_dir: true,
        folders: &["fashion-mnist", "FashionMNIST/raw", "fashion-mnist/raw", "FashionMNIST"],
        format: DatasetFormat::Idx,
    },
    DatasetInfo {
        name: "image-folder",
        description: "your own images: DIR/train/CLASS/*.png|jpg, and DIR/test (or val, or both)/CLASS/*.png|jpg",
        format: DatasetFormat::ImageFolder,
        ..OWN_IMAGES
    },
    DatasetInfo {
        name: "manifest",
        description: "your own images, listed in a CSV file: path,label[,split]",
        format: DatasetFormat::Manifest,
        ..OWN_IMAGES
    },
    DatasetInfo {
        name: "webdataset",
        description: "your own images in archives: DIR/train-*.tar and DIR/test-*.tar (or val-*.tar, or both) of NAME.jpg and NAME.cls",
        format: DatasetFormat::Webdataset,
        ..OWN_IMAGES
    },
    DatasetInfo {
        name: "fashion-mini",
        description: "the first 700 training and 100 test images of each class of Fashion-MNIST, built into the program",
        license: "MIT (Zalando SE)",
        homepage: "https://github.com/zalandoresearch/fashion-mnist",
        channels: Some(1),
        height: Some(28),
        width: Some(28),
        classes: Some(10),
        class_names: &CLOTHES,
        default_mean: &[0.2860],
        default_std: &[0.3530],
        train_len: Some(7_000),
        test_len: Some(1_000),
        needs_dir: false,
        folders: &[],
        format: DatasetFormat::BuiltIn,
    },
];

/// Returns the names of all data sets, as written in the configuration file.
pub fn dataset_names() -> impl Iterator<Item = &'static str> {
    DATASETS.iter().chain(custom::registered()).map(|info| info.name)
}

/// Returns the facts about the data set `name`; `None` for an unknown name.
pub fn dataset_info(name: &str) -> Option<&'static DatasetInfo> {
    DATASETS.iter().chain(custom::registered()).find(|info| info.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_consistent() {
        for info in &DATASETS {
            assert_eq!(dataset_info(info.name), Some(info));
            let channels = info.channels.unwrap();
            assert_eq!((info.default_mean.len(), info.default_std.len()), (channels, channels), "{}", info.name);
            assert_eq!(info.class_names.len(), info.classes.unwrap_or(0), "{}", info.name);
            let mut names = info.class_names.to_vec();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), info.class_names.len(), "{}: a class twice", info.name);
            if let DatasetFormat::Cifar(layout) = info.format {
                assert_eq!(Some(layout.train.len() * layout.train_records), info.train_len);
                assert_eq!(Some(layout.test_records), info.test_len);
                assert_eq!(layout.label_bytes.last().map(|&n| usize::from(n)), info.classes);
            }
        }
        // CIFAR-100 numbers its fine labels in alphabetical order of their names.
        assert!(CIFAR100_CLASSES.is_sorted());
        assert_eq!(dataset_info("imagenet"), None);
    }
}
