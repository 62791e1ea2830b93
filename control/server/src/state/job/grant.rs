//! Grants: what aggregators and workers are told of an epoch.

use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::aggregation::Weighed;
use crate::state::job::communicator::Communicator;
use crate::state::job::datagrams::packets;
use crate::state::job::reduction::{AggregationChoice, Place, ReductionPolicy, Sender};
use crate::state::world::aggregators::{Aggregators, Granted, PARTS, SentGrant, There};
use harmonaize_abi::{CommunicatorId, Dtype, GrantId, ReduceOp};
use harmonaize_aggregator::{MAX_WINDOWS_AHEAD, PayloadFormat};
use harmonaize_api::SECRET_BYTES;
use harmonaize_api::v1::{self, aggregation_form, to_agent};
use harmonaize_planner::{AggregationPlan, AggregatorId, CodeShape, CodecChoice, Nanos};
use rand::Rng;
use std::time::Duration;

/// What passes between a part and its sum beside the ways: programs that wait for a processor. For the window
/// alone.
const TURN: Duration = Duration::from_millis(2);
/// Chunks in flight.
const WINDOWS: std::ops::RangeInclusive<u64> = 16..=1024;
/// Bytes of an element: f32.
const ELEMENT: u32 = 4;

/// What is granted, and to whom.
pub(crate) struct Grantee<'a> {
    /// The communicator's number.
    pub id: CommunicatorId,
    /// The communicator.
    pub known: &'a Communicator,
    /// How its tensors travel.
    pub coding: &'a CodecChoice,
    /// What its tenant wants of sums.
    pub sums: ReductionPolicy,
}

/// Grants what the planner says for the next epoch of a communicator. Aggregators are told before any agent
/// is.
pub(crate) fn grant_aggregation(
    aggregators: &mut Aggregators,
    ctx: &Ctx<'_>,
    effects: &mut Effects,
    random: &mut impl Rng,
    grantee: &Grantee<'_>,
    weighed: Weighed,
) -> AggregationChoice {
    let policy = Some(grantee.sums);
    let Weighed { best, reason } = weighed;
    let granted = best.and_then(|best| grant(aggregators, ctx, effects, random, grantee, &best));
    AggregationChoice { policy, reason, ..granted.unwrap_or_default() }
}

fn grant(
    aggregators: &mut Aggregators,
    ctx: &Ctx<'_>,
    effects: &mut Effects,
    random: &mut impl Rng,
    grantee: &Grantee<'_>,
    best: &AggregationPlan,
) -> Option<AggregationChoice> {
    let Grantee { id, known, coding, sums } = *grantee;
    let participants = known.members.len();
    let all: Vec<AggregatorId> = all_of(best).collect();
    let there: Vec<&There> =
        all.iter().map(|at| aggregators.present().get(at)).collect::<Option<Vec<&There>>>()?;
    // Those above each other speak UDP alone.
    let (unit, datagrams) = match there.as_slice() {
        [there] => packets(ctx, known, there.unit_bytes, there.datagrams.as_ref()),
        several => (several.iter().map(|there| there.unit_bytes).min().unwrap_or_default(), None),
    };
    let form = PayloadFormat::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum };
    let exact = CodeShape { form, elements: unit / ELEMENT, bytes: unit };
    let CodeShape { form, elements: chunk_elements, bytes } =
        if best.coded { CodeShape::of_codes(unit, participants) } else { Some(exact) }?;
    let window = window(best, bytes);
    let grain = sums.grain(participants);
    let shares: Vec<(u32, u32)> = all
        .iter()
        .zip(&there)
        .map(|(at, there)| share(window, grain, there.units, aggregators.free_units(*at, there)))
        .collect();
    let addresses: Vec<_> = there.iter().map(|there| there.address).collect();
    let number = std::iter::repeat_with(|| GrantId(random.next_u64())).take(16);
    let number =
        number.into_iter().find(|number| *number != GrantId(0) && !aggregators.is_granted(*number))?;
    let (counts, workers) = numbered(best, participants)?;
    let mut places = Vec::with_capacity(all.len());
    for ((aggregator, address), workers) in all.iter().zip(addresses).zip(counts) {
        let mut secret = [0; SECRET_BYTES];
        random.fill_bytes(&mut secret);
        places.push(Place { aggregator: *aggregator, address, secret, workers });
    }
    let form = Some(v1::AggregationForm { form: Some(mode_to_proto(form)) });
    let mut granted = Granted { of: Some(id), ..Granted::default() };
    for (place, (most, guaranteed)) in places.iter().zip(shares) {
        let grant = v1::GrantAggregation {
            communicator: number.0,
            secret: place.secret.to_vec(),
            workers: place.workers.into(),
            form: form.clone(),
            chunk_elements,
            ordered: sums.ordered,
            tenant: known.tenant.clone(),
            weight: ctx.settings.terms(&known.tenant).weight,
            guaranteed_units: guaranteed,
            max_units: most,
            parent: above(&places, place, number),
        };
        let (address, datagrams) = (place.address, datagrams.clone());
        granted.at.insert(place.aggregator, Some(SentGrant { grant: grant.clone(), address, datagrams }));
        if let Some(there) = aggregators.present().get(&place.aggregator) {
            effects.send(there.session, to_agent::Message::GrantAggregation(grant));
        }
    }
    aggregators.grant(number, granted);
    let base = v1::Aggregation {
        communicator: number.0,
        workers: participants as u32,
        chunk_elements,
        window,
        form,
        datagrams,
        ..v1::Aggregation::default()
    };
    let recipe = Some(recipe(best, coding, base));
    Some(AggregationChoice { grant: Some(number), recipe, places, workers, ..AggregationChoice::default() })
}

