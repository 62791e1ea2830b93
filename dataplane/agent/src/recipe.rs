//! From control's recipe to what the engine takes, checked: an agent runs no plan that it has not checked itself.

use crate::aggregation::{self, InvalidAggregation};
use crate::staging::{StagingBytes, StagingNeeds};
use harmonaize_abi::{Collective, Epoch, Rank};
use harmonaize_api::v1::{self, Recipe};
use harmonaize_codec::Codec;
use harmonaize_core::EpochPlan;
use harmonaize_engine::{Aggregator, MAX_CHANNELS, Peer};
use harmonaize_plan::{
    Access, Algorithm, AlgorithmRange, AlgorithmTable, CheckError, Coding, Group, Local, Participant, Plan,
    PlanError, Request, Retention, TableError, Tuning, check_own, program,
};
use harmonaize_transport::Introduction;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A recipe that can be executed.
#[derive(Debug)]
pub struct ExpandedRecipe {
    /// The plan under its epoch.
    pub plan: EpochPlan,
    /// Who we are.
    pub me: Participant,
    /// The others.
    pub peers: Vec<Peer>,
    /// The aggregator, if there is one.
    pub aggregator: Option<Aggregator>,
    /// The most staging that operations need here.
    pub staging: StagingBytes,
}

/// Why a recipe cannot be executed, for the operator. Who shows it names communicator and epoch.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct RecipeError(InvalidRecipe);

