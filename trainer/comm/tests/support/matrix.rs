//! Every collective of one type and size on one rank, against exact values. Shared by the transports' tests.

use comm::{Communicator, ReduceOp};

use super::{Number, input, mean, reduced};

/// Empty, one element, odd numbers; the paths for small arrays and their limits (16 K f32 fill an entry), several rounds.
pub const SIZES: [usize; 9] = [0, 1, 7, 64, 1000, 8192, 16_384, 16_385, 100_003];

fn expected<T: Number>(op: ReduceOp, members: &[usize], i: usize) -> T {
    let whole = reduced(op, members, i);
    if op == ReduceOp::Mean { mean(whole, members.len()) } else { T::of(whole) }
}

fn ops<T: Number>() -> impl Iterator<Item = ReduceOp> {
    ReduceOp::ALL.into_iter().filter(|op| *op != ReduceOp::Mean || T::DTYPE.is_float())
}

/// Compares all elements. `what` names the case in the message.
fn compare<T: Number>(got: &[T], want: impl Fn(usize) -> T, what: &str) {
    for (i, value) in got.iter().enumerate() {
        assert_eq!(*value, want(i), "{what}, element {i} of {}", got.len());
    }
}

/// Runs all collectives of one type and size, each twice.
pub fn collectives<T: Number>(comm: &Communicator, n: usize) {
    let (me, world_size) = (comm.rank(), comm.world_size());
    let all: Vec<usize> = (0..world_size).collect();
    let name = |what: &str| format!("{what} {} n={n} world={world_size} {} rank {me}", T::DTYPE, comm.transport());
    let mine = |op, len: usize| -> Vec<T> { (0..len).map(|i| T::of(input(op, me, i))).collect() };
    // One array for both turns, longer than the part that is reduced.
    let mut shared = Some(comm.shared_array::<T>(n + 3).unwrap());
    for op in ops::<T>() {
        // The same in both turns.
        let given = mine(op, (n * world_size).max(n + 3));
        let whole: Vec<T> = (0..n).map(|i| expected(op, &all, i)).collect();
        let part: Vec<T> = (0..n).map(|i| expected(op, &all, me * n + i)).collect();
        for turn in 0..2 {
            let root = (n + turn) % world_size;
            let mut data = shared.take().unwrap();
            data.copy_from_slice(&given[..n + 3]);
            let data = comm.all_reduce_shared(data, n, op).unwrap();
            compare(&data[..n], |i| whole[i], &name(&format!("all_reduce_shared {op}")));
            compare(&data[n..], |i| given[n + i], &name("behind all_reduce_shared"));
            shared = Some(data);

            let mut data = given[..n].to_vec();
            comm.all_reduce(&mut data, op).unwrap();
            compare(&data, |i| whole[i], &name(&format!("all_reduce {op}")));

            let mut data = given[..n].to_vec();
            comm.reduce(&mut data, op, root).unwrap();
            let want = if me == root { &whole } else { &given };
            compare(&data, |i| want[i], &name(&format!("reduce {op} root {root}")));

            let mut recv = vec![T::of(99); n];
            comm.reduce_scatter(&given[..n * world_size], &mut recv, op).unwrap();
            compare(&recv, |i| part[i], &name(&format!("reduce_scatter {op}")));
        }
    }
    for turn in 0..2 {
        let root = (n + turn) % world_size;
        let op = ReduceOp::Sum;
        let mut data = mine(op, n);
        comm.broadcast(&mut data, root).unwrap();
        compare(&data, |i| T::of(input(op, root, i)), &name("broadcast"));

        let mut recv = vec![T::of(99); n * world_size];
        comm.all_gather(&mine(op, n), &mut recv).unwrap();
        compare(&recv, |i| T::of(input(op, i / n, i % n)), &name("all_gather"));

        // Lengths n, n+1, … and one rank without elements.
        let len = |rank: usize| if rank == 1 { 0 } else { n + rank };
        let got = comm.all_gather_v(&mine(op, len(me))).unwrap();
        assert_eq!(got.counts, (0..world_size).map(len).collect::<Vec<_>>());
        let want: Vec<T> = (0..world_size).flat_map(|r| (0..len(r)).map(move |i| T::of(input(op, r, i)))).collect();
        compare(&got.data, |i| want[i], &name("all_gather_v"));
        assert_eq!(got.data.len(), want.len());

        let mut recv = vec![T::of(99); if me == root { n * world_size } else { 0 }];
        comm.gather(&mine(op, n), &mut recv, root).unwrap();
        compare(&recv, |i| T::of(input(op, i / n, i % n)), &name("gather"));

        let send = if me == root { mine(op, n * world_size) } else { Vec::new() };
        let mut recv = vec![T::of(99); n];
        comm.scatter(&send, &mut recv, root).unwrap();
        compare(&recv, |i| T::of(input(op, root, me * n + i)), &name("scatter"));

        let mut recv = vec![T::of(99); n * world_size];
        comm.all_to_all(&mine(op, n * world_size), &mut recv).unwrap();
        compare(&recv, |i| T::of(input(op, i / n, me * n + i % n)), &name("all_to_all"));

        // Round the ring: even ranks send first. One rank alone has no peer.
        if world_size > 1 {
            let (left, right) = ((me + world_size - 1) % world_size, (me + 1) % world_size);
            let mut recv = vec![T::of(99); n];
            if me % 2 == 0 {
                comm.send(&mine(op, n), right, 5).unwrap();
                comm.recv(&mut recv, left, 5).unwrap();
            } else {
                comm.recv(&mut recv, left, 5).unwrap();
                comm.send(&mine(op, n), right, 5).unwrap();
            }
            compare(&recv, |i| T::of(input(op, left, i)), &name("send and recv"));

            // All ranks send first, and receive meanwhile.
            let sent = comm.isend(mine(op, n), right, 6);
            comm.recv(&mut recv, left, 6).unwrap();
            compare(&recv, |i| T::of(input(op, left, i)), &name("isend and recv"));
            let arriving = comm.irecv(vec![T::of(99); n], right, 7);
            comm.send(&sent.wait().unwrap(), left, 7).unwrap();
            compare(&arriving.wait().unwrap(), |i| T::of(input(op, right, i)), &name("irecv and send"));
        }

        // Parts of different lengths. Rank 1 gets nothing from rank 0.
        let len = |from: usize, to: usize| if (from, to) == (0, 1) { 0 } else { n / world_size + from * to };
        let counts: Vec<usize> = (0..world_size).map(|to| len(me, to)).collect();
        let got = comm.all_to_all_v(&mine(op, counts.iter().sum()), &counts).unwrap();
        assert_eq!(got.counts, (0..world_size).map(|from| len(from, me)).collect::<Vec<_>>());
        let want: Vec<T> = (0..world_size)
            .flat_map(|from| {
                let start: usize = (0..me).map(|to| len(from, to)).sum();
                (start..start + len(from, me)).map(move |i| T::of(input(op, from, i)))
            })
            .collect();
        assert_eq!(got.data.len(), want.len());
        compare(&got.data, |i| want[i], &name("all_to_all_v"));
        comm.barrier().unwrap();
    }
}
