//! The codec of an epoch, the budget that ranks agreed on, and what operations told of codecs.

use harmonaize_abi::session::Budget as Said;
use harmonaize_api::v1;
use harmonaize_codec::{Budget, BudgetError, Codec, Controller, Level};
use harmonaize_planner::{CodecChoice, CodecReason, DirectedLink};
use std::collections::BTreeMap;
use std::time::Duration;

/// Most codecs of an agent that are looked at.
const MOST_CODECS: usize = 32;

/// For recipes; none where tensors travel as they are.
pub(crate) fn coding(choice: &CodecChoice) -> Option<v1::Coding> {
    let coded = choice.codec != Codec::EXACT;
    coded.then(|| v1::Coding {
        codec: choice.codec.name().to_owned(),
        max_vnmse: choice.budget.max_error_of(choice.codec),
        fallback_codec: choice.finer.map(|codec| codec.name().to_owned()),
    })
}

/// For recipes, so that agents tell it after a restart of control; none where nothing may be lost.
pub(crate) fn budget_to_proto(budget: &Budget) -> Option<v1::Budget> {
    (*budget != Budget::Exact).then(|| (&Said::from(budget)).into())
}

/// As an agent's recipe says it.
pub(crate) fn choice_of(recipe: &v1::Recipe) -> CodecChoice {
    let coding = recipe.coding.as_ref();
    let budget = budget(recipe.budget.as_ref()).unwrap_or(Budget::Exact);
    CodecChoice {
        codec: coding.and_then(|coding| Codec::named(&coding.codec)).unwrap_or(Codec::EXACT),
        finer: coding.and_then(|coding| Codec::named(coding.fallback_codec.as_deref()?)),
        ..CodecChoice::exact(budget, CodecReason::Recovered)
    }
}

/// What a message lets be lost.
///
/// # Errors
/// Where it makes no sense.
pub(crate) fn budget(said: Option<&v1::Budget>) -> Result<Budget, BudgetError> {
    Budget::try_from(&said.map_or(Said::Exact, Said::from))
}

/// The codecs that an agent says it takes, with what they take there; the first of each.
pub(crate) fn levels(speeds: &[v1::CodecSpeed]) -> Vec<Level> {
    let mut levels: Vec<Level> = Vec::new();
    for own in speeds.iter().take(MOST_CODECS) {
        // Aggregators' codes are no chunk's.
        let of_chunks = |codec: &Codec| *codec != Codec::EXACT && *codec != Codec::SHARED4;
        let Some(codec) = Codec::named(&own.codec).filter(of_chunks) else { continue };
        let typical = Level::typical(codec);
        let speed = |speed: u64, typical: f64| if speed == 0 { typical } else { speed as f64 };
        let (encode, decode) = (speed(own.encode, typical.encode), speed(own.decode, typical.decode));
        if levels.iter().all(|known| known.codec != codec) {
            levels.push(Level { encode, decode, ..typical });
        }
    }
    levels
}

/// A communicator's budget and codec.
#[derive(Debug)]
pub(crate) struct CodecState {
    /// What all ranks wanted last; the next epoch has it.
    pub agreed: Budget,
    /// What ranks want since, where that is another.
    pub budgets: BTreeMap<u32, Budget>,
    /// The part of what a host sends that crosses each link where all send to all.
    pub usage: Vec<(DirectedLink, f64)>,
    pub controller: Controller,
    /// When a change is looked at again that came too soon.
    pub again: Option<Duration>,
}

impl CodecState {
    /// For a communicator that forms.
    pub(crate) fn new(agreed: Budget) -> Self {
        Self {
            agreed,
            budgets: BTreeMap::new(),
            usage: Vec::new(),
            controller: Controller::default(),
            again: None,
        }
    }

    /// What all ranks wanted last.
    pub(crate) fn agreed(&self) -> &Budget {
        &self.agreed
    }

    /// All ranks want this.
    pub(crate) fn agree(&mut self, budget: Budget) {
        self.agreed = budget;
    }

    /// A rank wants this. Returns whether it is another than that of the next epoch, and all ranks want it.
    pub(crate) fn want(&mut self, rank: u32, ranks: u32, budget: &Budget) -> bool {
        if *budget == self.agreed {
            self.budgets.remove(&rank);
            return false;
        }
        self.budgets.insert(rank, budget.clone());
        self.budgets.len() == ranks as usize && self.budgets.values().all(|other| other == budget)
    }

    /// The epoch in use has another codec than the one before.
    pub(crate) fn changed(&mut self, now: Duration) {
        self.controller.handle_change(now);
    }

    /// What operations told of codecs: loss and bytes over what was predicted.
    pub(crate) fn losses(&self) -> impl Iterator<Item = (Codec, f64, f64)> {
        self.controller.learned()
    }

    /// The same from before a restart of control.
    pub(crate) fn recall(&mut self, now: Duration, codec: Codec, loss: f64, bytes: f64) {
        self.controller.recall(now, codec, loss, bytes);
    }

    /// An epoch was given up.
    pub(crate) fn given_up(&mut self, current: Codec, given_up: Codec) {
        if given_up != current && given_up != Codec::EXACT {
            self.controller.bar(given_up);
        }
    }
}
