//! Sub-groups, asynchronous calls, tags, and addresses of several hosts.

mod support;

use std::net::IpAddr;
use std::thread;

use comm::{ErrorKind, ReduceOp, TransportKind, join, solo};
use support::{Job, KINDS, message, ranks, ranks_with};

#[test]
fn groups_work_beside_each_other_and_beside_the_world() {
    for kind in KINDS {
        ranks(kind, 5, |comm| {
            let me = comm.rank();
            let even = comm.group(&[4, 0, 2]).unwrap();
            let odd = comm.group(&[1, 3]).unwrap();
            let alone = comm.group(&[3]).unwrap();
            assert_eq!((even.is_some(), odd.is_some(), alone.is_some()), (me % 2 == 0, me % 2 == 1, me == 3));
            for turn in 0..20 {
                for n in [3usize, 40_000] {
                    if let Some(group) = &even {
                        assert_eq!(group.ranks(), [4, 0, 2]);
                        let mut data = vec![me as i64; n];
                        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                        assert_eq!(data, vec![6; n]);
                        // Root 0 of the group is rank 4 of the job.
                        let mut data = [me as i64 + turn];
                        group.broadcast(&mut data, 0).unwrap();
                        assert_eq!(data, [4 + turn]);
                        let mut all = [0i64; 3];
                        group.all_gather(&[me as i64], &mut all).unwrap();
                        assert_eq!(all, [4, 0, 2]);
                    }
                    if let Some(group) = &odd {
                        let mut data = vec![me as i64; n];
                        group.all_reduce(&mut data, ReduceOp::Max).unwrap();
                        assert_eq!(data, vec![3; n]);
                    }
                    if let Some(group) = &alone {
                        let mut data = vec![7i64; n];
                        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                        assert_eq!(data, vec![7; n]);
                    }
                    let mut data = vec![1i32; n];
                    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert_eq!(data, vec![5; n]);
                }
            }
            // A group made from a group, and the same group again.
            if let Some(group) = even {
                let failure = |failed: &[usize]| {
                    let own = if failed.contains(&me) { format!("no memory on {me}") } else { String::new() };
                    group.first_failure(&own).unwrap()
                };
                assert_eq!(failure(&[]), None);
                assert_eq!(failure(&[0, 2]), Some((0, "no memory on 0".into())));
                assert_eq!(failure(&[2, 4]), Some((4, "no memory on 4".into())));
                let pair = group.group(&[2, 0]).unwrap();
                assert_eq!(pair.is_some(), me != 0);
                if let Some(pair) = pair {
                    assert_eq!(pair.ranks(), [2, 4]);
                    let mut data = [me as f32];
                    pair.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert_eq!(data, [6.0]);
                }
            }
            comm.barrier().unwrap();
        });
    }
}

#[test]
fn different_lists_are_an_error_on_every_rank() {
    for kind in KINDS {
        let errors = ranks(kind, 3, |comm| {
            let list: &[usize] = if comm.rank() == 2 { &[0, 2] } else { &[0, 1] };
            let error = comm.group(list).map(drop).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Mismatch);
            error.message
        });
        assert_eq!(
            errors,
            vec!["rank 2 calls group([0, 2]) where rank 0 calls group([0, 1]), in the world"; 3],
            "{kind}"
        );
    }
}

#[test]
fn a_mismatch_inside_a_group_names_the_group() {
    for kind in KINDS {
        let errors = ranks(kind, 3, |comm| {
            match comm.group(&[2, 0]) {
                Ok(Some(group)) => message(group.broadcast(&mut vec![0u8; comm.rank() + 1], 0)),
                Ok(None) => message(comm.barrier()),
                // The other ranks may be this far before rank 1 knows that it is not in the group.
                Err(error) => error.message,
            }
        });
        let want = "rank 2 calls broadcast of 3 u8 with root 0 where rank 0 calls broadcast of 1 u8 with root 0, \
                    collective #1 of group [2, 0]";
        assert_eq!(errors, vec![want; 3], "{kind}");
    }
}

