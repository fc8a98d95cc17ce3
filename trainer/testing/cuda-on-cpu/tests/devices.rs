//! The machine that the environment describes, contexts, and refused calls.
#![allow(unsafe_code, reason = "tests of a C library")]

mod common;

use std::ffi::CStr;

use common::{allocate, assert_one_test_passed, error_of, get, gpu, is_child, process, set_current, stream};
use cuda_on_cpu::exports::*;

fn name(device: i32) -> String {
    let mut name = [0u8; 64];
    // SAFETY: there is room for 64 bytes.
    assert_eq!(unsafe { cuDeviceGetName(name.as_mut_ptr().cast(), 64, device) }, 0);
    CStr::from_bytes_until_nul(&name).unwrap().to_str().unwrap().to_owned()
}

#[track_caller]
fn passes(test: &str, environment: &[(&str, &str)]) {
    let out = process(test, environment);
    assert_one_test_passed(test, &out);
}

#[test]
fn devices_are_those_that_are_visible() {
    passes("sees_some", &[("CUDA_ON_CPU_GPUS", "4"), ("CUDA_VISIBLE_DEVICES", "2, 0,GPU-1313,9,1")]);
    passes("sees_none", &[("CUDA_VISIBLE_DEVICES", "")]);
    passes("sees_none", &[("CUDA_ON_CPU_INIT", "100")]);
}

#[test]
#[ignore = "run by devices_are_those_that_are_visible"]
fn sees_some() {
    if !is_child() {
        return;
    }
    let _gpu = gpu();
    assert_eq!(get(|count| cuDeviceGetCount(count)), 3);
    assert_eq!([0, 1, 2].map(name), ["CPU as GPU C", "CPU as GPU A", "CPU as GPU D"]);
    assert_eq!(get(|uuid| cuDeviceGetUuid_v2(uuid, 0)), [0x12; 16]);
    assert_eq!(error_of(|device| cuDeviceGet(device, 3)), 101);
}

#[test]
#[ignore = "run by devices_are_those_that_are_visible"]
fn sees_none() {
    if !is_child() {
        return;
    }
    assert_eq!(cuInit(0), 100);
    assert_eq!(error_of(|count| cuDeviceGetCount(count)), 3);
}

#[test]
fn peers_can_be_without_access() {
    passes("has_no_access", &[("CUDA_ON_CPU_GPUS", "2"), ("CUDA_ON_CPU_PEERS", "none")]);
}

#[test]
#[ignore = "run by peers_can_be_without_access"]
fn has_no_access() {
    if !is_child() {
        return;
    }
    let _gpu = gpu();
    assert_eq!(get(|can| cuDeviceCanAccessPeer(can, 0, 1)), 0);
    let other = get(|context| cuDevicePrimaryCtxRetain(context, 1));
    assert_eq!(cuCtxEnablePeerAccess(other, 0), 217);
}

#[test]
fn peer_access_is_enabled_and_disabled() {
    let _gpu = gpu();
    let contexts = [0, 1].map(|device| get(|context| cuDevicePrimaryCtxRetain(context, device)));
    assert_eq!(get(|can| cuDeviceCanAccessPeer(can, 0, 1)), 1);
    assert_eq!(get(|can| cuDeviceCanAccessPeer(can, 1, 1)), 0);
    assert_eq!(cuCtxEnablePeerAccess(contexts[0], 0), 101);
    assert_eq!(cuCtxEnablePeerAccess(contexts[1], 0), 0);
    assert_eq!(cuCtxEnablePeerAccess(contexts[1], 0), 704);
    assert_eq!(cuCtxDisablePeerAccess(contexts[1]), 0);
    assert_eq!(cuCtxDisablePeerAccess(contexts[1]), 705);
    for device in [0, 1] {
        assert_eq!(cuDevicePrimaryCtxRelease_v2(device), 0);
    }
}

#[test]
fn ptx_is_refused_by_older_drivers() {
    for (driver, test) in [("12.9", "refuses_ptx_9"), ("13.0", "loads_ptx_9")] {
        passes(test, &[("CUDA_ON_CPU_DRIVER", driver)]);
    }
    let out = process("misses_a_function", &[("CUDA_ON_CPU_DRIVER", "12.7")]);
    assert!(!out.status.success());
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("the driver of CUDA 12.7 has no cuEventElapsedTime_v2"), "{said}");
}

