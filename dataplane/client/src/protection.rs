//! State that outlives the loss of ranks: snapshots of their tensors, and replicas of these at other ranks.

mod generations;
mod image;
#[cfg(test)]
mod random;
mod replicas;
mod snapshot;

use crate::communicator::{Communicator, OperationOptions};
use crate::pool::Pool;
use crate::tensor::Tensor;
use crate::{Error, Operation, ProtectionError, ProtocolError};
use generations::{Ledger, Member, Report, RestorePlan, StateTransfer, StoredState, agree};
use harmonaize_abi::{Dtype, Rank, ReduceOp};
use image::{Header, write_file};
use snapshot::{Snapshot, TensorCopy};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The class of replicas on their way: background.
const CLASS: u8 = 4;
/// The class of an agent's copies: bulk. Who waits for one that is late does not wait for a gap, too.
const COPY_CLASS: u8 = 3;

/// How state is protected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProtectOptions {
    /// How many other ranks store this rank's state: so many failure domains may be lost at once. The same at all ranks.
    pub replicas: u32,
    /// The failure domain: ranks that say the same are lost together, and store no replicas of each other. None: this machine, by the boot
    /// id of its kernel. Virtual machines on one host have one each; name their host, rack or zone here.
    pub domain: Option<u64>,
    /// How long to wait for the other ranks to call.
    pub timeout: Duration,
    /// Shapes of tensors by their names, as elements along each dimension. They are stored with the state. Others have one dimension.
    pub shapes: BTreeMap<String, Vec<u64>>,
}

impl Default for ProtectOptions {
    /// One replica, on another machine, 60 s, tensors of one dimension.
    fn default() -> Self {
        Self { replicas: 1, domain: None, timeout: Duration::from_secs(60), shapes: BTreeMap::new() }
    }
}

/// Tensors whose contents survive the loss of ranks ([`Communicator::protect`]).
///
/// ```no_run
/// # use harmonaize_client::{Communicator, Error, ProtectOptions, Rank, RegroupOptions, Tensor};
/// # fn train(job: Communicator, weights: &Tensor) -> Result<(), Error> {
/// let mut protection = job.protect(&[("weights", weights)], &ProtectOptions::default())?;
/// for step in 1..1000 {
///     // Train here.
///     protection.seal(step)?;
/// }
/// // After a loss:
/// let next = job.regroup(&RegroupOptions::default())?;
/// let restored = protection.restore(&next, &[])?;
/// println!("on from step {}, without ranks {:?}", restored.step, restored.lost);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Protection {
    /// Of the same ranks, for this alone.
    communicator: Communicator,
    /// The same, for replicas.
    channel: Communicator,
    /// The same, for copies within this host.
    copier: Communicator,
    member: Member,
    header: Header,
    /// With the byte of an image where each begins.
    tensors: Vec<(u64, Tensor)>,
    /// Ranks that store replicas of this one's state.
    holders: Vec<u32>,
    /// Of the ledger's generations.
    images: [Images; 2],
    ledger: Ledger,
    /// Of the newest generation.
    snapshot: Snapshot,
    /// Replicas of the newest generation that are not there yet.
    transfers: Vec<Transfer>,
    vote: Tensor,
}

/// Images of one generation, by the rank whose state they are: this rank's own, and replicas of others'.
type Images = BTreeMap<u32, Tensor>;

/// A replica on its way.
#[derive(Debug)]
struct Transfer {
    owner: u32,
    image: Tensor,
    peer: Rank,
    receives: bool,
    /// None while the attachment has no room for it.
    operation: Option<Operation>,
}

impl Transfer {
    fn start(&self, communicator: &Communicator) -> Result<Operation, Error> {
        match self.receives {
            true => communicator.recv(&self.image, self.peer),
            false => communicator.send(&self.image, self.peer),
        }
    }

    /// Whether it has ended. Begins it if it has not begun.
    fn poll(&mut self, communicator: &Communicator) -> Result<bool, Error> {
        if self.operation.is_none() {
            self.operation = match self.start(communicator) {
                Err(Error::TooMany { .. }) => return Ok(false),
                started => Some(started?),
            };
        }
        let ended = self.operation.as_mut().map(Operation::poll).transpose()?;
        Ok(ended.flatten().is_some())
    }
}

