//! Finds the software with which burn's CUDA backend compiles its kernels: the library NVRTC, and CUDA's headers.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use serde::Serialize;

use super::MissingCudaPart;
use comm::cuda::driver::{self, NotLoaded};

/// A library that was found.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Library {
    /// The name by which the library was loaded.
    pub name: String,
    /// The file, if the system reports it.
    pub path: Option<PathBuf>,
    /// The version, if the library reports it.
    pub version: Option<String>,
}

/// CUDA's headers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Headers {
    /// The folder of the headers.
    pub path: PathBuf,
}

/// The error that headers are missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoHeaders {
    /// The folders that were tried, each with its result.
    pub tried: Vec<String>,
}

/// Headers that kernels include: f16, bf16, tensor cores, groups of threads, asynchronous copies. `crt/mma.h` and `cuda/barrier`
/// are in separate Python packages.
const HEADERS: [&str; 6] = ["cuda_fp16.h", "cuda_bf16.h", "mma.h", "crt/mma.h", "cooperative_groups.h", "cuda/barrier"];
/// Subfolder of the header folder that has the C++ headers since CUDA 13. cubecl searches it too.
const CCCL: &str = "cccl";

/// Loads NVRTC.
///
/// # Errors
/// The names that were tried.
pub fn nvrtc() -> Result<Library, NotLoaded> {
    Ok(library(driver::open("nvrtc")?, "nvrtc", "nvrtcVersion", 2, |numbers| format!("{}.{}", numbers[0], numbers[1])))
}

/// Loads NCCL.
///
/// # Errors
/// The names that were tried.
pub fn nccl() -> Result<Library, NotLoaded> {
    let opened = driver::open_first(driver::NCCL_NAMES.map(str::to_owned).to_vec())?;
    Ok(library(opened, "nccl", "ncclGetVersion", 1, |numbers| nccl_version(numbers[0])))
}

/// Formats NCCL's version number: 2708 is 2.7.8, 21803 is 2.18.3. Since 2.9 the minor version has two digits.
fn nccl_version(number: i32) -> String {
    let (major, rest) =
        if number >= 10_000 { (number / 10_000, number % 10_000) } else { (number / 1000, number % 1000) };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}

fn library(
    (opened, name): (libloading::Library, String),
    stem: &str,
    symbol: &str,
    numbers: usize,
    text: fn(Vec<i32>) -> String,
) -> Library {
    let version = driver::version(&opened, symbol, numbers).map(text);
    let path = loaded_from(&fs::read_to_string("/proc/self/maps").unwrap_or_default(), stem);
    Library { name, path, version }
}

/// Returns the file of a loaded library from the process's memory map.
fn loaded_from(maps: &str, stem: &str) -> Option<PathBuf> {
    let named = |path: &&str| {
        let file = path.rsplit('/').next().unwrap_or_default();
        file.strip_prefix("lib").and_then(|rest| rest.strip_prefix(stem)).is_some_and(|rest| rest.starts_with(".so"))
    };
    maps.lines().filter_map(|line| line.find('/').map(|start| &line[start..])).find(named).map(PathBuf::from)
}

/// Finds the folder of headers that burn's backend would use.
///
/// # Errors
/// There is no such folder, or it lacks some headers.
pub fn headers() -> Result<Headers, NoHeaders> {
    headers_in(env::var_os("CUDA_PATH"), |path| path.exists())
}

/// Repeats the search of cubecl-cuda (`install.rs`): `CUDA_PATH`, then the first of three usual folders that exists.
fn headers_in(variable: Option<OsString>, exists: impl Fn(&Path) -> bool) -> Result<Headers, NoHeaders> {
    let usual = [("/usr/local/cuda", "/usr/local/cuda"), ("/opt/cuda", "/opt/cuda"), ("/usr/bin/nvcc", "/usr")];
    let root = match &variable {
        Some(path) => Some(PathBuf::from(path)),
        None => usual.iter().find(|(sign, _)| exists(Path::new(sign))).map(|(_, root)| PathBuf::from(root)),
    };
    let Some(root) = root else {
        let mut tried = vec!["CUDA_PATH is not set".to_owned()];
        tried.extend(usual.iter().map(|(sign, _)| format!("{sign} does not exist")));
        return Err(NoHeaders { tried });
    };
    let path = root.join("include");
    let there = |name: &str| exists(&path.join(name)) || exists(&path.join(CCCL).join(name));
    let missing: Vec<_> = HEADERS.iter().filter(|name| !there(name)).map(|name| (*name).to_owned()).collect();
    if missing.is_empty() {
        return Ok(Headers { path });
    }
    let whose = if variable.is_some() { " (CUDA_PATH)" } else { "" };
    Err(NoHeaders { tried: vec![format!("{}{whose} has no {}", path.display(), missing.join(", "))] })
}

