//! The programs in the kernel of the guest with SoftRoCE devices. Loss that is injected there is found for each queue pair, and whose
//! each is. `cargo xtask softroce test` runs this.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

#[path = "support/budget.rs"]
mod budget;

use harmonaize_events::{Direction, FlowKey, RoceCounters};
use harmonaize_loader::{AttachMode, EndpointOptions, Endpoints, Flows, Options, Programs};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// For a guest whose processor is emulated.
const PATIENCE: Duration = Duration::from_secs(60);
const HOSTS: u32 = 4;
/// The host to which packets are lost.
const LOSSY: u32 = 3;
const PAIRS: usize = 8;

/// What goes to a queue pair: the host that sends, the one that receives, and the queue pair's number there.
type Stream = (u32, u32, u32);

fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn command_output(command: &str) -> String {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The index of the address in a device's table.
fn address_index(host: u32) -> String {
    let folder = format!("/sys/class/infiniband/rxe{host}/ports/1/gids");
    let wanted = format!("0000:0000:0000:0000:0000:ffff:0a00:{:04x}", host + 1);
    let mut entries = std::fs::read_dir(folder).unwrap().flatten();
    let found = entries
        .find(|entry| std::fs::read_to_string(entry.path()).is_ok_and(|address| address.trim() == wanted));
    found.unwrap().file_name().into_string().unwrap()
}

fn counter(host: u32, name: &str) -> u64 {
    let path = format!("/sys/class/infiniband/rxe{host}/ports/1/hw_counters/{name}");
    std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

/// Packets that the switch has lost on their way to the lossy host.
fn dropped() -> u64 {
    let text = command_output(&format!("tc -n sw -s qdisc show dev p{LOSSY}"));
    let mut words = text.split_whitespace().skip_while(|word| *word != "(dropped");
    words.nth(1).unwrap().trim_end_matches(',').parse().unwrap()
}

/// The hosts' network while packets to one of them are lost.
struct Lossy;

impl Lossy {
    /// Has packets lost, and each link's packets received on one processor. A device with a queue for each flow does so. Links
    /// between namespaces are else received on whatever processor sends, and packets overtake one another.
    fn begin() -> Self {
        received_on(1);
        command_output(&format!("tc -n sw qdisc add dev p{LOSSY} root netem loss 4% limit 10000"));
        Self
    }
}

impl Drop for Lossy {
    fn drop(&mut self) {
        command_output(&format!("tc -n sw qdisc del dev p{LOSSY} root"));
        received_on(0);
    }
}

/// Sets the processors, as a mask, on which links' packets are received; 0 for any.
fn received_on(mask: u32) {
    let script = format!(
        "for queue in /sys/class/net/[hp][0-9]*/queues/rx-0/rps_cpus; do echo {mask} > $queue || exit; done"
    );
    for namespace in [&[][..], &["ip", "netns", "exec", "sw"]] {
        let words = [namespace, &["busybox", "sh", "-c", &script]].concat();
        let status = Command::new(words[0]).args(&words[1..]).status().unwrap();
        assert!(status.success(), "{words:?}: {status}");
    }
}

/// A run of a known program that writes from one host to another, on some queue pairs at once.
struct Traffic {
    server: Child,
    client: Child,
}

impl Traffic {
    fn start(from: u32, to: u32) -> Self {
        // A port that is free now.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let program = |host: u32| {
            let mut command = Command::new("ib_write_bw");
            command.args(["-d", &format!("rxe{host}"), "-x", &address_index(host), "-p", &port.to_string()]);
            command.args([
                "-q",
                &PAIRS.to_string(),
                "-s",
                "16384",
                "-n",
                "100",
                "-m",
                "4096",
                "-u",
                "17",
                "-F",
            ]);
            command.stdout(Stdio::null()).stdin(Stdio::null());
            command
        };
        let mut server = program(to).spawn().unwrap();
        let listens = || {
            assert!(server.try_wait().unwrap().is_none(), "the server has ended");
            let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
            let table = table + &std::fs::read_to_string("/proc/net/tcp6").unwrap_or_default();
            let port = format!(":{port:04X}");
            table.lines().any(|line| {
                let mut words = line.split_whitespace().skip(1);
                words.next().is_some_and(|local| local.ends_with(&port)) && words.nth(1) == Some("0A")
            })
        };
        wait("the server listens", listens);
        let client = program(from).arg("127.0.0.1").spawn().unwrap();
        Self { server, client }
    }

    /// The processes' numbers, once both have ended well; meanwhile `meanwhile` is called again and again.
    fn finish(mut self, mut meanwhile: impl FnMut()) -> [u32; 2] {
        for child in [&mut self.client, &mut self.server] {
            wait("the traffic ends", || {
                meanwhile();
                let ended = child.try_wait().unwrap();
                ended.inspect(|status| assert!(status.success(), "{status}")).is_some()
            });
        }
        [self.server.id(), self.client.id()]
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        for child in [&mut self.client, &mut self.server] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn host_of(address: IpAddr) -> u32 {
    let IpAddr::V4(address) = address else { panic!("{address}") };
    u32::from(address.octets()[3]) - 1
}

/// What was counted of each stream, at its sender's interface and at its receiver's.
fn streams(flows: &Flows) -> BTreeMap<Stream, [RoceCounters; 2]> {
    let mut streams: BTreeMap<Stream, [RoceCounters; 2]> = BTreeMap::new();
    for (key, counters) in &flows.roce {
        let (local, remote) = (host_of(key.local_address()), host_of(key.remote_address()));
        let leaves = key.direction == Direction::Egress as u8;
        let (from, to) = if leaves { (local, remote) } else { (remote, local) };
        streams.entry((from, to, key.queue_pair)).or_default()[usize::from(!leaves)] = *counters;
    }
    streams
}

/// Precision and recall of what was found.
fn judged(found: impl Iterator<Item = (bool, bool)>) -> (f64, f64) {
    let (mut right, mut told, mut true_ones) = (0.0_f64, 0.0_f64, 0.0_f64);
    for (found, truth) in found {
        right += f64::from(u8::from(found && truth));
        told += f64::from(u8::from(found));
        true_ones += f64::from(u8::from(truth));
    }
    (right / told, right / true_ones)
}

/// Locked by the test that has the hosts' links. On clsact a collector that is attached takes off what it finds of another.
static LINKS: Mutex<()> = Mutex::new(());

/// Returns the collector on all hosts' links, which is dropped before another test may have one. Elsewhere than in the guest it
/// returns none and prints why.
fn collector() -> Option<(MutexGuard<'static, ()>, Programs)> {
    collector_with(Options { endpoints: Some(EndpointOptions::default()), ..Options::default() })
}

/// The same with other options.
fn collector_with(options: Options) -> Option<(MutexGuard<'static, ()>, Programs)> {
    if std::env::var_os("HARMONAIZE_GUEST").is_none() {
        println!("SKIPPED: this test needs the guest of `cargo xtask softroce test`");
        return None;
    }
    let alone = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
    let options = Options { late_rtt: Duration::from_micros(2500), ..options };
    let mut collector = Programs::open(&options).unwrap();
    budget::check_budget(&collector, options.diagnosis);
    println!("{}; missing: {:?}", collector.kernel(), collector.missing());
    for host in 0..HOSTS {
        collector.attach(&format!("h{host}")).unwrap();
    }
    Some((alone, collector))
}

#[test]
fn injected_loss_is_found_per_queue_pair() {
    let Some((_alone, mut collector)) = collector() else { return };
    let hook = if collector.kernel().tcx { AttachMode::Tcx } else { AttachMode::Clsact };
    assert!(collector.attached().all(|(_, _, used)| used == hook));
    let tracing = collector.tracing().unwrap();
    assert!(tracing.rdma() && tracing.tcp().is_some(), "{:?}", collector.missing());
    let counters =
        || (0..HOSTS).map(|host| [counter(host, "out_of_seq_request"), counter(host, "rcvd_seq_err")]);
    let before: Vec<_> = counters().collect();
    let lossy = Lossy::begin();
    let mut processes = BTreeMap::new();
    let (mut flows, mut endpoints) = (Flows::default(), Endpoints::default());
    let mut known_while_alive = 0;
    for (from, to) in [(0, LOSSY), (0, 1), (1, LOSSY), (1, 2), (2, LOSSY), (2, 0)] {
        let begun = Instant::now();
        let [server, client] = Traffic::start(from, to).finish(|| {
            collector.read_flows(&mut flows).unwrap();
            collector.read_endpoints(&mut endpoints).unwrap();
            known_while_alive +=
                flows.roce.iter().filter(|(key, _)| endpoints.queue_pair(key).is_some()).count();
            while collector.read_events(256, |_| {}).unwrap() > 0 {}
        });
        println!("host {from} to host {to}: {:?}", begun.elapsed());
        processes.insert((from, to), [server, client]);
    }
    let lost = dropped();
    drop(lossy);
    assert!(known_while_alive > 0, "no flow's queue pair was known while it lived");
    collector.read_flows(&mut flows).unwrap();
    assert_eq!((flows.evicted, collector.losses().unwrap().unregistered), (0, 0));
    let streams = streams(&flows);
    let data: BTreeMap<Stream, [RoceCounters; 2]> =
        streams.clone().into_iter().filter(|(_, [sent, _])| sent.writes > 0).collect();
    assert_eq!(data.len(), 6 * PAIRS, "{:?}", data.keys());

    // What is lost is what a sender's interface has seen and the receiver's has not; the switch has counted the same.
    let truth = |[sent, received]: &[RoceCounters; 2]| sent.traffic.packets - received.traffic.packets;
    let all: u64 = streams.values().map(truth).sum();
    let of_data: u64 = data.values().map(truth).sum();
    println!("{lost} packets lost, of data {of_data}");
    // Requests for hardware addresses may be among the lost.
    assert!(all <= lost && lost - all < 20, "{all} of {lost}");
    assert!(of_data > 6 * PAIRS as u64);

    // By what is missing at the receiver's interface, and by the refusals that come in at the sender's: which queue pair they are
    // about is known by the kernel's word alone. (What is sent again is no proof: devices do that when they are late, too.)
    collector.read_endpoints(&mut endpoints).unwrap();
    let refused = |(from, to, number): &Stream| {
        let [server, _] = processes[&(*from, *to)];
        let own =
            endpoints.queue_pairs.iter().find(|(key, pair)| key.number == *number && pair.process == server);
        let asker = own.unwrap().1.peer;
        streams.get(&(*to, *from, asker)).is_some_and(|[_, received]| received.sequence_naks > 0)
    };
    let at_receiver = judged(data.values().map(|stream| (stream[1].gaps > 0, truth(stream) > 0)));
    let at_sender = judged(data.iter().map(|(key, stream)| (refused(key), truth(stream) > 0)));
    println!("precision and recall: at the receiver {at_receiver:?}, at the sender {at_sender:?}");
    for (precision, recall) in [at_receiver, at_sender] {
        assert!(precision >= 0.99 && recall >= 0.99);
    }
    for ((from, to, number), stream) in &data {
        assert_eq!(truth(stream) > 0, *to == LOSSY, "host {from} to {to}, queue pair {number}");
        assert!(stream[1].gaps <= truth(stream), "{stream:?}");
    }
    // The devices' own counters: who found a gap and said so, and who was told.
    for (host, (now, before)) in counters().zip(before).enumerate() {
        let host = host as u32;
        let refusals = |of: &dyn Fn(&Stream) -> bool, side: usize| -> u64 {
            streams.iter().filter(|(stream, _)| of(stream)).map(|(_, seen)| seen[side].sequence_naks).sum()
        };
        let [sent, received] =
            [refusals(&|stream| stream.0 == host, 0), refusals(&|stream| stream.1 == host, 1)];
        assert_eq!(sent, now[0] - before[0], "host {host} has refused");
        // Of those that came in the device counts the ones alone that are news to it.
        assert!(received >= now[1] - before[1], "host {host} was refused {received} times");
        println!(
            "host {host}: {sent} refusals sent, {received} came in, {} of them news",
            now[1] - before[1]
        );
    }

    for (from, to, number) in data.keys() {
        let [server, client] = processes[&(*from, *to)];
        let address =
            |host: u32| FlowKey::words(Ipv4Addr::new(10, 0, 0, host as u8 + 1).to_ipv6_mapped().octets());
        let of = |process: u32| endpoints.queue_pairs.iter().filter(move |(_, pair)| pair.process == process);
        let (_, own) = of(server).find(|(key, _)| key.number == *number).unwrap();
        assert_eq!((own.local, own.remote), (address(*to), address(*from)), "{own:?}");
        let (_, peer) =
            of(client).find(|(key, pair)| key.number == own.peer && pair.peer == *number).unwrap();
        for (pair, host) in [(own, to), (peer, from)] {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned();
            assert_eq!(
                (text(&pair.device), text(&pair.name)),
                (format!("rxe{host}"), "ib_write_bw".to_owned())
            );
            assert_eq!((pair.user, pair.kind), (0, 2));
            assert!(pair.created_ns < pair.changed_ns && pair.changed_ns < pair.destroyed_ns, "{pair:?}");
        }
    }
    assert_eq!(endpoints.losses.queue_pairs_unplaced, 0);
}

#[test]
fn packets_are_counted_before_the_stack_sees_them() {
    let Some((_alone, mut collector)) = collector_with(Options { xdp: true, ..Options::default() }) else {
        return;
    };
    assert!(collector.cost().unwrap().programs.iter().any(|program| program.name == "count_xdp"));
    println!("{:?}", collector.attached().collect::<Vec<_>>());
    Traffic::start(0, 1).finish(|| while collector.read_events(256, |_| {}).unwrap() > 0 {});
    let mut flows = Flows::default();
    collector.read_flows(&mut flows).unwrap();
    let streams = streams(&flows);
    let data = streams.values().filter(|[sent, _]| sent.writes > 0);
    assert_eq!(data.clone().count(), PAIRS, "{:?}", streams.keys());
    for [sent, received] in data {
        let counted = |one: &RoceCounters| (one.writes, one.traffic.packets, one.traffic.bytes);
        assert_eq!(counted(received), counted(sent), "nothing is lost on the way");
    }
}

#[test]
fn sockets_are_known_in_this_kernel_too() {
    let Some((_alone, mut collector)) = collector() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let mut near = TcpStream::connect(address).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    use std::io::{Read, Write};
    near.write_all(&[7; 10_000]).unwrap();
    far.read_exact(&mut [0; 10_000]).unwrap();
    far.write_all(b"!").unwrap();
    near.read_exact(&mut [0]).unwrap();
    let mut endpoints = Endpoints::default();
    wait("both sockets are known", || {
        collector.read_endpoints(&mut endpoints).unwrap();
        let port = near.local_addr().unwrap().port();
        let ends =
            endpoints.sockets.iter().filter(|(key, _)| [key.local_port, key.remote_port].contains(&port));
        let ends: Vec<_> = ends.collect();
        ends.len() == 2 && ends.iter().all(|(_, socket)| socket.state == 1 && socket.congestion_window > 0)
    });
}

/// Keeps what is logged.
#[derive(Clone, Default)]
struct CapturedLog(Arc<Mutex<Vec<u8>>>);

impl CapturedLog {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl std::io::Write for CapturedLog {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The programs that were built for diagnosis load in this kernel too, at both places for ingress. They say of a fragment what it
/// is.
#[test]
fn diagnosis_programs_log_why_packets_are_rejected() {
    for early in [false, true] {
        let options = Options { diagnosis: true, xdp: early, ..Options::default() };
        let Some((_alone, mut collector)) = collector_with(options) else { return };
        let kept = CapturedLog::default();
        let writer = kept.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
        let subscriber = Arc::new(subscriber.finish());
        // Larger than the links' MTU: the host sends it in two pieces, and the switch passes both on.
        let sender = UdpSocket::bind("10.0.0.1:0").unwrap();
        let receiver = UdpSocket::bind("10.0.0.2:0").unwrap();
        receiver.set_read_timeout(Some(PATIENCE)).unwrap();
        for (unwatched, reason) in [("h1", "egress 1: a fragment"), ("h0", "egress 0: a fragment")] {
            collector.detach(unwatched).unwrap();
            wait(reason, || {
                sender.send_to(&[7; 6000], receiver.local_addr().unwrap()).unwrap();
                assert_eq!(receiver.recv(&mut [0; 8000]).unwrap(), 6000);
                tracing::subscriber::with_default(Arc::clone(&subscriber), || {
                    while collector.read_events(256, |_| {}).unwrap() > 0 {}
                });
                kept.text().contains(reason)
            });
            collector.attach(unwatched).unwrap();
        }
        println!("{}", kept.text());
    }
}