/// What came of a restore.
#[derive(Debug)]
#[non_exhaustive]
pub struct Restored {
    /// The step that all states are of.
    pub step: u64,
    /// Ranks of then, of which no process takes part.
    pub lost: Vec<Rank>,
    /// The states that this rank asked for, in that order.
    pub states: Vec<RankState>,
}

/// The state of a rank at a step: its protected tensors, by their names.
#[derive(Debug)]
pub struct RankState {
    image: Tensor,
    header: Header,
}

impl Communicator {
    /// Protects what these tensors hold at each step that is [sealed](Protection::seal). Every rank calls this, at the same place in the
    /// order of its [splits](Self::split), with as many tensors as it likes, of names of their own. Names and shapes may differ among ranks.
    ///
    /// Beside the tensors, each rank's arena then has a snapshot of them, and replicas of others', each of two steps: `2 * (1 + replicas)` times
    /// their bytes. Ranks store equally many states where the sizes of failure domains allow it. It also takes one of the job's communicators.
    ///
    /// # Errors
    /// [`ProtectionError::TooFewDomains`], [`ProtectionError::Differ`] where replicas differ, and [`ProtectionError::Peers`] where another
    /// rank fails; of this rank [`Error::Shape`] where safetensors has no such name or type, or a shape is of another number of elements,
    /// [`Error::NoRoom`], [`Error::Foreign`]. Those of a [split](Self::split).
    pub fn protect(
        &self,
        tensors: &[(&str, &Tensor)],
        options: &ProtectOptions,
    ) -> Result<Protection, Error> {
        let split = self.split(Some(0), self.rank().0, options.timeout)?;
        let communicator = split.ok_or(ProtocolError::NoCommunicator)?;
        let (rank, ranks, pool) = (communicator.rank(), communicator.ranks(), communicator.pool());
        let prepare = || {
            if tensors.iter().any(|(_, tensor)| !is_of(tensor, pool)) {
                return Err(Error::Foreign);
            }
            let header = Header::new(rank, tensors, &options.shapes)?;
            let domain = options.domain.map_or_else(machine, Ok)?;
            let numbers = vec![random()?, options.replicas.into(), domain, header.image_bytes()];
            Ok((header, numbers))
        };
        let (header, all) = exchange(&communicator, prepare())?;
        let (mut id, mut domains, mut states) = (0_u64, Vec::new(), Vec::new());
        for (owner, numbers) in (0..).zip(&all) {
            let &[random, replicas, domain, bytes] = numbers.as_slice() else { return Err(other_release()) };
            if replicas != u64::from(options.replicas) {
                let text =
                    format!("rank {owner} has {replicas} replicas, and rank {rank} {}", options.replicas);
                return Err(ProtectionError::Differ(text).into());
            }
            id = id.wrapping_add(random);
            domains.push(domain);
            states.push((owner, bytes));
        }
        let placement = replicas::place(&domains, options.replicas)?;
        let stored =
            (0..).zip(&placement).filter(|(owner, holders)| *owner == rank.0 || holders.contains(&rank.0));
        let stored: Vec<u32> = stored.map(|(owner, _)| owner).collect();
        states.retain(|(owner, _)| stored.contains(owner));
        let allocate = || {
            let image = |&(owner, bytes): &(u32, u64)| Ok((owner, Tensor::new(pool, Dtype::U8, bytes)?));
            let images = || states.iter().map(image).collect::<Result<Images, Error>>();
            Ok((([images()?, images()?], Tensor::new(pool, Dtype::U64, 3)?), vec![1]))
        };
        let ((images, vote), _) = exchange(&communicator, allocate())?;
        let begin = |name: &str| header.places.get(name).map_or(0, |place| place.begin);
        let tensors = tensors.iter().map(|(name, tensor)| Ok((begin(name), tensor.slice(..)?)));
        let tensors = tensors.collect::<Result<_, Error>>()?;
        let with = |class| communicator.with(OperationOptions { class, ..OperationOptions::default() });
        let (channel, copier) = (with(CLASS)?, with(COPY_CLASS)?);
        Ok(Protection {
            communicator,
            channel,
            copier,
            member: Member { id, rank: rank.0, ranks },
            header,
            tensors,
            holders: placement.into_iter().nth(rank.0 as usize).unwrap_or_default(),
            images,
            ledger: Ledger::default(),
            snapshot: Snapshot::default(),
            transfers: Vec::new(),
            vote,
        })
    }

