//! Streams, events and graphs, and the order between them.
#![allow(unsafe_code, reason = "tests of a C library")]

mod common;

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{
    Gate, allocate, copy_async, download, error_of, event, get, gpu, set_current, stream, upload, upload_async,
};
use cuda_on_cpu::exports::*;

const NOT_READY: i32 = 600;

#[test]
fn a_wait_refers_to_the_last_record_before_the_call() {
    let _gpu = gpu();
    let (first, second, third, event) = (stream(), stream(), stream(), event());
    let (from, to) = (allocate(4), allocate(4));
    upload(from, &[0; 4]);
    let gate = Gate::on(first);
    assert_eq!(upload_async(from, &[1, 2, 3, 4], first), 0);
    assert_eq!(cuEventQuery(event), 0, "never recorded");
    assert_eq!(cuEventRecord(event, first), 0);
    assert_eq!(cuStreamWaitEvent(second, event, 0), 0);
    assert_eq!(copy_async(to, from, 4, second), 0);
    assert_eq!(cuEventQuery(event), NOT_READY);
    // A later record of the same event completes at once, but does not release the earlier wait.
    assert_eq!(cuEventRecord(event, third), 0);
    assert_eq!(cuEventSynchronize(event), 0);
    assert_eq!(cuStreamSynchronize(third), 0);
    assert_eq!(cuEventQuery(event), 0);
    assert_eq!(cuStreamQuery(second), NOT_READY);
    gate.open();
    assert_eq!(cuStreamSynchronize(second), 0);
    assert_eq!(cuStreamQuery(second), 0);
    assert_eq!(download::<4>(to), [1, 2, 3, 4]);
    for stream in [first, second, third] {
        assert_eq!(cuStreamDestroy_v2(stream), 0);
    }
    assert_eq!(cuEventDestroy_v2(event), 0);
    for address in [from, to] {
        assert_eq!(cuMemFree_v2(address), 0);
    }
}

#[test]
fn the_null_stream_waits_for_blocking_streams_only() {
    let _gpu = gpu();
    let (free, blocking) = (stream(), get(|stream| cuStreamCreate(stream, 0)));
    let address = allocate(4);
    let gate = Gate::on(free);
    assert_eq!(upload_async(address, &[1; 4], free), 0);
    assert_eq!(download::<1>(address), [0xFF]);
    assert_eq!(upload_async(address, &[2; 4], blocking), 0);
    assert_eq!(download::<1>(address), [2]);
    gate.open();
    assert_eq!(cuCtxSynchronize(), 0);
    assert_eq!(download::<1>(address), [1]);
    assert_eq!((cuStreamDestroy_v2(free), cuStreamDestroy_v2(blocking), cuMemFree_v2(address)), (0, 0, 0));
}

#[test]
fn pinned_memory_is_read_in_stream_order() {
    let _gpu = gpu();
    let (stream, address) = (stream(), allocate(8));
    let pinned = get(|address| cuMemAllocHost_v2(address, 4));
    // SAFETY: memory of four bytes, which the stream reads only after the gate.
    let shared = unsafe { std::slice::from_raw_parts_mut(pinned as *mut u8, 4) };
    let mut pageable = [1; 4];
    shared.fill(1);
    let gate = Gate::on(stream);
    assert_eq!(upload_async(address, &pageable, stream), 0);
    // SAFETY: as above.
    assert_eq!(unsafe { cuMemcpyHtoDAsync_v2(address + 4, pinned as *const _, 4, stream) }, 0);
    pageable.fill(2);
    shared.fill(2);
    gate.open();
    // A copy to pageable memory: the call waits.
    let mut back = [0u8; 8];
    // SAFETY: an array's memory.
    assert_eq!(unsafe { cuMemcpyDtoHAsync_v2(back.as_mut_ptr().cast(), address, 8, stream) }, 0);
    assert_eq!((back, pageable[0]), ([1, 1, 1, 1, 2, 2, 2, 2], 2));
    assert_eq!((cuStreamDestroy_v2(stream), cuMemFreeHost(pinned), cuMemFree_v2(address)), (0, 0, 0));
}

#[test]
fn a_destroyed_stream_executes_its_queue() {
    let _gpu = gpu();
    let (stream, address, event) = (stream(), allocate(4), event());
    let gate = Gate::on(stream);
    assert_eq!(upload_async(address, &[3; 4], stream), 0);
    assert_eq!(cuEventRecord(event, stream), 0);
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    assert_eq!(cuStreamSynchronize(stream), 400);
    assert_eq!(cuStreamDestroy_v2(stream), 400);
    gate.open();
    assert_eq!(cuEventSynchronize(event), 0);
    assert_eq!(download::<1>(address), [3]);
    assert_eq!((cuEventDestroy_v2(event), cuMemFree_v2(address)), (0, 0));
}

