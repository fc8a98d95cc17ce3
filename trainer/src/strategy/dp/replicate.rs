//! Copies of device 0's network on the other devices, new for each batch: `torch.nn.parallel.replicate`.

use models::{Network, StateKind, state};

use super::{copy, devices::Devices, scatter::Sizes};

/// Returns one network per chunk. The first is device 0's own, whose batch norms keep their statistics; the others are copies
/// whose statistics are dropped with them.
pub(super) fn replicate(network: &Network, devices: &Devices, count: usize) -> Vec<Network> {
    let elsewhere = |index: usize| devices.get(index) != devices.first();
    // Read once for all devices.
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
        // Fresh leaves: backward passes that share no leaf run at the same time; burn runs others one after the other.
        _ => state::map_parameters(network.clone(), |_, value| value),
    };
    (0..count).map(replica).collect()
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
