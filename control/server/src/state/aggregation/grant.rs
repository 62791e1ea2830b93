//! Grants: what aggregators and workers are told of an epoch.

use super::super::State;
use super::super::coding;
use super::super::replan::Planned;
use super::super::sums::Sums;
use super::codes::Shape;
use super::{ELEMENT, Granted, PARTS, TURN, There, Told, WINDOWS, Weighed};
use harmonaize_abi::{Dtype, ReduceOp};
use harmonaize_aggregator::packet::ALL_WORKERS;
use harmonaize_aggregator::{Form, SPAN, worker_key};
use harmonaize_api::SECRET_BYTES;
use harmonaize_api::v1::{self, aggregation_form, to_agent};
use harmonaize_planner::{Aggregated, AggregatorId, Groups, Nanos};
use rand::Rng;
use std::net::SocketAddr;
use std::time::Duration;

/// How an epoch's large operations go.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct Chosen {
    /// The grant; none: by the hosts.
    pub grant: Option<u64>,
    /// In words.
    pub reason: String,
    /// What its tenant wanted of sums; none where an earlier control chose.
    pub sums: Option<Sums>,
    /// An earlier control let sums leave hosts out.
    pub left_out: bool,
    /// For all workers, but for what is one's alone.
    told: Option<v1::Aggregation>,
    /// The aggregators, the one above first; one where there is no other.
    places: Vec<Place>,
    /// Of each participant.
    workers: Vec<Sender>,
}

/// To which aggregator a participant sends, as its place among them, and which of its workers it is there.
type Sender = (usize, u16);

/// An aggregator of an epoch.
#[derive(Clone, Debug)]
struct Place {
    aggregator: AggregatorId,
    address: SocketAddr,
    secret: [u8; SECRET_BYTES],
    /// Its workers: participants, and aggregators below.
    workers: u16,
    /// Where what is for all its workers at once goes, if all are participants; else empty.
    group: String,
}

impl Place {
    fn key(&self, number: u64, worker: u16) -> Vec<u8> {
        worker_key(&self.secret, number, worker).to_vec()
    }
}

impl Chosen {
    /// Because an agent says so after a restart of control.
    pub(in super::super) fn told(recipe: &v1::Recipe) -> Self {
        let grant = recipe.aggregation.as_ref().map(|told| told.communicator);
        let reason = if grant.is_some() { "as before control restarted".to_owned() } else { String::new() };
        let left_out = recipe.aggregation.as_ref().is_some_and(|told| told.partial);
        Self { grant, reason, left_out, ..Self::default() }
    }

    /// Whether tensors go in codes.
    pub(in super::super) fn is_coded(&self) -> bool {
        let form = self.told.as_ref().and_then(|told| told.form.as_ref()?.form.as_ref());
        matches!(form, Some(aggregation_form::Form::Shared(_)))
    }

    /// All its aggregators; none where an earlier control chose them.
    pub(in super::super) fn aggregators(&self) -> impl Iterator<Item = AggregatorId> {
        self.places.iter().map(|place| place.aggregator)
    }

    /// The one above the others, or the only one.
    pub(super) fn root(&self) -> Option<AggregatorId> {
        self.aggregators().next()
    }

    /// For the recipe of a participant.
    pub(in super::super) fn recipe(&self, participant: u32) -> Option<v1::Aggregation> {
        let told = self.told.clone()?;
        let (place, number) = *self.workers.get(usize::try_from(participant).ok()?)?;
        let place = self.places.get(place)?;
        let key = place.key(told.communicator, number);
        let group = place.group.clone();
        let of_all = || place.key(told.communicator, ALL_WORKERS);
        let group_key = if group.is_empty() { Vec::new() } else { of_all() };
        let (worker, workers) = (number.into(), place.workers.into());
        let branch = (self.places.len() > 1).then_some(v1::Branch { worker, workers });
        let address = place.address.to_string();
        Some(v1::Aggregation { address, worker: participant, key, branch, group, group_key, ..told })
    }
}

impl State {
    /// Decides how the next epoch has large operations summed, and grants it. Aggregators are told before any agent is.
    pub(in super::super) fn choose_aggregation(
        &mut self,
        id: u64,
        coding: &coding::Chosen,
        planned: Option<&Planned>,
    ) -> Chosen {
        let sums = self.sums(id);
        Chosen { sums: Some(sums), ..self.grant_aggregation(id, coding, planned, sums) }
    }

