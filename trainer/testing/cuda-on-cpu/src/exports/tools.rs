//! What NVIDIA's own libraries ask the driver.

use super::exports;
use crate::code::INVALID_VALUE;

exports! {
    /// Tables of functions that are not documented; NVRTC asks for some, and goes on without them.
    fn cuGetExportTable(table: Option<&mut usize>, id: usize) {
        let _ = id;
        if let Some(table) = table {
            *table = 0;
        }
        Err(INVALID_VALUE)
    }
}
