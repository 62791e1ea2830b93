//! Real traffic between network namespaces: what the programs count equals what the kernel's interfaces and sockets count.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod support;

use aya::programs::tc::{
    NlOptions, SchedClassifierLink, SchedClassifierLinkId, TcAttachOptions, qdisc_add_clsact,
};
use aya::programs::{ProgramError, SchedClassifier, TcAttachType};
use aya::{Ebpf, EbpfLoader};
use harmonaize_events::{EventKind, FlowKey, TcpFlow};
use harmonaize_loader::{AttachMode, Change, EndpointOptions, Endpoints, Error, Flows, Options, Programs};
use harmonaize_testkit::fabric::Fabric;
use harmonaize_testkit::namespace::Namespace;
use harmonaize_testkit::topology::{Topology, star};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::{Duration, Instant};
use support::{collector, object};

/// How long anything here may take before the test fails.
const STEP: Duration = Duration::from_secs(30);

/// Two namespaces joined by a cable, each with the device `wire`; removed however the test ends.
struct Cable {
    near: Namespace,
    far: Namespace,
    _fabric: Fabric,
}

const NEAR: &str = "10.9.0.1";
const FAR: &str = "10.9.0.2";

impl Cable {
    /// `None`, loudly, without the privilege. The devices cut no segments with `cut` at 1.
    fn lay(cut: Option<u32>) -> Option<Self> {
        if !harmonaize_testkit::strict::can_make_namespaces() {
            return None;
        }
        let fabric = Fabric::build(&Topology::parse(&star(2, "1Gbit/s")).unwrap()).unwrap();
        let [near, far] = ["near", "far"].map(|label| fabric.isolated(label).unwrap());
        let cable = Self { near, far, _fabric: fabric };
        cable.connect(cut);
        Some(cable)
    }

    fn connect(&self, cut: Option<u32>) {
        let (near, far) = (&self.near, &self.far);
        for side in [near, far] {
            // Nothing but what the test sends: no neighbour discovery.
            side.set("net.ipv6.conf.all.disable_ipv6", "0").unwrap();
            side.set("net.ipv6.conf.default.accept_dad", "0").unwrap();
            side.set("net.ipv6.conf.default.router_solicitations", "0").unwrap();
            side.set("net.ipv6.conf.default.addr_gen_mode", "1").unwrap();
        }
        // Each end has an index of its own, or the kernel would take its time to notice the carrier.
        near.ip(&[format!(
            "link add wire index 301 type veth peer name wire index 302 netns {}",
            far.name()
        )])
        .unwrap();
        for (side, address, other) in [(near, NEAR, "fd09::1"), (far, FAR, "fd09::2")] {
            let cut = cut.map(|most| format!("link set wire gso_max_segs {most}"));
            let mut lines = vec![
                format!("addr add {address}/24 dev wire"),
                format!("addr add {other}/64 dev wire nodad"),
                "link set wire up".to_owned(),
            ];
            lines.splice(0..0, cut);
            side.ip(&lines).unwrap();
        }
        // Who the other is, is known from the first packet on.
        for (side, other, device) in
            [(near, FAR, far), (near, "fd09::2", far), (far, NEAR, near), (far, "fd09::1", near)]
        {
            let said =
                device.enter(|| Command::new("ip").args(["-o", "link", "show", "wire"]).output()).unwrap();
            let said = String::from_utf8(said.unwrap().stdout).unwrap();
            let hardware = said.split_whitespace().skip_while(|word| *word != "link/ether").nth(1).unwrap();
            side.ip(&[format!("neigh replace {other} lladdr {hardware} dev wire nud permanent")]).unwrap();
        }
        wait("both ends have a carrier", || {
            [near, far].iter().all(|side| {
                let said = side.enter(|| Command::new("ip").args(["-o", "link", "show", "wire"]).output());
                String::from_utf8_lossy(&said.unwrap().unwrap().stdout).contains("state UP")
            })
        });
    }