    fn grant_aggregation(
        &mut self,
        id: u64,
        coding: &coding::Chosen,
        planned: Option<&Planned>,
        sums: Sums,
    ) -> Chosen {
        let Some(known) = self.communicators.get(&id) else { return Chosen::default() };
        let Weighed { best, reason } = self.weigh_aggregation(known, id, coding, planned);
        let none = |reason: String| Chosen { reason, ..Chosen::default() };
        let Some(best) = best else { return none(reason) };
        let (participants, tenant) = (known.members.len(), known.tenant.clone());
        let all: Vec<AggregatorId> = all_of(&best).collect();
        let Some(there) =
            all.iter().map(|at| self.aggregators.there.get(at)).collect::<Option<Vec<&There>>>()
        else {
            return none(reason);
        };
        // Those above each other speak UDP alone.
        let (unit, datagrams) = match there.as_slice() {
            [there] => self.packets(known, there),
            several => (several.iter().map(|there| there.unit_bytes).min().unwrap_or_default(), None),
        };
        let averages = self.all_can(known, |abilities| abilities.aggregated_codes);
        let able = self.all_can(known, |abilities| abilities.aggregated_others);
        // What is not coded takes as long as without codes: it was not weighed whether that pays.
        let others = able && !best.coded && there.iter().all(|there| there.others);
        // Of an average each host stands for as many ranks.
        let even =
            known.members.windows(2).all(|pair| matches!(pair, [a, b] if a.ranks.len() == b.ranks.len()));
        let partial = sums.partial.filter(|_| able && even);
        let at_once = partial.is_none()
            && there.iter().all(|there| there.spreads)
            && self.all_can(known, |abilities| abilities.aggregated_at_once);
        let [broadcast_least_bytes, broadcast_most_bytes] =
            best.broadcasts.filter(|_| at_once).map_or([0; 2], |range| range.map(|bytes| bytes.0));
        let form = Form::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum };
        let exact = Shape { form, elements: unit / ELEMENT, bytes: unit };
        let shape = if best.coded { Shape::of_codes(unit, participants) } else { Some(exact) };
        let Some(Shape { form, elements: chunk_elements, bytes }) = shape else { return none(reason) };
        // A turn of each program on the way.
        let turns = if best.leaves.is_empty() { TURN } else { 2 * TURN };
        let round = Duration::from_nanos(best.delay.0.saturating_mul(2)).saturating_add(turns);
        // Who comes later gets as large a window as who came first: who shares a link has of it what its window is of all.
        let held = best.alone.bytes_in(Nanos(u64::try_from(round.as_nanos()).unwrap_or(u64::MAX))).0;
        let window = held.div_ceil(u64::from(bytes.max(1))).clamp(*WINDOWS.start(), *WINDOWS.end()) as u32;
        let grain = sums.grain(participants);
        let shares: Vec<(SocketAddr, u32, u32)> = all
            .iter()
            .zip(&there)
            .map(|(at, there)| {
                let most = (2 * SPAN * window).saturating_mul(grain).min(there.units);
                let least = 2 * grain;
                let guaranteed = (there.units / PARTS).clamp(least, most.max(least));
                let guaranteed = guaranteed.min(self.free_units(*at, there));
                (there.address, most, guaranteed)
            })
            .collect();
        let number = std::iter::repeat_with(|| self.random.next_u64());
        let grants = &self.aggregators.grants;
        let number = number.take(16).find(|number| *number != 0 && !grants.contains_key(number));
        let Some(number) = number else { return none(reason) };
        let Some((counts, workers)) = numbered(&best, participants) else { return none(reason) };
        // Who is above others has these among its workers; and what comes over RDMA comes to each by itself.
        let groups = there.iter().enumerate().map(|(at, there)| {
            let groups = there.groups.filter(|_| (at > 0 || best.leaves.is_empty()) && datagrams.is_none());
            let group =
                |groups: Groups| SocketAddr::from((groups.group(number), there.address.port())).to_string();
            groups.map_or_else(String::new, group)
        });
        let mut places = Vec::with_capacity(all.len());
        for (((aggregator, (address, ..)), workers), group) in all.iter().zip(&shares).zip(counts).zip(groups)
        {
            let mut secret = [0; SECRET_BYTES];
            self.random.fill_bytes(&mut secret);
            places.push(Place { aggregator: *aggregator, address: *address, secret, workers, group });
        }
        let form = Some(v1::AggregationForm { form: Some(said(form)) });
        let weight = self.settings.terms(&tenant).weight;
        let mut granted = Granted { of: Some(id), ..Granted::default() };
        for (place, (_, most, guaranteed)) in places.iter().zip(shares) {
            let grant = v1::GrantAggregation {
                communicator: number,
                secret: place.secret.to_vec(),
                workers: place.workers.into(),
                form: form.clone(),
                chunk_elements,
                ordered: sums.ordered,
                partial: partial.map(|partial| v1::PartialSums {
                    least: partial.least,
                    after_ns: u64::try_from(partial.after.as_nanos()).unwrap_or(u64::MAX),
                }),
                tenant: tenant.clone(),
                weight,
                guaranteed,
                most,
                parent: above(&places, place, number),
                group: place.group.clone(),
            };
            let (address, datagrams) = (place.address, datagrams.clone());
            let there =
                self.aggregators.there.get(&place.aggregator).map(|there| (there.session, there.able()));
            let able = there.map_or([false; 3], |(_, able)| able);
            granted
                .at
                .insert(place.aggregator, Some(Told { grant: grant.clone(), address, datagrams, able }));
            if let Some((session, _)) = there {
                self.send(session, to_agent::Message::GrantAggregation(grant));
            }
        }
        self.aggregators.grants.insert(number, granted);
        let told = v1::Aggregation {
            communicator: number,
            workers: participants as u32,
            chunk_elements,
            window,
            least_bytes: best.least.0,
            form,
            most_error: if best.coded { coding.budget.most().unwrap_or(0.0) } else { 0.0 },
            averages,
            others,
            partial: partial.is_some(),
            at_once,
            broadcast_least_bytes,
            broadcast_most_bytes,
            barriers: best.barriers && at_once,
            datagrams,
            ..v1::Aggregation::default()
        };
        Chosen { grant: Some(number), reason, told: Some(told), places, workers, ..Chosen::default() }
    }
}