fn load_ptx_9(module: Option<&mut usize>) -> i32 {
    // SAFETY: a C string.
    unsafe { cuModuleLoadData(module, c".version 9.0\n.target sm_80\n.address_size 64\n".as_ptr()) }
}

#[test]
#[ignore = "run by ptx_is_refused_by_older_drivers"]
fn refuses_ptx_9() {
    if !is_child() {
        return;
    }
    let _gpu = gpu();
    assert_eq!(get(|version| cuDriverGetVersion(version)), 12090);
    assert_eq!(error_of(load_ptx_9), 222);
}

#[test]
#[ignore = "run by ptx_is_refused_by_older_drivers"]
fn loads_ptx_9() {
    if !is_child() {
        return;
    }
    let _gpu = gpu();
    assert_eq!(get(|version| cuDriverGetVersion(version)), 13000);
    assert_eq!(error_of(load_ptx_9), 0);
}

#[test]
#[ignore = "run by ptx_is_refused_by_older_drivers"]
fn misses_a_function() {
    if !is_child() {
        return;
    }
    let _gpu = gpu();
    cuEventElapsedTime_v2(None, 0, 0);
}

#[test]
fn calls_without_a_context_are_refused() {
    let _gpu = gpu();
    let (stream, address) = (stream(), allocate(4));
    let context = get(|context| cuCtxGetCurrent(context));
    let refusals = || {
        [
            error_of(|address| cuMemAlloc_v2(address, 4)),
            cuMemFree_v2(address),
            cuStreamSynchronize(stream),
            error_of(|event| cuEventCreate(event, 0)),
            cuCtxSynchronize(),
            cuMemsetD8Async(address, 0, 4, stream),
            error_of(|device| cuCtxGetDevice(device)),
        ]
    };
    assert_eq!(cuCtxSetCurrent(0), 0);
    assert_eq!(refusals(), [201; 7]);
    assert_eq!(get(|context| cuCtxGetCurrent(context)), 0);
    assert_eq!(cuCtxSetCurrent(context + 8), 201);
    assert_eq!(cuCtxPushCurrent_v2(context), 0);
    assert_eq!(get(|device| cuCtxGetDevice(device)), 0);
    assert_eq!(get(|context| cuCtxPopCurrent_v2(context)), context);
    assert_eq!(error_of(|context| cuCtxPopCurrent_v2(context)), 201);
    set_current(0);
    assert_eq!((cuStreamDestroy_v2(stream), cuMemFree_v2(address)), (0, 0));
}

#[test]
fn invalid_handles_are_refused() {
    let _gpu = gpu();
    let event = common::event();
    assert_eq!(cuStreamSynchronize(12345), 400);
    assert_eq!(cuStreamSynchronize(event), 400);
    assert_eq!(cuEventRecord(12345, 0), 400);
    assert_eq!(cuEventDestroy_v2(event), 0);
    assert_eq!(cuEventRecord(event, 0), 400);
    assert_eq!(cuModuleUnload(12345), 400);
    assert_eq!(cuGraphLaunch(12345, 0), 400);
    let none = std::ptr::null();
    // SAFETY: the handle is invalid, so no parameters are read.
    assert_eq!(unsafe { cuLaunchKernel(12345, 1, 1, 1, 1, 1, 1, 0, 0, none, none.cast()) }, 400);
    assert_eq!(cuStreamCreate(None, 1), 1);
    assert_eq!(error_of(|stream| cuStreamCreate(stream, 2)), 1);
    // SAFETY: a C string.
    assert_eq!(error_of(|module| unsafe { cuModuleLoadData(module, c"\x7fELF".as_ptr()) }), 209);
}

#[test]
fn errors_have_names() {
    let mut name = std::ptr::null();
    assert_eq!(cuGetErrorName(700, Some(&mut name)), 0);
    // SAFETY: a static C string.
    assert_eq!(unsafe { CStr::from_ptr(name) }, c"CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!(cuGetErrorString(0, Some(&mut name)), 0);
    // SAFETY: as above.
    assert_eq!(unsafe { CStr::from_ptr(name) }, c"no error");
    assert_eq!(cuGetErrorName(12345, Some(&mut name)), 1);
}
