//! Attachments over RDMA on the fake fabric. The tests cover what travels, who may do what, and what a breach or a loss
//! costs whom.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::session::{Offer, PairEnd, Registered, Succession};
use harmonaize_abi::{ABI_VERSION, Completion, Submission, Tag};
use harmonaize_shm::{AgentEnd, Breach, EndError, Memory, Span, TenantEnd};
use harmonaize_verbs::attachment::{AgentOffer, RdmaEnd, RdmaTenant, Rejoin, TenantOffer};
use harmonaize_verbs::fake::{Fabric, Fault};
use harmonaize_verbs::{
    Access, Call, CompletionQueue, Connected, Depths, Domain, Endpoint, Function, Gid, Local, Mtu,
    PortOptions, QueuePair, Region, RemoteAddress, Status, VerbsError, Work,
};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};
use std::net::Ipv4Addr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

const ARENA: u64 = 1 << 20;
const AGENT: Ipv4Addr = Ipv4Addr::new(192, 168, 7, 1);
const HOST: Ipv4Addr = Ipv4Addr::new(192, 168, 7, 2);

type Forge = fn(Offer, Offer) -> Offer;
type Reach = fn(&Hostile, PairEnd) -> Work;

struct Lab {
    fabric: Fabric,
    agent: Function,
    host: Function,
}

struct Pair {
    agent: RdmaEnd,
    tenant: RdmaTenant,
    life: OwnedFd,
}

fn life() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap()
}

impl Lab {
    fn new() -> Self {
        let fabric = Fabric::new();
        fabric.add("dpu", AGENT).unwrap();
        fabric.add("host", HOST).unwrap();
        let open = |address: Ipv4Addr| {
            Function::open(&fabric.devices(), &PortOptions::default(), Some(address.into())).unwrap()
        };
        Self { agent: open(AGENT), host: open(HOST), fabric }
    }

    fn attach(&self, entries: u32) -> Pair {
        self.attach_with(entries, |offer| offer)
    }

    /// With the tenant's word changed on its way.
    fn attach_with(&self, entries: u32, change: impl FnOnce(Offer) -> Offer) -> Pair {
        let agent = AgentOffer::new(&self.agent, ARENA, entries).unwrap();
        let tenant = TenantOffer::new(&self.host, ARENA, entries).unwrap();
        let (end, offer) = (agent.end(), change(tenant.offer()));
        let (ours, life) = life();
        Pair { agent: agent.connect(&offer, ours).unwrap(), tenant: tenant.connect(&end).unwrap(), life }
    }
}

impl Lab {
    /// Another process takes the agent's end over, and the one before ends. What joins it to the tenant's.
    fn succeed(&self, pair: &mut Pair) -> Rejoin {
        let offer = AgentOffer::new(&self.agent, ARENA, pair.agent.entries()).unwrap();
        let (heir, rejoin) = offer.succeed().unwrap();
        pair.agent = heir.inherit(pair.agent.hand_over().unwrap()).unwrap();
        rejoin
    }
}

fn submission(cookie: u64) -> Submission {
    Submission { version: ABI_VERSION, cookie, count: 3 * cookie, ..Submission::default() }
}

fn completion(cookie: u64) -> Completion {
    Completion { version: ABI_VERSION, cookie, ..Completion::default() }
}

impl Pair {
    fn received(&mut self) -> Result<Option<Submission>, EndError> {
        self.agent.progress(&mut |_| panic!("no transfer"))?;
        self.agent.submission()
    }

    fn complete(&mut self, cookie: u64) {
        self.agent.complete(&completion(cookie)).unwrap();
        self.agent.flush().unwrap();
    }

    fn completed(&mut self) -> Option<u64> {
        self.tenant.progress().unwrap();
        self.tenant.completion().unwrap().map(|completion| completion.cookie)
    }

    /// A whole operation.
    fn works(&mut self, cookie: u64) {
        self.tenant.submit(&submission(cookie)).unwrap();
        assert_eq!(self.received().unwrap(), Some(submission(cookie)));
        self.complete(cookie);
        assert_eq!(self.completed(), Some(cookie));
    }

