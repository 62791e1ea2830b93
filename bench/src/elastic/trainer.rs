//! One rank of an elastic training.

use super::model::{RIDERS, State};
use super::{DECISION_NUMBERS, Decision, Line, MOST_RANKS, Recipe};
use crate::report::{now_us, print};
use crate::tenant::Seat;
use anyhow::{Context, Result, bail, ensure};
use harmonaize_client::{
    Checkpoint, Client, Communicator, CongestionLevel, Dtype, Error, Event, EventKind, Events, Knobs,
    Operation, Priority, Rank, ReduceOp, RegroupOptions, Status, Tensor,
};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long ranks wait for each other to join, or to regroup.
const JOIN: Duration = Duration::from_secs(60);
/// How long an operation may take; the agent's own time-out comes first.
const OPERATION: Duration = Duration::from_secs(120);

/// A rank, with its copy of the model.
pub struct Trainer {
    recipe: Recipe,
    name: String,
    client: Client,
    /// None while it goes on as another.
    communicator: Option<Communicator>,
    events: Events,
    /// When the communicator was formed, in nanoseconds from 1970: events from before name ranks of another.
    since_ns: u64,
    gradients: Tensor,
    /// For what ranks agree on.
    scalar: Tensor,
    /// For a whole state.
    whole: Tensor,
    buffer: Vec<f32>,
    model: State,
    saved: Instant,
    /// What the provider has said that the next decision answers.
    excluded: u64,
    newcomers: bool,
}

/// Why the next state is saved; of the first rank.
#[derive(Debug, Default)]
struct StepChoice {
    decision: Decision,
    reason: String,
}

impl Trainer {
    /// Joins as one of the first ranks, or `enters` a training that runs.
    pub fn join(seat: &Seat, recipe: Recipe, enters: bool) -> Result<Self> {
        ensure!(seat.ranks <= MOST_RANKS, "at most {MOST_RANKS} ranks");
        let model = State::new()?;
        let (length, words) = (model.elements() + RIDERS + DECISION_NUMBERS, model.words().len());
        let client = seat.attach(8 * (length + 2 * words) as u64 + 4096)?;
        let gradients = client.tensor(Dtype::F32, length as u64)?;
        let [scalar, whole] = [1, words].map(|words| client.tensor(Dtype::U64, words as u64));
        let waiting = recipe.shared.join(format!("waits-{}", std::process::id()));
        let communicator = if enters {
            // How a launcher's own rendezvous tells those that run.
            std::fs::write(&waiting, "").with_context(|| format!("cannot write {}", waiting.display()))?;
            let entered = client.enter(&seat.name, &RegroupOptions { timeout: JOIN, ..Default::default() });
            std::fs::remove_file(&waiting)?;
            entered?
        } else {
            let (rank, ranks) = (Rank(u32::try_from(seat.rank)?), u32::try_from(seat.ranks)?);
            client.join(&seat.name, rank, ranks, JOIN)?
        };
        let mut trainer = Self {
            name: seat.name.clone(),
            events: client.events(None),
            since_ns: now_us() * 1000,
            gradients,
            scalar: scalar?,
            whole: whole?,
            buffer: Vec::with_capacity(length),
            model,
            saved: Instant::now(),
            excluded: 0,
            newcomers: false,
            communicator: Some(communicator),
            client,
            recipe,
        };
        print(&Line::Joined { at_us: now_us() })?;
        if trainer.recipe.subscribed {
            // It begins with what happens from now on.
            trainer.events.read(Duration::ZERO)?;
        }
        if enters {
            trainer.synchronize_state()?;
        }
        Ok(trainer)
    }

    fn communicator(&self) -> Result<&Communicator> {
        self.communicator.as_ref().context("no communicator")
    }

    fn rank(&self) -> Result<usize> {
        Ok(self.communicator()?.rank().0 as usize)
    }

    fn ranks(&self) -> Result<usize> {
        Ok(self.communicator()?.ranks() as usize)
    }

    fn state(&self) -> PathBuf {
        self.recipe.shared.join("state")
    }

