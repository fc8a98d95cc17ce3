//! The report as text for the screen.

use super::report::{DoctorReport, FoundPart, shown};
use crate::device::{self, Library};
use crate::report::Section;
use crate::report::start_table::start_table;
use crate::text;

/// Returns all sections of the screen.
pub(super) fn screen(report: &DoctorReport) -> String {
    start_table(&[program(report), cpu(report), gpus(report), tools(report), backends(report), choice(report)])
}

fn program(report: &DoctorReport) -> Section {
    let features = if report.features.is_empty() { "none".to_owned() } else { report.features.join(", ") };
    Section::new("program").row("version", report.trainer).row("features", features)
}

fn cpu(report: &DoctorReport) -> Section {
    let cpu = &report.cpu;
    Section::new("cpu")
        .row("model", cpu.model.as_deref().unwrap_or("unknown"))
        .row("cores", cpu.cores)
        .row("kernels", cpu.kernels)
        .row("memory", cpu.memory_bytes.map_or_else(|| "not available on this system".to_owned(), text::bytes))
}

fn gpus(report: &DoctorReport) -> Section {
    let mut section = Section::new("gpu");
    section = match &report.driver {
        FoundPart::Found(driver) => {
            let version = driver.version.as_deref().unwrap_or("of unknown version");
            section.row("driver", format!("{version}, serves CUDA {} ({})", driver.cuda, driver.library))
        }
        FoundPart::Missing { missing } => section.row("driver", format!("none: {missing}")),
    };
    if let Some(clause) = &report.visible {
        section = section.row("visible", clause);
    }
    for facts in &report.gpus {
        let what =
            format!("{}, {}, memory check: {}", device::describe(&facts.gpu), facts.gpu.uuid, facts.memory_check);
        section = section.row(format!("gpu {}", facts.gpu.index), what);
    }
    if report.gpus.is_empty() {
        section = section.row("gpus", "none");
    }
    for peer in &report.peers {
        let says = if peer.driver_says { "yes" } else { "no" };
        section =
            section.row(format!("peer {}>{}", peer.from, peer.to), format!("{} (the driver says {says})", peer.check));
    }
    section.row("ipc", &report.ipc)
}

fn library(found: &FoundPart<Library>) -> String {
    match found {
        FoundPart::Found(library) => {
            let version = library.version.as_deref().unwrap_or("unknown version");
            format!("{version} ({}, {})", library.name, shown(library.path.as_ref()))
        }
        FoundPart::Missing { missing } => format!("none: {missing}"),
    }
}

fn tools(report: &DoctorReport) -> Section {
    let headers = match &report.headers {
        FoundPart::Found(headers) => headers.path.display().to_string(),
        FoundPart::Missing { missing } => format!("none: {missing}"),
    };
    let mpi = match &report.mpi {
        FoundPart::Found(mpi) => {
            let version = mpi.version.as_deref().unwrap_or("unknown version");
            format!("{version}, {} ({})", mpi.threads, mpi.path.display())
        }
        FoundPart::Missing { missing } => format!("none: {missing}"),
    };
    let section = Section::new("libraries").row("nvrtc", library(&report.nvrtc));
    let section = match &report.versions {
        Some(refused) => section.row("versions", refused),
        None => section,
    };
    section.row("headers", headers).row("compiler", &report.compiler).row("nccl", library(&report.nccl)).row("mpi", mpi)
}

fn backends(report: &DoctorReport) -> Section {
    report.backends.iter().fold(Section::new("backends"), |section, backend| {
        let has = if backend.compiled { "yes" } else { "no" };
        section.row(backend.name, format!("{has}: {}", backend.note))
    })
}

fn choice(report: &DoctorReport) -> Section {
    Section::new("would use")
        .row("device", &report.would_use.device)
        .row("why", &report.would_use.why)
        .row("gradients", &report.would_use.gradients)
}
