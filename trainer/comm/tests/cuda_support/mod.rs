//! Runs the kernels' own text with threads of the CPU: `platform.h` replaces `device.cuh`, with the parameters that a GPU gets.

#![allow(dead_code, reason = "each test file uses a part")]

mod reference;
#[path = "../../../testing/shared.rs"]
mod shared;

#[allow(unused_imports, reason = "each test file uses a part")]
pub use reference::{expected, tensors, values};

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use comm::cuda::layout::{self, Fault, WireType, phase};
use comm::cuda::plan::DeviceCall;
use comm::cuda::protocol::Kernel;
use comm::cuda::sequence::{HostStep, Launch, LaunchConstants, Sequence, host_steps};
use comm::cuda::source::KernelVariant;
use tempfile::TempDir;

/// Address of the device's memory in all ranks, below the range that ThreadSanitizer reserves.
const BASE: u64 = 0x10_0000_0000;
/// Threads of an emulated block.
const THREADS: u32 = 8;
/// Blocks of every launch.
const BLOCKS: u32 = 2;
/// Number of tensors of every kernel.
pub const MAX_SOURCES: usize = 8;

/// A program with the kernels for some wire types and world sizes.
pub struct Program {
    folder: TempDir,
    exe: PathBuf,
}

impl Program {
    /// Compiles the program with `TRAINER_TEST_CXX` or `c++`, and with ThreadSanitizer if asked for. `None` without a compiler.
    pub fn build(wires: &[WireType], worlds: &[usize], sanitize: bool) -> Option<Self> {
        let compiler = std::env::var_os("TRAINER_TEST_CXX").unwrap_or_else(|| "c++".into());
        if let Err(error) = Command::new(&compiler).arg("--version").output() {
            shared::skip_or_fail("a C++ compiler", format!("{}: {error}", compiler.display()));
            return None;
        }
        let folder = TempDir::new().unwrap();
        let mut text = String::from(include_str!("emulator.h"));
        let mut table = String::new();
        for wire in wires {
            for &world_size in worlds {
                let name = format!("{}_{world_size}", wire.name());
                let variant =
                    KernelVariant { kernel: Kernel::Probe, wire: *wire, world_size, max_sources: MAX_SOURCES };
                let source = variant.source_for(include_str!("platform.h"), THREADS);
                let _ = writeln!(text, "namespace {name} {{\n{source}");
                for kernel in Kernel::ALL.into_iter().chain([Kernel::Order]) {
                    let _ = writeln!(text, "DEFINE_KERNEL({})", kernel.name());
                }
                text.push_str("}\n");
                for kernel in Kernel::ALL.into_iter().chain([Kernel::Probe, Kernel::Order]) {
                    let kernel = kernel.name();
                    let _ = writeln!(table, "{{\"{name}.{kernel}\", {name}::{kernel}_kernel}},");
                }
            }
        }
        let _ = writeln!(text, "int main(int n, char** a) {{ return emulator::serve(n, a, {{{table}}}); }}");
        let (source, exe) = (folder.path().join("kernels.cpp"), folder.path().join("kernels"));
        std::fs::write(&source, text).unwrap();
        let mut command = Command::new(&compiler);
        command.args(["-std=c++20", "-O1", "-w", "-ffp-contract=off", "-pthread"]);
        if sanitize {
            command.args(["-g", "-fsanitize=thread"]);
        }
        let status = command.arg(&source).arg("-o").arg(&exe).status();
        let status = status.unwrap_or_else(|e| panic!("{compiler:?}, a C++ compiler, runs the kernels here: {e}"));
        assert!(status.success(), "{compiler:?} refuses the kernels");
        Some(Self { folder, exe })
    }

    fn start(&self, memory: &Memory) -> Device {
        let mut command = Command::new(&self.exe);
        command.arg(&memory.path).args([format!("{}", memory.bytes), format!("{BASE}")]);
        // A race is the exit code 66. Memory of the file is never returned to the allocator.
        command.env("TSAN_OPTIONS", "exitcode=66 halt_on_error=0 report_bugs=1");
        let says = tempfile::tempfile().unwrap();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(says.try_clone().unwrap());
        let mut child = command.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Device { child, stdin, stdout, says }
    }
}

/// A process that runs launches.
pub struct Device {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    says: File,
}

