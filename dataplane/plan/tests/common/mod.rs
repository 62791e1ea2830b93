//! Groups, orders and local facts that the tests share.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

pub mod execute;

use harmonaize_abi::{Collective, Rank};
use harmonaize_plan::{
    Access, Algorithm, CheckError, Group, Local, Participant, Plan, Program, Report, Request, Retention,
    Usage, check, check_own, program,
};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// How ranks are spread over hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    /// So many to a host, the last host with the rest.
    PerHost(u32),
    /// 1, 2, 3, … to a host.
    Uneven,
    /// Ranks shuffled over uneven hosts, hosts in shuffled order.
    Shuffled(u64),
}

impl Grouping {
    pub const ALL: [Grouping; 7] = [
        Grouping::PerHost(64),
        Grouping::PerHost(1),
        Grouping::PerHost(2),
        Grouping::PerHost(8),
        Grouping::PerHost(12),
        Grouping::Uneven,
        Grouping::Shuffled(7),
    ];

    pub fn plan(self, ranks: u32) -> Plan {
        let mut all: Vec<Rank> = (0..ranks).map(Rank).collect();
        let mut random = ChaCha8Rng::seed_from_u64(match self {
            Grouping::Shuffled(seed) => seed + u64::from(ranks),
            _ => 0,
        });
        if let Grouping::Shuffled(_) = self {
            all.shuffle(&mut random);
        }
        let mut members = Vec::new();
        let mut rest = all.as_slice();
        while !rest.is_empty() {
            let size = match self {
                Grouping::PerHost(size) => size as usize,
                Grouping::Uneven => members.len() % 10 + 1,
                Grouping::Shuffled(_) => [3, 1, 9, 2][members.len() % 4],
            };
            let (host, others) = rest.split_at(size.min(rest.len()));
            members.push(host.to_vec());
            rest = others;
        }
        let mut order: Vec<Participant> = (0..members.len() as u32).map(Participant).collect();
        if let Grouping::Shuffled(_) = self {
            order.shuffle(&mut random);
        }
        Plan::new(Group::new(members).unwrap(), order).unwrap()
    }
}

/// How ranks' memory is reached, over a whole communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    Mapped,
    Remote,
    /// By turns, by rank.
    Mixed,
}

impl Reach {
    pub const ALL: [Reach; 3] = [Reach::Mapped, Reach::Remote, Reach::Mixed];

    pub fn of(self, rank: Rank) -> Access {
        match self {
            Reach::Mapped => Access::Mapped,
            Reach::Remote => Access::Remote,
            Reach::Mixed => [Access::Mapped, Access::Mapped, Access::Remote][rank.0 as usize % 3],
        }
    }
}

pub const RETENTIONS: [Retention; 3] = [Retention::KeepInputs, Retention::HoldOutputs, Retention::CopyInputs];

/// Retention of each participant, where `None` means by turns.
pub fn retention_of(retention: Option<Retention>, request: Request, participant: u32) -> Retention {
    let retention = retention.unwrap_or(RETENTIONS[participant as usize % 3]);
    match retention {
        Retention::HoldOutputs if !request.collective.can_be_in_place() => Retention::KeepInputs,
        // What is coded is too large to be copied.
        Retention::CopyInputs if request.coded => Retention::KeepInputs,
        retention => retention,
    }
}

/// One thing to check.
#[derive(Clone, Debug)]
pub struct Case {
    pub plan: Plan,
    pub request: Request,
    pub retention: Option<Retention>,
    pub reach: Reach,
    pub scaled: bool,
}

impl Case {
    pub fn with_locals<T>(&self, run: impl FnOnce(&[Local<'_>]) -> T) -> T {
        let access = |rank: Rank| self.reach.of(rank);
        let locals: Vec<Local<'_>> = (0..self.plan.participants())
            .map(|me| Local {
                access: &access,
                retention: retention_of(self.retention, self.request, me),
                scaled: self.scaled,
            })
            .collect();
        run(&locals)
    }

    pub fn programs(&self) -> Vec<Program> {
        self.with_locals(|locals| {
            (0..self.plan.participants())
                .map(|me| program(&self.plan, self.request, Participant(me), &locals[me as usize]).unwrap())
                .collect()
        })
    }

    pub fn check(&self, programs: &[Program], landing_slots: u32) -> Result<Report, CheckError> {
        self.with_locals(|locals| check(&self.plan, self.request, programs, landing_slots, locals))
    }

    /// What each participant finds who looks at its own program alone.
    pub fn check_alone(&self, programs: &[Program]) -> Result<Vec<Usage>, CheckError> {
        let one = |((me, program), local): ((u32, &Program), &Local<'_>)| {
            check_own(&self.plan, self.request, Participant(me), program, 1, local)
        };
        self.with_locals(|locals| (0..).zip(programs).zip(locals).map(one).collect())
    }

    /// Whether this rank's input and output may be the same memory.
    pub fn in_place(&self, rank: Rank) -> bool {
        let me = self.plan.group().participant_of(rank).unwrap();
        let retention = retention_of(self.retention, self.request, me.0);
        let collective = self.request.collective;
        let changes = collective.reduces() || self.request.coded;
        let kept = self.plan.participants() > 1 && retention == Retention::KeepInputs;
        collective.shared_block(rank, self.request.root).is_some() && !(changes && kept)
    }
}

/// A request that is not coded, in many shots.
pub fn plain(collective: Collective, root: Rank) -> Request {
    Request { collective, root, coded: false, algorithm: Algorithm::Ring }
}

/// All requests for so many ranks: each collective by each of its algorithms. With several roots if it has one, and coded if it can be.
pub fn requests(ranks: u32) -> Vec<Request> {
    let mut roots = vec![0, ranks / 3, ranks / 2, ranks - 1];
    roots.dedup();
    let mut requests = Vec::new();
    for &collective in Collective::ALL {
        let traits = collective.traits();
        for &root in if collective.is_rooted() { roots.as_slice() } else { &[0] } {
            let plain = plain(collective, Rank(root));
            let algorithms = Algorithm::of(traits.pattern);
            requests.extend(algorithms.iter().map(|&algorithm| Request { algorithm, ..plain }));
            requests.extend(traits.compressible.then_some(Request { coded: true, ..plain }));
        }
    }
    requests
}
