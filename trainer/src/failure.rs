//! The error type of commands: a message, a hint and an exit code.

use std::{any::Any, fmt::Display, sync::OnceLock};

use data::DataError;

use crate::config::ConfigErrors;
use crate::files::FileError;
use crate::text;
use comm::CommError;
use launch::LaunchError;

pub use crate::files::{FAILED, USAGE};

/// An error for the user. `Display` is the full text that follows `error: ` on the screen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Exit code of the process: 1 the run failed, 2 wrong usage or input, 3 a worker died or the job could not start,
    /// 128 + n stopped by signal n.
    pub code: u8,
    /// What happened: file, location, cause.
    pub message: String,
    /// The action that fixes the problem.
    pub hint: Option<String>,
    /// Whether a restart would fail in the same way, although the input is right: the training has diverged.
    pub is_permanent: bool,
}

/// Errors of kernels after which a process cannot use the GPU any more (`CUresult` of `cuda.h`).
const STICKY_ERRORS: [(u32, &str); 7] = [
    (214, "an uncorrectable error of its memory"),
    (700, "an access to memory that is not the process's"),
    (702, "its time limit, which the driver sets for GPUs with a display"),
    (710, "a failed assertion"),
    (715, "an illegal instruction"),
    (716, "a misaligned access to memory"),
    (719, "an unspecified failure"),
];

/// What a user can do after the error of a kernel.
const STOPPED_HINT: &str = "the kernel ran before the call that is named: CUDA_LAUNCH_BLOCKING=1 waits for each kernel and names \
                            it, and compute-sanitizer finds the access; `dmesg` shows errors of the hardware (Xid); checkpoints \
                            saved before are intact";

/// What a user can do if a GPU's memory is used up.
const OUT_OF_MEMORY_HINT: &str = "a smaller train.batch_size, with train.accumulate for steps of the same size; train.precision = \
                                \"bf16\" on a GPU; train.drop_last = true or train.graph = false, if it is the last step of an \
                                epoch; `nvidia-smi` shows who else has memory there; checkpoints saved before are intact";

/// The function that returns the kernel in which a GPU has stopped, if this process knows the kernel.
static STOPPED_KERNEL: OnceLock<fn() -> Option<String>> = OnceLock::new();

/// Sets the function that names the kernel in which a GPU has stopped. Further calls do nothing.
pub fn set_stopped_kernel_lookup(find: fn() -> Option<String>) {
    let _ = STOPPED_KERNEL.set(find);
}

impl Failure {
    /// Returns the failure of a run.
    pub fn run(message: impl Display, hint: impl Display) -> Self {
        Self { code: FAILED, message: message.to_string(), hint: Some(hint.to_string()), is_permanent: false }
    }

    /// Returns the failure for wrong input.
    pub fn usage(message: impl Display, hint: impl Display) -> Self {
        Self { code: USAGE, message: message.to_string(), hint: Some(hint.to_string()), is_permanent: false }
    }

    /// Returns the failure of a command that `signal` has ended.
    pub fn stopped(signal: i32, message: impl Display) -> Self {
        Self { code: exit_code_of_signal(signal), message: message.to_string(), hint: None, is_permanent: false }
    }

    /// Returns the error for the callbacks of the crate `launch`.
    pub fn into_launch_error(self) -> LaunchError {
        LaunchError { code: self.code, message: self.message, hint: self.hint.unwrap_or_default() }
    }

    /// Converts the value of a panic to a failure, as [`of_panic`](Self::of_panic) does.
    pub fn of_panic_value(panic: &(dyn Any + Send)) -> Option<Self> {
        Self::of_panic(panic_text(panic)?)
    }

    /// Converts a panic's text to a failure. burn panics if the GPU is out of memory or has stopped, wherever burn reads results,
    /// and if a library is missing. rayon panics if the system refuses threads. Kernels panic if a batch is too large. Returns
    /// `None` for other panics, which are defects of this program.
    pub fn of_panic(text: &str) -> Option<Self> {
        let of_gpu = || gpu_error(text).map(|(message, hint)| Self::run(message, hint));
        let others = [Self::of_missing_library, Self::of_large_batch, Self::of_refused_threads];
        of_gpu().or_else(|| others.iter().find_map(|of| of(text)))
    }

    /// Converts rayon's panic. rayon starts its threads at their first use, and reports an error only by a panic.
    fn of_refused_threads(text: &str) -> Option<Self> {
        let (_, cause) = text.split_once("The global thread pool has not been initialized.")?;
        let quoted = cause.split_once("message: \"").and_then(|(_, rest)| rest.split_once('"'));
        let cause = quoted.map_or(cause.trim(), |(message, _)| message);
        Some(Self::run(
            format!("cannot start the threads of this process: {cause}"),
            "see `ulimit -u`; RAYON_NUM_THREADS=N sets the threads of a process",
        ))
    }

