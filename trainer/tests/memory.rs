//! Compares the memory of a data-parallel step with that of a step in one process. This test program's allocator counts.

#[path = "../comm/tests/support/mod.rs"]
mod comm_support;

#[allow(unsafe_code)]
mod counting {
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// The system's allocator, which counts the bytes in use and their peak.
    struct Counting;

    static LIVE: AtomicUsize = AtomicUsize::new(0);
    static PEAK: AtomicUsize = AtomicUsize::new(0);

    // SAFETY: every call is passed on to the system's allocator.
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
            PEAK.fetch_max(live, Ordering::Relaxed);
            // SAFETY: the caller's promise.
            unsafe { System.alloc(layout) }
        }

        unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
            LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
            // SAFETY: the caller's promise.
            unsafe { System.dealloc(pointer, layout) }
        }
    }

    #[global_allocator]
    static ALLOCATOR: Counting = Counting;

    /// Returns the bytes in use.
    pub fn live() -> usize {
        LIVE.load(Ordering::Relaxed)
    }

    /// Restarts the peak from the bytes in use.
    pub fn reset_peak() {
        PEAK.store(live(), Ordering::Relaxed);
    }

    /// Returns the largest number of bytes in use since the last [`reset_peak`].
    pub fn peak() -> usize {
        PEAK.load(Ordering::Relaxed)
    }
}

use std::collections::HashMap;

use burn::tensor::Device;
use comm::{Communicator, TransportKind};
use data::{ImageShape, loader::Batch};
use launch::WorkerStatus;
use models::Spec;
use trainer::{
    config::{self, ConfigSource, DatasetFacts, Overrides, Registry, RunPlan},
    strategy::{Strategy, ddp::Ddp, single::Single},
};

const MODEL: &str = "vgg11";
const MIB: usize = 1 << 20;
const SHAPE: ImageShape = ImageShape { channels: 3, height: 32, width: 32 };
const SPEC: Spec = Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };

fn plan(mode: &str) -> RunPlan {
    let facts =
        DatasetFacts { channels: 3, height: 32, width: 32, classes: 10, mean: vec![0.5; 3], std: vec![0.25; 3] };
    let datasets = |_: &str| Some(facts.clone());
    let registry = Registry { models: &[MODEL], dataset_names: &["cifar10"], dataset_facts: &datasets };
    let text = format!(
        "[model]\nname = \"{MODEL}\"\n[data]\nname = \"cifar10\"\n[parallel]\nmode = \"{mode}\"\n{}",
        if mode == "ddp" { "bucket_mb = 4\n" } else { "" }
    );
    config::resolve(&ConfigSource::new("memory.toml", text), &Overrides::default(), &registry).expect("a plan")
}

/// Makes one image per rank: next to nothing beside nine million parameters.
fn batch(ranks: usize) -> Batch {
    Batch {
        images: (0..SHAPE.len()).map(|i| (i % 13) as f32 / 13.0).collect(),
        labels: vec![3],
        views: 1,
        multi_hot: Vec::new(),
        mix: None,
        ids: vec![0],
        epoch: 0,
        index: 0,
        repetitions: Vec::new(),
        replaced: Vec::new(),
        global_len: ranks,
        global_weight: ranks as f64,
        params: Vec::new(),
        shape: SHAPE,
    }
}

fn network() -> models::Network {
    models::build(MODEL, &SPEC, 0, &Device::flex().autodiff()).expect("a network")
}

/// Returns the bytes of all parameters.
fn parameters() -> usize {
    4 * models::parameters(&network()).iter().map(models::ParameterInfo::len).sum::<usize>()
}

fn steps(strategy: &mut dyn Strategy, ranks: usize, count: usize) {
    for _ in 0..count {
        strategy.train_step(vec![batch(ranks)], 0.01, None).expect("a step");
    }
}

/// Returns the bytes of the memory that the ranks share. All ranks are in this process, so each file counts once, however often
/// it is mapped.
fn shared_memory() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the kernel's list of mappings");
    let files = maps.lines().filter(|line| line.contains("memfd:trainer-comm"));
    let sizes = files.map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (start, end) = words[0].split_once('-').expect("a range");
        let address = |text| usize::from_str_radix(text, 16).expect("an address");
        (words[4].to_owned(), address(end) - address(start))
    });
    sizes.collect::<HashMap<_, _>>().values().sum()
}

/// Returns the bytes that steps hold at most in addition to those before and after them, once momentum and buckets exist: on the
/// heap, and in shared arrays, which stay.
fn beyond(strategy: &mut dyn Strategy, ranks: usize, all_here: impl Fn()) -> (usize, usize) {
    all_here();
    let arrays = shared_memory();
    all_here();
    steps(strategy, ranks, 2);
    all_here();
    let (before, arrays) = (counting::live(), shared_memory() - arrays);
    counting::reset_peak();
    all_here();
    steps(strategy, ranks, 3);
    all_here();
    let after = (counting::peak() - before, arrays);
    let kept = shared_memory();
    all_here();
    steps(strategy, ranks, 2);
    all_here();
    assert_eq!(shared_memory(), kept, "the buckets keep their arrays");
    all_here();
    after
}

/// A worker's gradients are in its buckets, and nowhere else.
#[test]
fn a_worker_holds_one_set_of_buckets_and_no_second_copy_of_its_gradients() {
    let set = parameters();
    let (single, _) = {
        let mut single = Single::new(network(), Device::flex().autodiff(), 10, &plan("single"));
        beyond(&mut single, 1, || ())
    };
    let body = |comm: Communicator| {
        let status = WorkerStatus::detached().expect("shared memory");
        let mut ddp =
            Ddp::new(network(), Device::flex().autodiff(), 10, &plan("ddp"), comm.clone(), status).expect("ddp");
        beyond(&mut ddp, 2, || comm.barrier().expect("both are here"))
    };
    // Both ranks are threads of this process: each sees the memory of both.
    let both = comm_support::ranks(TransportKind::Shm, 2, body);
    let heap = both.iter().map(|(heap, _)| heap / 2).max().expect("two ranks");
    let arrays = both.iter().map(|(_, arrays)| arrays / 2).max().expect("two ranks");
    let mib = |bytes: usize| bytes as f64 / MIB as f64;
    println!(
        "parameters {:.1} MiB; a step holds beyond them and momentum: one process {:.1} MiB, a rank {:.1} MiB and buckets of \
         {:.1} MiB",
        mib(set),
        mib(single),
        mib(heap),
        mib(arrays)
    );
    assert!(arrays >= set && arrays < set + MIB, "parameters have {set} bytes, the buckets {arrays}");
    // A gradient on its way into its bucket, and the kernels' scratch space.
    assert!(heap <= set / 2, "a rank holds {:.1} MiB beside its buckets", mib(heap));
    // It may be less than a set: part of the gradients' memory stays in the kernels' pool between steps.
    assert!(single <= set + set / 8, "one process holds {:.1} MiB", mib(single));
}
