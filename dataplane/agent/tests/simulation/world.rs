//! The world: hosts with agents, control, what happens to them, and what must hold.

use crate::control::{Control, LEASE};
use crate::faults::Fault;
use crate::host::{Host, Sizes};
use crate::links::Network;
use crate::tenant::{self, End, Script};
use crate::virtual_time;
use crate::wires::Wires;
use harmonaize_abi::session::JoinRefused;
use harmonaize_agent::session::{AttachmentId, SessionRequest};
use harmonaize_api::v1;
use harmonaize_api::v1::provider_client::ProviderClient;
use harmonaize_identity::{CONTROL, Protection, Remote};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt::Arguments;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::{sleep, timeout};

/// Who the operator is among those who connect.
const OPERATOR: usize = 1000;
/// How long an operation takes at most while nothing holds up messages and threads.
const GOES_ON: Duration = Duration::from_secs(2);
/// How long after the first rank the last may learn that it has joined.
const JOINED: Duration = Duration::from_secs(30);
/// When all is over at the latest.
const END: Duration = Duration::from_secs(1000);

/// What came of a seed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    pub(crate) operations: u64,
    pub(crate) failures: u64,
    pub(crate) refusals: u64,
    pub(crate) regroups: u64,
    pub(crate) slowest: Duration,
}

/// A rank's attachment, and what ends its process.
type Process = (AttachmentId, Option<AbortHandle>);