    /// The tenant hears of the successor, and comes to it.
    fn rejoin(&mut self, ours: Rejoin) {
        let connect = Succession::Connect { end: ours.end(), taken: ours.taken().unwrap() };
        let (offer, arrived) = self.tenant.succeed(&connect).unwrap().unwrap();
        ours.join(&offer, arrived).unwrap();
        assert_eq!(self.tenant.succeed(&Succession::Connected).unwrap(), None);
    }

    fn fetched(&mut self, tag: u64, into: &Span) -> Result<Vec<u64>, EndError> {
        self.agent.fetch(Tag(tag), 0, into.clone())?;
        self.agent.flush()?;
        let mut done = Vec::new();
        self.agent.progress(&mut |tag| done.push(tag.0))?;
        self.agent.submission().map(|_| done)
    }
}

fn span(bytes: u64) -> Span {
    Span::new(&Memory::private(bytes as usize).unwrap(), 0, bytes).unwrap()
}

fn readable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

#[test]
fn operations_go_there_and_back() {
    let lab = Lab::new();
    let mut pair = lab.attach(4);
    assert_eq!((pair.agent.entries(), pair.tenant.entries(), pair.agent.arena_bytes()), (4, 4, ARENA));
    assert!(pair.agent.memory().is_none());
    assert_eq!(pair.received().unwrap(), None);
    (0..100).for_each(|cookie| pair.works(cookie));
}

#[test]
fn operations_complete_in_any_order_and_slots_are_never_written_early() {
    for seed in 1..=200_u64 {
        let lab = Lab::new();
        lab.fabric.stop_recording();
        let entries = 1 << (seed % 5);
        let mut pair = lab.attach(entries);
        let (mut random, mut next) = (seed, 0);
        let (mut sent, mut open) = (std::collections::VecDeque::new(), Vec::new());
        let mut out = Vec::new();
        let mut in_flight = 0;
        for _ in 0..2000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            match random >> 60 {
                0..=5 if in_flight < entries => {
                    pair.tenant.submit(&submission(next)).unwrap();
                    sent.push_back(next);
                    (next, in_flight) = (next + 1, in_flight + 1);
                }
                6..=9 => {
                    if let Some(got) = pair.received().unwrap() {
                        assert_eq!(Some(got.cookie), sent.pop_front(), "seed {seed}");
                        assert_eq!(got, submission(got.cookie), "seed {seed}");
                        open.push(got.cookie);
                    }
                }
                10..=12 if !open.is_empty() => {
                    let which = (random >> 32) as usize % open.len();
                    let cookie = open.swap_remove(which);
                    pair.complete(cookie);
                    out.push(cookie);
                }
                13.. => {
                    if let Some(cookie) = pair.completed() {
                        assert_eq!(cookie, out.remove(0), "seed {seed}");
                        in_flight -= 1;
                    }
                }
                _ => {}
            }
        }
        assert!(next > 50, "seed {seed}: {next} operations");
    }
}

#[test]
fn the_agent_reads_and_writes_the_arena() {
    let lab = Lab::new();
    let mut pair = lab.attach(4);
    pair.tenant.memory().write(5000, b"from the tenant").unwrap();
    let staging = Memory::private(1 << 16).unwrap();
    let at = |offset, bytes| Span::new(&staging, offset, bytes).unwrap();
    pair.agent.fetch(Tag(7), 5000, at(100, 15)).unwrap();
    pair.agent.fetch(Tag(8), ARENA - 1, at(200, 1)).unwrap();
    staging.write(300, b"from the agent").unwrap();
    pair.agent.store(Tag(9), at(300, 14), 9000).unwrap();
    // Nothing is on its way before the batch is posted.
    let mut done = Vec::new();
    while done.len() < 3 {
        pair.agent.progress(&mut |tag| done.push(tag.0)).unwrap();
    }
    assert_eq!(done, [7, 8, 9]);
    let mut seen = [0; 15];
    staging.read(100, &mut seen).unwrap();
    assert_eq!(&seen, b"from the tenant");
    pair.tenant.memory().read(9000, &mut seen[..14]).unwrap();
    assert_eq!(&seen[..14], b"from the agent");

    for (offset, bytes) in [(ARENA, 1), (ARENA - 1, 2), (u64::MAX, 1)] {
        let error = pair.agent.fetch(Tag(1), offset, at(0, bytes)).unwrap_err();
        assert!(matches!(error, EndError::Memory(_)) && error.is_transient(), "{error}");
        assert!(matches!(pair.agent.store(Tag(1), at(0, bytes), offset), Err(EndError::Memory(_))));
    }
    pair.works(1);
}

