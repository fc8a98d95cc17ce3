//! Finds the GPUs of this process and the software that training on them needs. If a part is missing, reports the part and the
//! places that were searched.

use super::toolkit::{self, Library};
use super::versions::check_versions;
use comm::cuda::driver::{Driver, DriverError, Gpu, NoDriver};

/// GPUs that this process can train on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Gpus {
    /// The GPUs that this process sees, in the driver's order.
    pub all: Vec<Gpu>,
    /// The newest CUDA version that the driver supports: major and minor.
    pub cuda: [i32; 2],
    /// The library that compiles kernels.
    pub nvrtc: Library,
    /// The value of `CUDA_VISIBLE_DEVICES`, if it is set.
    pub visible: Option<String>,
}

#[cfg(any(feature = "cuda", test))]
impl Gpus {
    /// Returns the name of the file of compiled kernels: the GPUs in their order, and the versions of NVRTC and of the driver.
    ///
    /// The name has the GPU models, since cubecl finds stored results by the index of the GPU in this process, and a result for
    /// one model may not run on another. The name has the versions, since the driver would refuse a stored kernel of another
    /// version in every run. `oversubscribed`: several processes share the GPU, so their timings mean nothing and need a separate
    /// file.
    pub(super) fn kernel_name(&self, oversubscribed: bool) -> String {
        let mut models: Vec<String> = self
            .all
            .iter()
            .map(|gpu| format!("{}-sm{}{}", gpu.name.replace(' ', "-"), gpu.compute[0], gpu.compute[1]))
            .collect();
        if models.windows(2).all(|pair| pair[0] == pair[1]) {
            models.truncate(1);
        }
        let nvrtc = self.nvrtc.version.as_deref().unwrap_or("unknown");
        let [major, minor] = self.cuda;
        let shared = if oversubscribed { "-shared" } else { "" };
        format!("{}-nvrtc{nvrtc}-driver{major}.{minor}{shared}", models.join("_"))
    }
}

/// A missing part, described for the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingCudaPart {
    /// The missing part, and the places that were searched.
    pub cause: String,
    /// The action that fixes the problem.
    pub hint: String,
}

/// Finds all parts that burn's CUDA backend needs: driver, GPU, NVRTC and CUDA's headers.
///
/// # Errors
/// The first part that is missing, or a driver that is too old for NVRTC or for this program.
pub fn find_gpus() -> Result<Gpus, MissingCudaPart> {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let (driver, count) = driver_with_gpus(visible.as_deref())?;
    let cuda = driver.cuda_version().map_err(refused)?;
    let all = (0..count).map(|index| driver.gpu(index)).collect::<Result<_, _>>().map_err(refused)?;
    let nvrtc = toolkit::nvrtc().map_err(|error| toolkit::no_nvrtc(&error))?;
    check_versions(cuda, &nvrtc)?;
    toolkit::headers().map_err(|error| toolkit::no_headers(&error))?;
    Ok(Gpus { all, cuda, nvrtc, visible })
}

/// Returns the number of GPUs that this process sees. Other programs may need less than [`find_gpus`] checks.
///
/// # Errors
/// There is no driver, or no GPU.
pub fn count_gpus() -> Result<usize, MissingCudaPart> {
    driver_with_gpus(std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref()).map(|(_, count)| count)
}

fn driver_with_gpus(visible: Option<&str>) -> Result<(Driver, usize), MissingCudaPart> {
    let driver = Driver::load().map_err(|error| no_driver(&error, visible))?;
    match driver.count().map_err(refused)? {
        0 => Err(no_gpu(&driver.library, "no error", visible)),
        count => Ok((driver, count)),
    }
}

fn refused(error: DriverError) -> MissingCudaPart {
    MissingCudaPart { cause: format!("the NVIDIA driver: {error}"), hint: DRIVER_HINT.into() }
}

const DRIVER_HINT: &str =
    "compare with nvidia-smi; a driver whose kernel module is of another version needs a restart of the machine";

/// Describes a driver that is missing or does not start.
fn no_driver(error: &NoDriver, visible: Option<&str>) -> MissingCudaPart {
    const NO_DEVICE: i32 = 100;
    match error {
        NoDriver::NotLoaded(missing) => MissingCudaPart {
            cause: format!("no NVIDIA driver: {missing}"),
            hint: "install NVIDIA's driver, or start the container with GPUs (docker run --gpus all); without GPUs: --cpus N"
                .into(),
        },
        NoDriver::Refused { library, error } if error.code == NO_DEVICE => {
            no_gpu(library, &error.to_string(), visible)
        }
        NoDriver::Refused { library, error } => MissingCudaPart {
            cause: format!("the NVIDIA driver ({library}) does not start: {error}"),
            hint: DRIVER_HINT.into(),
        },
    }
}

