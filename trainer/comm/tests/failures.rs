//! Ranks that disagree, are missing, abort, or do not belong to the job: an error on every rank, never a hang.
//! Timeouts are minutes long where the error must come at once, so that a test which ran into a timeout would be noticed.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use comm::{
    Communicator, ErrorKind, ReduceOp, Secret, StoreClient, StoreConfig, StoreEvent, StoreServer, TransportKind, join,
};
use support::{Job, KINDS, LIMIT, message, ranks, ranks_with};

type Call = fn(&Communicator) -> Result<(), comm::CommError>;

fn all_reduce_12(c: &Communicator) -> Result<(), comm::CommError> {
    c.all_reduce(&mut [0f32; 12], ReduceOp::Sum)
}

/// The calls of rank 1 while all other ranks call an all-reduce of 12 f32, and their text in the message.
const WRONG: [(&str, Call); 10] = [
    ("broadcast of 12 f32 with root 0", |c| c.broadcast(&mut [0f32; 12], 0)),
    ("all_reduce of 13 f32 (sum)", |c| c.all_reduce(&mut [0f32; 13], ReduceOp::Sum)),
    ("all_reduce of 0 f32 (sum)", |c| c.all_reduce(&mut [0f32; 0], ReduceOp::Sum)),
    ("all_reduce of 9000000 f32 (sum)", |c| c.all_reduce(&mut vec![0f32; 9_000_000], ReduceOp::Sum)),
    ("all_reduce of 12 i32 (sum)", |c| c.all_reduce(&mut [0i32; 12], ReduceOp::Sum)),
    ("all_reduce of 12 f32 (max)", |c| c.all_reduce(&mut [0f32; 12], ReduceOp::Max)),
    ("all_gather of 12 f32", |c| c.all_gather(&[0f32; 12], &mut vec![0f32; 12 * c.world_size()])),
    ("barrier", |c| c.barrier()),
    ("shared of 20 u8", |c| c.shared::<f32>(5).map(drop)),
    ("all_gather_v of u8", |c| c.all_gather_v(&[1u8; 5]).map(drop)),
];

#[test]
fn a_mismatch_is_the_same_error_on_every_rank() {
    for kind in KINDS {
        for world_size in [2, 3, 4, 7] {
            for (what, call) in WRONG {
                let errors = ranks(kind, world_size, move |comm| {
                    comm.barrier().unwrap();
                    let result = if comm.rank() == 1 { call(&comm) } else { all_reduce_12(&comm) };
                    let error = result.unwrap_err();
                    assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
                    // All later calls fail, with the same reason.
                    assert_eq!(comm.barrier().unwrap_err().message, error.message);
                    error.message
                });
                let want = format!(
                    "rank 1 calls {what} where rank 0 calls all_reduce of 12 f32 (sum), collective #2 of the world"
                );
                assert_eq!(errors, vec![want; world_size], "{kind}");
            }
        }
    }
}

#[test]
fn ranks_that_bring_different_shared_arrays_are_told() {
    for kind in KINDS {
        let errors = ranks(kind, 3, move |comm| {
            let (a, b) = (comm.shared::<f32>(50_000).unwrap(), comm.shared::<f32>(50_000).unwrap());
            let data = if comm.rank() == 2 { a } else { b };
            comm.all_reduce_shared(data, 50_000, ReduceOp::Sum).unwrap_err().message
        });
        let want = "rank 2 calls all_reduce of 50000 f32 (sum) in shared array 1 where rank 0 calls all_reduce of 50000 f32 \
                    (sum) in shared array 2, collective #3 of the world";
        assert_eq!(errors, vec![want; 3], "{kind}");
        let errors = ranks(kind, 2, move |comm| {
            let (data, other) = (comm.shared::<f32>(5).unwrap(), comm.duplicate().unwrap());
            let count = if comm.rank() == 0 { 6 } else { 5 };
            let error = message(comm.all_reduce_shared(data, count, ReduceOp::Sum));
            assert!(message(other.barrier()).contains("the array has 5 elements, not 6"));
            error
        });
        assert!(errors.iter().all(|error| error.contains("the array has 5 elements, not 6")), "{errors:?}");
    }
}