#[test]
fn events_measure_time() {
    let _gpu = gpu();
    let (stream, start, end) = (stream(), event(), event());
    assert_eq!(error_of(|time| cuEventElapsedTime(time, start, end)), 400, "never recorded");
    assert_eq!(cuEventRecord(start, stream), 0);
    let gate = Gate::on(stream);
    assert_eq!(cuEventRecord(end, stream), 0);
    assert_eq!(error_of(|time| cuEventElapsedTime(time, start, end)), NOT_READY);
    gate.open();
    assert_eq!(cuEventSynchronize(end), 0);
    assert!(get(|time| cuEventElapsedTime_v2(time, start, end)) >= 0.0f32);
    let untimed = get(|event| cuEventCreate(event, 2));
    assert_eq!(cuEventRecord(untimed, stream), 0);
    assert_eq!(error_of(|time| cuEventElapsedTime(time, start, untimed)), 400);
    set_current(1);
    let elsewhere = event();
    assert_eq!(cuEventRecord(elsewhere, stream), 400, "of another GPU");
    set_current(0);
    assert_eq!(cuStreamDestroy_v2(stream), 0);
}

#[test]
fn rows_are_copied() {
    let _gpu = gpu();
    let (stream, address) = (stream(), allocate(16));
    let data = [1u8, 2, 3, 4];
    let host = std::ptr::null_mut();
    let mut copy = Copy2d {
        from: Copy2dSide { x: 0, y: 0, kind: 1, host: data.as_ptr().cast(), device: 0, array: 0, pitch: 2 },
        to: Copy2dSide { x: 1, y: 1, kind: 2, host, device: address, array: 0, pitch: 5 },
        width: 2,
        height: 2,
    };
    // SAFETY: two rows of two bytes.
    assert_eq!(unsafe { cuMemcpy2DAsync_v2(Some(&copy), stream) }, 0);
    assert_eq!(cuStreamSynchronize(stream), 0);
    assert_eq!(download::<8>(address + 6), [1, 2, 0xFF, 0xFF, 0xFF, 3, 4, 0xFF]);
    copy.to.pitch = 9;
    // SAFETY: refused, because the last row ends behind the block.
    assert_eq!(unsafe { cuMemcpy2DAsync_v2(Some(&copy), stream) }, 1);
    assert_eq!((cuStreamDestroy_v2(stream), cuMemFree_v2(address)), (0, 0));
}

fn types(graph: usize) -> Vec<i32> {
    // SAFETY: a null pointer asks for the count only.
    let count = get(|count| unsafe { cuGraphGetNodes(graph, std::ptr::null_mut(), count) });
    let (mut nodes, mut room) = (vec![0; count], count);
    // SAFETY: there is room for `room` handles.
    assert_eq!(unsafe { cuGraphGetNodes(graph, nodes.as_mut_ptr(), Some(&mut room)) }, 0);
    assert_eq!(room, count);
    nodes.into_iter().map(|node| get(|kind| cuGraphNodeGetType(node, kind))).collect()
}

#[test]
fn a_capture_is_replayed() {
    let _gpu = gpu();
    let (stream, other, fork, join) = (stream(), stream(), event(), event());
    let (one, two, three) = (allocate(4), allocate(4), allocate(4));
    assert_eq!(cuStreamBeginCapture_v2(stream, 0), 0);
    assert_eq!(get(|status| cuStreamIsCapturing(stream, status)), 1);
    assert_eq!(copy_async(two, one, 4, stream), 0);
    assert_eq!(cuEventRecord(fork, stream), 0);
    assert_eq!(cuStreamWaitEvent(other, fork, 0), 0);
    assert_eq!(get(|status| cuStreamIsCapturing(other, status)), 1);
    assert_eq!(copy_async(three, two, 4, other), 0);
    assert_eq!(cuEventRecord(join, other), 0);
    assert_eq!(cuStreamWaitEvent(stream, join, 0), 0);
    assert_eq!(cuMemsetD8Async(two, 0, 4, stream), 0);
    assert_eq!(cuEventSynchronize(join), 907);
    let graph = get(|graph| cuStreamEndCapture(stream, graph));
    assert_eq!(get(|status| cuStreamIsCapturing(other, status)), 0);
    assert_eq!(types(graph), [1, 1, 2]);
    let executable = get(|executable| cuGraphInstantiateWithFlags(executable, graph, 0));
    assert_eq!(cuGraphDestroy(graph), 0);
    assert_eq!(download::<1>(three), [0xFF], "nothing has run yet");
    for value in [5, 6] {
        upload(one, &[value; 4]);
        assert_eq!(cuGraphUpload(executable, stream), 0);
        assert_eq!(cuGraphLaunch(executable, stream), 0);
        assert_eq!(cuStreamSynchronize(stream), 0);
        assert_eq!((download::<1>(two), download::<1>(three)), ([0], [value]));
    }
    assert_eq!(cuGraphExecDestroy(executable), 0);
    assert_eq!(cuGraphLaunch(executable, stream), 400);
    for address in [one, two, three] {
        assert_eq!(cuMemFree_v2(address), 0);
    }
    assert_eq!((cuStreamDestroy_v2(stream), cuStreamDestroy_v2(other)), (0, 0));
}

