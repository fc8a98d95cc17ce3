//! Selects the convolution kernels of a GPU.

use std::fmt;
#[cfg(feature = "cuda")]
use std::sync::LazyLock;

/// Environment variable that selects the kernels, for comparisons.
const VARIABLE: &str = "TRAINER_GPU_CONV";

/// The kernels of convolutions and linear layers on an NVIDIA GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuConv {
    /// This crate's kernels, where the GPU has compute capability 8.0 or higher. They apply the batch norms between convolutions.
    Custom,
    /// This crate's kernels, with separate passes for each batch norm.
    Separate,
    /// burn's kernels, which burn selects by autotuning. Depthwise convolutions and narrow groups still use this crate's kernels
    /// without tensor cores.
    Burn,
}

impl GpuConv {
    /// Returns the choice of the environment variable `TRAINER_GPU_CONV`: `custom` (the default), `separate` or `burn`.
    ///
    /// # Errors
    ///
    /// When the variable has another value.
    pub fn selected() -> Result<Self, GpuConvError> {
        Self::choose(std::env::var_os(VARIABLE).map(|name| name.to_string_lossy().into_owned()))
    }

    fn choose(name: Option<String>) -> Result<Self, GpuConvError> {
        match name.as_deref().unwrap_or_default() {
            "" | "custom" => Ok(Self::Custom),
            "separate" => Ok(Self::Separate),
            "burn" => Ok(Self::Burn),
            other => Err(GpuConvError(other.to_owned())),
        }
    }

    /// Returns the choice, read once.
    ///
    /// # Panics
    ///
    /// When the environment variable is invalid. The program checks the variable at its start.
    #[cfg(feature = "cuda")]
    pub(crate) fn chosen() -> Self {
        static CHOICE: LazyLock<GpuConv> = LazyLock::new(|| match GpuConv::selected() {
            Ok(choice) => choice,
            Err(error) => panic!("{error}\nhint: {}", error.hint()),
        });
        *CHOICE
    }
}

/// Error of an invalid `TRAINER_GPU_CONV`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuConvError(String);

impl GpuConvError {
    /// Returns a hint for the user.
    pub fn hint(&self) -> String {
        format!("unset {VARIABLE}, or use `custom`, `separate` or `burn`")
    }
}

impl fmt::Display for GpuConvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{VARIABLE}={:?} is not a set of convolution kernels", self.0)
    }
}

impl std::error::Error for GpuConvError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_variable_selects_the_kernels() {
        let choose = |name: &str| GpuConv::choose(Some(name.to_owned()));
        assert_eq!(GpuConv::choose(None), Ok(GpuConv::Custom));
        assert_eq!(choose(""), Ok(GpuConv::Custom));
        assert_eq!(choose("custom"), Ok(GpuConv::Custom));
        assert_eq!(choose("separate"), Ok(GpuConv::Separate));
        assert_eq!(choose("burn"), Ok(GpuConv::Burn));
        let error = choose("cudnn").unwrap_err();
        assert_eq!(error.to_string(), "TRAINER_GPU_CONV=\"cudnn\" is not a set of convolution kernels");
        assert_eq!(error.hint(), "unset TRAINER_GPU_CONV, or use `custom`, `separate` or `burn`");
    }
}