#[test]
fn roots_and_order_are_compared_too() {
    for kind in KINDS {
        let errors = ranks(kind, 3, |comm| message(comm.broadcast(&mut [0u8; 4], usize::from(comm.rank() == 2))));
        let want = "rank 2 calls broadcast of 4 u8 with root 1 where rank 0 calls broadcast of 4 u8 with root 0, \
                    collective #1 of the world";
        assert_eq!(errors, vec![want; 3], "{kind}");

        let errors = ranks(kind, 2, |comm| {
            let calls: [Call; 2] = [|c| c.barrier(), all_reduce_12];
            let order = if comm.rank() == 0 { [0, 1] } else { [1, 0] };
            message(order.into_iter().try_for_each(|i| calls[i](&comm)))
        });
        let want = "rank 1 calls all_reduce of 12 f32 (sum) where rank 0 calls barrier, collective #1 of the world";
        assert_eq!(errors, vec![want; 2], "{kind}");
    }
}

#[test]
fn messages_are_compared_at_their_receiver() {
    for kind in KINDS {
        let errors = ranks(kind, 2, |comm| {
            if comm.rank() == 0 {
                comm.send(&[1f32; 3], 1, 9).unwrap();
                message(comm.barrier())
            } else {
                message(comm.recv(&mut [0f64; 3], 0, 9))
            }
        });
        let want = "rank 0 sends 3 f32 (tag 9) where rank 1 calls recv of 3 f64 from rank 0, in the world";
        assert_eq!(errors, vec![want; 2], "{kind}");

        // No rank sends: the other rank is in a collective, and both would wait forever.
        let errors = ranks(kind, 2, |comm| {
            if comm.rank() == 0 { message(all_reduce_12(&comm)) } else { message(comm.recv(&mut [0f32; 3], 0, 1)) }
        });
        let want = "rank 0 calls all_reduce of 12 f32 (sum) where rank 1 calls recv of 3 f32 from rank 0, collective #1 \
                    of the world";
        assert_eq!(errors, vec![want; 2], "{kind}");
    }
}

#[test]
fn wrong_arguments_end_the_job_for_all() {
    for kind in KINDS {
        for (call, want) in [
            (
                (|c| c.broadcast(&mut [0f32; 2], 5)) as Call,
                "broadcast of 2 f32 with root 5: there is no rank 5 in a group of 2",
            ),
            (|c| c.all_reduce(&mut [0i32; 2], ReduceOp::Mean), "the mean of integers is not an integer"),
            (|c| c.all_gather(&[0u8; 2], &mut [0u8; 5]), "the receiver has 5 elements, 4 will arrive"),
            (|c| c.reduce_scatter(&[0u8; 5], &mut [0u8; 2], ReduceOp::Sum), "5 elements are not 2 for each of 2 ranks"),
            (|c| c.send(&[0u8; 5], 2, 0), "there is no rank 2"),
            (|c| c.recv(&mut [0u8; 5], 1, 0), "a rank cannot exchange messages with itself"),
            (|c| c.send(&[0u8; 5], 1, 0), "a rank cannot exchange messages with itself"),
            (|c| c.group(&[0, 0]).map(drop), "rank 0 is listed twice"),
        ] {
            let errors =
                ranks(kind, 2, move |comm| message(if comm.rank() == 1 { call(&comm) } else { comm.barrier() }));
            assert!(errors[1].contains(want), "{kind}: {}", errors[1]);
            assert_eq!(errors[0], errors[1]);
        }
    }
}

#[test]
fn a_timeout_names_who_is_missing_and_what_all_are_doing() {
    for kind in KINDS {
        let others_call = Arc::new(Barrier::new(3));
        let errors = ranks_with(
            kind,
            4,
            // The first all-reduce must succeed within the timeout.
            |config| config.timeout = Duration::from_secs(10),
            move |comm| {
                comm.all_reduce(&mut [1f32; 3], ReduceOp::Sum).unwrap();
                if comm.rank() == 2 {
                    // To the other ranks, rank 2 seems to compute forever.
                    while comm.error().is_none() {
                        thread::sleep(Duration::from_millis(5));
                    }
                    return comm.error().unwrap();
                }
                others_call.wait();
                all_reduce_12(&comm).unwrap_err()
            },
        );
        for error in errors {
            assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
            let text = error.message;
            assert!(text.starts_with("all_reduce of 12 f32 (sum), collective #2 of the world: "), "{kind}: {text}");
            let idle = "\n  rank 2 has left all_reduce of 3 f32 (sum), collective #1 of the world, for ";
            assert!(text.contains(idle), "{kind}: {text}");
            assert!(
                text.contains(" is in all_reduce of 12 f32 (sum), collective #2 of the world, for "),
                "{kind}: {text}"
            );
            if kind == TransportKind::Shm {
                assert!(text.contains("rank 2 did not come within 10.0s"), "{text}");
                assert_eq!(error.culprit, Some(2));
            }
        }
    }
}

