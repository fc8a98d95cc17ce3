//! `[schedule]`: the keys of each kind and what they ask of the run's length.

use std::ops::Bound::{Excluded, Included};

use super::choice::{Anneal, ScheduleName};
use super::plan::{MultiStep, OneCycle, Schedule, Train, Warmup};
use super::reader::{Reader, Section};
use super::value::Mistake;

/// Longest warm-up in epochs and last milestone.
const EPOCHS: f64 = 1e6;

/// Reads the section; `train` says how long the run is.
pub(super) fn schedule(reader: &mut Reader, train: &Train) -> Schedule {
    use ScheduleName::{Constant, Cosine, MultiStep as Multi, OneCycle as Cycle};

    let mut section = reader.section("schedule");
    let kind = section.choice("kind", Cosine, "the learning rate over the run");
    let warmup = Warmup {
        epochs: section.number("warmup_epochs", 0.0, 0.0..=EPOCHS, "length of the rise to lr in epochs, 0 = none"),
        start: section.number("warmup_start", 0.01, 0.0..=1.0, "first learning rate as a factor of lr"),
    };
    let factor = 1.0..=1e12;
    let cycle = OneCycle {
        pct_start: section.number("pct_start", 0.3, (Excluded(0.0), Excluded(1.0)), "share of the run that rises"),
        div: section.number("div", 25.0, factor.clone(), "lr / div is the first learning rate"),
        final_div: section.number("final_div", 1e4, factor, "lr / div / final_div is the last learning rate"),
        anneal: section.choice("anneal", Anneal::Cos, "shape of the slopes"),
    };
    let about = "fractions of the run, or epochs where above 1; default [0.5, 0.75]";
    let milestones = section.get("milestones", about, |value| milestones(value.numbers(Ok)?));
    let gamma = section.number("gamma", 0.1, (Excluded(0.0), Included(1.0)), "factor at each milestone");

    section.only_for(kind, &[Cosine, Multi, Constant], &["warmup_epochs", "warmup_start"]);
    section.only_for(kind, &[Cycle], &["pct_start", "div", "final_div", "anneal"]);
    section.only_for(kind, &[Multi], &["milestones", "gamma"]);
    let milestones = milestones.unwrap_or_else(|| vec![0.5, 0.75]);
    let schedule = match kind {
        Cosine => Schedule::Cosine(warmup),
        Constant => Schedule::Constant(warmup),
        Cycle => Schedule::OneCycle(cycle),
        Multi => Schedule::MultiStep(MultiStep { milestones, gamma, warmup }),
    };
    check_length(&mut section, &schedule, train);
    schedule
}

/// Milestones that rise and are of one sort.
fn milestones(list: Vec<f64>) -> Result<Vec<f64>, Mistake> {
    if list.is_empty() {
        return Err(Mistake::new("expected at least one milestone, found none").hint("kind = \"constant\" has none"));
    }
    if let Some(wrong) = list.iter().find(|milestone| **milestone <= 0.0 || **milestone > EPOCHS) {
        return Err(Mistake::new(format!("expected milestones above 0, found {wrong}")));
    }
    if list.contains(&1.0)
        || list.iter().any(|milestone| *milestone < 1.0) != list.iter().all(|milestone| *milestone < 1.0)
    {
        return Err(Mistake::new("expected all milestones below 1 (fractions of the run) or all above 1 (epochs)"));
    }
    match list.windows(2).find(|pair| pair[0] >= pair[1]) {
        Some(pair) => Err(Mistake::new(format!("expected rising milestones, found {} before {}", pair[0], pair[1]))
            .hint("sort them; each may be there once")),
        None => Ok(list),
    }
}

/// What can be said only with the run's length. A run limited by steps has no length in epochs before the data are
/// read.
fn check_length(section: &mut Section, schedule: &Schedule, train: &Train) {
    if train.epochs == 0 || train.max_steps > 0 {
        return;
    }
    let epochs = train.epochs as f64;
    if let Schedule::Cosine(warmup) | Schedule::Constant(warmup) | Schedule::MultiStep(MultiStep { warmup, .. }) =
        schedule
        && warmup.epochs >= epochs
    {
        section.reject(
            "warmup_epochs",
            format!("`schedule.warmup_epochs`: {} epochs of warm-up in a run of {epochs}", warmup.epochs),
            "shorten the warm-up (0 = none) or train for more epochs",
        );
    }
    if let Schedule::MultiStep(MultiStep { milestones, .. }) = schedule {
        for late in milestones.iter().filter(|milestone| **milestone >= epochs && **milestone > 1.0) {
            section
                .reader
                .notes
                .push(format!("`schedule.milestones`: epoch {late} is never reached in {epochs} epochs"));
        }
    }
}
