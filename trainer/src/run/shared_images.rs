//! Decodes images in files once for all processes of a machine (`data.decode = "memory"`).
//!
//! Each rank decodes its part of each split into memory that all ranks of its machine map. Afterwards all ranks read all parts.
//! So a machine holds the pixels once, and decodes each image once.

use comm::Communicator;
use data::{Dataset, SharedPixels, Splits};

use crate::failure::Failure;
use crate::strategy::ddp;

/// Decodes the images of all splits whose images are decoded once. All ranks call this function with the same splits.
///
/// # Errors
/// An image cannot be decoded; all ranks return the error of the first rank that failed. Or a rank has ended.
pub(super) fn decode(splits: &mut Splits, comm: &Communicator) -> Result<(), Failure> {
    let parts = [Some(&mut splits.train), splits.val.as_mut(), Some(&mut splits.test)];
    parts.into_iter().flatten().try_for_each(|split| decode_split(split, comm))
}

fn decode_split(split: &mut Dataset, comm: &Communicator) -> Result<(), Failure> {
    let Some(encoded) = split.encoded.as_ref().filter(|encoded| encoded.is_decoding_deferred() && !encoded.is_empty())
    else {
        return Ok(());
    };
    let mut memory = comm.node_memory(split.decoded_bytes() as usize)?;
    let decoded = encoded.decode_bytes(memory.part().start, memory.part_mut()).map_err(Failure::from);
    ddp::succeed_together(decoded, comm)?;
    split.share(SharedPixels::new(memory.freeze()?));
    Ok(())
}
