//! Keeps compiled kernels and autotuning results between runs.
//!
//! burn compiles each kernel at its first use, and tries several kernels for a convolution or a matrix product. For a deep
//! network this takes minutes in every process of every run. cubecl can keep kernels and autotuning results in a database of
//! the user that processes share. By default, cubecl keeps only the autotuning results, in the folder `target` of the project
//! in which it is started.

use std::path::Path;
use std::sync::Once;

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig};

/// Configures cubecl to keep kernels and autotuning results in the user's cache folder (`cubecl` in `$XDG_CACHE_HOME` or
/// `~/.cache`). A `cubecl.toml` or `burn.toml` in the working folder or above it takes precedence. Call this function before
/// burn first uses a GPU.
pub(super) fn keep() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::current_dir().is_ok_and(|folder| configured(&folder)) {
            return;
        }
        let mut config = CubeClRuntimeConfig::default().override_from_env();
        config.compilation.cache = true;
        config.environment.path = CacheConfig::Global;
        // A configuration that was set earlier takes precedence: its caller had a reason
        CubeClRuntimeConfig::try_set(config);
    });
}

/// Returns whether a file in `folder` or above it configures cubecl.
fn configured(folder: &Path) -> bool {
    let sections = CubeClRuntimeConfig::section_file_names();
    folder.ancestors().any(|folder| {
        CubeClRuntimeConfig::file_names().iter().any(|name| folder.join(name).exists())
            || sections.iter().any(|(name, section)| {
                let text = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
                text.parse::<toml::Table>().is_ok_and(|table| table.contains_key(*section))
            })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_cubecls_or_a_section_of_burns_counts() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("a/b");
        std::fs::create_dir_all(&inner).unwrap();
        let write = |name: &str, text: &str| std::fs::write(root.path().join(name), text).unwrap();
        assert!(!configured(&inner));
        write("burn.toml", "[fusion]\n");
        assert!(!configured(&inner));
        write("burn.toml", "[cubecl.compilation]\ncache = false\n");
        assert!(configured(&inner));
        write("burn.toml", "");
        write("cubecl.toml", "");
        assert!(configured(&inner));
    }
}
