//! The addresses of the data sets and the checksums of their files.
//!
//! The checksums of the downloads are published by TensorFlow Datasets (`url_checksums/`), those of the CIFAR files by
//! torchvision-ruby, those of the gunzipped IDX files by several users of the same downloads.

/// A data set that can be downloaded.
#[derive(Debug)]
pub(crate) struct DatasetSource {
    /// The registry's name.
    pub(crate) name: &'static str,
    /// Address of the folder that holds the downloads, with the slash at its end.
    pub(crate) base: &'static str,
    /// Folder below the destination for the files.
    pub(crate) folder: &'static str,
    /// The files on the server.
    pub(crate) downloads: &'static [Download],
    /// The files in the folder after unpacking.
    pub(crate) files: &'static [KnownFile],
}

/// A file on the server.
#[derive(Debug)]
pub(crate) struct Download {
    /// Name on the server.
    pub(crate) file: &'static str,
    /// Length in bytes.
    pub(crate) bytes: u64,
    /// Checksum, lower-case hexadecimal.
    pub(crate) sha256: &'static str,
    /// True for a .tar.gz that contains the folder; false for a file of the folder.
    pub(crate) archive: bool,
}

/// A file that a reader reads.
#[derive(Debug)]
pub(crate) struct KnownFile {
    /// Name in the folder. The name of an IDX file has no `.gz`: all spellings of the file are found by this name.
    pub(crate) name: &'static str,
    /// Its expected contents.
    pub(crate) contents: Contents,
}

/// The expected contents of a file.
#[derive(Debug)]
pub(crate) enum Contents {
    /// The official contents. Length and checksum are those of the gunzipped file, so that files compressed by other tools are
    /// recognised.
    Official {
        /// Length in bytes.
        bytes: u64,
        /// Checksum, lower-case hexadecimal.
        sha256: &'static str,
    },
    /// One class name per class. The data set can be read without this file.
    ClassNames,
}

impl KnownFile {
    /// Returns true if the data set cannot be read without the file.
    pub(crate) fn is_required(&self) -> bool {
        !matches!(self.contents, Contents::ClassNames)
    }
}

/// Returns whether [`fetch`](super::fetch) can download the data set.
pub fn can_be_fetched(name: &str) -> bool {
    source(name).is_some()
}

/// Returns the source of the data set `name`; `None` if there is nothing to download.
pub(crate) fn source(name: &str) -> Option<&'static DatasetSource> {
    SOURCES.iter().find(|source| source.name == name)
}

pub(super) const fn file(name: &'static str, bytes: u64, sha256: &'static str) -> KnownFile {
    KnownFile { name, contents: Contents::Official { bytes, sha256 } }
}

const fn download(file: &'static str, bytes: u64, sha256: &'static str) -> Download {
    Download { file, bytes, sha256, archive: false }
}

const IDX_NAMES: [&str; 4] =
    ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"];
const IDX_BYTES: [u64; 4] = [47_040_016, 60_008, 7_840_016, 10_008];

const GZ_NAMES: [&str; 4] = [
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
];

const CIFAR_FILE: u64 = 30_730_000;

static SOURCES: [DatasetSource; 4] = [
    DatasetSource {
        name: "cifar10",
        base: "https://www.cs.toronto.edu/~kriz/",
        folder: "cifar-10-batches-bin",
        downloads: &[Download {
            file: "cifar-10-binary.tar.gz",
            bytes: 170_052_171,
            sha256: "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            archive: true,
        }],
        files: &[
            file("data_batch_1.bin", CIFAR_FILE, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
            file("data_batch_2.bin", CIFAR_FILE, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
            file("data_batch_3.bin", CIFAR_FILE, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
            file("data_batch_4.bin", CIFAR_FILE, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
            file("data_batch_5.bin", CIFAR_FILE, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
            file("test_batch.bin", CIFAR_FILE, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
            KnownFile { name: "batches.meta.txt", contents: Contents::ClassNames },
        ],
    },
    DatasetSource {
        name: "cifar100",
        base: "https://www.cs.toronto.edu/~kriz/",
        folder: "cifar-100-binary",
        downloads: &[Download {
            file: "cifar-100-binary.tar.gz",
            bytes: 168_513_733,
            sha256: "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            archive: true,
        }],
        files: &[
            file("train.bin", 153_700_000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
            file("test.bin", 30_740_000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
            KnownFile { name: "fine_label_names.txt", contents: Contents::ClassNames },
        ],
    },
    DatasetSource {
        name: "mnist",
        base: "https://ossci-datasets.s3.amazonaws.com/mnist/",
        folder: "mnist",
        downloads: &[
            download(GZ_NAMES[0], 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            download(GZ_NAMES[1], 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            download(GZ_NAMES[2], 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            download(GZ_NAMES[3], 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ],
        files: &[
            file(IDX_NAMES[0], IDX_BYTES[0], "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
            file(IDX_NAMES[1], IDX_BYTES[1], "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
            file(IDX_NAMES[2], IDX_BYTES[2], "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
            file(IDX_NAMES[3], IDX_BYTES[3], "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
        ],
    },
    DatasetSource {
        name: "fashion-mnist",
        base: "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        folder: "fashion-mnist",
        downloads: &[
            download(GZ_NAMES[0], 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            download(GZ_NAMES[1], 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            download(GZ_NAMES[2], 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            download(GZ_NAMES[3], 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ],
        files: &[
            file(IDX_NAMES[0], IDX_BYTES[0], "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
            file(IDX_NAMES[1], IDX_BYTES[1], "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
            file(IDX_NAMES[2], IDX_BYTES[2], "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
            file(IDX_NAMES[3], IDX_BYTES[3], "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
        ],
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sum_is_a_sha256_and_no_two_are_equal() {
        let official = |file: &KnownFile| match file.contents {
            Contents::Official { sha256, .. } => Some(sha256),
            Contents::ClassNames => None,
        };
        let mut sums: Vec<&str> = SOURCES
            .iter()
            .flat_map(|s| s.downloads.iter().map(|d| d.sha256).chain(s.files.iter().filter_map(official)))
            .collect();
        assert_eq!(sums.len(), 26);
        for sum in &sums {
            assert!(sum.len() == 64 && sum.bytes().all(|b| b"0123456789abcdef".contains(&b)), "{sum}");
        }
        sums.sort_unstable();
        sums.dedup();
        assert_eq!(sums.len(), 26);
    }
}