    /// Packets and bytes, in and out, that the kernel has counted on the near end, less those of the programs. It is the
    /// same at all times, where both were read while nothing passed.
    fn difference(&self, collector: &Programs, index: u32) -> [u64; 4] {
        let counted = || {
            let read = || std::fs::read_to_string("/proc/thread-self/net/dev");
            let text = self.near.enter(read).unwrap().unwrap();
            let line = text.lines().find_map(|line| line.trim().strip_prefix("wire:")).unwrap();
            let numbers: Vec<u64> = line.split_whitespace().map(|number| number.parse().unwrap()).collect();
            [numbers[1], numbers[0], numbers[9], numbers[8]]
        };
        let mut difference = [0; 4];
        wait("nothing passes for a moment", || {
            let before = counted();
            let totals = collector.totals(index).unwrap();
            let (ingress, egress) = (totals.ingress, totals.egress);
            let ours = [ingress.buffers, ingress.buffer_bytes, egress.buffers, egress.buffer_bytes];
            std::thread::sleep(Duration::from_millis(2));
            for ((difference, kernels), own) in difference.iter_mut().zip(before).zip(ours) {
                *difference = kernels.wrapping_sub(own);
            }
            counted() == before
        });
        difference
    }
}

fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + STEP;
    while !done() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Two ends of a connection, and what the kernel says of the sending one.
struct Connection {
    sender: TcpStream,
    receiver: TcpStream,
}

impl Connection {
    fn open(from: &Namespace, to: &Namespace, address: &str) -> Self {
        let address: IpAddr = address.parse().unwrap();
        let listener = to.enter(|| TcpListener::bind((address, 0))).unwrap().unwrap();
        let target: SocketAddr = listener.local_addr().unwrap();
        let sender = from.enter(|| TcpStream::connect_timeout(&target, STEP)).unwrap().unwrap();
        let (receiver, _) = listener.accept().unwrap();
        for end in [&sender, &receiver] {
            end.set_read_timeout(Some(STEP)).unwrap();
            end.set_write_timeout(Some(STEP)).unwrap();
        }
        Self { sender, receiver }
    }

    /// Sends so many bytes, and waits for an answer when all have come.
    fn send(&mut self, bytes: usize) {
        let Self { sender, receiver } = self;
        std::thread::scope(|scope| {
            let received = scope.spawn(move || {
                let mut buffer = vec![0; 1 << 16];
                let mut left = bytes;
                while left > 0 {
                    let read = receiver.read(&mut buffer).unwrap();
                    assert_ne!(read, 0, "the sender has closed with {left} bytes to go");
                    left -= read;
                }
                receiver.write_all(b"!").unwrap();
            });
            let chunk = vec![7; 1 << 16];
            let mut left = bytes;
            while left > 0 {
                left -= sender.write(&chunk[..left.min(chunk.len())]).unwrap();
            }
            sender.read_exact(&mut [0]).unwrap();
            received.join().unwrap();
        });
    }

