//! Flags of `trainer launch`, also as torchrun and mpirun spell them.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use clap::Args;
use clap::error::ErrorKind;

use super::JobArgs;

/// Flags of `trainer launch`.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// Number of processes on this machine, or on all hosts of -H (default: their slots). auto: one per GPU, or one per core on a
    /// machine without GPUs; gpu: one per GPU; cpu: one per core. torchrun's --nproc-per-node and mpirun's -np work too
    #[arg(long, value_name = "N|auto|gpu|cpu", alias = "nproc-per-node", alias = "np", value_parser = process_count)]
    pub cpus: Option<ProcessCount>,
    /// Folder for the output: DIR/ID/attempt_K/RANK/stdout.log, stderr.log and error.json (default: a temporary folder, kept after
    /// a failure)
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Name of the job: TORCHELASTIC_RUN_ID, and the folder in DIR (default: none)
    #[arg(long, value_name = "ID")]
    pub rdzv_id: Option<String>,
    /// Start a job on this machine only, on a free port. This is the default; torchrun has the flag
    #[arg(long, conflicts_with_all = ["hosts", "hostfile"])]
    pub standalone: bool,
    /// Let all processes use all cores, instead of a share of their own
    #[arg(long)]
    pub no_pin: bool,
    /// Flags about worker processes.
    #[command(flatten)]
    pub job: JobArgs,
    /// The program and its arguments, after `--`
    #[arg(required = true, last = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// The number of processes on a machine. PyTorch: `--nproc-per-node` of torchrun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessCount {
    /// This number.
    Number(usize),
    /// One per GPU, or one per core on a machine without GPUs.
    Auto,
    /// One per GPU.
    Gpus,
    /// One per core.
    Cores,
}

fn process_count(text: &str) -> Result<ProcessCount, String> {
    match text {
        "auto" => Ok(ProcessCount::Auto),
        "gpu" => Ok(ProcessCount::Gpus),
        "cpu" => Ok(ProcessCount::Cores),
        _ => text.parse().map(ProcessCount::Number).map_err(|_| "neither a number nor auto, gpu or cpu".to_owned()),
    }
}

/// Reads the value of `--nnodes`. torchrun also takes a range, and `2:2` is the number 2.
///
/// # Errors
/// The value is not a number, or a range of several numbers.
pub(super) fn nnodes(text: &str) -> Result<usize, String> {
    let number = |text: &str| text.parse::<usize>().map_err(|error| error.to_string());
    let Some((least, most)) = text.split_once(':') else { return number(text) };
    match (number(least)?, number(most)?) {
        (least, most) if least == most => Ok(least),
        (_, most) => Err(format!(
            "the number of machines is fixed here; torchrun's elastic ranges are not supported\n  hint: say --nnodes {most}; \
             after a failure --max-restarts starts all machines again"
        )),
    }
}

/// A flag of another launcher that this program does not have.
#[derive(Debug)]
pub(crate) struct ForeignFlag {
    /// The flag, and why it is refused.
    pub(crate) message: String,
    /// What to use instead.
    pub(crate) hint: &'static str,
}

/// Flags of torchrun without a counterpart, and what to use instead.
const UNSUPPORTED_TORCHRUN_FLAGS: [(&str, &str); 7] = [
    (
        "--rdzv-endpoint",
        "the launchers meet at --master-addr HOST --master-port PORT; each machine has its --node-rank",
    ),
    ("--rdzv-backend", "leave it out: the launchers meet at --master-addr HOST --master-port PORT"),
    ("--rdzv-conf", "leave it out: the launchers wait up to 5 minutes for each other"),
    ("--no-python", "leave it out: the program after `--` may be any program"),
    ("--module", "start the interpreter: -- python -m MODULE"),
    ("--redirects", "leave it out: all output is on the screen and in the files of --log-dir"),
    ("--tee", "leave it out: all output is on the screen and in the files of --log-dir"),
];

/// Converts the flags of `trainer launch` from torchrun's and mpirun's spelling: `--node_rank` is `--node-rank`, and `-np`, which
/// clap takes for `-n p`, is `--np`. Arguments after `--` belong to the program.
///
/// # Errors
/// `-np` without `launch`: it does not say whether processes share the cores or have a GPU each. A flag of torchrun that has no
/// counterpart.
pub(crate) fn normalize_flags(arguments: impl IntoIterator<Item = OsString>) -> Result<Vec<OsString>, ForeignFlag> {
    let mut arguments: Vec<_> = arguments.into_iter().collect();
    let own = own_arguments(&arguments);
    let launches = launches(&arguments);
    // Without `--`, a flag may be one of the program.
    let are_own = launches && own < arguments.len();
    for argument in &mut arguments[..own] {
        match argument.to_str() {
            Some("-np") if launches => *argument = "--np".into(),
            Some("-np") => {
                let hint =
                    "--gpus N starts N processes with a GPU each, --cpus N starts N processes that share the cores";
                return Err(ForeignFlag { message: "-np: unknown flag".to_owned(), hint });
            }
            _ if launches => *argument = with_hyphens(argument),
            _ => {}
        }
        let flag = argument.to_str().and_then(|text| text.split('=').next()).unwrap_or_default();
        if let (true, Some((name, hint))) = (are_own, UNSUPPORTED_TORCHRUN_FLAGS.iter().find(|(name, _)| *name == flag))
        {
            return Err(ForeignFlag {
                message: format!("{name}: this flag of torchrun has no counterpart here"),
                hint,
            });
        }
    }
    Ok(arguments)
}

