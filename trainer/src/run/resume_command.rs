//! The command that continues a run, for the user to copy.

use std::path::Path;

use super::job_flags;
use crate::cli::TrainArgs;
use launch::shell::quoted_if_needed;

/// Returns the command that continues the run in `folder`, quoted for a shell. Mode and number of workers are in the run's
/// config.toml. The flags of the job are not, so the command repeats them. `other_launcher` is set if another launcher started this
/// process. The flags of the job then belong to that launcher's command and are left out.
pub(super) fn resume_command(arguments: &TrainArgs, folder: &Path, other_launcher: bool) -> String {
    let mut words = vec!["--resume".to_owned(), folder.display().to_string()];
    if !other_launcher {
        if let (Some(count), true) = (arguments.gpus, arguments.oversubscribe) {
            words.extend(["--gpus".to_owned(), count.to_string(), "--oversubscribe".to_owned()]);
        }
        let of_hosts = !arguments.job.host_flags.is_empty();
        let given = job_flags::given(&arguments.job).into_iter();
        // -H chooses a new address and port in each job, so the flags for address and port are not repeated.
        let given = given.filter(|(flag, _)| !of_hosts || *flag == "--max-restarts");
        words.extend(arguments.job.host_flags.iter().cloned());
        words.extend(given.flat_map(|(flag, value)| [flag.to_owned(), value]));
        if let Some(path) = &arguments.job.secret_file {
            words.extend(["--secret-file".to_owned(), path.display().to_string()]);
        }
        if arguments.job.launcher == "local" {
            words.extend(["--launcher".to_owned(), "local".to_owned()]);
        }
    }
    shell_command(words)
}

/// Returns the command of this program with `arguments`, quoted for a shell.
pub(crate) fn shell_command(arguments: impl IntoIterator<Item = String>) -> String {
    // The program name that the user typed. Workers have the name of their launcher.
    let program = std::env::args_os().next().unwrap_or_else(|| "trainer".into()).to_string_lossy().into_owned();
    let words = std::iter::once(program).chain(arguments);
    words.map(|word| quoted_if_needed(&word)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, JobArgs};

    fn command(flags: &[&str], other_launcher: bool) -> String {
        let cli = Cli::parse_from([&["trainer", "--config", "x.toml"], flags].concat());
        let command = resume_command(&cli.train, Path::new("my runs/it's"), other_launcher);
        command.split_once(" --resume ").unwrap().1.to_owned()
    }

    #[test]
    fn a_shell_reads_the_command_as_it_was_meant() {
        assert_eq!(command(&["--cpus", "2"], false), r"'my runs/it'\''s'");
    }

    #[test]
    fn hosts_are_repeated() {
        let cli = Cli::parse_from(["trainer", "--config", "x.toml", "--max-restarts", "2"]);
        let mut arguments = cli.train;
        arguments.job = JobArgs {
            nnodes: Some(2),
            master_addr: Some("10.0.0.1".into()),
            host_flags: ["-H", "a:1,b:1"].map(str::to_owned).to_vec(),
            ..arguments.job
        };
        let command = resume_command(&arguments, Path::new("runs/x"), false);
        assert!(command.ends_with(" --resume runs/x -H a:1,b:1 --max-restarts 2"), "{command}");
    }

    #[test]
    fn flags_of_the_job_are_repeated() {
        let flags =
            ["--cpus", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--secret-file", "s"];
        let folder = r"'my runs/it'\''s'";
        let repeated = "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --secret-file s";
        assert_eq!(command(&flags, false), format!("{folder} {repeated}"));
        assert_eq!(command(&flags, true), folder);
        assert_eq!(command(&["--gpus", "3", "--oversubscribe"], false), format!("{folder} --gpus 3 --oversubscribe"));
    }
}
