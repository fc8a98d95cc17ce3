//! The labels of a manifest: class names or class numbers, one for each image or several.

use std::path::Path;

use super::{HEADER, ManifestRow, Split};
use crate::label_sets::first_missing_class;
use crate::{DataError, LabelSets};

/// Classes that a label can number.
const MAX_CLASSES: usize = u16::MAX as usize + 1;

/// The classes of a manifest.
pub(super) struct Labels {
    /// Names of the classes in label order.
    pub(super) classes: Vec<String>,
    /// The classes of each row. Without a delimiter each row has one.
    pub(super) sets: LabelSets,
}

/// A class in the label of a row.
struct Named<'a> {
    row: &'a ManifestRow,
    name: &'a str,
}

impl Named<'_> {
    fn number(&self) -> Option<i64> {
        self.name.parse().ok()
    }
}

/// Returns the classes of all rows. `delim` is the character between the classes of a row; `None`: each row has one class.
pub(super) fn labels(file: &Path, rows: &[ManifestRow], delim: Option<char>) -> Result<Labels, DataError> {
    if !rows.iter().any(|row| row.split == Split::Train) {
        return Err(DataError::new(file, "no line has the split train: there is nothing to train on", HEADER));
    }
    let named = rows.iter().flat_map(|row| names(row, delim).map(move |name| Named { row, name })).collect::<Vec<_>>();
    let Some(first) = named.first() else {
        let cause = "no image has a class: all labels are empty";
        return Err(DataError::new(file, cause, "the column label holds the classes of each image, such as cat;dog"));
    };
    if let Some(Named { row, .. }) = named.iter().find(|class| class.name.is_empty()) {
        let cause = format!("the label {:?} has a class without a name", row.label);
        let delim = delim.unwrap_or(';');
        return at(
            file,
            row,
            cause,
            &format!("write one `{delim}` between two classes; an image without classes has an empty label"),
        );
    }
    let numbered = first.number().is_some();
    if let Some(class) = named.iter().find(|class| class.number().is_some() != numbered) {
        let [this, other] = if numbered { ["a name", "a number"] } else { ["a number", "a name"] };
        let cause = format!("the label {:?} is {this}, that of line {} is {other}", class.name, first.row.line);
        return at(file, class.row, cause, "use class names in all lines, or class numbers from 0 in all lines");
    }
    let (classes, numbers) = if numbered { of_numbers(file, &named)? } else { of_names(file, &named)? };
    let sets = sets(file, rows, &named, &numbers, &classes)?;
    check_trained(file, rows, &sets, &classes)?;
    if delim.is_some() && classes.len() < 2 {
        let cause = format!("all labels name one class, `{}`", classes[0]);
        let hint =
            "for images with a class and without it, leave label_delim out and name the other class too: cat, no-cat";
        return Err(DataError::new(file, cause, hint));
    }
    Ok(Labels { classes, sets })
}

/// Returns the names in a row's label.
fn names(row: &ManifestRow, delim: Option<char>) -> impl Iterator<Item = &str> {
    let label = row.label.as_str();
    // Splitting an empty text finds one empty name.
    let several = delim.filter(|_| !label.is_empty()).map(|delim| label.split(delim).map(str::trim));
    let one = delim.is_none().then_some(label);
    several.into_iter().flatten().chain(one)
}

/// Returns the names of the classes and the number of each element of `named`, which are all class numbers.
fn of_numbers(file: &Path, named: &[Named<'_>]) -> Result<(Vec<String>, Vec<u16>), DataError> {
    let mut numbers = Vec::with_capacity(named.len());
    for class in named {
        let Some(number) = class.number().and_then(|number| u16::try_from(number).ok()) else {
            let hint = format!("class numbers are from 0 to {}", u16::MAX);
            return at(file, class.row, format!("the label {} is out of range", class.name), &hint);
        };
        numbers.push(number);
    }
    let most = numbers.iter().copied().max().unwrap_or(0);
    Ok(((0..=most).map(|class| class.to_string()).collect(), numbers))
}

/// Returns the sorted names of the classes and the number of each element of `named`.
fn of_names(file: &Path, named: &[Named<'_>]) -> Result<(Vec<String>, Vec<u16>), DataError> {
    let mut classes: Vec<&str> = named.iter().map(|class| class.name).collect();
    classes.sort_unstable();
    classes.dedup();
    if classes.len() > MAX_CLASSES {
        let cause = format!("{} classes, at most {MAX_CLASSES} are supported", classes.len());
        return Err(DataError::new(file, cause, "the column label holds the class of each image"));
    }
    let number = |class: &Named<'_>| classes.binary_search(&class.name).unwrap_or_default() as u16;
    let numbers = named.iter().map(number).collect();
    Ok((classes.into_iter().map(str::to_owned).collect(), numbers))
}

/// Returns the classes of each row, sorted. `numbers` are those of `named`, which has the rows in their order.
fn sets(
    file: &Path,
    rows: &[ManifestRow],
    named: &[Named<'_>],
    numbers: &[u16],
    classes: &[String],
) -> Result<LabelSets, DataError> {
    let mut sets = LabelSets::default();
    let mut rest = named.iter().zip(numbers).peekable();
    let mut set = Vec::new();
    for row in rows {
        set.clear();
        while let Some((_, number)) = rest.next_if(|(class, _)| class.row.line == row.line) {
            set.push(*number);
        }
        set.sort_unstable();
        if let Some(twice) = set.windows(2).find(|pair| pair[0] == pair[1]) {
            let cause = format!("the label {:?} names the class `{}` twice", row.label, classes[usize::from(twice[0])]);
            return at(file, row, cause, "name each class of an image once");
        }
        sets.push(&set);
    }
    Ok(sets)
}

/// Checks that every class has a training image.
fn check_trained(file: &Path, rows: &[ManifestRow], sets: &LabelSets, classes: &[String]) -> Result<(), DataError> {
    let parts = || rows.iter().zip(sets.iter());
    let of_training = parts().filter(|(row, _)| row.split == Split::Train).flat_map(|(_, set)| set);
    let Some(class) = first_missing_class(classes.len(), of_training) else { return Ok(()) };
    let cause = format!("the class `{}` has no training image", classes[class]);
    match parts().find(|(_, set)| set.iter().any(|&other| usize::from(other) == class)) {
        Some((row, _)) => at(file, row, cause, "give the class images of the split train, or remove its lines"),
        None => {
            let hint =
                format!("class numbers go up to {} here: number without gaps, or write names", classes.len() - 1);
            Err(DataError::new(file, cause, hint))
        }
    }
}

/// Returns an error about a row.
fn at<T>(file: &Path, row: &ManifestRow, cause: String, hint: &str) -> Result<T, DataError> {
    Err(DataError::new(file, cause, hint).at(format!("line {}", row.line)))
}