    /// Retransmitted segments, and all segments sent (`tcpi_total_retrans`, `tcpi_segs_out` of linux/tcp.h).
    fn sent(&self) -> (u32, u32) {
        let mut info = [0u8; 256];
        let mut length: libc::socklen_t = 256;
        // SAFETY: the buffer has the length that is told, and outlives the call.
        let done = unsafe {
            libc::getsockopt(
                self.sender.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                info.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        assert!(done == 0 && length >= 140, "{done} {length}");
        let word = |at: usize| u32::from_ne_bytes(info[at..at + 4].try_into().unwrap());
        (word(100), word(136))
    }

    /// The flow of this connection, as the sender's side has it.
    fn flow(&self, collector: &mut Programs) -> (FlowKey, TcpFlow) {
        let mut flows = Flows::default();
        collector.read_flows(&mut flows).unwrap();
        let port = self.sender.local_addr().unwrap().port();
        *flows.tcp.iter().find(|(key, _)| key.local_port == port).unwrap()
    }
}

fn attach(collector: &mut Programs, side: &Namespace) -> u32 {
    side.enter(|| collector.attach("wire")).unwrap().unwrap()
}

/// Totals equal the interface's, flows add up to totals, and segments equal the socket's. So it is with devices that cut
/// segments and with those that do not; over IPv4 and IPv6; by tcx and by clsact.
#[test]
fn packets_and_bytes_equal_the_interfaces() {
    for (cut, clsact, addresses) in
        [(Some(1), false, [FAR, "fd09::2"]), (None, false, [FAR, "fd09::2"]), (None, true, ["fd09::2", FAR])]
    {
        let Some(mut collector) = collector(Options { clsact, ..Options::default() }) else { return };
        let Some(cable) = Cable::lay(cut) else { return };
        let index = attach(&mut collector, &cable.near);
        let before = cable.difference(&collector, index);
        let hook = if clsact || !collector.kernel().tcx { AttachMode::Clsact } else { AttachMode::Tcx };
        assert_eq!(collector.attached().collect::<Vec<_>>(), [("wire", index, hook)]);
        let mut connections = addresses.map(|address| Connection::open(&cable.near, &cable.far, address));
        for connection in &mut connections {
            connection.send(20_000_000);
        }
        for connection in &connections {
            // An acknowledgement that was put off may still come.
            wait("every segment that the socket has sent is counted", || {
                let (_, segments) = connection.sent();
                connection.flow(&mut collector).1.egress.traffic.packets == u64::from(segments)
            });
            let (key, flow) = connection.flow(&mut collector);
            assert_eq!(key.remote_address(), connection.sender.peer_addr().unwrap().ip());
            assert_eq!((flow.egress.retransmissions, flow.egress.jumps), (u64::from(connection.sent().0), 0));
            let trips = flow.egress.rtt;
            let lasted = flow.egress.traffic.last_ns - flow.egress.traffic.first_ns;
            assert!(trips.count > 0 && trips.min_ns > 0, "{trips:?}");
            assert!(trips.min_ns <= trips.last_ns && trips.sum_ns <= lasted, "{trips:?} in {lasted}");
        }
        let mut flows = Flows::default();
        wait("the counters of interface and programs are equal", || {
            cable.difference(&collector, index) == before
        });
        let mut totals = collector.totals(index).unwrap();
        let sum =
            |flows: &Flows, of: fn(&TcpFlow) -> u64| flows.tcp.iter().map(|(_, flow)| of(flow)).sum::<u64>();
        // What passes between one reading and the next is in one of them alone.
        wait("flows add up to totals", || {
            totals = collector.totals(index).unwrap();
            collector.read_flows(&mut flows).unwrap();
            sum(&flows, |flow| flow.egress.traffic.packets) == totals.egress.tcp
                && sum(&flows, |flow| flow.ingress.traffic.packets) == totals.ingress.tcp
        });
        // The kernel may have reported its multicast groups meanwhile.
        for (flows, totals) in [
            (sum(&flows, |flow| flow.ingress.traffic.bytes), totals.ingress),
            (sum(&flows, |flow| flow.egress.traffic.bytes), totals.egress),
        ] {
            assert_eq!(totals.packets, totals.tcp + totals.other);
            assert!(totals.other > 0 || flows == totals.bytes, "{flows} {totals:?}");
        }
        if cut == Some(1) {
            assert_eq!(
                (totals.egress.packets, totals.egress.bytes),
                (totals.egress.buffers, totals.egress.buffer_bytes)
            );
        } else {
            assert!(
                totals.egress.packets > 2 * totals.egress.buffers,
                "buffers of many segments: {totals:?}"
            );
        }
        assert_eq!((totals.egress.malformed, totals.egress.fragments, totals.egress.unplaced), (0, 0, 0));
        assert_eq!(collector.losses().unwrap().unregistered, 0);
        let taken = cable.near.enter(|| collector.detach("wire")).unwrap().unwrap();
        assert!(taken.egress.tcp >= totals.egress.tcp);
        wait_until_clean(&cable.near);
    }
}

/// Nothing of ours stays on the device. A child that another test has just started may hold a link until it is another program.
fn wait_until_clean(side: &Namespace) {
    wait("nothing is left on the device", || is_clean(side));
}

fn is_clean(side: &Namespace) -> bool {
    let attached = side.enter(|| {
        SchedClassifier::query_tcx("wire", TcAttachType::Ingress).map(|(_, programs)| programs.len())
    });
    let disciplines = side.enter(|| Command::new("tc").args(["qdisc", "show", "dev", "wire"]).output());
    let disciplines = String::from_utf8(disciplines.unwrap().unwrap().stdout).unwrap();
    attached.unwrap().unwrap_or(0) == 0 && !disciplines.contains("clsact")
}

/// Drops by chance what comes in on one side, for as long as it lives.
struct Loss {
    _link: SchedClassifierLink,
    _ebpf: Ebpf,
}

impl Loss {
    fn at(side: &Namespace, share: f64) -> Self {
        Self::start(side, share, |program| program.attach("wire", TcAttachType::Ingress))
    }

    /// One that drops nothing, as a filter of clsact.
    fn by_clsact(side: &Namespace) -> Self {
        let filter = || TcAttachOptions::Netlink(NlOptions::default());
        Self::start(side, 0.0, |program| program.attach_with_options("wire", TcAttachType::Ingress, filter()))
    }

    fn start(
        side: &Namespace,
        share: f64,
        attach: impl FnOnce(&mut SchedClassifier) -> Result<SchedClassifierLinkId, ProgramError> + Send,
    ) -> Self {
        let chance = (share * f64::from(u32::MAX)) as u32;
        let bytes = std::fs::read(object("loss.o")).unwrap();
        let mut loader = EbpfLoader::new();
        let mut ebpf =
            loader.btf(None).override_global("DROP_PROBABILITY", &chance, true).load(&bytes).unwrap();
        let program: &mut SchedClassifier = ebpf.program_mut("drop_randomly").unwrap().try_into().unwrap();
        program.load().unwrap();
        let link = side.enter(|| {
            // Without tcx it needs the discipline; with it, it is there or not needed.
            drop(qdisc_add_clsact("wire"));
            attach(program).and_then(|id| program.take_link(id)).unwrap()
        });
        Self { _link: link.unwrap(), _ebpf: ebpf }
    }
}

#[test]
fn retransmissions_equal_the_kernels() {
    let Some(cable) = Cable::lay(Some(1)) else { return };
    let Some(mut collector) = collector(with_endpoints(&cable.near)) else { return };
    attach(&mut collector, &cable.near);
    let _loss = Loss::at(&cable.far, 0.02);
    for address in [FAR, "fd09::2"] {
        let mut connection = Connection::open(&cable.near, &cable.far, address);
        connection.send(8_000_000);
        let mut seen = (0, 0);
        wait("the kernel's count and the programs' are equal", || {
            let flow = connection.flow(&mut collector).1;
            seen = (u64::from(connection.sent().0), flow.egress.retransmissions);
            seen.0 == seen.1
        });
        eprintln!("{address}: {} retransmissions", seen.0);
        assert!(seen.0 > 10, "2% of some 5,500 packets are lost: {seen:?}");
        if collector.tracing().is_some_and(|tracing| tracing.tcp().is_some()) {
            let mut endpoints = Endpoints::default();
            collector.read_endpoints(&mut endpoints).unwrap();
            let socket = endpoints.socket(&connection.flow(&mut collector).0).copied().unwrap();
            assert_eq!(
                u64::from(socket.retransmissions),
                seen.0,
                "the last segment is the answer: {socket:?}"
            );
        }
        let flow = connection.flow(&mut collector).1;
        assert_eq!((flow.egress.jumps, flow.ingress.retransmissions), (0, 0));
        let mut told = Vec::new();
        while collector.read_events(256, |event| told.push(*event)).unwrap() > 0 {}
        let of_it = told.iter().filter(|event| {
            event.kind == EventKind::Retransmission as u32
                && event.flow.local_port == connection.sender.local_addr().unwrap().port()
        });
        assert_eq!(of_it.count() as u64, seen.1, "each is told");
    }
}

#[test]
fn interfaces_go_and_come_back() {
    let Some(mut collector) = collector(Options::default()) else { return };
    let Some(cable) = Cable::lay(None) else { return };
    let index = attach(&mut collector, &cable.near);
    Connection::open(&cable.near, &cable.far, FAR).send(1000);
    assert_eq!(cable.near.enter(|| collector.refresh()).unwrap().unwrap(), []);
    cable.near.ip(&["link del wire".to_owned()]).unwrap();
    let changes = cable.near.enter(|| collector.refresh()).unwrap().unwrap();
    let [Change::Detached { name, index: old, totals }] = &changes[..] else { panic!("{changes:?}") };
    assert_eq!((name.as_str(), *old), ("wire", index));
    assert!(totals.egress.tcp > 3 && totals.ingress.tcp > 2, "{totals:?}");
    assert_eq!(collector.attached().count(), 0);
    assert!(collector.totals(index).is_err());
    // Back by hand, and gone and back between two looks: with an index of its own, as after a driver is loaded again.
    cable.connect(None);
    attach(&mut collector, &cable.near);
    cable.near.ip(&["link del wire".to_owned()]).unwrap();
    let reborn =
        format!("link add wire index 311 type veth peer name wire index 312 netns {}", cable.far.name());
    cable.near.ip(&[reborn]).unwrap();
    let changes = cable.near.enter(|| collector.refresh()).unwrap().unwrap();
    assert!(
        matches!(&changes[..], [Change::Detached { .. }, Change::Reattached { name, index: 311 }] if name == "wire"),
        "{changes:?}"
    );
    assert_eq!(collector.totals(311).unwrap().egress.buffers, 0);
    cable.near.enter(|| drop(collector)).unwrap();
    wait_until_clean(&cable.near);
}

/// The filters of a process that was killed: nothing is taken off, and nobody has a claim.
fn leave_behind(side: &Namespace) {
    let mut ebpf = EbpfLoader::new().btf(None).load(&std::fs::read(object("telemetry.o")).unwrap()).unwrap();
    let places = [("count_ingress", TcAttachType::Ingress), ("count_egress", TcAttachType::Egress)];
    side.enter(|| qdisc_add_clsact("wire").unwrap()).unwrap();
    for (name, place) in places {
        let program: &mut SchedClassifier = ebpf.program_mut(name).unwrap().try_into().unwrap();
        program.load().unwrap();
        let filter = TcAttachOptions::Netlink(NlOptions::default());
        side.enter(|| program.attach_with_options("wire", place, filter).map(drop).unwrap()).unwrap();
    }
    std::mem::forget(ebpf);
}

/// Filters by the names of their programs.
fn filters(cable: &Cable, name: &str, direction: &str) -> usize {
    let show = ["filter", "show", "dev", "wire", direction];
    let said = cable.near.enter(|| Command::new("tc").args(show).output()).unwrap().unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    said.lines().filter(|line| line.contains(name) && line.contains("handle")).count()
}

#[test]
fn filters_of_a_killed_process_are_replaced() {
    if collector(Options::default()).is_none() {
        return;
    }
    let Some(cable) = Cable::lay(None) else { return };
    leave_behind(&cable.near);
    let ours = || (filters(&cable, "count_ingress", "ingress"), filters(&cable, "count_egress", "egress"));
    assert_eq!(ours(), (1, 1));
    let mut second = collector(Options { clsact: true, ..Options::default() }).unwrap();
    let index = attach(&mut second, &cable.near);
    assert_eq!(ours(), (1, 1));
    Connection::open(&cable.near, &cable.far, FAR).send(1000);
    assert!(second.totals(index).unwrap().egress.tcp > 3);
    cable.near.enter(|| drop(second)).unwrap();
    wait_until_clean(&cable.near);
}

/// The one who came first goes on measuring; the other is told, and may have the interface afterwards.
#[test]
fn clsact_interfaces_have_one_process_at_a_time() {
    let clsact = || collector(Options { clsact: true, ..Options::default() });
    let (Some(mut first), Some(mut second)) = (clsact(), clsact()) else { return };
    let Some(cable) = Cable::lay(None) else { return };
    let index = attach(&mut first, &cable.near);
    let error = cable.near.enter(|| second.attach("wire")).unwrap().unwrap_err();
    assert!(matches!(error, Error::Attach { .. }), "{error}");
    assert!(error.to_string().contains("wire: another process measures it"), "{error}");
    assert!(second.totals(index).is_err(), "it is not listed");
    Connection::open(&cable.near, &cable.far, FAR).send(1000);
    assert!(first.totals(index).unwrap().egress.tcp > 3);
    // In another network namespace an interface is another.
    let index = cable.far.enter(|| second.attach("wire")).unwrap().unwrap();
    cable.near.enter(|| first.detach("wire")).unwrap().unwrap();
    cable.far.enter(|| second.detach("wire")).unwrap().unwrap();
    assert!(second.totals(index).is_err());
    attach(&mut second, &cable.near);
    cable.near.enter(|| drop((first, second))).unwrap();
    wait_until_clean(&cable.near);
}

#[test]
fn unrelated_filters_stay() {
    let Some(mut collector) = collector(Options { clsact: true, ..Options::default() }) else { return };
    let Some(cable) = Cable::lay(None) else { return };
    attach(&mut collector, &cable.near);
    let theirs = Loss::by_clsact(&cable.near);
    cable.near.enter(|| collector.detach("wire")).unwrap().unwrap();
    assert_eq!((filters(&cable, "count_", "ingress"), filters(&cable, "drop_randomly", "ingress")), (0, 1));
    cable.near.enter(|| drop(theirs)).unwrap();
}

/// Follows the sockets of one namespace, at every segment.
fn with_endpoints(side: &Namespace) -> Options {
    let own = side.enter(harmonaize_loader::own_namespace).unwrap().unwrap();
    let endpoints =
        EndpointOptions { interval: Duration::ZERO, namespaces: vec![own], ..EndpointOptions::default() };
    Options { endpoints: Some(endpoints), ..Options::default() }
}

/// The smoothed round trip from packets is the kernel's, by its own rule. That is RFC 6298: an eighth of each sample. So are
/// the shortest, and what is known of the connection. The kernel samples a segment before it has taken it in.
#[test]
fn rtts_match_the_kernel() {
    let Some(cable) = Cable::lay(Some(1)) else { return };
    let Some(mut collector) = collector(with_endpoints(&cable.near)) else { return };
    if collector.tracing().and_then(|tracing| tracing.tcp()).is_none() {
        harmonaize_testkit::strict::skip_test(format_args!(
            "this kernel does not show its sockets: {:?}",
            collector.missing()
        ));
        return;
    }
    attach(&mut collector, &cable.near);
    for address in [FAR, "fd09::2"] {
        let mut connection = Connection::open(&cable.near, &cable.far, address);
        let mut smoothed = Vec::new();
        let mut taken = 0;
        for _ in 0..40 {
            connection.sender.write_all(b"?").unwrap();
            connection.receiver.read_exact(&mut [0]).unwrap();
            // What the path would take; the acknowledgement goes with the answer once both sides have seen a few.
            std::thread::sleep(Duration::from_millis(20));
            connection.receiver.write_all(b"!").unwrap();
            connection.sender.read_exact(&mut [0]).unwrap();
            let trips = connection.flow(&mut collector).1.egress.rtt;
            for _ in taken..trips.count {
                let last = trips.last_ns as f64;
                smoothed.push(smoothed.last().map_or(last, |before: &f64| before + (last - before) / 8.0));
            }
            taken = trips.count;
        }
        let (key, flow) = connection.flow(&mut collector);
        let mut endpoints = Endpoints::default();
        collector.read_endpoints(&mut endpoints).unwrap();
        let socket = *endpoints.socket(&key).unwrap();
        let kernels = socket.srtt_ns as f64;
        let near = smoothed.iter().rev().take(2).map(|own| (own - kernels).abs() / kernels);
        let off = near.fold(f64::INFINITY, f64::min);
        eprintln!("{address}: the kernel's {kernels} ns, from packets {:?}", smoothed.last());
        assert!(off < 0.1, "the kernel's {kernels} ns, from packets {smoothed:?}");
        let least = flow.egress.rtt.min_ns;
        // A packet crosses the interface after it has left the socket, and before it comes in there.
        assert!(least <= socket.min_rtt_ns + 2000, "{least} {socket:?}");
        // The last answer was not taken in yet; SYN counts as a byte.
        assert!((40..=41).contains(&socket.acknowledged) && socket.received == 39, "{socket:?}");
        assert_eq!((socket.retransmissions, socket.state, socket.user), (0, 1, 0));
        assert!(socket.congestion_window > 0 && socket.samples > 40);
    }
    // The other ends are in a namespace that was not asked for.
    let mut endpoints = Endpoints::default();
    collector.read_endpoints(&mut endpoints).unwrap();
    assert_eq!(endpoints.sockets.len(), 2, "{endpoints:?}");
    assert_eq!((endpoints.losses.sockets, endpoints.losses.sockets_unplaced), (2, 0));
}

/// Whether an interface has a program on XDP.
fn has_xdp(side: &Namespace) -> bool {
    let said = side.enter(|| Command::new("ip").args(["link", "show", "wire"]).output()).unwrap().unwrap();
    String::from_utf8(said.stdout).unwrap().contains("xdp")
}

#[test]
fn packets_before_the_stack_equal_the_interfaces() {
    let Some(cable) = Cable::lay(Some(1)) else { return };
    let Some(mut first) = collector(Options { xdp: true, ..Options::default() }) else { return };
    let index = attach(&mut first, &cable.near);
    assert!(has_xdp(&cable.near));
    let mut connections = [FAR, "fd09::2"].map(|address| {
        Connection::open(
            &cable.far,
            &cable.near,
            match address {
                FAR => NEAR,
                _ => "fd09::1",
            },
        )
    });
    for connection in &mut connections {
        connection.send(2_000_000);
    }
    for connection in &connections {
        let port = connection.sender.local_addr().unwrap().port();
        let mut flows = Flows::default();
        wait("every segment that the peer has sent is counted", || {
            first.read_flows(&mut flows).unwrap();
            let (_, flow) = flows.tcp.iter().find(|(key, _)| key.remote_port == port).unwrap();
            flow.ingress.traffic.packets == u64::from(connection.sent().1)
        });
        let (_, flow) = flows.tcp.iter().find(|(key, _)| key.remote_port == port).unwrap();
        assert!(flow.egress.traffic.packets > 1 && flow.egress.rtt.count > 0, "{flow:?}");
        assert_eq!(flow.ingress.retransmissions, u64::from(connection.sent().0));
    }
    // Nobody's place is taken.
    let mut second = collector(Options { xdp: true, ..Options::default() }).unwrap();
    let error = cable.near.enter(|| second.attach("wire")).unwrap().unwrap_err();
    assert!(matches!(error, Error::Attach { .. }), "{error}");
    assert!(first.totals(index).unwrap().ingress.tcp > 2000);
    cable.near.enter(|| first.detach("wire")).unwrap().unwrap();
    assert!(!has_xdp(&cable.near));
    wait_until_clean(&cable.near);
}
