//! The collectives of a group of GPUs.

use std::time::Duration;

use burn::tensor::Tensor;

use super::Topology;
use super::device::{Elements, Launcher};
use super::fault::fault_error;
use super::inter_host::{InterHost, all_reduce_on_cpu};
use super::layout::{WireType, phase};
use super::plan::{self, DeviceCall};
use super::protocol::Kernel;
use super::route::{self, DeviceBackend, Route};
use super::sequence::{HostStep, Launch, LaunchConstants, Sequence, host_steps};
use super::side_stream::SideStream;
use super::stream_event::StreamEvent;
use super::window::Windows;
use crate::Communicator;
use crate::error::{CommError, ErrorKind, Result};
use crate::process::Process;
use crate::transport::ABORT_REASON_TIMEOUT;

/// Options of a [`DeviceGroup`].
#[derive(Clone, Copy, Debug)]
pub struct DeviceGroupOptions {
    /// The backend that the user asks for.
    pub backend: DeviceBackend,
    /// Expected largest number of elements of a call. It determines the size of the slots. A longer call needs several launches.
    pub elements: usize,
    /// Type of the elements on the wire.
    pub wire: WireType,
    /// Whether kernels wait for each other on the device even if ranks share the device. Each wait then takes milliseconds,
    /// since the driver must switch between processes. For tests of the kernels on a single GPU.
    pub device_barrier: bool,
}

/// One GPU per rank, and the connections between them: a `ProcessGroup` for GPUs. A call returns when it is enqueued. The
/// returned tensor is its `Work`: later operations of the calling thread on the tensor wait on the device. All ranks make the
/// same calls in the same order, as with a [`Communicator`].
///
/// If ranks share a GPU, or data goes between hosts over TCP, the host waits inside the call.
pub struct DeviceGroup {
    pub(super) launcher: Launcher,
    pub(super) windows: Option<Windows>,
    pub(super) constants: LaunchConstants,
    pub(super) sequence: Sequence,
    pub(super) route: Route,
    /// Why the preferred route could not be used.
    pub(super) fallback_reason: Option<String>,
    /// Set if windows do not reach all ranks.
    pub(super) inter_host: Option<InterHost>,
    /// The ranks of this host that share windows; the whole job if all ranks are on one host.
    pub(super) local: Communicator,
    pub(super) comm: Communicator,
    pub(super) topology: Topology,
    pub(super) wire: WireType,
    pub(super) limit: Duration,
}

impl DeviceGroup {
    /// Describes the route for the user, and why the preferred route could not be used.
    pub fn description(&self) -> String {
        let mut text = self.route.describe(&self.topology);
        if let Some(cause) = &self.fallback_reason {
            text += &format!(", as {cause}");
        }
        text
    }

    /// Returns the host and the GPU of every rank.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns the type of the elements on the wire.
    pub fn wire(&self) -> WireType {
        self.wire
    }

    pub(super) fn process(&self) -> &Process {
        &self.comm.inner.process
    }

    pub(super) fn windows(&self) -> Result<&Windows> {
        self.windows.as_ref().ok_or_else(|| CommError::system("the group is closed"))
    }

    /// Returns an error if a kernel of this rank has reported a fault, or if the job has ended. Does not wait for work that still
    /// runs.
    ///
    /// # Errors
    /// The error of the fault, which names the rank that is missing or makes another call; or the error that ended the job.
    pub fn check(&self) -> Result<()> {
        let faults = self.windows()?.faults();
        if faults.is_empty() {
            self.process().abort.check()?;
            self.launcher
                .side_stream()
                .map_or(Ok(()), SideStream::check)
                .map_err(|error| self.process().fail(error))?;
            let checked = self.inter_host.as_ref().map_or(Ok(()), InterHost::check);
            return checked.map_err(|error| self.process().fail(error));
        }
        let error = fault_error(&faults, self.local.ranks(), self.process().rank, self.limit);
        Err(match error {
            Some(error) => self.process().fail(error),
            // The job was aborted while a kernel waited.
            None => self
                .process()
                .abort
                .wait(ABORT_REASON_TIMEOUT)
                .unwrap_or_else(|| CommError::new(ErrorKind::Aborted, "the job was aborted while GPUs waited")),
        })
    }

