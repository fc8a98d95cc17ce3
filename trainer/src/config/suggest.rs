//! Nearest names for a word that is not in the list.

/// A name and its aliases: the edit distance cannot know that `learning_rate` is `lr`.
pub(super) type Name<'a> = (&'a str, &'a [&'a str]);

/// Maximum length of a list of names that is printed beside a near name.
const LONG: usize = 24;

/// Returns a word without case and separators: `OneCycle_LR` and `one-cycle lr` are the same.
fn fold(word: &str) -> String {
    word.chars().filter(|symbol| symbol.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

/// Returns the distance of a name from the written word; `None` if they are not similar.
fn distance(written: &str, (name, aliases): Name) -> Option<usize> {
    let (word, other) = (fold(written), fold(name));
    if word.is_empty() || word.len() > 100 {
        return None;
    }
    if word == other || aliases.iter().any(|alias| fold(alias) == word) {
        return Some(0);
    }
    let edits = strsim::damerau_levenshtein(&word, &other);
    let (short, long) = if word.len() < other.len() { (&word, &other) } else { (&other, &word) };
    // A part of a word is similar too: `cifar` for `cifar10`, `onecyclelr` for `one-cycle`.
    let part = short.len() >= 3 && long.contains(short.as_str());
    (part || edits <= (short.len().div_ceil(3))).then_some(edits)
}

/// Returns whether a word is the name or one of its aliases, in another spelling.
pub(super) fn is_called(written: &str, name: Name) -> bool {
    distance(written, name) == Some(0)
}

/// Returns the name that was most probably meant.
pub(super) fn nearest<'a>(written: &str, names: &[Name<'a>]) -> Option<&'a str> {
    let candidates = names.iter().filter_map(|name| Some((distance(written, *name)?, name.0)));
    candidates.min_by_key(|&(edits, _)| edits).map(|(_, name)| name)
}

/// Returns "did you mean `x`? " where a name is near, then all names, the nearest first: "choices: x, y". A long list hides the
/// near name, so it is left out beside one.
pub(super) fn hint(title: &str, written: &str, names: &[Name]) -> String {
    let near = nearest(written, names);
    if let Some(near) = near.filter(|_| names.len() > LONG) {
        return format!("did you mean `{near}`?");
    }
    let rest = names.iter().map(|name| name.0).filter(|name| Some(*name) != near);
    let list: Vec<&str> = near.into_iter().chain(rest).collect();
    let start = near.map(|name| format!("did you mean `{name}`? ")).unwrap_or_default();
    format!("{start}{title}: {}", list.join(", "))
}

/// Returns the hint for a data set that does not exist.
pub fn data_set_hint(written: &str, names: &[&str]) -> String {
    hint("data sets", written, &without_aliases(names))
}

/// Returns names without aliases.
pub(super) fn without_aliases<'a>(names: &[&'a str]) -> Vec<Name<'a>> {
    names.iter().map(|name| (*name, [].as_slice())).collect()
}

/// Returns the hint for a name that is not a layer of a network: the nearest module or weight, and the layers at the top.
/// `weights` are the names of the network's weights in the state dict.
pub fn layer_hint(written: &str, weights: &[&str]) -> String {
    let mut modules: Vec<&str> = Vec::new();
    for name in weights {
        let ends = name.match_indices('.').map(|(dot, _)| dot).chain([name.len()]);
        for module in ends.map(|end| &name[..end]) {
            if !modules.contains(&module) {
                modules.push(module);
            }
        }
    }
    let near =
        nearest(written, &without_aliases(&modules)).map(|name| format!("did you mean `{name}`? ")).unwrap_or_default();
    let top: Vec<&str> = modules.iter().copied().filter(|name| !name.contains('.')).collect();
    let inner = modules.iter().filter(|name| name.contains('.'));
    let deeper = inner.clone().find(|name| !weights.contains(name)).or_else(|| inner.clone().next());
    let deeper = deeper.map(|name| format!(", and parts of them, such as {name}"));
    format!("{near}layers: {}{}", top.join(", "), deeper.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_is_not_printed_beside_a_near_name() {
        let names: Vec<String> = (0..=LONG).map(|number| format!("network{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let of = |written, count: usize| hint("names", written, &without_aliases(&names[..count]));
        assert_eq!(of("netwrok3", LONG + 1), "did you mean `network3`?");
        assert!(of("netwrok3", LONG).starts_with("did you mean `network3`? names: network3, network0, network1, "));
        // Without a near name, the list is the only help.
        assert!(of("vgg", LONG + 1).starts_with("names: network0, network1, "));
    }
}
