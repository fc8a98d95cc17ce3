//! Ranks as threads of one process. Each has its own control connection, mapping and sockets, as a process has.
#![allow(dead_code)]

pub mod matrix;

use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use comm::{
    CommConfig, CommError, Communicator, DType, Element, ReduceOp, Secret, StoreEvent, StoreServer, TransportKind, join,
};
use half::{bf16, f16};

pub const KINDS: [TransportKind; 2] = [TransportKind::Shm, TransportKind::Tcp];
pub const WORLDS: [usize; 6] = [1, 2, 3, 4, 7, 8];

/// A rendezvous that records its events.
pub struct Job {
    pub server: StoreServer,
    pub secret: Secret,
    pub world: usize,
    events: Arc<(Mutex<Vec<StoreEvent>>, Condvar)>,
}

impl Job {
    pub fn new(world: usize) -> Self {
        Self::on("127.0.0.1:0", world)
    }

    pub fn on(address: &str, world: usize) -> Self {
        let secret = Secret::random().unwrap();
        let events = Arc::new((Mutex::new(Vec::new()), Condvar::new()));
        let seen = events.clone();
        let record = move |event| {
            seen.0.lock().unwrap().push(event);
            seen.1.notify_all();
        };
        let server = StoreServer::bind(address, secret.clone(), world, record).unwrap();
        Self { server, secret, world, events }
    }

    pub fn config(&self, rank: usize, kind: TransportKind) -> CommConfig {
        let store = self.server.local_addr().to_string();
        let mut config = CommConfig::new(rank, self.world, store, self.secret.clone(), kind);
        config.timeout = Duration::from_secs(60);
        config.connect_timeout = Duration::from_secs(60);
        config
    }

    /// Waits until the server has reported an event that `what` accepts. Returns false after a time limit.
    pub fn saw(&self, what: impl Fn(&StoreEvent) -> bool) -> bool {
        let (events, changed) = &*self.events;
        let guard = events.lock().unwrap();
        let limit = Duration::from_secs(60);
        let (guard, _) = changed.wait_timeout_while(guard, limit, |events| !events.iter().any(&what)).unwrap();
        guard.iter().any(what)
    }
}

/// Runs `body` as every rank of a job, and returns the ranks' results. Passes panics of ranks on.
pub fn ranks<R: Send + 'static>(
    kind: TransportKind,
    world: usize,
    body: impl Fn(Communicator) -> R + Send + Sync + 'static,
) -> Vec<R> {
    ranks_with(kind, world, |_| {}, body)
}

pub fn ranks_with<R: Send + 'static>(
    kind: TransportKind,
    world: usize,
    change: impl Fn(&mut CommConfig),
    body: impl Fn(Communicator) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let job = Job::new(world);
    let body = Arc::new(body);
    let threads: Vec<_> = (0..world)
        .map(|rank| {
            let (body, mut config) = (body.clone(), job.config(rank, kind));
            change(&mut config);
            thread::spawn(move || body(join(&config).unwrap_or_else(|e| panic!("rank {rank} cannot join: {e}"))))
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
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

/// Returns `sum / world`, rounded once to the type.
pub fn mean<T: Number>(sum: i64, world: usize) -> T {
    let (exact, narrow) = (sum as f64 / world as f64, sum as f32 / world as f32);
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