/// Waits until the other branch's node has run.
unsafe extern "C" fn wait_for_other_branch(flag: *mut c_void) {
    // SAFETY: the test's flag.
    let flag = unsafe { &*flag.cast::<AtomicBool>() };
    let start = Instant::now();
    while !flag.load(Ordering::Acquire) {
        assert!(start.elapsed() < Duration::from_secs(60), "the other branch does not run");
        std::thread::yield_now();
    }
}

unsafe extern "C" fn raise(flag: *mut c_void) {
    // SAFETY: the test's flag.
    unsafe { &*flag.cast::<AtomicBool>() }.store(true, Ordering::Release);
}

/// Only events order the branches of a graph, not the calls that have captured them.
#[test]
fn branches_of_a_graph_run_side_by_side() {
    let _gpu = gpu();
    let (stream, other, fork, join) = (stream(), stream(), event(), event());
    let (one, two) = (allocate(4), allocate(4));
    let flag = AtomicBool::new(false);
    let data = (&raw const flag).cast_mut().cast();
    assert_eq!(cuStreamBeginCapture_v2(stream, 0), 0);
    assert_eq!(cuEventRecord(fork, stream), 0);
    assert_eq!(cuStreamWaitEvent(other, fork, 0), 0);
    // SAFETY: the flag lives until the graph has run.
    let waits = unsafe {
        [cuLaunchHostFunc(other, Some(wait_for_other_branch), data), cuLaunchHostFunc(stream, Some(raise), data)]
    };
    assert_eq!(waits, [0, 0]);
    assert_eq!(cuMemsetD8Async(one, 7, 4, other), 0);
    assert_eq!(cuEventRecord(join, other), 0);
    assert_eq!(cuStreamWaitEvent(stream, join, 0), 0);
    assert_eq!(copy_async(two, one, 4, stream), 0);
    let graph = get(|graph| cuStreamEndCapture(stream, graph));
    let executable = get(|executable| cuGraphInstantiateWithFlags(executable, graph, 0));
    for _ in 0..3 {
        upload(one, &[0; 4]);
        flag.store(false, Ordering::Release);
        assert_eq!(cuGraphLaunch(executable, stream), 0);
        assert_eq!(cuStreamSynchronize(stream), 0);
        assert_eq!(download::<1>(two), [7]);
    }
    assert_eq!((cuGraphExecDestroy(executable), cuGraphDestroy(graph)), (0, 0));
    assert_eq!((cuMemFree_v2(one), cuMemFree_v2(two)), (0, 0));
    assert_eq!((cuStreamDestroy_v2(stream), cuStreamDestroy_v2(other)), (0, 0));
}

#[test]
fn unsafe_calls_invalidate_a_capture() {
    let _gpu = gpu();
    let (stream, other, event) = (stream(), stream(), event());
    let address = allocate(4);
    let end = || error_of(|graph| cuStreamEndCapture(stream, graph));
    assert_eq!(end(), 401, "no capture has begun");
    let refusals: [(&str, i32, &dyn Fn() -> i32); 6] = [
        ("allocation", 900, &|| error_of(|address| cuMemAlloc_v2(address, 4))),
        ("free", 900, &|| cuMemFree_v2(address)),
        ("copy", 900, &|| cuMemsetD8_v2(address, 0, 1)),
        ("wait for the stream", 900, &|| cuStreamSynchronize(stream)),
        ("wait for the GPU", 900, &|| cuCtxSynchronize()),
        ("wait for uncaptured work", 905, &|| {
            assert_eq!(cuEventRecord(event, other), 0);
            cuStreamWaitEvent(stream, event, 0)
        }),
    ];
    for (what, code, call) in refusals {
        assert_eq!(cuStreamBeginCapture_v2(stream, 0), 0);
        assert_eq!(call(), code, "{what}");
        assert_eq!(get(|status| cuStreamIsCapturing(stream, status)), 2);
        assert_eq!(cuMemsetD8Async(address, 0, 1, stream), 901);
        assert_eq!(end(), 901, "{what}");
    }
    assert_eq!(cuStreamBeginCapture_v2(stream, 2), 0);
    let relaxed = allocate(4);
    assert_eq!(cuEventRecord(event, stream), 0);
    assert_eq!(cuStreamWaitEvent(other, event, 0), 0);
    assert_eq!(cuMemsetD8Async(address, 0, 1, other), 0);
    assert_eq!(error_of(|graph| cuStreamEndCapture(other, graph)), 903);
    assert_eq!(end(), 904, "the other stream has not been joined");
    assert_eq!((cuMemFree_v2(relaxed), cuMemFree_v2(address)), (0, 0));
    assert_eq!((cuStreamDestroy_v2(stream), cuStreamDestroy_v2(other)), (0, 0));
}