    /// Trains until the work is done or this rank has left.
    pub fn train(mut self) -> Result<()> {
        let mut accumulate = self.recipe.accumulate.0;
        while self.model.done < self.recipe.work {
            match self.step(accumulate) {
                Ok(chosen) => {
                    let decision = chosen.decision;
                    accumulate = decision.accumulate.max(self.recipe.accumulate.0);
                    if decision.save && self.model.done < self.recipe.work {
                        self.save(&chosen.reason)?;
                    }
                    if decision.excludes(self.rank()?) {
                        self.communicator = None;
                        return print(&Line::Left { at_us: now_us() });
                    }
                    if decision.regroup {
                        self.regroup()?;
                        self.synchronize_state()?;
                    }
                }
                Err(error) => {
                    self.recover(&error)?;
                    accumulate = self.recipe.accumulate.0;
                }
            }
        }
        let digest = self.model.digest();
        let [least, most] =
            [ReduceOp::Min, ReduceOp::Max].map(|reduce| self.all_reduce_scalar(digest, reduce));
        ensure!(least? == most?, "ranks have different models in the end");
        let ((correct, tested), micro_batches) = (self.model.test()?, self.model.micro_batches);
        print(&Line::Finished { at_us: now_us(), micro_batches, correct, tested })
    }

    /// Computes, exchanges, adds up; what comes next.
    fn step(&mut self, accumulate: u32) -> Result<StepChoice> {
        let (rank, ranks) = (self.rank()?, self.ranks()? as u64);
        let (each, began) = (u64::from(accumulate), Instant::now());
        // The provider is asked while the accelerator computes.
        let mut chosen = if rank == 0 { self.decide()? } else { StepChoice::default() };
        let Self { model, buffer, gradients, .. } = self;
        model.gradient(model.micro_batches + rank as u64 * each, each, buffer)?;
        buffer.extend(chosen.decision.encode());
        std::thread::sleep((self.recipe.compute * accumulate).saturating_sub(began.elapsed()));
        gradients.write(0, buffer)?;
        let called = Instant::now();
        let communicator = self.communicator.as_ref().context("no communicator")?;
        communicator.all_reduce_in_place(gradients, ReduceOp::Sum)?.wait(OPERATION)?;
        let collective_us = called.elapsed().as_micros() as u64;
        gradients.read(0, buffer)?;
        let loss = f64::from(model.step(each * ranks, self.recipe.worth(each, ranks), buffer)?);
        let (_, decision) = buffer.split_last_chunk().context("no decision")?;
        chosen.decision = Decision::decode(*decision);
        let (done, ranks) = (model.done, ranks as usize);
        print(&Line::Step { at_us: now_us(), done, ranks, accumulate, collective_us, loss })?;
        Ok(chosen)
    }

    /// The first rank's decision for all.
    fn decide(&mut self) -> Result<StepChoice> {
        let Recipe { accumulate, every, cost, .. } = self.recipe;
        if !self.recipe.subscribed {
            let save = self.saved.elapsed() >= every;
            // Whoever waits is taken in when nothing is lost by it.
            let regroup = save && self.has_waiting_rank()?;
            let decision = Decision { accumulate: accumulate.0, save, regroup, excluded: 0 };
            return Ok(StepChoice { decision, reason: "due".to_owned() });
        }
        for event in self.events.read(Duration::ZERO)?.events {
            self.handle_event(&event)?;
        }
        let checkpoint =
            Some(Checkpoint { every, cost, last: self.saved.elapsed(), importance: Priority::Normal });
        let choice = self.client.iteration(&self.name, &Knobs { accumulate, checkpoint })?;
        let regroup = self.excluded != 0 || self.newcomers;
        let decision = Decision {
            accumulate: choice.accumulate,
            save: choice.checkpoint,
            regroup,
            excluded: self.excluded,
        };
        Ok(StepChoice { decision, reason: format!("{:?}", choice.reason).to_lowercase() })
    }

