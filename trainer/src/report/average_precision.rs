//! The average precision of each class of a multi-label evaluation: all classes if they fit on a screen, otherwise the worst.

use serde::Serialize;

use crate::text::{self, align_left, align_right, one_line, truncated, width};

/// Maximum number of classes for the complete table.
const MAX_COMPLETE: usize = 20;
/// Number of classes to show if there are more than [`MAX_COMPLETE`].
const WORST_SHOWN: usize = 5;
/// Maximum width of a class name.
const MAX_NAME_WIDTH: usize = 30;

/// Average precision of each class.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AveragePrecision {
    /// Names of the classes.
    pub classes: Vec<String>,
    /// Number of images that have each class.
    pub images: Vec<u64>,
    /// Average precision of each class in percent (`sklearn.metrics.average_precision_score`); `None` for a class without images.
    pub average_precision: Vec<Option<f64>>,
}

impl AveragePrecision {
    /// Formats all classes in their order, or only the five worst if there are more than 20. The text ends with a newline.
    pub fn table(&self) -> String {
        let mut order: Vec<usize> = (0..self.classes.len()).collect();
        let mut title = "average precision";
        if order.len() > MAX_COMPLETE {
            title = "the classes of the lowest average precision";
            order.retain(|&class| self.average_precision[class].is_some());
            let value = |class: usize| self.average_precision[class].unwrap_or(f64::INFINITY);
            order.sort_by(|&a, &b| value(a).total_cmp(&value(b)));
            order.truncate(WORST_SHOWN);
        }
        let names =
            order.iter().map(|&class| width(&one_line(&self.classes[class])).min(MAX_NAME_WIDTH)).max().unwrap_or(0);
        let line = |&class: &usize| {
            let name = align_left(&truncated(&one_line(&self.classes[class]), MAX_NAME_WIDTH), names);
            let value = self.average_precision[class].map_or("–".to_owned(), text::percent);
            format!("{name}  {}  {} images\n", align_right(&value, 7), text::thousands(self.images[class]))
        };
        format!("{title}\n{}", order.iter().map(line).collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(count: usize) -> AveragePrecision {
        AveragePrecision {
            classes: (0..count).map(|class| format!("class {class}")).collect(),
            images: (0..count as u64).map(|class| class * 500).collect(),
            average_precision: (0..count).map(|class| (class > 0).then_some(100.0 / class as f64)).collect(),
        }
    }

    #[test]
    fn few_classes_are_all_shown_and_of_many_the_worst() {
        insta::assert_snapshot!(of(3).table(), @r"
            average precision
            class 0        –  0 images
            class 1  100.00%  500 images
            class 2   50.00%  1,000 images
            ");
        insta::assert_snapshot!(of(21).table(), @r"
            the classes of the lowest average precision
            class 20    5.00%  10,000 images
            class 19    5.26%  9,500 images
            class 18    5.56%  9,000 images
            class 17    5.88%  8,500 images
            class 16    6.25%  8,000 images
            ");
    }
}
