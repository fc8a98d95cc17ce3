//! The confusion matrix: complete if it fits on a screen, otherwise its worst classes and pairs.

use serde::{Serialize, Serializer, ser::SerializeStruct};

use crate::report::start_table::MAX_LINE_WIDTH;
use crate::text::{self, align_left, align_right, one_line, truncated, width};

/// Maximum number of classes for the complete matrix.
const MAX_COMPLETE: usize = 20;
/// Number of classes and of pairs to show if the matrix is too large.
const WORST_SHOWN: usize = 5;
/// Maximum width of a class name beside the matrix.
const MAX_NAME_WIDTH: usize = 14;
/// Width of the recall at the end of a line.
const RECALL_WIDTH: usize = 9;
/// Minimum width of a column headed by a class name. A narrower column is headed by the class number.
const MIN_NAMED_WIDTH: usize = 6;

/// Label of the row of precisions.
const PRECISION: &str = "precision";

/// How often samples of each class were predicted as each class. The JSON also has each class's precision and recall in percent,
/// `null` for a class that was never predicted or has no samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confusion {
    /// Names of the classes.
    pub classes: Vec<String>,
    /// `counts[true * classes + predicted]`.
    pub counts: Vec<u64>,
}

impl Confusion {
    /// Returns the number of samples of class `actual` that were predicted as `predicted`.
    fn count(&self, actual: usize, predicted: usize) -> u64 {
        self.counts[actual * self.classes.len() + predicted]
    }

    /// Returns the number of samples of a class.
    fn total(&self, actual: usize) -> u64 {
        (0..self.classes.len()).map(|predicted| self.count(actual, predicted)).sum()
    }

    /// Returns the recall of a class in percent; `None` for a class without samples.
    fn recall(&self, actual: usize) -> Option<f64> {
        let total = self.total(actual);
        (total > 0).then(|| 100.0 * self.count(actual, actual) as f64 / total as f64)
    }

    /// Returns the precision of a class in percent; `None` for a class that was never predicted.
    fn precision(&self, predicted: usize) -> Option<f64> {
        let total: u64 = (0..self.classes.len()).map(|actual| self.count(actual, predicted)).sum();
        (total > 0).then(|| 100.0 * self.count(predicted, predicted) as f64 / total as f64)
    }
}

impl Serialize for Confusion {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let of_each = |score: fn(&Self, usize) -> Option<f64>| -> Vec<Option<f64>> {
            (0..self.classes.len()).map(|class| score(self, class)).collect()
        };
        let mut fields = to.serialize_struct("Confusion", 4)?;
        fields.serialize_field("classes", &self.classes)?;
        fields.serialize_field("counts", &self.counts)?;
        fields.serialize_field("precision", &of_each(Self::precision))?;
        fields.serialize_field("recall", &of_each(Self::recall))?;
        fields.end()
    }
}

/// Formats the matrix of up to 20 classes, with true classes as rows and predicted classes as columns.
///
/// With more classes, or with counts too wide for a line, lists the five worst classes and the five pairs most often
/// confused. The text ends with a newline; it is empty without classes.
pub fn confusion_table(confusion: &Confusion) -> String {
    let n = confusion.classes.len();
    // The caller guarantees the shape. A wrong shape must not end a finished run, so there is no panic.
    if n == 0 || confusion.counts.len() != n * n {
        return String::new();
    }
    if n <= MAX_COMPLETE
        && let Some(table) = whole_matrix(confusion)
    {
        return table;
    }
    worst_classes(confusion)
}

