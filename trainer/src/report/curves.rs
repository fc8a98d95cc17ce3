//! `curves.svg`: loss and accuracy over epochs, side by side.

use std::{ops::Range, path::Path};

use plotters::{coord::types::RangedCoordf64, prelude::*};

use super::svg::{AXIS, Area, BLUE, DrawResult, GREEN, RED, sans, svg};
use crate::files::{self, FileError};
use crate::report::summary_csv::SummaryRow;

/// Size of the chart in pixels.
const SIZE: (u32, u32) = (900, 400);
/// Maximum number of points in the per-step line.
const STEP_POINTS: usize = 200;

const TRAIN: RGBColor = BLUE;
const EVAL: RGBColor = RED;
const TOP5: RGBColor = GREEN;
const GRID: RGBColor = RGBColor(232, 232, 232);

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// The data of the curves.
#[derive(Debug, Clone, Copy)]
pub struct Curves<'a> {
    /// Title: the run's name.
    pub title: &'a str,
    /// The epochs so far.
    pub epochs: &'a [SummaryRow],
    /// Loss of each step, in the order of the run. `x` is in epochs (step / steps per epoch).
    pub steps: &'a [(f64, f64)],
    /// Whether to draw top-5 accuracy. With ten classes or fewer, top-5 has little meaning and flattens the other lines.
    pub top5: bool,
}

/// A line of a chart: points by epoch, a colour, a name in the legend.
struct Line {
    points: Vec<(f64, f64)>,
    style: ShapeStyle,
    label: &'static str,
    /// Whether to mark the points if there are few.
    marks: bool,
}

impl Curves<'_> {
    /// Draws the curves and writes the file in one atomic write.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), FileError> {
        let svg = self.svg().map_err(|error| {
            FileError::new(path, format!("cannot draw: {error}"), "this is a bug; please report it with summary.csv")
        })?;
        files::write_atomic(path, svg.as_bytes())
    }

    /// Draws the curves as SVG. A value that is not finite is a gap in its line. Without any epoch, the chart says so.
    ///
    /// # Errors
    /// When the drawing library fails.
    pub fn svg(&self) -> Result<String, impl std::error::Error + use<>> {
        svg(SIZE, |root| self.draw(root))
    }

    fn draw(&self, root: &Area<'_>) -> DrawResult {
        root.fill(&WHITE)?;
        root.draw(&Text::new(self.title.to_owned(), (16, 10), sans(15)))?;
        let (left, right) = root.margin(30, 0, 0, 0).split_horizontally(SIZE.0 / 2);
        let column = |value: fn(&SummaryRow) -> Option<f64>| -> Vec<(f64, f64)> {
            self.epochs.iter().filter_map(|row| Some((row.epoch as f64, value(row)?))).collect()
        };
        let line = |points, colour: RGBColor, label| Line { points, style: colour.stroke_width(2), label, marks: true };
        let steps = Line {
            points: smoothed(self.steps),
            style: TRAIN.mix(0.3).stroke_width(1),
            label: "train, by step",
            marks: false,
        };
        let losses = [
            steps,
            line(column(|row| Some(row.train_loss)), TRAIN, "train"),
            line(column(|row| row.eval_loss), EVAL, "eval"),
        ];
        let mut accuracies = match self.is_multi_label() {
            false => vec![
                line(column(|row| Some(row.train_top1)), TRAIN, "train top-1"),
                line(column(|row| row.eval_top1), EVAL, "eval top-1"),
            ],
            true => vec![
                line(column(|row| Some(row.train_top1)), TRAIN, "train exact match"),
                line(column(|row| row.eval_map), EVAL, "eval mAP"),
            ],
        };
        if self.top5 {
            accuracies.push(line(column(|row| row.eval_top5), TOP5, "eval top-5"));
        }
        let end = [self.epochs.last().map(|row| row.epoch as f64), self.steps.last().map(|step| step.0.ceil())];
        let end = end.into_iter().flatten().fold(1.0, f64::max);
        panel(&left, &self.loss_title(), 0.0..end, &losses, f64::INFINITY, SeriesLabelPosition::UpperRight)?;
        panel(&right, &self.accuracy_title(), 0.0..end, &accuracies, 100.0, SeriesLabelPosition::LowerRight)?;
        root.present()
    }

    fn loss_title(&self) -> String {
        match self.epochs.iter().find(|row| !row.train_loss.is_finite()) {
            Some(row) => format!("loss (not finite from epoch {})", row.epoch),
            None => "loss".to_owned(),
        }
    }

    /// Returns whether images have several classes each. Then their evaluations have a mean average precision.
    fn is_multi_label(&self) -> bool {
        self.epochs.iter().any(|row| row.eval_map.is_some())
    }

    fn accuracy_title(&self) -> String {
        let name = if self.is_multi_label() { "mAP" } else { "top-1" };
        let evaluated = self.epochs.iter().filter_map(|row| Some((row.epoch, row.eval_map.or(row.eval_top1)?)));
        // Of equal values take the first, as the kept checkpoint does.
        let best = evaluated.fold(None, |best: Option<(usize, f64)>, row| match best {
            Some(best) if best.1 >= row.1 => Some(best),
            _ => Some(row),
        });
        match best {
            Some((epoch, top1)) => format!("accuracy, % (best eval {name} {top1:.2} in epoch {epoch})"),
            None => "accuracy, %".to_owned(),
        }
    }
}

