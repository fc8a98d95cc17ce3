//! The launches of a rank, with their numbers and parameters.

use super::layout::{LaunchParams, MAX_WORLD, PACK, SLOTS_AT, WireType, phase};
use super::plan::{Chunk, DeviceCall, chunks};
use super::protocol::{self, FlagSet, Kernel, KernelStep};
use super::source::{KernelVariant, source_count};
use crate::error::{CommError, Result};

/// The parameters that all launches of a rank share.
#[derive(Clone, Debug)]
pub struct LaunchConstants {
    /// Address of each rank's window, its own included, as this rank's device sees it.
    pub windows: Vec<u64>,
    /// Address of the fault words in host memory, one word per peer.
    pub faults: u64,
    /// Address of the [`word`](super::layout::word)s in host memory. The first word ends all waits.
    pub host_words: u64,
    /// Longest wait, in nanoseconds.
    pub limit_ns: u64,
    /// This process's rank in the group.
    pub rank: usize,
    /// Bytes of a slot.
    pub slot_bytes: usize,
}

impl LaunchConstants {
    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.windows.len()
    }
}

/// One launch.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The kernel.
    pub variant: KernelVariant,
    /// The kernel's last parameter. The caller sets its phases.
    pub params: LaunchParams,
    /// Number of blocks.
    pub blocks: u32,
    /// The part of the call that this launch handles.
    pub chunk: Chunk,
    /// The launch's number, from 1, if no launch was in a CUDA graph. Kernels count for themselves.
    pub launch_number: u64,
}

impl Launch {
    /// Returns the byte range, in the window, of the part of the slot that this rank reduces.
    pub fn reduced(&self) -> std::ops::Range<usize> {
        let params = &self.params;
        let (first, last) = match self.variant.kernel {
            Kernel::TwoShot => (
                (params.rank * params.packs_per_rank).min(params.packs),
                ((params.rank + 1) * params.packs_per_rank).min(params.packs),
            ),
            _ => (0, params.packs),
        };
        let slot = SLOTS_AT + (protocol::slot(self.launch_number) * params.slot_bytes) as usize;
        let at = |pack: u32| slot + pack as usize * PACK;
        at(first)..at(last)
    }
}

/// A step of the host process for a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostStep {
    /// Launches the kernel with these phases.
    Launch(u32),
    /// Waits for this rank's device, and then for the host processes of the other ranks.
    Barrier,
}

/// Returns the steps of the host process for a kernel. Usually this is one launch, which waits for the other ranks' launches on
/// the device. If ranks share a device (`on_host`), only one rank's kernel runs at a time. Then each step is a separate launch,
/// and the host processes synchronize between launches.
pub fn host_steps(kernel: Kernel, on_host: bool) -> Vec<HostStep> {
    let bit = |step: &KernelStep| match step {
        KernelStep::Pack => phase::PACK,
        KernelStep::Barrier(FlagSet::Filled) => phase::BARRIER_ENTER,
        KernelStep::Barrier(FlagSet::Reduced) => phase::BARRIER_EXIT,
        KernelStep::Reduce => phase::REDUCE,
        KernelStep::Gather => phase::GATHER,
    };
    let steps = kernel.steps();
    if on_host {
        let turn = |(index, step): (usize, &KernelStep)| match step {
            KernelStep::Barrier(_) => HostStep::Barrier,
            step => HostStep::Launch(if index + 1 == steps.len() { bit(step) | phase::COUNT } else { bit(step) }),
        };
        return steps.iter().enumerate().map(turn).collect();
    }
    vec![HostStep::Launch(steps.iter().map(bit).fold(phase::COUNT, |all, one| all | one))]
}

/// Numbers the launches. All ranks have the same numbers, since all ranks make the same calls.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    launch_count: u64,
}

impl Sequence {
    /// Returns the number of launches so far.
    pub fn launch_count(&self) -> u64 {
        self.launch_count
    }

    /// Returns the launches of `call`. This rank has source tensors of these `lengths`, and each value is multiplied by `scale`.
    ///
    /// # Errors
    /// [`Usage`](crate::ErrorKind::Usage) if a kernel cannot take so many tensors, or so many elements.
    pub fn launches(
        &mut self,
        constants: &LaunchConstants,
        call: &DeviceCall,
        lengths: &[usize],
        scale: f32,
    ) -> Result<Vec<Launch>> {
        let (world_size, fingerprint) = (constants.world_size(), call.fingerprint());
        let max_sources = source_count(lengths.len()).ok_or_else(|| {
            CommError::usage(format!("{}: {} tensors are more than a launch takes", call.kernel.name(), lengths.len()))
                .hint("join tensors, or make several calls")
        })?;
        let ends = ends(call, lengths)?;
        let variant = KernelVariant { kernel: call.kernel, wire: call.wire, world_size, max_sources };
        let mut windows = [0; MAX_WORLD];
        windows[..world_size].copy_from_slice(&constants.windows);
        let launch = |chunk: Chunk| {
            self.launch_count += 1;
            let params = LaunchParams {
                windows,
                faults: constants.faults,
                host_words: constants.host_words,
                limit_ns: constants.limit_ns,
                first: chunk.first,
                elements_per_rank: call.elements,
                slot_bytes: constants.slot_bytes as u64,
                count: chunk.count,
                packs: chunk.packs,
                packs_per_rank: chunk.packs_per_rank,
                fingerprint,
                rank: constants.rank as u32,
                root: call.root as u32,
                phases: 0,
                scale,
                ends: ends.clone(),
            };
            Launch { variant, params, blocks: chunk.blocks, chunk, launch_number: self.launch_count }
        };
        Ok(chunks(call, world_size, constants.slot_bytes).into_iter().map(launch).collect())
    }

