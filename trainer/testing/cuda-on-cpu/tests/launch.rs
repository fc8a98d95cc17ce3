//! Launches: their limits, and the memory that they can access.
#![allow(unsafe_code, reason = "tests of a C library")]

mod common;

use std::ffi::CStr;

use common::{
    allocate, assert_one_test_passed, copy_async, download, error_of, get, gpu, is_child, process, set_current, stream,
    upload,
};
use cuda_on_cpu::exports::*;

/// `fill(address, count, value)`.
const PTX: &CStr = c"
.version 6.4
.target sm_50
.address_size 64

.visible .entry fill(.param .u64 address, .param .u32 count, .param .u32 value)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [address];
    ld.param.u32 %r1, [count];
    ld.param.u32 %r2, [value];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r1;
    @%p1 bra DONE;
    mul.wide.u32 %d2, %r6, 4;
    add.u64 %d3, %d1, %d2;
    st.global.u32 [%d3], %r2;
DONE:
    ret;
}
";

fn kernel() -> usize {
    // SAFETY: C strings.
    unsafe {
        let module = get(|module| cuModuleLoadData(module, PTX.as_ptr()));
        assert_eq!(error_of(|function| cuModuleGetFunction(function, module, c"nothing".as_ptr())), 500);
        let kernel = get(|function| cuModuleGetFunction(function, module, c"fill".as_ptr()));
        assert_eq!(get(|function| cuModuleGetFunction(function, module, c"fill".as_ptr())), kernel);
        kernel
    }
}

/// The arguments of a launch.
struct Launch {
    kernel: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: usize,
}

impl Launch {
    fn on(kernel: usize, stream: usize) -> Self {
        Self { kernel, grid: [2, 1, 1], block: [4, 1, 1], shared: 0, stream }
    }

    fn run(&self, address: usize, count: u32, value: u32) -> i32 {
        let parameters: [*const u8; 3] =
            [(&raw const address).cast(), (&raw const count).cast(), (&raw const value).cast()];
        let ([x, y, z], [bx, by, bz]) = (self.grid, self.block);
        let (each, extra) = (parameters.as_ptr(), std::ptr::null());
        // SAFETY: the kernel's three parameters.
        unsafe { cuLaunchKernel(self.kernel, x, y, z, bx, by, bz, self.shared, self.stream, each, extra) }
    }
}

#[test]
fn launches_run_in_stream_order() {
    let _gpu = gpu();
    let (launch, address, copy) = (Launch::on(kernel(), stream()), allocate(32), allocate(32));
    let gate = common::Gate::on(launch.stream);
    assert_eq!(launch.run(address, 7, 0x01010101), 0);
    assert_eq!(copy_async(copy, address, 32, launch.stream), 0);
    assert_eq!(download::<1>(address), [0xFF]);
    gate.open();
    assert_eq!(cuStreamSynchronize(launch.stream), 0);
    let expected = [[1; 4]; 7].as_flattened().iter().chain(&[0xFF; 4]).copied().collect::<Vec<u8>>();
    assert_eq!(download::<32>(copy).as_slice(), expected);
    assert_eq!(Launch { stream: 0, ..launch }.run(address, 1, 3), 0);
    assert_eq!(download::<5>(address), [3, 0, 0, 0, 1]);
    assert_eq!((cuMemFree_v2(address), cuMemFree_v2(copy)), (0, 0));
}

#[test]
fn a_capture_keeps_the_parameters_of_a_launch() {
    let _gpu = gpu();
    let (launch, address) = (Launch::on(kernel(), stream()), allocate(32));
    assert_eq!(cuStreamBeginCapture_v2(launch.stream, 0), 0);
    assert_eq!(launch.run(address, 8, 5), 0);
    let graph = get(|graph| cuStreamEndCapture(launch.stream, graph));
    let executable = get(|executable| cuGraphInstantiateWithFlags(executable, graph, 0));
    for _ in 0..2 {
        upload(address, &[0; 32]);
        assert_eq!(cuGraphLaunch(executable, launch.stream), 0);
        assert_eq!(cuStreamSynchronize(launch.stream), 0);
        assert_eq!(download::<5>(address), [5, 0, 0, 0, 5]);
    }
    assert_eq!((cuGraphDestroy(graph), cuGraphExecDestroy(executable), cuMemFree_v2(address)), (0, 0, 0));
}

#[test]
fn a_launch_beyond_the_limits_is_refused() {
    let _gpu = gpu();
    let kernel = kernel();
    let launch = || Launch::on(kernel, 0);
    let address = allocate(32);
    let run = |launch: Launch| launch.run(address, 8, 0);
    for grid in [[0, 1, 1], [1, 65536, 1], [1, 1, 65536], [1 << 31, 1, 1]] {
        assert_eq!(run(Launch { grid, ..launch() }), 1);
    }
    for block in [[0, 1, 1], [1025, 1, 1], [32, 33, 1], [1, 1, 65]] {
        assert_eq!(run(Launch { block, ..launch() }), 1);
    }
    assert_eq!(run(Launch { shared: 48 << 10, ..launch() }), 0);
    assert_eq!(run(Launch { shared: (48 << 10) + 1, ..launch() }), 1);
    assert_eq!(cuFuncSetAttribute(kernel, 8, 164 << 10), 1);
    assert_eq!(cuFuncSetAttribute(kernel, 8, 163 << 10), 0);
    assert_eq!(get(|value| cuFuncGetAttribute(value, 8, kernel)), 163 << 10);
    assert_eq!(run(Launch { shared: 163 << 10, ..launch() }), 0);
    set_current(1);
    assert_eq!(run(launch()), 400, "of another GPU");
    set_current(0);
    assert_eq!(cuMemFree_v2(address), 0);
}

#[test]
fn ptx_that_cannot_be_compiled_is_refused() {
    let _gpu = gpu();
    // SAFETY: C strings.
    let load = |text: &CStr| error_of(|module| unsafe { cuModuleLoadData(module, text.as_ptr()) });
    assert_eq!(load(c".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry broken("), 218);
    assert_eq!(load(c".version 8.0\n.target sm_90a\n.address_size 64\n"), 218, "for a newer GPU");
}

#[test]
fn memory_of_a_peer_needs_peer_access() {
    let _gpu = gpu();
    let (launch, near) = (Launch::on(kernel(), 0), get(|context| cuCtxGetCurrent(context)));
    set_current(1);
    let (address, far) = (allocate(32), get(|context| cuCtxGetCurrent(context)));
    assert_eq!(cuCtxSetCurrent(near), 0);
    assert_eq!(launch.run(address, 8, 1), 700);
    assert_eq!(cuCtxEnablePeerAccess(far, 0), 0);
    assert_eq!(launch.run(address, 8, 1), 0);
    let lost = std::env::var("CUDA_ON_CPU_PEERS").is_ok_and(|peers| peers == "lies");
    assert_eq!(download::<1>(address), if lost { [0xFF] } else { [1] });
    assert_eq!((cuCtxDisablePeerAccess(far), cuMemFree_v2(address)), (0, 0));
}

#[test]
fn writes_to_a_lying_peer_are_lost() {
    let out = process("loses", &[("CUDA_ON_CPU_GPUS", "2"), ("CUDA_ON_CPU_PEERS", "lies")]);
    assert_one_test_passed("loses", &out);
}

#[test]
#[ignore = "run by writes_to_a_lying_peer_are_lost"]
fn loses() {
    if is_child() {
        memory_of_a_peer_needs_peer_access();
    }
}
