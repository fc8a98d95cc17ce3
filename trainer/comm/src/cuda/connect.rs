//! Connects the GPUs of all ranks: chooses a route and tests it. If the backend is `auto` and the test fails, tries the next
//! route.

use std::sync::Arc;

use burn::tensor::Device;

use super::device::Launcher;
use super::driver::Context;
use super::gpu;
use super::group::{DeviceGroup, DeviceGroupOptions};
use super::inter_host::InterHost;
use super::layout::{PAGE, fault, word};
use super::route::{DeviceBackend, Route};
use super::sequence::Sequence;
use super::topology::{self, Topology};
use super::window::{Windows, agree};
use crate::Communicator;
use crate::error::{CommError, ErrorKind, Result};

/// Largest slot in bytes. A longer array needs several launches.
const MOST: usize = 64 << 20;

/// Result of [`DeviceGroup::connect`].
pub enum Connected {
    /// The GPUs are connected.
    Group(Box<DeviceGroup>),
    /// The backend is `auto`, and no route between the GPUs works: values must go through host memory.
    ThroughHost {
        /// Why no route works.
        cause: String,
    },
}

/// The state of one rank while the ranks connect their GPUs.
struct RouteNegotiation<'a> {
    comm: &'a Communicator,
    device: &'a Device,
    gpu: Arc<Context>,
    topology: Topology,
    options: DeviceGroupOptions,
}

impl DeviceGroup {
    /// Does what [`connect`](Self::connect) does, and fails if values must go through host memory.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) on every rank if there is no route.
    pub fn new(comm: &Communicator, device: &Device, options: DeviceGroupOptions) -> Result<Self> {
        match Self::connect(comm, device, options)? {
            Connected::Group(group) => Ok(*group),
            Connected::ThroughHost { cause } => {
                let error = CommError::setup(format!("no route between the ranks' GPUs: {cause}"))
                    .hint("install NCCL 2 (libnccl.so.2), or use parallel.backend = \"shm\" or \"tcp\"");
                Err(comm.inner.process.fail(error))
            }
        }
    }

    /// Connects the GPUs of all ranks of `comm`. All ranks call this function together, each with its own `device`. With
    /// [`DeviceBackend::Auto`] the routes are tried in this order: the kernels, NCCL, host memory.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) on every rank if the backend that the user asked for does not work between these GPUs.
    pub fn connect(comm: &Communicator, device: &Device, options: DeviceGroupOptions) -> Result<Connected> {
        RouteNegotiation::new(comm, device, options)
            .and_then(|negotiation| negotiation.connect())
            .map_err(|error| comm.inner.process.fail(error))
    }
}

impl<'a> RouteNegotiation<'a> {
    fn new(comm: &'a Communicator, device: &'a Device, options: DeviceGroupOptions) -> Result<Self> {
        let gpu = agree(Launcher::new(device).and_then(|launcher| gpu::open(launcher.index)), comm)?;
        let topology = topology::gather(&gpu, comm)?;
        Ok(Self { comm, device, gpu, topology, options })
    }

    fn connect(&self) -> Result<Connected> {
        let Self { comm, topology, options, .. } = self;
        let auto = options.backend == DeviceBackend::Auto;
        // The library is large, so it is loaded only if it may be needed.
        let nccl = match Route::may_need_nccl(options.backend, options.wire, options.elements, topology) {
            true => topology::nccl_everywhere(comm)?,
            false => Err("NCCL was not looked for".to_owned()),
        };
        let nccl = nccl.as_ref().copied().map_err(String::as_str);
        let mut route = match Route::choose(options.backend, options.wire, options.elements, topology, nccl) {
            Ok(route) => route,
            Err(no) if auto => return Ok(Connected::ThroughHost { cause: no.cause }),
            Err(no) => return Err(CommError::setup(no.cause).hint(no.hint)),
        };
        let mut causes: Vec<String> = Vec::new();
        loop {
            let error = match self.connect_route(&route) {
                Ok(mut group) => {
                    group.fallback_reason = (!causes.is_empty()).then(|| causes.join("; "));
                    return Ok(Connected::Group(Box::new(group)));
                }
                // All ranks get a `Setup` error together, so all ranks continue with the same next route.
                Err(error) if auto && error.kind == ErrorKind::Setup => error,
                Err(error) => return Err(error),
            };
            causes.push(error.message);
            let next = match route {
                Route::Nccl => Err(String::new()),
                _ => {
                    let nccl = topology::nccl_everywhere(comm)?;
                    Route::nccl(topology, nccl.as_ref().copied().map_err(String::as_str))
                }
            };
            route = match next {
                Ok(route) => route,
                Err(cause) => {
                    causes.extend((!cause.is_empty()).then_some(cause));
                    return Ok(Connected::ThroughHost { cause: causes.join("; ") });
                }
            };
        }
    }

