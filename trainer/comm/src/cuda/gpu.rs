//! A GPU's primary context, with errors that name the GPU.

use std::sync::Arc;

use super::driver::{Context, Driver, DriverError, NoDriver};
use crate::error::{CommError, Result};

/// Turns an error of the driver into an error of the collectives.
pub(super) fn failed(index: usize, error: &DriverError) -> CommError {
    CommError::system(format!("GPU {index}: {error}"))
}

/// Retains the primary context of GPU `index`.
///
/// # Errors
/// No driver, or the driver's error.
pub(super) fn open(index: usize) -> Result<Arc<Context>> {
    let driver = Driver::load().map_err(|error| match error {
        NoDriver::NotLoaded(cause) => CommError::setup(format!("no NVIDIA driver: {cause}")),
        NoDriver::Refused { error, .. } => failed(index, &error),
    })?;
    driver.context(index).map_err(|error| failed(index, &error))
}

impl Context {
    /// Turns an error of this GPU into an error of the collectives.
    pub(super) fn failed(&self, error: &DriverError) -> CommError {
        failed(self.index, error)
    }
}