    /// Takes part in a [restore](Protection::restore) as a newcomer, which has no state of its own. Returns the states of these ranks, as
    /// they were when they were protected.
    ///
    /// # Errors
    /// As [`Protection::restore`].
    pub fn restore_newcomer(&self, of: &[Rank]) -> Result<Restored, Error> {
        restore(self, None, of)
    }
}

impl Protection {
    /// Seals a step: copies the tensors, and begins to send the copy to the ranks that store replicas. The tensors may be written again when
    /// this returns; agents send meanwhile, in class background. Replicas for which the attachment has no room begin at a later call. All ranks
    /// call it, with the same step, larger than all before. It costs an AllReduce of 24 bytes, and a copy within the memory of this host
    /// in the calling thread; [`Self::begin_seal`] leaves that to the agent. Some ranks may call the one, and others the other.
    ///
    /// `false`: the step is not sealed, since at some rank the copy or the replicas of the one before are still on their way. Nobody waits for
    /// them here. `true` also says that all ranks have the step before whole, and its replicas.
    ///
    /// # Errors
    /// [`ProtectionError::Differ`] where the steps differ or do not ascend; and those of operations: then go on by
    /// [regrouping](Communicator::regroup) the job and [`Self::restore`]. After [`Error::Memory`], which leaves no snapshot here, no
    /// rank seals a further step.
    pub fn seal(&mut self, step: u64) -> Result<bool, Error> {
        let begun = self.begin(step)?;
        if begun {
            self.snapshot.copy_remaining()?;
            self.advance()?;
        }
        Ok(begun)
    }

    /// Begins to seal a step, as [`Self::seal`]; the agent copies the tensors, in class bulk, while the job computes. They may be read
    /// meanwhile, and written again once [`Self::end_seal`] has returned. It costs an AllReduce of 24 bytes.
    ///
    /// ```no_run
    /// # use harmonaize_client::{Error, Protection};
    /// # use std::time::Duration;
    /// # fn train(protection: &mut Protection) -> Result<(), Error> {
    /// for step in 1..1000 {
    ///     protection.begin_seal(step)?;
    ///     // Compute gradients here, which only reads the weights.
    ///     protection.end_seal(Duration::from_secs(60))?;
    ///     // Update the weights here.
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The agent has up to a quarter as many tensors in hand as the attachment has entries; those beyond are copied by [`Self::end_seal`].
    /// Each of them takes two entries, so that half are left to other operations. Where the attachment is not mapped, this call copies them all.
    ///
    /// # Errors
    /// As [`Self::seal`].
    pub fn begin_seal(&mut self, step: u64) -> Result<bool, Error> {
        let begun = self.begin(step)?;
        if begun {
            if !self.communicator.pool().is_mapped() {
                self.snapshot.copy_remaining()?;
            }
            self.advance()?;
        }
        Ok(begun)
    }

    /// Waits until the tensors are copied that [`Self::begin_seal`] has begun with; then they may be written. It copies what the agent
    /// has not begun, and begins to send replicas. Without such a call before, it does nothing.
    ///
    /// # Errors
    /// [`Error::WaitTimeout`] where they are not copied in time: the agent goes on, and the tensors must not be written. Those of operations:
    /// the step is not sealed then. [`Error::Memory`] as [`Self::seal`].
    pub fn end_seal(&mut self, timeout: Duration) -> Result<(), Error> {
        let deadline = Instant::now().checked_add(timeout);
        self.snapshot.copy_remaining()?;
        while !self.advance_snapshot()? {
            self.snapshot.wait_any(deadline)?;
        }
        self.advance().map(drop)
    }

