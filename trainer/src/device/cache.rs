//! Compiled kernels and the outcome of tuning, kept between runs.
//!
//! burn compiles each kernel when it is first used, and tries several for a convolution or a product of matrices: minutes for
//! a deep network, in every process of every run. cubecl can keep both in a database of the user's that processes share; by
//! itself it keeps the outcome of tuning only, and in the folder `target` of whatever project it is started in.

use std::path::Path;
use std::sync::Once;

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig};

/// Has cubecl keep kernels and tuning in the user's cache folder (`$XDG_CACHE_HOME` or `~/.cache`, there `cubecl`), unless a
/// `cubecl.toml` or a `burn.toml` in the working folder or above it says what to do. Before burn's first use of a GPU.
pub(super) fn keep() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::current_dir().is_ok_and(|folder| configured(&folder)) {
            return;
        }
        let mut config = CubeClRuntimeConfig::default().override_from_env();
        config.compilation.cache = true;
        config.environment.path = CacheConfig::Global;
        // whoever was first has had a reason
        CubeClRuntimeConfig::try_set(config);
    });
}

/// Whether a file that configures cubecl lies in `folder` or above.
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
