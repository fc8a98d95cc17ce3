//! Blocking point-to-point messages, from PyTorch's tutorial "Writing Distributed Applications with PyTorch":
//! `trainer launch --cpus 2 -- target/release/examples/p2p_blocking`.

mod tutorial;

fn main() -> tutorial::Result {
    let group = tutorial::join()?;
    let mut tensor = [0.0f32];
    match group.rank() {
        0 => {
            tensor[0] += 1.0;
            // Send the tensor to rank 1
            group.send(&tensor, 1, 0)?;
        }
        // Receive the tensor from rank 0
        1 => group.recv(&mut tensor, 0, 0)?,
        _ => {}
    }
    tutorial::print(format_args!("Rank {} has data {:?}", group.rank(), tensor[0]))
}