    /// Has all ranks agree on a step, and begins its generation, of which nothing is copied yet. False where a rank is not done with the
    /// one before.
    fn begin(&mut self, step: u64) -> Result<bool, Error> {
        let progress = self.advance();
        // The complement has the least say which is the most.
        let done = matches!(progress, Ok(true)) && self.ledger.is_whole(self.member.rank);
        self.vote.write(0, &[u64::from(done), step, !step])?;
        self.communicator.all_reduce_in_place(&self.vote, ReduceOp::Min)?.wait(Duration::MAX)?;
        let mut votes = [0_u64; 3];
        self.vote.read(0, &mut votes)?;
        progress?;
        let [all_done, least, most] = votes;
        let last = self.ledger.newest();
        if least != !most || last.is_some_and(|last| step <= last) {
            let text = format!("steps {least} to {} are sealed after {last:?}", !most);
            return Err(ProtectionError::Differ(text).into());
        }
        if all_done == 0 {
            return Ok(false);
        }
        self.ledger.begin(step);
        self.images.swap(0, 1);
        self.header.step = step;
        for (owner, image) in &self.images[0] {
            if *owner != self.member.rank {
                let (image, peer) = (image.slice(..)?, Rank(*owner));
                self.transfers.push(Transfer { owner: *owner, image, peer, receives: true, operation: None });
                continue;
            }
            image.write_bytes(0, &self.header.encode())?;
            let copy = |(begin, tensor): &(u64, Tensor)| {
                let into = image.slice(*begin..begin + tensor.bytes())?;
                Ok(TensorCopy::new(tensor.slice(..)?, into))
            };
            let some = self.tensors.iter().filter(|(_, tensor)| tensor.bytes() > 0);
            self.snapshot = Snapshot::new(some.map(copy).collect::<Result<_, Error>>()?);
        }
        Ok(true)
    }

    /// Waits until the replicas of the last sealed step are at their ranks. It also waits until those that this rank
    /// stores are here.
    ///
    /// # Errors
    /// [`Error::WaitTimeout`] where they are not in time; they go on. [`Error::TooMany`] where operations in flight leave no room to begin.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        let deadline = Instant::now().checked_add(timeout);
        while !self.advance()? {
            if self.snapshot.is_unfinished() {
                let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                self.end_seal(left.unwrap_or(Duration::MAX))?;
            } else if self.transfers.iter().any(|transfer| transfer.operation.is_some()) {
                wait_any(
                    self.transfers.iter_mut().filter_map(|transfer| transfer.operation.as_mut()),
                    deadline,
                )?;
            } else if let Some(first) = self.transfers.first_mut() {
                first.operation = Some(first.start(&self.channel)?);
            }
        }
        Ok(())
    }

    /// The newest step of which this rank knows that all ranks have it whole, with its replicas. From then on [`Self::restore`] goes back no
    /// further, however ranks are lost in up to as many failure domains as there are replicas.
    pub fn committed(&self) -> Option<u64> {
        self.ledger.committed()
    }

    /// Writes this rank's last sealed state to a file of safetensors, with `rank` and `step` in its metadata; which step. The file
    /// is on disk as a whole then, or was not touched. Tensors have their shapes.
    ///
    /// # Errors
    /// [`ProtectionError::NothingSealed`], [`ProtectionError::File`].
    pub fn write_safetensors(&self, path: impl AsRef<Path>) -> Result<u64, Error> {
        let newest = self.stored().find(|(state, _)| state.owner == self.member.rank);
        let (state, image) = newest.ok_or(ProtectionError::NothingSealed)?;
        write_file(image, path.as_ref()).map(|()| state.step)
    }

    /// Goes back to the newest step that is whole of all ranks that were protected, those that are lost included. This rank's tensors are as
    /// they were then. The states of other ranks `of` then come beside, by their ranks of then: so that somebody goes on with what lost ranks had.
    ///
    /// Every rank of `next`, which comes of [regrouping](Communicator::regroup), calls this, or [`Communicator::restore_newcomer`]; and none
    /// has a send or receive of its own in flight there. It may be called again, also on a later communicator. To seal
    /// further steps, [protect](Communicator::protect) on `next`; and keep this one until that has [committed](Self::committed) a
    /// step. A loss before is restored by this one: all ranks try the newest that they have. Where that is
    /// [`ProtectionError::NothingSealed`] or [`ProtectionError::Differ`], as at all ranks alike, all restore by this one. The
    /// losses before and after count together, for no rank stores anew what the first have taken.
    ///
    /// # Errors
    /// [`ProtectionError::NothingSealed`], [`ProtectionError::TooManyLost`] with the ranks whose states are gone,
    /// [`ProtectionError::NoRank`], [`ProtectionError::Differ`] where ranks restore from different protections, [`ProtectionError::Peers`]
    /// where another rank has no room: these at all ranks alike. Here [`Error::NoRoom`], [`Error::Foreign`], and those of
    /// operations where another rank is lost: then regroup and restore again. The tensors are as they were, but for errors of [`Error::Memory`].
    pub fn restore(&mut self, next: &Communicator, of: &[Rank]) -> Result<Restored, Error> {
        restore(next, Some(self), of)
    }

    /// Begins what has not begun, and notes what has ended; whether everything has. A failure hides no end.
    fn advance(&mut self) -> Result<bool, Error> {
        let copied = self.advance_snapshot();
        let moved = self.advance_transfers();
        Ok(copied? && moved?)
    }

    /// The same of the snapshot. Once it is whole, replicas may go.
    fn advance_snapshot(&mut self) -> Result<bool, Error> {
        let me = self.member.rank;
        if self.snapshot.advance(&self.copier)?
            && let Some(image) = self.images[0].get(&me)
        {
            for holder in &self.holders {
                let (image, peer) = (image.slice(..)?, Rank(*holder));
                self.transfers.push(Transfer { owner: me, image, peer, receives: false, operation: None });
            }
            self.ledger.mark_whole(me);
        }
        Ok(!self.snapshot.is_unfinished())
    }

    /// The same of replicas.
    fn advance_transfers(&mut self) -> Result<bool, Error> {
        let Self { transfers, channel, ledger, .. } = self;
        let mut failed = None;
        transfers.retain_mut(|transfer| match transfer.poll(channel) {
            Ok(true) => {
                if transfer.receives {
                    ledger.mark_whole(transfer.owner);
                }
                false
            }
            Ok(false) => true,
            Err(error) => {
                failed.get_or_insert(error);
                true
            }
        });
        failed.map_or(Ok(transfers.is_empty()), Err)
    }

    /// The states that are whole here, those of the newest step first.
    fn stored(&self) -> impl Iterator<Item = (StoredState, &Tensor)> {
        let generations = self.ledger.whole().into_iter().zip(&self.images);
        generations.flat_map(|((step, whole), images)| {
            whole.iter().filter_map(move |owner| {
                let image = images.get(owner)?;
                Some((StoredState { owner: *owner, step: step?, bytes: image.bytes() }, image))
            })
        })
    }

    fn report(&self) -> Report {
        let stored = self.stored().map(|(state, _)| state).collect();
        Report { member: Some(self.member), committed: self.committed(), stored, requests: Vec::new() }
    }

    /// Copies this rank's state back into its tensors.
    fn copy_back(&self, image: &Tensor) -> Result<(), Error> {
        let copy = |(begin, tensor): &(u64, Tensor)| tensor.copy_from(0, image, *begin, tensor.bytes());
        self.tensors.iter().try_for_each(copy)
    }
}