/// Draws one chart with its title, axes, lines and legend. `ceiling` is the upper limit of the value axis.
fn panel(
    area: &Area<'_>,
    title: &str,
    epochs: Range<f64>,
    lines: &[Line],
    ceiling: f64,
    legend: SeriesLabelPosition,
) -> DrawResult {
    let (width, height) = area.dim_in_pixel();
    area.draw(&Text::new(title.to_owned(), (56, 4), sans(14)))?;
    let Some(values) = value_range(lines, ceiling) else {
        let text = "nothing to show yet: no epoch is complete";
        return area.draw(&Text::new(text, (width as i32 / 2 - 120, height as i32 / 2 - 10), sans(14)));
    };
    let mut chart = ChartBuilder::on(area)
        .margin_top(26)
        .margin_right(20)
        .margin_bottom(6)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(epochs.clone(), values.clone())?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .bold_line_style(GRID)
        .axis_style(AXIS)
        .label_style(sans(12))
        .axis_desc_style(sans(13))
        .x_desc("epoch")
        .x_labels(labels(epochs.end))
        .y_labels(8)
        .x_label_formatter(&|x| short(*x))
        .y_label_formatter(&|y| short(*y))
        .draw()?;
    for line in lines.iter().filter(|line| line.points.iter().any(|point| point.1.is_finite())) {
        draw_line(&mut chart, line, values.end)?;
    }
    chart
        .configure_series_labels()
        .position(legend)
        .label_font(sans(12))
        .background_style(WHITE.mix(0.85))
        .border_style(GRID)
        .legend_area_size(26)
        .margin(8)
        .draw()
}

/// Draws a line in pieces between the values that are not finite. Values above the axis are drawn along its top.
fn draw_line(chart: &mut Chart<'_, '_>, line: &Line, top: f64) -> DrawResult {
    let style = line.style;
    let mut first = true;
    for piece in line.points.split(|point| !point.1.is_finite()).filter(|piece| !piece.is_empty()) {
        let points: Vec<_> = piece.iter().map(|&(x, y)| (x, y.min(top))).collect();
        if line.marks && (points.len() == 1 || line.points.len() <= 30) {
            chart.draw_series(points.iter().map(|&point| Circle::new(point, 3, style.filled())))?;
        }
        let drawn = chart.draw_series(LineSeries::new(points, style))?;
        if std::mem::take(&mut first) {
            drawn.label(line.label).legend(move |(x, y)| PathElement::new([(x + 2, y), (x + 22, y)], style));
        }
    }
    Ok(())
}

/// Returns the range of the finite values with a margin. The range starts at zero if zero is near. `None` without values.
fn value_range(lines: &[Line], ceiling: f64) -> Option<Range<f64>> {
    let finite =
        |line: &Line| -> Vec<f64> { line.points.iter().map(|point| point.1).filter(|y| y.is_finite()).collect() };
    let mut values: Vec<f64> = lines.iter().filter(|line| line.marks).flat_map(finite).collect();
    // Single steps may have outliers. Nearly all steps must fit, but the outliers must not compress the rest of the
    // chart.
    let mut steps: Vec<f64> = lines.iter().filter(|line| !line.marks).flat_map(finite).collect();
    steps.sort_by(f64::total_cmp);
    values.extend(steps.first());
    values.extend(steps.get(steps.len().saturating_sub(1) * 98 / 100));
    let least = values.iter().copied().reduce(f64::min)?;
    let greatest = values.iter().copied().reduce(f64::max)?;
    let air = (0.06 * (greatest - least)).max(0.01 * greatest.abs()).max(1e-6);
    let low = if least >= 0.0 && least < 0.4 * greatest { 0.0 } else { least - air };
    Some(low..(greatest + air).min(ceiling.max(low + air)))
}

