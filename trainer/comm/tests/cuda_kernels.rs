//! Runs the kernels on a CPU emulator, with the parameters that a GPU gets. Checks results, device barriers and failures.
//! `benches/gpu_check` checks on a GPU that the instructions order memory.

mod cuda_support;

use comm::cuda::layout::{Fault, WireType, fault, word};
use comm::cuda::plan::DeviceCall;
use comm::cuda::protocol::Kernel;
use cuda_support::{Program, Ranks, expected, tensors, values};

const WORLDS: [usize; 5] = [2, 3, 4, 7, 8];

/// Number of elements of a rank's source.
fn source_len(call: &DeviceCall, world_size: usize) -> usize {
    call.elements as usize * if call.kernel == Kernel::ReduceScatter { world_size } else { 1 }
}

/// Returns all ranks' elements, different for each call.
fn inputs(call: &DeviceCall, world_size: usize) -> Vec<Vec<f32>> {
    let seed = call.elements + 1000 * call.kernel as u64;
    (0..world_size).map(|rank| values(rank, source_len(call, world_size), seed)).collect()
}

fn same_bits(got: &[f32], want: &[f32]) -> Result<(), String> {
    let wrong = got.iter().zip(want).position(|(got, want)| got.to_bits() != want.to_bits());
    match wrong {
        Some(at) => Err(format!("element {at} is {:?} instead of {:?}", got[at], want[at])),
        None if got.len() != want.len() => Err(format!("{} elements instead of {}", got.len(), want.len())),
        None => Ok(()),
    }
}

/// Slots of 512 bytes: 128 elements of f32, 256 of half the size.
const SLOT: usize = 512;
/// Empty arrays, tails, whole packs, one slot, several slots, several slots and a tail.
const LENGTHS: [u64; 8] = [0, 1, 5, 64, 127, 128, 333, 777];

fn calls(wire: WireType, world_size: usize) -> Vec<DeviceCall> {
    let call = |kernel, elements| DeviceCall { kernel, wire, elements, root: elements as usize % world_size };
    Kernel::ALL.iter().flat_map(|kernel| LENGTHS.map(|elements| call(*kernel, elements))).collect()
}

/// Queues all calls, as on the streams of as many GPUs: ranks are in different calls at the same time.
#[test]
fn every_collective_has_the_same_exact_bits_on_every_rank() {
    let Some(program) = Program::build(&WireType::ALL, &WORLDS, false) else { return };
    for world_size in WORLDS {
        for wire in WireType::ALL {
            let scale = if wire == WireType::F32 { 1.0 } else { 0.3 };
            let mut ranks = Ranks::new(&program, world_size, SLOT, false);
            let calls = calls(wire, world_size);
            let mut outputs = Vec::new();
            for call in &calls {
                let inputs = inputs(call, world_size);
                let submitted: Vec<_> =
                    (0..world_size).map(|rank| ranks.submit(rank, call, &tensors(&inputs[rank]), scale)).collect();
                outputs.push(submitted);
            }
            ranks.start();
            assert_eq!(ranks.wait(), [true]);
            for (call, outputs) in calls.iter().zip(&outputs) {
                let inputs = inputs(call, world_size);
                for (rank, output) in outputs.iter().enumerate() {
                    let want = expected(call, rank, &inputs, scale);
                    let got = ranks.read(*output);
                    same_bits(&got, &want).unwrap_or_else(|e| panic!("{call:?}, world {world_size}, rank {rank}: {e}"));
                }
            }
            assert!((0..world_size).all(|rank| ranks.faults(rank).is_empty()));
        }
    }
}

/// If ranks share a GPU, only one of them runs at a time: no kernel may wait on the device.
#[test]
fn ranks_that_share_a_device_get_the_same_bits_one_at_a_time() {
    let Some(program) = Program::build(&WireType::ALL, &[2, 4], false) else { return };
    for world_size in [2, 4] {
        for wire in WireType::ALL {
            let mut ranks = Ranks::new(&program, world_size, SLOT, false);
            for call in calls(wire, world_size).into_iter().filter(|call| [5, 333].contains(&call.elements)) {
                let inputs = inputs(&call, world_size);
                let sources: Vec<_> = inputs.iter().map(|values| tensors(values)).collect();
                let outputs = ranks.call_in_turn(&call, &sources, 0.5);
                for (rank, output) in outputs.into_iter().enumerate() {
                    let want = expected(&call, rank, &inputs, 0.5);
                    same_bits(&ranks.read(output), &want)
                        .unwrap_or_else(|e| panic!("{call:?}, world {world_size}, rank {rank}: {e}"));
                }
            }
        }
    }
}

