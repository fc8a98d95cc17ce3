//! Manifests.

use std::path::PathBuf;

use proptest::prelude::*;

use super::{load, request};
use crate::formats::{DecodePolicy, LoadRequest};
use crate::pictures::save_png;
use crate::{DataError, SplitOptions, Splits};

struct Manifest(tempfile::TempDir);

impl Manifest {
    /// Makes the manifest `labels.csv` and the images `photos/0.png` to `photos/9.png`, 4x3 pixels of their number.
    fn new(text: impl AsRef<[u8]>) -> Self {
        let manifest = Self(tempfile::tempdir().unwrap());
        std::fs::create_dir(manifest.path("photos")).unwrap();
        for index in 0..10 {
            save_png(manifest.path(&format!("photos/{index}.png")), 4, 3, |_, _| [index; 3]);
        }
        std::fs::write(manifest.path("labels.csv"), text).unwrap();
        manifest
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn load(&self) -> Result<Splits, DataError> {
        load(&request("manifest", self.path("labels.csv")))
    }
}

/// Returns the error of a manifest without the folder's path, and its hint.
fn error(text: impl AsRef<[u8]>) -> String {
    let manifest = Manifest::new(text);
    let error = manifest.load().unwrap_err();
    format!("{error}; {}", error.hint).replace(&format!("{}/", manifest.0.path().display()), "")
}

/// Returns the first pixel and the label of each image.
fn contents(set: &crate::Dataset) -> Vec<(u8, u16)> {
    (0..set.len()).map(|index| (set.image(index)[0], set.labels[index])).collect()
}

#[test]
fn names_are_sorted_and_splits_are_those_of_the_column() {
    // A byte order mark, Windows line ends, columns in another order, spaces, an empty line, a quoted path.
    let text = "\u{feff}label,path,split\r\ndog, photos/3.png ,train\r\ncat,photos/1.png,train\r\n\r\n\
                dog,photos/2.png,val\r\n\"cat\",\"photos/../photos/0.png\",test\r\ncat,photos/5.png,train\r\n";
    let manifest = Manifest::new(text);
    let splits = manifest.load().unwrap();
    assert_eq!(splits.train.classes, ["cat", "dog"]);
    assert_eq!(contents(&splits.train), [(3, 1), (1, 0), (5, 0)]);
    assert_eq!(contents(&splits.val.unwrap()), [(2, 1)]);
    assert_eq!(contents(&splits.test), [(0, 0)]);
    assert_eq!(splits.source, manifest.path("labels.csv").display().to_string());
}

#[test]
fn numbers_are_class_numbers_and_val_stands_in_for_test() {
    let text =
        "path,label,split\nphotos/0.png,2,train\nphotos/1.png,0,train\nphotos/2.png,1,train\nphotos/3.png,2,val\n";
    let splits = Manifest::new(text).load().unwrap();
    assert_eq!(splits.train.classes, ["0", "1", "2"]);
    assert_eq!(contents(&splits.train), [(0, 2), (1, 0), (2, 1)]);
    assert!(splits.val.is_none());
    assert_eq!(contents(&splits.test), [(3, 2)]);
}

#[test]
fn without_a_split_column_the_held_out_part_is_evaluated() {
    let rows: String = (0..10).map(|i| format!("photos/{i}.png,{}\n", ["a", "b"][i % 2])).collect();
    let text = format!("path,label\n{rows}");
    assert!(
        error(&text).starts_with("labels.csv: no line has the split test or val: there is nothing to evaluate; add")
    );
    let manifest = Manifest::new(&text);
    let mut request = request("manifest", manifest.path("labels.csv"));
    request.split = SplitOptions { validation: Some(0.4), fraction: None, seed: 1 };
    let splits = load(&request).unwrap();
    assert!(splits.val.is_none());
    assert_eq!((splits.train.class_sizes(), splits.test.class_sizes()), (vec![3, 3], vec![2, 2]));
    // Limits keep the first images of each class.
    request.limit_train = Some(4);
    let mut kept = [contents(&load(&request).unwrap().train), contents(&load(&request).unwrap().test)].concat();
    kept.sort_unstable();
    assert_eq!(kept, [(0, 0), (1, 1), (2, 0), (3, 1)]);
}

#[test]
fn lines_are_counted_with_every_line_end() {
    for end in ["\n", "\r\n", "\r"] {
        let rows =
            ["path,label,split", "photos/0.png,a,train", "", "", "photos/1.png,b,train", "", "photos/2.png,a,new"];
        assert_eq!(
            error(rows.join(end)),
            "labels.csv: line 7: unknown split \"new\"; splits: train, val, test",
            "{end:?}"
        );
    }
}

#[test]
fn mistakes_have_their_line() {
    let header = "the first line names the columns: path,label or path,label,split";
    let train = "photos/0.png,a,train\nphotos/1.png,b,train\n";
    let all = |rows: &str| format!("path,label,split\n{train}{rows}photos/9.png,a,test\n");
    let cases = [
        (String::new(), format!("labels.csv: the manifest is empty; {header}")),
        ("photos/0.png,a,train\n".into(), format!("labels.csv: line 1: unknown column \"photos/0.png\"; the file begins with an image: insert a line before it; {header}")),
        ("path,label,splt\n".into(), format!("labels.csv: line 1: unknown column \"splt\"; rename or remove the column; {header}")),
        ("path;label;split\n".into(), format!("labels.csv: line 1: unknown column \"path;label;split\"; the fields are separated by semicolons: save the file with commas; {header}")),
        ("path,split\n".into(), format!("labels.csv: line 1: there is no column \"label\"; {header}")),
        ("path,label,label\n".into(), format!("labels.csv: line 1: a column is named twice; {header}")),
        ("path,label,split\n".into(), format!("labels.csv: no line has the split train: there is nothing to train on; {header}")),
        (
            all("photos/2.png,a\n"),
            "labels.csv: line 4: 2 fields, the first line names 3; put a path that contains a comma in quotes: \"a,b.png\",cat".into(),
        ),
        (
            all("photos/2.png,,train\n"),
            "labels.csv: line 4: the label is empty; each line has a path and a label; where images have several \
             classes or none, set label_delim = \";\" below [data] (--label-delim ';' for eval and data verify)"
                .into(),
        ),
        (all(",a,train\n"), "labels.csv: line 4: the path is empty; each line has a path and a label".into()),
        (
            all("photos/2.png,a,validation\n"),
            "labels.csv: line 4: unknown split \"validation\"; did you mean val? splits: train, val, test".into(),
        ),
        (
            all("photos/2.png,7,train\n"),
            "labels.csv: line 4: the label \"7\" is a number, that of line 2 is a name; use class names in all lines, or class \
             numbers from 0 in all lines"
                .into(),
        ),
        (
            all("photos/2.png,c,val\n"),
            "labels.csv: line 4: the class `c` has no training image; give the class images of the split train, or remove its \
             lines"
                .into(),
        ),
        (
            all("photos/0.png,a,test\n"),
            "labels.csv: line 4: photos/0.png has another split in line 2; keep one of the two lines: an image has one label \
             and one split"
                .into(),
        ),
        (
            all("photos/0.png,b,train\n"),
            "labels.csv: line 4: photos/0.png has another label in line 2; keep one of the two lines: an image has one label \
             and one split"
                .into(),
        ),
        (
            all("photos/x.png,a,train\nphotos/2.png,a,val\nphotos/y.png,a,val\n"),
            "labels.csv: line 4: there is no file photos/x.png (and 1 more of 6 are missing); paths are relative to the \
             manifest's folder; correct them, or remove the lines"
                .into(),
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(error(&text), expected, "{text}");
    }
}

#[test]
fn a_quote_that_is_not_closed_is_an_error_of_its_line() {
    let hint = "a quote is not closed; write \"\" for a quote inside a field";
    let cases = [
        ("path,label\nphotos/0.png,a\nphotos/1.png,\"b\nphotos/2.png,a\nphotos/3.png,b\n", 3),
        ("split,path,label\ntrain,photos/0.png,a\n\ntrain,photos/1.png,\"b\ntest,photos/2.png,a\n", 4),
        ("path,label\nphotos/0.png,a\n\"photos/1.png,b\nphotos/2.png,\"a\nphotos/3.png,b\n", 3),
        ("path,\"label\nphotos/0.png,a\nphotos/1.png,b\n", 1),
        ("path,label\r\nphotos/0.png,a\r\nphotos/1.png,\"b\r\n", 3),
    ];
    for (text, line) in cases {
        let expected = format!("labels.csv: line {line}: a field contains a line end; {hint}");
        assert_eq!(error(text), expected, "{text}");
        let manifest = Manifest::new(text);
        let mut request = request("manifest", manifest.path("labels.csv"));
        request.label_delim = Some(';');
        assert_eq!(load(&request).unwrap_err().place, format!("line {line}"), "{text}");
    }
    // The quote is reported also if the lines that it takes in are not UTF-8.
    let latin1 = b"path,label\nphotos/0.png,\"a\nphotos/\xff.png,b\n";
    assert!(error(latin1).starts_with("labels.csv: line 2: a field contains a line end; "), "{}", error(latin1));
}

/// Two paths and a link lead to the same file.
#[test]
fn an_image_in_two_splits_is_found_under_another_name() {
    let twice = "path,label,split\nphotos/0.png,a,train\nphotos/../photos/0.png,a,test\n";
    let expected =
        "labels.csv: line 3: photos/../photos/0.png has another split in line 2, as the same file photos/0.png; ";
    assert!(error(twice).starts_with(expected), "{}", error(twice));
    let manifest =
        Manifest::new("path,label,split\nphotos/0.png,a,train\nphotos/link.png,b,train\nphotos/1.png,a,test\n");
    std::os::unix::fs::symlink("0.png", manifest.path("photos/link.png")).unwrap();
    let cause = manifest.load().unwrap_err().cause;
    assert!(cause.contains("photos/link.png has another label in line 2, as the same file "), "{cause}");
    // Repeated lines are allowed unless a part of them is held out.
    let manifest = Manifest::new("path,label\nphotos/0.png,a\nphotos/1.png,b\nphotos/0.png,a\nphotos/2.png,b\n");
    let mut request = request("manifest", manifest.path("labels.csv"));
    request.split = SplitOptions { validation: Some(0.5), fraction: None, seed: 1 };
    let error = load(&request).unwrap_err();
    assert!(error.to_string().contains("line 4: ") && error.cause.ends_with("It is listed in line 2"), "{error}");
}

#[test]
fn numbers_have_a_range_and_no_gaps() {
    let all = |label: &str| {
        format!("path,label,split\nphotos/0.png,0,train\nphotos/1.png,{label},train\nphotos/2.png,0,test\n")
    };
    for label in ["-1", "65536", "9223372036854775807"] {
        let expected =
            format!("labels.csv: line 3: the label {label} is out of range; class numbers are from 0 to 65535");
        assert_eq!(error(all(label)), expected);
    }
    let gap = "labels.csv: the class `1` has no training image; class numbers go up to 2 here: number without gaps, or write names";
    assert_eq!(error(all("2")), gap);
    assert!(Manifest::new(all("1")).load().is_ok());
}

#[test]
fn invalid_manifests_and_images_are_errors() {
    assert!(error(b"path,label\nphotos/0.png,\xff\xfe\n").starts_with("labels.csv: line 2: is not UTF-8; "));
    let manifest = Manifest::new("");
    for (path, cause) in [("photos", "is a folder, not a CSV file"), ("none.csv", "cannot be read: No such file")] {
        let error = load(&request("manifest", manifest.path(path))).unwrap_err();
        assert!(error.cause.starts_with(cause) && !error.hint.is_empty(), "{error}");
    }
    let text = "path,label,split\nphotos/0.png,a,train\nphotos,b,train\nphotos/1.png,a,test\n";
    assert!(
        error(text).starts_with("labels.csv: line 3: photos cannot be read: it is a folder, not a file"),
        "{}",
        error(text)
    );
    std::fs::write(manifest.path("photos/2.png"), "no image").unwrap();
    std::fs::write(manifest.path("labels.csv"), text.replace("photos,b", "photos/2.png,b")).unwrap();
    let damaged = manifest.load().unwrap_err();
    assert!(damaged.file.ends_with("photos/2.png") && damaged.cause.starts_with("cannot be decoded"), "{damaged}");
}

/// As of an image folder: a run with data.on_error = "skip" replaces missing images, and an evaluation needs no training image.
#[test]
fn missing_images_are_left_to_the_loader_and_an_evaluation_needs_its_own_only() {
    let rows = "photos/0.png,a,train\nphotos/1.png,b,train\nphotos/2.png,b,train\n";
    let with_val = format!("path,label,split\n{rows}photos/3.png,a,val\n");
    for (text, val_is_used) in [(format!("{with_val}photos/4.png,b,test\n"), false), (with_val, true)] {
        let manifest = Manifest::new(text);
        let strict = LoadRequest {
            decode: DecodePolicy::Epoch,
            image_size: Some(4),
            ..request("manifest", manifest.path("labels.csv"))
        };
        let skip = LoadRequest { defer_missing: true, ..strict.clone() };
        let eval = LoadRequest { only_for_evaluation: true, ..strict.clone() };
        let before = load(&skip).unwrap();
        std::fs::remove_file(manifest.path("photos/1.png")).unwrap();
        assert!(load(&strict).unwrap_err().cause.starts_with("there is no file "));
        let after = load(&skip).unwrap();
        assert_eq!((after.train.len(), after.names_crc), (3, before.names_crc));
        let mut pixels = [0; 48];
        let error = after.train.encoded.as_ref().unwrap().decode(1, &mut pixels).unwrap_err();
        assert!(error.is_bad_image && error.file.ends_with("photos/1.png"), "{error}");
        assert_eq!(load(&eval).unwrap().test.len(), 1);
        // Without any training image, the evaluated images have the size.
        for name in ["photos/0.png", "photos/2.png"] {
            std::fs::remove_file(manifest.path(name)).unwrap();
        }
        assert_eq!(load(&LoadRequest { image_size: None, ..eval.clone() }).unwrap().test.shape.width, 4);
        // The images of `val` are the test split where there is no other.
        std::fs::remove_file(manifest.path("photos/3.png")).unwrap();
        assert_eq!(load(&eval).is_err(), val_is_used);
        assert!(load(&LoadRequest { only_for_evaluation: true, ..skip.clone() }).is_ok());
        // A link to itself is no missing file.
        std::os::unix::fs::symlink("1.png", manifest.path("photos/1.png")).unwrap();
        let error = load(&skip).unwrap_err();
        assert!(error.place == "line 3" && error.cause.contains("photos/1.png cannot be read: "), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn random_manifests_are_data_or_an_error(
        lines in prop::collection::vec("[a-c01,\"\n/.]{0,12}|photos/[0-9].png,[ab],(train|val|test)", 0..6),
        bytes in prop::collection::vec(any::<u8>(), 0..6),
    ) {
        let text = format!("path,label,split\n{}\n", lines.join("\n"));
        let manifest = Manifest::new([text.as_bytes(), &bytes].concat());
        match manifest.load() {
            Ok(splits) => prop_assert!(!splits.train.is_empty() && !splits.test.is_empty()),
            Err(error) => prop_assert!(!error.hint.is_empty()),
        }
    }
}
