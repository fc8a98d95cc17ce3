//! Copies of device 0's network for the other devices, made anew for each batch.

use burn::module::Module;
use models::{Network, StateKind, state};

use super::{devices::Devices, scatter::Sizes};

/// One network a chunk. The first is device 0's own, whose batch norms keep their statistics; the others are copies whose
/// statistics are dropped with them.
pub(super) fn replicas(network: &Network, devices: &Devices, count: usize) -> Vec<Network> {
    let replica = |index: usize| match index {
        0 => network.clone(),
        // fresh leaves: backward passes that share none run at the same time, others wait for each other
        _ => state::map_parameters(moved(network.clone(), devices, index), |_, value| value),
    };
    (0..count).map(replica).collect()
}

/// The network on a device, its parameters leaves there; untouched where it is there already.
pub(super) fn moved(network: Network, devices: &Devices, index: usize) -> Network {
    if devices.get(index) == devices.first() { network } else { network.fork(devices.get(index)) }
}

/// Bytes of the network, and of an image of `image` values and its outputs.
pub(super) fn sizes(network: &Network, image: usize, classes: usize) -> Sizes {
    let bytes = |values: usize| (values * size_of::<f32>()) as u64;
    let mut sizes = Sizes { parameters: 0, buffers: 0, image: bytes(image), outputs: bytes(classes) };
    state::map_state(network.clone(), |info, kind, value| {
        match kind {
            StateKind::Parameter => sizes.parameters += bytes(info.len()),
            StateKind::Buffer => sizes.buffers += bytes(info.len()),
        }
        value
    });
    sizes
}
