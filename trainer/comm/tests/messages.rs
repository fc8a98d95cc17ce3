//! Messages that are on their way while ranks do something else, asynchronous collectives, and averages of gradients. The matrix
//! tests every type and size.

mod support;

use std::time::Duration;

use comm::{CommError, Communicator, ErrorKind, ReduceOp};
use support::{KINDS, message, ranks, ranks_with};

/// Longer than what a transport buffers.
const LONG: usize = 3 << 20;

#[test]
fn messages_in_all_directions_do_not_wait_for_each_other() {
    for kind in KINDS {
        for world_size in 2..=4 {
            ranks(kind, world_size, move |comm| {
                let me = comm.rank();
                let others = || (0..world_size).filter(move |rank| *rank != me);
                for n in [0, 1, LONG] {
                    // All send to all, in an order in which no pair of ranks sends first what the other receives first.
                    let sent: Vec<_> = others().map(|to| comm.isend(vec![(10 * me + to) as f32; n], to, 1)).collect();
                    let arriving: Vec<_> =
                        others().rev().map(|from| (from, comm.irecv(vec![0f32; n], from, 1))).collect();
                    for (from, work) in arriving {
                        let want = (10 * from + me) as f32;
                        assert!(
                            work.wait().unwrap().iter().all(|value| *value == want),
                            "{kind} {from} to {me}, n {n}"
                        );
                    }
                    sent.into_iter().for_each(|work| drop(work.wait().unwrap()));
                }
                comm.barrier().unwrap();
            });
        }
    }
}

#[test]
fn messages_with_one_tag_keep_their_order_and_others_may_overtake() {
    for kind in KINDS {
        ranks(kind, 2, |comm| {
            if comm.rank() == 0 {
                let works: Vec<_> = (0..20).map(|i| comm.isend(vec![i as i32; 1000 * i], 1, (i % 2) as u64)).collect();
                works.into_iter().for_each(|work| drop(work.wait().unwrap()));
            } else {
                // First those of tag 1, which were sent later
                for tag in [1, 0] {
                    for i in (0..20).filter(|i| i % 2 == tag) {
                        let mut data = vec![0i32; 1000 * i];
                        comm.recv(&mut data, 0, tag as u64).unwrap();
                        assert!(data.iter().all(|value| *value == i as i32));
                    }
                }
            }
        });
    }
}

/// Long messages, and a receiver that posts its receives while they arrive: a receive must not take the message of an earlier one.
#[test]
fn posted_receives_of_one_tag_get_the_messages_in_the_order_of_sending() {
    for kind in KINDS {
        ranks(kind, 2, move |comm| {
            for round in 0..50 {
                let values = (0..10).map(|i| 100 * round + i);
                let len = |value: i32| 10_000 * (value as usize % 10 + 1);
                if comm.rank() == 0 {
                    let works: Vec<_> = values.map(|value| comm.isend(vec![value; len(value)], 1, 7)).collect();
                    works.into_iter().for_each(|work| drop(work.wait().unwrap()));
                } else {
                    let works: Vec<_> = values.map(|value| (value, comm.irecv(vec![0; len(value)], 0, 7))).collect();
                    for (value, work) in works {
                        assert!(work.wait().unwrap().iter().all(|got| *got == value), "{kind} {value}");
                    }
                }
                comm.barrier().unwrap();
            }
        });
    }
}

/// A message that is started after a collective does not overtake it, and a collective waits for the messages before.
#[test]
fn messages_and_collectives_keep_the_order_of_the_code() {
    for kind in KINDS {
        ranks(kind, 2, move |comm| {
            let peer = 1 - comm.rank();
            for round in 0..50 {
                let first = comm.isend(vec![round; 100_000], peer, 0);
                let got = comm.irecv(vec![0i64; 100_000], peer, 0);
                let sum = comm.all_reduce_async(vec![round; 10], ReduceOp::Sum);
                let second = comm.isend(vec![-round; 3], peer, 0);
                let then = comm.irecv(vec![0i64; 3], peer, 0);
                comm.barrier().unwrap();
                assert_eq!((got.wait().unwrap()[99_999], sum.wait().unwrap()[9]), (round, 2 * round));
                assert_eq!(then.wait().unwrap(), [-round; 3]);
                drop((first.wait().unwrap(), second.wait().unwrap()));
            }
        });
    }
}

