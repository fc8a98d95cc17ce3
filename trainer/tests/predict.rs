//! `trainer predict`: its classes are those of an evaluation, whatever the input and output are.

use std::path::{Path, PathBuf};

use crate::common::{Bench, CONFIG, pictures::save_grey_png};
use data::Dataset;
use data::formats::{self, LoadRequest};

const IMAGES: usize = 60;

/// Returns the first test images of the data set that the program contains.
fn images(count: usize) -> Dataset {
    let request = LoadRequest { name: "fashion-mini".into(), limit_test: Some(count), ..LoadRequest::default() };
    formats::load(&request).expect("the data set is in the program").test
}

/// Writes the images to `photos/a` and `photos/b` and returns their paths in the data set's order.
fn photos(bench: &Bench, set: &Dataset) -> Vec<PathBuf> {
    (0..set.len())
        .map(|index| {
            let path = bench.path(&format!("photos/{}/{index:04}.png", if index < set.len() / 2 { "a" } else { "b" }));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            save_grey_png(&path, 28, 28, set.image(index));
            path
        })
        .collect()
}

fn trained(config: &str) -> (Bench, String) {
    let bench = Bench::new(config);
    let run = bench.train("runs", &[]);
    (bench, run.display().to_string())
}

#[test]
fn an_empty_list_is_a_mistake() {
    let (bench, run) = trained(CONFIG);
    std::fs::write(bench.path("empty.txt"), "\n").unwrap();
    let said = bench.run(&["predict", "--run", &run, "--list", "empty.txt"]).expect(2).stderr;
    assert!(
        said.contains("empty.txt: the list is empty\n  hint: --list names a file with one path per line"),
        "{said}"
    );
    // The value of --tta may be left out before a path.
    photos(&bench, &images(2));
    let ended = bench.run(&["predict", "--run", &run, "--tta", "photos"]).expect(0).stdout;
    assert!(ended.starts_with("path,class,probability,tta_class"), "{ended}");
}

fn lines(text: &str) -> Vec<serde_json::Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Counts the predictions that are the label's class.
fn right(predictions: &[serde_json::Value], field: &str, set: &Dataset) -> u64 {
    let class = |line: &serde_json::Value| match field {
        "tta" => line["tta"]["index"].as_u64(),
        _ => line["predictions"][0]["index"].as_u64(),
    };
    predictions.iter().zip(&set.labels).filter(|(line, label)| class(line) == Some(u64::from(**label))).count() as u64
}

#[test]
fn predictions_are_those_of_an_evaluation() {
    // LeNet takes the images as they are, or padded to 32x32: the files are 28x28 in both cases.
    for config in [CONFIG.to_owned(), CONFIG.replace("limit_train", "image_size = 32\nlimit_train")] {
        let (bench, run) = trained(&config);
        // All of the data set's test images, as `eval` takes them.
        let set = images(1000);
        let paths = photos(&bench, &set);
        let report = bench.run(&["eval", "--run", &run, "--tta", "--json"]).expect(0).stdout;
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        let arguments = ["predict", "--run", &run, "--format", "jsonl", "--top-k", "3", "--tta", "--batch-size", "77"];
        let ended = bench.run(&[&arguments[..], &["photos"]].concat()).expect(0);
        let predicted = lines(&ended.stdout);
        assert_eq!(predicted.len(), 1000);
        for (line, path) in predicted.iter().zip(&paths) {
            assert!(path.ends_with(line["path"].as_str().unwrap()), "{line}");
            let probability = |rank: usize| line["predictions"][rank]["probability"].as_f64().unwrap();
            assert!(probability(0) >= probability(1) && probability(1) >= probability(2), "{line}");
            assert!((0..3).map(probability).sum::<f64>() <= 1.0 + 1e-9);
            let first = &line["predictions"][0];
            let index = first["index"].as_u64().unwrap() as usize;
            assert_eq!(first["class"], set.classes[index].as_str());
        }
        assert_eq!(right(&predicted, "plain", &set), report["correct"].as_u64().unwrap());
        let tta = right(&predicted, "tta", &set) as f64 * 100.0 / set.len() as f64;
        assert!((tta - report["tta_top1"].as_f64().unwrap()).abs() < 1e-9, "{tta} {report}");
    }
}