#[test]
fn a_receiver_nobody_sends_to_times_out() {
    for kind in KINDS {
        let errors = ranks_with(
            kind,
            2,
            |config| config.timeout = Duration::from_millis(200),
            |comm| {
                if comm.rank() == 0 {
                    message(comm.recv(&mut [0u8; 1], 1, 3))
                } else {
                    message(comm.recv(&mut [0u8; 1], 0, 3))
                }
            },
        );
        assert!(errors[0].contains("did not answer within 200.0ms"), "{kind}: {errors:?}");
    }
}

#[test]
fn an_abort_wakes_every_wait() {
    for kind in KINDS {
        let before_the_calls = Arc::new(Barrier::new(4));
        let errors = ranks(kind, 4, move |comm| {
            before_the_calls.wait();
            match comm.rank() {
                0 => message(comm.barrier()),
                1 => message(comm.recv(&mut [0f32; 1], 3, 0)),
                2 => message(comm.all_reduce_async(vec![0f32; 300_000], ReduceOp::Sum).wait()),
                _ => {
                    comm.abort("the loss is not finite");
                    message(comm.barrier())
                }
            }
        });
        assert_eq!(errors, vec!["rank 3 aborted the job: the loss is not finite"; 4], "{kind}");
    }
}

#[test]
fn the_host_of_the_rendezvous_can_abort_too() {
    let job = Job::new(2);
    let threads: Vec<_> = (0..2)
        .map(|rank| {
            let config = job.config(rank, TransportKind::Shm);
            thread::spawn(move || {
                // The abort may come while the ranks connect.
                let comm = match join(&config) {
                    Ok(comm) => comm,
                    Err(error) => return error.message,
                };
                // Each waits for a message of the other. Different calls would be a mismatch, found perhaps before the abort.
                message(comm.recv(&mut [0u8], 1 - rank, 0))
            })
        })
        .collect();
    assert!(job.saw(|e| *e == StoreEvent::Joined(0)) && job.saw(|e| *e == StoreEvent::Joined(1)));
    job.server.abort("rank 1's process got SIGSEGV");
    for thread in threads {
        assert_eq!(thread.join().unwrap(), "rank 1's process got SIGSEGV");
    }
}

#[test]
fn a_rank_that_leaves_is_missed_at_once() {
    for kind in KINDS {
        let errors = ranks(kind, 3, |comm| {
            comm.barrier().unwrap();
            if comm.rank() == 1 { "gone".into() } else { message(all_reduce_12(&comm)) }
        });
        for rank in [0, 2] {
            assert!(errors[rank].contains("rank 1 left the job while rank "), "{kind}: {}", errors[rank]);
        }
    }
}

/// A socket that is closed with unread data resets its connection, which would look like a failure of the network.
#[test]
fn a_rank_that_leaves_a_message_unread_has_left() {
    let sent = Barrier::new(2);
    let errors = ranks(TransportKind::Tcp, 2, move |comm| {
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            sent.wait();
            return "gone".into();
        }
        comm.send(&[1u8; 64], 1, 0).unwrap();
        sent.wait();
        message(comm.recv(&mut [0u8], 1, 0))
    });
    assert!(errors[0].contains("rank 1 left the job while rank 0 "), "{}", errors[0]);
}

#[test]
fn a_rank_that_panics_is_a_death() {
    for kind in KINDS {
        let job = Job::new(2);
        let config = job.config(0, kind);
        let other = job.config(1, kind);
        // The panic may come while rank 0 still joins: the error is the same.
        let waiting = thread::spawn(move || message(join(&config).and_then(|comm| comm.barrier())));
        let died = thread::spawn(move || {
            let _comm = join(&other).unwrap();
            panic!("this panic is part of the test");
        });
        assert!(died.join().is_err());
        assert_eq!(waiting.join().unwrap(), "rank 1 is gone: its connection was closed", "{kind}");
        assert!(job.saw(|e| matches!(e, StoreEvent::Lost { rank: 1, .. })));
    }
}

#[test]
fn a_rank_that_never_joins_is_named() {
    for kind in KINDS {
        let job = Job::new(3);
        let other = job.config(2, kind);
        let other = thread::spawn(move || message(join(&other)));
        assert!(job.saw(|e| *e == StoreEvent::Joined(2)));
        let mut config = job.config(0, kind);
        config.connect_timeout = Duration::from_millis(300);
        let text = message(join(&config));
        // On a busy machine rank 2 may be late for the barrier as well.
        assert!(
            ["rank 1", "ranks 1 and 2"].iter().any(|late| text.contains(&format!("\"join\": {late} did not come"))),
            "{text}"
        );
        assert_eq!(other.join().unwrap(), text, "the same error");
    }
}

