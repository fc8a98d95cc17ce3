//! The collectives of a group of GPUs.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{Device, Tensor};

use super::Topology;
use super::device::{Elements, Launcher};
use super::gpu::Gpu;
use super::inter_host::InterHost;
use super::layout::{PAGE, WireType, fault};
use super::plan::{self, DeviceCall};
use super::protocol::Kernel;
use super::route::{self, DeviceBackend, Route};
use super::sequence::{HostStep, Launch, LaunchContext, Sequence, host_steps};
use super::stream_event::StreamEvent;
use super::topology;
use super::window::{Windows, agree};
use crate::Communicator;
use crate::error::{CommError, ErrorKind, Result, ranks};
use crate::process::Process;
use crate::transport::REASON_LIMIT;

/// How a group is made.
#[derive(Clone, Copy, Debug)]
pub struct DeviceGroupOptions {
    /// What carries the data.
    pub backend: DeviceBackend,
    /// Most elements that a call has: slots are made for it, and longer ones are cut.
    pub elements: usize,
    /// What travels.
    pub wire: WireType,
    /// Has kernels meet on the device even where ranks share it: each topology then takes until the driver switches between
    /// processes, milliseconds. For checks of the kernels on a single GPU.
    pub meet_on_device: bool,
}

/// Largest slot; longer arrays are cut into launches.
const MOST: usize = 64 << 20;

/// GPUs, one a rank, and what connects them. A call returns when it is enqueued: the tensor that it gives is the handle, and
/// whatever the calling thread does with it waits on the device. All ranks make the same calls in the same order, as with a [`Communicator`].
///
/// Where ranks share a GPU, or data goes through NCCL or between hosts, the host waits inside the call.
pub struct DeviceGroup {
    launcher: Launcher,
    windows: Option<Windows>,
    context: LaunchContext,
    sequence: Sequence,
    route: Route,
    /// Where windows do not reach all ranks.
    inter_host: Option<InterHost>,
    /// Ranks of this host that share windows; the job's where all are on one.
    local: Communicator,
    comm: Communicator,
    topology: Topology,
    wire: WireType,
    limit: Duration,
}

impl DeviceGroup {
    /// Meets the other ranks of `comm`, all of which call this; each has put its work on `device`.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) on every rank: what was asked for is not possible here, and why.
    pub fn new(comm: &Communicator, device: &Device, options: DeviceGroupOptions) -> Result<Self> {
        Self::meet(comm, device, options).map_err(|error| comm.inner.process.fail(error))
    }

    fn meet(comm: &Communicator, device: &Device, options: DeviceGroupOptions) -> Result<Self> {
        let opened = Launcher::new(device).and_then(|launcher| Ok((Gpu::open(launcher.index)?, launcher)));
        let (gpu, launcher) = agree(opened, comm)?;
        let topology = topology::gather(&gpu, comm)?;
        // the library is large: it is loaded where it may be needed
        let nccl = match Route::may_need_nccl(options.backend, options.wire, options.elements, &topology) {
            true => topology::nccl_everywhere(comm)?,
            false => Err("NCCL was not looked for".to_owned()),
        };
        let nccl = nccl.as_ref().copied().map_err(String::as_str);
        let mut route = Route::choose(options.backend, options.wire, options.elements, &topology, nccl)
            .map_err(|no| CommError::setup(no.cause).hint(no.hint))?;
        if let Route::Kernels { on_host } = &mut route {
            *on_host &= !options.meet_on_device;
        }
        let slot = (options.elements * options.wire.size()).clamp(PAGE, MOST).next_multiple_of(PAGE);
        let limit = comm.inner.process.timeout;
        let local = match &route {
            Route::Hierarchical { .. } => {
                let mut own = None;
                for host in topology.hosts() {
                    own = comm.group(&host)?.or(own);
                }
                own.ok_or_else(|| CommError::setup("this rank is on no host"))?
            }
            _ => comm.clone(),
        };
        let windows = match &route {
            Route::Nccl => agree(Windows::alone(&gpu, slot), comm)?,
            _ => Windows::shared(&gpu, slot, &local)?,
        };
        let context = windows.context(limit);
        let abort = Arc::downgrade(&windows.abort());
        comm.inner.process.abort.on_raise(move || {
            if let Some(words) = abort.upgrade() {
                words.set(0, 1);
            }
        });
        let mut group = Self {
            launcher,
            windows: Some(windows),
            context,
            sequence: Sequence::default(),
            inter_host: None,
            route,
            local,
            comm: comm.clone(),
            topology,
            wire: options.wire,
            limit,
        };
        group.probe()?;
        group.inter_host = InterHost::new(&group.route, &group.topology, comm, &gpu)?;
        Ok(group)
    }

