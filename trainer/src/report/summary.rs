//! The screen at the end of a run.

use std::path::Path;

use serde::Serialize;

use crate::report::confusion::confusion_table;
use crate::report::{AveragePrecision, Confusion};
use crate::snapshot::Evaluated;
use crate::text::{self, align_left, width};

/// The value of [`RunSummary::evaluated`] for evaluations of the validation split.
pub const VALIDATION: &str = "validation";

/// The result of a run, finished or interrupted.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RunSummary {
    /// Name of the network.
    pub model: String,
    /// Number of trainable parameters.
    pub parameters: u64,
    /// The registry's name of the data set.
    pub dataset: String,
    /// The data set with its size, as readable text: `fashion-mini, 7,000 + 1,000 images 1x28x28`.
    pub data: String,
    /// Device and strategy, as readable text: `CPU, burn-flex, 2 threads, AVX-512, single x1`.
    pub device: String,
    /// Number of complete epochs.
    pub epochs: usize,
    /// Number of planned epochs.
    pub planned_epochs: usize,
    /// Optimizer steps over the whole run.
    pub steps: u64,
    /// Why the run was interrupted: `SIGTERM after step 1,234`.
    pub interrupted: Option<String>,
    /// Why a finished run has fewer epochs than planned.
    pub note: Option<String>,
    /// Training loss of the last complete epoch.
    pub train_loss: Option<f64>,
    /// Training accuracy of the last complete epoch in percent.
    pub train_top1: Option<f64>,
    /// The split of `last` and `best`: [`VALIDATION`] if the data set has a validation split and test images. The test images are
    /// then evaluated only after training, so an interrupted run has no test accuracy. Absent if `last` and `best` are of the test
    /// split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluated: Option<&'static str>,
    /// Last evaluation, with its epoch.
    pub last: Option<Evaluated>,
    /// Best evaluation by `checkpoint.best`, with its epoch.
    pub best: Option<Evaluated>,
    /// The evaluation of the test split after training, with the epoch of its weights. Present only if the data set has a
    /// validation split and the run was not interrupted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test: Option<Evaluated>,
    /// Number of times that an image could not be decoded and another image of its class replaced it, since the run was started
    /// or resumed. Present only with `data.on_error = "skip"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replaced_images: Option<u64>,
    /// Wall-clock seconds, including those before a resume.
    pub seconds: f64,
    /// Peak memory of each rank's process in bytes; 0 if the system does not report it.
    pub peak_bytes: Vec<u64>,
    /// Memory of each device in bytes, rank after rank ([`Strategy::device_bytes`](crate::strategy::Strategy::device_bytes)).
    /// Empty for `single` and `ddp` on the CPU.
    pub device_bytes: Vec<u64>,
    /// Training images per second, mean of the run.
    pub images_per_s: Option<f64>,
    /// Confusion matrix of the last evaluation; `None` for multi-label images.
    pub confusion: Option<Confusion>,
    /// Average precision of each class in the last evaluation. Present for multi-label images only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub average_precision: Option<AveragePrecision>,
    /// Confusion matrix of the evaluation of the test split after training, if there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_confusion: Option<Confusion>,
    /// Average precision of each class in the evaluation of the test split. Present for multi-label images only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_average_precision: Option<AveragePrecision>,
}

