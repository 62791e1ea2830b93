//! Whether this control leads, and where commands go if it does.

use crate::actor::Command;
use harmonaize_api::v1::LeaderReply;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{sleep, timeout};
use tonic::Status;

/// Probes in a row without an answer by which the state is stuck. Of one alone it may be that the whole process stood still.
const PROBES: u32 = 3;

/// Which control leads.
#[derive(Clone, Debug)]
pub(crate) enum Leader {
    /// This one, whose actor takes commands.
    Here(mpsc::Sender<Command>),
    /// Another, that listens there; or nobody is known to.
    Elsewhere(Option<String>),
}

/// The way to the actor, where this control leads.
#[derive(Clone)]
pub(crate) struct Commands {
    leader: watch::Receiver<Leader>,
}

impl Commands {
    /// For a control that does not lead yet; and what says whether it does.
    pub(crate) fn new() -> (watch::Sender<Leader>, Self) {
        let (leads, leader) = watch::channel(Leader::Elsewhere(None));
        (leads, Self { leader })
    }

    /// The actor's queue.
    pub(crate) fn queue(&self) -> Result<mpsc::Sender<Command>, Status> {
        match &*self.leader.borrow() {
            Leader::Here(commands) => Ok(commands.clone()),
            Leader::Elsewhere(Some(leader)) => {
                let text =
                    format!("this control follows the one at {leader}, which takes sessions and changes");
                Err(Status::unavailable(text))
            }
            Leader::Elsewhere(None) => Err(Status::unavailable("no control is known to lead now")),
        }
    }

    /// The actor's answer to a command.
    pub(crate) async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, Status> {
        let (answer, answered) = oneshot::channel();
        let gone = || Status::unavailable("control is going down");
        self.queue()?.send(command(answer)).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())
    }

    /// Waits for a sign of life of the state. Where another control leads there is none to wait for.
    pub(crate) async fn probe(&self) {
        let ask = |answer: oneshot::Sender<()>| {
            Command::Look(Box::new(move |_, _| {
                let _ = answer.send(());
            }))
        };
        let _ = self.ask(ask).await;
    }

    /// Waits until the state has given no sign of life for `patience`, while this control leads.
    pub(crate) async fn stuck(&self, patience: Duration) {
        let mut late = 0;
        while late < PROBES {
            match timeout(patience / PROBES, self.probe()).await {
                Ok(()) => {
                    late = 0;
                    sleep(patience / PROBES).await;
                }
                Err(_) if self.queue().is_ok() => late += 1,
                // A control that goes down answers nothing any more.
                Err(_) => late = 0,
            }
        }
    }

    /// Which control leads; this one listens at `own`.
    pub(crate) fn leader(&self, own: &str) -> LeaderReply {
        match &*self.leader.borrow() {
            Leader::Here(_) => LeaderReply { here: true, listen: own.to_owned() },
            Leader::Elsewhere(leader) => {
                LeaderReply { here: false, listen: leader.clone().unwrap_or_default() }
            }
        }
    }
}
