//! Functions that only NVIDIA's own libraries call.

use super::exports;
use crate::cu_result::INVALID_VALUE;

exports! {
    /// Undocumented function tables. NVRTC asks for some and continues without them.
    fn cuGetExportTable(table: Option<&mut usize>, id: usize) {
        let _ = id;
        if let Some(table) = table {
            *table = 0;
        }
        Err(INVALID_VALUE)
    }
}
