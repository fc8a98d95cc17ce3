//! Channels of a result cut into panels, each as wide as a register tile.
//!
//! A register tile costs as much for 6 channels as for all that it is wide. So full tiles come first, and what is left
//! goes to narrower ones: 40 channels are a tile of 32 and one of 8.

use super::kernel::Isa;

/// Neighbouring columns that one register tile computes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Panel {
    /// The instruction set with tiles of that width.
    pub(crate) isa: &'static Isa,
    /// The first column.
    pub(crate) column: usize,
    /// Columns that are stored; the tile may have more.
    pub(crate) cols: usize,
}

/// The panels of some columns. Packed data of a panel begins where that of the columns before it, which fill their
/// tiles, ends.
pub(crate) fn panels(isa: &'static Isa, columns: usize) -> Vec<Panel> {
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

/// Columns of all panels' tiles.
pub(crate) fn padded(panels: &[Panel]) -> usize {
    panels.last().map_or(0, |panel| panel.column + panel.isa.cols)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_cover_all_columns_with_little_waste() {
        for isa in Isa::supported() {
            let narrowest = isa.narrower.last().map_or(isa.cols, |last| last.cols);
            for columns in 1..200 {
                let panels = panels(isa, columns);
                let mut next = 0;
                for panel in &panels {
                    assert_eq!(panel.column, next);
                    next += panel.cols;
                    assert!(panel.cols == panel.isa.cols || next == columns);
                    assert_eq!(panel.isa.rows, isa.rows, "pointer tables serve all panels");
                    assert!(panel.isa.outer_rows <= isa.outer_rows);
                }
                assert_eq!(next, columns);
                assert!(padded(&panels) < columns + narrowest);
            }
        }
    }
}
