//! Copies of device 0's network on the other devices, new for each batch: `torch.nn.parallel.replicate`.

use burn::module::Module;
use models::{Network, StateKind, state};

use super::{devices::Devices, scatter::Sizes};

/// Returns one network per chunk. The first is device 0's own, whose batch norms keep their statistics; the others are copies
/// whose statistics are dropped with them.
pub(super) fn replicate(network: &Network, devices: &Devices, count: usize) -> Vec<Network> {
    let replica = |index: usize| match index {
        0 => network.clone(),
        // Fresh leaves: backward passes that share no leaf run at the same time; burn runs others one after the other.
        _ => state::map_parameters(moved(network.clone(), devices, index), |_, value| value),
    };
    (0..count).map(replica).collect()
}

/// Moves the network to a device, its parameters leaves there. Returns it as it is where it is on that device already.
pub(super) fn moved(network: Network, devices: &Devices, index: usize) -> Network {
    if devices.get(index) == devices.first() { network } else { network.fork(devices.get(index)) }
}

/// Returns the bytes of the network, of an image of `image` values and of its outputs.
pub(super) fn sizes(network: &Network, image: usize, classes: usize) -> Sizes {
    let bytes = |values: usize| (values * size_of::<f32>()) as u64;
    let mut sizes = Sizes { parameters: 0, buffers: 0, image: bytes(image), outputs: bytes(classes) };
    state::map_state(network.clone(), |info, kind, value| {
        match kind {
            StateKind::Parameter | StateKind::Frozen => sizes.parameters += bytes(info.len()),
            StateKind::Buffer => sizes.buffers += bytes(info.len()),
        }
        value
    });
    sizes
}
