//! Faults of real devices under links between two agents' transports. Each ends in an error that says which and what to
//! do, in time, and what works again is used again.

use crate::alone;
use crate::host::{Host, Limited, PATIENCE, may_break};
use harmonaize_abi::Tag;
use harmonaize_libibverbs::host_devices;
use harmonaize_shm::{Memory, Span};
use harmonaize_transport::verbs::{Config, SetupError, VerbsTransport};
use harmonaize_transport::{DownReason, Event, Introduction, Landing, LinkId, Ring, Transport, tcp};
use harmonaize_verbs::{PortOptions, VerbsError};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const HOSTS: [Host; 2] = [Host(2), Host(3)];
const SLOT: u32 = 1 << 16;
const SLOTS: u32 = 8;

/// After so long without a sign of life a peer is given up.
const PEER: Duration = Duration::from_secs(6);

fn config(host: Host) -> Config {
    let tcp = tcp::Config {
        connect_timeout: Duration::from_secs(8),
        peer_timeout: PEER,
        ..tcp::Config::new(SocketAddr::from((host.address(), 0)))
    };
    Config { devices: vec![host.device()], ..Config::new(tcp) }
}

fn config_with(host: Host, requested: PortOptions) -> Config {
    Config { options: requested, ..config(host) }
}

fn bind(config: Config) -> Result<VerbsTransport, SetupError> {
    VerbsTransport::bind(config, &host_devices())
}

/// Two ends, and what they have seen.
struct Ends {
    ends: [VerbsTransport; 2],
    sent: u32,
    received: [u32; 2],
    up: [bool; 2],
    down: [Option<DownReason>; 2],
    links: [Option<LinkId>; 2],
    name: u8,
}

impl Ends {
    fn new(configs: [Config; 2]) -> Self {
        let ends = configs.map(|config| bind(config).unwrap());
        let (received, up, down, links) = ([0; 2], [false; 2], [None, None], [None; 2]);
        Self { ends, sent: 0, received, up, down, links, name: 0 }
    }

    fn usual() -> Self {
        Self::new(HOSTS.map(config))
    }

    /// Starts a link, with rings at both ends; what came of it.
    fn open(&mut self) -> Result<(), DownReason> {
        self.name += 1;
        (self.up, self.down, self.sent, self.received) = ([false; 2], [None, None], 0, [0; 2]);
        let addresses = [0, 1].map(|at: usize| self.ends[at].local_address());
        for at in 0..2 {
            let introduction = Introduction {
                name: [self.name; 16],
                secret: [7; 32],
                peer: addresses[1 - at],
                initiate: at == 0,
                source_ports: vec![0, 50_000],
                over_tcp: false,
            };
            let link = self.ends[at].open(introduction)?;
            let memory = span(SLOT * SLOTS);
            self.ends[at].attach_ring(link, 1, Ring { memory, slot_bytes: SLOT, slots: SLOTS })?;
            self.links[at] = Some(link);
        }
        Ok(())
    }

    /// A link that is up.
    fn connect(&mut self) {
        self.open().unwrap();
        self.until("the link is not up", |ends| ends.up == [true; 2]);
    }

    fn run_once(&mut self) {
        for at in 0..2 {
            let Self { ends, received, up, down, links, .. } = self;
            ends[at].progress(64, &mut |link, event| {
                if Some(link) != links[at] {
                    return;
                }
                match event {
                    Event::Up => up[at] = true,
                    Event::Received { .. } => received[at] += 1,
                    Event::Sent { .. } | Event::Completed { .. } => {}
                    Event::Down { reason } => down[at] = Some(reason),
                }
            });
        }
    }

    fn until(&mut self, wrong: &str, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            self.run_once();
            assert!(Instant::now() < deadline, "{wrong}: {:?}, {:?} frames", self.down, self.received);
        }
    }

    /// Sends frames of a whole slot from the first end to the second, one after the other. It goes on until `done`, or until
    /// the link is down there.
    fn stream(&mut self, done: impl Fn(&Self) -> bool) {
        let (source, deadline) = (span(SLOT), Instant::now() + PATIENCE);
        while self.down[0].is_none() && !done(self) {
            self.run_once();
            if self.sent - self.received[1] < SLOTS / 2
                && let Some(link) = self.links[0]
            {
                let payload = (Landing { ring: 1, sequence: self.sent }, source.clone(), Tag(1));
                if self.ends[0].send(link, (self.sent % 2) as u16, b"frame", Some(payload)).is_ok() {
                    self.sent += 1;
                }
            }
            assert!(Instant::now() < deadline, "neither done nor down: {:?}", self.received);
        }
    }

    fn works(&mut self) {
        self.connect();
        self.stream(|ends| ends.received[1] >= 20);
        assert_eq!(self.down, [None, None]);
        self.close();
    }

    fn close(&mut self) {
        for at in 0..2 {
            if let Some(link) = self.links[at].take() {
                self.ends[at].close(link);
            }
        }
    }

    fn both_down(&mut self) -> [DownReason; 2] {
        self.until("an end is not down", |ends| ends.down.iter().all(Option::is_some));
        self.down.clone().map(Option::unwrap)
    }
}

fn span(bytes: u32) -> Span {
    Span::new(&Memory::private(bytes as usize).unwrap(), 0, bytes.into()).unwrap()
}

fn assert_mentions(reason: &impl std::fmt::Display, words: &[&str]) {
    let text = reason.to_string();
    println!("  {text}");
    assert!(words.iter().all(|word| text.contains(word)), "{text} has not all of {words:?}");
}