#[test]
fn as_many_transfers_as_there_is_room_for() {
    let lab = Lab::new();
    let mut pair = lab.attach(1);
    let into = span(64);
    let mut taken = 0;
    while pair.agent.fetch(Tag(taken), 64 * taken, into.clone()).is_ok() {
        taken += 1;
    }
    assert!(matches!(pair.agent.fetch(Tag(0), 0, into.clone()), Err(EndError::Full)));
    let mut done = Vec::new();
    while (done.len() as u64) < taken {
        pair.agent.progress(&mut |tag| done.push(tag.0)).unwrap();
    }
    assert_eq!(done, (0..taken).collect::<Vec<_>>());
    pair.agent.fetch(Tag(0), 0, into).unwrap();
}

#[test]
fn sleepers_wake() {
    let lab = Lab::new();
    let mut pair = lab.attach(4);
    for round in 0..3 {
        assert!(pair.agent.prepare_sleep() && !readable(pair.agent.wake_fd()));
        pair.tenant.submit(&submission(round)).unwrap();
        assert!(readable(pair.agent.wake_fd()));
        pair.agent.cancel_sleep(true);
        assert!(!readable(pair.agent.wake_fd()), "round {round}");
        // What has arrived keeps it awake.
        assert!(!pair.agent.prepare_sleep());
        pair.agent.cancel_sleep(true);
        assert!(pair.received().unwrap().is_some());

        assert!(pair.tenant.prepare_sleep() && !readable(pair.tenant.wake_fd()));
        pair.complete(round);
        assert!(readable(pair.tenant.wake_fd()));
        pair.tenant.cancel_sleep();
        assert_eq!(pair.completed(), Some(round));
    }
    lab.fabric.hold("dpu");
    pair.agent.fetch(Tag(1), 0, span(64)).unwrap();
    assert!(!pair.agent.prepare_sleep(), "the fetch was not posted");
    pair.agent.cancel_sleep(true);
    assert!(pair.agent.prepare_sleep() && !readable(pair.agent.wake_fd()));
    lab.fabric.release("dpu");
    assert!(readable(pair.agent.wake_fd()));
}

#[test]
fn forged_keys_cost_the_forger_its_attachment_alone() {
    let lab = Lab::new();
    let mut honest = lab.attach(4);
    let stranger = TenantOffer::new(&lab.host, ARENA, 4).unwrap();
    let forgeries: [(&str, Forge); 4] = [
        ("no such key", |offer, _| Offer { arena: Registered { rkey: 0xdead, ..offer.arena }, ..offer }),
        ("another's arena", |offer, other| Offer { arena: other.arena, ..offer }),
        ("its mailbox as arena", |offer, _| Offer { arena: offer.end.mailbox, ..offer }),
        ("an address at the end", |offer, _| Offer {
            arena: Registered { address: u64::MAX - 8, ..offer.arena },
            ..offer
        }),
    ];
    for (name, forge) in forgeries {
        let mut pair = lab.attach_with(4, |offer| forge(offer, stranger.offer()));
        // Fetches cannot read a mailbox, stores cannot write a stranger's arena: whichever is tried fails.
        let error = pair.fetched(1, &span(1 << 16)).unwrap_err();
        assert!(matches!(&error, EndError::Rdma(why) if why.contains("remote access")), "{name}: {error}");
        assert!(matches!(pair.agent.submission(), Err(EndError::Rdma(_))), "{name}");
        drop(pair.agent);
        let mut byte = [0; 1];
        let end = recv(&pair.life, &mut byte[..], RecvFlags::DONTWAIT);
        assert!(matches!(end, Ok((_, 0))), "{name}: the tenant is not told: {end:?}");
        honest.works(3);
    }
    let mut pair = lab.attach_with(4, |offer| {
        let mailbox = Registered { rkey: 0xdead, ..offer.end.mailbox };
        Offer { end: PairEnd { mailbox, ..offer.end }, ..offer }
    });
    pair.tenant.submit(&submission(1)).unwrap();
    assert!(pair.received().unwrap().is_some());
    pair.complete(1);
    assert!(matches!(pair.received(), Err(EndError::Rdma(_))));
    honest.works(4);
}

