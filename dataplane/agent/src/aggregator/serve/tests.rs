//! The server's own loop with workers over real sockets, all in one thread.

use super::*;
use harmonaize_abi::{Dtype, ReduceOp, SegmentIndex};
use harmonaize_aggregator::packet::HEADER_BYTES;
use harmonaize_aggregator::{
    Codes, Event, Grant, Key, Parent, PayloadFormat, Pool, Share, Task, Tensors, Worker, WorkerConfig,
};
use harmonaize_transport::datagram::{DatagramConfig, Datagrams, RdmaDatagrams, RdmaPort};
use harmonaize_verbs::PortOptions;
use harmonaize_verbs::fake::Fabric;
use std::net::Ipv4Addr;

const WORKERS: u16 = 4;
const ELEMENTS: u32 = 256;
const UNIT: usize = 4 * ELEMENTS as usize;
const FORM: PayloadFormat = PayloadFormat::Tensor { dtype: Dtype::I32, op: ReduceOp::Sum };

fn told(communicator: u64, tenant: &str, secret: u8) -> TenantGrant {
    let grant = Grant {
        communicator: GrantId(communicator),
        secret: [secret; 32],
        workers: WORKERS,
        format: FORM,
        elements: ELEMENTS,
        ordered: false,
        share: Share { tenant: 0, weight: 1, guaranteed: 8, most: 32 },
        parent: None,
    };
    TenantGrant { grant, parent: None, tenant: tenant.to_owned() }
}

const CONFIG: DatagramConfig =
    DatagramConfig { bytes: HEADER_BYTES + UNIT, batch: 64, gso_segments: 16, socket_buffer: 4 << 20 };

fn local() -> Endpoint {
    Endpoint::Udp(Box::new(Datagrams::bind(([127, 0, 0, 1], 0).into(), CONFIG).unwrap()))
}

/// On a device of the fabric, by its number.
fn on(fabric: &Fabric, host: u8) -> Endpoint {
    let address = Ipv4Addr::new(10, 0, 0, host).into();
    let port = RdmaPort { devices: fabric.devices(), options: PortOptions::default(), address };
    Endpoint::Rdma(Box::new(RdmaDatagrams::open(&port, 17, CONFIG).unwrap()))
}

fn server(incarnation: u64) -> Server {
    server_on(incarnation, None)
}

fn server_on(incarnation: u64, rdma: Option<Endpoint>) -> Server {
    let endpoints = Endpoints { udp: local(), rdma };
    Server::new(endpoints, Aggregator::new(incarnation, Pool::new(64, UNIT)), Duration::ZERO)
}

/// Element `i` of worker `w`'s part is `i + w`.
struct Ramp {
    worker: i32,
    written: u64,
}

impl Tensors for Ramp {
    fn read(&self, _: SegmentIndex, offset: u64, _: usize, bytes: &mut [u8]) {
        for (to, value) in bytes.chunks_exact_mut(4).zip(offset as i32..) {
            to.copy_from_slice(&(value + self.worker).to_le_bytes());
        }
    }
    fn write(&mut self, _: SegmentIndex, offset: u64, elements: usize, bytes: &[u8]) {
        let others: i32 = (0..i32::from(WORKERS)).sum();
        for (sum, value) in bytes.chunks_exact(4).zip(offset as i32..) {
            assert_eq!(sum, (i32::from(WORKERS) * value + others).to_le_bytes());
        }
        self.written += elements as u64;
    }
}

struct Host {
    worker: Worker,
    socket: Endpoint,
    ramp: Ramp,
}

fn host(communicator: u64, worker: u16, secret: u8) -> Host {
    let communicator = GrantId(communicator);
    let config = WorkerConfig {
        communicator,
        worker,
        key: Key::derive(&[secret; 32], communicator, worker),
        format: FORM,
        elements: ELEMENTS,
        window: 16,
        segments: 4,
        codes: Codes::default(),
        hosts: WORKERS,
        timeout: Duration::from_secs(60),
        min_retry: Duration::from_millis(1),
        max_retry: Duration::from_millis(50),
        max_loss_permille: 1000,
    };
    Host { worker: Worker::new(config), socket: local(), ramp: Ramp { worker: worker.into(), written: 0 } }
}

