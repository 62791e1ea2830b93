//! Agents whose links or tenants go over RDMA have successors while operations are in flight, and none fails.

use crate::flaps::{End, Ends, Job, job};
use crate::host::{Host, PATIENCE, until};
use crate::provider::{ARENA, HOSTS, Provider, program, tenants};
use crate::{alone, ranks};
use anyhow::{Result, ensure};
use harmonaize_client::{Access, AgentAddress, AttachOptions, Client, ReduceOp};
use harmonaize_tests::job::{Worker, at_all, options, succeeded};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Packets that a device sends for some operations, and for nothing else.
const SOME: u64 = 200;

/// The agents of all hosts in turn. Before the next, links go over RDMA again.
#[test]
fn agents_with_links_over_rdma_are_upgraded_in_turn_under_load() {
    let _alone = alone();
    let Some(provider) = Provider::start_with(|_| String::new(), |_| program("harmonaize-agent")) else {
        return;
    };
    let mut successors = Vec::new();
    let ends = job(&provider, "upgraded", |job| {
        for host in 0..HOSTS {
            successors.push(provider.upgrade(host));
            job.wait_for_progress();
            let device = Host(host as u32);
            let before = device.counter("sent_pkts");
            until("its links do not go over RDMA again", || device.counter("sent_pkts") > before + SOME);
            job.wait_for_progress();
        }
    });
    assert_eq!(ends, [End::Right; HOSTS]);
    succeeded(ranks(&provider.sockets(), "after", |worker| worker.sum(3, 20_000, true, PATIENCE)));
}

/// A rank on each host is attached over RDMA, one of them over TCP, and comes to the successor of its agent by itself.
#[test]
fn agents_with_tenants_attached_over_rdma_are_upgraded_in_turn_under_load() {
    let _alone = alone();
    let Some(provider) = Provider::start() else { return };
    let (job, secret) = (Job::default(), provider.secret());
    let rank = |rank: usize| -> Result<End> {
        let at = match rank {
            0 => AgentAddress::tcp(tenants(0), "a", &secret)?,
            _ => provider.socket(rank).into(),
        };
        let client = Client::attach(at, AttachOptions { timeout: PATIENCE, ..options(Access::Rdma, ARENA) })?;
        let worker = Worker::of(client, "attached", rank as u32, HOSTS as u32, PATIENCE)?;
        let ended = job.work(&worker);
        job.end();
        ended
    };
    let mut successors = Vec::new();
    let ends = std::thread::scope(|scope| {
        let ranks = scope.spawn(|| at_all(0..HOSTS, rank));
        let ends = Ends(&job);
        job.wait_for_progress();
        for host in 0..HOSTS {
            successors.push(provider.upgrade(host));
            job.wait_for_progress();
        }
        // One has a successor of its own.
        successors.push(provider.upgrade(0));
        job.wait_for_progress();
        drop(ends);
        succeeded(ranks.join().unwrap())
    });
    assert_eq!(ends, [End::Right; HOSTS]);
}

/// A process computes while its agent has two successors, and the others' operations wait for its memory. No upgrade waits for it. Links
/// go over TCP: others would have to come to that first, for which the operation must end.
#[test]
fn an_agent_is_upgraded_twice_while_a_tenant_over_rdma_computes() {
    const COUNT: usize = 100_000;
    let _alone = alone();
    let Some(provider) = Provider::start_with_links_over_tcp() else { return };
    let (calls, called) = channel();
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..HOSTS).map(|_| channel()).unzip();
    let rank = |(rank, go): (usize, Receiver<()>)| -> Result<()> {
        let options = AttachOptions { timeout: PATIENCE, ..options(Access::Rdma, ARENA) };
        let client = Client::attach(provider.socket(rank), options)?;
        let worker = Worker::of(client, "computes", rank as u32, HOSTS as u32, PATIENCE)?;
        let inputs: Vec<_> = (0..HOSTS as u32).map(|rank| Worker::input(rank, 1, COUNT)).collect();
        let tensor = worker.tensor(&inputs[rank])?;
        if rank > 0 {
            go.recv_timeout(4 * PATIENCE)?;
        }
        let mut sum = worker.communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?;
        calls.send(rank)?;
        if rank == 0 {
            go.recv_timeout(8 * PATIENCE)?;
        }
        sum.wait(4 * PATIENCE)?;
        let expected = |at: usize| inputs.iter().fold(0_u64, |sum, input| sum.wrapping_add(input[at]));
        let right = worker.contents(&tensor)?.into_iter().enumerate().all(|(at, sum)| sum == expected(at));
        ensure!(right, "rank {rank}: wrong sum");
        Ok(())
    };
    std::thread::scope(|scope| {
        let ranks = scope.spawn(|| at_all((0..HOSTS).zip(receivers), rank));
        assert_eq!(called.recv_timeout(4 * PATIENCE).unwrap(), 0);
        let mut successors = vec![provider.upgrade(0)];
        senders[1..].iter().for_each(|go| go.send(()).unwrap());
        (1..HOSTS).for_each(|_| assert!(called.recv_timeout(PATIENCE).unwrap() > 0));
        // Parts of the sum come to the first successor meanwhile, and cannot be stored.
        std::thread::sleep(Duration::from_millis(500));
        successors.push(provider.upgrade(0));
        senders[0].send(()).unwrap();
        succeeded(ranks.join().unwrap());
    });
}