    /// Connects the GPUs by a route, and tests it.
    ///
    /// # Errors
    /// Every rank returns the error of the lowest rank that failed.
    fn connect_route(&self, route: &Route) -> Result<DeviceGroup> {
        let Self { comm, topology, options, .. } = self;
        let mut route = route.clone();
        if let Route::Kernels { on_host } = &mut route {
            *on_host &= !options.device_barrier;
        }
        let local = match &route {
            Route::Hierarchical { .. } => {
                let mut own = None;
                for host in topology.hosts() {
                    own = comm.group(&host)?.or(own);
                }
                own.ok_or_else(|| CommError::setup("this rank is on no host"))?
            }
            _ => (*comm).clone(),
        };
        // The ranks of another host may have failed.
        let mut group = agree(self.inside(route, local), comm)?;
        group.inter_host = agree(InterHost::new(&group.route, topology, comm, &self.gpu), comm)?;
        Ok(group)
    }

    /// Shares windows between the ranks of `local`, and tests them.
    fn inside(&self, route: Route, local: Communicator) -> Result<DeviceGroup> {
        let Self { comm, device, gpu, topology, options } = self;
        let slot = (options.elements * options.wire.size()).clamp(PAGE, MOST).next_multiple_of(PAGE);
        let limit = comm.inner.process.timeout;
        let windows = match &route {
            Route::Nccl => agree(Windows::alone(gpu, slot), &local)?,
            _ => Windows::shared(gpu, slot, &local)?,
        };
        let launcher = Launcher::new(device).and_then(|launcher| match route {
            Route::Kernels { on_host: false } => launcher.with_side_stream(gpu),
            _ => Ok(launcher),
        });
        let constants = windows.constants(limit);
        let host_words = Arc::downgrade(&windows.host_words());
        comm.inner.process.abort.on_raise(move || {
            if let Some(words) = host_words.upgrade() {
                words.set(word::ABORT, 1);
                // NCCL's stream waits for this word. The value is above every launch's number. A launch that runs now may set its
                // own number again; the launches after it see the abort, and set theirs.
                words.set(word::PACKED, u64::MAX >> 1);
            }
        });
        let mut group = DeviceGroup {
            launcher: agree(launcher, &local)?,
            windows: Some(windows),
            constants,
            sequence: Sequence::default(),
            inter_host: None,
            route,
            fallback_reason: None,
            local,
            comm: (*comm).clone(),
            topology: topology.clone(),
            wire: options.wire,
            limit,
        };
        group.probe()?;
        Ok(group)
    }
}

impl DeviceGroup {
    /// Tests access to every peer's memory: stores to the memory, and loads from it.
    fn probe(&mut self) -> Result<()> {
        if self.constants.world_size() < 2 {
            return Ok(());
        }
        let output = self.launcher.allocate(1);
        for write in [true, false] {
            let launched = self.launcher.launch(&Sequence::probe(&self.constants, write), &output, &[]);
            agree(launched.and_then(|()| self.launcher.synchronize()), &self.local)?;
        }
        let faults = self.windows()?.faults();
        let unreachable = faults.iter().find(|fault| fault.kind == fault::UNREACHABLE).map(|fault| {
            let (me, peer) = (self.process().rank, self.local.ranks()[fault.peer]);
            CommError::setup(format!("rank {me}'s GPU does not read what was written to the memory of rank {peer}'s"))
                .hint("the driver reports peer access that does not work: try parallel.backend = \"nccl\"")
        });
        agree(unreachable.map_or(Ok(()), Err), &self.local)
    }
}
