//! NCCL with one process per rank.
#![allow(unsafe_code, reason = "tests of a C library")]

mod common;
#[path = "common/nccl.rs"]
mod shared;

use std::ffi::{CStr, c_int};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{allocate, assert_one_test_passed, get, gpu, is_child, signal, stream, upload};
use cuda_on_cpu::exports::*;
use cuda_on_cpu::nccl::*;
use shared::{F32, NOT_READY, SUM, array, file, free, id, read, sums, values};

/// Number of four-byte elements that fit into a slot.
const SLOT: usize = 1 << 18;

/// Variables of a process.
type Environment<'a> = &'a [(&'a str, &'a str)];

/// Starts the process of a rank. Rank r uses GPU r unless `environment` changes that.
fn rank(test: &str, id: UniqueId, rank: usize, world_size: usize, environment: Environment<'_>) -> Child {
    let id: String = id.internal.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"]);
    command.env("CHILD", "1").env("RANK", rank.to_string()).env("WORLD", world_size.to_string()).env("ID", id);
    command.env("CUDA_ON_CPU_GPUS", "3").env("CUDA_VISIBLE_DEVICES", rank.to_string());
    command.env("CUDA_ON_CPU_MEMORY", (256 << 20).to_string()).envs(environment.iter().copied());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

fn assert_all_succeed(children: impl IntoIterator<Item = Child>) {
    // Start all processes before waiting for the first.
    let children: Vec<_> = children.into_iter().collect();
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    for (rank, output) in outputs.iter().enumerate() {
        assert_one_test_passed(&format!("rank {rank}"), output);
    }
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap()
}

/// In the process of a rank: returns rank, world size and id. Aborts the process after 100 s if the test hangs.
fn me() -> (usize, usize, UniqueId) {
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_secs(100));
        println!("the test hangs");
        std::process::abort()
    });
    let text = variable("ID");
    let byte = |index| u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap();
    let internal = std::array::from_fn(byte);
    (variable("RANK").parse().unwrap(), variable("WORLD").parse().unwrap(), UniqueId { internal })
}

fn join() -> (usize, usize, usize) {
    let (rank, world_size, id) = me();
    let comm = get(|comm| ncclCommInitRank(comm, world_size as c_int, id, rank as c_int));
    assert!(!Path::new(&file(id)).exists(), "the file is unlinked when all ranks have joined");
    (comm, rank, world_size)
}

