//! What a communicator leaves to the one that goes on from it.

use harmonaize_abi::CommunicatorId;
use harmonaize_abi::session::{Constraints, OnFailure};
use harmonaize_api::v1;
use harmonaize_disclose::Watch;
use harmonaize_planner::Rate;
use harmonaize_store::Agreement as Stored;
use prost::Message;

/// An agreement without a communicator.
#[derive(Clone, Debug)]
pub(crate) struct InheritedAgreement {
    pub(crate) number: u64,
    pub(crate) constraints: Constraints,
    pub(crate) rate: Rate,
    pub(crate) watch: Watch,
}

impl InheritedAgreement {
    /// What was agreed on for its failure.
    pub(crate) fn on_failure(&self) -> Option<OnFailure> {
        self.constraints.on_failure
    }

    /// What was set aside for it.
    pub(crate) fn rate(&self) -> Rate {
        self.rate
    }

    /// As it is stored: without what was measured.
    pub(crate) fn record(&self, communicator: CommunicatorId) -> Stored {
        Stored {
            communicator: communicator.0,
            number: self.number,
            constraints: v1::Constraints::from(&self.constraints).encode_to_vec(),
            rate_bits: self.rate.0,
            ..Stored::default()
        }
    }

    /// From the store, of a communicator of so many ranks.
    pub(crate) fn stored(record: &Stored, ranks: usize) -> Self {
        let said = v1::Constraints::decode(record.constraints.as_slice()).unwrap_or_default();
        let constraints = Constraints::from(&said);
        let watch = Watch::new(constraints.clone(), u32::try_from(ranks).unwrap_or(u32::MAX));
        Self { number: record.number, constraints, rate: Rate(record.rate_bits), watch }
    }
}