/// One round of everything; whether all workers have done what was submitted, or the reason why one has left.
fn round(server: &mut Server, hosts: &mut [Host], now: Duration) -> (usize, Option<Event>) {
    let (mut done, mut ended) = (0, None);
    for Host { worker, socket, ramp } in hosts.iter_mut() {
        let to = server.endpoints.to(socket.local_address()).unwrap().local_address();
        while socket.push(|room| Some((to, worker.poll_transmit(now, ramp, room)?))) {}
        socket.flush();
        socket.receive(&mut |from, packet| {
            assert_eq!(from, to);
            worker.receive(now, packet, ramp);
        });
        while let Some(event) = worker.poll_event() {
            match event {
                Event::Done { .. } => done += 1,
                other => ended = Some(other),
            }
        }
    }
    server.progress();
    (done, ended)
}

/// Workers of the first communicator that have got a sum, and since when.
fn served(server: &mut Server) -> (Vec<Host>, Instant) {
    let mut hosts: Vec<Host> = (0..WORKERS).map(|worker| host(1, worker, 1)).collect();
    let begun = Instant::now();
    for host in &mut hosts {
        host.worker.begin(Duration::ZERO, 1);
        host.worker.submit(SegmentIndex(0), Task::Sum(1000));
    }
    let mut done = 0;
    while done < usize::from(WORKERS) {
        done += round(server, &mut hosts, begun.elapsed()).0;
    }
    (hosts, begun)
}

/// Segments, and elements of each, that [`summing`] hosts have begun.
const SEGMENTS: u64 = 3;
const EACH: u64 = 10_000;

/// A server, and a communicator's hosts that have all segments to sum.
fn summing() -> (Server, Vec<Host>) {
    let mut server = server(7);
    server.grant(told(1, "a", 1)).unwrap();
    let mut hosts: Vec<Host> = (0..WORKERS).map(|worker| host(1, worker, 1)).collect();
    for host in &mut hosts {
        host.worker.begin(Duration::ZERO, 1);
        assert!((0..SEGMENTS).all(|segment| host.worker.submit(SegmentIndex(segment), Task::Sum(EACH))));
    }
    (server, hosts)
}

#[test]
fn workers_get_their_sums_whatever_strangers_send() {
    let (mut server, mut hosts) = summing();
    let begun = Instant::now();
    // Another's key, another communicator, and no packet at all.
    let mut strangers = [host(1, 2, 9), host(5, 0, 1)];
    strangers.iter_mut().for_each(|stranger| stranger.worker.begin(Duration::ZERO, 1));
    let (mut noise, mut done) = (local(), 0);
    while done < SEGMENTS as usize * usize::from(WORKERS) {
        let to = server.endpoints.udp.local_address();
        noise.push(|room| {
            room.fill(b'x');
            Some((to, room.len()))
        });
        noise.flush();
        round(&mut server, &mut strangers, begun.elapsed());
        let (more, ended) = round(&mut server, &mut hosts, begun.elapsed());
        assert_eq!(ended, None);
        done += more;
    }
    assert!(hosts.iter().all(|host| host.ramp.written == SEGMENTS * EACH));
    let reading = server.read();
    let (communicators, counters) = reading.tenants["a"];
    assert_eq!((communicators, counters.sums), (1, SEGMENTS * EACH.div_ceil(u64::from(ELEMENTS))));
    assert!(counters.tag > 0, "a forged packet is counted: {counters:?}");
    assert!(reading.unrecognized.magic > 0 && reading.unrecognized.communicator > 0, "{reading:?}");
    assert!(strangers.iter().all(|stranger| stranger.worker.counters().sums == 0));
}

