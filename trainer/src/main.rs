//! `trainer`, the program with the networks and data sets of this repository.

fn main() -> std::process::ExitCode {
    trainer::main()
}