#[test]
fn handles_finish_in_order_and_mix_with_direct_calls() {
    for kind in KINDS {
        ranks(kind, 3, |comm| {
            let sum: f32 = 3.0;
            for _ in 0..10 {
                let handles: Vec<_> = [5usize, 0, 70_001, 1, 400_000]
                    .map(|n| (n, comm.all_reduce_async(vec![comm.rank() as f32; n], ReduceOp::Sum)))
                    .into();
                let broadcast = comm.broadcast_async(vec![comm.rank() as u8; 9], 2);
                let gathered = comm.all_gather_async(vec![comm.rank() as i32; 2]);
                let part = comm.reduce_scatter_async((0..6).collect::<Vec<i64>>(), ReduceOp::Sum);
                // Runs after everything that was submitted.
                let mut data = [1f64; 3];
                comm.all_reduce(&mut data, ReduceOp::Mean).unwrap();
                assert_eq!(data, [1.0; 3]);
                for (n, handle) in handles {
                    assert_eq!(handle.wait().unwrap(), vec![sum; n]);
                }
                assert_eq!(broadcast.wait().unwrap(), [2; 9]);
                assert_eq!(gathered.wait().unwrap(), [0, 0, 1, 1, 2, 2]);
                let first = 2 * comm.rank() as i64;
                assert_eq!(part.wait().unwrap(), [3 * first, 3 * (first + 1)]);
            }
            // A `Work` that is dropped: the collective still runs.
            drop(comm.all_reduce_async(vec![1f32; 1000], ReduceOp::Sum));
            drop(comm);
        });
    }
}

#[test]
fn a_duplicate_may_be_used_in_another_order_at_the_same_time() {
    for kind in KINDS {
        for world_size in [2usize, 3] {
            ranks(kind, world_size, move |comm| {
                let (me, all) = (comm.rank(), (0..world_size).sum::<usize>() as i32);
                let dup = comm.duplicate().unwrap();
                assert_eq!((dup.rank(), dup.world_size(), dup.ranks()), (me, world_size, comm.ranks()));
                for turn in 0..30 {
                    for n in [1usize, 100_003] {
                        // Rank 0 waits in the duplicate while the original's call runs; the other ranks call that one last. If
                        // the two took turns, all ranks would wait forever.
                        let (first, second) = if turn % 2 == 0 { (&comm, &dup) } else { (&dup, &comm) };
                        if me == 0 {
                            let handle = first.all_reduce_async(vec![me as i32; n], ReduceOp::Sum);
                            let mut data = vec![me as i64 + 5; n];
                            second.all_reduce(&mut data, ReduceOp::Max).unwrap();
                            assert_eq!(data, vec![world_size as i64 + 4; n]);
                            assert_eq!(handle.wait().unwrap(), vec![all; n]);
                        } else {
                            let mut data = vec![me as i64 + 5; n];
                            second.all_reduce(&mut data, ReduceOp::Max).unwrap();
                            assert_eq!(data, vec![world_size as i64 + 4; n]);
                            let mut data = vec![me as i32; n];
                            first.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                            assert_eq!(data, vec![all; n]);
                        }
                    }
                }
                // Two threads that use the communicators independently.
                thread::scope(|scope| {
                    for comm in [&comm, &dup] {
                        scope.spawn(move || {
                            for n in (0..40).map(|turn| if turn % 8 == me { 200_000 } else { 3 + turn % 2 }) {
                                comm.barrier().unwrap();
                                let all = comm.all_gather_v(&vec![me as u8; n]).unwrap();
                                assert_eq!((all.counts.len(), all.counts[me]), (world_size, n));
                            }
                        });
                    }
                });
            });
        }
    }
}

#[test]
fn duplicates_of_groups_and_of_duplicates_come_and_go() {
    for kind in KINDS {
        ranks(kind, 4, |comm| {
            let me = comm.rank();
            let pair = comm.group(&[3, 1]).unwrap();
            for _ in 0..10 {
                let dup = comm.duplicate().unwrap().duplicate().unwrap();
                if let Some(pair) = &pair {
                    let (dup, mut data) = (pair.duplicate().unwrap(), [me as f32; 3]);
                    assert_eq!(dup.ranks(), [3, 1]);
                    dup.broadcast(&mut data, 0).unwrap();
                    assert_eq!(data, [3.0; 3]);
                }
                let half = dup.group(&[0, 2]).unwrap();
                if let Some(half) = half {
                    let mut data = [me as i32; 40_000];
                    half.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert_eq!(data, [2; 40_000]);
                }
            }
            comm.barrier().unwrap();
        });
    }
    let dup = solo().unwrap().duplicate().unwrap();
    let mut data = [2f64];
    dup.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!(data, [2.0]);
}