/// A host whose address changes within a session goes on with it. Somebody repeats what it has sent, and sends what it has not, from elsewhere:
/// no sum goes there.
#[test]
fn sums_follow_a_worker_to_its_new_address() {
    let (mut server, mut hosts) = summing();
    let begun = Instant::now();
    let to = server.endpoints.udp.local_address();
    let (mut spy, mut seen, mut done, mut moves) = (local(), Vec::<Vec<u8>>::new(), 0, 0);
    while done < SEGMENTS as usize * usize::from(WORKERS) {
        let now = begun.elapsed();
        let Host { worker, socket, ramp } = &mut hosts[2];
        // Another address is another port here.
        if ramp.written > (moves + 1) * 7000 {
            *socket = local();
            moves += 1;
        }
        let mut send = |room: &mut [u8]| {
            let bytes = worker.poll_transmit(now, ramp, room)?;
            seen.push(room[..bytes].to_vec());
            Some((to, bytes))
        };
        while socket.push(&mut send) {}
        socket.flush();
        let (more, ended) = round(&mut server, &mut hosts, now);
        assert_eq!(ended, None);
        done += more;
        // What the server has had by now: the latest, the first, and one with a greater sequence that nobody has sealed.
        let mut forged = seen.last().unwrap().clone();
        forged[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        for packet in [seen.last().unwrap(), &seen[0], &forged] {
            spy.push(|room| {
                room[..packet.len()].copy_from_slice(packet);
                Some((to, packet.len()))
            });
        }
        spy.flush();
        spy.receive(&mut |_, packet| panic!("this came to a spy: {packet:?}"));
    }
    assert!(moves > 2 && hosts.iter().all(|host| host.ramp.written == SEGMENTS * EACH), "{moves} moves");
    assert!(server.read().tenants["a"].1.tag > 0, "what was forged is counted");
}

/// A host and an aggregator below, which has there the number that one of its own workers has here.
#[test]
fn sums_go_to_the_parent_and_come_back() {
    let [mut above, mut below] = [server(7), server(8)];
    let mut told_above = told(1, "a", 1);
    told_above.grant.workers = 2;
    above.grant(told_above).unwrap();
    let mut told_below = told(1, "a", 2);
    let parent = Parent {
        worker: 1,
        key: Key::derive(&[1; 32], GrantId(1), 1),
        timeout: Duration::from_secs(60),
        retry_after: Duration::from_millis(2),
    };
    (told_below.grant.workers, told_below.grant.parent) = (WORKERS - 1, Some(parent));
    let Address::Udp(address) = above.endpoints.udp.local_address() else { panic!("not over UDP") };
    told_below.parent = Some(address);
    below.grant(told_below).unwrap();
    let places = (0..WORKERS).map(|index| if index == 0 { (0, 1) } else { (index - 1, 2) });
    let mut hosts: Vec<Host> = places
        .zip(0..)
        .map(|((worker, secret), index)| {
            let mut host = host(1, worker, secret);
            host.ramp.worker = index;
            host.worker.begin(Duration::ZERO, 1);
            assert!((0..3).all(|segment| host.worker.submit(SegmentIndex(segment), Task::Sum(5000))));
            host
        })
        .collect();
    let (begun, mut done) = (Instant::now(), 0);
    while done < 3 * usize::from(WORKERS) {
        let (direct, others) = hosts.split_at_mut(1);
        for (server, hosts) in [(&mut above, direct), (&mut below, others)] {
            let (more, ended) = round(server, hosts, begun.elapsed());
            assert_eq!(ended, None);
            done += more;
        }
    }
    assert!(hosts.iter().all(|host| host.ramp.written == 15_000));
    let [above, below] = [above, below].map(|server| server.read().tenants["a"].1);
    let sums = 3 * 5000_u64.div_ceil(u64::from(ELEMENTS));
    assert_eq!((above.sums, above.up, below.sums), (sums, 0, sums));
    assert!(below.up > sums && below.down > sums, "{below:?}");
}

#[test]
fn a_restart_tells_workers_their_session_is_lost() {
    let mut old = server(7);
    old.grant(told(1, "a", 1)).unwrap();
    let (mut hosts, begun) = served(&mut old);
    drop(old);
    let mut new = server(8);
    new.grant(told(1, "a", 1)).unwrap();
    hosts.iter_mut().for_each(|host| assert!(host.worker.submit(SegmentIndex(1), Task::Sum(1000))));
    let lost = Event::Ended(harmonaize_aggregator::Reason::Lost);
    while round(&mut new, &mut hosts, begun.elapsed()).1 != Some(lost) {}
}

#[test]
fn grants_are_answered_again_or_refused() {
    let mut server = server(7);
    server.grant(told(1, "a", 1)).unwrap();
    assert_eq!(server.grant(told(1, "a", 1)), Ok(()), "told again");
    let duplicate = server.grant(told(1, "b", 2));
    assert!(
        matches!(duplicate, Err(ServeError::Grant(GrantError::Pool(PoolError::Duplicate(_))))),
        "another's number: {duplicate:?}"
    );
    let mut large = told(2, "a", 1);
    large.grant.share = Share { guaranteed: 65, most: 65, ..large.grant.share };
    let large = server.grant(large);
    assert!(
        matches!(large, Err(ServeError::Grant(GrantError::Pool(PoolError::Promised { .. })))),
        "{large:?}"
    );
    server.grant(told(3, "b", 1)).unwrap();
    served(&mut server);
    let before = server.read();
    server.revoke(GrantId(1));
    server.revoke(GrantId(99));
    let after = server.read();
    assert_eq!((after.tenants["a"].0, after.tenants["b"].0), (0, 1));
    assert_eq!(after.tenants["a"].1.sums, before.tenants["a"].1.sums);
    assert_eq!(server.routes.find(Recipient::Worker { communicator: GrantId(1), worker: 0 }), None);
    server.grant(told(1, "c", 3)).unwrap();
    assert_eq!(server.read().tenants["c"].0, 1);
}

#[test]
fn workers_over_both_networks_get_the_same_sums() {
    let fabric = Fabric::new();
    for host in 0..3 {
        fabric.add(&format!("fake{host}"), Ipv4Addr::new(10, 0, 0, host)).unwrap();
    }
    let mut server = server_on(7, Some(on(&fabric, 0)));
    server.grant(told(1, "a", 1)).unwrap();
    let mut hosts: Vec<Host> = (0..WORKERS).map(|worker| host(1, worker, 1)).collect();
    hosts[1].socket = on(&fabric, 1);
    hosts[2].socket = on(&fabric, 2);
    let (begun, segments, elements) = (Instant::now(), 3, 10_000);
    for host in &mut hosts {
        host.worker.begin(Duration::ZERO, 1);
        assert!((0..segments).all(|segment| host.worker.submit(SegmentIndex(segment), Task::Sum(elements))));
    }
    let mut done = 0;
    while done < segments as usize * usize::from(WORKERS) {
        let (more, ended) = round(&mut server, &mut hosts, begun.elapsed());
        assert_eq!(ended, None);
        done += more;
    }
    assert!(hosts.iter().all(|host| host.ramp.written == segments * elements));
    assert!(hosts[1].socket.counters().received >= segments * elements.div_ceil(u64::from(ELEMENTS)));
    assert_eq!(server.read().datagrams.received, server.endpoints.counters().received);
}

#[tokio::test]
async fn grants_and_withdrawals_wait_for_room() {
    let (commands, mut queue) = Commands::new().unwrap();
    for _ in 0..COMMANDS {
        let (answer, _) = oneshot::channel();
        commands.commands.try_send(Command::Read(answer)).unwrap();
    }
    assert!(commands.read().await.is_none(), "who only asks how it stands asks again");
    let mut server = server(1);
    server.grant(told(7, "a", 1)).unwrap();
    let said = async {
        commands.revoke(GrantId(7)).await;
        commands.grant(told(8, "a", 1)).await
    };
    let served = async {
        while let Some(command) = queue.recv().await {
            let last = matches!(command, Command::Grant(..));
            server.command(command);
            if last {
                break;
            }
        }
    };
    let (said, ()) = tokio::join!(said, served);
    said.unwrap();
    assert_eq!(server.served.keys().copied().collect::<Vec<_>>(), [GrantId(8)]);
    drop(queue);
    assert!(commands.grant(told(9, "a", 1)).await.is_err(), "nobody is there");
}
