//! Ranks that disagree, are missing, abort, or do not belong to the job: an error on every rank, never a hang.
//! Timeouts are minutes long where the error must come at once, so that a test which ran into a timeout would be noticed.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use comm::{ErrorKind, ReduceOp, Secret, StoreClient, StoreConfig, StoreEvent, StoreServer, TransportKind, join};
use support::{Job, KINDS, LIMIT, all_reduce_12, message, ranks, ranks_with};

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
                assert!(text.contains("rank 2 did not arrive within 10.0s"), "{text}");
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
            ["rank 1", "ranks 1 and 2"].iter().any(|late| text.contains(&format!("\"join\": {late} did not arrive"))),
            "{text}"
        );
        assert_eq!(other.join().unwrap(), text, "the same error");
    }
}

/// As on machines that were started with different flags. The ranks could not connect, and would wait for the whole timeout.
#[test]
fn ranks_with_different_backends_learn_it_when_they_join() {
    let kinds = [TransportKind::Shm, TransportKind::Shm, TransportKind::Tcp];
    let job = Job::new(kinds.len());
    let joins: Vec<_> = (0..)
        .zip(kinds)
        .map(|(rank, kind)| {
            let config = job.config(rank, kind);
            thread::spawn(move || join(&config).map(drop))
        })
        .collect();
    for thread in joins {
        let error = thread.join().unwrap().unwrap_err();
        assert_eq!((error.kind, error.culprit), (ErrorKind::Usage, Some(2)), "{error}");
        assert_eq!(error.message, "rank 2 uses the backend tcp, and rank 0 uses shm");
        assert!(error.hint.contains("parallel.backend"), "{}", error.hint);
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
fn wrong_members_get_the_reason() {
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
