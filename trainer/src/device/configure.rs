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
        keep_kernels();
    });
}

/// Has cubecl keep compiled kernels and the results of autotuning between runs, in the user's cache folder (`cubecl` in
/// `$XDG_CACHE_HOME` or `~/.cache`).
///
/// burn compiles each kernel at its first use, and tries several kernels for a convolution or a matrix product. For a deep
/// network this takes minutes in every process of every run. cubecl can keep both in a database of the user that processes share.
/// By default, cubecl keeps only the autotuning results, in the folder `target` of the project in which it is started.
#[cfg(feature = "cuda")]
fn keep_kernels() {
    use cubecl::config::{CubeClRuntimeConfig, cache::CacheConfig};
    let mut config = CubeClRuntimeConfig::default().override_from_env();
    config.compilation.cache = true;
    config.environment.path = CacheConfig::Global;
    CubeClRuntimeConfig::try_set(config);
}

/// Keeps the kernels and the results of tuning of these GPUs apart from those of others: cubecl finds results by the number of
/// the GPU in this process, and a choice for one model may not run on another. A stored kernel that the driver refuses would
/// stay refused. `crowded`: several processes share the GPU, so their timings mean nothing.
///
/// The variable `CUBECL_ENVIRONMENT` takes precedence. `speaks`: says if nothing can be kept, which is slow and no error.
#[cfg(feature = "cuda")]
pub fn keep_kernels_of(gpus: &super::Gpus, crowded: bool, speaks: bool) {
    static ONCE: Once = Once::new();
    configure();
    if std::env::var_os("CUBECL_ENVIRONMENT").is_none_or(|name| name.is_empty()) {
        cubecl::environment::activate(cache_name(gpus, crowded));
    }
    ONCE.call_once(|| {
        super::kernel_log::block_launches();
        if speaks && let Err(cause) = check_cache() {
            crate::console::eprint(format_args!(
                "note: compiled kernels cannot be kept, and each start compiles and tunes them again: {cause}\n  hint: set \
                 XDG_CACHE_HOME to a folder of a local disk that this user may write to; network file systems often lack \
                 the locks of a database"
            ));
        }
    });
}

/// Opens the database of kernels and writes to it. cubecl goes on without one, and says so only in its log.
///
/// # Errors
/// The database cannot be opened or written.
#[cfg(feature = "cuda")]
fn check_cache() -> Result<(), String> {
    use cubecl_environment::{
        bytes::Bytes,
        persistence::{Insertion, Origin, Storage, TursoStorage},
    };
    let storage = TursoStorage::open("trainer".to_owned())?;
    match storage.replace(b"last start", Bytes::from_bytes_vec(vec![1]), Origin::Local) {
        Insertion::Failed(cause) => Err(cause),
        _ => Ok(()),
    }
}

/// Returns the name of the folder of kernels: the GPUs in their order, NVRTC's version and the driver's.
#[cfg(any(feature = "cuda", test))]
fn cache_name(gpus: &super::Gpus, crowded: bool) -> String {
    let mut models: Vec<String> = gpus
        .all
        .iter()
        .map(|gpu| format!("{}-sm{}{}", gpu.name.replace(' ', "-"), gpu.compute[0], gpu.compute[1]))
        .collect();
    if models.windows(2).all(|pair| pair[0] == pair[1]) {
        models.truncate(1);
    }
    let nvrtc = gpus.nvrtc.version.as_deref().unwrap_or("unknown");
    let [major, minor] = gpus.cuda;
    let shared = if crowded { "-shared" } else { "" };
    format!("{}-nvrtc{nvrtc}-driver{major}.{minor}{shared}", models.join("_"))
}

#[cfg(test)]
mod tests {
    use super::super::{Gpus, Library};
    use super::cache_name;
    use comm::cuda::driver::Gpu;

    #[test]
    fn the_cache_is_that_of_the_gpus_and_their_software() {
        let gpu = |(index, (name, major)): (usize, (&str, u32))| Gpu {
            index,
            name: name.into(),
            memory_bytes: 1 << 30,
            compute: [major, 0],
            multiprocessors: 4,
            uuid: String::new(),
            exclusive: false,
            limits_kernels: false,
        };
        let of = |models: &[(&str, u32)], cuda, nvrtc: &str| Gpus {
            all: models.iter().copied().enumerate().map(gpu).collect(),
            cuda,
            nvrtc: Library { version: Some(nvrtc.into()), ..Library::default() },
            visible: None,
        };
        let h200 = ("NVIDIA H200", 9);
        let one = of(&[h200], [13, 0], "12.8");
        assert_eq!(cache_name(&one, false), "NVIDIA-H200-sm90-nvrtc12.8-driver13.0");
        assert_eq!(cache_name(&of(&[h200; 8], [13, 0], "12.8"), false), cache_name(&one, false), "equal GPUs share");
        let a100 = ("NVIDIA A100", 8);
        let others = [
            cache_name(&one, true),
            cache_name(&of(&[h200], [13, 2], "12.8"), false),
            cache_name(&of(&[h200], [13, 0], "13.0"), false),
            cache_name(&of(&[a100], [13, 0], "12.8"), false),
            cache_name(&of(&[h200, a100], [13, 0], "12.8"), false),
            cache_name(&of(&[a100, h200], [13, 0], "12.8"), false),
        ];
        let all: std::collections::BTreeSet<_> = others.iter().cloned().chain([cache_name(&one, false)]).collect();
        assert_eq!(all.len(), others.len() + 1, "{all:?}");
    }
}