/// Formats the summary for the screen. The run folder is last, where it is easy to find and copy. The text ends with a
/// newline.
pub fn summary_screen(summary: &RunSummary, folder: &Path) -> String {
    let mut rows: Vec<(&str, String)> = Vec::new();
    let multi_label = summary.last.is_some_and(|last| last.eval.mean_average_precision.is_some());
    rows.push(("model", format!("{}, {} parameters", summary.model, text::thousands(summary.parameters))));
    rows.push(("data", summary.data.clone()));
    rows.push(("device", summary.device.clone()));
    if let Some(count) = summary.replaced_images.filter(|count| *count > 0) {
        let count = text::thousands(count);
        rows.push(("replaced", format!("{count} damaged images, each by the next of its class (data.on_error)")));
    }
    let steps = text::thousands(summary.steps);
    let epochs = match summary.epochs == summary.planned_epochs {
        true => format!("{}, {steps} steps", summary.epochs),
        false => format!("{} of {}, {steps} steps", summary.epochs, summary.planned_epochs),
    };
    rows.push(("epochs", epochs));
    let speed = text::speed(summary.images_per_s.unwrap_or(f64::NAN));
    rows.push(("time", format!("{}, {speed} images/s in training", text::duration(summary.seconds))));
    if let (Some(loss), Some(top1)) = (summary.train_loss, summary.train_top1) {
        let accuracy = if multi_label { "exact" } else { "top-1" };
        rows.push(("training", format!("{accuracy} {}               loss {}", percent(top1), text::loss(loss))));
    }
    let [both, best_row, last_row] = match summary.evaluated {
        None => ["best = last", "best", "last"],
        Some(_) => ["val best = last", "val best", "val last"],
    };
    match (summary.best, summary.last) {
        (Some(best), Some(last)) if best.is_same(&last) => rows.push((both, evaluation(last))),
        (best, last) => {
            rows.extend(best.map(|best| (best_row, evaluation(best))));
            rows.extend(last.map(|last| (last_row, evaluation(last))));
        }
    }
    rows.extend(summary.test.map(|test| ("test", evaluation(test))));
    let (evaluated, confusion, precision) = match summary.test {
        Some(_) => ("evaluation of test", &summary.test_confusion, &summary.test_average_precision),
        None => ("last evaluation", &summary.confusion, &summary.average_precision),
    };
    let matrix = confusion.as_ref().map(confusion_table).unwrap_or_default();
    let names = rows.iter().map(|row| width(row.0)).max().unwrap_or(0);
    let mut screen = match (&summary.interrupted, &summary.note) {
        (Some(why), _) => format!("\ninterrupted: {why}\n\n"),
        (None, Some(note)) => format!("\ndone: {note}\n\n"),
        (None, None) => "\ndone\n\n".to_owned(),
    };
    for (name, value) in rows {
        screen += &format!("{}  {value}\n", align_left(name, names));
    }
    if !matrix.is_empty() {
        screen += &format!("\nconfusion of the {evaluated}\n{matrix}");
    }
    if let Some(precision) = precision {
        screen += &format!("\n{evaluated}: {}", precision.table());
    }
    screen + &format!("\nrun folder: {}\n", folder.display())
}

/// Formats an evaluation for the screen.
fn evaluation(Evaluated { epoch, eval }: Evaluated) -> String {
    let [correct, total] = [eval.correct, eval.total].map(text::thousands);
    let (exact, loss) = (percent(eval.top1), text::loss(eval.loss));
    if let Some(map) = eval.mean_average_precision {
        let map = percent(map);
        return format!(
            "mAP   {map}  exact {exact}  loss {loss}  epoch {epoch}, all classes of {correct} of {total} images right"
        );
    }
    let balanced =
        eval.distinct_balanced_accuracy().map_or_else(String::new, |b| format!("; balanced {}", text::percent(b)));
    let tta = eval.tta_top1.map_or_else(String::new, |top1| format!("; with mirror images {}", text::percent(top1)));
    let top5 = percent(eval.top5);
    format!("top-1 {exact}  top-5 {top5}  loss {loss}  epoch {epoch}, {correct} of {total} right{balanced}{tta}")
}

