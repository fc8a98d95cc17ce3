//! Labels are positions in the list of classes: data with other class names do not continue or evaluate a run.

use std::fs;

use crate::common::{Bench, pictures::save_png};

const CONFIG: &str = "[model]\nname = \"lenet\"\n[data]\nname = \"image-folder\"\ndir = \"pictures\"\n\
                      [train]\nepochs = 1\nbatch_size = 4\n";

/// Writes a folder of three classes of another colour.
fn pictures(bench: &Bench, root: &str, classes: [&str; 3]) {
    for split in ["train", "test"] {
        for (class, colour) in classes.into_iter().zip([10, 120, 240]) {
            let folder = bench.path(&format!("{root}/{split}/{class}"));
            fs::create_dir_all(&folder).unwrap();
            for index in 0..4 {
                save_png(folder.join(format!("{index}.png")), 20, 20, |x, y| [colour, (x * 7 + index) as u8, y as u8]);
            }
        }
    }
}

#[test]
fn a_class_with_another_name_is_refused() {
    let bench = Bench::new(CONFIG);
    pictures(&bench, "pictures", ["apple", "banana", "cherry"]);
    let run = bench.train("runs", &["--set", "train.ema=0.5"]);
    let run = run.to_str().unwrap();
    let accuracy = |arguments: &[&str]| {
        let printed = bench.run(&[&["eval", "--json"], arguments].concat()).expect(0).stdout;
        serde_json::from_str::<serde_json::Value>(&printed).unwrap()["loss"].clone()
    };
    let own = accuracy(&["--run", run]);
    // The same number of classes in another folder.
    pictures(&bench, "others", ["carrot", "leek", "potato"]);
    let other = ["eval", "--run", run, "--data", "image-folder", "--data-dir", "others"];
    let refused = bench.run(&other).expect(2).stderr;
    assert!(
        refused.contains("class 0 was \"apple\" when it was trained, and is \"carrot\" in the data set"),
        "{refused}"
    );
    assert!(refused.contains("hint: ") && refused.contains("/checkpoints/best --data image-folder"), "{refused}");
    // The hint's command compares labels by their numbers.
    let weights = format!("{run}/checkpoints/best");
    let eval = ["eval", "--model", "lenet", "--weights", &weights, "--data", "image-folder", "--data-dir", "others"];
    assert_eq!(accuracy(&eval[1..]), own, "the pictures and the weights are the same");
    // A renamed class moves to the end of the list.
    for split in ["train", "test"] {
        fs::rename(bench.path(&format!("pictures/{split}/apple")), bench.path(&format!("pictures/{split}/zapple")))
            .unwrap();
    }
    let cause = "class 0 was \"apple\" when it was trained, and is \"banana\" in the data set";
    for arguments in [&["eval", "--run", run][..], &["--resume", run, "--epochs", "2"]] {
        let refused = bench.run(arguments).expect(2).stderr;
        assert!(refused.contains(cause) && refused.contains("hint: "), "{refused}");
    }
    fs::remove_dir_all(bench.path("pictures/train/zapple")).unwrap();
    fs::remove_dir_all(bench.path("pictures/test/zapple")).unwrap();
    let refused = bench.run(&["--resume", run, "--epochs", "2"]).expect(2).stderr;
    assert!(refused.contains("hint: "), "{refused}");
}
