//! Ranks as threads of one process. Each has its own control connection, mapping and sockets, as a process has.
#![allow(dead_code)]

pub mod matrix;

use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use comm::{
    CommConfig, CommError, Communicator, DType, Element, ReduceOp, Secret, StoreConfig, StoreEvent, StoreServer,
    TransportKind, join,
};
use half::{bf16, f16};

pub const KINDS: [TransportKind; 2] = [TransportKind::Shm, TransportKind::Tcp];
pub const WORLDS: [usize; 6] = [1, 2, 3, 4, 7, 8];

/// Longest wait of a test. Only a hang lasts this long, also on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(300);

/// A rendezvous that records its events.
pub struct Job {
    pub server: StoreServer,
    pub secret: Secret,
    pub world_size: usize,
    events: Arc<(Mutex<Vec<StoreEvent>>, Condvar)>,
}

impl Job {
    pub fn new(world_size: usize) -> Self {
        Self::on("127.0.0.1:0", world_size)
    }

    pub fn on(address: &str, world_size: usize) -> Self {
        let secret = Secret::random().unwrap();
        let events = Arc::new((Mutex::new(Vec::new()), Condvar::new()));
        let seen = events.clone();
        let record = move |event| {
            seen.0.lock().unwrap().push(event);
            seen.1.notify_all();
        };
        let server = StoreServer::bind(address, StoreConfig::new(secret.clone(), world_size), record).unwrap();
        Self { server, secret, world_size, events }
    }

    pub fn config(&self, rank: usize, kind: TransportKind) -> CommConfig {
        let store = self.server.local_addr().to_string();
        let mut config = CommConfig::new(rank, self.world_size, store, self.secret.clone(), kind);
        config.timeout = LIMIT;
        config.connect_timeout = LIMIT;
        config
    }

    /// Waits until the server has recorded an event; returns whether it has.
    pub fn saw(&self, what: impl Fn(&StoreEvent) -> bool) -> bool {
        let (events, changed) = &*self.events;
        let missing = |events: &mut Vec<StoreEvent>| !events.iter().any(&what);
        !changed.wait_timeout_while(events.lock().unwrap(), LIMIT, missing).unwrap().1.timed_out()
    }
}

/// Runs `body` as every rank of a job, and returns the ranks' results. Passes panics of ranks on.
pub fn ranks<R: Send + 'static>(
    kind: TransportKind,
    world_size: usize,
    body: impl Fn(Communicator) -> R + Send + Sync + 'static,
) -> Vec<R> {
    ranks_with(kind, world_size, |_| {}, body)
}

pub fn ranks_with<R: Send + 'static>(
    kind: TransportKind,
    world_size: usize,
    change: impl Fn(&mut CommConfig),
    body: impl Fn(Communicator) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let job = Job::new(world_size);
    let body = Arc::new(body);
    let (joined, all_joined) = channel();
    let threads: Vec<_> = (0..world_size)
        .map(|rank| {
            let (body, joined, mut config) = (body.clone(), joined.clone(), job.config(rank, kind));
            change(&mut config);
            let (go, started) = channel::<()>();
            let thread = thread::spawn(move || {
                let comm = join(&config).unwrap_or_else(|e| panic!("rank {rank} cannot join: {e}"));
                joined.send(()).unwrap();
                started.recv().expect("all ranks have joined");
                body(comm)
            });
            (go, thread)
        })
        .collect();
    drop(joined);
    // The body starts when all ranks have joined, so that a test's short timeout does not include joining.
    let complete = (0..world_size).all(|_| all_joined.recv().is_ok());
    let (starts, threads): (Vec<_>, Vec<_>) = threads.into_iter().unzip();
    if complete {
        starts.iter().for_each(|go| go.send(()).unwrap());
    }
    drop(starts);
    threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
}

/// Elements that tests can make from small numbers and compare exactly.
pub trait Number: Element {
    fn of(value: i64) -> Self;
}
macro_rules! number {
    ($($ty:ty: $from:expr);*) => {$(impl Number for $ty { fn of(value: i64) -> Self { $from(value) } })*};
}
number!(
    f32: |v| v as f32; f64: |v| v as f64; f16: |v| f16::from_f32(v as f32); bf16: |v| bf16::from_f32(v as f32);
    i32: |v| v as i32; i64: |v| v; u8: |v| v as u8
);

/// Returns element `i` of rank `rank`, small enough for exact results in every type, for at most 8 ranks.
pub fn input(op: ReduceOp, rank: usize, i: usize) -> i64 {
    match op {
        // At most two ranks have a 2, so that bf16 and u8 hold the product.
        ReduceOp::Product => 1 + i64::from(rank == i % 5 || rank == i % 3),
        _ => ((rank * 31 + i * 7) % 13) as i64,
    }
}

/// Returns the exact result for `ranks`; for a mean, the sum.
pub fn reduced(op: ReduceOp, ranks: &[usize], i: usize) -> i64 {
    let values = ranks.iter().map(|r| input(op, *r, i));
    match op {
        ReduceOp::Sum | ReduceOp::Mean => values.sum(),
        ReduceOp::Min => values.min().unwrap(),
        ReduceOp::Max => values.max().unwrap(),
        ReduceOp::Product => values.product(),
    }
}

/// Returns `sum / world_size`, rounded once to the type.
pub fn mean<T: Number>(sum: i64, world_size: usize) -> T {
    let (exact, narrow) = (sum as f64 / world_size as f64, sum as f32 / world_size as f32);
    let out = match T::DTYPE {
        DType::F64 => exact.to_le_bytes().to_vec(),
        DType::F32 => narrow.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(narrow).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(narrow).to_le_bytes().to_vec(),
        other => panic!("no mean of {other}"),
    };
    bytemuck::pod_read_unaligned(&out)
}

pub fn message<R>(result: Result<R, CommError>) -> String {
    match result {
        Ok(_) => "no error".into(),
        Err(error) => error.message,
    }
}

/// Calls an all-reduce of 12 f32.
pub fn all_reduce_12(c: &Communicator) -> Result<(), CommError> {
    c.all_reduce(&mut [0f32; 12], ReduceOp::Sum)
}