#[test]
fn nonsense_in_an_offer_is_refused() {
    let lab = Lab::new();
    let changes: [fn(&mut PairEnd); 4] =
        [|end| end.mtu = 1500, |end| end.queue_pair = 1 << 24, |end| end.psn = u32::MAX, |end| end.mtu = 0];
    for change in changes {
        let agent = AgentOffer::new(&lab.agent, ARENA, 4).unwrap();
        let mut offer = TenantOffer::new(&lab.host, ARENA, 4).unwrap().offer();
        change(&mut offer.end);
        let (ours, theirs) = life();
        agent.connect(&offer, ours).unwrap_err();
        assert!(matches!(recv(&theirs, &mut [0; 1][..], RecvFlags::DONTWAIT), Ok((_, 0))), "still open");
    }
}

#[test]
fn leaving_or_deregistering_mid_operation_ends_the_attachment() {
    let lab = Lab::new();
    let mut honest = lab.attach(4);
    let mut pair = lab.attach(4);
    lab.fabric.hold("dpu");
    pair.agent.fetch(Tag(1), 0, span(1 << 16)).unwrap();
    pair.agent.flush().unwrap();
    drop(pair.tenant);
    lab.fabric.release("dpu");
    let mut done = Vec::new();
    pair.agent.progress(&mut |tag| done.push(tag.0)).unwrap();
    assert!(matches!(pair.agent.submission(), Err(EndError::Rdma(_))));
    assert_eq!(done, [] as [u64; 0]);
    honest.works(1);
}

/// A tenant that speaks to its queue pair itself.
struct Hostile {
    pair: QueuePair<Connected>,
    queue: Arc<CompletionQueue>,
    region: Arc<Region>,
    agent: RdmaEnd,
    end: PairEnd,
}

impl Hostile {
    fn new(lab: &Lab, entries: u32) -> Self {
        let agent = AgentOffer::new(&lab.agent, ARENA, entries).unwrap();
        let domain = Domain::create(&lab.host.device).unwrap();
        let queue = CompletionQueue::create(&lab.host.device, 256).unwrap();
        let memory = Memory::private(1 << 16).unwrap();
        let region = Region::register(&domain, &memory, Access::REMOTE).unwrap();
        let depths = Depths { sends: 64, receives: 64, inline_bytes: 0 };
        let pair = QueuePair::create(&domain, &queue, depths, lab.host.path).unwrap();
        let Endpoint { number, psn, gid, mtu, lid, reads } = pair.endpoint();
        let all = Registered { address: region.address(), rkey: region.rkey() };
        let mtu = mtu.bytes() as u16;
        let ours = PairEnd { queue_pair: number, psn, gid: gid.0, mtu, lid, reads, mailbox: all };
        let end = agent.end();
        let remote = Endpoint {
            number: end.queue_pair,
            psn: end.psn,
            gid: Gid(end.gid),
            mtu: Mtu::from_bytes(end.mtu.into()).unwrap(),
            lid: end.lid,
            reads: end.reads,
        };
        let agent = agent.connect(&Offer { end: ours, arena: all }, life().0).unwrap();
        Self { pair: pair.connect(&remote).unwrap(), queue, region, agent, end }
    }

    fn local(&self, bytes: u64) -> Local {
        Local::new(&self.region, Span::new(self.region.memory(), 0, bytes).unwrap()).unwrap()
    }

    fn mailbox(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { address: self.end.mailbox.address + offset, rkey: self.end.mailbox.rkey }
    }

