//! What ranks tell each other before they choose a way.

use std::sync::Arc;

use super::gpu::Gpu;
use super::nccl;
use super::supports::{RankLocation, Topology};
use super::window::agree;
use crate::Communicator;
use crate::error::{CommError, Result};
use crate::host;

/// Where all ranks are, and whom each reaches by the driver's word.
pub(super) fn topology(gpu: &Arc<Gpu>, comm: &Communicator) -> Result<Topology> {
    let own = gpu.uuid().and_then(|uuid| Ok((uuid, gpu.capability()?)));
    let (uuid, (major, minor)) = agree(own, comm)?;
    let mut card = uuid.to_vec();
    card.extend([major as u8, minor as u8]);
    card.extend(host::of_shared_memory().bytes());
    let cards = comm.all_gather_v(&card)?;
    let mut rest = cards.data.as_slice();
    let mut locations = Vec::with_capacity(comm.world());
    for count in &cards.counts {
        let card = rest.split_off(..*count).unwrap_or_default();
        let (Some((uuid, [major, minor])), Some(host)) = (card.first_chunk::<18>().and_then(split), card.get(18..))
        else {
            return Err(CommError::setup("a rank describes its GPU in a way that this one does not understand")
                .hint("all ranks must run the same version of this program"));
        };
        let host = String::from_utf8_lossy(host).into_owned();
        locations.push(RankLocation { host, gpu: uuid, capability: (major.into(), minor.into()) });
    }
    let me = comm.rank();
    let access = locations
        .iter()
        .filter(|location| location.host == locations[me].host)
        .map(|location| gpu.can_access(location.gpu));
    let access = agree(access.collect::<Result<Vec<_>>>(), comm)?;
    let neighbours = (0..locations.len()).filter(|rank| locations[*rank].host == locations[me].host);
    // a GPU that this process does not see may still be within reach: the test of access finds out
    let blind: Vec<i64> =
        neighbours.zip(access).filter(|(_, a)| *a == Some(false)).map(|(rank, _)| rank as i64).collect();
    let all = comm.all_gather_v(&blind)?;
    let readers = all.counts.iter().enumerate().flat_map(|(rank, count)| std::iter::repeat_n(rank, *count));
    let no_access = readers.zip(all.data.iter().map(|owner| *owner as usize)).collect();
    Ok(Topology { locations, no_access })
}

fn split(card: &[u8; 18]) -> Option<([u8; 16], [u8; 2])> {
    Some((*card.first_chunk()?, *card.last_chunk()?))
}

/// Whether all ranks have NCCL, and which has not and why.
pub(super) fn nccl_everywhere(comm: &Communicator) -> Result<std::result::Result<(), String>> {
    let own = nccl::Library::load().err().unwrap_or_default();
    let all = comm.all_gather_v(own.as_bytes())?;
    let Some(first) = all.counts.iter().position(|count| *count > 0) else { return Ok(Ok(())) };
    let start: usize = all.counts[..first].iter().sum();
    let cause = String::from_utf8_lossy(&all.data[start..start + all.counts[first]]).into_owned();
    Ok(Err(format!("rank {}: {cause}", comm.ranks()[first])))
}