/// A copy must not change a bit, not even of a NaN.
#[test]
fn copies_keep_the_bits_of_numbers_that_are_none() {
    let Some(program) = Program::build(&[WireType::F32], &[2], false) else { return };
    let mut ranks = Ranks::new(&program, 2, SLOT, false);
    let odd = [0x7fc0_1234u32, 0x7f80_0001, 0xffff_ffff, 0x8000_0000, 1].map(f32::from_bits).to_vec();
    let call = DeviceCall { kernel: Kernel::Broadcast, wire: WireType::F32, elements: 5, root: 0 };
    let (own, other) = ([odd.clone()], [vec![0.0; 5]]);
    let outputs = [ranks.submit(0, &call, &own, 1.0), ranks.submit(1, &call, &other, 1.0)];
    ranks.start();
    ranks.wait();
    outputs.into_iter().for_each(|output| same_bits(&ranks.read(output), &odd).unwrap());
}

/// ThreadSanitizer sees only the order of flags, of a block's barriers and of a rank's stream.
#[test]
fn the_sanitizer_finds_no_race() {
    for world_size in [2, 3] {
        let Some(program) = Program::build(&[WireType::Bf16], &[world_size], true) else { return };
        let mut ranks = Ranks::new(&program, world_size, SLOT, false);
        for turn in 0..4 {
            for kernel in Kernel::ALL {
                let call = DeviceCall { kernel, wire: WireType::Bf16, elements: 400 + turn, root: 1 };
                let inputs = inputs(&call, world_size);
                for (rank, values) in inputs.iter().enumerate() {
                    ranks.submit(rank, &call, &tensors(values), 1.0);
                }
            }
        }
        ranks.start();
        assert_eq!(ranks.wait(), [true]);
        for (code, said) in ranks.finish() {
            assert_eq!(code, Some(0), "{said}");
        }
    }
}

/// Shows that the test above can fail: with one slot instead of two, a fast rank fills it while a slow rank still reads it.
#[test]
fn the_sanitizer_finds_a_slot_too_few() {
    let Some(program) = Program::build(&[WireType::Bf16], &[3], true) else { return };
    let mut ranks = Ranks::new(&program, 3, SLOT, false);
    let call = DeviceCall { kernel: Kernel::OneShot, wire: WireType::Bf16, elements: 2000, root: 0 };
    let inputs = inputs(&call, 3);
    for _ in 0..5 {
        for (rank, values) in inputs.iter().enumerate() {
            ranks.submit_changed(rank, &call, &tensors(values), 1.0, |launch| {
                launch.params.slot_bytes = 0;
            });
        }
    }
    ranks.start();
    ranks.wait();
    let (code, said) = ranks.finish().remove(0);
    assert_eq!(code, Some(66), "{said}");
    assert!(said.contains("ThreadSanitizer: data race"), "{said}");
}

/// A block that starts after another block of its launch has found the fault still enters the barrier. Otherwise the peers' blocks
/// would wait until the limit, which is ten minutes here, and report the rank as missing.
#[test]
fn ranks_that_call_different_things_are_named() {
    let Some(program) = Program::build(&[WireType::F32], &[3], false) else { return };
    let mut ranks = Ranks::new(&program, 3, SLOT, false);
    ranks.stagger[0] = 300;
    for rank in 0..3 {
        // Rank 1 has another length.
        let elements = if rank == 1 { 30 } else { 31 };
        let call = DeviceCall { kernel: Kernel::OneShot, wire: WireType::F32, elements, root: 0 };
        ranks.submit(rank, &call, &tensors(&values(rank, elements as usize, 1)), 1.0);
    }
    ranks.start();
    assert_eq!(ranks.wait(), [true]);
    let differs = |peer| Fault { peer, kind: fault::MISMATCH, launch_number: 1 };
    assert_eq!(ranks.faults(0), [differs(1)]);
    assert_eq!(ranks.faults(1), [differs(0), differs(2)]);
    assert_eq!(ranks.faults(2), [differs(1)]);
}

/// Every wait has a limit. Afterwards queued launches end without waiting again, and do not write their outputs.
#[test]
fn a_rank_that_never_comes_is_named_once() {
    let Some(program) = Program::build(&[WireType::F32], &[3], false) else { return };
    let mut ranks = Ranks::new(&program, 3, SLOT, false);
    ranks.constants.iter_mut().for_each(|constants| constants.limit_ns = 10_000_000_000);
    let call = DeviceCall { kernel: Kernel::TwoShot, wire: WireType::F32, elements: 300, root: 0 };
    let mut outputs = Vec::new();
    for _ in 0..20 {
        for rank in [0, 2] {
            outputs.push(ranks.submit(rank, &call, &tensors(&values(rank, 300, 1)), 1.0));
        }
    }
    ranks.start();
    assert_eq!(ranks.wait(), [true]);
    for rank in [0, 2] {
        assert_eq!(ranks.faults(rank), [Fault { peer: 1, kind: fault::TIMEOUT, launch_number: 1 }]);
    }
    let untouched = f32::from_bits(0xEEEE_EEEE).to_bits();
    assert!(outputs.into_iter().all(|output| ranks.read(output).iter().all(|value| value.to_bits() == untouched)));
}

