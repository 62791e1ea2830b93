//! Whole agents with telemetry in a network namespace: their own flows by owner, their operations exactly, control's view.

use crate::shown::connect;
use crate::whole::{Agent, LIMIT, control};
use crate::{block, wait};
use harmonaize_agent::config::Telemetry;
use harmonaize_api::v1;
use harmonaize_api::v1::provider_client::ProviderClient;
use harmonaize_api::v1::telemetry_client::TelemetryClient;
use harmonaize_client::{AttachOptions, Client, Communicator, Dtype, Rank, ReduceOp, Tensor};
use harmonaize_testkit::fabric::Fabric;
use harmonaize_testkit::namespace::Namespace;
use harmonaize_testkit::strict::can_make_namespaces;
use harmonaize_testkit::topology::{Topology, star};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use std::net::SocketAddr;
use std::path::Path;
use tonic::transport::Channel;

/// A namespace with nothing but loopback, removed with the fabric; none, loudly, without the privilege.
pub(crate) fn namespaces<const N: usize>(labels: [&str; N]) -> Option<([Namespace; N], Fabric)> {
    if !can_make_namespaces() {
        return None;
    }
    let fabric = Fabric::build(&Topology::parse(&star(2, "1Gbit/s")).unwrap()).unwrap();
    Some((labels.map(|label| fabric.isolated(label).unwrap()), fabric))
}

struct Job {
    communicator: Communicator,
    tensors: [Tensor; 2],
}

impl Job {
    fn join(socket: &Path, rank: u32, elements: u64) -> Self {
        let client = Client::attach(socket, AttachOptions::default()).unwrap();
        let tensors = [(); 2].map(|()| client.tensor(Dtype::F32, elements).unwrap());
        let communicator = client.join("job", Rank(rank), 2, LIMIT).unwrap();
        Self { communicator, tensors }
    }

    fn reduce(&self) {
        let [input, output] = &self.tensors;
        self.communicator.all_reduce(input, output, ReduceOp::Sum).unwrap().wait(LIMIT).unwrap();
    }
}

const OPERATIONS: u64 = 12;
const ELEMENTS: u64 = 300_000;