/// Returns the number of arguments before `--`.
fn own_arguments(arguments: &[OsString]) -> usize {
    arguments.iter().position(|argument| argument == "--").unwrap_or(arguments.len())
}

/// Returns whether the command is `launch`.
fn launches(arguments: &[OsString]) -> bool {
    arguments.get(1).is_some_and(|command| command == "launch")
}

/// Replaces the underscores in the name of a flag by hyphens: `--log_dir=a_b` is `--log-dir=a_b`.
fn with_hyphens(argument: &OsStr) -> OsString {
    let mut bytes = argument.as_bytes().to_vec();
    if bytes.starts_with(b"--") {
        let name = bytes.iter_mut().take_while(|byte| **byte != b'=');
        name.filter(|byte| **byte == b'_').for_each(|byte| *byte = b'-');
    }
    OsString::from_vec(bytes)
}

/// Returns a hint for a mistake in the flags of `trainer launch` if the program is not separated by `--`, as torchrun allows.
pub(crate) fn hint_of(mistake: &clap::Error, arguments: &[OsString]) -> Option<&'static str> {
    let own = own_arguments(arguments);
    let kinds = [ErrorKind::UnknownArgument, ErrorKind::MissingRequiredArgument];
    (launches(arguments) && own == arguments.len() && kinds.contains(&mistake.kind()))
        .then_some("the program and its arguments come after `--`: trainer launch --cpus 4 -- python train.py --lr 0.1")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn parse(line: &str) -> Result<LaunchArgs, String> {
        let words = normalize_flags(line.split_whitespace().map(OsString::from))
            .map_err(|flag| format!("{} {}", flag.message, flag.hint))?;
        match Cli::try_parse_from(&words) {
            Ok(Cli { command: Some(Command::Launch(arguments)), .. }) => Ok(arguments),
            Ok(other) => panic!("{other:?}"),
            Err(mistake) => Err(format!("{}{}", mistake.render(), hint_of(&mistake, &words).unwrap_or_default())),
        }
    }

    #[test]
    fn flags_may_be_spelled_as_torchrun_spells_them() {
        let line = "trainer launch --nproc_per_node=2 --nnodes=2:2 --node_rank 1 --master_addr a_b --master_port 29500 \
                    --max_restarts=3 --log_dir=a_b --rdzv_id x -- python train.py --batch_size 4 --rdzv_endpoint x";
        let found = parse(line).unwrap();
        assert_eq!(found.cpus, Some(ProcessCount::Number(2)));
        let job = &found.job;
        assert_eq!(
            (job.nnodes, job.node_rank, job.master_port, job.max_restarts),
            (Some(2), Some(1), Some(29500), Some(3))
        );
        assert_eq!((job.master_addr.as_deref(), found.rdzv_id.as_deref()), (Some("a_b"), Some("x")));
        assert_eq!(found.log_dir, Some("a_b".into()), "only names of flags change");
        assert_eq!(
            found.program[1..],
            ["train.py", "--batch_size", "4", "--rdzv_endpoint", "x"],
            "the program's are its own"
        );
        for (flags, count) in [
            ("-np 3", ProcessCount::Number(3)),
            ("--cpus 3", ProcessCount::Number(3)),
            ("--standalone --nnodes=1 --nproc-per-node=auto", ProcessCount::Auto),
            ("--nproc_per_node gpu", ProcessCount::Gpus),
            ("--nproc_per_node cpu", ProcessCount::Cores),
        ] {
            assert_eq!(parse(&format!("trainer launch {flags} -- true")).unwrap().cpus, Some(count), "{flags}");
        }
    }

    #[test]
    fn flags_of_torchrun_without_a_counterpart_are_errors_with_a_hint() {
        for (line, cause, hint) in [
            ("launch --nproc_per_node four -- true", "neither a number nor auto", ""),
            ("launch --cpus 2 --nnodes 1:4 -- true", "elastic ranges are not supported", "hint: say --nnodes 4"),
            ("launch --cpus 2 --nnodes x -- true", "invalid digit", ""),
            ("launch --cpus 2 --rdzv_endpoint=a:1 -- true", "--rdzv-endpoint: this flag", "--master-addr HOST"),
            ("launch --cpus 2 --rdzv-backend c10d -- true", "--rdzv-backend: this flag", "--master-addr HOST"),
            ("launch --cpus 2 --no_python -- true", "--no-python: this flag", "any program"),
            ("launch --standalone -H a:2 -- true", "cannot be used with", ""),
            ("launch --nproc_per_node 2 train.py --lr 1", "unexpected argument 'train.py'", "come after `--`"),
            ("launch --nproc_per_node 2 train.py --module x", "unexpected argument 'train.py'", "come after `--`"),
            ("launch --cpus 2", "required arguments", "come after `--`"),
            ("-np 2 --config x", "-np: unknown flag", "--gpus N"),
        ] {
            let said = parse(&format!("trainer {line}")).unwrap_err();
            assert!(said.contains(cause) && said.contains(hint), "{line}: {said}");
        }
        let unknown = parse("trainer launch --cpu 2 -- true").unwrap_err();
        assert!(unknown.contains("--cpus") && !unknown.contains("come after"), "{unknown}");
    }
}