impl RankState {
    /// Whose state it is, by the ranks of then.
    pub fn rank(&self) -> Rank {
        self.header.rank
    }

    /// Of which step.
    pub fn step(&self) -> u64 {
        self.header.step
    }

    /// Names, types and elements of its tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, Dtype, u64)> {
        self.header.places.iter().map(|(name, place)| (name.as_str(), place.dtype, place.elements))
    }

    /// Elements along each dimension of a tensor of that name.
    pub fn shape(&self, name: &str) -> Option<&[u64]> {
        self.header.places.get(name).map(|place| place.shape.as_slice())
    }

    /// Copies a tensor of it into one of the same type and number of elements.
    ///
    /// # Errors
    /// [`ProtectionError::Changed`] where there is none of the name, or of another type or number.
    pub fn read(&self, name: &str, into: &Tensor) -> Result<(), Error> {
        let place = self.header.places.get(name);
        let (protected, found) =
            (place.map(|place| (place.dtype, place.elements)), (into.dtype(), into.elements()));
        match place.filter(|_| protected == Some(found)) {
            Some(place) => into.copy_from(0, &self.image, place.begin, into.bytes()),
            None => Err(ProtectionError::Changed { name: name.to_owned(), protected, found }.into()),
        }
    }

    /// Writes it to a file, as [`Protection::write_safetensors`].
    ///
    /// # Errors
    /// [`ProtectionError::File`].
    pub fn write_safetensors(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        write_file(&self.image, path.as_ref())
    }
}