    /// How data goes, for the screen.
    pub fn description(&self) -> String {
        self.route.describe(&self.topology)
    }

    /// Where the ranks are.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// What travels unless a call says otherwise.
    pub fn wire(&self) -> WireType {
        self.wire
    }

    fn process(&self) -> &Process {
        &self.comm.inner.process
    }

    fn windows(&self) -> Result<&Windows> {
        self.windows.as_ref().ok_or_else(|| CommError::system("the group is closed"))
    }

    /// Fails if a kernel of this rank has given up, or the job is over. Looks only: says nothing of what is still running.
    ///
    /// # Errors
    /// Names the rank that is missing, or that calls something else.
    pub fn check(&self) -> Result<()> {
        let faults = self.windows()?.faults();
        let name = |peer: usize| self.local.ranks().get(peer).copied().unwrap_or(peer);
        let me = self.process().rank;
        let of = |kind: u64| -> Vec<usize> { faults.iter().filter(|f| f.kind == kind).map(|f| name(f.peer)).collect() };
        let (missing, differing) = (of(fault::MISSING), of(fault::DIFFERS));
        let launch = faults.first().map_or(0, |fault| fault.epoch);
        if !differing.is_empty() {
            let text =
                format!("{} and rank {me} make different calls as launch #{launch} on their GPUs", ranks(&differing));
            let error = CommError::new(ErrorKind::Mismatch, text)
                .hint("every rank must call the same collectives in the same order, with the same lengths and types")
                .blame(differing[0]);
            return Err(self.process().fail(error));
        }
        if !missing.is_empty() {
            let limit = self.limit;
            let text = format!(
                "launch #{launch} on the GPUs: {} did not come within {limit:.1?} (rank {me}'s GPU waits)",
                ranks(&missing)
            );
            return Err(self.process().fail(CommError::new(ErrorKind::Timeout, text).blame(missing[0])));
        }
        if faults.is_empty() {
            return self.process().abort.check();
        }
        let reason = self.process().abort.wait(REASON_LIMIT);
        Err(reason.unwrap_or_else(|| CommError::new(ErrorKind::Aborted, "the job was aborted while GPUs waited")))
    }

    /// Waits until all calls so far are done on this rank's GPU.
    ///
    /// # Errors
    /// As [`check`](Self::check), and those of the device.
    pub fn synchronize(&self) -> Result<()> {
        let done = self.launcher.synchronize();
        self.check()?;
        done.map_err(|error| self.process().fail(error))
    }

