//! An attachment over RDMA whose agent has a successor, from the process's side and from both agents'.

use crate::stub::{AGENT_DEVICE, LIMIT, TENANT_DEVICE, over_tcp, rules};
use harmonaize_abi::{ABI_VERSION, CommunicatorHandle, Completion, Submission};
use harmonaize_agent::counters::Counters;
use harmonaize_agent::session::{
    Freeze, FrozenSession, Joined, RdmaRules, SessionRequest, SessionServer, TenantRules,
};
use harmonaize_client::{Access, AttachOptions, Client, Dtype, Error, Rank, RdmaOptions, ReduceOp};
use harmonaize_shm::AgentEnd;
use harmonaize_verbs::fake::{Fabric, Fault};
use harmonaize_verbs::{Call, PortOptions};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// The successor's device.
const SUCCESSOR_DEVICE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 3);

/// An agent whose engine is this test.
struct Agent {
    server: SessionServer,
    inbox: mpsc::Receiver<SessionRequest>,
    standing: mpsc::UnboundedReceiver<FrozenSession>,
    end: Option<Box<dyn AgentEnd>>,
    /// Descriptors taken whose operations have not been completed.
    taken: Vec<Submission>,
}

impl Agent {
    fn start(
        fabric: &Fabric,
        address: Ipv4Addr,
        tenants: &[TenantRules],
        sockets: Option<BTreeMap<PathBuf, OwnedFd>>,
    ) -> Self {
        let rdma = RdmaRules {
            devices: fabric.devices(),
            port: PortOptions::default(),
            address: address.into(),
            listen: Some("127.0.0.1:0".parse().unwrap()),
            handshake: Duration::from_secs(5),
        };
        let (requests, inbox) = mpsc::channel(64);
        let (freeze, standing) = Freeze::new(sockets.is_some());
        let sockets = sockets.unwrap_or_default();
        let mut server =
            SessionServer::bind_frozen(Some(rdma), requests, Counters::default(), freeze, sockets).unwrap();
        server.apply(tenants).unwrap();
        Self { server, inbox, standing, end: None, taken: Vec::new() }
    }

