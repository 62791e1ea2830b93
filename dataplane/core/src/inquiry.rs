//! Before a time-out is declared, everyone is asked who has called what, so that the error can name the missing.

use crate::{Failure, Nanos};
use harmonaize_abi::{Rank, Signature};
use harmonaize_plan::{Group, Participant};

type Answer = (Vec<Rank>, Option<(Rank, Signature)>);

/// An inquiry under way.
#[derive(Debug)]
pub(crate) struct Inquiry {
    pub(crate) operation: u64,
    pub(crate) deadline: Nanos,
    answers: Vec<Option<Answer>>,
}

impl Inquiry {
    pub(crate) fn new(operation: u64, deadline: Nanos, participants: u32) -> Self {
        Self { operation, deadline, answers: vec![None; participants as usize] }
    }

    pub(crate) fn answer(&mut self, from: Participant, missing: Vec<Rank>, call: Option<(Rank, Signature)>) {
        if let Some(answer) = self.answers.get_mut(from.0 as usize) {
            *answer = Some((missing, call));
        }
    }

    pub(crate) fn complete(&self) -> bool {
        self.answers.iter().all(Option::is_some)
    }

    /// What the answers say. Who has not answered counts as missing with all its ranks.
    pub(crate) fn verdict(&self, group: &Group) -> Failure {
        let operation = self.operation;
        let mut calls: Vec<(Rank, Signature)> = Vec::new();
        let mut missing = Vec::new();
        for (index, answer) in self.answers.iter().enumerate() {
            let local = group.local(Participant(index as u32));
            match answer {
                None => missing.extend_from_slice(local),
                Some((absent, call)) => {
                    missing.extend(absent.iter().filter(|rank| local.contains(rank)));
                    if let Some((rank, signature)) = call
                        && calls.iter().all(|(_, known)| known != signature)
                    {
                        calls.push((*rank, *signature));
                    }
                }
            }
        }
        if calls.len() > 1 {
            return Failure::Mismatch { operation, calls };
        }
        missing.sort_unstable();
        Failure::Timeout { operation, signature: calls.first().map(|(_, signature)| *signature), missing }
    }
}
