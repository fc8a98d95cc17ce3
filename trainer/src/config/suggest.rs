//! Nearest names for a word that is not in the list.

/// What other trainers call our keys, after [`fold`]: edit distance cannot know that `learning_rate` is `lr`.
const ALIASES: &[(&str, &str)] = &[
    ("learningrate", "lr"),
    ("baselr", "lr"),
    ("batch", "batch_size"),
    ("bs", "batch_size"),
    ("wd", "weight_decay"),
    ("l2", "weight_decay"),
    ("numepochs", "epochs"),
    ("maxepochs", "epochs"),
    ("steps", "max_steps"),
    ("optimizer", "kind"),
    ("scheduler", "kind"),
    ("type", "kind"),
    ("arch", "name"),
    ("dataset", "name"),
    ("warmup", "warmup_epochs"),
    ("clip", "grad_clip"),
    ("clipgradnorm", "grad_clip"),
    ("maxgradnorm", "grad_clip"),
    ("accumulationsteps", "accumulate"),
    ("gradientaccumulationsteps", "accumulate"),
    ("accumulategradbatches", "accumulate"),
    ("numworkers", "workers"),
    ("path", "dir"),
    ("root", "dir"),
    ("datadir", "dir"),
    ("transforms", "augment"),
    ("augmentation", "augment"),
    ("augmentations", "augment"),
    ("dtype", "precision"),
    ("amp", "precision"),
    ("smoothing", "label_smoothing"),
    ("divfactor", "div"),
    ("finaldivfactor", "final_div"),
    ("emadecay", "ema"),
    ("classes", "num_classes"),
    ("fp32", "f32"),
    ("float32", "f32"),
    ("bfloat16", "bf16"),
    ("float16", "bf16"),
    ("randomcrop", "crop"),
    ("randomhorizontalflip", "flip"),
    ("hflip", "flip"),
    ("imagefolder", "image-folder"),
    ("adam", "adamw"),
    ("step", "multi-step"),
];

/// A word without case and separators: `OneCycle_LR` and `one-cycle lr` are the same.
fn fold(word: &str) -> String {
    word.chars().filter(|symbol| symbol.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

/// How far `candidate` is from what was written, or `None` where nobody could have meant it.
fn distance(written: &str, candidate: &str) -> Option<usize> {
    let (word, other) = (fold(written), fold(candidate));
    if word.is_empty() || word.len() > 100 {
        return None;
    }
    if word == other || ALIASES.iter().any(|&(alias, key)| alias == word && key == candidate) {
        return Some(0);
    }
    let edits = strsim::damerau_levenshtein(&word, &other);
    let (short, long) = if word.len() < other.len() { (&word, &other) } else { (&other, &word) };
    // Half a word is a hint as well: `cifar` for `cifar10`, `onecyclelr` for `one-cycle`.
    let part = short.len() >= 3 && long.contains(short.as_str());
    (part || edits <= (short.len().div_ceil(3))).then_some(edits)
}

/// The candidate that was most probably meant.
pub(super) fn nearest<'a>(written: &str, candidates: &[&'a str]) -> Option<&'a str> {
    candidates
        .iter()
        .filter_map(|candidate| Some((distance(written, candidate)?, *candidate)))
        .min_by_key(|&(edits, _)| edits)
        .map(|(_, candidate)| candidate)
}

/// "did you mean `x`? " where there is a near candidate, else nothing.
pub(super) fn did_you_mean(written: &str, candidates: &[&str]) -> String {
    nearest(written, candidates).map(|name| format!("did you mean `{name}`? ")).unwrap_or_default()
}

/// All candidates, comma-separated, the nearest first.
pub(super) fn nearest_first(written: &str, candidates: &[&str]) -> String {
    let mut list: Vec<&str> = candidates.to_vec();
    if let Some(position) = nearest(written, candidates).and_then(|best| list.iter().position(|name| *name == best)) {
        let best = list.remove(position);
        list.insert(0, best);
    }
    list.join(", ")
}