/// After SIGKILL in the middle of a run, the other ranks' waits end and name the rank.
#[test]
fn a_rank_that_is_killed_is_named() {
    let Some(program) = Program::build(&[WireType::F32], &[3], false) else { return };
    let mut ranks = Ranks::new(&program, 3, SLOT, true);
    ranks.constants.iter_mut().for_each(|constants| constants.limit_ns = 10_000_000_000);
    let call = DeviceCall { kernel: Kernel::TwoShot, wire: WireType::F32, elements: 128, root: 0 };
    for rank in 0..3 {
        // Far more than can run before the signal.
        let inputs = tensors(&values(rank, 128, 1));
        for _ in 0..if rank == 1 { 200 } else { 400 } {
            ranks.submit(rank, &call, &inputs, 1.0);
        }
    }
    ranks.start();
    ranks.kill(1);
    assert_eq!(ranks.wait(), [true, false, true]);
    for rank in [0, 2] {
        let faults = ranks.faults(rank);
        assert!(faults.iter().any(|f| (f.peer, f.kind) == (1, fault::TIMEOUT)), "rank {rank}: {faults:?}");
    }
}

/// An abort of the job ends a wait long before its limit, which is ten minutes here.
#[test]
fn an_abort_ends_a_wait() {
    let Some(program) = Program::build(&[WireType::F32], &[2], false) else { return };
    let mut ranks = Ranks::new(&program, 2, SLOT, false);
    let call = DeviceCall { kernel: Kernel::OneShot, wire: WireType::F32, elements: 10, root: 0 };
    ranks.submit(0, &call, &tensors(&values(0, 10, 1)), 1.0);
    ranks.start();
    ranks.abort(0);
    assert_eq!(ranks.wait(), [true]);
    assert_eq!(ranks.faults(0), [Fault { peer: 1, kind: fault::ABORTED, launch_number: 1 }]);
}

/// NCCL's stream waits until the word reaches the number of each queued launch. The first launch lowers the word that the abort has
/// set, and ends with a fault. The later launches must still set the word.
#[test]
fn after_an_abort_nccls_stream_waits_for_no_launch() {
    let Some(program) = Program::build(&[WireType::F32], &[1], false) else { return };
    let mut ranks = Ranks::new(&program, 1, SLOT, false);
    (0..3).for_each(|_| ranks.submit_around_sum(0));
    ranks.abort(0);
    ranks.set_word(0, word::PACKED, u64::MAX >> 1);
    ranks.start();
    assert_eq!(ranks.wait(), [true]);
    assert_eq!(ranks.faults(0), [Fault { peer: 0, kind: fault::ABORTED, launch_number: 1 }]);
    assert!(ranks.words(0)[word::PACKED] >= 3, "{:?}", ranks.words(0));
}

/// A slot that was not packed must not be summed: the other ranks do not know of the fault yet.
#[test]
fn after_a_fault_nccl_sums_no_further_slot() {
    let Some(program) = Program::build(&[WireType::F32], &[1], false) else { return };
    let mut ranks = Ranks::new(&program, 1, SLOT, false);
    // The sum never comes.
    ranks.constants[0].limit_ns = 1;
    (0..3).for_each(|_| ranks.submit_around_sum(0));
    ranks.start();
    assert_eq!(ranks.wait(), [true]);
    assert_eq!(ranks.faults(0), [Fault { peer: 0, kind: fault::STALLED, launch_number: 1 }]);
    assert_eq!(ranks.words(0)[word::PACKED], 1);
}

/// A driver may report access that it does not give: the test of access writes to and reads from every peer.
#[test]
fn memory_that_is_not_the_peers_is_noticed() {
    let Some(program) = Program::build(&[WireType::F32], &[3], false) else { return };
    let mut ranks = Ranks::new(&program, 3, SLOT, false);
    ranks.probe(|_| {});
    assert!((0..3).all(|rank| ranks.faults(rank).is_empty()));
    let mut ranks = Ranks::new(&program, 3, SLOT, false);
    // Rank 0 sees its own window instead of rank 2's.
    ranks.probe(|constants| {
        if constants.rank == 0 {
            constants.windows[2] = constants.windows[0];
        }
    });
    let kinds: Vec<_> = ranks.faults(0).iter().map(|f| (f.peer, f.kind)).collect();
    assert_eq!(kinds, [(2, fault::UNREACHABLE)]);
    assert!((1..3).all(|rank| ranks.faults(rank).is_empty()));
}
