//! `env.json`: the program, the machine and the command line of a run.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::system::uname;
use serde::Serialize;
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::files::{self, FileError};

/// Version of the tensor library, as pinned by the workspace. A crate cannot query the versions of its dependencies.
const BURN: &str = "0.22.1";

/// Commit that `build.rs` has found.
const COMMIT: Option<&str> = option_env!("TRAINER_COMMIT");

/// Program, machine and command line of one start of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Environment {
    /// Time of the start, RFC 3339, UTC.
    pub started: String,
    /// The command line, program first. Values that may be secret are redacted.
    pub command: Vec<String>,
    /// Working directory of the start.
    pub working_dir: Option<PathBuf>,
    /// Version of this program.
    pub trainer: String,
    /// Version of the tensor library.
    pub burn: String,
    /// Commit of the checkout in which this program was built, if any. Changes that were not committed do not show.
    pub git_commit: Option<String>,
    /// Device, as readable text.
    pub device: String,
    /// Name of the machine.
    pub host: String,
    /// Operating system, as readable text.
    pub os: String,
    /// Kernel and its release.
    pub kernel: String,
    /// Instruction set.
    pub arch: String,
    /// Model of the processor.
    pub cpu: Option<String>,
    /// Cores that this process may use.
    pub cores: Option<usize>,
    /// Memory of the machine in bytes.
    pub memory_bytes: Option<u64>,
}

impl Environment {
    /// Detects the environment. The caller supplies `device`. A value that the machine does not report is `None`.
    pub fn detect(device: &str) -> Self {
        let working_dir = std::env::current_dir().ok();
        let name = uname();
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self {
            started: OffsetDateTime::now_utc()
                .replace_nanosecond(0)
                .map(|now| now.format(&Rfc3339))
                .expect("zero is a nanosecond")
                .expect("a date of this millennium can be written"),
            command: redacted(
                std::env::args_os().map(lossy).collect(),
                std::env::vars_os().map(|(n, v)| (lossy(n), lossy(v))),
            ),
            git_commit: COMMIT.map(str::to_owned),
            working_dir,
            trainer: env!("CARGO_PKG_VERSION").to_owned(),
            burn: BURN.to_owned(),
            device: device.to_owned(),
            host: name.nodename().to_string_lossy().into_owned(),
            os: os_name(&text("/etc/os-release")).unwrap_or_else(|| std::env::consts::OS.to_owned()),
            kernel: format!("{} {}", name.sysname().to_string_lossy(), name.release().to_string_lossy()),
            arch: std::env::consts::ARCH.to_owned(),
            cpu: cpu_model(&text("/proc/cpuinfo")),
            cores: std::thread::available_parallelism().ok().map(Into::into),
            memory_bytes: memory_bytes(),
        }
    }

    /// Writes `env.json` of a new run.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), FileError> {
        write(path, &json!(self))
    }

    /// Appends a resumed start to the `resumed` list of `env.json`. The record of the first start stays.
    ///
    /// # Errors
    /// When the file cannot be read or written, or is not a JSON object.
    pub fn append(&self, path: &Path) -> Result<(), FileError> {
        let bytes = files::read_or_empty(path)?;
        if bytes.is_empty() {
            return self.write(path);
        }
        let damaged = |cause: String| {
            FileError::new(path, cause, "the file was damaged or edited; move it away to have a new one written")
        };
        let mut record: Value =
            serde_json::from_slice(&bytes).map_err(|error| damaged(format!("not JSON: {error}")))?;
        let Some(object) = record.as_object_mut() else { return Err(damaged("not a JSON object".to_owned())) };
        match object.entry("resumed").or_insert_with(|| json!([])).as_array_mut() {
            Some(resumed) => resumed.push(json!(self)),
            None => return Err(damaged("`resumed` is not a list".to_owned())),
        }
        write(path, &record)
    }
}

fn lossy(text: std::ffi::OsString) -> String {
    text.to_string_lossy().into_owned()
}

/// Returns whether a variable or flag of this name holds a secret: `TRAINER_SECRET`, `--token`, ….
fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    ["secret", "token", "password", "passwd", "credential", "api_key", "api-key", "apikey"]
        .iter()
        .any(|word| name.contains(word))
}

