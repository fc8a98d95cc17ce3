//! All-reduce of gradients that stay on the GPU.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use models::ParameterInfo;
use parking_lot::Mutex;

use super::{
    buckets,
    reducer::{DeviceCollectives, DeviceReduction},
};
use crate::console;
use crate::{
    config::{Backend, Compression, RunPlan},
    device::StreamEvent,
    failure::Failure,
};
use comm::{
    CommError, Communicator,
    cuda::{self, Connected, DeviceGroup, DeviceGroupOptions, layout::WireType},
};

/// Connects the ranks' GPUs. Returns `None` if gradients are reduced in host memory: the run is on the CPU, `parallel.backend`
/// is a CPU backend, or the backend is `auto` and no route between the GPUs works.
///
/// # Errors
/// The requested backend does not work between these GPUs.
pub(super) fn connect(
    device: &Device,
    parameters: &[ParameterInfo],
    plan: &RunPlan,
    comm: &Communicator,
) -> Result<Option<DeviceReduction>, Failure> {
    let parallel = &plan.parallel;
    let backend = match parallel.backend {
        Backend::Auto => cuda::DeviceBackend::Auto,
        Backend::Cuda => cuda::DeviceBackend::Kernels,
        Backend::Nccl => cuda::DeviceBackend::Nccl,
        Backend::Shm | Backend::Tcp | Backend::Mpi => return Ok(None),
    };
    if !cuda::is_cuda(device) {
        return match backend {
            cuda::DeviceBackend::Auto => Ok(None),
            _ => Err(Failure::usage(
                format!("parallel.backend = \"{}\" sums on GPUs, and this run is on the CPU", parallel.backend),
                "start with --gpus N, or leave parallel.backend at \"auto\"",
            )),
        };
    }
    if comm.world_size() == 1 {
        return Ok(None);
    }
    let lengths = buckets::lengths(parameters);
    // A bucket is complete once it reaches its limit, so it can exceed the limit by at most one tensor.
    let limit = (super::autotune::largest_bucket_mb(parallel) * super::MIB) as usize / size_of::<f32>();
    let elements = lengths.iter().sum::<usize>().min(limit + lengths.iter().max().copied().unwrap_or(0));
    let wire = match parallel.compression {
        Compression::None => WireType::F32,
        Compression::Fp16 => WireType::F16,
        Compression::Bf16 => WireType::Bf16,
    };
    let options = DeviceGroupOptions { backend, elements, wire, device_barrier: false };
    let (group, description) = match DeviceGroup::connect(comm, device, options)? {
        Connected::Group(group) => (Some(*group), String::new()),
        Connected::ThroughHost { cause } => (None, format!("through the host's memory, as {cause}")),
    };
    if comm.rank() == 0 {
        let description = group.as_ref().map_or(description, DeviceGroup::description);
        console::eprint(format_args!("gradients: {description}"));
    }
    Ok(group.map(|group| DeviceReduction { device: device.clone(), collectives: Arc::new(Mutex::new(group)) }))
}

/// Inherent methods of the same name are called by their paths. Otherwise these methods would call themselves.
impl DeviceCollectives for DeviceGroup {
    fn all_reduce(
        &mut self,
        tensors: Vec<Tensor<1>>,
        after: &StreamEvent,
    ) -> Result<(Tensor<1>, StreamEvent, usize), CommError> {
        let (sum, done) = self.all_reduce_after(tensors, 1.0, after)?;
        let bytes = sum.dims()[0] * self.wire().size();
        Ok((sum, done, bytes))
    }

    fn runs_on_side_stream(&self) -> bool {
        DeviceGroup::runs_on_side_stream(self)
    }

    fn start_all_reduce(&mut self, tensors: Vec<Tensor<1>>) -> Result<(Tensor<1>, usize), CommError> {
        let sum = DeviceGroup::start_all_reduce(self, tensors, 1.0)?;
        let bytes = sum.dims()[0] * self.wire().size();
        Ok((sum, bytes))
    }

    fn join(&mut self) {
        DeviceGroup::join(self);
    }

    fn check(&self) -> Result<(), CommError> {
        DeviceGroup::check(self)
    }

    fn all_gather(&mut self, tensors: Vec<Tensor<1>>) -> Result<Tensor<1>, CommError> {
        self.all_gather_f32(tensors)
    }

    fn synchronize(&mut self) -> Result<(), CommError> {
        DeviceGroup::synchronize(self)
    }
}