fn restore(
    next: &Communicator,
    mut protection: Option<&mut Protection>,
    of: &[Rank],
) -> Result<Restored, Error> {
    let next = next.with(OperationOptions::default())?;
    let (me, pool) = (next.rank().0, next.pool());
    let report = match &mut protection {
        Some(protection) if !is_of(&protection.vote, pool) => Err(Error::Foreign),
        Some(protection) => {
            // What has ended counts, whatever became of the others.
            let _ = protection.advance();
            // The tensors go back: what is copied of them from now on is of no step.
            protection.snapshot.forget();
            Ok(protection.report())
        }
        None => Ok(Report::default()),
    };
    let requests = of.iter().map(|rank| rank.0).collect();
    let numbers = report.map(|report| ((), Report { requests, ..report }.encode()));
    let ((), all) = exchange(&next, numbers)?;
    let reports: Option<Vec<Report>> = all.iter().map(|numbers| Report::decode(numbers)).collect();
    let plan = agree(&reports.ok_or_else(other_release)?)?;
    let protection = protection.as_deref();
    let stored = |transfer: &StateTransfer| {
        let mut stored = protection?.stored();
        let found = stored.find(|(state, _)| state.owner == transfer.owner && state.step == plan.step);
        found.filter(|_| transfer.from == me).map(|(_, image)| image)
    };
    let receive = |transfer: &StateTransfer| match stored(transfer) {
        Some(image) if transfer.own => image.slice(..),
        image => {
            let copy = Tensor::new(pool, Dtype::U8, transfer.bytes)?;
            image.map_or(Ok(()), |image| copy.copy_from(0, image, 0, transfer.bytes))?;
            Ok(copy)
        }
    };
    let mine = plan.transfers.iter().filter(|transfer| transfer.to == me);
    let received = mine.map(|transfer| Ok((transfer, receive(transfer)?))).collect::<Result<Vec<_>, Error>>();
    let (received, _) = exchange(&next, received.map(|received| (received, vec![1])))?;
    move_states(&next, &plan, received.iter().map(|(_, image)| image), stored)?;
    let mut states = Vec::new();
    let mut back = None;
    for (transfer, image) in received {
        let header = Header::decode(&image)?;
        let is_right = (header.rank.0, header.step) == (transfer.owner, plan.step);
        match protection.filter(|_| transfer.own) {
            _ if !is_right => return Err(ProtectionError::Damaged("it is another one".into()).into()),
            None => states.push(RankState { image, header }),
            Some(protection) if protection.header.places == header.places => back = Some((protection, image)),
            Some(_) => return Err(ProtectionError::Damaged("its tensors are others".into()).into()),
        }
    }
    if let Some((protection, image)) = back {
        protection.copy_back(&image)?;
    }
    Ok(Restored { step: plan.step, lost: plan.lost, states })
}

/// Moves states from rank to rank. All ranks begin their ends in the order of the plan: the first that has not ended can always begin at
/// both, however few operations the attachments have room for.
fn move_states<'a>(
    next: &Communicator,
    plan: &RestorePlan,
    mut received: impl Iterator<Item = &'a Tensor>,
    stored: impl Fn(&StateTransfer) -> Option<&'a Tensor>,
) -> Result<(), Error> {
    let me = next.rank().0;
    let mut begun = VecDeque::<Operation>::new();
    for transfer in &plan.transfers {
        let receives = transfer.to == me;
        let image = if receives { received.next() } else { stored(transfer) };
        let Some(image) = image.filter(|_| transfer.from != transfer.to) else { continue };
        let start = || match receives {
            true => next.recv(image, Rank(transfer.from)),
            false => next.send(image, Rank(transfer.to)),
        };
        let operation = loop {
            match start() {
                Err(Error::TooMany { .. }) if !begun.is_empty() => {
                    begun.pop_front().iter_mut().try_for_each(wait_for)?;
                }
                started => break started?,
            }
        };
        begun.push_back(operation);
    }
    begun.iter_mut().try_for_each(wait_for)
}

fn wait_for(operation: &mut Operation) -> Result<(), Error> {
    operation.wait(Duration::MAX).map(drop)
}

/// Gives every rank the numbers of all, by rank. A rank that has an error instead gives none: its caller gets the error, and those of
/// the others which ranks have one.
fn exchange<T>(
    communicator: &Communicator,
    own: Result<(T, Vec<u64>), Error>,
) -> Result<(T, Vec<Vec<u64>>), Error> {
    let numbers = own.as_ref().map_or(&[][..], |(_, numbers)| numbers.as_slice());
    let tensor = |elements: u64| Tensor::new(communicator.pool(), Dtype::U64, elements);
    let counts = tensor(communicator.ranks().into())?;
    counts.write(communicator.rank().0.into(), &[numbers.len() as u64])?;
    communicator.all_gather_in_place(&counts)?.wait(Duration::MAX)?;
    let mut each = vec![0_u64; communicator.ranks() as usize];
    counts.read(0, &mut each)?;
    let total = each.iter().fold(0_u64, |sum, count| sum.saturating_add(*count));
    let (input, output) = (tensor(numbers.len() as u64)?, tensor(total)?);
    input.write(0, numbers)?;
    if total > 0 {
        communicator.all_gather_v(&input, &output, &each)?.wait(Duration::MAX)?;
    }
    let mut all = vec![0_u64; total as usize];
    output.read(0, &mut all)?;
    let mut all = all.into_iter();
    let all: Vec<Vec<u64>> = each.iter().map(|count| all.by_ref().take(*count as usize).collect()).collect();
    let (own, _) = own?;
    let failed = (0..).zip(&all).filter(|(_, numbers)| numbers.is_empty());
    let failed: Vec<Rank> = failed.map(|(rank, _)| Rank(rank)).collect();
    match failed.is_empty() {
        true => Ok((own, all)),
        false => Err(ProtectionError::Peers { ranks: failed }.into()),
    }
}

