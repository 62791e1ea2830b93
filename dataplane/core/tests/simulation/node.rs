//! A participant and a rank as the simulator sees them.

use super::aggregator::Joined;
use super::interleave::SlotRequests;
use super::network::Location;
use super::scenario::Scenario;
use super::world::Input;
use harmonaize_abi::{ChannelId, Epoch, OperationId, SegmentId, Sequence, StepId};
use harmonaize_core::{Action, Communicator, Config, EpochPlan, Failure, Nanos};
use harmonaize_plan::{Participant, Retention};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// Landing slots of a stream: whether a message lies there, and its bytes.
pub(crate) type Ring = Vec<(bool, Vec<u8>)>;

/// What a channel's staging is used for.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    pub(crate) segment: Option<SegmentId>,
    pub(crate) slots: Vec<Vec<u8>>,
}

/// A segment's steps that are not complete.
#[derive(Debug)]
pub(crate) struct Track {
    pub(crate) uncommitted: usize,
    pub(crate) parts: HashMap<StepId, usize>,
}

pub(crate) struct Node {
    pub(crate) core: Communicator,
    pub(crate) inbox: VecDeque<Input>,
    pub(crate) scheduled: bool,
    pub(crate) timer: Option<u64>,
    /// Until then a link takes no frame, and nothing is polled while the communicator is in force.
    pub(crate) stuck_until: u64,
    pub(crate) alive: bool,
    pub(crate) closed: bool,
    pub(crate) failure: Option<(Failure, u64)>,
    pub(crate) changes: VecDeque<EpochPlan>,
    /// When control last told it of a plan.
    pub(crate) planned_at: u64,
    pub(crate) retired: BTreeSet<Epoch>,
    pub(crate) epochs: BTreeSet<Epoch>,
    pub(crate) switched: BTreeMap<Epoch, SegmentId>,
    /// By epoch and peer: the epoch that the link was made for.
    pub(crate) links: BTreeMap<(Epoch, u32), Epoch>,
    pub(crate) staging: Vec<Staging>,
    pub(crate) landing: HashMap<(Epoch, u32, ChannelId), Ring>,
    /// By link's epoch, peer, channel and sequence: where a payload to come goes instead of its slot. The flag says whether it
    /// is there.
    pub(crate) posts: BTreeMap<(Epoch, u32, ChannelId, Sequence), (Location, bool)>,
    /// By link's epoch, peer and channel: messages delivered.
    pub(crate) delivered: HashMap<(Epoch, u32, ChannelId), u32>,
    pub(crate) tracks: BTreeMap<SegmentId, Track>,
    /// Segments done, as seen from outside.
    pub(crate) done: SegmentId,
    /// By operation: how its inputs are kept, and its first and last segments so far.
    pub(crate) retained: HashMap<OperationId, (Retention, [SegmentId; 2])>,
    /// By epoch: the session with its aggregator.
    pub(crate) joined: BTreeMap<Epoch, Joined>,
    /// The latest session that it asked for, of an epoch.
    pub(crate) probed: BTreeMap<Epoch, u64>,
    /// By channel: the last segment that was given to an aggregator.
    pub(crate) aggregated: BTreeMap<ChannelId, SegmentId>,
    /// Held sums that are on their way to tensors that are not mapped.
    pub(crate) copying: usize,
    /// By operation.
    pub(crate) wire: HashMap<OperationId, u64>,
    pub(crate) slot_requests: SlotRequests,
    /// What it is in the midst of; nothing is polled before that is done.
    pub(crate) unfinished: Option<Action>,
}

/// How one call ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Complete,
    Failed,
}

#[derive(Default)]
pub(crate) struct RankState {
    pub(crate) called: usize,
    pub(crate) open: BTreeSet<OperationId>,
    pub(crate) outcomes: BTreeMap<OperationId, (Outcome, u64)>,
    pub(crate) gone: bool,
    /// A call was refused: the communicator has ended.
    pub(crate) refused: bool,
    /// Its next call is scheduled.
    pub(crate) waits: bool,
}

impl Node {
    pub(crate) fn new(scenario: &Scenario, me: Participant) -> Self {
        let access = scenario.group.local(me).iter().map(|rank| (*rank, scenario.access[rank.0 as usize]));
        let config = Config {
            me,
            plan: scenario.plan.clone(),
            access: access.collect(),
            inquiry: scenario.inquiry,
            operations: scenario.operations,
        };
        Self {
            core: Communicator::new(config).unwrap(),
            inbox: VecDeque::new(),
            scheduled: false,
            timer: None,
            stuck_until: 0,
            alive: true,
            closed: false,
            failure: None,
            changes: VecDeque::new(),
            planned_at: 0,
            retired: BTreeSet::new(),
            epochs: BTreeSet::from([scenario.plan.epoch]),
            switched: BTreeMap::new(),
            links: (0..scenario.group.participants())
                .map(|peer| ((scenario.plan.epoch, peer), scenario.plan.epoch))
                .collect(),
            staging: (0..scenario.plan.channels).map(|_| Staging::default()).collect(),
            landing: HashMap::new(),
            posts: BTreeMap::new(),
            delivered: HashMap::new(),
            tracks: BTreeMap::new(),
            done: SegmentId(0),
            retained: HashMap::new(),
            joined: BTreeMap::new(),
            probed: BTreeMap::new(),
            aggregated: BTreeMap::new(),
            copying: 0,
            wire: HashMap::new(),
            slot_requests: SlotRequests::default(),
            unfinished: None,
        }
    }

    /// When time alone gives it something to do.
    pub(crate) fn due(&self) -> Option<Nanos> {
        self.core.poll_timeout()
    }

    /// The epoch that the link of `epoch` to a peer was made for.
    pub(crate) fn link(&self, epoch: Epoch, peer: Participant) -> Epoch {
        self.links.get(&(epoch, peer.0)).copied().unwrap_or(epoch)
    }

    /// Whether any epoch has this link.
    pub(crate) fn has(&self, link: Epoch, peer: Participant) -> bool {
        self.links.iter().any(|((_, to), known)| *to == peer.0 && *known == link)
    }

    /// Forgets the links of an epoch; those that no other has.
    pub(crate) fn forget(&mut self, epoch: Epoch) -> Vec<(Epoch, Participant)> {
        let mut links = Vec::new();
        self.links.retain(|(of, peer), link| {
            if *of == epoch {
                links.push((*link, Participant(*peer)));
            }
            *of != epoch
        });
        links.retain(|(link, peer)| !self.has(*link, *peer));
        links
    }

    /// All links.
    pub(crate) fn all_links(&self) -> Vec<(Epoch, Participant)> {
        let mut links: Vec<_> = self.links.iter().map(|((_, to), link)| (*link, Participant(*to))).collect();
        links.sort_unstable();
        links.dedup();
        links
    }
}