/// An index without an entry is refused when the agent starts, with those that there are. One of another network is
/// refused when the link is made, at both ends, before anything is sent.
#[test]
fn a_wrong_gid_index_is_named() {
    let _alone = alone();
    if !may_break(4) {
        return;
    }
    let error = bind(config_with(HOSTS[0], PortOptions { gid_index: Some(200), ..PortOptions::default() }))
        .unwrap_err();
    assert!(matches!(error, SetupError::Verbs(VerbsError::NoSuchGid { index: 200, port: 1, .. })), "{error}");
    assert_mentions(&error, &["GID index 200 of rxe2 port 1 is empty", "used are: [0, 1]"]);
    let mut ends = Ends::new([
        config_with(HOSTS[0], PortOptions { gid_index: Some(0), ..PortOptions::default() }),
        config(HOSTS[1]),
    ]);
    ends.open().unwrap();
    for reason in ends.both_down() {
        assert_mentions(&reason, &["gid_index", "fe80::", "::ffff:10.0.0.4"]);
    }
}

/// An MTU that no packet can have, and one that the port has not, are refused when the agent starts. One that a switch on
/// the way drops ends the link with an error that says so.
#[test]
fn a_wrong_mtu_is_named() {
    let _alone = alone();
    if !may_break(4) {
        return;
    }
    let error =
        bind(config_with(HOSTS[0], PortOptions { mtu: Some(1500), ..PortOptions::default() })).unwrap_err();
    assert_mentions(&error, &["1500", "256, 512, 1024, 2048 or 4096"]);
    let narrow = HOSTS[0].link_mtu(1500);
    let error =
        bind(config_with(HOSTS[0], PortOptions { mtu: Some(4096), ..PortOptions::default() })).unwrap_err();
    assert_mentions(&error, &["an MTU of 4096 is over the 1024 of rxe2 port 1", "lower it"]);
    Ends::usual().works();
    narrow.mend();

    let quick = |host| config_with(host, PortOptions { retries: 2, timeout: 14, ..PortOptions::default() });
    let dropping = HOSTS[1].narrow(1500);
    let mut ends = Ends::new(HOSTS.map(quick));
    ends.connect();
    ends.stream(|_| false);
    let [reason, _] = ends.both_down();
    assert_mentions(&reason, &["retry counter exceeded", "packets of 4096 bytes", "`mtu`"]);
    let low = |host| config_with(host, PortOptions { mtu: Some(1024), ..PortOptions::default() });
    Ends::new(HOSTS.map(low)).works();
    dropping.mend();
}

/// Under frames in flight a port goes down. Both ends know it in time. While it is down, a new link is refused with the
/// reason. Once it is back, the same endpoints work again.
#[test]
fn a_port_serves_again_after_going_down() {
    let _alone = alone();
    if !may_break(4) {
        return;
    }
    for (at, host) in HOSTS.into_iter().enumerate() {
        let mut ends = Ends::usual();
        ends.connect();
        ends.stream(|ends| ends.received[1] >= 5);
        let broken = host.link_down();
        ends.stream(|_| false);
        let reasons = ends.both_down();
        for reason in &reasons {
            assert!(matches!(reason, DownReason::Network(_) | DownReason::Closed), "{reason:?}");
        }
        // The end at the port that is down says so; the other cannot know.
        let device = host.device();
        assert_mentions(&reasons[at], &[&device, "is DOWN, not ACTIVE"]);
        let refused =
            ends.open().map(|()| ends.until("the link is not down", |ends| ends.down[at].is_some()));
        let reason = refused.err().or(ends.down[at].clone()).unwrap();
        assert!(matches!(reason, DownReason::Connect(_)), "{reason:?}");
        assert_mentions(&reason, &[&device, "is DOWN, not ACTIVE"]);
        ends.close();
        broken.mend();
        ends.works();
    }
}

/// The kernel takes a device away and waits until it is closed, and the driver says nothing. The ends notice, close it, and
/// open it anew once it is back.
#[test]
fn a_removed_device_ends_its_links() {
    let _alone = alone();
    if !may_break(4) {
        return;
    }
    // Dropped after the ends, whatever happens: mending waits until these have closed the device.
    let mut broken;
    let mut ends = Ends::usual();
    ends.connect();
    ends.stream(|ends| ends.received[1] >= 5);
    broken = HOSTS[0].remove_device();
    ends.stream(|_| false);
    let [reason, there] = ends.both_down();
    assert_eq!(reason, DownReason::DeviceGone("rxe2".to_owned()));
    assert!(matches!(there, DownReason::Network(_) | DownReason::Closed), "{there:?}");
    broken.wait_until_removed();
    let Err(DownReason::Connect(reason)) = ends.open() else { panic!("a link on no device") };
    assert_mentions(&reason, &["no RDMA device rxe2", "rxe3"]);
    ends.close();
    broken.mend();
    ends.works();
}

/// A control group's limit on a device's objects stands for its own, which no guest has the memory to reach.
#[test]
fn exhausted_queue_pairs_are_named() {
    let _alone = alone();
    if !may_break(4) {
        return;
    }
    let mut ends = Ends::usual();
    // Of both ends: two domains, and then a mailbox's region, its completion queue, and no queue pair.
    let limited = Limited::objects("rxe2", 3);
    let mut found = ends.open().err();
    if found.is_none() {
        found = Some(ends.both_down()[0].clone());
    }
    assert_mentions(&found.unwrap(), &["rxe2", "rdma.max"]);
    ends.close();
    drop(limited);
    ends.works();
}
