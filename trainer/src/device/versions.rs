//! Compares the versions of NVIDIA's driver and of NVRTC, which compiles kernels to PTX.
//!
//! A driver loads PTX only of CUDA versions up to its own ("CUDA Compatibility", minor version compatibility does not cover
//! PTX). For newer PTX the driver returns `CUDA_ERROR_UNSUPPORTED_PTX_VERSION` at the first kernel, after minutes of
//! compilation.

use super::MissingCudaPart;
use super::toolkit::Library;

/// The CUDA version of the oldest supported driver. cudarc calls `cuEventElapsedTime_v2`, which CUDA 12.8 introduced. A build
/// with the variable `CUDARC_CUDA_VERSION`, for example 12040, calls only functions of that version.
const OLDEST_CUDA: [i32; 2] = match option_env!("CUDARC_CUDA_VERSION") {
    Some(text) => parse(text),
    None => [12, 8],
};

/// Parses cudarc's form of a version: 12040 is 12.4.
const fn parse(text: &str) -> [i32; 2] {
    match i32::from_str_radix(text, 10) {
        Ok(number) => [number / 1000, number % 1000 / 10],
        Err(_) => panic!("CUDARC_CUDA_VERSION is not a number such as 12040"),
    }
}

/// Checks that the driver, which supports CUDA up to version `cuda`, is new enough for this program and for NVRTC.
///
/// # Errors
/// The driver is too old for this program, or for NVRTC.
pub fn check_versions(cuda: [i32; 2], nvrtc: &Library) -> Result<(), MissingCudaPart> {
    let [major, minor] = cuda;
    if cuda < OLDEST_CUDA {
        let [oldest, of] = OLDEST_CUDA;
        return Err(MissingCudaPart {
            cause: format!("the NVIDIA driver supports CUDA {major}.{minor}, and this program needs {oldest}.{of}"),
            hint: format!(
                "install a newer driver (CUDA 12.8 came with version 570), or build with CUDARC_CUDA_VERSION={major}{minor:02}0"
            ),
        });
    }
    let Some(version) = nvrtc.version.as_deref().and_then(numbers).filter(|version| *version > cuda) else {
        return Ok(());
    };
    let place = nvrtc.path.as_ref().map_or_else(|| nvrtc.name.clone(), |path| path.display().to_string());
    let package = if major < 13 { format!("nvidia-cuda-nvrtc-cu{major}") } else { "nvidia-cuda-nvrtc".to_owned() };
    Err(MissingCudaPart {
        cause: format!(
            "NVRTC {}.{} ({place}) compiles kernels that the driver refuses: the driver supports CUDA {major}.{minor}",
            version[0], version[1]
        ),
        hint: format!(
            "pip install \"{package}=={major}.{minor}.*\" and put its folder into LD_LIBRARY_PATH, use CUDA's toolkit \
             {major}.{minor}, or update the driver"
        ),
    })
}

/// Parses `13.2`.
fn numbers(text: &str) -> Option<[i32; 2]> {
    let (major, minor) = text.split_once('.')?;
    Some([major.parse().ok()?, minor.parse().ok()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nvrtc(version: &str) -> Library {
        Library {
            name: "libnvrtc.so.13".into(),
            path: Some("/opt/libnvrtc.so.13".into()),
            version: Some(version.into()),
        }
    }

    #[test]
    fn nvrtc_may_be_as_new_as_the_driver() {
        for (cuda, version) in [([13, 0], "13.0"), ([13, 2], "13.0"), ([13, 0], "12.9"), ([12, 8], "12.8")] {
            assert_eq!(check_versions(cuda, &nvrtc(version)), Ok(()), "{cuda:?} {version}");
        }
        assert_eq!(check_versions([13, 0], &Library { version: None, ..nvrtc("") }), Ok(()), "an unknown version");
    }

    #[test]
    fn a_newer_nvrtc_is_refused_with_the_package_to_install() {
        let refused = check_versions([13, 0], &nvrtc("13.2")).unwrap_err();
        assert!(refused.cause.starts_with("NVRTC 13.2 (/opt/libnvrtc.so.13) compiles kernels that the driver refuses"));
        assert!(refused.hint.contains("pip install \"nvidia-cuda-nvrtc==13.0.*\""), "{}", refused.hint);
        let refused = check_versions([12, 9], &nvrtc("13.0")).unwrap_err();
        assert!(refused.hint.contains("\"nvidia-cuda-nvrtc-cu12==12.9.*\""), "{}", refused.hint);
    }

    #[test]
    fn an_old_driver_is_refused_whatever_nvrtc_is() {
        let refused = check_versions([12, 4], &nvrtc("12.4")).unwrap_err();
        assert_eq!(refused.cause, "the NVIDIA driver supports CUDA 12.4, and this program needs 12.8");
        assert!(refused.hint.contains("570") && refused.hint.contains("CUDARC_CUDA_VERSION=12040"), "{}", refused.hint);
        assert_eq!(parse("12040"), [12, 4]);
    }
}
