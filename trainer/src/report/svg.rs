//! Colours, types and the drawing function that all SVG charts share.

use plotters::{coord::Shift, prelude::*};

// The Okabe-Ito colours, which people with any colour vision can tell apart.
pub(super) const BLUE: RGBColor = RGBColor(0, 114, 178);
pub(super) const LIGHT_BLUE: RGBColor = RGBColor(86, 180, 233);
pub(super) const RED: RGBColor = RGBColor(213, 94, 0);
pub(super) const GREEN: RGBColor = RGBColor(0, 158, 115);
pub(super) const YELLOW: RGBColor = RGBColor(240, 228, 66);
pub(super) const TEXT: RGBColor = RGBColor(60, 60, 60);
pub(super) const AXIS: RGBColor = RGBColor(150, 150, 150);

/// A picture, or a part of it.
pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// An error of the drawing library.
pub(super) type DrawError = DrawingAreaErrorKind<<SVGBackend<'static> as DrawingBackend>::ErrorType>;
pub(super) type DrawResult = Result<(), DrawError>;

/// Draws a picture of `size`, width and height in pixels, as SVG.
pub(super) fn svg(size: (u32, u32), draw: impl FnOnce(&Area<'_>) -> DrawResult) -> Result<String, DrawError> {
    let mut svg = String::new();
    let drawn = draw(&SVGBackend::with_string(&mut svg, size).into_drawing_area());
    drawn.map(|()| svg)
}

/// Returns the style of sans-serif text whose capital letters are about `pixels` high.
pub(super) fn sans(pixels: u32) -> TextStyle<'static> {
    ("sans-serif", f64::from(pixels) * 1.24).into_font().color(&TEXT)
}
