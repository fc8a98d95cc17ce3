//! Operation x element type x size x world size x transport, each twice in a row, against exact values.

mod support;

use comm::{DType, ErrorKind, ReduceOp, TransportKind};
use half::{bf16, f16};
use support::matrix::{SIZES, collectives};
use support::{KINDS, Number, WORLDS, ranks};

fn matrix<T: Number>() {
    for kind in KINDS {
        for world_size in WORLDS {
            ranks(kind, world_size, |comm| SIZES.iter().for_each(|n| collectives::<T>(&comm, *n)));
        }
    }
}

#[test]
fn f32_matrix() {
    matrix::<f32>();
}
#[test]
fn f64_matrix() {
    matrix::<f64>();
}
#[test]
fn f16_matrix() {
    matrix::<f16>();
}
#[test]
fn bf16_matrix() {
    matrix::<bf16>();
}
#[test]
fn i32_matrix() {
    matrix::<i32>();
}
#[test]
fn i64_matrix() {
    matrix::<i64>();
}
#[test]
fn u8_matrix() {
    matrix::<u8>();
}

/// The check of gloo: every rank fills with its rank, so the result is w(w-1)/2. Long enough for many rounds of every schedule.
#[test]
fn long_arrays() {
    for kind in KINDS {
        for world_size in [2usize, 3, 4] {
            ranks(kind, world_size, move |comm| {
                for n in [1_500_001usize, 2_097_152] {
                    let mut data = vec![comm.rank() as f32; n];
                    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    let want = (world_size * (world_size - 1) / 2) as f32;
                    assert!(data.iter().all(|v| *v == want), "{kind} world {world_size} n {n}");
                    let mut data = comm.shared_array(n).unwrap();
                    data.fill(comm.rank() as f32);
                    let data = comm.all_reduce_shared(data, n, ReduceOp::Sum).unwrap();
                    assert!(data.iter().all(|v| *v == want), "{kind} world {world_size} n {n}, shared");
                }
            });
        }
    }
}

/// Every rank reads what all ranks of its host have written, in whatever order the ranks drop the memory.
#[test]
fn a_hosts_memory_is_filled_and_read_by_all_its_ranks() {
    for kind in KINDS {
        for (world_size, len) in [(1usize, 10usize), (2, 4096), (3, 10_000), (5, 3), (2, 0)] {
            let sums = ranks(kind, world_size, move |comm| {
                let mut memory = comm.node_memory(len).unwrap();
                let part = memory.part();
                memory.part_mut().iter_mut().zip(part).for_each(|(byte, i)| *byte = (i * 7 + 3) as u8);
                let frozen = memory.freeze().unwrap();
                let all = frozen.as_ref();
                let want: Vec<u8> = (0..len).map(|i| (i * 7 + 3) as u8).collect();
                assert_eq!(all, want, "{kind}, rank {} of {world_size}", comm.rank());
                // The memory outlives collectives after it.
                comm.barrier().unwrap();
                all.iter().map(|byte| u64::from(*byte)).sum::<u64>()
            });
            assert!(sums.iter().all(|sum| *sum == sums[0]));
        }
    }
}

#[test]
fn memory_that_no_process_has_is_an_error_on_every_rank() {
    for kind in KINDS {
        // More than an address space, and more than a number of bytes can be.
        for len in [1usize << 60, usize::MAX - 10] {
            let errors = ranks(kind, 2, move |comm| comm.node_memory(len).unwrap_err());
            for error in errors {
                let cause = format!("rank 0 cannot make {len} bytes of shared memory");
                assert!(error.kind == ErrorKind::Setup && error.message.contains(&cause), "{kind}: {error}");
            }
        }
        for (len, want) in
            [(1usize << 56, ErrorKind::Setup), (1 << 60, ErrorKind::Usage), (usize::MAX, ErrorKind::Usage)]
        {
            let errors = ranks(kind, 2, move |comm| {
                let result = comm.shared_array::<f32>(len).map(drop);
                // The other rank may notice the end of the job in its next call.
                result.and_then(|()| comm.barrier()).unwrap_err().kind
            });
            assert_eq!(errors, [want; 2], "{kind}, {len} elements");
        }
    }
}

