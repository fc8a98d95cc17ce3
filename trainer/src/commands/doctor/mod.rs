//! `trainer doctor`: what this machine has for training, what is missing and where it was looked for, and what would be
//! used. It works on any machine: what is not there is a line.

mod machine;
mod peers;
mod report;
mod view;

use self::report::Report;
use crate::cli::DoctorArgs;
use crate::failure::Failure;
use comm::cuda::driver::Driver;

/// Looks around and prints.
///
/// # Errors
/// None but that of the other half of the IPC check, which only another `doctor` asks for.
pub(super) fn run(arguments: &DoctorArgs) -> Result<(), Failure> {
    if let Some(handle) = &arguments.ipc_peer {
        return answer(handle, arguments.gpu);
    }
    let report = Report::collect();
    if arguments.json {
        return super::print_json(&report);
    }
    print!("{}", view::screen(&report));
    Ok(())
}

/// The other process of [`peers::ipc`].
fn answer(handle: &str, gpu: usize) -> Result<(), Failure> {
    let failed = |error: String| Failure::run(error, "this half of the check is started by `trainer doctor`");
    let driver = Driver::load().map_err(|error| failed(report::no_driver(&error)))?;
    let wrong = comm::cuda::driver::probe::ipc_peer(&driver, gpu, handle).map_err(failed)?;
    println!("{wrong}");
    Ok(())
}
