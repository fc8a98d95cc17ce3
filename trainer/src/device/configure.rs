//! The configuration of burn and cubecl.
//!
//! Both read their configuration at first use, from `burn.toml` and `cubecl.toml` in the working folder and all folders above it,
//! and write logs and caches where such a file says. Above a working folder may be `/tmp`, where every user can put files. So this
//! program sets the configuration before the first use, and no file is read. The variables `BURN_*` and `CUBECL_*` have effect.

use std::sync::Once;

use burn_std::config::{BurnConfig, RuntimeConfig};

/// Configures burn, and in builds for GPUs cubecl. Call this function before burn is used; further calls do nothing.
pub fn configure() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // A configuration that was set earlier takes precedence: its caller had a reason
        BurnConfig::try_set(BurnConfig::default().override_from_env());
        #[cfg(feature = "cuda")]
        configure_cubecl();
    });
}

/// Has cubecl keep compiled kernels and the results of autotuning.
///
/// burn compiles each kernel at its first use, and tries several kernels for a convolution or a matrix product. For a deep
/// network this takes minutes in every process of every run. `kernel_cache.rs` keeps both in a file. By default, cubecl keeps only
/// the autotuning results, in a database in the folder `target` of the project in which it is started.
#[cfg(feature = "cuda")]
fn configure_cubecl() {
    use cubecl::config::{CubeClRuntimeConfig, cache::CacheConfig};
    let mut config = CubeClRuntimeConfig::default().override_from_env();
    config.compilation.cache = true;
    config.environment.path = CacheConfig::Directory(super::kernel_cache::NOWHERE.into());
    CubeClRuntimeConfig::try_set(config);
}