    fn post(&mut self, work: Work) -> Option<Status> {
        self.pair.post(&mut vec![work.signalled()]).unwrap();
        let mut found = Vec::new();
        self.queue.poll(&mut found, 64).unwrap();
        found.last().map(|completion| completion.status())
    }

    fn agents_view(&mut self) -> Result<Option<Submission>, EndError> {
        self.agent.progress(&mut |_| {})?;
        self.agent.submission()
    }
}

#[test]
fn a_message_out_of_turn_is_a_breach() {
    let lab = Lab::new();
    for first in [1, u32::MAX] {
        let mut hostile = Hostile::new(&lab, 4);
        let work = Work::write_with_immediate(hostile.local(128), hostile.mailbox(0), first);
        hostile.post(work);
        assert!(matches!(hostile.agents_view(), Err(EndError::Protocol(_))));
    }
}

#[test]
fn more_operations_than_entries_are_a_breach() {
    let lab = Lab::new();
    let mut hostile = Hostile::new(&lab, 4);
    for number in 0..5 {
        let slot = 128 * u64::from(number % 4);
        let work = Work::write_with_immediate(hostile.local(128), hostile.mailbox(slot), number);
        assert_eq!(hostile.post(work), Some(Status::Success));
        let seen = hostile.agents_view();
        match number {
            4 => assert!(matches!(seen, Err(EndError::Protocol(_))), "{seen:?}"),
            _ => assert!(matches!(seen, Ok(Some(_))), "{seen:?}"),
        }
    }
}

#[test]
fn a_tenant_reaches_nothing_at_the_agent_but_its_mailbox() {
    let lab = Lab::new();
    let mut other = lab.attach(4);
    let others_end = AgentOffer::new(&lab.agent, ARENA, 4).unwrap().end();
    let reaching: [(&str, Reach); 5] = [
        ("before the mailbox", |h, _| {
            let before = RemoteAddress { address: h.end.mailbox.address - 64, rkey: h.end.mailbox.rkey };
            Work::write(h.local(128), before)
        }),
        ("behind the mailbox", |h, _| Work::write(h.local(128), h.mailbox(4 * 128 - 64))),
        ("reading the mailbox", |h, _| Work::read(h.local(128), h.mailbox(0))),
        ("another's mailbox", |h, other| {
            let theirs = RemoteAddress { address: other.mailbox.address, rkey: other.mailbox.rkey };
            Work::write(h.local(128), theirs)
        }),
        ("all keys near it", |h, _| {
            Work::write(h.local(128), RemoteAddress { rkey: h.end.mailbox.rkey + 1, ..h.mailbox(0) })
        }),
    ];
    for (name, reach) in reaching {
        let mut hostile = Hostile::new(&lab, 4);
        // So that the staging is registered too.
        hostile.agent.fetch(Tag(1), 0, span(4096)).unwrap();
        hostile.agent.flush().unwrap();
        let work = reach(&hostile, others_end);
        assert_eq!(hostile.post(work), Some(Status::RemoteAccess), "{name}");
        other.works(9);
    }
}

#[test]
fn what_the_agent_cannot_register_is_said() {
    let lab = Lab::new();
    let mut honest = lab.attach(4);
    let mut pair = lab.attach(4);
    lab.fabric.inject("dpu", Fault::Fail(Call::Register, rustix::io::Errno::NOMEM));
    let error = pair.agent.fetch(Tag(1), 0, span(64)).unwrap_err();
    assert!(error.to_string().contains("RLIMIT_MEMLOCK") && !error.is_transient(), "{error}");
    honest.works(1);
    lab.fabric.inject("host", Fault::Fail(Call::Register, rustix::io::Errno::NOMEM));
    let error = TenantOffer::new(&lab.host, ARENA, 4).unwrap_err();
    assert!(matches!(error, VerbsError::Memlock { .. }), "{error}");
    lab.fabric.inject("dpu", Fault::NoQueuePairsLeft);
    let error = AgentOffer::new(&lab.agent, ARENA, 4).unwrap_err();
    assert!(matches!(error, VerbsError::QueuePairsExhausted { .. }), "{error}");
}

