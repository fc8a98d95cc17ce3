//! A rank's launches, numbered: the collective's pieces as the kernels are told of them.

use super::layout::{Job, MAX_WORLD, PACK, SLOTS_AT, Wire, phase};
use super::plan::{Call, Piece, pieces};
use super::protocol::{self, Area, Kernel, Step};
use super::source::{Variant, parts};

/// What does not change from launch to launch.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Address of each rank's window, as this rank's device sees it; its own among them.
    pub windows: Vec<u64>,
    /// Address of a word for each peer, on the host.
    pub faults: u64,
    /// Address of the word that ends all waiting, on the host.
    pub abort: u64,
    /// Longest wait, in nanoseconds.
    pub limit_ns: u64,
    /// This rank.
    pub rank: usize,
    /// Bytes of a slot.
    pub slot: usize,
}

impl Frame {
    /// Ranks.
    pub fn world(&self) -> usize {
        self.windows.len()
    }
}

/// One launch.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Which text.
    pub variant: Variant,
    /// Its last parameter; its phases are still to be filled in.
    pub job: Job,
    /// Blocks.
    pub blocks: u32,
    /// The piece of the call.
    pub piece: Piece,
}

impl Launch {
    /// Where the part of a slot that this rank reduces lies in its window, in bytes.
    pub fn reduced(&self) -> std::ops::Range<usize> {
        let job = &self.job;
        let (first, last) = match self.variant.kernel {
            Kernel::TwoShot => ((job.rank * job.part).min(job.packs), ((job.rank + 1) * job.part).min(job.packs)),
            _ => (0, job.packs),
        };
        let at = |pack: u32| job.slot as usize + pack as usize * PACK;
        at(first)..at(last)
    }
}

/// What the host does for a launch, in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Launches the kernel with these phases.
    Run(u32),
    /// Waits for the device, then for the other hosts.
    Meet,
}

/// All in one launch that meets the others' on the device; or, where ranks share a device and only one of them may be on it
/// at a time, a launch for each step and a meeting of hosts between them.
pub fn turns(kernel: Kernel, on_host: bool) -> Vec<Turn> {
    let bit = |step: &Step| match step {
        Step::Pack => phase::PACK,
        Step::Meet(Area::Filled) => phase::MEET,
        Step::Meet(Area::Reduced) => phase::MEET_AGAIN,
        Step::Reduce => phase::REDUCE,
        Step::Gather => phase::GATHER,
    };
    let steps = kernel.steps();
    if on_host {
        let turn = |step: &Step| if matches!(step, Step::Meet(_)) { Turn::Meet } else { Turn::Run(bit(step)) };
        return steps.iter().map(turn).collect();
    }
    vec![Turn::Run(steps.iter().map(bit).fold(0, |all, one| all | one))]
}

/// Numbers launches. All ranks count the same, since all call the same.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    epoch: u64,
}

impl Sequence {
    /// Launches so far.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The launches of `call`, whose source on this rank is tensors of these `lengths`, each value times `scale`. `None`
    /// where the tensors are more than a kernel takes.
    pub fn launches(&mut self, frame: &Frame, call: &Call, lengths: &[usize], scale: f32) -> Option<Vec<Launch>> {
        let (world, fingerprint) = (frame.world(), call.fingerprint());
        let parts = parts(lengths.len())?;
        let variant = Variant { kernel: call.kernel, wire: call.wire, world, parts };
        let mut windows = [0; MAX_WORLD];
        windows[..world].copy_from_slice(&frame.windows);
        let mut end = 0;
        let ends: Vec<u32> = lengths
            .iter()
            .map(|length| {
                end += *length as u32;
                end
            })
            .collect();
        let launch = |piece: Piece| {
            self.epoch += 1;
            let job = Job {
                windows,
                faults: frame.faults,
                abort: frame.abort,
                limit_ns: frame.limit_ns,
                epoch: self.epoch,
                first: piece.first,
                each: call.elements,
                slot: SLOTS_AT as u64 + protocol::slot(self.epoch) * frame.slot as u64,
                count: piece.count,
                packs: piece.packs,
                part: piece.part,
                fingerprint,
                rank: frame.rank as u32,
                root: call.root as u32,
                phases: 0,
                scale,
                ends: ends.clone(),
            };
            Launch { variant, job, blocks: piece.blocks, piece }
        };
        Some(pieces(call, world, frame.slot).into_iter().map(launch).collect())
    }

    /// The launch that tests whether all peers are within reach; `write` first, on all ranks, then not.
    pub fn probe(frame: &Frame, write: bool) -> Launch {
        let call = Call { kernel: Kernel::Probe, wire: Wire::F32, elements: 1, root: 0 };
        let mut launches = Sequence::default().launches(frame, &call, &[1], 1.0).unwrap_or_default();
        let mut launch = launches.remove(0);
        launch.job.phases = if write { phase::PACK } else { phase::REDUCE };
        launch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame() -> Frame {
        Frame { windows: vec![10, 20, 30], faults: 1, abort: 2, limit_ns: 3, rank: 1, slot: 4096 }
    }

    #[test]
    fn launches_are_numbered_across_calls_and_alternate_slots() {
        let mut sequence = Sequence::default();
        let call = Call { kernel: Kernel::TwoShot, wire: Wire::F32, elements: 2500, root: 0 };
        let first = sequence.launches(&frame(), &call, &[1000, 1500], 0.5).unwrap();
        let second = sequence.launches(&frame(), &call, &[1000, 1500], 0.5).unwrap();
        let jobs: Vec<&Job> = first.iter().chain(&second).map(|launch| &launch.job).collect();
        assert_eq!(jobs.iter().map(|job| job.epoch).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        assert!(jobs.windows(2).all(|pair| pair[0].slot != pair[1].slot));
        assert!(jobs.iter().all(|job| job.ends == [1000, 2500] && job.windows[..4] == [10, 20, 30, 0]));
        assert_eq!(sequence.epoch(), 6);
        assert!(sequence.launches(&frame(), &call, &[1; 257], 1.0).is_none());
    }

    #[test]
    fn meetings_are_on_the_device_or_on_the_host() {
        let all = phase::PACK | phase::MEET | phase::REDUCE | phase::MEET_AGAIN | phase::GATHER;
        assert_eq!(turns(Kernel::TwoShot, false), [Turn::Run(all)]);
        let run = |phase| Turn::Run(phase);
        assert_eq!(
            turns(Kernel::TwoShot, true),
            [run(phase::PACK), Turn::Meet, run(phase::REDUCE), Turn::Meet, run(phase::GATHER)]
        );
        assert_eq!(turns(Kernel::Broadcast, true), [run(phase::PACK), Turn::Meet, run(phase::GATHER)]);
    }
}
