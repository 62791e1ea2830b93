//! Hello, collective: each rank gives its number plus one, and all get the sum.

use harmonaize_client::{AttachOptions, Client, Dtype, Error, Place, ReduceOp};
use std::time::Duration;

/// How long the other ranks may take.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result<(), Error> {
    let client = Client::from_env(AttachOptions::default())?; // the agent's socket: HARMONAIZE_SOCKET
    let Place { rank, ranks } = Place::from_env()?; // as torchrun or another launcher sets it
    let job = client.join("hello", rank, ranks, PATIENCE)?;
    let tensor = client.tensor(Dtype::F32, 1024)?;
    tensor.write(0, &[rank.0 as f32 + 1.0; 1024])?;
    let receipt = job.all_reduce_in_place(&tensor, ReduceOp::Sum)?.wait(PATIENCE)?;
    let mut sum = [0.0_f32];
    tensor.read(0, &mut sum)?;
    println!("rank {rank} of {ranks}: the sum is {}, {} bytes were sent", sum[0], receipt.wire_bytes);
    Ok(())
}