#[test]
fn own_flows_have_owners_and_operations_are_exact() {
    let Some(([near], _fabric)) = namespaces(["own"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (address, _control, _agents) = near
        .enter(|| {
            let (address, control) = control();
            let agents = [0, 1].map(|host| {
                let mut agent = Agent::new(["h0", "h1"][host], address, &path(&format!("a{host}")));
                agent.config.telemetry =
                    Some(Telemetry { socket: Some(path(&format!("t{host}"))), ..Telemetry::default() });
                agent.start()
            });
            (address, control, agents)
        })
        .unwrap();
    let jobs = std::thread::scope(|scope| {
        let jobs = [0, 1].map(|rank| {
            let socket = path(&format!("a{rank}"));
            scope.spawn(move || {
                let job = Job::join(&socket, rank, ELEMENTS);
                (0..OPERATIONS).for_each(|_| job.reduce());
                job
            })
        });
        jobs.map(|job| job.join().unwrap())
    });
    for host in 0..2 {
        block(agent_saw(&path(&format!("t{host}")), host));
    }
    near.enter(|| block(serve_control(address))).unwrap();
    drop(jobs);
    wait("owners end with the communicator", || {
        block(async {
            let mut client = connect(&path("t0")).await;
            let mut snapshots = client.watch(v1::WatchRequest::default()).await.unwrap().into_inner();
            let snapshot = snapshots.message().await.unwrap().unwrap();
            snapshot.communicators.is_empty() && snapshot.flows.iter().all(|flow| flow.owner.is_none())
        })
    });
}

async fn agent_saw(socket: &Path, host: u32) {
    let mut client = connect(socket).await;
    let mut findings = client.phases(v1::PhasesRequest { last: 0, follow: true }).await.unwrap().into_inner();
    let mut operations = Vec::new();
    while operations.len() < OPERATIONS as usize {
        let finding = tokio::time::timeout(LIMIT, findings.message()).await.unwrap().unwrap().unwrap();
        if let Some(v1::finding::Finding::Operation(operation)) = finding.finding {
            operations.push(operation);
        }
    }
    let mut sent = 0;
    for (number, operation) in operations.iter().enumerate() {
        assert_eq!((operation.operation, operation.participant), (number as u64, host), "{operation:?}");
        assert!(operation.complete && operation.segments > 0, "{operation:?}");
        let [rank] = &operation.ranks[..] else { panic!("{operation:?}") };
        assert_eq!((rank.rank, rank.failed, operation.bytes), (host, false, ELEMENTS * 4));
        assert!(rank.called_ns > 1_700_000_000_000_000_000 && rank.called_ns < rank.ended_ns, "{rank:?}");
        let [edge] = &operation.edges[..] else { panic!("{operation:?}") };
        // Half of the tensor is reduced there and half here; each half crosses once each way.
        assert_eq!((edge.peer, edge.sent_bytes, edge.received_bytes), (1 - host, ELEMENTS * 4, ELEMENTS * 4));
        assert!(rank.called_ns <= edge.first_sent_ns && edge.first_sent_ns <= edge.last_sent_ns);
        sent += edge.sent_bytes;
    }
    // A reading of flows may be some milliseconds old.
    let deadline = std::time::Instant::now() + LIMIT;
    let own = loop {
        let own = own_flows(&mut client).await;
        let left: u64 = own.iter().map(|flow| flow.egress.as_ref().unwrap().bytes).sum();
        if left > sent {
            break own;
        }
        assert!(std::time::Instant::now() < deadline, "{left} bytes left on the wire, {sent} of tensors");
    };
    // Over loopback each connection is seen from both ends; each agent owns its end of the two paths.
    assert_eq!(own.len(), 2, "{own:?}");
    for flow in &own {
        let owner = flow.owner.as_ref().unwrap();
        assert_eq!((owner.tenant.as_str(), owner.communicator), ("a", operations[0].communicator));
        assert_eq!((owner.participant, owner.peer, owner.epoch), (host, 1 - host, 1));
        assert_eq!(flow.interface, "lo");
    }
    let mut snapshots = client.watch(v1::WatchRequest::default()).await.unwrap().into_inner();
    let snapshot = snapshots.message().await.unwrap().unwrap();
    let [traffic] = &snapshot.communicators[..] else { panic!("{snapshot:?}") };
    assert_eq!((traffic.tenant.as_str(), traffic.name.as_str(), &traffic.ranks), ("a", "job", &vec![host]));
    assert_eq!((traffic.operations, traffic.failed, traffic.epoch), (OPERATIONS, 0, 1));
    assert!(traffic.last_operation_ns > 0 && traffic.median_operation_ns > 0);
    let losses = snapshot.losses.unwrap();
    assert_eq!((losses.marks, losses.events, losses.untracked), (0, 0, 0));
}

async fn own_flows(client: &mut TelemetryClient<Channel>) -> Vec<v1::Flow> {
    let mut parts = client.flows(v1::FlowsRequest::default()).await.unwrap().into_inner();
    let mut own = Vec::new();
    while let Some(part) = parts.message().await.unwrap() {
        own.extend(part.flows.into_iter().filter(|flow| flow.owner.is_some()));
    }
    own
}

/// Control has reports of both, refused none, and knows the operations.
async fn serve_control(address: SocketAddr) {
    let mut client = ProviderClient::connect(format!("http://{address}")).await.unwrap();
    let request = v1::WatchTelemetryRequest { interval_ns: 100_000_000 };
    let mut snapshots = client.watch_telemetry(request).await.unwrap().into_inner();
    loop {
        let next =
            tokio::time::timeout(LIMIT, snapshots.message()).await.expect("control hears of operations");
        let snapshot = next.unwrap().unwrap();
        for host in &snapshot.hosts {
            assert_eq!((host.refused, host.dropped, host.refusal.as_str()), (0, 0, ""), "{host:?}");
        }
        let links =
            snapshot.hosts.iter().all(|host| host.links.len() == 1 && host.links[0].interface == "lo");
        let known =
            snapshot.communicators.iter().any(|one| one.operations == OPERATIONS && one.name == "job");
        if links && known && snapshot.hosts.len() == 2 {
            return;
        }
    }
}

/// Without the capabilities the agent says so, and its collectives run.
#[test]
fn collectives_run_without_the_privilege_to_measure() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (address, _control) = control();
    let begun = std::thread::scope(|scope| {
        let unprivileged = scope.spawn(|| {
            // Of this thread, and of those that it starts.
            let mut sets = capabilities(None).unwrap();
            let needed = CapabilitySet::BPF | CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN;
            sets.effective.remove(needed);
            set_capabilities(None, sets).unwrap();
            [0, 1].map(|host| {
                let mut agent = Agent::new(["h0", "h1"][host], address, &path(&format!("a{host}")));
                agent.config.telemetry =
                    Some(Telemetry { socket: Some(path(&format!("t{host}"))), ..Telemetry::default() });
                agent.start()
            })
        });
        unprivileged.join().unwrap()
    });
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let socket = path(&format!("a{rank}"));
            scope.spawn(move || Job::join(&socket, rank, 1000).reduce());
        }
    });
    assert!(!path("t0").exists() && !path("t1").exists(), "there is nothing to show");
    drop(begun);
}