/// What is wrong with a recipe.
#[derive(Debug, thiserror::Error)]
enum InvalidRecipe {
    #[error("ranks missing or there twice")]
    Ranks,
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("participant {0} has no rank")]
    NoRank(u32),
    #[error("no tuning")]
    NoTuning,
    #[error("{field} {value} out of range")]
    OutOfRange { field: &'static str, value: u64 },
    #[error("{of} \"{name}\" is not known here")]
    Name { of: &'static str, name: String },
    #[error("algorithms: {0}")]
    Algorithms(#[from] TableError),
    #[error("{0} channels")]
    Channels(u32),
    #[error("a bound of {0} on what a codec loses")]
    ErrorBound(f64),
    #[error("codec \"{0}\" is not known here")]
    Codec(String),
    #[error("participant {participant}: {field}")]
    Peer { participant: u32, field: &'static str },
    #[error("aggregation: {0}")]
    Aggregation(#[from] InvalidAggregation),
    #[error("{collective}: not proved within {} s", VERIFY_TIMEOUT.as_secs())]
    VerifyTimeout { collective: Collective },
    #[error("{collective}: {error}")]
    Program { collective: Collective, error: PlanError },
    #[error("{collective}: {error}")]
    Unsound { collective: Collective, error: CheckError },
}

/// Plans that are kept in mind as proved.
const MAX_VERIFIED: usize = 32;

/// Longest that a proof may take: far longer than that of a thousand hosts.
const VERIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// Plans that were proved lately: a change that leaves order and landing slots as they are needs no other proof.
#[derive(Debug, Default)]
pub struct VerifiedPlans(VecDeque<VerifiedPlan>);

/// One of them, as one participant.
#[derive(Debug, PartialEq)]
struct VerifiedPlan {
    plan: Plan,
    me: Participant,
    landing_slots: u32,
    coded: bool,
    /// What its programs need of staging.
    staging: StagingNeeds,
}

impl VerifiedPlan {
    fn of(plan: &EpochPlan, me: Participant) -> Self {
        let (landing_slots, coded) = (plan.landing_slots, plan.coding.is_some());
        Self { plan: plan.plan.clone(), me, landing_slots, coded, staging: StagingNeeds::default() }
    }

    /// Whether whoever has proved this has proved the other.
    fn covers(&self, other: &Self) -> bool {
        (&self.plan, self.me, self.landing_slots) == (&other.plan, other.me, other.landing_slots)
            && self.coded >= other.coded
    }
}

impl VerifiedPlans {
    /// Proves what was not proved yet. Returns the most staging that it needs.
    fn verify(&mut self, plan: &EpochPlan, me: Participant) -> Result<StagingBytes, InvalidRecipe> {
        let wanted = VerifiedPlan::of(plan, me);
        if let Some(known) = self.0.iter().find(|known| known.covers(&wanted)) {
            return Ok(known.staging.bytes(plan, me));
        }
        let staging = verify(plan, me, Instant::now() + VERIFY_TIMEOUT)?;
        let bytes = staging.bytes(plan, me);
        self.0.truncate(MAX_VERIFIED - 1);
        self.0.push_front(VerifiedPlan { staging, ..wanted });
        Ok(bytes)
    }
}

/// Whether a link of a recipe's own participant goes over RDMA, where links go so but for all of those in `over_tcp`.
pub(crate) fn goes_over_rdma(recipe: &Recipe, over_tcp: &[u32]) -> bool {
    let mut others = (0..recipe.participants.len() as u32).filter(|one| *one != recipe.me);
    !over_tcp.contains(&recipe.me) && others.any(|other| !over_tcp.contains(&other))
}

/// Expands a recipe.
///
/// # Errors
/// If anything in it does not fit together.
pub fn expand(recipe: &Recipe, proved: &mut VerifiedPlans) -> Result<ExpandedRecipe, RecipeError> {
    expand_valid(recipe, proved).map_err(RecipeError)
}

fn expand_valid(recipe: &Recipe, proved: &mut VerifiedPlans) -> Result<ExpandedRecipe, InvalidRecipe> {
    let members = recipe.participants.iter().map(|p| p.ranks.iter().map(|&rank| Rank(rank)).collect());
    let group = Group::new(members.collect()).ok_or(InvalidRecipe::Ranks)?;
    let mut order: Vec<_> = recipe.order.iter().map(|&participant| Participant(participant)).collect();
    // A ring is the same wherever it begins.
    let from = usize::try_from(recipe.racks_from).ok().filter(|from| *from <= order.len());
    let outside = InvalidRecipe::OutOfRange { field: "first rack", value: recipe.racks_from.into() };
    order.rotate_left(from.ok_or(outside)?);
    let plan = Plan::new(group, order)?.with_racks(recipe.racks.clone())?;
    let me = Participant(recipe.me);
    if plan.group().local(me).is_empty() {
        return Err(InvalidRecipe::NoRank(me.0));
    }
    let tuning = recipe.tuning.as_ref().ok_or(InvalidRecipe::NoTuning)?;
    let small = |field: &'static str, value: u64| {
        let small = u32::try_from(value).ok().filter(|small| *small > 0);
        small.ok_or(InvalidRecipe::OutOfRange { field, value })
    };
    let channels =
        u16::try_from(tuning.channels).ok().filter(|channels| (1..=MAX_CHANNELS).contains(channels));
    let told = recipe.aggregation.as_ref();
    let aggregation = told.map(|told| aggregation::read(told, plan.participants(), me)).transpose();
    let (rules, aggregator) = aggregation?.unzip();
    let plan = EpochPlan {
        epoch: Epoch(small("epoch", recipe.epoch)?),
        plan,
        tuning: Tuning {
            chunk_bytes: small("chunk", tuning.chunk_bytes)?,
            segment_bytes: small("segment", tuning.segment_bytes)?,
            copy_bytes: tuning.copy_bytes,
            algorithms: algorithms(&tuning.algorithms)?,
            ..Tuning::default()
        },
        channels: channels.ok_or(InvalidRecipe::Channels(tuning.channels))?,
        landing_slots: tuning.landing_slots,
        coding: recipe.coding.as_ref().map(coding).transpose()?,
        aggregation: rules,
    };
    let staging = proved.verify(&plan, me)?;
    let over_tcp = |peer: &v1::Peer| [me.0, peer.participant].iter().any(|one| recipe.over_tcp.contains(one));
    let peers = recipe.peers.iter().map(|peer| introduce(peer, over_tcp(peer)));
    let peers = peers.collect::<Result<_, _>>()?;
    Ok(ExpandedRecipe { plan, me, peers, aggregator, staging })
}

/// Expands every algorithm as this participant runs it, and has the checker prove it. It does so for mapped and for remote
/// tensors and each way of keeping inputs. Proved is that each output holds what it must, and nobody waits on himself.
///
/// That is said of all participants together, but each proves its own part: what it sends and receives must be what plan and request
/// alone say, and where all participants' programs are so the whole is right ([`check_own`] says why). Nobody runs a program of an epoch before
/// control has heard from all that they have prepared it, which none does whose own proof fails. So what all agents prove together is
/// what each of them would prove of all, and each takes the time of its own programs: in proportion to the hosts, not to their square.
///
/// Returns what its programs need of staging.
fn verify(plan: &EpochPlan, me: Participant, until: Instant) -> Result<StagingNeeds, InvalidRecipe> {
    let mut staging = StagingNeeds::default();
    for Variant { request, retention, access, scaled } in variants(plan, me) {
        let collective = request.collective;
        if Instant::now() > until {
            return Err(InvalidRecipe::VerifyTimeout { collective });
        }
        let local = Local { access: &|_| access, retention, scaled };
        let own = program(&plan.plan, request, me, &local)
            .map_err(|error| InvalidRecipe::Program { collective, error })?;
        check_own(&plan.plan, request, me, &own, plan.landing_slots, &local)
            .map_err(|error| InvalidRecipe::Unsound { collective, error })?;
        staging.add((collective, request.algorithm, retention, access), &own);
    }
    Ok(staging)
}

/// One of the ways in which an operation may go.
#[derive(Clone, Copy, Debug)]
struct Variant {
    request: Request,
    retention: Retention,
    access: Access,
    /// Whether inputs are multiplied.
    scaled: bool,
}

/// All ways in which operations may go at a participant.
fn variants(plan: &EpochPlan, me: Participant) -> Vec<Variant> {
    let mut variants = Vec::new();
    for &collective in Collective::ALL {
        for retention in [Retention::KeepInputs, Retention::CopyInputs, Retention::HoldOutputs] {
            if !collective.can_be_in_place() && retention == Retention::HoldOutputs {
                continue;
            }
            let can = collective.traits().compressible && plan.coding.is_some();
            let exact = |shots| Request { collective, root: Rank(0), coded: false, algorithm: shots };
            let coded = Request { coded: true, ..exact(Algorithm::Ring) };
            let coded = (can && retention != Retention::CopyInputs).then_some(coded);
            // An operation that began in an earlier epoch goes on by the algorithm that it began with, whatever this one says.
            let shots = Algorithm::of(collective.traits().pattern);
            for request in shots.iter().map(|shots| exact(*shots)).chain(coded) {
                let tree = request.algorithm == Algorithm::BinomialTree;
                let roots = if collective.is_rooted() { roots(plan, me, tree) } else { vec![Rank(0)] };
                for root in &roots {
                    let request = Request { root: *root, ..request };
                    let variant = |access, scaled| Variant { request, retention, access, scaled };
                    let accesses = [Access::Mapped, Access::Remote];
                    variants.extend(accesses.map(|access| variant(access, false)));
                    if collective.reduces() && !request.coded {
                        variants.extend(accesses.map(|access| variant(access, true)));
                    }
                }
            }
        }
    }
    variants
}

/// Roots that are as different as can be to a participant. They are all its own ranks, and a rank of those who stand just before and after
/// it, and opposite. Whether it is first, in the middle or last, and who is before and after it, is all that a program depends on; along a
/// tree also on how many children it has: for each number of them, on the first that have so many after the root, and on the last.
fn roots(plan: &EpochPlan, me: Participant, tree: bool) -> Vec<Rank> {
    let (order, all) = (plan.plan.order(), plan.plan.participants());
    let position = plan.plan.position(me).unwrap_or(0);
    let mut distances: Vec<u32> =
        [1, 2, all / 2, all.saturating_sub(2), all.saturating_sub(1)].map(|distance| distance % all).to_vec();
    if tree {
        let digits = 0..u32::BITS - all.leading_zeros();
        let places = digits.flat_map(|digit| [1 << digit, all.saturating_sub(1) >> digit << digit]);
        distances.extend(places.filter(|place| *place < all).map(|place| (all - place) % all));
    }
    distances.sort_unstable();
    distances.dedup();
    let others = distances.into_iter().filter(|distance| *distance != 0).filter_map(|distance| {
        let at = (u64::from(position) + u64::from(distance)) % u64::from(all);
        plan.plan.group().local(*order.get(at as usize)?).first().copied()
    });
    others.chain(plan.plan.group().local(me).iter().copied()).collect()
}

/// How operations go by collective and size, if all names are known here.
fn algorithms(told: &[v1::AlgorithmRange]) -> Result<AlgorithmTable, InvalidRecipe> {
    let unknown = |of, name: &str| InvalidRecipe::Name { of, name: name.chars().take(64).collect() };
    let range = |range: &v1::AlgorithmRange| {
        let (collective, algorithm) = (&range.collective, &range.algorithm);
        Ok(AlgorithmRange {
            collective: collective.parse().map_err(|()| unknown("collective", collective))?,
            up_to: range.up_to_bytes,
            algorithm: algorithm.parse().map_err(|()| unknown("algorithm", algorithm))?,
        })
    };
    Ok(AlgorithmTable::new(told.iter().map(range).collect::<Result<Vec<_>, InvalidRecipe>>()?)?)
}

/// How tensors travel, by a codec that is known here and within a bound that can be kept.
fn coding(told: &v1::Coding) -> Result<Coding, InvalidRecipe> {
    match told.max_vnmse {
        Some(most) if !(0.0..=1.0).contains(&most) => Err(InvalidRecipe::ErrorBound(most)),
        most => Ok(Coding {
            codec: number(&told.codec)?,
            finer: told.fallback_codec.as_deref().map(number).transpose()?,
            max_error: most,
        }),
    }
}

/// A codec's number.
fn number(name: &str) -> Result<u16, InvalidRecipe> {
    let number = Codec::NAMED.iter().position(|(known, _)| *known == name);
    number.map(|number| number as u16).ok_or_else(|| InvalidRecipe::Codec(name.chars().take(64).collect()))
}

/// What the engine takes of a peer. `over_tcp`: the link goes over TCP alone.
fn introduce(peer: &v1::Peer, over_tcp: bool) -> Result<Peer, InvalidRecipe> {
    let at = |field| InvalidRecipe::Peer { participant: peer.participant, field };
    let rate = (peer.rate_bps > 0).then_some(peer.rate_bps);
    let control = Some(peer.congestion_control.as_str()).filter(|name| !name.is_empty());
    let control = control.map(str::parse).transpose().map_err(|_| at("name of a congestion control"))?;
    let link = |introduction| Peer {
        participant: Participant(peer.participant),
        introduction,
        rate,
        congestion_control: control,
    };
    if peer.reused {
        return Ok(link(None));
    }
    let ports = peer.source_ports.iter().map(|&port| u16::try_from(port));
    let source_ports: Vec<u16> = ports.collect::<Result<_, _>>().map_err(|_| at("source port"))?;
    if source_ports.is_empty() {
        return Err(at("no path"));
    }
    let introduction = Introduction {
        name: peer.link.as_slice().try_into().map_err(|_| at("link name of another length"))?,
        secret: peer.secret.as_slice().try_into().map_err(|_| at("secret of another length"))?,
        peer: peer.address.parse().map_err(|_| at("address"))?,
        initiate: peer.initiate,
        source_ports,
        over_tcp,
    };
    Ok(link(Some(introduction)))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use harmonaize_plan::{
        Buffer, CODED_ROOM, Encoding, MAX_SOURCES, Stage, Step, StepKind, max_segment_bytes,
    };

    fn range(collective: &str, up_to_bytes: u64, algorithm: &str) -> v1::AlgorithmRange {
        v1::AlgorithmRange { collective: collective.to_owned(), up_to_bytes, algorithm: algorithm.to_owned() }
    }

    pub(crate) fn recipe(hosts: u32, per_host: u32) -> Recipe {
        let participants = (0..hosts).map(|host| v1::Participant {
            ranks: (host * per_host..(host + 1) * per_host).collect(),
            host: format!("h{host}"),
        });
        let peer = |participant| v1::Peer {
            participant,
            address: "127.0.0.1:7200".into(),
            link: vec![1; 16],
            secret: vec![2; 32],
            initiate: true,
            source_ports: vec![0],
            ..v1::Peer::default()
        };
        Recipe {
            communicator: 7,
            epoch: 1,
            participants: participants.collect(),
            order: (0..hosts).rev().collect(),
            me: 0,
            peers: (1..hosts).map(peer).collect(),
            tuning: Some(v1::Tuning {
                channels: 4,
                chunk_bytes: 65536,
                segment_bytes: 262_144,
                copy_bytes: 4096,
                landing_slots: 2,
                algorithms: vec![
                    range("allreduce", 8192, "recursive-doubling"),
                    range("allreduce", 262_144, "two-shot"),
                ],
            }),
            ..Recipe::default()
        }
    }

    #[test]
    fn right_recipes_are_expanded_and_proved() {
        for (hosts, per_host) in [(1, 1), (1, 9), (2, 1), (5, 3), (32, 2)] {
            let expanded = expand(&recipe(hosts, per_host), &mut VerifiedPlans::default()).unwrap();
            assert_eq!(expanded.plan.plan.participants(), hosts);
            assert_eq!(expanded.peers.len() as u32, hosts - 1);
            let tuning = expanded.plan.tuning;
            let sizes =
                [8192, 262_144, 262_145].map(|size| tuning.algorithms.choose(Collective::AllReduce, size));
            assert_eq!(sizes, [Algorithm::RecursiveDoubling, Algorithm::TwoShot, Algorithm::Ring]);
        }
    }

    #[test]
    fn links_that_go_on_need_no_introduction() {
        let mut recipe = recipe(3, 1);
        recipe.peers[1] = v1::Peer { participant: 2, reused: true, ..v1::Peer::default() };
        let mut proved = VerifiedPlans::default();
        for epoch in 2..100 {
            recipe.epoch = epoch;
            let peers = expand(&recipe, &mut proved).unwrap().peers;
            assert_eq!(
                peers.iter().map(|peer| peer.introduction.is_some()).collect::<Vec<_>>(),
                [true, false]
            );
        }
        assert_eq!(proved.0.len(), 1, "the same plan is proved once");
        recipe.me = 1;
        recipe.peers[0].participant = 0;
        expand(&recipe, &mut proved).unwrap();
        assert_eq!(proved.0.len(), 2, "as another participant it is another");
        recipe.tuning.as_mut().unwrap().landing_slots = 0;
        assert!(expand(&recipe, &mut proved).is_err(), "another plan is proved anew");
    }

    #[test]
    fn links_of_those_who_hand_over_go_over_tcp_alone() {
        for (over_tcp, expected) in
            [(vec![], [false; 3]), (vec![2], [false, true, false]), (vec![0, 2], [true; 3])]
        {
            let recipe = Recipe { over_tcp, ..recipe(4, 1) };
            let peers = expand(&recipe, &mut VerifiedPlans::default()).unwrap().peers;
            let found = peers.iter().map(|peer| peer.introduction.as_ref().unwrap().over_tcp);
            assert_eq!(found.collect::<Vec<_>>(), expected, "{:?}", recipe.over_tcp);
        }
    }

    #[test]
    fn racks_are_part_of_what_is_proved() {
        let mut recipe = recipe(5, 2);
        let mut proved = VerifiedPlans::default();
        for racks in [vec![], vec![2, 3], vec![1; 5]] {
            recipe.racks.clone_from(&racks);
            assert_eq!(expand(&recipe, &mut proved).unwrap().plan.plan.racks(), racks);
        }
        assert_eq!(proved.0.len(), 3);
        recipe.racks_from = 2;
        let order = expand(&recipe, &mut proved).unwrap().plan.plan.order().to_vec();
        assert_eq!(order, [2, 1, 0, 4, 3].map(Participant));
    }

    #[test]
    fn what_is_coded_is_proved_once_more() {
        let mut recipe = recipe(3, 1);
        let mut proved = VerifiedPlans::default();
        let coding = || v1::Coding { codec: "int8".into(), ..v1::Coding::default() };
        let told = [None, Some(coding()), Some(coding()), None];
        let counts = told.map(|coding| {
            recipe.coding = coding;
            expand(&recipe, &mut proved).unwrap();
            proved.0.len()
        });
        assert_eq!(counts, [1, 2, 2, 2]);
    }

    fn plan(hosts: u32, per_host: u32) -> EpochPlan {
        let mut recipe = recipe(hosts, per_host);
        recipe.coding = Some(v1::Coding { codec: "int8".into(), ..v1::Coding::default() });
        expand(&recipe, &mut VerifiedPlans(VecDeque::new())).unwrap().plan
    }

    /// Bytes of each operand in memory of a step, in a segment of so many bytes of a block. What is encoded or decoded is one, too.
    fn in_memory(step: &Step, segment: u64) -> Vec<u64> {
        match step.kind {
            // Another kind is to be cut as these are, or its bytes counted here.
            StepKind::Move | StepKind::Reduce { .. } | StepKind::Fetch | StepKind::Store => {}
        }
        let room = |encoding| match encoding {
            Encoding::Exact => 0,
            Encoding::Coded(Stage::Contribution | Stage::Result | Stage::Moved) => u64::from(CODED_ROOM),
        };
        let operands = step.sources.iter().chain(&step.destinations);
        let here = operands.filter(|operand| !matches!(operand.buffer, Buffer::Peer(_)));
        here.map(|operand| operand.part.elements(0, segment).1 + room(operand.encoding)).collect()
    }

    /// A step is not cut while it runs, so none may be long. That holds however large the tensors are and however the
    /// operation goes.
    #[test]
    fn steps_are_no_larger_than_messages_however_they_go() {
        let mut kinds = [0; 4];
        for (hosts, per_host) in [(1, 1), (1, 3), (1, 9), (2, 1), (3, 10), (5, 3), (8, 2)] {
            let mut plan = match hosts {
                // Nothing is coded within a host.
                1 => expand(&recipe(hosts, per_host), &mut VerifiedPlans::default()).unwrap().plan,
                _ => plan(hosts, per_host),
            };
            if hosts > 1 {
                plan.tuning.segment_bytes = 1 << 30;
            }
            let (tuning, ranks) = (plan.tuning, u64::from(hosts * per_host));
            for me in [0, hosts - 1].map(Participant) {
                for variant in variants(&plan, me) {
                    let Variant { request, retention, access, scaled } = variant;
                    let local = Local { access: &|_| access, retention, scaled };
                    let own = program(&plan.plan, request, me, &local).unwrap();
                    let (collective, algorithm) = (request.collective, request.algorithm);
                    let segment = max_segment_bytes(&plan.plan, collective, algorithm, retention, &tuning);
                    for step in &own.steps {
                        let operands = in_memory(step, segment);
                        let coded = step.destinations.iter().any(|to| to.encoding != Encoding::Exact);
                        let decodes = step.sources.iter().any(|from| from.encoding != Encoding::Exact);
                        let reduces = matches!(step.kind, StepKind::Reduce { .. });
                        for (count, is) in kinds.iter_mut().zip([reduces, !reduces, coded, decodes]) {
                            *count += usize::from(is && !operands.is_empty());
                        }
                        // A segment is read and written once, where its blocks are not as small as messages may be.
                        let within =
                            (2 * ranks * u64::from(tuning.message_bytes)).max(tuning.segment_bytes.into());
                        // By recursive halving whoever goes by a neighbour has two messages in one.
                        let piece = 2 * u64::from(tuning.chunk_bytes) + u64::from(CODED_ROOM);
                        let most = MAX_SOURCES + per_host as usize + 1;
                        let fits = match hosts {
                            1 => operands.iter().sum::<u64>() <= 3 * within,
                            _ => operands.len() <= most && operands.iter().all(|bytes| *bytes <= piece),
                        };
                        assert!(fits, "{hosts} hosts of {per_host}: {variant:?}: {step:?}: {operands:?}");
                    }
                }
            }
        }
        assert!(kinds.iter().all(|count| *count > 0), "reduced, copied, encoded, decoded: {kinds:?}");
    }

    #[test]
    fn every_participant_of_many_hosts_can_prove_its_own_part() {
        let plan = plan(257, 1);
        for me in [0, 1, 128, 255, 256].map(Participant) {
            verify(&plan, me, Instant::now() + Duration::from_secs(600)).unwrap();
        }
    }

    #[test]
    fn a_proof_that_takes_too_long_is_given_up() {
        let plan = plan(2, 1);
        let error = verify(&plan, Participant(0), Instant::now() - Duration::from_secs(1)).unwrap_err();
        assert!(matches!(error, InvalidRecipe::VerifyTimeout { .. }), "{error}");
    }

    /// The programs of all participants by the checker of them all, as agents did.
    fn verify_all(plan: &EpochPlan, Variant { request, retention, access, scaled }: Variant) {
        let local = Local { access: &|_| access, retention, scaled };
        let everyone = (0..plan.plan.participants()).map(Participant);
        let programs: Result<Vec<_>, _> =
            everyone.map(|participant| program(&plan.plan, request, participant, &local)).collect();
        let programs = programs.unwrap();
        let locals = vec![local; programs.len()];
        harmonaize_plan::check(&plan.plan, request, &programs, plan.landing_slots, &locals).unwrap();
    }

    /// How long agents take to prove a plan, and what proving all of it took.
    #[test]
    #[ignore = "prints times"]
    fn times_of_proofs() {
        for (hosts, per_host) in [(8, 1), (32, 1), (64, 1), (128, 1), (256, 1), (512, 1), (1024, 1), (128, 8)]
        {
            let plan = plan(hosts, per_host);
            let mut own = Vec::new();
            for me in [0, hosts / 2, hosts - 1].map(Participant) {
                let begun = Instant::now();
                verify(&plan, me, begun + Duration::from_secs(600)).unwrap();
                own.push(begun.elapsed());
            }
            let all = variants(&plan, Participant(0));
            let all = all.into_iter().filter(|variant| variant.request.root == Rank(0));
            let begun = Instant::now();
            let whole = (hosts * per_host <= 256).then(|| {
                all.for_each(|variant| verify_all(&plan, variant));
                begun.elapsed()
            });
            println!("{hosts} hosts of {per_host}: own {own:?}, all {whole:?}");
        }
    }

    #[test]
    fn what_does_not_fit_together_is_refused_and_named() {
        type Damage = (fn(&InvalidRecipe) -> bool, fn(&mut Recipe));
        macro_rules! is {
            ($error:pat) => {
                |error| matches!(error, $error)
            };
        }
        use InvalidRecipe as Wrong;
        let mut coded = recipe(3, 1);
        coded.coding = Some(v1::Coding {
            codec: "int8".into(),
            max_vnmse: Some(1e-3),
            fallback_codec: Some("bf16".into()),
        });
        let found = expand(&coded, &mut VerifiedPlans::default()).unwrap().plan.coding.unwrap();
        let named = |number: u16| Codec::NAMED[usize::from(number)].1;
        assert_eq!((named(found.codec), found.max_error), (Codec::INT8, Some(1e-3)));
        assert_eq!(found.finer.map(named), Some(Codec::BF16));
        let damaged: [Damage; 21] = [
            (is!(Wrong::OutOfRange { field: "epoch", value: 0 }), |r| r.epoch = 0),
            (is!(Wrong::OutOfRange { field: "epoch", value: 0x1_0000_0000 }), |r| r.epoch = 1 << 32),
            (is!(Wrong::Codec(_)), |r| {
                let finer = Some("bf17".into());
                r.coding =
                    Some(v1::Coding { codec: "int8".into(), fallback_codec: finer, ..v1::Coding::default() })
            }),
            (is!(Wrong::Aggregation(_)), |r| r.aggregation = Some(v1::Aggregation::default())),
            (is!(Wrong::Codec(_)), |r| {
                r.coding = Some(v1::Coding { codec: "int9".into(), ..v1::Coding::default() })
            }),
            (is!(Wrong::ErrorBound(_)), |r| {
                r.coding = Some(v1::Coding {
                    codec: "int8".into(),
                    max_vnmse: Some(f64::NAN),
                    ..v1::Coding::default()
                });
            }),
            (is!(Wrong::Ranks), |r| r.participants[0].ranks = vec![1]),
            (is!(Wrong::Plan(PlanError::Order { .. })), |r| r.order = vec![0, 0, 1]),
            (is!(Wrong::Plan(PlanError::Racks { .. })), |r| r.racks = vec![1, 1]),
            (is!(Wrong::OutOfRange { field: "first rack", value: 4 }), |r| r.racks_from = 4),
            (is!(Wrong::NoRank(9)), |r| r.me = 9),
            (is!(Wrong::NoTuning), |r| r.tuning = None),
            (is!(Wrong::Channels(0)), |r| r.tuning.as_mut().unwrap().channels = 0),
            (is!(Wrong::Name { of: "collective", .. }), |r| {
                r.tuning.as_mut().unwrap().algorithms[0].collective = "allredcue".into();
            }),
            (is!(Wrong::Name { of: "algorithm", .. }), |r| {
                r.tuning.as_mut().unwrap().algorithms[0].algorithm = "star".into()
            }),
            (is!(Wrong::Algorithms(TableError::Algorithm { .. })), |r| {
                r.tuning.as_mut().unwrap().algorithms[0].algorithm = "binomial-tree".into();
            }),
            (is!(Wrong::Algorithms(TableError::Order { .. })), |r| {
                r.tuning.as_mut().unwrap().algorithms[0].up_to_bytes = 1 << 30
            }),
            (is!(Wrong::OutOfRange { field: "chunk", .. }), |r| {
                r.tuning.as_mut().unwrap().chunk_bytes = 1 << 40
            }),
            (is!(Wrong::Peer { field: "link name of another length", .. }), |r| r.peers[0].link = vec![1]),
            (is!(Wrong::Peer { field: "name of a congestion control", .. }), |r| {
                r.peers[0].congestion_control = "b b r".into()
            }),
            (is!(Wrong::Peer { field: "no path", .. }), |r| r.peers[1].source_ports.clear()),
        ];
        for (number, (is_expected, damage)) in damaged.into_iter().enumerate() {
            let mut recipe = recipe(3, 1);
            damage(&mut recipe);
            let error = expand_valid(&recipe, &mut VerifiedPlans::default()).unwrap_err();
            assert!(is_expected(&error), "{number}: {error}");
        }
    }
}