impl Drop for Device {
    /// Kills the process, so that a test that fails leaves nothing that spins.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Device {
    fn tell(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    fn submit(&mut self, stream: usize, launch: &Launch, stagger: u32, output: u64, sources: &[u64]) {
        let name =
            format!("{}_{}.{}", launch.variant.wire.name(), launch.variant.world_size, launch.variant.kernel.name());
        let padded = (0..MAX_SOURCES).map(|i| sources.get(i).or(sources.first()).copied().unwrap_or(0));
        let words = [output].into_iter().chain(padded).chain(launch.params.words(MAX_SOURCES));
        let words: Vec<String> = words.map(|word| word.to_string()).collect();
        self.tell(&format!("launch {stream} {name} {BLOCKS} {stagger} {}", words.join(" ")));
    }

    fn start(&mut self) {
        self.tell("go");
    }

    /// Returns whether the launches ended; false if the process died.
    fn wait(&mut self) -> bool {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line == "done\n"
    }

    /// Sends SIGKILL.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Ends the process. Returns its exit code and its messages.
    fn finish(mut self) -> (Option<i32>, String) {
        drop(self.stdin.take());
        let code = self.child.wait().unwrap().code();
        let mut said = String::new();
        self.says.rewind().unwrap();
        self.says.read_to_string(&mut said).unwrap();
        (code, said)
    }
}

/// All ranks' memory.
struct Memory {
    file: File,
    path: PathBuf,
    bytes: u64,
    next: u64,
}

impl Memory {
    fn new(folder: &TempDir, bytes: u64) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let path = folder.path().join(format!("memory-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        file.set_len(bytes).unwrap();
        Self { file, path, bytes, next: BASE }
    }

    fn alloc(&mut self, bytes: u64) -> u64 {
        let at = self.next;
        self.next += bytes.next_multiple_of(64);
        assert!(self.next <= BASE + self.bytes, "the device's memory is used up");
        at
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at - BASE).unwrap();
    }

    fn read(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        self.file.read_exact_at(&mut out, at - BASE).unwrap();
        out
    }

    fn words(&self, at: u64, count: usize) -> Vec<u64> {
        self.read(at, 8 * count).chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().unwrap())).collect()
    }

    fn floats(&self, at: u64, count: usize) -> Vec<f32> {
        self.read(at, 4 * count).chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
    }
}

/// An output that can be read later: its address and its number of elements.
#[derive(Clone, Copy, Debug)]
pub struct Output(u64, usize);

/// Ranks with windows.
pub struct Ranks {
    memory: Memory,
    pub constants: Vec<LaunchConstants>,
    pub sequences: Vec<Sequence>,
    /// By rank: milliseconds by which each block of a launch starts later than the block before it.
    pub stagger: Vec<u32>,
    devices: Vec<Device>,
}

impl Ranks {
    /// Makes `world_size` ranks with slots of `slot` bytes: each on its own device (a process) if `apart`, otherwise all on one.
    pub fn new(program: &Program, world_size: usize, slot: usize, apart: bool) -> Self {
        let mut memory = Memory::new(&program.folder, 96 << 20);
        let bytes = (layout::SLOTS_AT + 2 * slot) as u64;
        let windows: Vec<u64> = (0..world_size).map(|_| memory.alloc(bytes)).collect();
        let constants = (0..world_size).map(|rank| {
            let (faults, host_words) = (memory.alloc(64), memory.alloc(64));
            LaunchConstants {
                windows: windows.clone(),
                faults,
                host_words,
                limit_ns: 600_000_000_000,
                rank,
                slot_bytes: slot,
            }
        });
        let constants = constants.collect();
        let devices = (0..if apart { world_size } else { 1 }).map(|_| program.start(&memory)).collect();
        Self {
            memory,
            constants,
            sequences: vec![Sequence::default(); world_size],
            stagger: vec![0; world_size],
            devices,
        }
    }

    pub fn world_size(&self) -> usize {
        self.constants.len()
    }

    fn device(&mut self, rank: usize) -> &mut Device {
        let apart = self.devices.len() > 1;
        &mut self.devices[if apart { rank } else { 0 }]
    }

    /// Prepares the launches of one rank's call, with its tensors in memory.
    pub fn prepare(
        &mut self,
        rank: usize,
        call: &DeviceCall,
        tensors: &[Vec<f32>],
        scale: f32,
    ) -> (Vec<Launch>, Output, Vec<u64>) {
        let sources: Vec<u64> = tensors
            .iter()
            .enumerate()
            .map(|(index, values)| {
                // Every third tensor does not start on a pack, as views may not.
                let skip = if index % 3 == 2 { 4 } else { 0 };
                let at = self.memory.alloc(4 * values.len() as u64 + 16) + skip;
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                self.memory.write(at, &bytes);
                at
            })
            .collect();
        let elements = call.elements as usize * if call.kernel == Kernel::AllGather { self.world_size() } else { 1 };
        // Behind it is a guard that no kernel may write.
        let output = Output(self.memory.alloc(4 * elements as u64 + 16), elements);
        self.memory.write(output.0, &vec![0xEE; 4 * elements + 16]);
        let lengths: Vec<usize> = tensors.iter().map(Vec::len).collect();
        let launches = self.sequences[rank].launches(&self.constants[rank], call, &lengths, scale).unwrap();
        (launches, output, sources)
    }

    /// Puts a call on the rank's stream, as if ranks had their own devices.
    pub fn submit(&mut self, rank: usize, call: &DeviceCall, tensors: &[Vec<f32>], scale: f32) -> Output {
        self.submit_changed(rank, call, tensors, scale, |_| {})
    }