#[test]
fn a_mismatch_inside_a_duplicate_names_it_and_ends_the_job() {
    for kind in KINDS {
        let errors = ranks(kind, 2, move |comm| {
            let dup = comm.duplicate().unwrap();
            let first = message(dup.broadcast(&mut vec![0u8; comm.rank() + 1], 0));
            assert_eq!(message(comm.barrier()), first, "{kind}");
            first
        });
        let want = "rank 1 calls broadcast of 2 u8 with root 0 where rank 0 calls broadcast of 1 u8 with root 0, \
                    collective #1 of a duplicate of the world";
        assert_eq!(errors, vec![want; 2], "{kind}");
        let errors = ranks(kind, 2, |comm| match comm.rank() {
            0 => message(comm.duplicate()),
            _ => message(comm.barrier()),
        });
        let want = "rank 1 calls barrier where rank 0 calls duplicate, collective #1 of the world";
        assert_eq!(errors, vec![want; 2], "{kind}");
    }
}

#[test]
fn an_asynchronous_mismatch_is_in_the_handle() {
    for kind in KINDS {
        let errors = ranks(kind, 2, |comm| {
            let first = comm.all_reduce_async(vec![0f32; 4], ReduceOp::Sum);
            let second = comm.all_reduce_async(vec![0f32; 4 + comm.rank()], ReduceOp::Sum);
            first.wait().unwrap();
            message(second.wait())
        });
        let want = "rank 1 calls all_reduce of 5 f32 (sum) where rank 0 calls all_reduce of 4 f32 (sum), collective #2 \
                    of the world";
        assert_eq!(errors, vec![want; 2], "{kind}");
    }
}

#[test]
fn tags_are_received_in_any_order_and_both_may_send_first() {
    for kind in KINDS {
        ranks(kind, 2, |comm| {
            let other = 1 - comm.rank();
            // Far more than the channel holds, in both directions at once. The rounds differ in which rank is blocked when.
            for n in [0usize, 10].into_iter().chain([1_000_003; 20]) {
                for tag in [1u64, 2, 3] {
                    comm.send(&vec![(tag * 10) as i32 + comm.rank() as i32; n], other, tag).unwrap();
                }
                for tag in [3u64, 1, 2] {
                    let mut got = vec![0i32; n];
                    comm.recv(&mut got, other, tag).unwrap();
                    assert_eq!(got, vec![(tag * 10) as i32 + other as i32; n], "{} tag {tag}", comm.transport());
                }
            }
            // The same tag: in the order of sending. A message may wait while its receiver is in a collective.
            for i in 0..5u8 {
                comm.send(&[i], other, 0).unwrap();
            }
            for i in 0..5u8 {
                if i == 4 {
                    comm.barrier().unwrap();
                }
                let mut got = [9u8];
                comm.recv(&mut got, other, 0).unwrap();
                assert_eq!(got, [i]);
            }
        });
    }
}

#[test]
fn tcp_works_between_different_addresses() {
    for wildcard in [false, true] {
        let sums = ranks_with(
            TransportKind::Tcp,
            3,
            move |config| {
                let address = if wildcard { "0.0.0.0".into() } else { format!("127.0.0.{}", config.rank + 2) };
                config.bind = Some(address.parse::<IpAddr>().unwrap());
            },
            |comm| {
                let mut data = vec![comm.rank() as f32; 50_000];
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                comm.barrier().unwrap();
                data[49_999]
            },
        );
        assert_eq!(sums, [3.0; 3]);
    }
}

#[test]
fn two_jobs_at_once_do_not_meet() {
    for kind in KINDS {
        let jobs: Vec<_> = (0..2)
            .map(|value| {
                thread::spawn(move || {
                    ranks(kind, 2, move |comm| {
                        for _ in 0..200 {
                            let mut data = [value as f32; 100];
                            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                            assert_eq!(data, [2.0 * value as f32; 100]);
                        }
                    })
                })
            })
            .collect();
        jobs.into_iter().for_each(|job| drop(job.join().unwrap()));
    }
}

#[test]
fn a_job_of_one_needs_no_rendezvous() {
    let comm = solo().unwrap();
    let mut data = [1.5f32, 2.5];
    comm.all_reduce(&mut data, ReduceOp::Mean).unwrap();
    assert_eq!(data, [1.5, 2.5]);
    assert_eq!(comm.all_gather_v(&[1u8, 2]).unwrap().data, [1, 2]);
    assert_eq!(comm.all_reduce_async(vec![3i32], ReduceOp::Max).wait().unwrap(), [3]);
    comm.barrier().unwrap();
    assert!(message(comm.send(&[1u8], 0, 0)).contains("a rank cannot exchange messages with itself"));
}

#[test]
fn a_port_of_all_addresses_can_be_had_by_its_number() {
    let job = Job::on("0.0.0.0:0", 1);
    let mut config = job.config(0, TransportKind::Tcp);
    config.store = format!("127.0.0.1:{}", job.server.local_addr().port());
    join(&config).unwrap().barrier().unwrap();
}
