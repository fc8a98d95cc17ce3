//! Point-to-point messages that do not block, from PyTorch's tutorial "Writing Distributed Applications with PyTorch":
//! `trainer launch --cpus 2 -- target/release/examples/p2p_nonblocking`.

mod tutorial;

fn main() -> tutorial::Result {
    let group = tutorial::join()?;
    let mut tensor = vec![0.0f32];
    match group.rank() {
        0 => {
            tensor[0] += 1.0;
            // Send the tensor to rank 1
            let request = group.isend(tensor, 1, 0);
            tutorial::print(format_args!("Rank 0 started sending"))?;
            tensor = request.wait()?;
        }
        1 => {
            // Receive the tensor from rank 0
            let request = group.irecv(tensor, 0, 0);
            tutorial::print(format_args!("Rank 1 started receiving"))?;
            tensor = request.wait()?;
        }
        _ => {}
    }
    tutorial::print(format_args!("Rank {} has data {:?}", group.rank(), tensor[0]))
}
