//! Copies rank 0's state to all ranks: `_sync_module_states` and `_sync_buffers` of `DistributedDataParallel`.

use std::path::Path;

use models::{
    Network, StateKind,
    state::{self, StateTensor},
};

use crate::{
    config::BatchNormPolicy,
    failure::Failure,
    snapshot::{RunProgress, Snapshot},
    state_file::{self, NamedTensor},
};
use comm::{Communicator, ReduceOp};

/// Broadcasts rank 0's parameters and running statistics (`_sync_module_states`).
///
/// # Errors
/// A rank is gone.
pub(super) fn sync_module_states(network: Network, comm: &Communicator) -> Result<Network, Failure> {
    let mut tensors = state::state_dict(&network);
    for tensor in &mut tensors {
        comm.broadcast(&mut tensor.values, 0)?;
    }
    load(network, &tensors)
}

/// Makes the running statistics of all ranks equal (`_sync_buffers`). With [`BatchNormPolicy::Reduce`] all ranks get the mean,
/// otherwise rank 0's statistics.
///
/// # Errors
/// A rank is gone.
pub(super) fn sync_buffers(network: Network, policy: BatchNormPolicy, comm: &Communicator) -> Result<Network, Failure> {
    let mut tensors = state::state_dict(&network);
    for tensor in tensors.iter_mut().filter(|tensor| tensor.kind == StateKind::Buffer) {
        match policy {
            BatchNormPolicy::Reduce => comm.all_reduce(&mut tensor.values, ReduceOp::Mean)?,
            _ => comm.broadcast(&mut tensor.values, 0)?,
        }
    }
    load(network, &tensors)
}

fn load(network: Network, tensors: &[StateTensor]) -> Result<Network, Failure> {
    state::load_state_dict(network, tensors).map_err(|error| Failure::run(&error, error.hint()))
}

/// Broadcasts rank 0's checkpoint, so the other ranks need no access to its files.
///
/// # Errors
/// A rank is gone.
pub(super) fn broadcast_checkpoint(
    checkpoint: Option<(Snapshot, RunProgress)>,
    comm: &Communicator,
) -> Result<Option<(Snapshot, RunProgress)>, Failure> {
    let broken = |error: &dyn std::fmt::Display| {
        Failure::run(format!("the checkpoint cannot be sent to the other ranks: {error}"), "please report this")
    };
    let mut parts: [Vec<u8>; 4] = Default::default();
    let mut steps = 0;
    if let Some((snapshot, progress)) = checkpoint {
        steps = snapshot.optimizer_steps as i64;
        let encode = |tensors: &[NamedTensor]| state_file::encode(tensors).map_err(|error| broken(&error));
        parts = [
            serde_json::to_vec(&progress).map_err(|error| broken(&error))?,
            encode(&state_file::named_tensors(snapshot.model))?,
            encode(&snapshot.optimizer)?,
            snapshot.ema.map(|ema| encode(&state_file::named_tensors(ema))).transpose()?.unwrap_or_default(),
        ];
    }
    let mut sizes: Vec<i64> = parts.iter().map(|part| part.len() as i64).chain([steps]).collect();
    comm.broadcast(&mut sizes, 0)?;
    if sizes[0] == 0 {
        return Ok(None);
    }
    for (part, &size) in parts.iter_mut().zip(&sizes) {
        part.resize(size as usize, 0);
        comm.broadcast(part, 0)?;
    }
    let [progress, model, optimizer, ema] = parts;
    let decode = |bytes: &[u8]| state_file::decode(Path::new("checkpoint"), bytes).map_err(|error| broken(&error));
    let ema = if ema.is_empty() { None } else { Some(state_file::state_tensors(decode(&ema)?)) };
    let snapshot = Snapshot {
        model: state_file::state_tensors(decode(&model)?),
        optimizer: decode(&optimizer)?,
        optimizer_steps: sizes[4] as u64,
        ema,
    };
    Ok(Some((snapshot, serde_json::from_slice(&progress).map_err(|error| broken(&error))?)))
}