#[test]
fn staging_that_nobody_uses_is_let_go() {
    let lab = Lab::new();
    let mut pair = lab.attach(4);
    let staging = Memory::private(4096).unwrap();
    pair.fetched(1, &Span::new(&staging, 0, 64).unwrap()).unwrap();
    let gone = |lab: &Lab| {
        lab.fabric.take_calls("dpu").iter().filter(|recorded| recorded.call == Call::Deregister).count()
    };
    pair.agent.prepare_sleep();
    pair.agent.cancel_sleep(true);
    assert_eq!(gone(&lab), 0, "the staging is in use");
    drop(staging);
    pair.agent.prepare_sleep();
    assert_eq!(gone(&lab), 1);
}

#[test]
fn a_lost_device_ends_its_attachments() {
    let lab = Lab::new();
    let mut pair = lab.attach(4);
    lab.fabric.inject("dpu", Fault::DeviceLost);
    let seen = pair.agent.progress(&mut |_| {}).and_then(|_| pair.agent.submission());
    assert!(seen.is_err());
    drop(pair.agent);
    assert!(matches!(recv(&pair.life, &mut [0; 1][..], RecvFlags::DONTWAIT), Ok((_, 0))));
}

#[test]
fn functions_are_found_or_asked_for() {
    let lab = Lab::new();
    let devices = lab.fabric.devices();
    let open = |wanted: &PortOptions, address| {
        Function::open(&devices, wanted, address).map(|f| f.device.name().to_owned())
    };
    let named = |name: &str| PortOptions { device: Some(name.into()), ..PortOptions::default() };
    assert_eq!(open(&PortOptions::default(), Some(HOST.into())).unwrap(), "host");
    assert_eq!(open(&named("dpu:1"), Some(HOST.into())).unwrap(), "dpu");
    let active = ["dpu:1", "host:1"].map(str::to_owned).to_vec();
    let error = open(&PortOptions::default(), None).unwrap_err();
    assert_eq!(error, VerbsError::WhichDevice { active });
    lab.fabric.inject("dpu", Fault::PortDown);
    assert_eq!(open(&PortOptions::default(), None).unwrap(), "host");
    assert!(matches!(open(&named("dpu"), None), Err(VerbsError::PortDown { .. })));
    assert!(open(&named("host:x"), None).is_err() && open(&named("host:2"), None).is_err());
    assert!(open(&PortOptions { mtu: Some(1500), ..named("host") }, None).is_err());
}

/// Agents succeed each other at any moment, and also while the tenant has not come to the one before. Each operation is taken once and
/// completes once, in its turn.
#[test]
fn a_succession_loses_no_operation_and_repeats_none() {
    for seed in 1..=200_u64 {
        let lab = Lab::new();
        lab.fabric.stop_recording();
        let entries = 1 << (seed % 5);
        let mut pair = lab.attach(entries);
        let (mut random, mut next, mut in_flight, mut ended) = (seed, 0, 0, 0);
        let (mut sent, mut open) = (std::collections::VecDeque::new(), Vec::new());
        let (mut out, mut rejoin) = (std::collections::VecDeque::new(), None);
        for _ in 0..4000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            match random >> 60 {
                0..=4 if in_flight < entries => {
                    pair.tenant.submit(&submission(next)).unwrap();
                    sent.push_back(next);
                    (next, in_flight) = (next + 1, in_flight + 1);
                }
                5..=7 => {
                    if let Some(got) = pair.received().unwrap() {
                        assert_eq!(Some(got.cookie), sent.pop_front(), "seed {seed}");
                        assert_eq!(got, submission(got.cookie), "seed {seed}");
                        open.push(got.cookie);
                    }
                }
                8..=10 if !open.is_empty() => {
                    let cookie = open.swap_remove((random >> 32) as usize % open.len());
                    pair.complete(cookie);
                    out.push_back(cookie);
                }
                11..=12 => {
                    if let Some(cookie) = pair.completed() {
                        assert_eq!(Some(cookie), out.pop_front(), "seed {seed}");
                        (in_flight, ended) = (in_flight - 1, ended + 1);
                    }
                }
                13 if (random >> 58) & 3 == 0 => {
                    pair.tenant.succeed(&Succession::Begins).unwrap();
                    rejoin = Some(lab.succeed(&mut pair));
                }
                14 => {
                    if let Some(ours) = rejoin.take() {
                        pair.rejoin(ours);
                    }
                }
                _ => {}
            }
        }
        assert!(ended > 20, "seed {seed}: {ended} operations");
    }
}

