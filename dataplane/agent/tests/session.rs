//! Tenants' processes and the agent's socket, with a stub for the engine.

#[cfg(test)]
mod stub;

use harmonaize_client::{Access, AttachOptions, Client, Dtype, Rank, ReduceOp};
use stub::{LIMIT, Stub};

fn options(access: Access) -> AttachOptions {
    AttachOptions { access, arena_bytes: 1 << 20, ..Default::default() }
}

#[test]
fn an_operation_makes_the_round_trip() {
    for access in [Access::Mapped, Access::Remote] {
        let stub = Stub::start();
        let client = Client::attach(&stub.path, options(access)).unwrap();
        let (input, output) =
            (client.tensor(Dtype::F32, 1000).unwrap(), client.tensor(Dtype::F32, 1000).unwrap());
        let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        input.write(0, &values).unwrap();
        output.write(0, &[0f32; 1000]).unwrap();
        let comm = client.join("job", Rank(0), 1, LIMIT).unwrap();
        for number in 0..100 {
            let mut operation = comm.all_reduce(&input, &output, ReduceOp::Sum).unwrap();
            assert_eq!(operation.wait(LIMIT).unwrap().operation, number);
        }
        let mut seen = vec![0f32; 1000];
        output.read(0, &mut seen).unwrap();
        assert_eq!(seen, values);
        drop(comm);
        stub.knobs.expect("left 2");
        drop(client);
        stub.knobs.expect("detached");
    }
}