fn percent(value: f64) -> String {
    text::align_right(&text::percent(value), 7)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::EvalRecord;

    fn evaluated(epoch: usize, eval: EvalRecord) -> Evaluated {
        Evaluated { epoch, eval }
    }

    fn summary() -> RunSummary {
        RunSummary {
            dataset: "fashion-mini".into(),
            model: "lenet".into(),
            parameters: 61_706,
            data: "fashion-mini, 6,000 images to train, 1,000 to test, 1x28x28, 4 classes".into(),
            device: "cpu, single x1, 2 threads".into(),
            epochs: 12,
            planned_epochs: 12,
            steps: 564,
            interrupted: None,
            note: None,
            evaluated: None,
            train_loss: Some(0.3712),
            train_top1: Some(86.4),
            last: Some(evaluated(
                12,
                EvalRecord {
                    loss: 0.4471,
                    top1: 84.1,
                    top5: 100.0,
                    correct: 841,
                    total: 1000,
                    balanced_accuracy: None,
                    tta_top1: None,
                    mean_average_precision: None,
                },
            )),
            best: Some(evaluated(
                11,
                EvalRecord {
                    loss: 0.4512,
                    top1: 84.3,
                    top5: 99.8,
                    correct: 843,
                    total: 1000,
                    balanced_accuracy: None,
                    tta_top1: None,
                    mean_average_precision: None,
                },
            )),
            test: None,
            seconds: 73.2,
            peak_bytes: vec![123_456_789],
            device_bytes: Vec::new(),
            images_per_s: Some(1034.5),
            confusion: Some(Confusion {
                classes: ["T-shirt/top", "Trouser", "Coat", "Shirt"].map(String::from).to_vec(),
                counts: vec![220, 1, 9, 20, 0, 249, 1, 0, 10, 0, 201, 39, 48, 0, 31, 171],
            }),
            test_confusion: None,
            average_precision: None,
            test_average_precision: None,
            replaced_images: None,
        }
    }

    #[test]
    fn a_finished_run_fits_one_screen() {
        insta::assert_snapshot!(summary_screen(&summary(), Path::new("runs/20260131-093005-lenet-singlex1")), @r"
            done

            model     lenet, 61,706 parameters
            data      fashion-mini, 6,000 images to train, 1,000 to test, 1x28x28, 4 classes
            device    cpu, single x1, 2 threads
            epochs    12, 564 steps
            time      1m13s, 1,035 images/s in training
            training  top-1  86.40%               loss 0.3712
            best      top-1  84.30%  top-5  99.80%  loss 0.4512  epoch 11, 843 of 1,000 right
            last      top-1  84.10%  top-5 100.00%  loss 0.4471  epoch 12, 841 of 1,000 right

            confusion of the last evaluation
            rows: true class, columns: predicted class
                        T-shirt/top     Trouser        Coat       Shirt   recall
            T-shirt/top         220           1           9          20    88.0%
            Trouser               ·         249           1           ·    99.6%
            Coat                 10           ·         201          39    80.4%
            Shirt                48           ·          31         171    68.4%
            precision         79.1%       99.6%       83.1%       74.3%

            run folder: runs/20260131-093005-lenet-singlex1
            ");
    }

    #[test]
    fn the_evaluation_of_the_test_split_has_its_own_row() {
        let test = EvalRecord {
            loss: 0.5,
            top1: 82.5,
            top5: 99.0,
            correct: 330,
            total: 400,
            balanced_accuracy: None,
            tta_top1: None,
            mean_average_precision: None,
        };
        let test = EvalRecord { balanced_accuracy: Some(71.25), ..test };
        let matrix = Confusion { classes: vec!["a".into(), "b".into()], counts: vec![320, 10, 60, 10] };
        let evaluated_split = Some(VALIDATION);
        let (test, test_confusion) = (Some(evaluated(11, test)), Some(matrix));
        let summary = RunSummary { evaluated: evaluated_split, test, test_confusion, ..summary() };
        let screen = summary_screen(&summary, Path::new("runs/x"));
        assert!(screen.contains("\nconfusion of the evaluation of test\n"), "{screen}");
        assert!(!screen.contains("T-shirt"), "the other matrix is in summary.json only: {screen}");
        let evaluations = screen.lines().filter(|line| line.starts_with("val ") || line.starts_with("test "));
        insta::assert_snapshot!(evaluations.collect::<Vec<_>>().join("\n"), @r"
            val best  top-1  84.30%  top-5  99.80%  loss 0.4512  epoch 11, 843 of 1,000 right
            val last  top-1  84.10%  top-5 100.00%  loss 0.4471  epoch 12, 841 of 1,000 right
            test      top-1  82.50%  top-5  99.00%  loss 0.5000  epoch 11, 330 of 400 right; balanced 71.25%
            ");
        let without = serde_json::to_value(self::summary()).unwrap();
        for key in ["test", "evaluated"] {
            assert!(without.get(key).is_none(), "absent without a validation split: {without}");
        }
    }

    /// The test split is evaluated after training.
    #[test]
    fn an_interrupted_run_says_that_its_evaluations_are_of_the_validation_split() {
        let interrupted = Some("SIGTERM after step 61".into());
        let summary = RunSummary { evaluated: Some(VALIDATION), interrupted, ..summary() };
        let screen = summary_screen(&summary, Path::new("runs/x"));
        assert!(screen.contains("\nval best ") && screen.contains("\nval last "), "{screen}");
        assert!(!screen.contains("\ntest "), "{screen}");
        assert_eq!(serde_json::to_value(&summary).unwrap()["evaluated"], "validation");
    }

    #[test]
    fn multi_label_images_have_average_precisions() {
        let eval = EvalRecord { top5: f64::NAN, mean_average_precision: Some(61.25), ..summary().last.unwrap().eval };
        let precision = AveragePrecision {
            classes: vec!["cat".into(), "sea".into()],
            images: vec![300, 20],
            average_precision: vec![Some(72.5), Some(50.0)],
        };
        let (last, average_precision) = (Some(evaluated(12, eval)), Some(precision));
        let summary = RunSummary { last, best: last, confusion: None, average_precision, ..summary() };
        let screen = summary_screen(&summary, Path::new("runs/x"));
        insta::assert_snapshot!(&screen[screen.find("\ntraining").unwrap()..], @r"
            training     exact  86.40%               loss 0.3712
            best = last  mAP    61.25%  exact  84.10%  loss 0.4471  epoch 12, all classes of 841 of 1,000 images right

            last evaluation: average precision
            cat   72.50%  300 images
            sea   50.00%  20 images

            run folder: runs/x
            ");
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!(
            (&json["last"]["top5"], &json["last"]["mean_average_precision"]),
            (&serde_json::Value::Null, &61.25.into())
        );
        assert_eq!(json["average_precision"]["average_precision"][1], 50.0);
        let read: Evaluated = serde_json::from_value(json["last"].clone()).unwrap();
        assert!(read.eval.top5.is_nan() && read.eval.mean_average_precision == Some(61.25));
    }

    #[test]
    fn the_summary_of_an_interrupted_run_starts_with_the_signal() {
        let bare = RunSummary {
            epochs: 1,
            interrupted: Some("SIGTERM after step 61".into()),
            best: summary().last,
            confusion: None,
            train_loss: None,
            ..summary()
        };
        insta::assert_snapshot!(summary_screen(&bare, Path::new("runs/20260131-093005-lenet-singlex1")), @r"
            interrupted: SIGTERM after step 61

            model        lenet, 61,706 parameters
            data         fashion-mini, 6,000 images to train, 1,000 to test, 1x28x28, 4 classes
            device       cpu, single x1, 2 threads
            epochs       1 of 12, 564 steps
            time         1m13s, 1,035 images/s in training
            best = last  top-1  84.10%  top-5 100.00%  loss 0.4471  epoch 12, 841 of 1,000 right

            run folder: runs/20260131-093005-lenet-singlex1
            ");
    }

    #[test]
    fn a_run_stopped_before_its_first_step_has_a_summary_too() {
        let nothing = RunSummary { model: "lenet".into(), ..RunSummary::default() };
        let screen = summary_screen(&nothing, Path::new("runs/x"));
        assert!(screen.contains("0, 0 steps") && screen.contains("– images/s"), "{screen}");
        assert!(screen.ends_with("\nrun folder: runs/x\n"), "{screen}");
    }
}
