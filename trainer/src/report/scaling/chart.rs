//! `scaling.svg`: efficiency over the number of workers, measured and computed.

use plotters::prelude::*;

use super::{Algorithm, Scaling, ScalingReport};
use crate::report::svg::{AXIS, Area, BLUE, DrawResult, GREEN, RED, svg};

/// Size of the picture in pixels.
const SIZE: (u32, u32) = (900, 420);

const MEASURED: RGBColor = BLACK;
/// The colour of each of [`Algorithm::ALL`].
const COMPUTED: [RGBColor; 3] = [RED, BLUE, GREEN];

/// Draws the picture as SVG: weak scaling on the left, strong scaling on the right.
///
/// # Errors
/// When the drawing library fails.
pub fn chart(report: &ScalingReport) -> Result<String, impl std::error::Error + use<>> {
    svg(SIZE, |root| draw(report, root))
}

fn draw(report: &ScalingReport, root: &Area<'_>) -> DrawResult {
    root.fill(&WHITE)?;
    let (title, panels) = root.split_vertically(30);
    let ScalingReport { model, data, batch_size, .. } = report;
    title.draw(&Text::new(
        format!("{model} on {data}, batch {batch_size}: efficiency"),
        (16, 10),
        ("sans-serif", 17),
    ))?;
    let panels = panels.split_evenly((1, 2));
    panel(report, Scaling::Weak, &panels[0])?;
    panel(report, Scaling::Strong, &panels[1])?;
    root.present()
}

/// Draws one kind of scaling. Workers are on a logarithmic axis.
fn panel(report: &ScalingReport, scaling: Scaling, area: &Area<'_>) -> DrawResult {
    let measured: Vec<_> = report.measured.iter().filter(|row| row.scaling == scaling).collect();
    let computed: Vec<_> = report.computed.iter().filter(|row| row.scaling == scaling).collect();
    let workers = measured.iter().map(|row| row.workers).chain(computed.iter().map(|row| row.workers));
    let most = (workers.max().unwrap_or(1).max(2) as f64).log2();
    let highest = measured.iter().map(|row| row.efficiency).chain(computed.iter().map(|row| row.efficiency));
    let highest = 100.0 * highest.filter(|value| value.is_finite()).fold(1.05, f64::max);
    let mut chart = ChartBuilder::on(area)
        .margin(8)
        .caption(format!("{} scaling", scaling.name()), ("sans-serif", 16))
        .x_label_area_size(36)
        .y_label_area_size(46)
        .build_cartesian_2d(0.0..most, 0.0..highest)?;
    chart
        .configure_mesh()
        .x_desc("workers")
        .y_desc("efficiency in %")
        .x_labels(most as usize + 1)
        .x_label_formatter(&|x: &f64| format!("{:.0}", x.exp2()))
        .draw()?;
    for (algorithm, colour) in Algorithm::ALL.into_iter().zip(COMPUTED) {
        let points = computed.iter().filter(|row| row.algorithm == algorithm);
        let points = points.map(|row| ((row.workers as f64).log2(), 100.0 * row.efficiency));
        chart
            .draw_series(DashedLineSeries::new(points, 6, 4, colour.stroke_width(2)))?
            .label(format!("computed: {}", algorithm.name()))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    let points = measured.iter().map(|row| ((row.workers as f64).log2(), 100.0 * row.efficiency));
    chart
        .draw_series(points.map(|point| Circle::new(point, 5, MEASURED.filled())))?
        .label("measured")
        .legend(|(x, y)| Circle::new((x + 9, y), 5, MEASURED.filled()));
    if scaling == Scaling::Strong {
        // Only the panel of weak scaling has the legend
        return Ok(());
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(AXIS)
        .draw()
}