/// Describes the missing NVRTC for the user.
pub(super) fn no_nvrtc(error: &NotLoaded) -> MissingCudaPart {
    let root = env::var_os("CUDA_PATH").map_or_else(|| PathBuf::from("/usr/local/cuda"), PathBuf::from);
    let place =
        ["lib64", "lib", "targets/x86_64-linux/lib"].map(|folder| root.join(folder)).into_iter().find(|folder| {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().starts_with("libnvrtc.so"))
        });
    let hint = match place {
        Some(folder) => format!("one is in {0}: LD_LIBRARY_PATH={0}", folder.display()),
        None => "install CUDA's toolkit, or only NVRTC (pip install nvidia-cuda-nvrtc), and put the folder of \
                 libnvrtc.so.* into LD_LIBRARY_PATH"
            .into(),
    };
    MissingCudaPart { cause: format!("no NVRTC, which compiles the GPU's kernels: {error}"), hint }
}

/// Describes the missing headers for the user.
pub(super) fn no_headers(error: &NoHeaders) -> MissingCudaPart {
    MissingCudaPart {
        cause: format!("no CUDA headers, which the GPU's kernels include: {}", error.tried.join(", ")),
        hint: "install CUDA's toolkit and set CUDA_PATH to its folder, the one that holds include/cuda_fp16.h; the Python \
               packages are nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl"
            .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_where_cubecl_looks() {
        let all = |root: &str| {
            let root = root.to_owned();
            move |path: &Path| path.starts_with(&root)
        };
        let found = headers_in(None, all("/usr/local/cuda")).unwrap();
        assert_eq!(found.path, Path::new("/usr/local/cuda/include"));
        // A Linux distribution's package puts nvcc in the user's PATH
        let distribution = |path: &Path| path == "/usr/bin/nvcc" || path.starts_with("/usr/include");
        assert_eq!(headers_in(None, distribution).unwrap().path, Path::new("/usr/include"));
        // As in cubecl-cuda, the variable takes precedence even if its value is wrong
        let wrong = headers_in(Some("/nowhere".into()), all("/usr/local/cuda")).unwrap_err();
        let missing = "cuda_fp16.h, cuda_bf16.h, mma.h, crt/mma.h, cooperative_groups.h, cuda/barrier";
        assert_eq!(wrong.tried, [format!("/nowhere/include (CUDA_PATH) has no {missing}")]);
        let nothing = headers_in(None, |_| false).unwrap_err();
        assert_eq!(nothing.tried.len(), 4);
        let text = no_headers(&nothing);
        assert!(text.cause.contains("CUDA_PATH is not set, /usr/local/cuda does not exist"), "{}", text.cause);
    }

    #[test]
    fn a_partial_toolkit_is_reported_with_what_it_lacks() {
        let partial = |path: &Path| path.starts_with("/opt/cuda") && !path.ends_with("crt/mma.h");
        assert_eq!(headers_in(None, partial).unwrap_err().tried, ["/opt/cuda/include has no crt/mma.h"]);
        // CUDA 12 has the headers of C++ beside the others, CUDA 13 in `cccl`
        for place in ["/opt/cuda/include/cuda/barrier", "/opt/cuda/include/cccl/cuda/barrier"] {
            let plain = |path: &Path| path.starts_with("/opt/cuda") && !path.ends_with("cuda/barrier");
            assert!(headers_in(None, |path: &Path| plain(path) || path == Path::new(place)).is_ok(), "{place}");
            assert_eq!(headers_in(None, plain).unwrap_err().tried, ["/opt/cuda/include has no cuda/barrier"]);
        }
    }

    #[test]
    fn a_loaded_librarys_file_is_in_the_memory_map() {
        let maps = "7f00-7f01 r--p 00000000 08:01 12   /usr/lib/libnvrtc-builtins.so.13.0\n\
                    7f02-7f03 r-xp 00000000 08:01 13   /opt/a b/libnvrtc.so.13.0.48\n7f04-7f05 rw-p 0 00:00 0";
        assert_eq!(loaded_from(maps, "nvrtc").unwrap(), Path::new("/opt/a b/libnvrtc.so.13.0.48"));
        assert_eq!(loaded_from(maps, "nccl"), None);
    }

    #[test]
    fn nccl_is_searched_by_the_file_names_of_its_packages() {
        match nccl() {
            Ok(found) => assert!(driver::NCCL_NAMES.contains(&found.name.as_str()), "{found:?}"),
            Err(missing) => assert_eq!(missing.tried, driver::NCCL_NAMES),
        }
    }

    #[test]
    fn both_forms_of_nccl_version_numbers_are_formatted() {
        assert_eq!(nccl_version(21803), "2.18.3");
        assert_eq!(nccl_version(22907), "2.29.7");
        assert_eq!(nccl_version(2708), "2.7.8");
    }
}
