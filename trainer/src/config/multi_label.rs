//! Checks of the keys that apply only to images with several classes each (`data.label_delim`), and of the keys that do not
//! apply to them.

use data::formats::is_label_delimiter;

use super::class_weights::ClassWeights;
use super::key::{KeyValue, Range};
use super::keyword::{BestBy, Tta};
use super::plan::RunPlan;
use super::reader::Reader;
use super::value::{RawValue, ValueError};

impl RunPlan {
    /// Returns whether an image may have several classes or none. The loss is then binary cross-entropy.
    pub fn is_multi_label(&self) -> bool {
        self.data.label_delim.is_some()
    }

    /// Returns the measure that selects the best evaluation.
    pub fn best_by(&self) -> BestBy {
        let default = if self.is_multi_label() { BestBy::MeanAveragePrecision } else { BestBy::Accuracy };
        self.checkpoint.best.unwrap_or(default)
    }
}

/// Checks the keys of the plan against `data.label_delim`.
pub(super) fn check(plan: &RunPlan, reader: &mut Reader) {
    if !plan.is_multi_label() {
        if plan.train.pos_weight.is_some() {
            let cause = "`train.pos_weight` is for images that have several classes each";
            reader.reject("train.pos_weight", cause, "use `train.class_weights`, or set `data.label_delim`");
        }
        if plan.checkpoint.best == Some(BestBy::MeanAveragePrecision) {
            let cause = "\"map\" is measured where images have several classes each";
            reader.reject("checkpoint.best", cause, "use \"accuracy\", or set `data.label_delim`");
        }
        return;
    }
    if plan.data.name != "manifest" && !plan.data.name.is_empty() {
        let cause = format!("\"{}\" has one class per image", plan.data.name);
        reader.reject("data.label_delim", cause, "remove `label_delim`, or list images and classes in a manifest");
    }
    let train = &plan.train;
    let refused = [
        (
            "train.label_smoothing",
            train.label_smoothing > 0.0,
            "the binary cross-entropy of each class is not smoothed",
        ),
        ("train.mixup", train.mixup > 0.0, "images with several classes are not mixed"),
        ("train.cutmix", train.cutmix > 0.0, "images with several classes are not mixed"),
        ("train.class_weights", train.class_weights != ClassWeights::None, "use `train.pos_weight`"),
        ("data.sampler_weights", plan.data.sampler_weights != ClassWeights::None, "use `train.pos_weight`"),
        ("train.tta", train.tta != Tta::None, "evaluations are of the images as they are"),
    ];
    for (key, _, hint) in refused.into_iter().filter(|(_, set, _)| *set) {
        let cause = "this needs one class per image, and `data.label_delim` allows several";
        reader.reject(key, cause, format!("remove it: {hint}"));
    }
    if plan.checkpoint.best == Some(BestBy::BalancedAccuracy) {
        let cause = "\"balanced-accuracy\" needs one class per image, and `data.label_delim` allows several";
        reader.reject("checkpoint.best", cause, "use \"map\", the mean average precision, \"accuracy\" or \"loss\"");
    }
}

/// A character between two classes.
impl KeyValue for char {
    const TYPE: &'static str = "character";

    fn read(raw: &RawValue, _: &Range) -> Result<Self, ValueError> {
        let text = raw.string()?;
        let mut symbols = text.chars();
        match (symbols.next(), symbols.next()) {
            (Some(one), None) if is_label_delimiter(one) => Ok(one),
            _ => Err(ValueError::new(format!("expected one character between two classes, found {text:?}"))
                .hint("no letter, digit or quote; `label_delim = \";\"` reads cat;dog")),
        }
    }

    fn write(&self) -> Option<toml::Value> {
        Some(self.to_string().into())
    }
}