/// Describes a driver without a GPU.
fn no_gpu(library: &str, said: &str, visible: Option<&str>) -> MissingCudaPart {
    let (clause, hint) = match visible_devices_note(visible) {
        Some(clause) => (format!("; {clause}"), "unset CUDA_VISIBLE_DEVICES, or name GPUs that `nvidia-smi -L` lists"),
        None => (String::new(), "does `nvidia-smi -L` list one? a container needs --gpus all; without GPUs: --cpus N"),
    };
    MissingCudaPart { cause: format!("the NVIDIA driver ({library}) shows no GPU: {said}{clause}"), hint: hint.into() }
}

/// Describes the effect of `CUDA_VISIBLE_DEVICES`; `None` if it is not set. The driver lists the GPUs that the variable names,
/// by number or by UUID, up to the first entry that names no GPU.
pub fn visible_devices_note(visible: Option<&str>) -> Option<String> {
    let value = visible?;
    if value.trim().is_empty() {
        return Some("CUDA_VISIBLE_DEVICES is empty, which hides every GPU".into());
    }
    let entry = |entry: &str| entry.parse::<u32>().is_ok() || entry.starts_with("GPU-") || entry.starts_with("MIG-");
    let mut entries = value.split(',').map(str::trim);
    Some(match entries.find(|word| !entry(word)) {
        None => format!("CUDA_VISIBLE_DEVICES is `{value}`"),
        Some(word) => format!(
            "CUDA_VISIBLE_DEVICES is `{value}`: `{word}` is neither the index nor the UUID of a GPU, so the driver hides it and \
             all entries after it"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm::cuda::driver::{DriverError, NotLoaded};

    #[test]
    fn a_missing_driver_is_reported_with_the_names_that_were_tried() {
        let tried = vec!["libcuda.so".into(), "libcuda.so.1".into()];
        let missing = no_driver(&NoDriver::NotLoaded(NotLoaded { tried, cause: "cannot open".into() }), None);
        assert_eq!(
            missing.cause,
            "no NVIDIA driver: looked for libcuda.so, libcuda.so.1 on the loader's path: cannot open"
        );
        assert!(missing.hint.contains("--cpus"), "{}", missing.hint);
    }

    #[test]
    fn a_driver_without_a_gpu_names_the_variable_that_hides_it() {
        let error = DriverError { call: "cuInit", code: 100, name: "CUDA_ERROR_NO_DEVICE".into() };
        let refused = NoDriver::Refused { library: "libcuda.so.1".into(), error };
        let plain = no_driver(&refused, None);
        assert!(plain.cause.ends_with("shows no GPU: cuInit: CUDA_ERROR_NO_DEVICE (100)"), "{}", plain.cause);
        let empty = no_driver(&refused, Some(""));
        assert!(empty.cause.contains("CUDA_VISIBLE_DEVICES is empty"), "{}", empty.cause);
        assert!(empty.hint.contains("unset"), "{}", empty.hint);
        let error = DriverError { call: "cuInit", code: 803, name: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH".into() };
        let other = no_driver(&NoDriver::Refused { library: "libcuda.so.1".into(), error }, Some(""));
        assert!(other.cause.contains("does not start") && !other.cause.contains("VISIBLE"), "{}", other.cause);
    }

    #[test]
    fn visible_devices_are_numbers_and_uuids_up_to_the_first_other_word() {
        assert_eq!(visible_devices_note(None), None);
        assert_eq!(visible_devices_note(Some("1,0")).unwrap(), "CUDA_VISIBLE_DEVICES is `1,0`");
        let uuids = "GPU-8a56,MIG-77";
        assert_eq!(visible_devices_note(Some(uuids)).unwrap(), format!("CUDA_VISIBLE_DEVICES is `{uuids}`"));
        for (value, word) in [("0,-1,1", "-1"), ("none", "none"), ("0,,1", "")] {
            let text = visible_devices_note(Some(value)).unwrap();
            assert!(text.contains(&format!("`{word}` is neither")), "{text}");
        }
    }

    #[test]
    fn the_name_of_the_kernel_file_differs_for_other_gpus_and_software() {
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
        assert_eq!(one.kernel_name(false), "NVIDIA-H200-sm90-nvrtc12.8-driver13.0");
        assert_eq!(of(&[h200; 8], [13, 0], "12.8").kernel_name(false), one.kernel_name(false), "equal GPUs share");
        let a100 = ("NVIDIA A100", 8);
        let others = [
            one.kernel_name(true),
            of(&[h200], [13, 2], "12.8").kernel_name(false),
            of(&[h200], [13, 0], "13.0").kernel_name(false),
            of(&[a100], [13, 0], "12.8").kernel_name(false),
            of(&[h200, a100], [13, 0], "12.8").kernel_name(false),
            of(&[a100, h200], [13, 0], "12.8").kernel_name(false),
        ];
        let all: std::collections::BTreeSet<_> = others.iter().cloned().chain([one.kernel_name(false)]).collect();
        assert_eq!(all.len(), others.len() + 1, "{all:?}");
    }
}