/// Values whose sum depends on the order: all ranks have the same bits, in every run.
#[test]
fn sums_are_bit_identical_on_all_ranks_and_in_all_runs() {
    fn value(rank: usize, i: usize) -> f64 {
        let x = ((rank * 7919 + i * 104_729) % 100_003) as f64 / 17.0 - 2900.0;
        x * 10f64.powi((i % 9) as i32 - 4)
    }
    fn sums(kind: TransportKind, world_size: usize, n: usize) -> Vec<Vec<u32>> {
        ranks(kind, world_size, move |comm| {
            let mut data: Vec<f32> = (0..n).map(|i| value(comm.rank(), i) as f32).collect();
            let mut shared = comm.shared_array(n).unwrap();
            shared.copy_from_slice(&data);
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            let shared = comm.all_reduce_shared(shared, n, ReduceOp::Sum).unwrap();
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&shared), bits(&data), "shared memory has other bits");
            bits(&data)
        })
    }
    for kind in KINDS {
        for world_size in [2, 3, 4, 7] {
            for n in [5, 3000, 70_001] {
                let first = sums(kind, world_size, n);
                assert!(first.iter().all(|r| *r == first[0]), "{kind}: ranks differ, world {world_size} n {n}");
                assert_eq!(sums(kind, world_size, n), first, "{kind}: runs differ, world {world_size} n {n}");
                for (i, bits) in first[0].iter().enumerate() {
                    let exact: f64 = (0..world_size).map(|r| value(r, i)).sum();
                    let scale: f64 = (0..world_size).map(|r| value(r, i).abs()).sum();
                    let error = (f64::from(f32::from_bits(*bits)) - exact).abs();
                    assert!(error <= 1e-6 * scale, "{kind} world {world_size} element {i}: off by {error:e}");
                }
            }
        }
    }
}

/// The 16-bit sum is the exact sum rounded once: 2048 + 1 + 1 would stay 2048 if every addition rounded to f16.
#[test]
fn sixteen_bit_sums_are_rounded_once() {
    for kind in KINDS {
        for n in [3usize, 60_000] {
            ranks(kind, 3, move |comm| {
                let mut data = vec![f16::from_f32(if comm.rank() == 0 { 2048.0 } else { 1.0 }); n];
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|v| v.to_f32() == 2050.0), "{kind} n {n}: {}", data[0]);
            });
        }
    }
}

/// Integers in ±100 summed over all ranks; NaN and infinities arrive everywhere.
#[test]
fn special_values() {
    for kind in KINDS {
        ranks(kind, 4, move |comm| {
            let mut data: Vec<i32> = (0..1000).map(|i| (i * 37 + comm.rank() as i32 * 11) % 201 - 100).collect();
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            for (i, v) in data.iter().enumerate() {
                assert_eq!(*v, (0..4).map(|r| (i as i32 * 37 + r * 11) % 201 - 100).sum::<i32>());
            }
            for n in [1usize, 50_000] {
                for op in ReduceOp::ALL {
                    let mut data = vec![if comm.rank() == 2 { f32::NAN } else { 1.0 }; n];
                    comm.all_reduce(&mut data, op).unwrap();
                    assert!(data.iter().all(|v| v.is_nan()), "{kind} {op} loses a NaN");
                }
                let mut data = vec![if comm.rank() == 1 { f32::INFINITY } else { -1e30 }; n];
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|v| *v == f32::INFINITY));
            }
        });
    }
}

/// The calls with a type known at run time refuse buffers that are not arrays of it.
#[test]
fn bytes_with_a_type() {
    for kind in KINDS {
        ranks(kind, 2, |comm| {
            let mut data = [comm.rank() as f64 + 1.5; 9];
            comm.all_reduce_bytes(bytemuck::cast_slice_mut(&mut data), DType::F64, ReduceOp::Mean).unwrap();
            assert_eq!(data, [2.0; 9]);
        });
        // Its own job: the refusal ends the job, also for a rank that is still in its last collective.
        ranks(kind, 2, |comm| {
            let mut words = [0u64; 2];
            let odd = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[1..9];
            let error = comm.all_reduce_bytes(odd, DType::F64, ReduceOp::Sum).unwrap_err();
            assert!(error.message.contains("not an aligned array of f64"), "{error}");
        });
    }
}
