//! Copies device 0's network to the other devices, for each batch: `torch.nn.parallel.replicate`.

use models::{Network, StateKind, state};

use super::{copy, devices::DevicePools, scatter::TransferSizes};

/// Returns one network per chunk. The first is device 0's own network, which keeps its running statistics. The others are
/// copies, and their running statistics are dropped with them.
pub(super) fn replicate(network: &Network, devices: &DevicePools, count: usize) -> Vec<Network> {
    let elsewhere = |index: usize| devices.get(index) != devices.first();
    // Read the values once, for all devices.
    let values = (1..count).any(elsewhere).then(|| {
        let mut tensors = Vec::new();
        state::visit(network, |_, _, tensor| tensors.push(tensor));
        copy::to_host(tensors)
    });
    let replica = |index: usize| match &values {
        _ if index == 0 => network.clone(),
        Some(values) if elsewhere(index) => {
            let device = devices.get(index).clone().inner();
            let mut copies = copy::from_host(values.clone(), &device);
            state::map_state(network.clone(), |_, _, _| copies.next().expect("both traversals visit the same tensors"))
        }
        // Make new leaf tensors. burn runs backward passes that share a leaf one after the other, and others in parallel.
        _ => state::map_parameters(network.clone(), |_, value| value),
    };
    (0..count).map(replica).collect()
}

/// Returns the sizes in bytes of the network and of the outputs of an image.
pub(super) fn transfer_sizes(network: &Network, classes: usize) -> TransferSizes {
    let bytes = |values: usize| (values * size_of::<f32>()) as u64;
    let mut sizes = TransferSizes { parameters: 0, buffers: 0, outputs: bytes(classes) };
    state::map_state(network.clone(), |info, kind, value| {
        match kind {
            StateKind::Parameter | StateKind::Frozen => sizes.parameters += bytes(info.len()),
            StateKind::Buffer => sizes.buffers += bytes(info.len()),
        }
        value
    });
    sizes
}
