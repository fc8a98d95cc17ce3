//! `trainer doctor`: reports the parts of this machine that training uses, the missing parts with the places that were
//! searched, and the devices that a run would use. The command works on any machine: a missing part is a line of the report,
//! not an error.

mod child;
mod machine;
mod peers;
mod report;
mod view;

use self::report::DoctorReport;
use crate::cli::DoctorArgs;
use crate::console;
use crate::failure::Failure;
use comm::cuda::driver::Driver;

/// Examines the machine and prints the report.
///
/// # Errors
/// Only the two checks that another `doctor` process starts (`--ipc-peer`, `--mpi-threads`) can fail.
pub(super) fn run(arguments: &DoctorArgs) -> Result<(), Failure> {
    if let Some(handle) = &arguments.ipc_peer {
        return answer(handle, arguments.gpu);
    }
    if arguments.mpi_threads {
        return answer_mpi();
    }
    let report = DoctorReport::collect();
    if arguments.json {
        return super::print_json(&report);
    }
    console::print(view::screen(&report));
    Ok(())
}

/// Runs as the second process of the check [`peers::ipc`]: opens the memory of `handle` and prints the number of wrong values.
fn answer(handle: &str, gpu: usize) -> Result<(), Failure> {
    let failed = |error: String| Failure::run(error, "this half of the check is started by `trainer doctor`");
    let driver = Driver::load().map_err(|error| failed(report::no_driver(&error)))?;
    let wrong = comm::cuda::driver::probe::ipc_peer(&driver, gpu, handle).map_err(failed)?;
    console::print(wrong);
    Ok(())
}

/// Runs as the child process of the MPI check in [`machine`]: initializes MPI and prints its thread support.
#[cfg(feature = "mpi")]
fn answer_mpi() -> Result<(), Failure> {
    let support = comm::mpi_thread_support().ok_or_else(|| Failure::run("MPI starts only once", "report this"))?;
    console::print(support);
    Ok(())
}

#[cfg(not(feature = "mpi"))]
fn answer_mpi() -> Result<(), Failure> {
    Err(Failure::usage("this build has no MPI", "build with --features mpi"))
}