#[test]
fn asynchronous_collectives_return_their_buffers() {
    for kind in KINDS {
        for world_size in 1..=4 {
            ranks(kind, world_size, move |comm| {
                let (me, root) = (comm.rank(), world_size - 1);
                for n in [0, 1, 50_000] {
                    let reduced = comm.reduce_async(vec![me as i64; n], ReduceOp::Sum, root);
                    let gathered = comm.gather_async(vec![me as i64; n], root);
                    let send =
                        if me == root { (0..world_size).flat_map(|to| vec![to as i64; n]).collect() } else { vec![] };
                    let scattered = comm.scatter_async(send, n, root);
                    let exchanged =
                        comm.all_to_all_async((0..world_size).flat_map(|to| vec![(10 * me + to) as i64; n]).collect());
                    comm.barrier_async().wait().unwrap();
                    let sum = if me == root { (world_size * (world_size - 1) / 2) as i64 } else { me as i64 };
                    assert_eq!(reduced.wait().unwrap(), vec![sum; n]);
                    let all: Vec<i64> = (0..world_size).flat_map(|from| vec![from as i64; n]).collect();
                    assert_eq!(gathered.wait().unwrap(), if me == root { all } else { vec![] });
                    assert_eq!(scattered.wait().unwrap(), vec![me as i64; n]);
                    let parts: Vec<i64> = (0..world_size).flat_map(|from| vec![(10 * from + me) as i64; n]).collect();
                    assert_eq!(exchanged.wait().unwrap(), parts);
                }
            });
        }
    }
}

#[test]
fn gradients_are_averaged_over_the_ranks() {
    for kind in KINDS {
        for world_size in 1..=4 {
            ranks(kind, world_size, move |comm| {
                // More than a bucket, an array that is longer than one, and empty ones
                let lens = [3, 0, 7 << 20, 1, 0, 100_000];
                let mut arrays: Vec<Vec<f32>> =
                    lens.iter().enumerate().map(|(i, len)| vec![(comm.rank() * (i + 1)) as f32; *len]).collect();
                let mut slices: Vec<&mut [f32]> = arrays.iter_mut().map(Vec::as_mut_slice).collect();
                comm.average_gradients(&mut slices).unwrap();
                comm.average_gradients(&mut []).unwrap();
                for (i, (array, len)) in arrays.iter().zip(lens).enumerate() {
                    let want = ((i + 1) * (world_size - 1)) as f32 / 2.0;
                    assert!(array.len() == len && array.iter().all(|value| *value == want), "{kind} {world_size} {i}");
                }
            });
        }
    }
}

/// Calls nothing until another rank has ended the job, and returns why.
fn until_error(comm: &Communicator) -> CommError {
    loop {
        match comm.error() {
            Some(error) => return error,
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

#[test]
fn mistakes_are_errors_on_every_rank() {
    for kind in KINDS {
        // The receiver names another length.
        let said = ranks(kind, 2, |comm| match comm.rank() {
            0 => message(comm.isend(vec![0f32; 3], 1, 0).wait().and_then(|_| comm.barrier())),
            _ => message(comm.irecv(vec![0f32; 4], 0, 0).wait()),
        });
        assert!(
            said[1].contains("rank 0 sends 3 f32 (tag 0) where rank 1 calls recv of 4 f32 from rank 0"),
            "{said:?}"
        );
        // The receiver goes to a collective instead.
        let said = ranks(kind, 2, |comm| match comm.rank() {
            // Sockets may take a whole message before the sender looks at what the receiver does.
            0 => loop {
                if let Err(error) = comm.isend(vec![0f32; LONG], 1, 0).wait() {
                    break error.message;
                }
            },
            _ => message(comm.barrier()),
        });
        for text in &said {
            assert!(text.contains("rank 1 calls barrier where rank 0 calls send of"), "{kind} {said:?}");
        }
        // Nobody sends.
        let limit = |config: &mut comm::CommConfig| config.timeout = Duration::from_secs(1);
        let errors = ranks_with(kind, 2, limit, |comm| match comm.rank() {
            0 => Some(comm.irecv(vec![0f32; 4], 1, 0).wait().unwrap_err()),
            _ => {
                until_error(&comm);
                None
            }
        });
        let error = errors[0].as_ref().unwrap();
        assert_eq!((error.kind, error.culprit), (ErrorKind::Timeout, Some(1)), "{error}");
        for refused in ranks(kind, 1, |comm| {
            [message(comm.isend(vec![0u8], 0, u64::MAX).wait()), message(comm.all_to_all_v(&[0u8; 3], &[2]))]
        }) {
            assert!(refused[0].contains("the tag 18446744073709551615 is reserved"), "{refused:?}");
        }
        let said = ranks(kind, 2, |comm| message(comm.all_to_all_v(&[0u8; 3], &[2, 2])));
        assert!(said[0].contains("counts [2, 2] do not divide 3 elements among 2 ranks"), "{said:?}");
        let said = ranks(kind, 2, |comm| message(comm.irecv(vec![0u8], 5, 0).wait()));
        assert!(said[0].contains("there is no rank 5 in a group of 2"), "{said:?}");
    }
}
