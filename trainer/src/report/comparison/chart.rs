//! `compare.svg`: the parts of each mode's step as a stacked bar, beside its images per second.

use plotters::prelude::*;

use super::{Comparison, ModeResult, ModeStats};
use crate::report::svg::{AXIS, Area, BLUE, DrawResult, GREEN, LIGHT_BLUE, RED, YELLOW, sans, svg};
use crate::text::speed;

/// Size of the chart in pixels.
const SIZE: (u32, u32) = (900, 420);
/// Vertical position of the bars.
const TOP: i32 = 95;
const BOTTOM: i32 = 350;
/// Share of a mode's slot that its bar fills.
const BAR: f64 = 0.56;

const DATA: RGBColor = YELLOW;
const FORWARD: RGBColor = BLUE;
const BACKWARD: RGBColor = LIGHT_BLUE;
const COMMUNICATION: RGBColor = RED;
const OPTIMIZER: RGBColor = GREEN;
const OTHER: RGBColor = RGBColor(170, 170, 170);

/// Draws the chart as SVG. A mode that failed has an empty slot.
///
/// # Errors
/// When the drawing library fails.
pub fn chart(comparison: &Comparison) -> Result<String, impl std::error::Error + use<>> {
    svg(SIZE, |root| draw(comparison, root))
}

fn draw(comparison: &Comparison, root: &Area<'_>) -> DrawResult {
    root.fill(&WHITE)?;
    let Comparison { model, data, batch_size, modes, .. } = comparison;
    let title = format!("{model} on {data}, batch {batch_size}");
    root.draw(&Text::new(title, (16, 10), sans(15)))?;
    let most = |value: fn(&ModeStats) -> f64| {
        modes.iter().filter_map(|mode| mode.figures.as_ref()).map(value).filter(|v| v.is_finite()).fold(0.0, f64::max)
    };
    let middle = SIZE.0 as i32 * 58 / 100;
    root.draw(&Text::new("milliseconds per step", (30, 40), sans(14)))?;
    root.draw(&Text::new("images per second", (middle + 20, 40), sans(14)))?;
    stacks(root, modes, 30..middle - 20, most(|figures| figures.step_ms))?;
    speeds(root, modes, middle + 20..SIZE.0 as i32 - 20, most(|figures| figures.images_per_s))?;
    legend(root)?;
    root.present()
}

/// Returns the left and right edge of the bar of mode `index`.
fn bar(place: &std::ops::Range<i32>, count: usize, index: usize) -> (i32, i32) {
    let each = f64::from(place.len() as i32) / count.max(1) as f64;
    let middle = f64::from(place.start) + each * (index as f64 + 0.5);
    // The limit keeps the bars of few modes narrow.
    let half = (each * BAR / 2.0).min(60.0);
    ((middle - half) as i32, (middle + half) as i32)
}

/// Returns the height in pixels above the axis.
fn height(value: f64, most: f64) -> f64 {
    if most > 0.0 && value.is_finite() { value.max(0.0) / most * f64::from(BOTTOM - TOP) } else { 0.0 }
}

fn stacks(root: &Area<'_>, modes: &[ModeResult], place: std::ops::Range<i32>, most: f64) -> DrawResult {
    for (index, mode) in modes.iter().enumerate() {
        let (left, right) = bar(&place, modes.len(), index);
        below(root, mode, left, right)?;
        let Some(figures) = &mode.figures else { continue };
        let parts = figures.parts_ms;
        let mut y = f64::from(BOTTOM);
        for (value, colour) in [
            (parts.data, DATA),
            (parts.forward, FORWARD),
            (parts.backward, BACKWARD),
            (parts.communication, COMMUNICATION),
            (parts.optimizer, OPTIMIZER),
            (parts.other, OTHER),
        ] {
            let top = y - height(value, most);
            root.draw(&Rectangle::new([(left, top as i32), (right, y as i32)], colour.filled()))?;
            if colour == BACKWARD && parts.communication_hidden > 0.0 {
                // Communication that overlaps with backward is drawn inside the box of backward.
                let hidden = height(parts.communication_hidden.min(value), most);
                let inside = [(right - (right - left) / 4, (y - hidden) as i32), (right, y as i32)];
                root.draw(&Rectangle::new(inside, COMMUNICATION.mix(0.45).filled()))?;
            }
            y = top;
        }
        label(root, format!("{:.1}", figures.step_ms), (left + right) / 2, y as i32 - 18)?;
    }
    axis(root, &place)
}

fn speeds(root: &Area<'_>, modes: &[ModeResult], place: std::ops::Range<i32>, most: f64) -> DrawResult {
    for (index, mode) in modes.iter().enumerate() {
        let (left, right) = bar(&place, modes.len(), index);
        below(root, mode, left, right)?;
        let Some(figures) = &mode.figures else { continue };
        let top = BOTTOM - height(figures.images_per_s, most) as i32;
        root.draw(&Rectangle::new([(left, top), (right, BOTTOM)], FORWARD.mix(0.8).filled()))?;
        label(root, speed(figures.images_per_s), (left + right) / 2, top - 18)?;
    }
    axis(root, &place)
}

/// Draws the mode's name under its bar.
fn below(root: &Area<'_>, mode: &ModeResult, left: i32, right: i32) -> DrawResult {
    let name = format!("{} x{}", mode.mode, mode.workers);
    label(root, name, (left + right) / 2, BOTTOM + 8)?;
    if mode.figures.is_none() {
        label(root, "failed".to_owned(), (left + right) / 2, BOTTOM - 18)?;
    }
    Ok(())
}

fn axis(root: &Area<'_>, place: &std::ops::Range<i32>) -> DrawResult {
    root.draw(&PathElement::new([(place.start, BOTTOM), (place.end, BOTTOM)], AXIS))
}

/// Draws text centred at `x`.
fn label(root: &Area<'_>, text: String, x: i32, y: i32) -> DrawResult {
    use plotters::style::text_anchor::{HPos, Pos, VPos};
    root.draw(&Text::new(text, (x, y), sans(13).pos(Pos::new(HPos::Center, VPos::Top))))
}

fn legend(root: &Area<'_>) -> DrawResult {
    let mut x = 30;
    for (name, colour, wide) in [
        ("data", DATA.mix(1.0), 80),
        ("forward", FORWARD.mix(1.0), 100),
        ("backward", BACKWARD.mix(1.0), 110),
        ("communication", COMMUNICATION.mix(1.0), 135),
        ("communication under backward", COMMUNICATION.mix(0.45), 250),
        ("optimizer", OPTIMIZER.mix(1.0), 105),
        ("other", OTHER.mix(1.0), 70),
    ] {
        root.draw(&Rectangle::new([(x, 388), (x + 14, 402)], colour.filled()))?;
        root.draw(&Text::new(name, (x + 20, 388), sans(13)))?;
        x += wide;
    }
    Ok(())
}