/// See the module's documentation.
pub(crate) struct World {
    pub(crate) random: RefCell<ChaCha8Rng>,
    pub(crate) network: Network,
    pub(crate) wires: Wires,
    pub(crate) control: tokio::sync::Mutex<Control>,
    hosts: RefCell<Vec<Rc<Host>>>,
    killed: RefCell<Vec<Rc<Host>>>,
    sizes: Sizes,
    attachments: Cell<u64>,
    /// Since when operations may fail, and why.
    harm: RefCell<Vec<(Instant, Fault)>>,
    /// How long engines and agents have stood still, in all.
    still: Cell<Duration>,
    sum: Cell<Sum>,
    notes: RefCell<Vec<String>>,
    /// How many ranks of a name and generation have joined.
    joined: RefCell<BTreeMap<(&'static str, u32), u32>>,
    /// By name and rank.
    processes: RefCell<BTreeMap<(&'static str, u32), Process>>,
    /// Whether anything has happened yet; and whether it has held up messages or threads.
    happened: Cell<(bool, bool)>,
}

impl World {
    pub(crate) fn new(seed: u64, hosts: usize) -> Rc<Self> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let fork = |random: &mut ChaCha8Rng| ChaCha8Rng::from_rng(random);
        let network = Network::new(fork(&mut random));
        let wires = Wires::new(fork(&mut random));
        let mut control = Control::new(hosts, fork(&mut random), wires.clone());
        control.start();
        let sizes = Sizes::new(&mut random);
        let world = Rc::new(Self {
            random: RefCell::new(random),
            network,
            wires,
            control: tokio::sync::Mutex::new(control),
            hosts: RefCell::default(),
            killed: RefCell::default(),
            sizes,
            attachments: Cell::new(1),
            harm: RefCell::default(),
            still: Cell::default(),
            sum: Cell::default(),
            notes: RefCell::default(),
            joined: RefCell::default(),
            processes: RefCell::default(),
            happened: Cell::default(),
        });
        world.note(format_args!("{hosts} hosts, {sizes:?}"));
        (0..hosts).for_each(|host| world.start_host(host));
        world
    }

    fn start_host(&self, host: usize) {
        let random = ChaCha8Rng::from_rng(&mut *self.random.borrow_mut());
        let started = Rc::new(Host::start(host, &self.network, &self.wires, self.sizes, random));
        let mut hosts = self.hosts.borrow_mut();
        match hosts.get_mut(host) {
            Some(place) => self.killed.borrow_mut().push(std::mem::replace(place, started)),
            None => hosts.push(started),
        }
    }

    /// Kills a host's agent with its tenants' processes; another one starts at once.
    pub(crate) fn replace_host(&self, host: usize) {
        self.host(host).kill();
        self.network.kill(self.host(host).port);
        self.wires.cut(host);
        self.start_host(host);
    }

    pub(crate) fn host(&self, host: usize) -> Rc<Host> {
        Rc::clone(&self.hosts.borrow()[host])
    }

    pub(crate) fn is_killed(&self, host: &Rc<Host>) -> bool {
        self.killed.borrow().iter().any(|killed| Rc::ptr_eq(killed, host))
    }

    pub(crate) fn next_attachment(&self) -> AttachmentId {
        AttachmentId(self.attachments.replace(self.attachments.get() + 1))
    }

    /// Keeps what happened, to be shown should the seed fail.
    pub(crate) fn note(&self, what: Arguments<'_>) {
        let at = Duration::from_nanos(virtual_time::now());
        self.notes.borrow_mut().push(format!("{:10.3} {what}", at.as_secs_f64()));
        if std::env::var_os("HARMONAIZE_TRACE").is_some() {
            eprintln!("{:10.3} {what}", at.as_secs_f64());
        }
    }

    pub(crate) fn show(&self) {
        self.notes.borrow().iter().for_each(|note| eprintln!("{note}"));
    }

    /// An operation has ended that took so long.
    pub(crate) fn took(&self, time: Duration) {
        let sum = self.sum.get();
        self.sum.set(Sum { operations: sum.operations + 1, slowest: sum.slowest.max(time), ..sum });
        // Whatever becomes of sessions and control, data go on.
        let held_up = self.happened.get().1 || !self.harm.borrow().is_empty();
        assert!(held_up || time <= GOES_ON, "an operation took {time:?}, and only sessions were lost");
    }

    /// From now on operations may fail.
    pub(crate) fn harmed_by(&self, fault: Fault) {
        self.harm.borrow_mut().push((Instant::now(), fault));
    }

    /// An operation has failed: something that may end communicators must have happened.
    pub(crate) fn may_fail(&self, what: &str) {
        let sum = self.sum.get();
        self.sum.set(Sum { failures: sum.failures + 1, ..sum });
        assert!(!self.harm.borrow().is_empty(), "{what}, and no rank was lost");
    }

    /// A join was refused: something must have happened to a session, or to a rank.
    pub(crate) fn may_refuse(&self, refused: &JoinRefused) {
        assert!(self.happened.get().0, "nothing has happened: {refused:?}");
        let sum = self.sum.get();
        self.sum.set(Sum { refusals: sum.refusals + 1, ..sum });
    }

    /// Something happens.
    pub(crate) fn happens(&self, fault: Fault) {
        let holds_up = self.happened.get().1 || fault.holds_up();
        self.happened.set((true, holds_up));
    }

    /// A rank's process has this attachment.
    pub(crate) fn attached(&self, name: &'static str, rank: u32, attachment: AttachmentId) {
        self.processes.borrow_mut().entry((name, rank)).or_insert((attachment, None)).0 = attachment;
    }

    /// Kills the process of a rank of the job's, if it is still there: its connection with its agent ends.
    pub(crate) async fn kill_process(&self, rank: u32) {
        let Some((attachment, Some(process))) = self.processes.borrow().get(&("job", rank)).cloned() else {
            return;
        };
        process.abort();
        // On any host: a number is an attachment of one agent alone.
        let hosts = self.hosts.borrow().clone();
        for host in hosts {
            let _ = host.requests.send(SessionRequest::Detached { attachment }).await;
        }
    }

    /// A rank has joined; it goes on once all others have, or where some never will.
    pub(crate) async fn all_joined(&self, which: (&'static str, u32), ranks: u32) {
        *self.joined.borrow_mut().entry(which).or_default() += 1;
        let begun = Instant::now();
        while self.joined.borrow()[&which] < ranks {
            sleep(Duration::from_millis(20)).await;
            if begun.elapsed() > JOINED {
                assert!(
                    !self.harm.borrow().is_empty(),
                    "not all ranks of {which:?} learn that they have joined"
                );
                return;
            }
        }
    }

    /// Stands still for so long.
    pub(crate) fn stands_still(&self, time: Duration) {
        self.still.set(self.still.get() + time);
    }

    pub(crate) fn stood_still(&self, _: &Rc<Host>) -> Duration {
        self.still.get()
    }

    /// The operator's connection with control, where there is one.
    async fn operator(&self) -> Option<ProviderClient<tonic::transport::Channel>> {
        let remote = Remote::at(&Protection::InsecureLoopback, CONTROL, "control:1").unwrap();
        let remote = remote.through(self.wires.dial(OPERATOR));
        Some(ProviderClient::new(remote.connect().await.ok()?))
    }

    /// What control knows.
    pub(crate) async fn status(&self) -> Option<v1::StatusReply> {
        let request = v1::StatusRequest { patience_ns: 500_000_000 };
        let mut operator = self.operator().await?;
        Some(operator.status(request).await.ok()?.into_inner())
    }

    /// Has a communicator that runs take another order, if there is one; whether control took it.
    pub(crate) async fn reorder(&self) -> bool {
        let Some(status) = self.status().await else { return false };
        let Some(one) = status.communicators.first() else { return false };
        let mut hosts: Vec<String> = one.participants.iter().map(|one| one.host.clone()).collect();
        let by = self.random.borrow_mut().random_range(0..hosts.len().max(1));
        hosts.rotate_left(by);
        let Some(mut operator) = self.operator().await else { return false };
        let request = v1::ReorderRequest { communicator: one.communicator, hosts };
        let taken = operator.reorder(request).await;
        self.note(format_args!("reorder: {taken:?}"));
        taken.is_ok()
    }

    /// Runs ranks to their ends while `faults` happen.
    pub(crate) async fn run(self: &Rc<Self>, scripts: Vec<Script>, faults: Vec<(Duration, Fault)>) -> Sum {
        let ranks: Vec<_> = scripts
            .iter()
            .map(|script| {
                let rank = spawn_local(tenant::run(Rc::clone(self), script.clone()));
                let place = (script.name, script.rank);
                self.processes.borrow_mut().insert(place, (AttachmentId(0), Some(rank.abort_handle())));
                rank
            })
            .collect();
        let mut happening = Vec::new();
        let begun = Instant::now();
        for (after, fault) in faults {
            sleep((begun + after).saturating_duration_since(Instant::now())).await;
            happening.push(spawn_local(fault.happen(Rc::clone(self))));
        }
        let all = async {
            for fault in happening {
                fault.await.unwrap();
            }
            self.note(format_args!("no fault any more"));
            for (rank, script) in ranks.into_iter().zip(&scripts) {
                if self.is_killed_rank(&rank, script) {
                    rank.abort();
                    continue;
                }
                let end = match rank.await {
                    Ok(end) => end,
                    Err(error) if error.is_cancelled() => End::Killed,
                    Err(error) => std::panic::resume_unwind(error.into_panic()),
                };
                self.note(format_args!("{} rank {} ends: {end:?}", script.name, script.rank));
                self.ended(&end);
            }
        };
        timeout(END, all).await.expect("it comes to an end");
        self.sum.get()
    }

    /// Whether a rank was on a host that is gone: then nobody waits for it.
    fn is_killed_rank(&self, rank: &tokio::task::JoinHandle<End>, script: &Script) -> bool {
        !rank.is_finished()
            && script.name != "last"
            && self.harm.borrow().iter().any(|(_, fault)| fault.kills(script.host))
    }

    fn ended(&self, end: &End) {
        let sum = self.sum.get();
        match end {
            End::Done(regroups) => {
                self.sum.set(Sum { regroups: sum.regroups + u64::from(*regroups), ..sum });
            }
            End::Lost(_) | End::Killed => {
                assert!(!self.harm.borrow().is_empty(), "{end:?}, and no rank was lost");
            }
        }
    }

    /// Whether control and agents have come to rest with nothing.
    pub(crate) async fn is_empty(&self) {
        let deadline = Instant::now() + LEASE * 2;
        loop {
            if let Some(status) = self.status().await
                && status.communicators.is_empty()
                && status.waiting.is_empty()
                && status.agents.iter().all(|agent| {
                    agent.report.as_ref().is_some_and(|report| {
                        report.communicators.is_empty() && report.attachments.is_empty()
                    })
                })
            {
                break;
            }
            assert!(Instant::now() < deadline, "something is left: {:?}", self.status().await);
            sleep(Duration::from_millis(500)).await;
        }
        self.hosts.borrow().iter().for_each(|host| host.check());
    }
}