    fn handle_event(&mut self, event: &Event) -> Result<()> {
        if event.communicator != self.name {
            return Ok(());
        }
        let congested =
            matches!(event.kind, EventKind::Congestion(CongestionLevel::Mild | CongestionLevel::Severe));
        print(&Line::Notified { at_us: now_us(), what: format!("{:?}", event.kind), congested })?;
        let of_this = event.since_ns >= self.since_ns;
        match &event.kind {
            EventKind::Maintenance { ranks, .. } if of_this => {
                let bits = ranks.iter().filter(|rank| (rank.0 as usize) < MOST_RANKS).map(|rank| 1 << rank.0);
                self.excluded = bits.fold(0, |all, bit: u64| all | bit);
            }
            EventKind::Newcomers { waiting } => self.newcomers = *waiting > 0,
            // More is accumulated under congestion by the provider's own choice, and what is lost is seen when an operation fails.
            _ => {}
        }
        Ok(())
    }

    fn has_waiting_rank(&self) -> Result<bool> {
        for entry in std::fs::read_dir(&self.recipe.shared)? {
            if entry?.file_name().to_string_lossy().starts_with("waits-") {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// All ranks wait for the first one, which writes the state that all have.
    fn save(&mut self, because: &str) -> Result<()> {
        if self.rank()? == 0 {
            std::thread::sleep(self.recipe.cost);
            self.model.save(&self.state())?;
            let because = because.to_owned();
            print(&Line::Saved { at_us: now_us(), because })?;
        }
        self.saved = Instant::now();
        Ok(())
    }

    /// Goes on with who is left: from memory, or as plain launchers do, from what was saved.
    fn recover(&mut self, error: &anyhow::Error) -> Result<()> {
        match error.downcast_ref::<Error>() {
            Some(Error::Operation { status: Status::RankLost | Status::Timeout, .. }) => {}
            _ => bail!("{error:#}"),
        }
        print(&Line::Failed { at_us: now_us(), what: format!("{error:#}") })?;
        let before = self.model.done;
        self.regroup()?;
        if !self.recipe.subscribed {
            self.model = if self.rank()? == 0 {
                std::thread::sleep(self.recipe.cost);
                State::restore(&self.state())?
            } else {
                State::new()?
            };
            self.saved = Instant::now();
        }
        self.synchronize_state()?;
        print(&Line::Restored { at_us: now_us(), lost: before.saturating_sub(self.model.done) })
    }

    fn regroup(&mut self) -> Result<()> {
        let began = Instant::now();
        let options = RegroupOptions { timeout: JOIN, ..RegroupOptions::default() };
        self.communicator = Some(self.communicator()?.regroup(&options)?);
        (self.excluded, self.newcomers, self.since_ns) = (0, false, now_us() * 1000);
        let took_us = began.elapsed().as_micros() as u64;
        print(&Line::Regrouped { at_us: now_us(), ranks: self.ranks()?, took_us })
    }

    /// All ranks get the state of the one that has done most. Newcomers have none. Of those that were there when ranks were lost, some
    /// may have ended an operation that failed at others.
    fn synchronize_state(&mut self) -> Result<()> {
        let (rank, most) = (self.rank()? as u64, MOST_RANKS as u64);
        let furthest =
            self.all_reduce_scalar(self.model.micro_batches * most + (most - 1 - rank), ReduceOp::Max)?;
        let least = self.all_reduce_scalar(self.model.micro_batches, ReduceOp::Min)?;
        let (micro_batches, root) = (furthest / most, most - 1 - furthest % most);
        if micro_batches == least {
            return Ok(());
        }
        self.broadcast_state(micro_batches, u32::try_from(root)?)
    }

    fn broadcast_state(&mut self, micro_batches: u64, root: u32) -> Result<()> {
        let mut words = self.model.words();
        self.whole.write(0, &words)?;
        ended(self.communicator()?.broadcast(&self.whole, Rank(root))?)?;
        self.whole.read(0, &mut words)?;
        self.model.take(&words)?;
        let found = self.model.micro_batches;
        ensure!(found == micro_batches, "rank {root} has {found} micro-batches, not {micro_batches}");
        Ok(())
    }

    fn all_reduce_scalar(&self, own: u64, reduce: ReduceOp) -> Result<u64> {
        self.scalar.write(0, &[own])?;
        ended(self.communicator()?.all_reduce_in_place(&self.scalar, reduce)?)?;
        let mut agreed = [0];
        self.scalar.read(0, &mut agreed)?;
        let [agreed] = agreed;
        Ok(agreed)
    }
}

fn ended(mut operation: Operation) -> Result<()> {
    operation.wait(OPERATION)?;
    Ok(())
}
