//! The devices and their threads. All devices work at the same time. A panic on a device becomes an error that names the device
//! (`torch.nn.parallel.parallel_apply`).

use std::{
    any::Any,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc,
        mpsc::{self, Sender},
    },
    thread,
};

use burn::tensor::Device;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::statistics::SyncGroup;
use crate::{
    device::StreamEvent,
    failure::{Failure, panic_text},
};

/// The devices, each with its own thread pool. Each operation runs in the pool of its device only.
pub(super) struct DevicePools {
    devices: Vec<Device>,
    pools: Vec<ThreadPool>,
}

/// The index of a device, and the result of its job with an event that was recorded after the job.
type DeviceResult<T> = (usize, thread::Result<(T, StreamEvent)>);

/// Returns the number of threads of each device. CPU devices share this process's threads equally, and each has at least one. A GPU
/// has one thread, so forward and backward pass run on the same thread: kernels keep some results of convolutions for the thread
/// that computed them, for a later batch norm or for the backward pass.
fn threads_per_device(devices: &[Device]) -> usize {
    #[cfg(feature = "cuda")]
    if comm::cuda::is_cuda(&devices[0]) {
        return 1;
    }
    (rayon::current_num_threads() / devices.len()).max(1)
}

impl DevicePools {
    /// Makes the pool of each device, with [`threads_per_device`] threads.
    ///
    /// # Errors
    /// `devices` is empty, or the system refuses threads.
    pub(super) fn new(devices: Vec<Device>) -> Result<Self, Failure> {
        if devices.is_empty() {
            return Err(Failure::usage("data parallelism without a device", "say how many: --cpus N"));
        }
        let threads = threads_per_device(&devices);
        let pool = |index: usize| {
            ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(move |thread| format!("device-{index}-{thread}"))
                .build()
                .map_err(|error| {
                    Failure::run(format!("device {index}: its {threads} threads: {error}"), "see `ulimit -u`")
                })
        };
        let pools = (0..devices.len()).map(pool).collect::<Result<_, _>>()?;
        Ok(Self { devices, pools })
    }

    /// Returns the number of devices.
    pub(super) fn len(&self) -> usize {
        self.devices.len()
    }

    /// Returns the device that owns the network.
    pub(super) fn first(&self) -> &Device {
        &self.devices[0]
    }

    /// Returns device `index`.
    pub(super) fn get(&self, index: usize) -> &Device {
        &self.devices[index]
    }

    /// Runs job `i` on device `i`, all at the same time, and returns the results in device order. `what` names the work in error
    /// messages. `group` has the devices that sum statistics together. If one of them fails, the waits of the others end.
    ///
    /// # Errors
    /// The first device that panics, with its message; or a mismatch between the members of `group`.
    pub(super) fn parallel_apply<T: Send + 'static, J: FnOnce() -> T + Send + 'static>(
        &self,
        what: &str,
        group: Option<&Arc<SyncGroup>>,
        jobs: Vec<J>,
    ) -> Result<Vec<T>, Failure> {
        let count = jobs.len();
        let (sender, receiver) = mpsc::channel();
        for (index, job) in jobs.into_iter().enumerate().take(self.pools.len()) {
            self.spawn(index, job, group.cloned(), sender.clone());
        }
        drop(sender);
        let mut results: Vec<Option<T>> = (0..count).map(|_| None).collect();
        let mut failure = None;
        for (index, result) in receiver {
            match result {
                Ok((result, after)) => {
                    after.wait();
                    results[index] = Some(result);
                }
                Err(panic) => {
                    failure.get_or_insert_with(|| self.panic_failure(index, what, &*panic));
                }
            }
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        if let Some(cause) = group.and_then(|group| group.failure()) {
            return Err(Failure::run(format!("batch norm over {count} devices: {cause}"), "please report this"));
        }
        results
            .into_iter()
            .collect::<Option<Vec<T>>>()
            .ok_or_else(|| Failure::run(format!("a device ended in {what} without a result"), "please report this"))
    }

    /// Runs `job` in the pool of device `index`. Sends the result and an event that was recorded after the job, or the panic. After
    /// a panic, the waits of the other members of `group` end.
    fn spawn<T: Send + 'static>(
        &self,
        index: usize,
        job: impl FnOnce() -> T + Send + 'static,
        group: Option<Arc<SyncGroup>>,
        sender: Sender<DeviceResult<T>>,
    ) {
        let device = self.devices[index].clone().inner();
        // Each thread has its own stream on a GPU, and weights and statistics are updated in place, so order the streams by events.
        let before = StreamEvent::record(&device);
        let job = move || {
            before.wait();
            (job(), StreamEvent::record(&device))
        };
        self.pools[index].spawn(move || {
            let result = panic::catch_unwind(AssertUnwindSafe(job));
            if let (Err(_), Some(group)) = (&result, &group) {
                group.fail(format!("device {index} is gone"));
            }
            // The receiver waits for every device, so it exists unless this process is ending.
            let _ = sender.send((index, result));
        });
    }

    /// Returns the failure for a panic of device `index`.
    fn panic_failure(&self, index: usize, what: &str, panic: &(dyn Any + Send)) -> Failure {
        let (devices, text) = (self.len(), panic_text(panic).unwrap_or("no message"));
        if let Some(known) = Failure::of_panic(text) {
            return Failure { message: format!("device {index} of {devices}: {}", known.message), ..known };
        }
        Failure::run(
            format!("device {index} of {devices} failed in {what}: {text}"),
            "this is a defect of the program or of the device: please report it with the lines above; checkpoints saved before are \
             intact",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(count: usize) -> DevicePools {
        DevicePools::new(vec![Device::flex(); count]).unwrap()
    }

    #[test]
    fn results_come_in_device_order_from_each_devices_own_threads() {
        let devices = devices(3);
        let jobs = (0..3).map(|index| move || (index, std::thread::current().name().unwrap_or_default().to_owned()));
        let results = devices.parallel_apply("a test", None, jobs.collect()).unwrap();
        for (index, (result, thread)) in results.iter().enumerate() {
            assert_eq!(*result, index);
            assert!(thread.starts_with(&format!("device-{index}-")), "{thread}");
        }
        let fewer = devices.parallel_apply("a test", None, vec![|| 7]).unwrap();
        assert_eq!(fewer, [7]);
    }

    #[test]
    fn a_panic_is_an_error_that_names_the_device_and_later_jobs_run() {
        let devices = devices(3);
        let jobs = (0..3).map(|index| move || assert!(index != 1, "no {index}"));
        let failure = devices.parallel_apply("forward", None, jobs.collect()).unwrap_err();
        assert!(failure.message.starts_with("device 1 of 3 failed in forward: no 1"), "{failure}");
        devices.parallel_apply("forward", None, vec![|| (); 3]).unwrap();
    }

    #[test]
    fn a_panic_ends_the_waits_of_the_other_devices() {
        let devices = devices(2);
        let group = SyncGroup::new(2);
        let jobs = group.members().into_iter().enumerate().map(|(index, member)| {
            move || {
                assert!(index == 0, "gone");
                ops::StatisticsReduce::all_reduce_sum(&*member, &mut [1.0]);
            }
        });
        let failure = devices.parallel_apply("backward", Some(&group), jobs.collect()).unwrap_err();
        assert!(failure.message.contains("device 1 of 2 failed in backward: gone"), "{failure}");
    }

    #[test]
    fn no_devices_are_refused() {
        assert_eq!(DevicePools::new(Vec::new()).err().map(|failure| failure.code), Some(2));
    }
}
