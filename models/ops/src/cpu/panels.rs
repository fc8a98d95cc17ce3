//! Packing panels: the channels of a result, divided into panels that are as wide as a register tile.
//!
//! A register tile costs the same for 6 channels as for its full width. Full tiles therefore come first, and narrower
//! tiles cover the rest: 40 channels are a tile of 32 and a tile of 8.

use super::kernel::{MicroKernels, Operand};

/// Adjacent columns that one register tile computes.
#[derive(Debug)]
pub(crate) struct Panel<E: 'static = f32> {
    /// The micro-kernels whose register tiles have this panel's width.
    pub(crate) isa: &'static MicroKernels<E>,
    /// The first column.
    pub(crate) column: usize,
    /// Number of columns to store; the tile may be wider.
    pub(crate) cols: usize,
}

/// Divides `columns` into panels. Only the last tile can have padding. So the packed data of a panel starts at `column` times the
/// packed elements per column.
pub(crate) fn panels<E: Operand>(isa: &'static MicroKernels<E>, columns: usize) -> Vec<Panel<E>> {
    let narrowest = isa.narrower.last().map_or(isa.cols, |last| last.cols);
    let mut panels = Vec::new();
    let mut column = 0;
    while column < columns {
        let left = columns - column;
        let room = left.next_multiple_of(narrowest);
        let isa = [&[isa], isa.narrower].concat().into_iter().find(|isa| isa.cols <= room).unwrap_or(isa);
        panels.push(Panel { isa, column, cols: isa.cols.min(left) });
        column += isa.cols;
    }
    panels
}

/// Returns the number of columns of all panels' tiles, including padding.
pub(crate) fn padded<E>(panels: &[Panel<E>]) -> usize {
    panels.last().map_or(0, |panel| panel.column + panel.isa.cols)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panels_cover_columns<E: Operand>() {
        for isa in MicroKernels::<E>::supported() {
            let narrowest = isa.narrower.last().map_or(isa.cols, |last| last.cols);
            for columns in 1..200 {
                let panels = panels(isa, columns);
                let mut next = 0;
                for panel in &panels {
                    assert_eq!(panel.column, next);
                    next += panel.cols;
                    assert!(panel.cols == panel.isa.cols || next == columns);
                    assert_eq!(panel.isa.rows, isa.rows, "pointer tables serve all panels");
                    assert_eq!(panel.isa.outer_rows, isa.outer_rows, "packed rows serve all panels");
                }
                assert_eq!(next, columns);
                assert!(padded(&panels) < columns + narrowest);
            }
        }
    }

    /// Padded biases and sums have the same places in both sets.
    #[test]
    fn sets_that_multiply_in_f32_have_the_panels_of_f32() {
        fn places<E: Operand>(isa: &'static MicroKernels<E>, columns: usize) -> Vec<[usize; 3]> {
            panels(isa, columns).iter().map(|panel| [panel.column, panel.cols, panel.isa.cols]).collect()
        }
        for isa in MicroKernels::<half::bf16>::supported() {
            let Some(widened) = isa.widened() else { continue };
            for columns in 1..200 {
                assert_eq!(places(isa, columns), places(widened, columns), "{}", isa.name);
            }
        }
    }

    #[test]
    fn panels_cover_all_columns_with_little_waste() {
        panels_cover_columns::<f32>();
        panels_cover_columns::<half::bf16>();
    }
}