    /// Returns the launch that orders NCCL's stream after the pack of `before` (`PHASE_PACK`), or before its gather
    /// (`PHASE_GATHER`).
    pub fn order(before: &Launch, phase: u32) -> Launch {
        let variant = KernelVariant {
            kernel: Kernel::Order,
            wire: WireType::F32,
            world_size: before.variant.world_size,
            max_sources: super::source::SOURCE_COUNTS[0],
        };
        let params = LaunchParams { phases: phase, ends: Vec::new(), ..before.params.clone() };
        Launch { variant, params, blocks: 1, ..before.clone() }
    }

    /// Returns the launch that tests peer access. All ranks run the launch with `write` first, and then without.
    pub fn probe(constants: &LaunchConstants, write: bool) -> Launch {
        let call = DeviceCall { kernel: Kernel::Probe, wire: WireType::F32, elements: 1, root: 0 };
        let mut launches = Sequence::default().launches(constants, &call, &[1], 1.0).unwrap_or_default();
        let mut launch = launches.remove(0);
        launch.params.phases = if write { phase::PACK } else { phase::REDUCE };
        launch
    }
}

/// Returns the number of elements up to the end of each tensor. Kernels count them in 32 bits.
fn ends(call: &DeviceCall, lengths: &[usize]) -> Result<Vec<u32>> {
    let mut end = 0u64;
    let ends = lengths.iter().map(|length| {
        end = end.saturating_add(*length as u64);
        u32::try_from(end).map_err(|_| {
            let cause = format!("{}: more than {} elements in one call on a GPU", call.kernel.name(), u32::MAX);
            CommError::usage(cause).hint("make several calls with fewer elements")
        })
    });
    ends.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn constants() -> LaunchConstants {
        LaunchConstants { windows: vec![10, 20, 30], faults: 1, host_words: 2, limit_ns: 3, rank: 1, slot_bytes: 4096 }
    }

    #[test]
    fn launches_are_numbered_across_calls_and_alternate_slots() {
        let mut sequence = Sequence::default();
        let call = DeviceCall { kernel: Kernel::TwoShot, wire: WireType::F32, elements: 2500, root: 0 };
        let first = sequence.launches(&constants(), &call, &[1000, 1500], 0.5).unwrap();
        let second = sequence.launches(&constants(), &call, &[1000, 1500], 0.5).unwrap();
        let all_params: Vec<&LaunchParams> = first.iter().chain(&second).map(|launch| &launch.params).collect();
        let launches = || first.iter().chain(&second);
        assert_eq!(launches().map(|launch| launch.launch_number).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        let slots: Vec<_> = launches().map(|launch| launch.reduced().start / 4096).collect();
        assert!(slots.windows(2).all(|pair| pair[0] != pair[1]));
        assert!(all_params.iter().all(|params| params.ends == [1000, 2500] && params.windows[..4] == [10, 20, 30, 0]));
        assert_eq!(sequence.launch_count(), 6);
    }

    #[test]
    fn more_tensors_or_elements_than_a_kernel_counts_are_refused() {
        let mut sequence = Sequence::default();
        let mut refusal = |lengths: &[usize]| {
            let elements = lengths.iter().map(|length| *length as u64).sum();
            let call = DeviceCall { kernel: Kernel::TwoShot, wire: WireType::F32, elements, root: 0 };
            let constants = LaunchConstants { slot_bytes: 1 << 30, ..constants() };
            sequence.launches(&constants, &call, lengths, 1.0).err()
        };
        let most = u32::MAX as usize;
        assert_eq!(refusal(&[most - 5, 5]), None, "the last number that 32 bits hold");
        for lengths in [&[most, 1][..], &[most + 1], &[1, most + 1, 1]] {
            let error = refusal(lengths).unwrap();
            assert_eq!(error.kind, crate::ErrorKind::Usage);
            assert_eq!(error.message, "two_shot: more than 4294967295 elements in one call on a GPU");
        }
        assert!(refusal(&[1; 257]).unwrap().message.contains("257 tensors are more than a launch takes"));
    }

    #[test]
    fn barriers_are_on_the_device_or_on_the_host() {
        let all =
            phase::PACK | phase::BARRIER_ENTER | phase::REDUCE | phase::BARRIER_EXIT | phase::GATHER | phase::COUNT;
        assert_eq!(host_steps(Kernel::TwoShot, false), [HostStep::Launch(all)]);
        let run = |phase| HostStep::Launch(phase);
        assert_eq!(
            host_steps(Kernel::TwoShot, true),
            [
                run(phase::PACK),
                HostStep::Barrier,
                run(phase::REDUCE),
                HostStep::Barrier,
                run(phase::GATHER | phase::COUNT)
            ]
        );
        assert_eq!(
            host_steps(Kernel::Broadcast, true),
            [run(phase::PACK), HostStep::Barrier, run(phase::GATHER | phase::COUNT)]
        );
    }
}
