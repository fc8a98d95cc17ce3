//! Workers that run any program: the launcher finds the program in `PATH` and starts it through [`helper`](crate::helper).

use std::ffi::{OsStr, OsString};
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::error::{LaunchError, Result};
use super::port;

/// A program that does not call [`worker::attach`](crate::worker::attach). Its workers get torchrun's variables and a log folder
/// `attempt_K/RANK`. The output of all workers is shown on the screen, with the rank before each line.
#[derive(Debug, Clone)]
pub struct AnyProgram {
    /// `TORCHELASTIC_RUN_ID`.
    pub run_id: String,
}

/// Returns the path of `program`. Like a shell, searches in `PATH` unless the name has a slash.
///
/// # Errors
/// There is no such file, or the user may not execute it.
pub fn find_program(program: &OsStr) -> Result<PathBuf> {
    let name = program.to_string_lossy().into_owned();
    if program.is_empty() {
        return Err(LaunchError::usage(
            "the name of the program is empty",
            "trainer launch --cpus 4 -- PROGRAM ARGUMENTS",
        ));
    }
    if name.contains('/') {
        let path = PathBuf::from(program);
        return match fs::metadata(&path) {
            Err(error) => Err(LaunchError::usage(format!("{name}: {error}"), "name a program that is there")),
            Ok(found) if found.is_dir() => {
                Err(LaunchError::usage(format!("{name}: a directory, not a program"), "name a file in it"))
            }
            Ok(_) if !is_executable(&path) => Err(LaunchError::usage(
                format!("{name}: not executable"),
                format!("chmod +x {name}; or start its interpreter: trainer launch --cpus 4 -- python {name}"),
            )),
            Ok(_) => Ok(path),
        };
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders).map(|folder| folder.join(program)).find(|path| is_executable(path));
    found.ok_or_else(|| {
        let here = is_executable(Path::new(program)) || Path::new(program).exists();
        let hint = match here {
            true => {
                format!("the working folder is not in PATH: ./{name}; a script needs its interpreter: python {name}")
            }
            false => "is it installed, and its folder in PATH?".to_owned(),
        };
        LaunchError::usage(format!("{name}: no such program in PATH"), hint)
    })
}

fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// Returns the command line by which the helper runs `program`.
pub(super) fn through_helper(program: &Path, arguments: &[OsString]) -> Vec<OsString> {
    let launcher = std::process::id().to_string();
    let head = [crate::helper::EXEC.into(), launcher.into(), program.into()];
    head.into_iter().chain(arguments.iter().cloned()).collect()
}

/// Returns the port for the workers' own rendezvous on this host: `wanted`, or a free port if `wanted` is 0. The workers bind
/// the port later, so another process may take it before them. torchrun has the same race.
///
/// # Errors
/// `wanted` is taken.
pub(super) fn port_for_workers(address: &str, wanted: u16) -> Result<u16> {
    let free = TcpListener::bind(port::host_port(address, wanted)).and_then(|listener| listener.local_addr());
    free.map(|address| address.port()).map_err(|error| port::cannot_listen(address, wanted, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        assert!(find_program(OsStr::new("sh")).unwrap().is_absolute());
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("train.py");
        fs::write(&script, "").unwrap();
        for (name, cause, hint) in [
            (OsStr::new(""), "the name of the program is empty", "trainer launch"),
            (OsStr::new("no-such-program"), "no-such-program: no such program in PATH", "installed"),
            (OsStr::new("/no/such"), "/no/such: No such file or directory (os error 2)", "is there"),
            (folder.path().as_os_str(), "a directory, not a program", "a file in it"),
            (script.as_os_str(), "train.py: not executable", "-- python"),
        ] {
            let error = find_program(name).unwrap_err();
            assert_eq!(error.code, 2);
            assert!(error.message.contains(cause) && error.hint.contains(hint), "{error}");
        }
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find_program(script.as_os_str()).unwrap(), script);
    }
}