    fn of_large_batch(text: &str) -> Option<Self> {
        let (cause, _) = text.split_once(ops::SMALLER_BATCH)?;
        let cause = cause.trim_end().trim_end_matches(':');
        Some(Self::usage(cause, ops::SMALLER_BATCH))
    }

    /// Converts cudarc's panic. A program that was built for CUDA 12 may run where only CUDA 13 is installed. The checks of
    /// `device` accept the libraries of CUDA 13, but cudarc looks only for those of CUDA 12.
    fn of_missing_library(text: &str) -> Option<Self> {
        let (_, rest) = text.split_once("Unable to dynamically load the \"")?;
        let (name, rest) = rest.split_once('"')?;
        let names = rest.split_once("names: ").and_then(|(_, rest)| rest.split_once(']'));
        let names = names.map_or_else(String::new, |(names, _)| format!(": looked for {names}]"));
        Some(Self::run(
            format!("the CUDA backend cannot load lib{name}.so{names}"),
            format!(
                "a program that was built where nvcc is of CUDA 12 looks for the libraries of CUDA 12: put them on \
                 LD_LIBRARY_PATH, or a link lib{name}.so to the newer one; or build with CUDARC_CUDA_VERSION=13000"
            ),
        ))
    }
}

/// Returns the message and the hint for cubecl's error of a GPU that is out of memory or has stopped. The error is in the text of
/// a panic, where burn reads results, or of a [`CommError`], where a collective launches or waits.
fn gpu_error(text: &str) -> Option<(String, &'static str)> {
    let full = out_of_memory(text).map(|message| (message, OUT_OF_MEMORY_HINT));
    full.or_else(|| poisoned_gpu(text).map(|message| (message, STOPPED_HINT)))
}

/// Returns the message for a GPU that a kernel's error has stopped. The error is sticky: every later driver call returns the same
/// error. So the call in `text` is often not the cause.
fn poisoned_gpu(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("poisoned")?;
    let call = rest.lines().map(str::trim).find(|line| line.starts_with("cu")).unwrap_or("a call of the driver failed");
    let status = call.rsplit_once("status ").and_then(|(_, number)| number.trim().parse::<u32>().ok());
    let cause = STICKY_ERRORS.into_iter().find(|(code, _)| status == Some(*code)).map_or("an error", |(_, text)| text);
    let kernel = STOPPED_KERNEL.get().and_then(|find| find());
    let kernel = kernel.map_or_else(|| "a kernel".to_owned(), |name| format!("the kernel {name}"));
    Some(format!("the GPU has stopped after {cause} in {kernel}: {call}"))
}

fn out_of_memory(text: &str) -> Option<String> {
    // cubecl uses the second text for an array that is larger than a quarter of the GPU's memory.
    let texts = ["out of device memory allocating ", "can't allocate buffer of size: "];
    let (_, rest) = texts.into_iter().find_map(|said| text.split_once(said))?;
    let bytes: String = rest.chars().take_while(char::is_ascii_digit).collect();
    let bytes = bytes.parse().map_or_else(|_| "more".to_owned(), |bytes| format!("{} more", text::bytes(bytes)));
    Some(format!("the GPU's memory is used up: {bytes} was wanted"))
}

impl Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Failure {}

/// An error with a hint for the user and an exit code.
pub trait Hint: std::error::Error {
    /// Returns file, location and cause, without the hint.
    fn message(&self) -> String {
        self.to_string()
    }

    /// Returns the text after `hint:`; `None` if the message needs no hint.
    fn hint(&self) -> Option<&str>;

    /// Returns the process's exit code.
    fn exit_code(&self) -> u8 {
        FAILED
    }
}

impl<E: Hint> From<E> for Failure {
    fn from(error: E) -> Self {
        Self {
            code: error.exit_code(),
            message: error.message(),
            hint: error.hint().map(str::to_owned),
            is_permanent: false,
        }
    }
}

/// Returns the hint, or `None` if it is empty.
fn non_empty(hint: &str) -> Option<&str> {
    (!hint.is_empty()).then_some(hint)
}

impl Hint for DataError {
    fn hint(&self) -> Option<&str> {
        non_empty(&self.hint)
    }

    /// A file that may be readable later is not wrong input: a launcher may start the job again.
    fn exit_code(&self) -> u8 {
        if self.is_transient { FAILED } else { USAGE }
    }
}

impl Hint for FileError {
    fn hint(&self) -> Option<&str> {
        non_empty(&self.hint)
    }

    fn exit_code(&self) -> u8 {
        self.code
    }
}

impl Hint for CommError {
    fn message(&self) -> String {
        gpu_error(&self.message).map_or_else(|| self.message.clone(), |(message, _)| message)
    }

