//! All ranks start from, and stay at, the same network.

use std::path::Path;

use models::{
    Network, StateKind,
    state::{self, StateTensor},
};
use sha2::{Digest, Sha256};

use crate::{
    comm::{Communicator, ReduceOp},
    config::BatchNormPolicy,
    engine::checkpoint::Progress,
    failure::Failure,
    state_file::{self, NamedTensor},
    strategy::Snapshot,
};

/// Makes sure that every rank has the same tensors: names, shapes, order.
///
/// # Errors
/// Names the ranks that differ, and on those the first tensor that does.
pub(super) fn same_model(network: &Network, comm: &Communicator) -> Result<(), Failure> {
    let lines: Vec<String> =
        state::state_dict(network).iter().map(|tensor| format!("{} {:?}", tensor.name, tensor.shape)).collect();
    let own = lines.join("\n");
    let digest: [u8; 32] = Sha256::digest(own.as_bytes()).into();
    let mut all = vec![0u8; 32 * comm.world()];
    comm.all_gather(&digest, &mut all)?;
    let others: Vec<usize> = (1..comm.world()).filter(|rank| all[rank * 32..][..32] != all[..32]).collect();
    if others.is_empty() {
        return Ok(());
    }
    // every rank knows that they differ: rank 0 shows its list, so that each can say what its own first difference is
    let mut length = [own.len() as i64];
    comm.broadcast(&mut length, 0)?;
    let mut text = own.into_bytes();
    text.resize(length[0] as usize, 0);
    comm.broadcast(&mut text, 0)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let difference = text.lines().zip(&lines).find(|(theirs, mine)| theirs != mine);
    let shown = match difference {
        Some((theirs, mine)) => format!("rank 0 has {theirs} where rank {} has {mine}", comm.rank()),
        None => format!("rank 0 has {} tensors, rank {} has {}", text.lines().count(), comm.rank(), lines.len()),
    };
    let who = others.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    Err(Failure::usage(
        format!("rank {who}: another model than rank 0: {shown}"),
        "start every rank with the same program, --config and --set",
    ))
}

/// Gives every rank rank 0's parameters and statistics.
///
/// # Errors
/// A rank is gone.
pub(super) fn broadcast_state(network: Network, comm: &Communicator) -> Result<Network, Failure> {
    let mut tensors = state::state_dict(&network);
    for tensor in &mut tensors {
        comm.broadcast(&mut tensor.values, 0)?;
    }
    load(network, &tensors)
}

/// Makes the running statistics of all ranks equal: rank 0's, or their mean.
///
/// # Errors
/// A rank is gone.
pub(super) fn share_buffers(
    network: Network,
    policy: BatchNormPolicy,
    comm: &Communicator,
) -> Result<Network, Failure> {
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

/// Gives rank 0's checkpoint to every rank: the others need not see its files.
///
/// # Errors
/// A rank is gone.
pub(super) fn share_checkpoint(
    checkpoint: Option<(Snapshot, Progress)>,
    comm: &Communicator,
) -> Result<Option<(Snapshot, Progress)>, Failure> {
    let broken = |error: &dyn std::fmt::Display| {
        Failure::run(format!("the checkpoint cannot travel to the other ranks: {error}"), "please report this")
    };
    let mut parts: [Vec<u8>; 4] = Default::default();
    let mut steps = 0;
    if let Some((snapshot, progress)) = checkpoint {
        steps = snapshot.optimizer_steps as i64;
        let encode = |tensors: &[NamedTensor]| state_file::encode(tensors).map_err(|error| broken(&error));
        parts = [
            serde_json::to_vec(&progress).map_err(|error| broken(&error))?,
            encode(&state_file::named(snapshot.model))?,
            encode(&snapshot.optimizer)?,
            snapshot.ema.map(|ema| encode(&state_file::named(ema))).transpose()?.unwrap_or_default(),
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
