//! Memory: allocations, refused calls, and memory of other processes.
#![allow(unsafe_code, reason = "tests of a C library")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use common::{MEMORY, allocate, download, error_of, get, gpu, is_child, process, set_current, upload};
use cuda_on_cpu::exports::*;

#[test]
fn memory_is_not_zero_and_keeps_what_is_written() {
    let _gpu = gpu();
    let address = allocate(1000);
    assert_eq!(address % 512, 0);
    assert_eq!(download::<1000>(address), [0xFF; 1000]);
    upload(address + 10, &[1, 2, 3]);
    assert_eq!(download::<5>(address + 9), [0xFF, 1, 2, 3, 0xFF]);
    assert_eq!(cuMemsetD8_v2(address, 7, 11), 0);
    assert_eq!(download::<3>(address + 9), [7, 7, 2]);
    assert_eq!(cuMemFree_v2(address), 0);
}

#[test]
fn ranges_outside_a_block_are_refused() {
    let _gpu = gpu();
    let address = allocate(1000);
    assert_eq!(cuMemsetD8_v2(address + 1, 0, 1000), 1);
    assert_eq!(cuMemsetD8_v2(address + 1000, 0, 1), 1);
    assert_eq!(cuMemsetD32_v2(address + 2, 0, 1), 1);
    assert_eq!(cuMemFree_v2(address + 512), 1);
    assert_eq!(cuMemFree_v2(address), 0);
    assert_eq!(cuMemFree_v2(address), 1);
    assert_eq!(cuMemsetD8_v2(address, 0, 1), 1);
    assert_eq!(error_of(|address| cuMemAlloc_v2(address, 0)), 1);
}

#[test]
fn memory_of_a_gpu_is_limited() {
    let _gpu = gpu();
    set_current(1);
    assert_eq!(get(|bytes| cuDeviceTotalMem_v2(bytes, 1)), MEMORY);
    let most = allocate(MEMORY - 4096);
    let free = get(|free| cuMemGetInfo_v2(free, Some(&mut 0)));
    assert_eq!(free, 4096);
    assert_eq!(error_of(|address| cuMemAlloc_v2(address, 4097)), 2);
    let rest = allocate(1);
    assert_eq!(error_of(|address| cuMemAlloc_v2(address, 1)), 2);
    for address in [most, rest] {
        assert_eq!(cuMemFree_v2(address), 0);
    }
    assert_eq!(error_of(|address| cuMemAlloc_v2(address, MEMORY + 1)), 2);
}

#[test]
fn an_inner_address_refers_to_its_block() {
    let _gpu = gpu();
    let address = allocate(5000);
    let mut bytes = 0;
    assert_eq!(get(|base| cuMemGetAddressRange_v2(base, Some(&mut bytes), address + 4999)), address);
    assert_eq!(bytes, 5000);
    assert_ne!(error_of::<usize>(|base| cuMemGetAddressRange_v2(base, None, address + 5000)), 0);
    assert_eq!(cuMemFree_v2(address), 0);
}

#[test]
fn pinned_host_memory_has_the_same_device_address() {
    let _gpu = gpu();
    let host = get(|address| cuMemHostAlloc(address, 64, 3));
    assert_eq!(get(|address| cuMemHostGetDevicePointer_v2(address, host, 0)), host);
    let device = allocate(64);
    assert_eq!(error_of::<usize>(|address| cuMemHostGetDevicePointer_v2(address, device, 0)), 1);
    assert_eq!(error_of::<DefaultHandle>(|handle| cuIpcGetMemHandle(handle.map(|handle| &mut handle.0), host)), 1);
    assert_eq!(cuMemFree_v2(host), 1);
    assert_eq!(cuMemFreeHost(device), 1);
    assert_eq!(cuMemFreeHost(host), 0);
    assert_eq!(cuMemFree_v2(device), 0);
}

/// An IPC handle with a default.
struct DefaultHandle(IpcHandle);

impl Default for DefaultHandle {
    fn default() -> Self {
        Self(IpcHandle { reserved: [0; 64] })
    }
}

fn handle(address: usize) -> IpcHandle {
    get::<DefaultHandle>(|handle| cuIpcGetMemHandle(handle.map(|handle| &mut handle.0), address)).0
}