/// Formats the complete matrix. Returns `None` if it does not fit into [`MAX_LINE_WIDTH`].
fn whole_matrix(confusion: &Confusion) -> Option<String> {
    let n = confusion.classes.len();
    let digits = confusion.counts.iter().max().map_or(1, |most| most.to_string().len());
    let longest = confusion.classes.iter().map(|name| width(&one_line(name))).max().unwrap_or(0);
    let room = MAX_LINE_WIDTH - RECALL_WIDTH;
    // If the columns are too narrow for names, each row shows the number that heads its column.
    let named = longest.clamp(PRECISION.len(), MAX_NAME_WIDTH);
    let numbered = room.saturating_sub(named) / n < MIN_NAMED_WIDTH.max(digits + 1);
    let number = if numbered { n.to_string().len() } else { 0 };
    let (label, column) = if numbered {
        let column = digits.max(number) + 1;
        ((longest + number + 1).min(MAX_NAME_WIDTH).min(room.checked_sub(n * column)?), column)
    } else {
        (named, ((room - named) / n).min(longest.clamp(4, MAX_NAME_WIDTH).max(digits) + 1))
    };
    if label < number + 4 {
        return None;
    }
    let label_of = |class: usize| {
        let name = &one_line(&confusion.classes[class]);
        if numbered {
            format!("{class:>number$} {}", truncated(name, label - number - 1))
        } else {
            truncated(name, label)
        }
    };
    let mut table = format!("rows: true class, columns: predicted class\n{}", align_left("", label));
    for (class, name) in confusion.classes.iter().enumerate() {
        let head = if numbered { class.to_string() } else { truncated(&one_line(name), column - 1) };
        table += &align_right(&head, column);
    }
    table += "   recall\n";
    for actual in 0..n {
        table += &align_left(&label_of(actual), label);
        for predicted in 0..n {
            let count = confusion.count(actual, predicted);
            // A dot instead of a zero makes the diagonal and the mistakes easy to see.
            table += &align_right(&if count == 0 { "·".to_owned() } else { count.to_string() }, column);
        }
        table += &match confusion.recall(actual) {
            Some(recall) => format!("   {recall:5.1}%\n"),
            None => "        –\n".to_owned(),
        };
    }
    let digits = match column {
        7.. => 1,
        5.. => 0,
        _ => return Some(table),
    };
    if label >= PRECISION.len() {
        table += &align_left(PRECISION, label);
        for predicted in 0..n {
            let precision = confusion.precision(predicted);
            table +=
                &align_right(&precision.map_or("–".to_owned(), |precision| format!("{precision:.digits$}%")), column);
        }
        table += "\n";
    }
    Some(table)
}