#[test]
fn unauthenticated_peers_are_refused_and_disturb_nobody() {
    let job = Job::new(2);
    let address = job.server.local_addr();
    // Peers that send slowly, nothing, or nonsense; many at once; and one with another job's secret.
    let mut slow = TcpStream::connect(address).unwrap();
    slow.write_all(b"trn").unwrap();
    let silent: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut loud = TcpStream::connect(address).unwrap();
    let _ = loud.write_all(&[0xff; 1 << 16]);
    let wrong = StoreClient::connect(address.to_string(), &StoreConfig::new(Secret::random().unwrap(), 2), 1, LIMIT);
    assert!(message(wrong).contains("does not know this run's secret"));
    // Silent peers beyond the limit are refused and the loud one is closed, while the ranks of the job join.
    let threads: Vec<_> = (0..2)
        .map(|rank| {
            let config = job.config(rank, TransportKind::Tcp);
            thread::spawn(move || {
                let comm = join(&config).unwrap();
                let mut data = [rank as f32 + 1.0];
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                comm.barrier().unwrap();
                data[0]
            })
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), 3.0);
    }
    assert!(
        job.saw(|e| matches!(e, StoreEvent::Refused { cause, .. } if cause.contains("does not speak this protocol")))
    );
    assert!(job.saw(|e| matches!(e, StoreEvent::Refused { cause, .. } if cause.contains("too many"))));
    assert_eq!(loud.read(&mut [0; 8]).unwrap_or(0), 0);
    drop(silent);
    // A peer that sends nothing is closed after the handshake's time limit.
    let mut mute = TcpStream::connect(address).unwrap();
    mute.set_read_timeout(Some(LIMIT)).unwrap();
    assert!(matches!(mute.read(&mut [0; 8]), Ok(0)), "a silent peer is still connected");
    assert!(
        job.saw(|e| matches!(e, StoreEvent::Refused { cause, .. } if cause.contains("did not authenticate in time")))
    );
}

#[test]
fn wrong_members_are_told_why() {
    let job = Job::new(2);
    let address = job.server.local_addr().to_string();
    let config = |world_size| StoreConfig::new(job.secret.clone(), world_size);
    let connect = |rank, world_size| StoreClient::connect(&address, &config(world_size), rank, LIMIT);
    let first = connect(0, 2).unwrap();
    assert!(message(connect(0, 2)).contains("rank 0 has joined already"));
    assert!(message(connect(1, 3)).contains("started for 3 ranks, this job has 2"));
    let start = Instant::now();
    let nobody = StoreClient::connect("127.0.0.1:1", &config(2), 0, Duration::from_millis(200));
    assert!(message(nobody).contains("found no rendezvous at 127.0.0.1:1"));
    assert!(start.elapsed() >= Duration::from_millis(200), "it was given up too early");
    let taken = StoreServer::bind(job.server.local_addr(), config(2), |_| {}).unwrap_err();
    assert!(taken.hint.contains("another job has this port"), "{taken}");
    first.set("a", b"1").unwrap();
    assert_eq!(first.get("a").unwrap(), Some(b"1".to_vec()));
    assert_eq!(first.get("b").unwrap(), None);
    assert!(message(first.wait("b", Duration::from_millis(50))).contains("for key \"b\""));
}

#[test]
fn the_end_of_the_rendezvous_ends_the_job() {
    for kind in KINDS {
        let job = Job::new(2);
        let past_the_barrier = Arc::new(Barrier::new(3));
        let threads: Vec<_> = (0..2)
            .map(|rank| {
                let (config, past_the_barrier) = (job.config(rank, kind), past_the_barrier.clone());
                thread::spawn(move || {
                    let comm = join(&config).unwrap();
                    comm.barrier().unwrap();
                    past_the_barrier.wait();
                    let text = message(comm.recv(&mut [0u8], 1 - rank, 1));
                    (comm, text)
                })
            })
            .collect();
        past_the_barrier.wait();
        drop(job);
        // No rank leaves before the other one has its message.
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        for (_, text) in &ended {
            // The first rank that notices may also tell the other one.
            assert!(text.contains("is gone"), "{kind}: {text}");
        }
    }
}
