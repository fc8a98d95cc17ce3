//! NCCL in a single process, with one or two ranks.
#![allow(unsafe_code, reason = "tests of a C library")]

mod common;
#[path = "common/nccl.rs"]
mod shared;

use std::ffi::c_int;

use common::{Gate, error_of, get, gpu, set_current, signal, stream, upload};
use cuda_on_cpu::exports::*;
use cuda_on_cpu::nccl::*;
use shared::{F32, Id, NOT_READY, SUM, array, free, id, read, sums, values};

#[test]
fn an_invalid_id_is_refused() {
    let _gpu = gpu();
    assert_eq!(get(|version| ncclGetVersion(version)), 22907);
    let join = |id| error_of(|comm| ncclCommInitRank(comm, 1, id, 0));
    assert_eq!(join(Id::default().0), 4);
    let id = id();
    let comm = get(|comm| ncclCommInitRank(comm, 1, id, 0));
    assert_eq!(join(id), 2, "all ranks have joined");
    assert_eq!(ncclCommDestroy(comm), 0);
    assert_eq!(ncclGroupEnd(), 5);
}

/// Creates the communicators of both GPUs on one thread.
fn both() -> [usize; 2] {
    let id = id();
    let mut comms = [0; 2];
    assert_eq!(ncclGroupStart(), 0);
    for (rank, comm) in comms.iter_mut().enumerate() {
        set_current(rank as i32);
        assert_eq!(ncclCommInitRank(Some(comm), 2, id, rank as c_int), 0);
    }
    assert_eq!(ncclGroupEnd(), 0);
    comms
}

fn end(comms: [usize; 2], streams: &[usize]) {
    assert_eq!(comms.map(|comm| ncclCommDestroy(comm)), [0, 0]);
    streams.iter().for_each(|stream| assert_eq!(cuStreamDestroy_v2(*stream), 0));
}

#[test]
fn one_thread_acts_for_two_ranks() {
    let _gpu = gpu();
    let comms = both();
    let streams = [0, 1].map(|device| {
        set_current(device);
        (stream(), array(&values(device as usize, 1000)))
    });
    for null in [false, true] {
        assert_eq!(ncclGroupStart(), 0);
        for (comm, (stream, address)) in comms.into_iter().zip(streams) {
            let stream = if null { 0 } else { stream };
            assert_eq!(ncclAllReduce(address, address, 1000, F32, SUM, comm, stream), 0);
            assert_eq!(ncclAllReduce(address, address, 1000, F32, 4, comm, stream), 0);
        }
        assert_eq!(ncclGroupEnd(), 0);
        for (device, (stream, address)) in streams.into_iter().enumerate() {
            set_current(device as i32);
            assert_eq!(cuStreamSynchronize(stream), 0);
            let twice = |value: &f32| value * if null { 2.0 } else { 1.0 };
            assert_eq!(read::<f32>(address, 1000), sums(2, 1000).iter().map(twice).collect::<Vec<_>>());
        }
    }
    assert_eq!(
        ncclAllReduce(streams[0].1, streams[0].1, 1, F32, SUM, comms[0], streams[1].0),
        1,
        "another GPU's stream"
    );
    end(comms, &streams.map(|(stream, _)| stream));
    free(&streams.map(|(_, address)| address));
}

#[test]
fn collectives_run_in_the_order_of_their_calls() {
    let _gpu = gpu();
    let comms = both();
    set_current(0);
    let (slow, fast, one, two) = (stream(), stream(), array(&[1f32]), array(&[10f32]));
    set_current(1);
    let (peer, three, four) = (stream(), array(&[2f32]), array(&[20f32]));
    let gate = Gate::on(slow);
    let started = [signal(fast), signal(peer)];
    let sum = |address, comm, stream| assert_eq!(ncclAllReduce(address, address, 1, F32, SUM, comm, stream), 0);
    // The second collective waits for the first, although its stream is free.
    sum(one, comms[0], slow);
    sum(two, comms[0], fast);
    sum(three, comms[1], peer);
    sum(four, comms[1], peer);
    started.iter().for_each(|started| started.recv().unwrap());
    assert_eq!((cuStreamQuery(fast), cuStreamQuery(peer)), (NOT_READY, NOT_READY));
    gate.open();
    assert_eq!(comms.map(|comm| ncclCommFinalize(comm)), [0, 0]);
    assert_eq!([one, two, three, four].map(|address| read::<f32>(address, 1)[0]), [3.0, 30.0, 3.0, 30.0]);
    end(comms, &[slow, fast, peer]);
    free(&[one, two, three, four]);
}

#[test]
fn a_graph_contains_collectives() {
    let _gpu = gpu();
    let id = id();
    let comm = get(|comm| ncclCommInitRank(comm, 1, id, 0));
    let (stream, from, to) = (stream(), array(&[1f32]), array(&[0f32]));
    assert_eq!(cuStreamBeginCapture_v2(stream, 0), 0);
    assert_eq!(ncclAllReduce(from, to, 1, F32, SUM, comm, stream), 0);
    let graph = get(|graph| cuStreamEndCapture(stream, graph));
    let executable = get(|executable| cuGraphInstantiateWithFlags(executable, graph, 0));
    assert_eq!(read::<f32>(to, 1), [0.0]);
    for value in [5f32, 6.0] {
        upload(from, &value.to_ne_bytes());
        assert_eq!((cuGraphLaunch(executable, stream), cuStreamSynchronize(stream)), (0, 0));
        assert_eq!(read::<f32>(to, 1), [value]);
    }
    assert_eq!((cuGraphExecDestroy(executable), cuGraphDestroy(graph), ncclCommDestroy(comm)), (0, 0, 0));
    assert_eq!((cuStreamDestroy_v2(stream), cuMemFree_v2(from), cuMemFree_v2(to)), (0, 0, 0));
}