/// Waits for a line from the parent process.
fn line() {
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn ranks_are_processes() {
    let _gpu = gpu();
    for world_size in [1, 2, 3] {
        let id = id();
        assert!(Path::new(&file(id)).exists());
        assert_all_succeed((0..world_size).map(|number| rank("collectives", id, number, world_size, &[])));
    }
}

#[test]
#[ignore = "run by ranks_are_processes"]
fn collectives() {
    if !is_child() {
        return;
    }
    let _gpu = gpu();
    let (comm, rank, world_size) = join();
    let stream = stream();
    let done = |code: i32| {
        assert_eq!(code, 0);
        assert_eq!(cuStreamSynchronize(stream), 0);
    };
    assert_eq!(get(|count| ncclCommCount(comm, count)), world_size as c_int);
    assert_eq!(get(|found| ncclCommUserRank(comm, found)), rank as c_int);
    assert_eq!(get(|device| ncclCommCuDevice(comm, device)), 0);
    assert_eq!(get(|error| ncclCommGetAsyncError(comm, error)), 0);
    let last = world_size - 1;
    for count in [0, 1, 3, 1001, SLOT, 2 * SLOT + 7] {
        let (own, room) = (array(&values(rank, count.max(1))), allocate(4 * count.max(1)));
        done(ncclAllReduce(own, room, count, F32, SUM, comm, stream));
        assert_eq!(read::<f32>(room, count), sums(world_size, count), "{count}");
        assert_eq!(read::<f32>(own, count), values(rank, count));
        // Null pointers where nothing is read or written.
        let to = if rank == last { room } else { 0 };
        assert_eq!(cuMemsetD8_v2(room, 0, 4 * count.max(1)), 0);
        done(ncclReduce(own, to, count, F32, SUM, last as c_int, comm, stream));
        assert_eq!(read::<f32>(room, count), if rank == last { sums(world_size, count) } else { vec![0.0; count] });
        let from = if rank == last { own } else { 0 };
        done(ncclBroadcast(from, room, count, F32, last as c_int, comm, stream));
        assert_eq!(read::<f32>(room, count), values(last, count));
        done(ncclAllReduce(own, own, count, F32, SUM, comm, stream));
        assert_eq!(read::<f32>(own, count), sums(world_size, count), "in place");
        assert_eq!((cuMemFree_v2(own), cuMemFree_v2(room)), (0, 0));
    }
    for count in [1, 1001, SLOT + 5] {
        let all: Vec<f32> = (0..world_size).flat_map(|from| values(from, count)).collect();
        let (own, room) = (array(&values(rank, count)), allocate(4 * count * world_size));
        done(ncclAllGather(own, room, count, F32, comm, stream));
        assert_eq!(read::<f32>(room, count * world_size), all, "{count}");
        upload(room, &vec![0; 4 * count * world_size]);
        let part = room + 4 * count * rank;
        upload(part, &values(rank, count).iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<_>>());
        done(ncclAllGather(part, room, count, F32, comm, stream));
        assert_eq!(read::<f32>(room, count * world_size), all, "in place");
        let parts = sums(world_size, count * world_size)[count * rank..][..count].to_vec();
        let long = array(&values(rank, count * world_size));
        done(ncclReduceScatter(long, own, count, F32, SUM, comm, stream));
        assert_eq!(read::<f32>(own, count), parts, "{count}");
        let part = long + 4 * count * rank;
        done(ncclReduceScatter(long, part, count, F32, SUM, comm, stream));
        assert_eq!(read::<f32>(part, count), parts, "in place");
        free(&[own, room, long]);
    }
    types(comm, rank, world_size, stream);
    assert_eq!(ncclCommFinalize(comm), 0);
    assert_eq!((ncclCommDestroy(comm), ncclCommDestroy(comm)), (0, 4));
}

/// Tests all reductions of all data types: of 3 on rank 0, then 4, 5.
fn types(comm: usize, rank: usize, world_size: usize, stream: usize) {
    let ours: Vec<u8> = (0..world_size as u8).map(|rank| 3 + rank).collect();
    let sum: u8 = ours.iter().sum();
    let results = [sum, ours.iter().product(), 2 + world_size as u8, 3, sum / world_size as u8];
    let own = 3 + rank as u8;
    let f16 = |value: u8| {
        let exponent = value.ilog2();
        ((exponent as u16 + 15) << 10 | (u16::from(value) << 10 >> exponent & 0x3FF)).to_ne_bytes().to_vec()
    };
    let bf16 = |value: u8| f32::from(value).to_ne_bytes()[2..].to_vec();
    let float = |value: u8| f32::from(value).to_ne_bytes().to_vec();
    type Bytes<'a> = &'a dyn Fn(u8) -> Vec<u8>;
    let bytes: [(c_int, Bytes<'_>); 10] = [
        (0, &|value| vec![value]),
        (1, &|value| vec![value]),
        (2, &|value| i32::from(value).to_ne_bytes().to_vec()),
        (3, &|value| u32::from(value).to_ne_bytes().to_vec()),
        (4, &|value| i64::from(value).to_ne_bytes().to_vec()),
        (5, &|value| u64::from(value).to_ne_bytes().to_vec()),
        (6, &f16),
        (7, &float),
        (8, &|value| f64::from(value).to_ne_bytes().to_vec()),
        (9, &bf16),
    ];
    for (of, bytes) in bytes {
        for (reduction, result) in results.iter().enumerate() {
            // The average of 3 and 4 is not an integer.
            if of >= 6 && world_size == 2 && reduction == 4 {
                continue;
            }
            let address = array(&bytes(own).repeat(5));
            assert_eq!(ncclAllReduce(address, address, 5, of, reduction as c_int, comm, stream), 0);
            assert_eq!(cuStreamSynchronize(stream), 0);
            let expected = bytes(*result).repeat(5);
            assert_eq!(read::<u8>(address, expected.len()), expected, "type {of}, reduction {reduction}");
            assert_eq!(cuMemFree_v2(address), 0);
        }
    }
    let refused = |of, reduction| ncclAllReduce(stream, stream, 1, of, reduction, comm, stream);
    assert_eq!((refused(12, SUM), refused(-1, SUM), refused(F32, 5)), (4, 4, 4));
    assert_eq!(ncclBroadcast(0, 0, 1, F32, world_size as c_int, comm, stream), 4);
    assert_eq!(ncclReduce(0, 0, 1, F32, SUM, -1, comm, stream), 4);
}

#[test]
fn ranks_wait_for_a_dead_rank_until_they_abort() {
    let _gpu = gpu();
    let id = id();
    let mut ranks: Vec<_> = (0..3).map(|number| rank("waits", id, number, 3, &[])).collect();
    let mut said: Vec<_> = ranks.iter_mut().map(|rank| BufReader::new(rank.stdout.take().unwrap()).lines()).collect();
    // Rank 2 joins and dies. Rank 0 aborts. Rank 1 still waits, and aborts after rank 0.
    let mut hear = |rank: usize, what: &str| {
        assert!(said[rank].any(|line| line.unwrap().contains(what)), "rank {rank} does not print: {what}");
    };
    (0..3).for_each(|rank| hear(rank, "joined"));
    ranks[2].kill().unwrap();
    ranks[2].wait().unwrap();
    for rank in [0, 1] {
        ranks[rank].stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        hear(rank, "waits");
    }
    for mut rank in ranks.drain(..2) {
        rank.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        assert!(rank.wait().unwrap().success());
    }
}

#[test]
#[ignore = "run by ranks_wait_for_a_dead_rank_until_they_abort"]
fn waits() {
    if !is_child() {
        return;
    }
    let _gpu = gpu();
    let (comm, ..) = join();
    println!("\njoined");
    line();
    let (stream, other) = (stream(), stream());
    let address = array(&[1f32; 1000]);
    let started = signal(stream);
    for stream in [stream, stream, other] {
        assert_eq!(ncclAllReduce(address, address, 1000, F32, SUM, comm, stream), 0);
    }
    started.recv().unwrap();
    assert_eq!((cuStreamQuery(stream), cuStreamQuery(other)), (NOT_READY, NOT_READY));
    assert_eq!(get(|error| ncclCommGetAsyncError(comm, error)), 0);
    println!("\nwaits");
    line();
    assert_eq!((cuStreamQuery(stream), cuStreamQuery(other)), (NOT_READY, NOT_READY));
    assert_eq!(ncclCommAbort(comm), 0);
    assert_eq!((cuStreamSynchronize(stream), cuStreamSynchronize(other)), (0, 0));
    assert_eq!(ncclAllReduce(address, address, 1000, F32, SUM, comm, stream), 4);
    assert_eq!((cuMemFree_v2(address), cuStreamDestroy_v2(stream), cuStreamDestroy_v2(other)), (0, 0, 0));
}

#[test]
fn mismatched_ranks_are_refused() {
    let _gpu = gpu();
    let (first, elsewhere) = (("CUDA_VISIBLE_DEVICES", "0"), ("NCCL_HOSTID", "elsewhere"));
    let refused = |codes: &[&str], ranks: &[(usize, usize, Environment<'_>)]| {
        let id = id();
        let start = |(code, (number, world_size, environment)): (&&str, &(usize, usize, Environment<'_>))| {
            rank("is_answered", id, *number, *world_size, &[environment, [("CODE", *code)].as_slice()].concat())
        };
        assert_all_succeed(codes.iter().zip(ranks).map(start));
        let _ = std::fs::remove_file(file(id));
    };
    refused(&["5", "5", "6"], &[(0, 3, &[]), (1, 3, &[first]), (2, 3, &[])]);
    refused(&["0", "0"], &[(0, 2, &[]), (1, 2, &[first, elsewhere])]);
    refused(&["4"], &[(2, 2, &[])]);
    // A rank that comes late finds no file: code 2.
    refused(&["4 2", "4 2"], &[(0, 2, &[]), (1, 3, &[])]);
    refused(&["4 2", "4 2"], &[(0, 2, &[]), (0, 2, &[])]);
}

#[test]
#[ignore = "run by mismatched_ranks_are_refused"]
fn is_answered() {
    if !is_child() {
        return;
    }
    let _gpu = gpu();
    let (rank, world_size, id) = me();
    let mut comm = 1;
    let code = ncclCommInitRank(Some(&mut comm), world_size as c_int, id, rank as c_int);
    assert!(variable("CODE").contains(&code.to_string()), "{code}, not {}", variable("CODE"));
    assert_eq!(comm == 0, code != 0);
    // SAFETY: static strings.
    let [text, last] = [ncclGetErrorString(code), ncclGetLastError(0)].map(|text| unsafe { CStr::from_ptr(text) });
    assert!(!text.is_empty() && last.is_empty() == (code == 0), "{text:?} {last:?}");
    if code == 5 {
        assert!(last.to_str().unwrap().starts_with("Duplicate GPU detected"), "{last:?}");
    }
}