/// Returns what all workers are told of a grant.
fn recipe(best: &AggregationPlan, coding: &CodecChoice, base: v1::Aggregation) -> v1::Aggregation {
    let [broadcast_least_bytes, broadcast_most_bytes] =
        best.broadcasts.map_or([0; 2], |range| range.map(|bytes| bytes.0));
    v1::Aggregation {
        min_bytes: best.min_bytes.0,
        max_error: if best.coded { coding.budget.max_error().unwrap_or(0.0) } else { 0.0 },
        small_operations: true,
        broadcast_min_bytes: broadcast_least_bytes,
        broadcast_max_bytes: broadcast_most_bytes,
        barriers: best.barriers,
        ..base
    }
}

/// Returns how many chunks of so many bytes are in flight. Who comes later gets as large a window as who came
/// first, since shares of a link go by windows.
fn window(best: &AggregationPlan, bytes: u32) -> u32 {
    // A turn of each program on the way.
    let turns = if best.leaves.is_empty() { TURN } else { 2 * TURN };
    let round = Duration::from_nanos(best.delay.0.saturating_mul(2)).saturating_add(turns);
    let held = best.exclusive_rate.bytes_in(Nanos(u64::try_from(round.as_nanos()).unwrap_or(u64::MAX))).0;
    held.div_ceil(u64::from(bytes.max(1))).clamp(*WINDOWS.start(), *WINDOWS.end()) as u32
}

/// Returns how many of an aggregator's units a communicator may have at most, and how many are guaranteed to
/// it.
fn share(window: u32, grain: u32, units: u32, free: u32) -> (u32, u32) {
    let most = (2 * MAX_WINDOWS_AHEAD * window).saturating_mul(grain).min(units);
    let least = 2 * grain;
    (most, (units / PARTS).clamp(least, most.max(least)).min(free))
}

/// The one above, then those below.
fn all_of(best: &AggregationPlan) -> impl Iterator<Item = AggregatorId> {
    std::iter::once(best.aggregator).chain(best.leaves.iter().map(|leaf| leaf.aggregator))
}

/// Returns how many workers each aggregator has, the one above first. It also returns to which aggregator
/// each participant sends, and as which of its workers. Above, participants come first, then the aggregators
/// below.
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
fn above(places: &[Place], place: &Place, number: GrantId) -> Option<v1::ParentAggregator> {
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
