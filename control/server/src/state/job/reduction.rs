//! What tenants want of their sums, and how an epoch's large operations are summed.

use harmonaize_abi::GrantId;
use harmonaize_abi::session::Constraints;
use harmonaize_aggregator::worker_key;
use harmonaize_api::SECRET_BYTES;
use harmonaize_api::v1::{self, aggregation_form};
use harmonaize_planner::{AggregationReason, AggregatorId};
use std::net::SocketAddr;

/// What was agreed on for a communicator's reductions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReductionPolicy {
    /// Aggregators may sum.
    pub aggregated: bool,
    /// Contributions are added in one order, by whomever.
    pub ordered: bool,
}

impl ReductionPolicy {
    /// Where nothing was agreed on.
    pub(crate) const USUAL: Self = Self { aggregated: true, ordered: false };

    /// As promised; as usual where nothing was.
    pub(crate) fn promised(constraints: Option<&Constraints>) -> Self {
        constraints
            .map_or(Self::USUAL, |wanted| Self { aggregated: wanted.aggregation, ordered: wanted.ordered })
    }

    /// Units of an aggregator's pool that a chunk takes: to be added in order all hosts' parts are kept.
    pub(crate) fn grain(&self, hosts: usize) -> u32 {
        if self.ordered { u32::try_from(hosts).unwrap_or(u32::MAX) } else { 1 }
    }
}

/// How an epoch's large operations go.
#[derive(Clone, Debug, Default)]
pub(crate) struct AggregationChoice {
    /// The grant; none: by the hosts.
    pub grant: Option<GrantId>,
    /// Why.
    pub reason: AggregationReason,
    /// What its tenant wanted of sums; none where an earlier control chose.
    pub policy: Option<ReductionPolicy>,
    /// For all workers, but for what is one's alone.
    pub recipe: Option<v1::Aggregation>,
    /// The aggregators, the one above first; one where there is no other.
    pub places: Vec<Place>,
    /// Of each participant.
    pub workers: Vec<Sender>,
}

/// To which aggregator a participant sends, as its place among them, and which of its workers it is there.
pub(crate) type Sender = (usize, u16);

/// An aggregator of an epoch.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub aggregator: AggregatorId,
    pub address: SocketAddr,
    pub secret: [u8; SECRET_BYTES],
    /// Its workers: participants, and aggregators below.
    pub workers: u16,
}

impl Place {
    pub(crate) fn key(&self, grant: GrantId, worker: u16) -> Vec<u8> {
        worker_key(&self.secret, grant, worker).to_vec()
    }
}

impl AggregationChoice {
    /// Because an agent says so after a restart of control.
    pub(crate) fn from_recipe(recipe: &v1::Recipe) -> Self {
        let grant = recipe.aggregation.as_ref().map(|told| GrantId(told.communicator));
        let reason = match grant {
            Some(_) => AggregationReason::Recovered,
            None => AggregationReason::Undecided,
        };
        Self { grant, reason, ..Self::default() }
    }

    /// Whether its tenant wants other sums.
    pub(crate) fn is_other(&self, wanted: ReductionPolicy) -> bool {
        // What an earlier control had agents do is not known.
        self.policy.unwrap_or(ReductionPolicy::USUAL) != wanted
    }

    /// Whether tensors go in codes.
    pub(crate) fn is_coded(&self) -> bool {
        let form = self.recipe.as_ref().and_then(|told| told.form.as_ref()?.form.as_ref());
        matches!(form, Some(aggregation_form::Form::Shared(_)))
    }

    /// All its aggregators; none where an earlier control chose them.
    pub(crate) fn aggregators(&self) -> impl Iterator<Item = AggregatorId> {
        self.places.iter().map(|place| place.aggregator)
    }

    /// The one above the others, or the only one.
    pub(crate) fn root(&self) -> Option<AggregatorId> {
        self.aggregators().next()
    }

    /// For the recipe of a participant.
    pub(crate) fn recipe(&self, participant: u32) -> Option<v1::Aggregation> {
        let told = self.recipe.clone()?;
        let (place, number) = *self.workers.get(usize::try_from(participant).ok()?)?;
        let place = self.places.get(place)?;
        let key = place.key(GrantId(told.communicator), number);
        let (worker, workers) = (number.into(), place.workers.into());
        let branch = (self.places.len() > 1).then_some(v1::Branch { worker, workers });
        let address = place.address.to_string();
        Some(v1::Aggregation { address, worker: participant, key, branch, ..told })
    }
}