/// Lists the worst classes and the most confused pairs.
fn worst_classes(confusion: &Confusion) -> String {
    let n = confusion.classes.len();
    let name = |class: usize| truncated(&one_line(&confusion.classes[class]), 28);
    let mut classes: Vec<_> = (0..n).filter_map(|class| Some((confusion.recall(class)?, class))).collect();
    classes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut pairs: Vec<_> = (0..n)
        .flat_map(|actual| (0..n).map(move |predicted| (actual, predicted)))
        .filter(|&(actual, predicted)| actual != predicted)
        .map(|(actual, predicted)| (confusion.count(actual, predicted), actual, predicted))
        .filter(|pair| pair.0 > 0)
        .collect();
    pairs.sort_by(|a, b| b.0.cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    classes.truncate(WORST_SHOWN);
    pairs.truncate(WORST_SHOWN);
    let label = classes.iter().map(|&(_, class)| width(&name(class))).max().unwrap_or(0);
    let mut table = format!("lowest recall of {n} classes\n");
    for (recall, class) in classes {
        let (right, all) = (text::thousands(confusion.count(class, class)), text::thousands(confusion.total(class)));
        table += &format!("  {}  {recall:5.1}%  {right} of {all}\n", align_left(&name(class), label));
    }
    if !pairs.is_empty() {
        table += "most often confused\n";
    }
    for (count, actual, predicted) in pairs {
        table += &format!("  {:>6}  {} taken for {}\n", text::thousands(count), name(actual), name(predicted));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the matrix of a classifier with `each` samples per class. Mistakes go to the next class and the one after.
    fn matrix(classes: Vec<String>, each: u64) -> Confusion {
        let n = classes.len();
        let mut counts = vec![0; n * n];
        for class in 0..n {
            let missed = each * (class as u64 * 7 % 10) / 20;
            counts[class * n + class] += each - missed;
            counts[class * n + (class + 1) % n] += missed - missed / 3;
            counts[class * n + (class + 2) % n] += missed / 3;
        }
        Confusion { classes, counts }
    }

    fn fashion() -> Vec<String> {
        let names = "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Ankle_boot";
        names.split(' ').map(|name| name.replace('_', " ")).collect()
    }

    fn fits(table: &str) {
        assert!(table.lines().all(|line| width(line) <= MAX_LINE_WIDTH), "{table}");
    }

    #[test]
    fn ten_classes_are_shown_whole() {
        let mut confusion = matrix(fashion(), 1000);
        confusion.counts[80..90].fill(0); // No bag in the test set
        let table = confusion_table(&confusion);
        fits(&table);
        insta::assert_snapshot!(table, @r"
            rows: true class, columns: predicted class
                        T-shir… Trouser Pullov…   Dress    Coat  Sandal   Shirt Sneaker     Bag Ankle …   recall
            T-shirt/top    1000       ·       ·       ·       ·       ·       ·       ·       ·       ·   100.0%
            Trouser           ·     650     234     116       ·       ·       ·       ·       ·       ·    65.0%
            Pullover          ·       ·     800     134      66       ·       ·       ·       ·       ·    80.0%
            Dress             ·       ·       ·     950      34      16       ·       ·       ·       ·    95.0%
            Coat              ·       ·       ·       ·     600     267     133       ·       ·       ·    60.0%
            Sandal            ·       ·       ·       ·       ·     750     167      83       ·       ·    75.0%
            Shirt             ·       ·       ·       ·       ·       ·     900      67      33       ·    90.0%
            Sneaker           ·       ·       ·       ·       ·       ·       ·     550     300     150    55.0%
            Bag               ·       ·       ·       ·       ·       ·       ·       ·       ·       ·        –
            Ankle boot      100      50       ·       ·       ·       ·       ·       ·       ·     850    85.0%
            precision     90.9%   92.9%   77.4%   79.2%   85.7%   72.6%   75.0%   78.6%    0.0%   85.0%
            ");
    }

    #[test]
    fn two_classes_stay_narrow_and_twenty_are_numbered() {
        let table = confusion_table(&matrix(vec!["cat".into(), "dog".into()], 12));
        insta::assert_snapshot!(table, @r"
            rows: true class, columns: predicted class
                       cat  dog   recall
            cat         12    ·   100.0%
            dog          3    9    75.0%
            precision  80% 100%
            ");
        let table = confusion_table(&matrix(vec!["a\nrun folder: b".into(), "t\tab".into()], 12));
        assert_eq!(table.lines().count(), 5, "a line end in a name is escaped: {table}");
        assert!(table.contains(r"a\nrun") && table.contains(r"t\tab"), "{table}");
        let table = confusion_table(&matrix((0..20).map(|i| format!("superclass {i}")).collect(), 500));
        fits(&table);
        insta::assert_snapshot!(table.lines().take(4).collect::<Vec<_>>().join("\n"), @r"
            rows: true class, columns: predicted class
                          0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19   recall
             0 supercl… 500   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   100.0%
             1 supercl…   · 325 117  58   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·    65.0%
            ");
    }

    #[test]
    fn of_many_classes_the_worst_are_shown() {
        let table = confusion_table(&matrix((0..100).map(|i| format!("kind {i}")).collect(), 100));
        fits(&table);
        insta::assert_snapshot!(table, @r"
            lowest recall of 100 classes
              kind 7    55.0%  55 of 100
              kind 17   55.0%  55 of 100
              kind 27   55.0%  55 of 100
              kind 37   55.0%  55 of 100
              kind 47   55.0%  55 of 100
            most often confused
                  30  kind 7 taken for kind 8
                  30  kind 17 taken for kind 18
                  30  kind 27 taken for kind 28
                  30  kind 37 taken for kind 38
                  30  kind 47 taken for kind 48
            ");
        // Counts that are too wide for twenty columns.
        let wide = confusion_table(&matrix((0..20).map(|i| format!("kind {i}")).collect(), 1_000_000));
        assert!(wide.starts_with("lowest recall of 20 classes\n"), "{wide}");
    }

    /// `precision_score` and `recall_score` of scikit-learn, `average=None`, times 100.
    #[test]
    fn the_json_has_precision_and_recall() {
        let classes = ["a", "b", "c", "d"].map(String::from).to_vec();
        let confusion = Confusion { classes, counts: vec![3, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 4] };
        let json = serde_json::to_value(&confusion).unwrap();
        assert_eq!(json["precision"], serde_json::json!([60.0, 50.0, null, 100.0]));
        assert_eq!(json["recall"], serde_json::json!([75.0, 50.0, null, 80.0]));
        assert_eq!((&json["classes"][1], &json["counts"][15]), (&"b".into(), &4.into()));
    }

    #[test]
    fn matrices_of_any_shape_are_formatted_without_a_panic() {
        assert_eq!(confusion_table(&Confusion { classes: vec![], counts: vec![] }), "");
        assert_eq!(confusion_table(&Confusion { classes: vec!["a".into()], counts: vec![] }), "");
        let table = confusion_table(&Confusion { classes: vec!["a".into()], counts: vec![3] });
        assert!(table.contains("100.0%"), "{table}");
        for n in 1..25 {
            let long = "a class with a very long name ".repeat(3);
            for each in [0, 9, 99_999, u64::MAX / 100] {
                fits(&confusion_table(&matrix(vec![long.clone(); n], each)));
            }
        }
    }
}