/// The one above, then those below.
fn all_of(best: &Aggregated) -> impl Iterator<Item = AggregatorId> {
    std::iter::once(best.aggregator).chain(best.leaves.iter().map(|leaf| leaf.aggregator))
}

/// How many workers each aggregator has, the one above first; and to which each participant sends, as which of its workers. Above, participants
/// come first, then the aggregators below.
fn numbered(best: &Aggregated, participants: usize) -> Option<(Vec<u16>, Vec<Sender>)> {
    let mut counts = vec![0_u16; 1 + best.leaves.len()];
    let mut workers = Vec::with_capacity(participants);
    for participant in 0..participants {
        let leaf = best.leaves.iter().position(|leaf| leaf.hosts.binary_search(&participant).is_ok());
        let place = leaf.map_or(0, |leaf| leaf + 1);
        let count = counts.get_mut(place)?;
        workers.push((place, *count));
        *count = count.checked_add(1)?;
    }
    let root = counts.first_mut()?;
    *root = root.checked_add(u16::try_from(best.leaves.len()).ok()?)?;
    Some((counts, workers))
}

/// What an aggregator is told of the one above it.
fn above(places: &[Place], place: &Place, number: u64) -> Option<v1::ParentAggregator> {
    let (root, leaves) = places.split_first()?;
    let leaf = leaves.iter().position(|leaf| leaf.aggregator == place.aggregator)?;
    let first = usize::from(root.workers).checked_sub(leaves.len())?;
    let worker = u16::try_from(first + leaf).ok()?;
    let (address, key) = (root.address.to_string(), root.key(number, worker));
    Some(v1::ParentAggregator { address, worker: worker.into(), key })
}

/// A form as messages have it.
fn said(form: Form) -> aggregation_form::Form {
    match form {
        Form::Tensor { dtype, op } => {
            aggregation_form::Form::Tensor(v1::TensorForm { dtype: dtype.to_string(), op: op.to_string() })
        }
        Form::Shared { bits, block, ranks } => {
            let (bits, block, ranks) = (bits.into(), block.into(), ranks.into());
            aggregation_form::Form::Shared(v1::SharedForm { bits, block, ranks })
        }
    }
}