/// Results come where they did, and nothing goes to the tenant before it has come.
#[test]
fn tensors_are_read_and_written_by_a_successor() {
    let lab = Lab::new();
    let mut pair = lab.attach(4);
    pair.tenant.memory().write(0, b"before").unwrap();
    let into = span(6);
    assert_eq!(pair.fetched(1, &into).unwrap(), [1]);
    pair.agent.fetch(Tag(2), 0, into.clone()).unwrap();
    assert!(!pair.agent.rests() && pair.agent.hand_over().is_err(), "a transfer is under way");
    let mut done = Vec::new();
    while done.is_empty() {
        pair.agent.progress(&mut |tag| done.push(tag.0)).unwrap();
    }
    pair.tenant.succeed(&Succession::Begins).unwrap();
    assert!(!pair.agent.is_away(), "it has the tenant's queue pair");
    let ours = lab.succeed(&mut pair);
    assert!(matches!(pair.agent.fetch(Tag(3), 0, into.clone()), Err(EndError::Full)));
    assert!(pair.agent.is_away());
    assert_eq!(pair.received().unwrap(), None);
    assert!(pair.agent.prepare_sleep() && !readable(pair.agent.wake_fd()));
    pair.rejoin(ours);
    assert!(!pair.agent.is_away());
    assert!(readable(pair.agent.wake_fd()) && !pair.agent.prepare_sleep(), "the tenant has come");
    pair.agent.cancel_sleep(true);
    assert_eq!(pair.received().unwrap(), None);
    assert!(!pair.agent.is_away());
    assert!(pair.agent.prepare_sleep() && !readable(pair.agent.wake_fd()));
    pair.agent.cancel_sleep(false);
    pair.tenant.memory().write(0, b"behind").unwrap();
    assert_eq!(pair.fetched(4, &into).unwrap(), [4]);
    let mut seen = [0; 6];
    into.memory().read(0, &mut seen).unwrap();
    assert_eq!(&seen, b"behind");
    (0..20).for_each(|cookie| pair.works(cookie));
}

#[test]
fn a_lost_device_ends_an_attachment_whose_tenant_has_not_come() {
    let lab = Lab::new();
    let mut pair = lab.attach(4);
    pair.tenant.succeed(&Succession::Begins).unwrap();
    let _ours = lab.succeed(&mut pair);
    assert_eq!(pair.received().unwrap(), None);
    lab.fabric.inject("dpu", Fault::DeviceLost);
    assert!(!pair.agent.prepare_sleep());
    pair.agent.cancel_sleep(false);
    assert!(matches!(pair.received(), Err(EndError::Closed)));
}

#[test]
fn a_queue_pair_may_fail_before_the_tenant_hears_why() {
    let lab = Lab::new();
    let mut pair = lab.attach(4);
    pair.works(1);
    let ours = lab.succeed(&mut pair);
    pair.tenant.submit(&submission(2)).unwrap();
    let _ = pair.tenant.progress();
    assert!(pair.tenant.completion().is_err() && !pair.tenant.is_paused());
    pair.tenant.succeed(&Succession::Begins).unwrap();
    assert!(pair.tenant.is_paused());
    assert_eq!(pair.completed(), None);
    pair.tenant.submit(&submission(3)).unwrap();
    pair.rejoin(ours);
    assert!(!pair.tenant.is_paused());
    // What waited has gone.
    for cookie in [2, 3] {
        assert_eq!(pair.received().unwrap(), Some(submission(cookie)));
    }
    (4..20).for_each(|cookie| {
        pair.complete(cookie - 2);
        assert_eq!(pair.completed(), Some(cookie - 2));
        pair.tenant.submit(&submission(cookie)).unwrap();
        assert_eq!(pair.received().unwrap(), Some(submission(cookie)));
    });
}