/// Returns means of neighbouring steps, at most [`STEP_POINTS`] of them. A mean that includes a non-finite value is not
/// finite.
fn smoothed(steps: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let each = steps.len().div_ceil(STEP_POINTS).max(1);
    let mean = |part: &[(f64, f64)]| {
        let sum = part.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        (sum.0 / part.len() as f64, sum.1 / part.len() as f64)
    };
    steps.chunks(each).map(mean).collect()
}

/// Returns the number of labels on an epoch axis: whole numbers if they fit.
fn labels(epochs: f64) -> usize {
    (epochs as usize + 1).clamp(2, 11)
}

/// Formats a tick's number without unnecessary digits.
fn short(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(epoch: usize) -> SummaryRow {
        let falling = 1.6 / (epoch as f64).sqrt();
        SummaryRow {
            epoch,
            train_loss: falling,
            train_top1: 100.0 - 30.0 * falling,
            eval_loss: Some(falling + 0.1),
            eval_top1: Some(97.0 - 30.0 * falling),
            eval_top5: Some(99.0),
            lr: 0.1,
            images_per_s: 1.0,
            seconds: 1.0,
            eval_map: None,
        }
    }

    fn steps(epochs: usize) -> Vec<(f64, f64)> {
        let x = |i: usize| i as f64 / 50.0;
        (0..epochs * 50).map(|i| (x(i), 1.7 / (0.6 + x(i)).sqrt() + 0.2 * (i as f64 * 1.7).sin())).collect()
    }

    fn svg(epochs: &[SummaryRow], steps: &[(f64, f64)]) -> String {
        let svg = Curves { title: "a-run", epochs, steps, top5: true }.svg().unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        // A coordinate far away, or a coordinate that is not a number, would appear here.
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        let body = &svg[svg.find('>').unwrap()..].replace('#', "colour");
        for number in body.split(['"', ',', ' ']).filter_map(|n| n.parse::<f64>().ok()) {
            assert!((-1.0..=900.0).contains(&number), "{number} in {svg}");
        }
        svg
    }

    #[test]
    fn a_run_has_lines_axes_and_a_legend() {
        let rows: Vec<_> = (1..=12).map(row).collect();
        let svg = svg(&rows, &steps(12));
        let words = ["a-run", "loss", "best eval top-1 83.14 in epoch 12", "epoch", "train, by step", "eval top-5"];
        for word in words {
            assert!(svg.contains(word), "{word} is missing");
        }
        assert!(svg.matches("<polyline").count() >= 6);
    }

    #[test]
    fn few_epochs_and_values_that_are_not_finite_are_drawn() {
        assert_eq!(svg(&[], &[]).matches("no epoch is complete").count(), 2);
        let one = svg(&[row(1)], &steps(1));
        assert!(one.matches("<circle").count() >= 5, "one epoch is points");
        svg(&[], &steps(1)[..3]);
        svg(&[SummaryRow { train_loss: 0.0, train_top1: 100.0, eval_top1: Some(100.0), ..row(1) }], &[]);
        let nan = SummaryRow { train_loss: f64::NAN, eval_loss: Some(f64::INFINITY), ..row(3) };
        let mut jumps = steps(4);
        jumps[30].1 = f64::NAN;
        jumps[60].1 = 1e30;
        let broken = svg(&[row(1), row(2), nan, row(4)], &jumps);
        assert!(broken.contains("loss (not finite from epoch 3)"));
        let all_nan = SummaryRow { train_loss: f64::NAN, eval_loss: Some(f64::NAN), ..row(1) };
        assert_eq!(svg(&[all_nan], &[]).matches("no epoch is complete").count(), 1);
        let never = SummaryRow { eval_loss: None, eval_top1: None, eval_top5: None, ..row(1) };
        assert!(!svg(&[never], &[]).contains("eval"));
    }

    #[test]
    fn a_title_is_text_and_not_markup() {
        let svg = Curves { title: "a<b & c", epochs: &[], steps: &[], top5: false }.svg().unwrap();
        assert!(svg.contains("a&lt;b &amp; c"), "{svg}");
    }

    #[test]
    fn neighbouring_steps_are_averaged_to_few_points() {
        let points = smoothed(&steps(100));
        assert_eq!(points.len(), STEP_POINTS);
        assert!((points[0].1 - steps(100)[..25].iter().map(|step| step.1).sum::<f64>() / 25.0).abs() < 1e-12);
        assert_eq!(smoothed(&[]), []);
    }
}