    fn hint(&self) -> Option<&str> {
        gpu_error(&self.message).map_or_else(|| non_empty(&self.hint), |(_, hint)| Some(hint))
    }
}

impl Hint for LaunchError {
    fn message(&self) -> String {
        self.message.clone()
    }

    fn hint(&self) -> Option<&str> {
        non_empty(&self.hint)
    }

    fn exit_code(&self) -> u8 {
        self.code
    }
}

impl From<ConfigErrors> for Failure {
    /// Renders all errors in one message. Each error has its own location and hint.
    fn from(errors: ConfigErrors) -> Self {
        let text = errors.to_string();
        let message = text.strip_prefix("error: ").unwrap_or(&text).to_owned();
        Self { code: USAGE, message, hint: None, is_permanent: false }
    }
}

/// Returns the exit code of a process that ends by a signal, as a shell reports it.
pub fn exit_code_of_signal(signal: i32) -> u8 {
    128 + signal as u8
}

/// Returns the text of a panic; `None` if its value is not text.
pub fn panic_text(panic: &(dyn Any + Send)) -> Option<&str> {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_up_memory_is_distinguished_from_a_defect() {
        let burns = "a device can copy them back: Execution(An IO error happened\nCaused by:\n  out of device memory \
                     allocating 8388608 bytes\nNo backtrace available)";
        let failure = Failure::of_panic(burns).unwrap();
        assert_eq!(failure.message, "the GPU's memory is used up: 8.4 MB more was wanted");
        assert_eq!(failure.code, FAILED);
        assert_eq!(Failure::of_panic("index out of bounds"), None);
    }

    #[test]
    fn a_collective_reports_used_up_memory_with_a_hint() {
        let cubecls = "GPU 1: one_shot: Several failures at once\nCaused by:\n  An IO error happened\nCaused by:\n  out of \
                       device memory allocating 2097152 bytes\nNo backtrace available";
        let failure = Failure::from(CommError::usage(cubecls));
        assert_eq!(failure.message, "the GPU's memory is used up: 2.1 MB more was wanted");
        assert!(failure.hint.unwrap().starts_with("a smaller train.batch_size"));
        let stopped = Failure::from(CommError::usage(
            "GPU 0: The device is poisoned\nCaused by:\n  cuStreamSynchronize failed with status 715",
        ));
        assert!(
            stopped.message.starts_with("the GPU has stopped after an illegal instruction in"),
            "{}",
            stopped.message
        );
        let other = CommError { hint: "free some space".into(), ..CommError::usage("GPU 0: no") };
        assert_eq!(Failure::from(other), Failure::run("GPU 0: no", "free some space"));
    }

    #[test]
    fn a_library_that_cudarc_does_not_find_is_distinguished_from_a_defect() {
        let cudarcs = "Unable to dynamically load the \"nvrtc\" shared library - searched for library names: \
                       [\"libnvrtc.so\", \"libnvrtc.so.12\"]. Ensure that `LD_LIBRARY_PATH` has the correct path";
        let failure = Failure::of_panic(cudarcs).unwrap();
        assert_eq!(
            failure.message,
            "the CUDA backend cannot load libnvrtc.so: looked for [\"libnvrtc.so\", \"libnvrtc.so.12\"]"
        );
        assert!(failure.hint.unwrap().contains("CUDARC_CUDA_VERSION=13000"));
    }

    #[test]
    fn refused_threads_are_distinguished_from_a_defect() {
        let rayons = "The global thread pool has not been initialized.: ThreadPoolBuildError { kind: IOError(Os { code: 11, \
                      kind: WouldBlock, message: \"Resource temporarily unavailable\" }) }";
        let failure = Failure::of_panic(rayons).unwrap();
        assert_eq!(failure.message, "cannot start the threads of this process: Resource temporarily unavailable");
        assert!(failure.hint.unwrap().starts_with("see `ulimit -u`"));
    }

    #[test]
    fn a_gpu_that_has_stopped_is_distinguished_from_a_defect() {
        let burns =
            "Execution(The device is poisoned\nCaused by:\n  cuEventSynchronize failed with status 700\nBacktrace)";
        let failure = Failure::of_panic(burns).unwrap();
        assert_eq!(
            failure.message,
            "the GPU has stopped after an access to memory that is not the process's in a kernel: cuEventSynchronize failed \
             with status 700"
        );
        assert!(failure.hint.unwrap().contains("CUDA_LAUNCH_BLOCKING=1"));
        let unknown = Failure::of_panic("The device was poisoned during launch\nCaused by:\n  unreadable").unwrap();
        assert!(
            unknown.message.ends_with("after an error in a kernel: a call of the driver failed"),
            "{}",
            unknown.message
        );
    }
}
