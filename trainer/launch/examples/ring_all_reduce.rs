//! A ring all-reduce made of `isend` and `recv`, from PyTorch's tutorial "Writing Distributed Applications with PyTorch":
//! `trainer launch --cpus 4 -- target/release/examples/ring_all_reduce`. The library's own ring, over
//! TCP, sends 1/n of the data in each of 2(n-1) steps. This example sends all data in each of n-1 steps.

mod tutorial;

use comm::{Communicator, ReduceOp};

/// Adds up all ranks' `send`. In each step a rank passes on to the right what it has received from the left.
fn all_reduce(group: &Communicator, send: &[f32]) -> comm::Result<Vec<f32>> {
    let (rank, size) = (group.rank(), group.world_size());
    let (left, right) = ((rank + size - 1) % size, (rank + 1) % size);
    let mut sum = send.to_vec();
    let mut outgoing = send.to_vec();
    let mut incoming = vec![0.0; send.len()];
    for _ in 1..size {
        let request = group.isend(outgoing, right, 0);
        group.recv(&mut incoming, left, 0)?;
        sum.iter_mut().zip(&incoming).for_each(|(sum, value)| *sum += value);
        outgoing = request.wait()?;
        std::mem::swap(&mut outgoing, &mut incoming);
    }
    Ok(sum)
}

fn main() -> tutorial::Result {
    let group = tutorial::join()?;
    // Longer than what a connection buffers: no rank could send all of it before it receives
    let data: Vec<f32> = (0..2_000_000).map(|i| (i % 1000 * (group.rank() + 1)) as f32).collect();
    let sum = all_reduce(&group, &data)?;
    let mut want = data;
    group.all_reduce(&mut want, ReduceOp::Sum)?;
    if sum != want {
        return Err("the ring's sum is not that of all_reduce".into());
    }
    tutorial::print(format_args!("Rank {} has data {:?}", group.rank(), &sum[..4]))
}
