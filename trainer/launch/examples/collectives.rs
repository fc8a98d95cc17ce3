//! Collectives, from PyTorch's tutorial "Writing Distributed Applications with PyTorch":
//! `trainer launch --cpus 4 -- target/release/examples/collectives`. Each of the tutorial's six, and `reduce_scatter`,
//! `all_to_all` with unequal parts, and a group.

mod tutorial;

use comm::ReduceOp;

fn main() -> tutorial::Result {
    let group = tutorial::join()?;
    let (rank, size) = (group.rank(), group.world_size());
    let say = |what: &str, data: &[f32]| tutorial::print(format_args!("Rank {rank} {what} {data:?}"));

    // The tutorial's example: a sum over the ranks of a new group, here of all
    let all: Vec<usize> = (0..size).collect();
    let everybody = group.group(&all)?.ok_or("every rank is in the group of all")?;
    let mut tensor = [1.0f32];
    everybody.all_reduce(&mut tensor, ReduceOp::Sum)?;
    tutorial::print(format_args!("Rank {rank} has data {:?}", tensor[0]))?;

    let mut tensor = [rank as f32];
    group.broadcast(&mut tensor, 0)?;
    say("broadcast", &tensor)?;

    let mut tensor = [rank as f32 + 1.0];
    group.reduce(&mut tensor, ReduceOp::Product, 0)?;
    if rank == 0 {
        say("reduce", &tensor)?;
    }

    let mut parts = vec![0.0f32; if rank == 0 { size } else { 0 }];
    group.gather(&[rank as f32], &mut parts, 0)?;
    if rank == 0 {
        say("gather", &parts)?;
    }

    let mut tensor = [0.0f32];
    let parts: Vec<f32> = (0..size).map(|part| part as f32 * 10.0).collect();
    group.scatter(if rank == 0 { &parts } else { &[] }, &mut tensor, 0)?;
    say("scatter", &tensor)?;

    let mut parts = vec![0.0f32; size];
    group.all_gather(&[rank as f32], &mut parts)?;
    say("all_gather", &parts)?;

    let mut tensor = [0.0f32];
    let parts: Vec<f32> = (0..size).map(|part| (part + rank) as f32).collect();
    group.reduce_scatter(&parts, &mut tensor, ReduceOp::Max)?;
    say("reduce_scatter", &tensor)?;

    // Rank r sends r elements to rank 0, r + 1 to rank 1, …
    let counts: Vec<usize> = (0..size).map(|to| rank + to).collect();
    let parts = vec![rank as f32; counts.iter().sum()];
    say("all_to_all", &group.all_to_all_v(&parts, &counts)?.data)?;

    group.barrier()?;
    Ok(())
}