    /// Takes requests and descriptors until something is so.
    async fn serve_until(&mut self, mut so: impl FnMut(&mut Self) -> bool) {
        let begun = Instant::now();
        while !so(self) {
            assert!(begun.elapsed() < LIMIT, "nothing comes: {self:?}");
            match self.inbox.try_recv() {
                Ok(SessionRequest::Attached { end, .. }) => self.end = Some(end),
                Ok(SessionRequest::Join { name, rank, ranks, reply, .. }) => {
                    let (communicator, before) = (CommunicatorHandle(7), Vec::new());
                    reply.send(Ok(Joined { communicator, name, rank, ranks, before })).unwrap();
                }
                Ok(SessionRequest::Leave { .. }) => {}
                Ok(SessionRequest::Detached { .. }) => self.end = None,
                Ok(other) => panic!("{other:?}"),
                Err(_) => {}
            }
            if let Some(end) = &mut self.end {
                let served = end.progress(&mut |_| panic!("no transfer")).and_then(|_| end.submission());
                match served {
                    Ok(more) => self.taken.extend(more),
                    Err(error) => {
                        println!("the end is over: {error}");
                        self.end = None;
                    }
                }
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Completes the oldest operation.
    fn complete(&mut self) {
        let Submission { communicator, cookie, .. } = self.taken.remove(0);
        let done = Completion { version: ABI_VERSION, communicator, cookie, ..Completion::default() };
        let end = self.end.as_mut().unwrap();
        end.complete(&done).unwrap();
        end.flush().unwrap();
    }

    /// Its sessions come to rest: the one that there is.
    async fn stands(&mut self) -> FrozenSession {
        self.server.freeze(true);
        tokio::time::timeout(LIMIT, self.standing.recv()).await.unwrap().unwrap()
    }
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "an agent with {:?}, which has taken {:?}", self.end, self.taken)
    }
}

/// A process that has two operations in flight at a time, of six, which end in their order.
fn tenant(at: std::net::SocketAddr, fabric: &Fabric, ended: &AtomicU64) -> Result<(), Error> {
    let device = Some("tenant".to_owned());
    let rdma = RdmaOptions { device, devices: fabric.devices(), ..RdmaOptions::default() };
    let options = AttachOptions { access: Access::Rdma, arena_bytes: 1 << 20, rdma, ..Default::default() };
    let client = Client::attach(over_tcp(at), options)?;
    let communicator = client.join("job", Rank(0), 1, LIMIT)?;
    let tensors = [0; 2].map(|_| client.tensor(Dtype::U64, 10).unwrap());
    let start = |number: usize| communicator.all_reduce_in_place(&tensors[number % 2], ReduceOp::Sum);
    let mut under_way = [Some(start(0)?), Some(start(1)?)];
    for number in 0..6 {
        under_way[number % 2].take().unwrap().wait(LIMIT)?;
        ended.fetch_add(1, Ordering::Relaxed);
        if number < 4 {
            under_way[number % 2] = Some(start(number)?);
        }
    }
    Ok(())
}

fn fabric() -> Fabric {
    let fabric = Fabric::new();
    for (name, address) in
        [("agent", AGENT_DEVICE), ("tenant", TENANT_DEVICE), ("successor", SUCCESSOR_DEVICE)]
    {
        fabric.add(name, address).unwrap();
    }
    fabric
}

/// Operations that the agent has taken, and those that it has not, end with its successor. Its queue pair is gone before the process hears
/// of another.
#[test]
fn an_attachment_over_rdma_goes_on_with_a_successor() {
    let (fabric, ended) = (fabric(), AtomicU64::new(0));
    let folder = tempfile::tempdir().unwrap();
    let tenants = [rules(folder.path().join("acme.sock"))];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    std::thread::scope(|scope| {
        let (fabric, ended) = (&fabric, &ended);
        runtime.block_on(async {
            let mut agent = Agent::start(fabric, AGENT_DEVICE, &tenants, None);
            let at = agent.server.network_address().unwrap();
            let process = scope.spawn(move || tenant(at, fabric, ended));
            agent.serve_until(|agent| agent.taken.len() == 2).await;
            assert_eq!(agent.server.bound(), 0, "the process has said that it can come to a successor");
            agent.complete();
            agent.serve_until(|agent| agent.taken.len() == 2).await;

            let session = agent.stands().await;
            agent.server.freeze(false);
            agent.complete();
            agent.serve_until(|agent| agent.taken.len() == 2).await;
            drop(session);

            let session = agent.stands().await;
            let sockets = agent.server.listeners().unwrap().into_iter().collect();
            let mut successor = Agent::start(fabric, SUCCESSOR_DEVICE, &tenants, Some(sockets));
            assert_eq!(successor.server.network_address(), Some(at), "it is the same socket");
            let mut inherited = successor.server.inherit(vec![session]).await.unwrap().remove(0);
            let calls = fabric.take_calls("successor");
            let mut made = calls.iter().filter(|made| made.call == Call::CreateQueuePair).peekable();
            assert!(made.peek().is_some(), "{calls:?}");
            let own = std::thread::current().id();
            assert!(made.all(|made| made.thread != own), "queue pairs are made one after the other");
            let awaited = [&agent, &successor].map(|agent| agent.server.awaited());
            assert_eq!(awaited, [0, 1], "the process has not come to the successor");
            let theirs = agent.end.as_ref().unwrap().hand_over().unwrap();
            successor.end = Some(inherited.end.take().unwrap()(theirs).unwrap());
            successor.taken = std::mem::take(&mut agent.taken);
            // One more is completed before the process has come.
            successor.complete();
            fabric.inject("agent", Fault::DeviceLost);
            // The end of the process before, which ends nothing of what it had.
            std::mem::forget(agent.end.take());
            drop(agent);
            successor.end.as_ref().unwrap().own();
            successor.server.resume(inherited);
            successor.server.freeze(false);
            for _ in 0..3 {
                successor.serve_until(|agent| !agent.taken.is_empty()).await;
                successor.complete();
            }
            successor.serve_until(|agent| agent.server.awaited() == 0).await;
            successor.serve_until(|agent| agent.end.is_none()).await;
            process.join().unwrap().unwrap();
            assert_eq!(ended.load(Ordering::Relaxed), 6);
        });
    });
}
