//! Captures CUDA graphs with CubeCL's client. burn's `capture` is not used: it runs a step three times before it captures the step,
//! but a training step must run once.

use std::fmt;
use std::pin::Pin;

use burn::backend::{BackendTensor, DispatchDevice, DispatchTensorKind};
use burn::tensor::{Bytes, Device, Int, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Graph;
use cubecl::prelude::Client;
use cubecl::server::CopyDescriptor;
use parking_lot::Mutex;

use super::bf16_weights::memory_id;
use super::storage::storage_of;

/// A captured graph.
#[derive(Clone)]
pub(crate) struct CapturedGraph(Graph);

impl fmt::Debug for CapturedGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CapturedGraph")
    }
}

/// Returns the client of an NVIDIA GPU.
pub(crate) fn client(device: &Device) -> Option<Client> {
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(device @ cubecl::Device::Cuda(_)) => Some(device.client()),
        _ => None,
    }
}

pub(crate) fn prepare(device: &Device) -> Result<(), String> {
    let client = client(device).ok_or("the device is not an NVIDIA GPU")?;
    client.graph_prepare().map_err(|error| error.to_string())
}

pub(crate) fn cancel(device: &Device) {
    // `stop_capture` returns an error, because no capture has begun. It frees the stream all the same.
    drop(client(device).map(|client| client.stop_capture()));
}

pub(crate) fn capture<T>(device: &Device, step: impl FnOnce() -> T) -> Result<(CapturedGraph, T), String> {
    let client = client(device).ok_or("the device is not an NVIDIA GPU")?;
    client.start_capture().map_err(|error| error.to_string())?;
    let result = step();
    let graph = client.stop_capture().map_err(|error| error.to_string())?;
    Ok((CapturedGraph(graph), result))
}

impl CapturedGraph {
    /// See [`Graph::launch`](crate::graph::Graph::launch).
    pub(crate) fn launch(&self) -> Result<(), String> {
        // SAFETY: as long as the graph exists, CubeCL reserves the pages that the graph uses, even if their tensors are dropped.
        // All work of a process is queued on one stream of its GPU.
        unsafe { self.0.replay() }.map_err(|error| error.to_string())
    }
}

pub(crate) fn floats(tensor: &Tensor<1>) -> CubeTensor {
    storage_of(tensor).expect("an f32 tensor on a GPU")
}

pub(crate) fn integers(tensor: &Tensor<1, Int>) -> CubeTensor {
    match tensor.clone().into_dispatch().kind {
        DispatchTensorKind::Cube(BackendTensor::Int(tensor)) => tensor,
        _ => panic!("a tensor of integers on a GPU"),
    }
}

/// A copy to the host that may be in progress, see [`PendingRead`](crate::graph::PendingRead).
pub(crate) struct Values(Pin<Box<dyn Future<Output = Result<Vec<Bytes>, String>> + Send>>);

impl fmt::Debug for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Values")
    }
}

/// Returns a client of a tensor's device that is never dropped: the future of a copy borrows it.
fn client_forever(tensor: &CubeTensor) -> &'static Client {
    static CLIENTS: Mutex<Vec<(cubecl::Device, &Client)>> = Mutex::new(Vec::new());
    let mut clients = CLIENTS.lock();
    if let Some((_, client)) = clients.iter().find(|(device, _)| *device == tensor.device) {
        return client;
    }
    let client = &*Box::leak(Box::new(tensor.client.clone()));
    clients.push((tensor.device.clone(), client));
    client
}

/// Queues a copy of a tensor's first `words` 32-bit values to the host. The client queues the copy at once; the future only
/// waits for it.
pub(super) fn read_words(tensor: &CubeTensor, words: usize) -> Values {
    let client = client_forever(tensor);
    let handle = tensor.handle.clone().binding();
    let copy = CopyDescriptor::new(handle, [words].into(), [1].into(), size_of::<u32>());
    let future = client.read_tensor_async(vec![copy]);
    Values(Box::pin(async move { future.await.map_err(|error| error.to_string()) }))
}

impl Values {
    pub(crate) fn wait(self) -> Result<Vec<f32>, String> {
        let all = burn_std::future::block_on(self.0)?;
        Ok(all.iter().flat_map(|bytes| bytemuck::pod_collect_to_vec(bytes)).collect())
    }
}

/// See [`address`](crate::graph::address).
pub(crate) fn address(tensor: &Tensor<1>) -> Option<[u64; 2]> {
    storage_of(tensor).as_ref().map(memory_id)
}