#[test]
fn csv_files_and_lists_have_the_same_predictions() {
    let (bench, run) = trained(CONFIG);
    let paths = photos(&bench, &images(IMAGES));
    let list: String = paths.iter().map(|path| format!("{}\n", path.display())).collect();
    std::fs::write(bench.path("list.txt"), format!("\n{list}")).unwrap();
    let one = bench.run(&["predict", "--run", &run, "--list", "list.txt", "--threads", "1"]).expect(0).stdout;
    bench.run(&["predict", "--run", &run, "--list", "list.txt", "--to", "out.csv"]).expect(0);
    assert_eq!(one, std::fs::read_to_string(bench.path("out.csv")).unwrap());
    let rows: Vec<&str> = one.lines().collect();
    assert_eq!((rows.len(), rows[0]), (IMAGES + 1, "path,class,probability"));
    assert!(rows[1].starts_with(&format!("{},", paths[0].display())), "{}", rows[1]);

    let nowhere =
        bench.run(&["predict", "--run", &run, "--list", "list.txt", "--to", "nodir/out.csv"]).expect(1).stderr;
    assert!(nowhere.contains("nodir/out.csv: cannot write") && nowhere.contains("hint: name a file"), "{nowhere}");
    let again = bench.run(&["predict", "--run", &run, "--list", "list.txt", "--to", "out.csv"]).expect(2);
    assert!(again.stderr.contains("out.csv: the file exists already") && again.stderr.contains("hint:"));
    rustix::fs::mkfifoat(rustix::fs::CWD, bench.path("pipe.csv"), rustix::fs::Mode::RUSR).unwrap();
    for force in [&[][..], &["--force"]] {
        let pipe = [&["predict", "--run", &run, "photos", "--to", "pipe.csv"], force].concat();
        let said = bench.run(&pipe).expect(2).stderr;
        assert!(said.contains("pipe.csv: is not a regular file") && said.contains("go to standard output"), "{said}");
    }
    bench.run(&["predict", "--run", &run, "photos", "--to", "out.csv", "--force", "--top-k", "2", "--tta"]).expect(0);
    let header = std::fs::read_to_string(bench.path("out.csv")).unwrap();
    assert!(header.starts_with("path,class,probability,class_2,probability_2,tta_class,tta_probability\n"), "{header}");
}

#[test]
fn images_that_cannot_be_read_are_named_and_left_out_on_request() {
    let (bench, run) = trained(CONFIG);
    let paths = photos(&bench, &images(IMAGES));
    let whole = std::fs::read(&paths[3]).unwrap();
    std::fs::write(&paths[3], &whole[..whole.len() / 2]).unwrap();
    let ended = bench.run(&["predict", "--run", &run, "photos"]).expect(2);
    assert!(ended.stderr.contains("photos/a/0003.png: cannot be decoded"), "{}", ended.stderr);
    assert!(ended.stderr.contains("hint:"), "{}", ended.stderr);
    let ended = bench.run(&["predict", "--run", &run, "photos", "--skip-errors"]).expect(0);
    assert_eq!(ended.stdout.lines().count(), IMAGES);
    assert!(ended.stderr.contains("1 of 60 images could not be read"), "{}", ended.stderr);
    for (path, cause) in [("nowhere.png", "nowhere.png: there is no such file"), ("config.toml", "cannot be decoded")] {
        let ended = bench.run(&["predict", "--run", &run, path]).expect(2);
        assert!(ended.stderr.contains(cause) && ended.stderr.contains("hint:"), "{}", ended.stderr);
    }
    std::fs::create_dir(bench.path("empty")).unwrap();
    let ended = bench.run(&["predict", "--run", &run, "empty"]).expect(2);
    assert!(ended.stderr.contains("empty: the folder holds no image"), "{}", ended.stderr);
}

/// Removes a key from every `state.json` of a run, as if an older version had written it. The manifest's checksums follow.
fn forget_data_set(run: &Path) {
    for entry in std::fs::read_dir(run.join("checkpoints")).unwrap().flatten() {
        if entry.file_type().unwrap().is_symlink() {
            continue;
        }
        let (state, manifest) = (entry.path().join("state.json"), entry.path().join("manifest.json"));
        let mut value: serde_json::Value = serde_json::from_slice(&std::fs::read(&state).unwrap()).unwrap();
        assert!(value.as_object_mut().unwrap().remove("dataset").is_some());
        let text = serde_json::to_vec(&value).unwrap();
        let mut names: serde_json::Value = serde_json::from_slice(&std::fs::read(&manifest).unwrap()).unwrap();
        for file in names["files"].as_array_mut().unwrap() {
            if file["name"] == "state.json" {
                file["bytes"] = text.len().into();
                file["sha256"] = sha256(&text).into();
            }
        }
        std::fs::write(&state, text).unwrap();
        std::fs::write(&manifest, serde_json::to_vec(&names).unwrap()).unwrap();
    }
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn checkpoints_of_older_versions_have_numbers_for_classes_or_a_clear_error() {
    let (bench, run) = trained(&CONFIG.replace("limit_train", "image_size = 32\nlimit_train"));
    photos(&bench, &images(IMAGES));
    let before = bench.run(&["predict", "--run", &run, "--format", "jsonl", "photos"]).expect(0).stdout;
    forget_data_set(Path::new(&run));
    let after = bench.run(&["predict", "--run", &run, "--format", "jsonl", "photos"]).expect(0).stdout;
    for (before, after) in lines(&before).iter().zip(&lines(&after)) {
        let (before, after) = (&before["predictions"][0], &after["predictions"][0]);
        assert_eq!((&before["index"], &before["probability"]), (&after["index"], &after["probability"]));
        assert_eq!(after["class"], after["index"].to_string());
    }
}