/// Returns `command` with secrets replaced: the values of secret variables, the values of secret flags and settings
/// (`--token=…`, `--token …`, `NAME=…`), and the user and password of a URL.
fn redacted(command: Vec<String>, variables: impl Iterator<Item = (String, String)>) -> Vec<String> {
    const HIDDEN: &str = "***";
    // Minimum length: redacting a shorter value everywhere would hide ordinary words of the command line.
    let values: Vec<String> =
        variables.filter(|(name, value)| is_secret(name) && value.len() >= 8).map(|(_, value)| value).collect();
    let mut follows = false;
    let hide = |argument: String| {
        if std::mem::take(&mut follows) && !argument.starts_with('-') {
            return HIDDEN.to_owned();
        }
        let mut shown = values.iter().fold(argument, |text, value| text.replace(value, HIDDEN));
        match shown.split_once('=') {
            Some((name, _)) if is_secret(name) => shown = format!("{name}={HIDDEN}"),
            None if shown.starts_with("--") && is_secret(&shown) => follows = true,
            _ => {}
        }
        let user = shown.find("://").map(|at| at + 3).and_then(|start| {
            let host = shown[start..].find('/').map_or(shown.len(), |at| start + at);
            Some(start..start + shown[start..host].rfind('@')?)
        });
        if let Some(user) = user {
            shown.replace_range(user, HIDDEN);
        }
        shown
    };
    command.into_iter().map(hide).collect()
}

fn write(path: &Path, record: &Value) -> Result<(), FileError> {
    files::write_atomic(path, format!("{record:#}\n").as_bytes())
}

/// Returns the memory of the machine in bytes. `None` on macOS: rustix has no such function there.
#[cfg(target_os = "linux")]
fn memory_bytes() -> Option<u64> {
    let info = rustix::system::sysinfo();
    #[allow(clippy::unnecessary_cast, reason = "a C long: narrower on 32-bit machines")]
    let units = info.totalram as u64;
    Some(units * u64::from(info.mem_unit))
}

#[cfg(not(target_os = "linux"))]
fn memory_bytes() -> Option<u64> {
    None
}

/// Returns `PRETTY_NAME` of `/etc/os-release`.
fn os_name(release: &str) -> Option<String> {
    let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    Some(name.trim_matches('"').to_owned())
}

/// Returns `model name` of `/proc/cpuinfo`. Only x86 has this field.
fn cpu_model(info: &str) -> Option<String> {
    let (_, model) = info.lines().find(|line| line.starts_with("model name"))?.split_once(':')?;
    Some(model.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The working directory of the start does not matter: it may be another checkout, or none.
    #[test]
    fn the_commit_is_that_of_the_build() {
        let commit = Environment::detect("cpu").git_commit;
        assert_eq!(commit.as_deref(), COMMIT);
        let is_id = |id: &str| [40, 64].contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert!(COMMIT.is_none_or(is_id), "{COMMIT:?}");
    }

    #[test]
    fn secrets_of_the_command_line_are_redacted() {
        let text = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let variables = [("TRAINER_SECRET", "correct horse"), ("HOME", "/home/me/trainer"), ("A_TOKEN", "x")];
        let command = text(&[
            "/home/me/trainer",
            "--set",
            "data.dir=/x/correct horse/y",
            "--token",
            "abc",
            "--password=abc",
            "TRAINER_SECRET=abc",
            "https://me:abc@host/path@7",
            "--secret",
            "--seed",
            "7",
        ]);
        let shown = redacted(command, variables.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())));
        let want = text(&[
            "/home/me/trainer",
            "--set",
            "data.dir=/x/***/y",
            "--token",
            "***",
            "--password=***",
            "TRAINER_SECRET=***",
            "https://***@host/path@7",
            "--secret",
            "--seed",
            "7",
        ]);
        assert_eq!(shown, want);
    }

    #[test]
    fn the_first_start_and_each_resume_are_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("env.json");
        let here = Environment::detect("cpu");
        here.write(&path).unwrap();
        here.append(&path).unwrap();
        Environment { host: "elsewhere".into(), ..here.clone() }.append(&path).unwrap();
        let record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(record["device"], "cpu");
        assert_eq!(record["resumed"].as_array().unwrap().len(), 2);
        assert_eq!(record["resumed"][1]["host"], "elsewhere");
        assert!(here.memory_bytes.unwrap() > 1 << 20 && here.cores.unwrap() > 0 && !here.host.is_empty());
        assert!(here.started.len() == 20 && here.started.ends_with('Z'), "{}", here.started);
        fs::write(&path, "{").unwrap();
        assert!(here.append(&path).unwrap_err().cause.starts_with("not JSON: "));
    }

    #[test]
    fn the_recorded_version_of_burn_is_the_pinned_one() {
        let workspace = include_str!("../../../Cargo.toml");
        assert!(workspace.contains(&format!("burn = {{ version = \"={BURN}\"")), "burn is no longer {BURN}");
    }

    #[test]
    fn machine_files_are_read() {
        assert_eq!(
            os_name("NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n").unwrap(),
            "Debian GNU/Linux 12 (bookworm)"
        );
        assert_eq!(cpu_model("processor\t: 0\nmodel name\t: AMD EPYC 9R14\n").unwrap(), "AMD EPYC 9R14");
        assert_eq!(cpu_model("processor : 0\nBogoMIPS : 50\n"), None);
    }
}
