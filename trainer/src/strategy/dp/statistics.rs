//! Synchronised batch norm: sums the devices' statistics, as `torch.nn.SyncBatchNorm` does over its process group.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use ops::StatisticsReduce;
use parking_lot::{Condvar, Mutex};

/// A group of threads, one per device, that sum vectors. The order of summation is the order of devices, so all threads get the
/// same bits in every run.
#[derive(Debug)]
pub(super) struct SyncGroup {
    state: Mutex<SyncState>,
    changed: Condvar,
    /// Nanoseconds that device 0 spent in [`SyncMember::all_reduce_sum`](StatisticsReduce::all_reduce_sum).
    waited: AtomicU64,
    /// Bytes that devices sent.
    bytes: AtomicU64,
}

#[derive(Debug)]
struct SyncState {
    /// Per device: its vector of this round.
    parts: Vec<Option<Vec<f64>>>,
    /// The sum of the last round. A device enters the next round only after it has copied this sum.
    total: Vec<f64>,
    rounds: u64,
    failure: Option<String>,
}

/// One device's membership in a group.
#[derive(Debug)]
pub(super) struct SyncMember {
    index: usize,
    group: Arc<SyncGroup>,
}

impl SyncGroup {
    /// Makes a group of `devices`.
    pub(super) fn new(devices: usize) -> Arc<Self> {
        let state = SyncState { parts: vec![None; devices], total: Vec::new(), rounds: 0, failure: None };
        Arc::new(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            waited: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        })
    }

    /// Returns the members, one per device.
    pub(super) fn members(self: &Arc<Self>) -> Vec<Arc<SyncMember>> {
        let count = self.state.lock().parts.len();
        (0..count).map(|index| Arc::new(SyncMember { index, group: Arc::clone(self) })).collect()
    }

    /// Ends all current and later waits. Only the first reason is kept. Sums after a failure are invalid.
    pub(super) fn fail(&self, reason: String) {
        self.state.lock().failure.get_or_insert(reason);
        self.changed.notify_all();
    }

    /// Returns the reason why the sums are invalid, if there was a failure.
    pub(super) fn failure(&self) -> Option<String> {
        self.state.lock().failure.clone()
    }

    /// Returns the seconds that device 0 has spent in sums since the last call.
    pub(super) fn take_seconds(&self) -> f64 {
        self.waited.swap(0, Ordering::Relaxed) as f64 * 1e-9
    }

    /// Returns the bytes that devices have sent to device 0, and received, so far.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn add_up(&self, index: usize, values: &mut [f64]) {
        let mut state = self.state.lock();
        if state.failure.is_some() {
            return;
        }
        state.parts[index] = Some(values.to_vec());
        let round = state.rounds;
        if state.parts.iter().all(Option::is_some) {
            state.finish_round();
            self.changed.notify_all();
        }
        while state.rounds == round && state.failure.is_none() {
            self.changed.wait(&mut state);
        }
        // The sum of a complete round is valid even if a device has failed since.
        if state.rounds > round && state.total.len() == values.len() {
            values.copy_from_slice(&state.total);
        }
    }
}

impl SyncState {
    fn finish_round(&mut self) {
        let mut parts = self.parts.iter_mut().filter_map(Option::take);
        let mut total = parts.next().unwrap_or_default();
        for part in parts {
            if part.len() != total.len() {
                let lengths = format!("one device has {} statistics, another {}", total.len(), part.len());
                self.failure.get_or_insert(lengths);
                return;
            }
            total.iter_mut().zip(part).for_each(|(total, value)| *total += value);
        }
        self.total = total;
        self.rounds += 1;
    }
}

impl StatisticsReduce for SyncMember {
    fn all_reduce_sum(&self, values: &mut [f64]) {
        let start = Instant::now();
        self.group.add_up(self.index, values);
        if self.index == 0 {
            self.group.waited.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        } else {
            // Count the bytes to device 0 and back.
            self.group.bytes.fetch_add(2 * size_of_val(values) as u64, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn all_members_get_the_same_sum_in_device_order_in_every_round() {
        let group = SyncGroup::new(3);
        // Only in the order 0 + 1 + 2 is the sum 1: (1e300 - 1e300) + 1.
        let parts = [1e300, -1e300, 1.0];
        let results: Vec<Vec<f64>> = thread::scope(|scope| {
            let handles: Vec<_> = group
                .members()
                .into_iter()
                .zip(parts)
                .map(|(member, part)| {
                    scope.spawn(move || {
                        (0..200)
                            .map(|round| {
                                let mut values = [part, f64::from(round)];
                                member.all_reduce_sum(&mut values);
                                assert_eq!(values[1], 3.0 * f64::from(round));
                                values[0]
                            })
                            .collect()
                    })
                })
                .collect();
            handles.into_iter().map(|handle| handle.join().unwrap()).collect()
        });
        assert!(results.iter().flatten().all(|&value| value == 1.0));
        assert_eq!(group.bytes(), 200 * 2 * 2 * 16);
        assert!(group.failure().is_none() && group.take_seconds() > 0.0);
    }

    #[test]
    fn a_failure_ends_all_current_and_later_waits() {
        let group = SyncGroup::new(2);
        let [first, second] = group.members().try_into().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| first.all_reduce_sum(&mut [1.0]));
            group.fail("device 1 is gone".into());
        });
        group.fail("another reason".into());
        second.all_reduce_sum(&mut [1.0]);
        assert_eq!(group.failure().as_deref(), Some("device 1 is gone"));
    }

    #[test]
    fn devices_with_different_numbers_of_statistics_are_an_error() {
        let group = SyncGroup::new(2);
        let [first, second] = group.members().try_into().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| first.all_reduce_sum(&mut [1.0]));
            second.all_reduce_sum(&mut [1.0, 2.0]);
        });
        let failure = group.failure().unwrap();
        assert!(failure.contains("1 statistics") && failure.contains('2'), "{failure}");
    }
}