    /// Like [`submit`](Self::submit), with a change of each launch.
    pub fn submit_changed(
        &mut self,
        rank: usize,
        call: &DeviceCall,
        tensors: &[Vec<f32>],
        scale: f32,
        change: impl Fn(&mut Launch),
    ) -> Output {
        let (launches, output, sources) = self.prepare(rank, call, tensors, scale);
        for mut launch in launches {
            for turn in host_steps(call.kernel, false) {
                let HostStep::Launch(phases) = turn else { panic!("a device meets by itself") };
                launch.params.phases = phases;
                change(&mut launch);
                let stagger = self.stagger[rank];
                self.device(rank).submit(rank, &launch, stagger, output.0, &sources);
            }
        }
        output
    }

    /// Puts a broadcast of 10 elements on the rank's stream, with the launches that order NCCL's sum between pack and gather.
    pub fn submit_around_sum(&mut self, rank: usize) {
        let call = DeviceCall { kernel: Kernel::Broadcast, wire: WireType::F32, elements: 10, root: rank };
        let (launches, output, sources) = self.prepare(rank, &call, &[vec![1.0; 10]], 1.0);
        let [launch] = launches.as_slice() else { panic!("one slot holds the elements") };
        let part = |phases| {
            let mut launch = launch.clone();
            launch.params.phases = phases;
            launch
        };
        let order = |phase| Sequence::order(launch, phase);
        let (before, after) = (part(phase::PACK), part(phase::GATHER | phase::COUNT));
        for launch in [before, order(phase::PACK), order(phase::GATHER), after] {
            self.device(rank).submit(rank, &launch, 0, output.0, &sources);
        }
    }

    /// Runs a call of all ranks as if they shared a device: one rank at a time, with host barriers between the steps.
    pub fn call_in_turn(&mut self, call: &DeviceCall, tensors: &[Vec<Vec<f32>>], scale: f32) -> Vec<Output> {
        let prepared: Vec<_> =
            (0..self.world_size()).map(|rank| self.prepare(rank, call, &tensors[rank], scale)).collect();
        for chunk in 0..prepared[0].0.len() {
            for turn in host_steps(call.kernel, true) {
                let HostStep::Launch(phases) = turn else { continue };
                for (rank, (launches, output, sources)) in prepared.iter().enumerate() {
                    let mut launch = launches[chunk].clone();
                    launch.params.phases = phases;
                    self.device(rank).submit(rank, &launch, 0, output.0, sources);
                    self.device(rank).start();
                    assert!(self.device(rank).wait());
                }
            }
        }
        prepared.into_iter().map(|(_, output, _)| output).collect()
    }

    /// Tests that all peers are accessible, with a change of a rank's constants for the reading half.
    pub fn probe(&mut self, change: impl Fn(&mut LaunchConstants)) {
        for write in [true, false] {
            for rank in 0..self.world_size() {
                let mut constants = self.constants[rank].clone();
                if !write {
                    change(&mut constants);
                }
                let launch = Sequence::probe(&constants, write);
                self.device(rank).submit(rank, &launch, 0, constants.faults, &[]);
            }
            self.start();
            self.wait();
        }
    }

    pub fn start(&mut self) {
        self.devices.iter_mut().for_each(Device::start);
    }

    /// Waits for all devices. Returns whether each device lived to the end.
    pub fn wait(&mut self) -> Vec<bool> {
        self.devices.iter_mut().map(Device::wait).collect()
    }

    /// Kills the process of `rank`, which has its own device.
    pub fn kill(&mut self, rank: usize) {
        self.device(rank).kill();
    }

    /// Ends all waits of a rank, as an abort of the job does.
    pub fn abort(&self, rank: usize) {
        self.set_word(rank, layout::word::ABORT, 1);
    }

    /// Returns the words by which the rank's kernels, its host and NCCL's stream order their work ([`layout::word`]).
    pub fn words(&self, rank: usize) -> Vec<u64> {
        self.memory.words(self.constants[rank].host_words, layout::word::COUNT)
    }

    /// Sets one of these words.
    pub fn set_word(&self, rank: usize, index: usize, value: u64) {
        self.memory.write(self.constants[rank].host_words + 8 * index as u64, &value.to_le_bytes());
    }

    /// Returns an output's elements. Fails if the guard behind them was written.
    pub fn read(&self, output: Output) -> Vec<f32> {
        let Output(at, elements) = output;
        assert_eq!(self.memory.read(at + 4 * elements as u64, 16), [0xEE; 16], "written beyond the end");
        self.memory.floats(at, elements)
    }

    /// Returns the faults that the kernels of `rank` have reported.
    pub fn faults(&self, rank: usize) -> Vec<Fault> {
        Fault::read(&self.memory.words(self.constants[rank].faults, self.world_size()))
    }

    /// Ends all devices. Returns their exit codes and messages.
    pub fn finish(self) -> Vec<(Option<i32>, String)> {
        self.devices.into_iter().map(Device::finish).collect()
    }
}
