//! The devices and their threads: work goes to all of them at once, a panic in one of them is an error with its name.

use std::{
    any::Any,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, mpsc},
};

use burn::tensor::Device;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::statistics::Group;
use crate::failure::Failure;

/// Devices, each with a pool of threads: what an operation computes in parallel stays within its device's pool.
pub(super) struct Devices {
    devices: Vec<Device>,
    pools: Vec<ThreadPool>,
}

impl Devices {
    /// This process's threads in equal shares; at least one each.
    ///
    /// # Errors
    /// No devices, or the system refuses threads.
    pub(super) fn new(devices: Vec<Device>) -> Result<Self, Failure> {
        if devices.is_empty() {
            return Err(Failure::usage("data parallelism without a device", "say how many: --cpus N"));
        }
        let threads = (rayon::current_num_threads() / devices.len()).max(1);
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

    /// How many.
    pub(super) fn len(&self) -> usize {
        self.devices.len()
    }

    /// The one that owns the network.
    pub(super) fn first(&self) -> &Device {
        &self.devices[0]
    }

    /// One of them.
    pub(super) fn get(&self, index: usize) -> &Device {
        &self.devices[index]
    }

    /// Runs job `i` on device `i`, all at once; gives their results in device order. `what` names the work in messages. A
    /// device that fails lets the others out of `group`, in which they might wait for it.
    ///
    /// # Errors
    /// The first device to panic, with its message; or ranks of `group` that disagreed.
    pub(super) fn run<T: Send + 'static, J: FnOnce() -> T + Send + 'static>(
        &self,
        what: &str,
        group: Option<&Arc<Group>>,
        jobs: Vec<J>,
    ) -> Result<Vec<T>, Failure> {
        let (count, devices) = (jobs.len(), self.devices.len());
        let (sender, receiver) = mpsc::channel();
        for (index, (job, pool)) in jobs.into_iter().zip(&self.pools).enumerate() {
            let (sender, group) = (sender.clone(), group.cloned());
            pool.spawn(move || {
                let result = panic::catch_unwind(AssertUnwindSafe(job));
                if let (Err(_), Some(group)) = (&result, &group) {
                    group.fail(format!("device {index} is gone"));
                }
                // the receiver waits for every device; it is gone only if this process is ending
                let _ = sender.send((index, result));
            });
        }
        drop(sender);
        let mut results: Vec<Option<T>> = (0..count).map(|_| None).collect();
        let mut failure = None;
        for (index, result) in receiver {
            match result {
                Ok(result) => results[index] = Some(result),
                Err(panic) => {
                    failure.get_or_insert_with(|| {
                        let text = message(&*panic);
                        if let Some(known) = Failure::of_panic(text) {
                            return Failure {
                                message: format!("device {index} of {devices}: {}", known.message),
                                ..known
                            };
                        }
                        Failure::run(
                            format!("device {index} of {devices} failed in {what}: {text}"),
                            "this is a defect of the program or of the device: please report it with the lines above; \
                             checkpoints saved before are intact",
                        )
                    });
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
}

/// What a panic says.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(count: usize) -> Devices {
        Devices::new(vec![Device::flex(); count]).unwrap()
    }

    #[test]
    fn results_come_in_device_order_from_threads_of_their_own() {
        let devices = devices(3);
        let jobs = (0..3).map(|index| move || (index, std::thread::current().name().unwrap_or_default().to_owned()));
        let results = devices.run("a test", None, jobs.collect()).unwrap();
        for (index, (result, thread)) in results.iter().enumerate() {
            assert_eq!(*result, index);
            assert!(thread.starts_with(&format!("device-{index}-")), "{thread}");
        }
        let fewer = devices.run("a test", None, vec![|| 7]).unwrap();
        assert_eq!(fewer, [7]);
    }

    #[test]
    fn a_panic_is_an_error_that_names_the_device_and_the_devices_work_again() {
        let devices = devices(3);
        let jobs = (0..3).map(|index| move || assert!(index != 1, "no {index}"));
        let failure = devices.run("forward", None, jobs.collect()).unwrap_err();
        assert!(failure.message.starts_with("device 1 of 3 failed in forward: no 1"), "{failure}");
        devices.run("forward", None, vec![|| (); 3]).unwrap();
    }

    #[test]
    fn a_panic_lets_the_others_out_of_their_wait() {
        let devices = devices(2);
        let group = Group::new(2);
        let jobs = group.members().into_iter().enumerate().map(|(index, member)| {
            move || {
                assert!(index == 0, "gone");
                ops::StatisticsReduce::all_reduce_sum(&*member, &mut [1.0]);
            }
        });
        let failure = devices.run("backward", Some(&group), jobs.collect()).unwrap_err();
        assert!(failure.message.contains("device 1 of 2 failed in backward: gone"), "{failure}");
    }

    #[test]
    fn no_devices_are_refused() {
        assert_eq!(Devices::new(Vec::new()).err().map(|failure| failure.code), Some(2));
    }
}
