//! Ranks that call different collectives, or a collective with arguments that cannot work: the same error on every rank, at once.

mod support;

use comm::{Communicator, ErrorKind, ReduceOp};
use support::{KINDS, all_reduce_12, message, ranks};

type Call = fn(&Communicator) -> Result<(), comm::CommError>;

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
    ("shared_array of 20 u8", |c| c.shared_array::<f32>(5).map(drop)),
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
fn different_shared_arrays_are_reported() {
    for kind in KINDS {
        let errors = ranks(kind, 3, move |comm| {
            let (a, b) = (comm.shared_array::<f32>(50_000).unwrap(), comm.shared_array::<f32>(50_000).unwrap());
            let data = if comm.rank() == 2 { a } else { b };
            comm.all_reduce_shared(data, 50_000, ReduceOp::Sum).unwrap_err().message
        });
        let want = "rank 2 calls all_reduce of 50000 f32 (sum) in shared array 1 where rank 0 calls all_reduce of 50000 f32 \
                    (sum) in shared array 2, collective #3 of the world";
        assert_eq!(errors, vec![want; 3], "{kind}");
        let errors = ranks(kind, 2, move |comm| {
            let (data, other) = (comm.shared_array::<f32>(5).unwrap(), comm.duplicate().unwrap());
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