    /// Ends the group on all ranks, which call this together: waits for the GPU and for the others, and frees the windows.
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize).
    pub fn close(mut self) -> Result<()> {
        self.synchronize()?;
        if let Some(windows) = self.windows.take() {
            windows.close(&self.local);
        }
        Ok(())
    }

    /// Adds `tensors`, one behind the other and each value times `scale`, up over all ranks.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn all_reduce(&mut self, tensors: Vec<Tensor<1>>, scale: f32) -> Result<Tensor<1>> {
        self.ordered(|this, after| this.all_reduce_after(tensors, scale, after))
    }

    /// [`all_reduce`](Self::all_reduce) of tensors that another thread has written: all of them `after` was made behind. Who
    /// uses the sum has to follow the mark that comes with it, or a later one of this group's.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn all_reduce_after(
        &mut self,
        tensors: Vec<Tensor<1>>,
        scale: f32,
        after: &StreamEvent,
    ) -> Result<(Tensor<1>, StreamEvent)> {
        let sources = self.elements(tensors, after)?;
        let len = sources.iter().map(|source| source.len).sum::<usize>();
        let world = self.context.world();
        let kernel = match self.route {
            Route::Kernels { .. } => plan::all_reduce(len as u64, self.wire, world),
            // for what NCCL adds up the slot is only the way in and out
            _ if world == 1 => Kernel::Broadcast,
            _ => Kernel::TwoShot,
        };
        self.all_reduce_by(kernel, sources, len, scale)
    }

    /// Runs a call whose tensors come from this thread, and whose result is for it.
    fn ordered(
        &mut self,
        call: impl FnOnce(&mut Self, &StreamEvent) -> Result<(Tensor<1>, StreamEvent)>,
    ) -> Result<Tensor<1>> {
        let before = StreamEvent::record(self.launcher.device());
        let (tensor, done) = call(self, &before)?;
        done.wait();
        Ok(tensor)
    }

    /// [`all_reduce`](Self::all_reduce) by a kernel of the caller's choice; for measurements.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn all_reduce_with(&mut self, kernel: Kernel, tensors: Vec<Tensor<1>>, scale: f32) -> Result<Tensor<1>> {
        if !matches!((kernel, &self.route), (Kernel::OneShot | Kernel::TwoShot, Route::Kernels { .. })) {
            return Err(CommError::usage(format!("{} is no all-reduce of this group", kernel.name())));
        }
        self.ordered(|this, after| {
            let sources = this.elements(tensors, after)?;
            let len = sources.iter().map(|source| source.len).sum();
            this.all_reduce_by(kernel, sources, len, scale)
        })
    }

    fn all_reduce_by(
        &mut self,
        kernel: Kernel,
        sources: Vec<Elements>,
        len: usize,
        scale: f32,
    ) -> Result<(Tensor<1>, StreamEvent)> {
        let root = if kernel == Kernel::Broadcast { self.context.rank } else { 0 };
        let call = DeviceCall { kernel, wire: self.wire, elements: len as u64, root };
        self.run(call, sources, len, scale)
    }

    /// This rank's part of the sum of everybody's `tensor`, which is one part for each rank. Inside a host.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn reduce_scatter(&mut self, tensor: Tensor<1>, scale: f32) -> Result<Tensor<1>> {
        let (world, len) = (self.within_host("reduce_scatter")?, tensor.dims()[0]);
        if !len.is_multiple_of(world) {
            let text = format!("reduce_scatter of {len} elements over {world} ranks: the parts are not equal");
            return Err(self.process().fail(CommError::usage(text)));
        }
        let each = len / world;
        let call = DeviceCall { kernel: Kernel::ReduceScatter, wire: self.wire, elements: each as u64, root: 0 };
        self.one(call, tensor, each, scale)
    }

    /// Everybody's `tensor`, in the order of ranks. Inside a host; bits stay as they are with [`WireType::F32`].
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn all_gather(&mut self, tensor: Tensor<1>) -> Result<Tensor<1>> {
        let (world, each) = (self.within_host("all_gather")?, tensor.dims()[0]);
        let call = DeviceCall { kernel: Kernel::AllGather, wire: self.wire, elements: each as u64, root: 0 };
        self.one(call, tensor, each * world, 1.0)
    }

    /// Rank `root`'s `tensor`. Inside a host; bits stay as they are with [`WireType::F32`].
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn broadcast(&mut self, tensor: Tensor<1>, root: usize) -> Result<Tensor<1>> {
        let len = tensor.dims()[0];
        if root >= self.within_host("broadcast")? {
            return Err(self.process().fail(CommError::usage(format!("broadcast: there is no rank {root}"))));
        }
        let call = DeviceCall { kernel: Kernel::Broadcast, wire: self.wire, elements: len as u64, root };
        self.one(call, tensor, len, 1.0)
    }

    /// A call of this thread's with one tensor.
    fn one(&mut self, call: DeviceCall, tensor: Tensor<1>, len: usize, scale: f32) -> Result<Tensor<1>> {
        self.ordered(|this, after| {
            let sources = this.elements(vec![tensor], after)?;
            this.run(call, sources, len, scale)
        })
    }

    fn within_host(&self, what: &str) -> Result<usize> {
        match self.route {
            Route::Kernels { .. } => Ok(self.context.world()),
            _ => Err(self.process().fail(CommError::usage(format!("{what} on GPUs goes within one host only")))),
        }
    }

    fn elements(&self, tensors: Vec<Tensor<1>>, after: &StreamEvent) -> Result<Vec<Elements>> {
        self.launcher.wait(after);
        self.launcher.elements(tensors).map_err(|error| self.process().fail(error))
    }

    fn run(
        &mut self,
        call: DeviceCall,
        sources: Vec<Elements>,
        len: usize,
        scale: f32,
    ) -> Result<(Tensor<1>, StreamEvent)> {
        self.check()?;
        let output = self.launcher.room(len);
        let lengths: Vec<usize> = sources.iter().map(|source| source.len).collect();
        let launches = self.sequence.launches(&self.context, &call, &lengths, scale);
        let launches = launches.ok_or_else(|| CommError::usage("too many tensors for a launch"))?;
        for launch in launches {
            self.chunk(&call, launch, &output, &sources).map_err(|error| self.process().fail(error))?;
        }
        Ok((self.launcher.tensor(output), self.launcher.record()))
    }

    fn chunk(&self, call: &DeviceCall, mut launch: Launch, output: &Elements, sources: &[Elements]) -> Result<()> {
        let range = launch.reduced();
        let mut go = |phases: u32| {
            launch.params.phases = phases;
            self.launcher.launch(&launch, output, sources)
        };
        if let Some(inter_host) = &self.inter_host {
            let (before, after) = route::around(call.kernel);
            go(before)?;
            self.launcher.synchronize()?;
            self.check()?;
            let (window, abort) = (&self.windows()?.own, &self.process().abort);
            inter_host.all_reduce(window, range, call.wire, abort, self.limit)?;
            return go(after);
        }
        let on_host = self.route == Route::Kernels { on_host: true };
        for turn in host_steps(call.kernel, on_host) {
            match turn {
                HostStep::Launch(phases) => go(phases)?,
                HostStep::Barrier => {
                    self.launcher.synchronize()?;
                    self.check()?;
                    self.local.barrier()?;
                }
            }
        }
        // where hosts meet, the wait before the next call's first meeting covers what was read here
        Ok(())
    }

    /// Tries every peer's memory out: stores to it, and loads from it.
    fn probe(&mut self) -> Result<()> {
        if self.context.world() < 2 {
            return Ok(());
        }
        let output = self.launcher.room(1);
        for write in [true, false] {
            let launched = self.launcher.launch(&Sequence::probe(&self.context, write), &output, &[]);
            agree(launched.and_then(|()| self.launcher.synchronize()), &self.local)?;
        }
        let faults = self.windows()?.faults();
        let unreachable = faults.iter().find(|fault| fault.kind == fault::UNREACHABLE).map(|fault| {
            let (me, peer) = (self.process().rank, self.local.ranks()[fault.peer]);
            CommError::setup(format!("rank {me}'s GPU does not read what was written to the memory of rank {peer}'s"))
                .hint("the driver promises peer access that does not work: try parallel.backend = \"nccl\"")
        });
        agree(unreachable.map_or(Ok(()), Err), &self.local)
    }
}

impl Drop for DeviceGroup {
    /// Without [`close`](Self::close) nobody knows whether the others still read this rank's memory, and a rank that fails
    /// alone must not wait for them: the memory stays until the process ends.
    fn drop(&mut self) {
        std::mem::forget(self.windows.take());
    }
}
