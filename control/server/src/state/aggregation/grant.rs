//! Grants: what aggregators and workers are told of an epoch.

use super::super::State;
use super::super::codec::CodecChoice;
use super::super::lifecycle::Planned;
use super::super::reduction::{AggregationChoice, Place, ReductionPolicy, Sender};
use super::codes::Shape;
use super::{ELEMENT, Granted, PARTS, SentGrant, TURN, There, WINDOWS, Weighed};
use harmonaize_abi::{Dtype, ReduceOp};
use harmonaize_aggregator::{MAX_WINDOWS_AHEAD, PayloadFormat};
use harmonaize_api::SECRET_BYTES;
use harmonaize_api::v1::{self, aggregation_form, to_agent};
use harmonaize_planner::{AggregationPlan, AggregatorId, Nanos};
use rand::Rng;
use std::net::SocketAddr;
use std::time::Duration;

impl State {
    /// Decides how the next epoch has large operations summed, and grants it. Aggregators are told before any agent is.
    pub(in super::super) fn choose_aggregation(
        &mut self,
        id: u64,
        coding: &CodecChoice,
        planned: Option<&Planned>,
    ) -> AggregationChoice {
        let sums = self.reduction_policy(id);
        AggregationChoice { policy: Some(sums), ..self.grant_aggregation(id, coding, planned, sums) }
    }

    fn grant_aggregation(
        &mut self,
        id: u64,
        coding: &CodecChoice,
        planned: Option<&Planned>,
        sums: ReductionPolicy,
    ) -> AggregationChoice {
        let Some(known) = self.communicators.get(&id) else { return AggregationChoice::default() };
        let Weighed { best, reason } = self.weigh_aggregation(known, id, coding, planned);
        let none = |reason: String| AggregationChoice { reason, ..AggregationChoice::default() };
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
        let [broadcast_least_bytes, broadcast_most_bytes] =
            best.broadcasts.map_or([0; 2], |range| range.map(|bytes| bytes.0));
        let form = PayloadFormat::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum };
        let exact = Shape { form, elements: unit / ELEMENT, bytes: unit };
        let shape = if best.coded { Shape::of_codes(unit, participants) } else { Some(exact) };
        let Some(Shape { form, elements: chunk_elements, bytes }) = shape else { return none(reason) };
        // A turn of each program on the way.
        let turns = if best.leaves.is_empty() { TURN } else { 2 * TURN };
        let round = Duration::from_nanos(best.delay.0.saturating_mul(2)).saturating_add(turns);
        // Who comes later gets as large a window as who came first: who shares a link has of it what its window is of all.
        let held = best.exclusive_rate.bytes_in(Nanos(u64::try_from(round.as_nanos()).unwrap_or(u64::MAX))).0;
        let window = held.div_ceil(u64::from(bytes.max(1))).clamp(*WINDOWS.start(), *WINDOWS.end()) as u32;
        let grain = sums.grain(participants);
        let shares: Vec<(SocketAddr, u32, u32)> = all
            .iter()
            .zip(&there)
            .map(|(at, there)| {
                let most = (2 * MAX_WINDOWS_AHEAD * window).saturating_mul(grain).min(there.units);
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
        let mut places = Vec::with_capacity(all.len());
        for ((aggregator, (address, ..)), workers) in all.iter().zip(&shares).zip(counts) {
            let mut secret = [0; SECRET_BYTES];
            self.random.fill_bytes(&mut secret);
            places.push(Place { aggregator: *aggregator, address: *address, secret, workers });
        }
        let form = Some(v1::AggregationForm { form: Some(mode_to_proto(form)) });
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
                tenant: tenant.clone(),
                weight,
                guaranteed_units: guaranteed,
                max_units: most,
                parent: above(&places, place, number),
            };
            let (address, datagrams) = (place.address, datagrams.clone());
            let session = self.aggregators.there.get(&place.aggregator).map(|there| there.session);
            granted.at.insert(place.aggregator, Some(SentGrant { grant: grant.clone(), address, datagrams }));
            if let Some(session) = session {
                self.send(session, to_agent::Message::GrantAggregation(grant));
            }
        }
        self.aggregators.grants.insert(number, granted);
        let told = v1::Aggregation {
            communicator: number,
            workers: participants as u32,
            chunk_elements,
            window,
            min_bytes: best.min_bytes.0,
            form,
            max_error: if best.coded { coding.budget.max_error().unwrap_or(0.0) } else { 0.0 },
            small_operations: true,
            broadcast_min_bytes: broadcast_least_bytes,
            broadcast_max_bytes: broadcast_most_bytes,
            barriers: best.barriers,
            datagrams,
            ..v1::Aggregation::default()
        };
        AggregationChoice {
            grant: Some(number),
            reason,
            recipe: Some(told),
            places,
            workers,
            ..AggregationChoice::default()
        }
    }
}

/// The one above, then those below.
fn all_of(best: &AggregationPlan) -> impl Iterator<Item = AggregatorId> {
    std::iter::once(best.aggregator).chain(best.leaves.iter().map(|leaf| leaf.aggregator))
}

/// How many workers each aggregator has, the one above first; and to which each participant sends, as which of its workers. Above, participants
/// come first, then the aggregators below.
fn numbered(best: &AggregationPlan, participants: usize) -> Option<(Vec<u16>, Vec<Sender>)> {
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
fn mode_to_proto(form: PayloadFormat) -> aggregation_form::Form {
    match form {
        PayloadFormat::Tensor { dtype, op } => {
            aggregation_form::Form::Tensor(v1::TensorForm { dtype: dtype.to_string(), op: op.to_string() })
        }
        PayloadFormat::Shared { bits, block, ranks } => {
            let (bits, block, ranks) = (bits.into(), block.into(), ranks.into());
            aggregation_form::Form::Shared(v1::SharedForm { bits, block, ranks })
        }
    }
}