/// Waits until one of these has ended, or the time has come. Its result stays.
fn wait_any<'a>(
    operations: impl Iterator<Item = &'a mut Operation>,
    deadline: Option<Instant>,
) -> Result<(), Error> {
    let mut operations: Vec<&mut Operation> = operations.collect();
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let ended = Operation::wait_any(&mut operations, left.unwrap_or(Duration::MAX))?;
    // One that has failed waits for the reason.
    let _ = operations.get_mut(ended).map(|operation| operation.wait(Duration::ZERO));
    Ok(())
}

fn is_of(tensor: &Tensor, pool: &Arc<Pool>) -> bool {
    Arc::ptr_eq(&tensor.block.pool, pool)
}

fn other_release() -> Error {
    ProtectionError::Differ("a rank has another release of this library".into()).into()
}

fn random() -> Result<u64, Error> {
    let mut bytes = [0; 8];
    let failed = |error| Error::System { call: "getrandom", source: std::io::Error::other(error) };
    getrandom::fill(&mut bytes).map_err(failed)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// The machine, by the first half of its kernel's boot id, which containers on it share.
fn machine() -> Result<u64, Error> {
    let failed = |source| Error::System { call: "read of the boot id", source };
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(failed)?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    u64::from_str_radix(&digits, 16).map_err(|error| failed(std::io::Error::other(error)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_shm::{ForkGuard, Memory};

    #[test]
    fn a_machine_is_the_same_each_time() {
        assert_eq!(machine().unwrap(), machine().unwrap());
        assert_ne!(random().unwrap(), random().unwrap());
    }

    #[test]
    fn a_state_goes_into_tensors_like_its_own_alone() {
        let pool = Pool::fixed(Memory::private(1 << 16).unwrap(), ForkGuard::new().unwrap());
        let tensor = |dtype, elements| Tensor::new(&pool, dtype, elements).unwrap();
        let weights = tensor(Dtype::F32, 2);
        let header = Header::new(Rank(3), &[("weights", &weights)], &BTreeMap::new()).unwrap();
        let image = tensor(Dtype::U8, header.image_bytes());
        image.write_bytes(0, &header.encode()).unwrap();
        weights.write(0, &[1.5_f32, -2.0]).unwrap();
        image.copy_from(header.places["weights"].begin, &weights, 0, 8).unwrap();
        let state = RankState { image, header };
        assert_eq!((state.rank(), state.step()), (Rank(3), 0));
        assert_eq!(state.tensors().collect::<Vec<_>>(), [("weights", Dtype::F32, 2)]);
        assert_eq!((state.shape("weights"), state.shape("bias")), (Some(&[2][..]), None));
        let copy = tensor(Dtype::F32, 2);
        state.read("weights", &copy).unwrap();
        let mut values = [0.0_f32; 2];
        copy.read(0, &mut values).unwrap();
        assert_eq!(values, [1.5, -2.0]);
        let changed = |name, into: &Tensor| match state.read(name, into) {
            Err(Error::Protection(error @ ProtectionError::Changed { .. })) => error.to_string(),
            other => panic!("{other:?}"),
        };
        let text = "the tensor \"weights\" has 3 elements of f32; protected were 2 of f32";
        assert_eq!(changed("weights", &tensor(Dtype::F32, 3)), text);
        let text = "the tensor \"weights\" has 2 elements of u32; protected were 2 of f32";
        assert_eq!(changed("weights", &tensor(Dtype::U32, 2)), text);
        assert!(changed("bias", &copy).ends_with("none was protected"));
    }
}
