//! Images that are damaged, missing or of another size: the run loses no step, or does not start.

use std::{fs, sync::Arc};

use data::{
    formats::{self, DecodePolicy, LoadRequest},
    loader::{Loader, LoaderConfig},
};
use models::Spec;
use trainer::{
    device,
    engine::{Loaders, RunOutcome, RunResult, checkpoint},
    failure::Failure,
    report::RunFolder,
    signals::StopFlag,
    strategy::single::Single,
};

use crate::common::{Bench, pictures::save_png};
use crate::engine::{self, Disturbed, Purpose};
use crate::pairs::{PICTURES, checkpoints, pictures, summary};

/// The epoch before an evaluation that fails is not lost.
#[test]
fn a_damaged_image_in_an_evaluation_leaves_a_checkpoint() {
    for flags in [&[][..], &["--cpus", "2"]] {
        let bench = Bench::new(PICTURES);
        pictures(&bench, &[("train", 16), ("test", 6)], [32, 32]);
        let damaged = bench.path("pictures/test/light/05.png");
        let intact = fs::read(&damaged).unwrap();
        fs::write(&damaged, &intact[..60]).unwrap();
        let ended = bench.run(&[&["--config", "config.toml"], flags].concat()).expect(2);
        assert!(ended.stderr.contains("05.png"), "{}", ended.stderr);
        let run = bench.only_run("runs");
        assert_eq!(checkpoints(&run), ["last", "step-4"], "{flags:?}");
        // No rank has ended before the others knew about the image.
        for report in ["rank-0", "rank-1"].map(|rank| run.join("logs").join(rank).join("error.json")) {
            let text = fs::read_to_string(report).unwrap_or_default();
            assert!(flags.is_empty() || text.contains("05.png"), "{text}");
        }
        fs::write(&damaged, intact).unwrap();
        bench.run(&[&["--resume", run.to_str().unwrap()], flags].concat()).expect(0);
        assert_eq!(summary(&run)["steps"], 8, "no step is repeated");
    }
}

/// The first images of the training set give airbench94 its first layer.
#[test]
fn damaged_images_do_not_stop_initial_weights_from_images() {
    let bench = Bench::new(&PICTURES.replace("shufflenetv2_x0_5", "airbench94"));
    pictures(&bench, &[("train", 8), ("test", 2)], [32, 32]);
    fs::write(bench.path("pictures/train/dark/01.png"), "no image").unwrap();
    let skip = ["--config", "config.toml", "--epochs", "1", "--set", "data.on_error=skip"];
    let ended = bench.run(&skip).expect(0);
    assert!(ended.stderr.contains("01.png"), "{}", ended.stderr);
    let ended = bench.run(&skip[..4]).expect(2);
    assert!(ended.stderr.contains("01.png"), "{}", ended.stderr);
}

/// The workers of a job and a resumed run read the configuration that the run folder has.
#[test]
fn an_image_of_another_size_is_refused_in_each_process_and_after_a_resume() {
    let bench = Bench::new(PICTURES);
    pictures(&bench, &[("train", 8), ("test", 2)], [32, 32]);
    save_png(bench.path("pictures/train/light/05.png"), 40, 36, |_, _| [9; 3]);
    let said = "pictures/train/light/05.png: is 40x36 pixels, the first image is 32x32";
    let check = |arguments: &[&str]| {
        let ended = bench.run(arguments).expect(2);
        assert!(ended.stderr.contains(said), "{}", ended.stderr);
        assert!(ended.stderr.contains("hint: set image_size in [data]"), "{}", ended.stderr);
    };
    for (root, more) in [("single", &[][..]), ("ddp", &["--cpus", "2"])] {
        check(&[&["--config", "config.toml", "--run-dir", root], more].concat());
        check(&["--resume", bench.only_run(root).to_str().unwrap()]);
    }
    // Such an image is whole, so it is not replaced.
    check(&["--config", "config.toml", "--run-dir", "skip", "--cpus", "2", "--set", "data.on_error=skip"]);
}

/// The images are removed between two epochs, of which only the last one is saved.
#[test]
fn images_lost_between_two_epochs_do_not_lose_the_epoch_before() {
    let bench = Bench::new("");
    pictures(&bench, &[("train", 6), ("test", 2)], [28, 28]);
    let (images, aside) = (bench.path("pictures/train/dark"), bench.path("aside"));
    let plan = engine::plan("[checkpoint]\nevery = 0\nkeep_best = false\n");
    let folder = RunFolder::create(&bench.path("runs"), "lenet", "single", 1).unwrap();
    let request = LoadRequest {
        name: "image-folder".into(),
        dir: Some(bench.path("pictures")),
        decode: DecodePolicy::Epoch,
        ..LoadRequest::default()
    };
    // In the first run, evaluation 1 ends the first epoch.
    let run = |at: usize| -> Result<RunResult, Failure> {
        let splits = formats::load(&request).unwrap();
        let [train, eval] =
            [(splits.train, Purpose::Training), (splits.test, Purpose::Evaluation)].map(|(set, purpose)| {
                let evaluation = purpose == Purpose::Evaluation;
                let (mean, std) = (vec![0.5; 3], vec![0.25; 3]);
                let config = LoaderConfig { global_batch: 16, evaluation, mean, std, ..LoaderConfig::default() };
                Loader::new(Arc::new(set), config).unwrap()
            });
        let device = device::cpu().device();
        let spec = Spec { num_classes: 2, in_channels: 3, image_size: [28, 28] };
        let network = models::build("lenet", &spec, 7, &device).unwrap();
        let (from, to) = (images.clone(), aside.clone());
        let mut strategy =
            Disturbed::new(Single::new(network, device, 2, &plan), at, move || fs::rename(&from, &to).unwrap());
        engine::run(&folder, &plan, &mut strategy, Loaders { train, eval, test: None }, StopFlag::never())
    };
    let Err(failure) = run(1) else { panic!("the images are gone") };
    assert!(failure.message.contains("pictures/train/dark/"), "{failure:?}");
    let saved = checkpoint::load_newest(&folder.checkpoints()).unwrap().0.progress;
    assert_eq!((saved.epoch, saved.batch, saved.step), (2, 0, 1));

    fs::rename(&aside, &images).unwrap();
    let end = run(0).unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(matches!(end.outcome, RunOutcome::Finished(_)), "{:?}", end.outcome);
    assert_eq!((end.progress.step, end.progress.last.unwrap().epoch), (2, 2));
}
