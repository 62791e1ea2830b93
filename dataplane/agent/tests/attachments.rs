//! Ranks that attach in every way run every collective together: two whole agents with control in one process, RDMA on a fake
//! fabric.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod whole;

use harmonaize_agent::config::Verbs;
use harmonaize_client::{
    Access, AgentAddress, AttachOptions, Client, Communicator, Dtype, Operation, Rank, RdmaOptions, ReduceOp,
    Secret, Tensor,
};
use harmonaize_verbs::fake::Fabric;
use std::net::{Ipv4Addr, SocketAddr};
use whole::{Agent, LIMIT, control};

const RANKS: u32 = 6;

struct Worker {
    client: Client,
    job: Communicator,
    rank: u32,
}

fn wait(operation: Result<Operation, harmonaize_client::Error>) {
    operation.unwrap().wait(LIMIT).unwrap();
}

fn input(rank: u32, count: usize) -> Vec<u64> {
    (0..count as u64).map(|i| (u64::from(rank) << 40 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

impl Worker {
    fn tensor(&self, values: &[u64]) -> Tensor {
        let tensor = self.client.tensor(Dtype::U64, values.len() as u64).unwrap();
        tensor.write(0, values).unwrap();
        tensor
    }

    fn contents(tensor: &Tensor) -> Vec<u64> {
        let mut values = vec![0; tensor.elements() as usize];
        tensor.read(0, &mut values).unwrap();
        values
    }

    fn everything(&self) {
        for count in [1, 100, 6_000, 300_000] {
            let mine = self.tensor(&input(self.rank, count));
            let output = self.tensor(&vec![0; count]);
            let mut sum = vec![0_u64; count];
            for rank in 0..RANKS {
                sum.iter_mut()
                    .zip(input(rank, count))
                    .for_each(|(sum, value)| *sum = sum.wrapping_add(value));
            }
            wait(self.job.all_reduce(&mine, &output, ReduceOp::Sum));
            assert!(Self::contents(&output) == sum, "rank {}: sum of {count}", self.rank);
            wait(self.job.all_reduce_in_place(&mine, ReduceOp::Sum));
            assert!(Self::contents(&mine) == sum, "rank {}: sum of {count} in place", self.rank);

            let ranks = RANKS as usize;
            let mine = self.tensor(&input(self.rank, count * ranks));
            let output = self.tensor(&vec![0; count * ranks]);
            let block = self.rank as usize * count..(self.rank as usize + 1) * count;
            let expected: Vec<u64> =
                (0..RANKS).flat_map(|from| input(from, count * ranks)[block.clone()].to_vec()).collect();
            wait(self.job.all_to_all(&mine, &output));
            assert!(Self::contents(&output) == expected, "rank {}: exchange of {count}", self.rank);

            for root in 0..RANKS {
                let tensor = self.tensor(&input(self.rank, count));
                wait(self.job.broadcast(&tensor, Rank(root)));
                assert!(Self::contents(&tensor) == input(root, count), "rank {}: broadcast", self.rank);
            }
            wait(self.job.barrier());
        }
    }
}

/// A port that is free now, of an address that nothing else uses.
fn free(test: u8, host: u8) -> SocketAddr {
    std::net::TcpListener::bind((Ipv4Addr::new(127, 77, test, host), 0)).unwrap().local_addr().unwrap()
}

fn all_ways(test: u8, links: impl Fn(usize) -> Option<Verbs>) {
    let folder = tempfile::tempdir().unwrap();
    let (address, _control) = control();
    let fabric = Fabric::new();
    for (number, name) in ["agent0", "agent1", "host0", "host1"].into_iter().enumerate() {
        fabric.add(name, Ipv4Addr::new(10, 9, 0, number as u8 + 1)).unwrap();
    }
    let secret = Secret::new(&[b's'; 40]).unwrap();
    let (sockets, listen) =
        (["h0", "h1"].map(|host| folder.path().join(host)), [free(test, 1), free(test, 2)]);
    let _agents = [0, 1].map(|host| {
        let mut agent = Agent::new(["h0", "h1"][host], address, &sockets[host]).with_rdma(
            fabric.devices(),
            ["agent0", "agent1"][host],
            listen[host],
            secret.clone(),
        );
        agent.config.verbs = links(host);
        agent.start()
    });
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let (sockets, fabric, secret) = (&sockets, &fabric, &secret);
            scope.spawn(move || {
                let host = (rank % 2) as usize;
                let (access, tcp) = [
                    (Access::Rdma, true),
                    (Access::Rdma, false),
                    (Access::Mapped, false),
                    (Access::Rdma, true),
                    (Access::Remote, false),
                    (Access::Mapped, false),
                ][rank as usize];
                let at = match tcp {
                    false => AgentAddress::from(&sockets[host]),
                    true => {
                        let address = listen[host];
                        AgentAddress::Tcp { address, tenant: "a".into(), secret: secret.clone() }
                    }
                };
                let device = Some(["host0", "host1"][host].to_owned());
                let rdma = RdmaOptions { device, devices: fabric.devices(), ..RdmaOptions::default() };
                let client =
                    Client::attach(at, AttachOptions { access, rdma, ..Default::default() }).unwrap();
                let job = client.join("job", Rank(rank), RANKS, LIMIT).unwrap();
                Worker { client, job, rank }.everything();
            });
        }
    });
}

#[test]
fn ranks_attached_in_all_ways_work_together() {
    all_ways(1, |_| None);
}

#[test]
fn the_same_with_links_over_rdma() {
    all_ways(2, |host| {
        let devices = vec![["agent0", "agent1"][host].to_owned()];
        Some(Verbs { devices, ..Verbs::default() })
    });
}