    /// Waits until all calls so far are done on this rank's GPU.
    ///
    /// # Errors
    /// As [`check`](Self::check), and errors of the device.
    pub fn synchronize(&self) -> Result<()> {
        let done = self.launcher.synchronize();
        self.check()?;
        done.map_err(|error| self.process().fail(error))
    }

    /// Ends the group: waits for the GPU and for the other ranks, and frees the windows. All ranks call this function together.
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

    /// Multiplies each value of `tensors` by `scale`, and sums over all ranks. Returns the sums of all tensors, concatenated.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn all_reduce(&mut self, tensors: Vec<Tensor<1>>, scale: f32) -> Result<Tensor<1>> {
        self.ordered(|this| {
            let sources = this.elements(tensors)?;
            let len = sources.iter().map(|source| source.len).sum::<usize>();
            this.all_reduce_by(this.all_reduce_kernel(len, this.wire), this.wire, sources, len, scale)
        })
    }

    /// Returns whether kernels run on a stream beside the calling thread's stream. Only then can calls be captured as part of a
    /// CUDA graph, and [`start_all_reduce`](Self::start_all_reduce) works.
    pub fn runs_on_side_stream(&self) -> bool {
        self.launcher.side_stream().is_some()
    }

    /// Does what [`all_reduce`](Self::all_reduce) does, beside the calling thread's later work. The thread must not use the sum
    /// before it has called [`join`](Self::join).
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn start_all_reduce(&mut self, tensors: Vec<Tensor<1>>, scale: f32) -> Result<Tensor<1>> {
        debug_assert!(
            self.runs_on_side_stream(),
            "the group's kernels run on the calling thread's stream or on one of cubecl's"
        );
        let sources = self.elements(tensors)?;
        let len = sources.iter().map(|source| source.len).sum::<usize>();
        self.all_reduce_by(self.all_reduce_kernel(len, self.wire), self.wire, sources, len, scale)
    }

    /// Orders the calling thread's later work after all calls so far. Does not wait.
    pub fn join(&mut self) {
        if let Some(side_stream) = self.launcher.side_stream() {
            side_stream.join();
        }
    }

    /// Does what [`all_reduce`](Self::all_reduce) does, for tensors that another thread has written. That thread recorded the
    /// event `after` behind its writes. A thread that uses the sum must wait for the returned event, or for a later event of
    /// this group. For groups without a [side stream](Self::runs_on_side_stream).
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn all_reduce_after(
        &mut self,
        tensors: Vec<Tensor<1>>,
        scale: f32,
        after: &StreamEvent,
    ) -> Result<(Tensor<1>, StreamEvent)> {
        self.launcher.wait(after);
        let sources = self.elements(tensors)?;
        let len = sources.iter().map(|source| source.len).sum::<usize>();
        let sum = self.all_reduce_by(self.all_reduce_kernel(len, self.wire), self.wire, sources, len, scale)?;
        Ok((sum, self.launcher.record()))
    }

    fn all_reduce_kernel(&self, len: usize, wire: WireType) -> Kernel {
        let world_size = self.constants.world_size();
        match self.route {
            Route::Kernels { .. } => plan::all_reduce(len as u64, wire, world_size),
            // With NCCL the kernels only copy: to the slot, which NCCL sums in place, and back.
            _ if world_size == 1 => Kernel::Broadcast,
            _ => Kernel::TwoShot,
        }
    }

    /// Returns all ranks' `tensors`, concatenated in rank order. Works over every route, and always sends f32, whatever the
    /// group's [`wire`](Self::wire) is. Bits do not change, with one exception: over routes without
    /// [`all_gather`](Self::all_gather), a negative zero may become a positive zero.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn all_gather_f32(&mut self, tensors: Vec<Tensor<1>>) -> Result<Tensor<1>> {
        let each: usize = tensors.iter().map(|tensor| tensor.dims()[0]).sum();
        let (world_size, rank, wire) = (self.comm.world_size(), self.comm.rank(), WireType::F32);
        if let Route::Kernels { .. } = self.route {
            let call = DeviceCall { kernel: Kernel::AllGather, wire, elements: each as u64, root: 0 };
            return self.ordered(|this| {
                let sources = this.elements(tensors)?;
                this.run(call, sources, each * world_size, 1.0)
            });
        }
        // Gathers by a sum: each rank's array holds its tensors in its own part, and zeros elsewhere.
        let zeros = |ranks: usize| (ranks > 0).then(|| Tensor::zeros([ranks * each], self.launcher.device()));
        let padded: Vec<_> = zeros(rank).into_iter().chain(tensors).chain(zeros(world_size - rank - 1)).collect();
        self.ordered(|this| {
            let (sources, len) = (this.elements(padded)?, each * world_size);
            this.all_reduce_by(this.all_reduce_kernel(len, wire), wire, sources, len, 1.0)
        })
    }

    /// Runs a call whose tensors this thread has written, and whose result this thread uses.
    fn ordered(&mut self, call: impl FnOnce(&mut Self) -> Result<Tensor<1>>) -> Result<Tensor<1>> {
        if self.runs_on_side_stream() {
            let tensor = call(self)?;
            self.join();
            return Ok(tensor);
        }
        self.launcher.wait(&StreamEvent::record(self.launcher.device()));
        let tensor = call(self)?;
        self.launcher.record().wait();
        Ok(tensor)
    }

    /// Does what [`all_reduce`](Self::all_reduce) does, with a kernel that the caller chooses. For measurements.
    ///
    /// # Errors
    /// As [`check`](Self::check), and [`Usage`](ErrorKind::Usage) if the group cannot use the kernel.
    pub fn all_reduce_with(&mut self, kernel: Kernel, tensors: Vec<Tensor<1>>, scale: f32) -> Result<Tensor<1>> {
        if !matches!((kernel, &self.route), (Kernel::OneShot | Kernel::TwoShot, Route::Kernels { .. })) {
            let error = CommError::usage(format!("{} is not an all-reduce of this group", kernel.name()));
            return Err(self.process().fail(error));
        }
        self.ordered(|this| {
            let sources = this.elements(tensors)?;
            let len = sources.iter().map(|source| source.len).sum();
            this.all_reduce_by(kernel, this.wire, sources, len, scale)
        })
    }

    fn all_reduce_by(
        &mut self,
        kernel: Kernel,
        wire: WireType,
        sources: Vec<Elements>,
        len: usize,
        scale: f32,
    ) -> Result<Tensor<1>> {
        let root = if kernel == Kernel::Broadcast { self.constants.rank } else { 0 };
        let call = DeviceCall { kernel, wire, elements: len as u64, root };
        self.run(call, sources, len, scale)
    }

    /// Sums `tensor` over all ranks and returns this rank's part. All parts have the same length. Works inside one host only.
    ///
    /// # Errors
    /// As [`check`](Self::check), and [`Usage`](ErrorKind::Usage) for wrong lengths or several hosts.
    pub fn reduce_scatter(&mut self, tensor: Tensor<1>, scale: f32) -> Result<Tensor<1>> {
        let (world_size, len) = (self.within_host("reduce_scatter")?, tensor.dims()[0]);
        if !len.is_multiple_of(world_size) {
            let text = format!("reduce_scatter of {len} elements over {world_size} ranks: the parts are not equal");
            return Err(self.process().fail(CommError::usage(text)));
        }
        let each = len / world_size;
        let call = DeviceCall { kernel: Kernel::ReduceScatter, wire: self.wire, elements: each as u64, root: 0 };
        self.run_one(call, tensor, each, scale)
    }

    /// Returns all ranks' `tensor`s, in rank order. Works inside one host only. With [`WireType::F32`] bits do not change.
    ///
    /// # Errors
    /// As [`check`](Self::check), and [`Usage`](ErrorKind::Usage) for several hosts.
    pub fn all_gather(&mut self, tensor: Tensor<1>) -> Result<Tensor<1>> {
        let (world_size, each) = (self.within_host("all_gather")?, tensor.dims()[0]);
        let call = DeviceCall { kernel: Kernel::AllGather, wire: self.wire, elements: each as u64, root: 0 };
        self.run_one(call, tensor, each * world_size, 1.0)
    }

    /// Returns rank `root`'s `tensor`. Works inside one host only. With [`WireType::F32`] bits do not change.
    ///
    /// # Errors
    /// As [`check`](Self::check), and [`Usage`](ErrorKind::Usage) for a wrong root or several hosts.
    pub fn broadcast(&mut self, tensor: Tensor<1>, root: usize) -> Result<Tensor<1>> {
        let len = tensor.dims()[0];
        if root >= self.within_host("broadcast")? {
            return Err(self.process().fail(CommError::usage(format!("broadcast: there is no rank {root}"))));
        }
        let call = DeviceCall { kernel: Kernel::Broadcast, wire: self.wire, elements: len as u64, root };
        self.run_one(call, tensor, len, 1.0)
    }

    /// Runs a call of this thread with one tensor.
    fn run_one(&mut self, call: DeviceCall, tensor: Tensor<1>, len: usize, scale: f32) -> Result<Tensor<1>> {
        self.ordered(|this| {
            let sources = this.elements(vec![tensor])?;
            this.run(call, sources, len, scale)
        })
    }

    fn within_host(&self, what: &str) -> Result<usize> {
        match self.route {
            Route::Kernels { .. } => Ok(self.constants.world_size()),
            _ => Err(self.process().fail(CommError::usage(format!("{what} on GPUs works within one host only")))),
        }
    }

    fn elements(&self, tensors: Vec<Tensor<1>>) -> Result<Vec<Elements>> {
        self.launcher.elements(tensors).map_err(|error| self.process().fail(error))
    }

    fn run(&mut self, call: DeviceCall, sources: Vec<Elements>, len: usize, scale: f32) -> Result<Tensor<1>> {
        self.check()?;
        let lengths: Vec<usize> = sources.iter().map(|source| source.len).collect();
        let launches = self.sequence.launches(&self.constants, &call, &lengths, scale);
        let launches = launches.map_err(|error| self.process().fail(error))?;
        let output = self.launcher.allocate(len);
        for launch in launches {
            self.chunk(&call, launch, &output, &sources).map_err(|error| self.process().fail(error))?;
        }
        Ok(self.launcher.tensor(output))
    }

    fn chunk(&self, call: &DeviceCall, mut launch: Launch, output: &Elements, sources: &[Elements]) -> Result<()> {
        let (range, ordered) = (launch.reduced(), launch.clone());
        let mut go = |phases: u32| {
            launch.params.phases = phases;
            self.launcher.launch(&launch, output, sources)
        };
        if let Some(inter_host) = &self.inter_host {
            let (before, after) = route::phases_around_sum(call.kernel);
            let window = &self.windows()?.own;
            go(before)?;
            match inter_host {
                InterHost::Nccl(nccl) => {
                    let order = |phase| self.launcher.launch(&Sequence::order(&ordered, phase), output, &[]);
                    let (at, count) = (window.address() + range.start as u64, range.len() / call.wire.size());
                    order(phase::PACK)?;
                    nccl.all_reduce(at, count, call.wire, self.constants.host_words, ordered.launch_number)?;
                    order(phase::GATHER)?;
                }
                InterHost::Cpu(comm) => {
                    self.launcher.synchronize()?;
                    self.check()?;
                    all_reduce_on_cpu(comm, window, range, call.wire)?;
                }
            }
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
        // No barrier follows the last step of `host_steps`: the next call waits for the device, and so for this call's reads,
        // before its first barrier.
        Ok(())
    }
}

impl Drop for DeviceGroup {
    /// Leaks the windows unless [`close`](Self::close) has freed them: other ranks may still read this rank's memory, and a
    /// rank that fails alone must not wait for the other ranks. The memory is freed when the process ends.
    fn drop(&mut self) {
        std::mem::forget(self.windows.take());
    }
}
