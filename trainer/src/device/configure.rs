//! The configuration of burn and cubecl.
//!
//! Both libraries read their configuration at first use, from `burn.toml` and `cubecl.toml` in the working folder and in all
//! its parent folders, and write logs and caches to the paths in these files. A parent folder may be `/tmp`, to which every
//! user can write. So this program sets the configuration before the first use, and the libraries read no file. The variables
//! `BURN_*` and `CUBECL_*` still have effect.

use std::sync::Once;

use burn_std::config::{BurnConfig, RuntimeConfig};

/// Configures burn, and cubecl in builds for GPUs. Call this function before the first use of burn. Further calls do nothing.
pub fn configure() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // A configuration that other code has set earlier takes precedence.
        BurnConfig::try_set(BurnConfig::default().override_from_env());
        #[cfg(feature = "cuda")]
        configure_cubecl();
    });
}

/// Makes cubecl keep compiled kernels and tuning results in memory, from which `kernel_cache.rs` writes them to a file.
///
/// burn compiles each kernel at its first use, and tries several kernels for a convolution or a matrix product. For a deep
/// network this would take minutes in every process of every run. By default, cubecl keeps only the tuning results, in a
/// database in the folder `target` of the project in which the program is started.
#[cfg(feature = "cuda")]
fn configure_cubecl() {
    use cubecl::config::{CubeClRuntimeConfig, cache::CacheConfig};
    let mut config = CubeClRuntimeConfig::default().override_from_env();
    config.compilation.cache = true;
    config.environment.path = CacheConfig::Directory(super::kernel_cache::MEMORY_ONLY_PATH.into());
    CubeClRuntimeConfig::try_set(config);
}