#[test]
fn a_succession_that_is_called_off_leaves_the_queue_pair_or_its_loss() {
    let lab = Lab::new();
    let mut pair = lab.attach(4);
    pair.tenant.succeed(&Succession::Begins).unwrap();
    drop(pair.agent.hand_over().unwrap());
    pair.works(1);
    pair.tenant.succeed(&Succession::CalledOff).unwrap();
    pair.works(2);
    pair.tenant.succeed(&Succession::Begins).unwrap();
    drop(lab.succeed(&mut pair));
    pair.tenant.submit(&submission(3)).unwrap();
    assert_eq!(pair.completed(), None);
    pair.tenant.succeed(&Succession::CalledOff).unwrap();
    pair.tenant.progress().unwrap();
    assert!(matches!(pair.tenant.completion(), Err(EndError::Closed)));
}

/// The agent that a tenant is on its way to is about to have a successor itself, and has none.
#[test]
fn a_succession_that_is_called_off_joins_nothing() {
    let lab = Lab::new();
    let mut pair = lab.attach(4);
    pair.tenant.succeed(&Succession::Begins).unwrap();
    let ours = lab.succeed(&mut pair);
    let connect = Succession::Connect { end: ours.end(), taken: ours.taken().unwrap() };
    let (offer, arrived) = pair.tenant.succeed(&connect).unwrap().unwrap();
    pair.tenant.succeed(&Succession::Begins).unwrap();
    pair.tenant.succeed(&Succession::CalledOff).unwrap();
    pair.tenant.submit(&submission(1)).unwrap();
    assert_eq!(pair.completed(), None);
    assert!(pair.tenant.is_paused(), "the agent has not joined its queue pair");
    ours.join(&offer, arrived).unwrap();
    pair.tenant.succeed(&Succession::Connected).unwrap();
    assert_eq!(pair.received().unwrap(), Some(submission(1)));
    pair.complete(1);
    assert_eq!(pair.completed(), Some(1));
    (2..20).for_each(|cookie| pair.works(cookie));
}

#[test]
fn counts_that_cannot_be_end_the_attachment() {
    let lab = Lab::new();
    let mut pair = lab.attach(4);
    pair.works(1);
    for taken in [2, u64::MAX] {
        let ours = lab.succeed(&mut pair);
        let error = pair.tenant.succeed(&Succession::Connect { end: ours.end(), taken }).unwrap_err();
        assert!(matches!(error, EndError::Protocol(Breach::MessageCount)), "{taken}: {error}");
    }
    for arrived in [2, u64::MAX] {
        let mut pair = lab.attach(4);
        pair.works(1);
        let ours = lab.succeed(&mut pair);
        let connect = Succession::Connect { end: ours.end(), taken: 1 };
        let (offer, _) = pair.tenant.succeed(&connect).unwrap().unwrap();
        ours.join(&offer, arrived).unwrap();
        let error = pair.received().unwrap_err();
        assert!(matches!(error, EndError::Protocol(Breach::MessageCount)), "{arrived}: {error}");
    }
}

/// An end of another size, or one that is mapped, is none to go on with.
#[test]
fn what_is_no_such_end_is_not_taken_over() {
    let lab = Lab::new();
    let mut pair = lab.attach(4);
    pair.works(1);
    let heir = |entries| AgentOffer::new(&lab.agent, ARENA, entries).unwrap().succeed().unwrap().0;
    assert!(heir(8).inherit(pair.agent.hand_over().unwrap()).is_err());
    let mut theirs = pair.agent.hand_over().unwrap();
    theirs.taken[0] = 9;
    assert!(heir(4).inherit(theirs).is_err());
    let mut theirs = pair.agent.hand_over().unwrap();
    theirs.descriptors.pop();
    assert!(heir(4).inherit(theirs).is_err());
    // An agent that knows mapped attachments alone refuses it.
    assert!(harmonaize_shm::MappedEnd::inherit(pair.agent.hand_over().unwrap(), &mut |_| None).is_err());
    assert_eq!(
        recv(&pair.life, &mut [0_u8; 1][..], RecvFlags::DONTWAIT).unwrap_err(),
        rustix::io::Errno::AGAIN
    );
    pair.works(2);
}