fn hex(handle: IpcHandle) -> String {
    handle.reserved.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> IpcHandle {
    let byte = |index| u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap();
    IpcHandle { reserved: std::array::from_fn(byte) }
}

#[test]
fn handles_that_cannot_be_opened_are_refused() {
    let _gpu = gpu();
    let address = allocate(64);
    let open = |handle, flags| error_of(|address| cuIpcOpenMemHandle_v2(address, handle, flags));
    assert_eq!(open(handle(address), 1), 201, "of the same process");
    assert_eq!(open(handle(address), 0), 1, "without the flag");
    assert_eq!(open(IpcHandle { reserved: [0; 64] }, 1), 1, "not a handle");
    assert_eq!(cuIpcCloseMemHandle(address), 1, "of the same process");
    assert_eq!(cuMemFree_v2(address), 0);
    let pool = get(|address| cuMemAllocAsync(address, 64, 0));
    let code = error_of::<DefaultHandle>(|handle| cuIpcGetMemHandle(handle.map(|handle| &mut handle.0), pool));
    assert_eq!(code, 1, "of a pool");
    assert_eq!(cuMemFreeAsync(pool, 0), 0);
    assert_eq!(cuMemFreeAsync(pool, 0), 1);
}

#[test]
fn processes_share_memory() {
    let _gpu = gpu();
    let address = allocate(5000);
    upload(address, &[1, 2, 3, 4]);
    let out = process("opens_memory", &[("HANDLE", &hex(handle(address + 100)))]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(download::<4>(address), [5, 2, 3, 4]);
    assert_eq!(cuMemFree_v2(address), 0);
}

#[test]
#[ignore = "run by processes_share_memory"]
fn opens_memory() {
    if !is_child() {
        return;
    }
    let _gpu = gpu();
    let handle = unhex(&std::env::var("HANDLE").unwrap());
    let address = get(|address| cuIpcOpenMemHandle_v2(address, handle, 1));
    assert_eq!(download::<4>(address), [1, 2, 3, 4]);
    assert_eq!(get(|address| cuIpcOpenMemHandle_v2(address, handle, 1)), address);
    assert_eq!(cuIpcCloseMemHandle(address), 0);
    let mut bytes = 0;
    assert_eq!(get(|base| cuMemGetAddressRange_v2(base, Some(&mut bytes), address)), address);
    assert_eq!(bytes, 5000);
    upload(address, &[5]);
    assert_eq!(cuMemFree_v2(address), 1);
    assert_eq!(error_of::<DefaultHandle>(|handle| cuIpcGetMemHandle(handle.map(|handle| &mut handle.0), address)), 1);
    assert_eq!(cuIpcCloseMemHandle(address), 0);
    assert_eq!(cuIpcCloseMemHandle(address), 1);
}

#[test]
fn freed_memory_cannot_be_opened() {
    let _gpu = gpu();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "exports_memory", "--ignored", "--nocapture", "--test-threads=1"]);
    let mut child = child.env("CHILD", "1").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut lines = BufReader::new(from).lines().map(Result::unwrap);
    let mut handle = || lines.find_map(|line| line.split_once("handle ").map(|found| unhex(found.1))).unwrap();
    let (first, second) = (handle(), handle());
    let kept = get(|address| cuIpcOpenMemHandle_v2(address, second, 1));
    assert_eq!(cuIpcCloseMemHandle(get(|address| cuIpcOpenMemHandle_v2(address, first, 1))), 0);
    // The child frees the first block and allocates a third in its place.
    to.write_all(b"\n").unwrap();
    let third = handle();
    assert_eq!(error_of(|address| cuIpcOpenMemHandle_v2(address, first, 1)), 1);
    assert_eq!(cuIpcCloseMemHandle(get(|address| cuIpcOpenMemHandle_v2(address, third, 1))), 0);
    to.write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(error_of(|address| cuIpcOpenMemHandle_v2(address, third, 1)), 1);
    assert_eq!(download::<1>(kept), [9], "open memory stays mapped");
    assert_eq!(cuIpcCloseMemHandle(kept), 0);
}

#[test]
#[ignore = "run by freed_memory_cannot_be_opened"]
fn exports_memory() {
    if !is_child() {
        return;
    }
    let _gpu = gpu();
    let line = || std::io::stdin().read_line(&mut String::new()).unwrap();
    let (first, second) = (allocate(64), allocate(64));
    upload(second, &[9]);
    println!("handle {}\nhandle {}", hex(handle(first)), hex(handle(second)));
    line();
    assert_eq!(cuMemFree_v2(first), 0);
    println!("handle {}", hex(handle(allocate(64))));
    line();
}
