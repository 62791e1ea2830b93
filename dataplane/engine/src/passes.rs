//! Long passes over memory, which threads of one agent share. The thread whose pass it is offers its pieces, and idle threads
//! take some of them.
//!
//! A large operation within a host is passes over memory and nothing else, and one core moves less than the memory can. A pass of an
//! operation that moves [`SHARE_FROM`] bytes or more is cut into pieces. The thread whose pass it is takes one after the other;
//! threads without work of their own for [`QUIET`] take pieces too. A sleeping one is woken by its bell, at most one a pass. The pass is over when every piece is done.
//!
//! A thread that serves a tenant's small operations is never quiet, so that nobody's large tensors hold those up. One that helps looks
//! for work of its own after [`LONGEST`]. Spans keep the memory mapped until the last piece is done, whatever becomes of the tenant.
//!
//! Where the owner's turn is over in its midst, a pass is closed with pieces left: see [`crate::slices`]. Nobody works on it until it is taken up.

use crate::slices::Slices;
use crate::step::{ExecuteError, Located, MAX_DESTINATIONS};
use arrayvec::ArrayVec;
use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use harmonaize_kernels::{KernelError, PassOptions};
use harmonaize_plan::MAX_SOURCES;
use harmonaize_shm::{MemoryError, Span};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Operations that read and write as many bytes share their passes. It is as much as the second-level cache of a core has. Two cores
/// keep in theirs what one can't, so that an AllToAll of 4 ranks of 256 KiB takes 0.55 of the time.
const SHARE_FROM: usize = 2 << 20;
/// Bytes that a piece reads and writes, about: some 5 us. It bounds how long one thread waits for another's last piece.
const PIECE: usize = 64 << 10;
/// Pieces begin at multiples of this many bytes: whole elements of any type, whole pages of most tensors.
const GRAIN: usize = 4096;
/// For how long a thread that helps has had no work of its own.
const QUIET: Duration = Duration::from_millis(1);
/// For how long a thread helps before it looks for work of its own.
const LONGEST: Duration = Duration::from_micros(200);
/// How often it is looked whether the last piece of another thread is done before the processor is given away.
const SPINS: u32 = 2000;
/// Of a thread that has work of its own.
const BUSY: u64 = u64::MAX;

/// What a pass does.
#[derive(Clone, Debug)]
pub(crate) enum Kernel {
    /// The first source goes to all destinations.
    Copy,
    /// Sources are reduced, and divided by so many ranks where it is an average's last pass.
    Reduce { op: ReduceOp, dtype: Dtype, divide: Option<u32> },
    /// Sources are added up, each multiplied by its factor.
    SumScaled { dtype: Dtype, factors: ArrayVec<f64, MAX_SOURCES> },
}

impl Kernel {
    fn run(
        &self,
        options: PassOptions,
        sources: &[View<'_>],
        destinations: &[ViewMut<'_>],
    ) -> Result<(), ExecuteError> {
        let done = match self {
            Self::Copy => {
                let source = sources.first().copied().ok_or(ExecuteError::NoSource)?;
                harmonaize_kernels::copy_with(options, source, destinations)
            }
            Self::Reduce { op, dtype, divide } => {
                harmonaize_kernels::reduce_with(options, *op, *dtype, sources, destinations, *divide)
            }
            Self::SumScaled { dtype, factors } => {
                harmonaize_kernels::sum_scaled_with(options, *dtype, sources, factors, destinations)
            }
        };
        done.map_err(|error: KernelError| ExecuteError::Kernel(error.to_string()))
    }
}

/// One pass: what it does, on tensors of how many bytes, from where and to where.
pub(crate) struct Pass<'a, 'b> {
    pub(crate) kernel: &'b Kernel,
    /// See [`PassOptions::part_of`].
    pub(crate) whole: usize,
    pub(crate) sources: &'b [Located<'a>],
    pub(crate) destinations: &'b [Located<'a>],
}

impl Pass<'_, '_> {
    /// Bytes of each operand.
    fn bytes(&self) -> usize {
        self.sources.first().map_or(0, |(.., bytes)| usize::try_from(*bytes).unwrap_or(usize::MAX))
    }

    /// Whether its operands have the same length.
    fn is_even(&self) -> bool {
        let mut operands = self.sources.iter().chain(self.destinations);
        operands.all(|(.., bytes)| *bytes == self.bytes() as u64)
    }

    /// How many operands there are, at least one.
    fn operands(&self) -> usize {
        (self.sources.len() + self.destinations.len()).max(1)
    }

    /// Bytes that it reads and writes.
    fn touched(&self) -> usize {
        self.bytes().saturating_mul(self.operands())
    }

    /// Bytes that a piece has of each operand, where slices have so many.
    fn piece(&self, slice: usize) -> usize {
        // Small ones are what tests ask for; 64 bytes are whole elements, too.
        let grain = slice.min(GRAIN).next_power_of_two().max(64);
        (PIECE.min(slice) / self.operands()).max(1).next_multiple_of(grain)
    }

    /// How many pieces it has.
    fn pieces(&self, slice: usize) -> usize {
        self.bytes().div_ceil(self.piece(slice))
    }

    /// A part of it, of so many bytes from an offset.
    fn run(&self, offset: u64, bytes: u64) -> Result<(), ExecuteError> {
        let mut sources = ArrayVec::<View<'_>, MAX_SOURCES>::new();
        for (memory, at, _) in self.sources.iter().take(MAX_SOURCES) {
            sources.push(memory.view(at.saturating_add(offset), bytes)?);
        }
        let mut destinations = ArrayVec::<ViewMut<'_>, MAX_DESTINATIONS>::new();
        for (memory, at, _) in self.destinations.iter().take(MAX_DESTINATIONS) {
            destinations.push(memory.view_mut(at.saturating_add(offset), bytes)?);
        }
        self.kernel.run(PassOptions::part_of(self.whole.max(self.bytes())), &sources, &destinations)
    }
}

/// Where a span lies.
pub(crate) fn located(span: &Span) -> Located<'_> {
    (span.memory(), span.offset() as u64, span.bytes() as u64)
}

/// A pass that any thread may do pieces of.
#[derive(Clone, Debug)]
struct Shared {
    /// The number among its thread's passes.
    number: u64,
    kernel: Kernel,
    /// Of the tensors.
    whole: usize,
    /// Of each operand.
    bytes: usize,
    /// Bytes of a piece.
    piece: usize,
    /// The number of its first piece among those of the offer.
    first: usize,
    sources: ArrayVec<Span, MAX_SOURCES>,
    destinations: ArrayVec<Span, MAX_DESTINATIONS>,
}

impl Shared {
    /// A pass by its number, that of its first piece, and the bytes of a piece.
    fn new(pass: &Pass<'_, '_>, number: u64, first: usize, piece: usize) -> Result<Self, MemoryError> {
        let mut shared = Self {
            number,
            kernel: pass.kernel.clone(),
            whole: pass.whole,
            bytes: pass.bytes(),
            piece,
            first,
            sources: ArrayVec::new(),
            destinations: ArrayVec::new(),
        };
        for (memory, at, bytes) in pass.sources.iter().take(MAX_SOURCES) {
            shared.sources.push(Span::new(memory, *at, *bytes)?);
        }
        for (memory, at, bytes) in pass.destinations.iter().take(MAX_DESTINATIONS) {
            shared.destinations.push(Span::new(memory, *at, *bytes)?);
        }
        Ok(shared)
    }

    /// Where a piece of the offer lies in each operand, and how many bytes it has there.
    fn range(&self, piece: usize) -> (u64, u64) {
        let from = piece.saturating_sub(self.first).saturating_mul(self.piece);
        (from as u64, self.piece.min(self.bytes.saturating_sub(from)) as u64)
    }

    fn run(&self, piece: usize) -> Result<(), ExecuteError> {
        let sources: ArrayVec<_, MAX_SOURCES> = self.sources.iter().map(located).collect();
        let destinations: ArrayVec<_, MAX_DESTINATIONS> = self.destinations.iter().map(located).collect();
        let (kernel, whole) = (&self.kernel, self.whole);
        let pass = Pass { kernel, whole, sources: &sources, destinations: &destinations };
        let (from, bytes) = self.range(piece);
        pass.run(from, bytes)
    }
}

/// Passes with pieces to take. Their owner takes from the front and others from the back. So a core touches again in the next operation
/// on the same tensors what it has touched.
#[derive(Debug, Default)]
struct Offer {
    passes: Vec<Shared>,
    /// The pieces that nobody has taken, numbered over all passes.
    open: Range<usize>,
}

impl Offer {
    /// Of which pass a piece is.
    fn pass_of(&self, piece: usize) -> Option<usize> {
        self.passes.partition_point(|pass| pass.first <= piece).checked_sub(1)
    }
}

/// One thread's place among the others.
#[derive(Debug)]
struct Place {
    /// Since when, in ns from the start, it has had no work of its own; or [`BUSY`].
    quiet_since: AtomicU64,
    /// Whether it sleeps, or is about to.
    sleeps: AtomicBool,
    bell: OnceLock<Arc<OwnedFd>>,
    /// Whether `offer` is worth a look.
    offered: AtomicBool,
    offer: Mutex<Offer>,
    /// Threads that do a piece of the offer.
    helping: AtomicUsize,
    /// Whether a piece of the offer failed on another thread.
    failed: AtomicBool,
    /// Nanoseconds that other threads took for pieces, since [`PassSharing::take_helped`].
    helped: AtomicU64,
}

impl Place {
    fn new() -> Self {
        Self {
            quiet_since: AtomicU64::new(BUSY),
            sleeps: AtomicBool::new(false),
            bell: OnceLock::new(),
            offered: AtomicBool::new(false),
            offer: Mutex::default(),
            helping: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            helped: AtomicU64::new(0),
        }
    }

    /// Whether it has had no work of its own for [`QUIET`].
    fn is_quiet(&self, now: u64) -> bool {
        // `BUSY` lies after any time.
        let quiet = now.checked_sub(self.quiet_since.load(Ordering::Relaxed));
        quiet.is_some_and(|ns| Duration::from_nanos(ns) >= QUIET)
    }

    fn offer(&self) -> MutexGuard<'_, Offer> {
        self.offer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next piece for the owner: the number of its pass, and where it lies in each operand.
    fn take(&self) -> Option<(usize, (u64, u64))> {
        let mut offer = self.offer();
        let piece = offer.open.next()?;
        let pass = offer.pass_of(piece)?;
        Some((pass, offer.passes.get(pass)?.range(piece)))
    }

    /// Takes a piece for another thread, which has its pass already or gets it. The thread counts as helping until it reports
    /// that it is done.
    fn take_for_other(&self, last: Option<Shared>) -> Option<(Shared, usize)> {
        let mut offer = self.offer();
        let piece = offer.open.next_back()?;
        let pass = offer.passes.get(offer.pass_of(piece)?)?;
        let pass = last.filter(|last| last.number == pass.number).unwrap_or_else(|| pass.clone());
        self.helping.fetch_add(1, Ordering::AcqRel);
        Some((pass, piece))
    }
}

/// Closes an offer, however its pass ends, and waits for who works on its pieces.
struct Closing<'a>(&'a Place);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.offered.store(false, Ordering::Release);
        self.0.offer().open = 0..0;
        let mut spins = 0;
        while self.0.helping.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        self.0.offer().passes.clear();
    }
}

/// An engine thread's part in the passes of all threads of its agent. The default is a thread without others.
#[derive(Debug, Default)]
pub struct PassSharing {
    number: usize,
    places: Arc<[Place]>,
    start: Option<Instant>,
    /// Passes that it has shared.
    passes: u64,
}

impl PassSharing {
    /// Of so many threads, a part for each.
    pub fn among(threads: usize) -> Vec<Self> {
        let places: Arc<[Place]> = (0..threads).map(|_| Place::new()).collect();
        let start = Some(Instant::now());
        (0..threads).map(|number| Self { number, places: Arc::clone(&places), start, passes: 0 }).collect()
    }

    fn own(&self) -> Option<&Place> {
        self.places.get(self.number).filter(|_| self.places.len() > 1)
    }

    fn others(&self) -> impl Iterator<Item = &Place> {
        self.places.iter().enumerate().filter(|(number, _)| *number != self.number).map(|(_, place)| place)
    }

    fn now(&self) -> u64 {
        let since = self.start.map_or(Duration::ZERO, |start| start.elapsed());
        u64::try_from(since.as_nanos()).unwrap_or(BUSY)
    }

    /// What wakes this thread.
    pub(crate) fn set_bell(&self, bell: &Arc<OwnedFd>) {
        if let Some(own) = self.own() {
            let _ = own.bell.set(Arc::clone(bell));
        }
    }

    /// The thread has work of its own.
    pub(crate) fn busy(&self) {
        if let Some(own) = self.own()
            && own.quiet_since.load(Ordering::Relaxed) != BUSY
        {
            own.quiet_since.store(BUSY, Ordering::Relaxed);
        }
    }

    /// The thread has found no work of its own.
    pub(crate) fn quiet(&self) {
        if let Some(own) = self.own()
            && own.quiet_since.load(Ordering::Relaxed) == BUSY
        {
            own.quiet_since.store(self.now(), Ordering::Relaxed);
        }
    }

    /// Announces that the thread will sleep; false if there is a pass to help with.
    pub(crate) fn prepare_sleep(&self) -> bool {
        let Some(own) = self.own() else { return true };
        own.sleeps.store(true, Ordering::SeqCst);
        let helps = own.is_quiet(self.now());
        !(helps && self.others().any(|place| place.offered.load(Ordering::SeqCst)))
    }

    /// Takes the announcement back.
    pub(crate) fn cancel_sleep(&self) {
        if let Some(own) = self.own() {
            own.sleeps.store(false, Ordering::Relaxed);
        }
    }

    /// Does pieces of the others' passes, if this thread is quiet. Returns how many.
    pub(crate) fn help(&self) -> u64 {
        let Some(own) = self.own() else { return 0 };
        let mut open = self.others().filter(|place| place.offered.load(Ordering::Acquire)).peekable();
        if open.peek().is_none() || !own.is_quiet(self.now()) {
            return 0;
        }
        let (begun, mut done) = (Instant::now(), 0);
        let mut now = begun;
        for place in open {
            let mut last = None;
            while now.saturating_duration_since(begun) < LONGEST
                && let Some((pass, piece)) = place.take_for_other(last.take())
            {
                let result = catch_unwind(AssertUnwindSafe(|| pass.run(piece)));
                if !matches!(result, Ok(Ok(()))) {
                    place.failed.store(true, Ordering::Relaxed);
                }
                let since = std::mem::replace(&mut now, Instant::now());
                let took = now.saturating_duration_since(since).as_nanos();
                place.helped.fetch_add(u64::try_from(took).unwrap_or(u64::MAX), Ordering::Relaxed);
                place.helping.fetch_sub(1, Ordering::Release);
                last = Some(pass);
                done += 1;
            }
        }
        done
    }

    /// Nanoseconds that other threads took for this one's passes since the last call.
    pub(crate) fn take_helped(&self) -> u64 {
        let helped = self.own().map(|own| &own.helped).filter(|helped| helped.load(Ordering::Relaxed) > 0);
        helped.map_or(0, |helped| helped.swap(0, Ordering::Relaxed))
    }

    /// Runs passes of which none reads what another writes. It runs alone if they are short or nobody is quiet, else with who is.
    /// Nothing is allocated once as many have been shared at a time. Returns whether all is done, which it is not where the turn
    /// is over; what was done in an earlier turn is skipped.
    pub(crate) fn run(&mut self, passes: &[Pass<'_, '_>], slices: &mut Slices) -> Result<bool, ExecuteError> {
        if passes.iter().any(|pass| !pass.is_even()) {
            return Err(ExecuteError::Kernel("its operands differ in length".to_owned()));
        }
        let pieces: usize = passes.iter().map(|pass| pass.pieces(slices.bytes())).sum();
        let Some(open) = slices.open(pieces) else { return Ok(true) };
        let touched: usize = passes.iter().map(Pass::touched).sum();
        let whole = passes.iter().map(|pass| pass.whole).max().unwrap_or(0);
        // They may be one block of many: four ranks read and write the eightfold of what each has.
        let long = touched.max(whole.saturating_mul(8)) >= SHARE_FROM && touched >= 2 * PIECE;
        let left = open.len();
        let rest = if long && self.wake_one() {
            self.share(passes, slices, open)?
        } else if touched > slices.bytes() || left < pieces {
            // A short set may have been shared and closed. Nothing that is done is done again: it may be a sum in place.
            run_alone(passes, slices, open)?
        } else if slices.ends_before(touched) {
            open
        } else {
            passes.iter().try_for_each(|pass| pass.run(0, pass.bytes() as u64))?;
            0..0
        };
        // Pieces are about as long as each other.
        let done = left.saturating_sub(rest.len());
        Ok(slices.close(rest, touched.saturating_mul(done) / pieces.max(1)))
    }

    /// Whether a thread is there that helps; one that sleeps is woken if all that help do.
    pub(crate) fn wake_one(&self) -> bool {
        if self.own().is_none() {
            return false;
        }
        let now = self.now();
        let mut sleeper = None;
        for place in self.others().filter(|place| place.is_quiet(now)) {
            if !place.sleeps.load(Ordering::SeqCst) {
                return true;
            }
            sleeper = sleeper.or(Some(place));
        }
        let Some(sleeper) = sleeper else { return false };
        if sleeper.sleeps.swap(false, Ordering::SeqCst)
            && let Some(bell) = sleeper.bell.get()
        {
            // A full counter means that the bell is ringing already.
            let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
        }
        true
    }

    /// Offers these pieces of passes to all. Returns those that are left, which nobody works on.
    fn share(
        &mut self,
        passes: &[Pass<'_, '_>],
        slices: &mut Slices,
        open: Range<usize>,
    ) -> Result<Range<usize>, ExecuteError> {
        let Some(own) = self.places.get(self.number) else { return Err(ExecuteError::NoSource) };
        own.failed.store(false, Ordering::Relaxed);
        let closing = Closing(own);
        let mut offer = own.offer();
        offer.passes.clear();
        let mut first = 0;
        for pass in passes {
            self.passes += 1;
            let shared = Shared::new(pass, self.passes, first, pass.piece(slices.bytes()))?;
            first += pass.pieces(slices.bytes());
            offer.passes.push(shared);
        }
        offer.open = open;
        drop(offer);
        own.offered.store(true, Ordering::SeqCst);
        let piece = passes.first().map_or(PIECE, |pass| pass.piece(slices.bytes()) * pass.operands());
        let mut rest = 0..0;
        loop {
            // Others take from the back, so what is left is in one row.
            if slices.ends_before(piece) {
                rest = std::mem::take(&mut own.offer().open);
                break;
            }
            let Some((number, (from, bytes))) = own.take() else { break };
            passes.get(number).map_or(Err(ExecuteError::NoSource), |pass| pass.run(from, bytes))?;
        }
        drop(closing);
        match own.failed.load(Ordering::Relaxed) {
            true => Err(ExecuteError::Kernel("a piece of it failed on another thread".to_owned())),
            false => Ok(rest),
        }
    }
}

/// Runs these pieces of passes on this thread, as many at once as a slice has room for. Returns those that are left.
fn run_alone(
    passes: &[Pass<'_, '_>],
    slices: &mut Slices,
    open: Range<usize>,
) -> Result<Range<usize>, ExecuteError> {
    let (mut at, mut first) = (open.start, 0);
    for pass in passes {
        let bytes = pass.piece(slices.bytes());
        let touched = bytes.saturating_mul(pass.operands());
        let end = first + pass.pieces(slices.bytes());
        while at < end.min(open.end) {
            if slices.ends_before(touched) {
                return Ok(at..open.end);
            }
            let more = (slices.room() / touched).min(end.min(open.end) - at - 1);
            slices.count(more * touched);
            let from = (at - first) * bytes;
            let length = ((more + 1) * bytes).min(pass.bytes().saturating_sub(from));
            pass.run(from as u64, length as u64)?;
            at += more + 1;
        }
        first = end;
    }
    Ok(0..0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slices::{Progress, Slicing};
    use harmonaize_abi::ChannelId;
    use harmonaize_core::Action;
    use harmonaize_shm::Memory;
    use std::panic::resume_unwind;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;

    const BYTES: usize = (3 << 20) + 4 * 37;

    fn numbers_at(seed: usize, index: usize) -> f32 {
        ((index * 31 + seed * 17) % 1009) as f32
    }

    fn numbers(seed: usize) -> Vec<f32> {
        (0..BYTES / 4).map(|index| numbers_at(seed, index)).collect()
    }

    fn memory(values: &[f32]) -> Arc<Memory> {
        let memory = Memory::private(BYTES).unwrap();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        memory.write(0, &bytes).unwrap();
        memory
    }

    fn contents(memory: &Memory) -> Vec<f32> {
        let mut bytes = vec![0; BYTES];
        memory.read(0, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|four| f32::from_ne_bytes(four.try_into().unwrap())).collect()
    }

    /// Tensors, and two outputs for their sum.
    struct Sum {
        tensors: Vec<Arc<Memory>>,
        outputs: Vec<Arc<Memory>>,
        expected: Vec<f32>,
    }

    impl Sum {
        fn of(tensors: usize) -> Self {
            Self {
                tensors: (0..tensors).map(|seed| memory(&numbers(seed))).collect(),
                outputs: (0..2).map(|_| Memory::private(BYTES).unwrap()).collect(),
                expected: (0..BYTES / 4)
                    .map(|index| (0..tensors).map(|seed| numbers_at(seed, index)).sum())
                    .collect(),
            }
        }

        fn clear(&self) {
            self.outputs.iter().for_each(|output| output.write(0, &vec![0xff; BYTES]).unwrap());
        }

        fn is_right(&self) -> bool {
            self.outputs.iter().all(|output| contents(output) == self.expected)
        }

        fn pass<T>(&self, run: impl FnOnce(Pass<'_, '_>) -> T) -> T {
            let whole = |memory| (memory, 0, BYTES as u64);
            let sources: Vec<Located<'_>> = self.tensors.iter().map(whole).collect();
            let destinations: Vec<Located<'_>> = self.outputs.iter().map(whole).collect();
            let kernel = Kernel::Reduce { op: ReduceOp::Sum, dtype: Dtype::F32, divide: None };
            run(Pass { kernel: &kernel, whole: 0, sources: &sources, destinations: &destinations })
        }
    }

    /// A copy of each block: from where it lies to where it goes.
    fn copies<'a>(blocks: &'a [[Located<'a>; 2]]) -> Vec<Pass<'a, 'a>> {
        let copy = |[from, to]: &'a [Located<'a>; 2]| Pass {
            kernel: &Kernel::Copy,
            whole: BYTES,
            sources: std::slice::from_ref(from),
            destinations: std::slice::from_ref(to),
        };
        blocks.iter().map(copy).collect()
    }

    /// Of an action whose turn nothing ends.
    fn unsliced() -> Slices {
        Slicing::default().begin(Instant::now(), None, Progress::default())
    }

    /// Runs passes in slices of so many bytes, each in a turn of its own. Returns how many turns that took.
    fn run_sliced(owner: &mut PassSharing, passes: &[Pass<'_, '_>], bytes: usize) -> usize {
        let mut progress = Progress::default();
        for turns in 1.. {
            let mut slices = Slicing::each(bytes).begin(Instant::now(), None, progress);
            if owner.run(passes, &mut slices).unwrap() {
                return turns;
            }
            let left = owner.own().map_or(0, |own| own.offer().open.len());
            assert_eq!(left, 0, "nothing can be taken between two turns");
            progress = slices.stand_by(Action::CopyOut { channel: ChannelId(0) }).progress;
        }
        unreachable!("there are turns enough");
    }

    /// Calls `round` 20 times, and on until a thread that helps has done so many pieces. A busy machine may let it wait.
    fn beside_a_helper(least: u64, mut round: impl FnMut(&mut PassSharing)) {
        let mut parts = PassSharing::among(2);
        let helper = parts.pop().unwrap();
        let mut owner = parts.pop().unwrap();
        let (pieces, ended) = (AtomicU64::new(0), AtomicBool::new(false));
        let (begin, begun) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                helper.quiet();
                std::thread::sleep(2 * QUIET);
                begin.send(()).unwrap();
                while !ended.load(Ordering::Relaxed) {
                    match helper.help() {
                        0 => std::thread::yield_now(),
                        some => _ = pieces.fetch_add(some, Ordering::Relaxed),
                    }
                }
            });
            begun.recv().unwrap();
            let rounds = catch_unwind(AssertUnwindSafe(|| {
                let mut done = 0;
                while done < 20 || pieces.load(Ordering::Relaxed) < least {
                    round(&mut owner);
                    done += 1;
                }
            }));
            ended.store(true, Ordering::Relaxed);
            rounds.unwrap_or_else(|panic| resume_unwind(panic));
        });
    }

    #[test]
    fn a_shared_pass_sums_as_one_thread_does() {
        let sum = Sum::of(4);
        let mut helped = 0;
        beside_a_helper(1, |owner| {
            sum.clear();
            sum.pass(|pass| owner.run(&[pass], &mut unsliced())).unwrap();
            assert!(sum.is_right());
            helped += owner.take_helped();
            assert_eq!(owner.take_helped(), 0, "it is taken once");
        });
        assert!(helped > 0, "the helper's time is the owner's");
    }

    #[test]
    fn passes_shared_at_once_are_all_done() {
        // An AllToAll of three, with a block of nothing.
        let values: Vec<_> = (0..3).map(numbers).collect();
        let inputs: Vec<_> = values.iter().map(|one| memory(one)).collect();
        let outputs: Vec<_> = (0..3).map(|_| Memory::private(BYTES).unwrap()).collect();
        let block = (BYTES / 12 * 4) as u64;
        let spans = |of: usize| -> Vec<[Located<'_>; 2]> {
            let at = |from: usize, to: usize| {
                let bytes = if (from, to) == (1, 2) { 0 } else { block };
                [(&inputs[from], to as u64 * block, bytes), (&outputs[to], from as u64 * block, bytes)]
            };
            (0..3).map(|to| at(of, to)).collect()
        };
        let spans: Vec<_> = (0..3).flat_map(spans).collect();
        let passes = copies(&spans);
        beside_a_helper(1, |owner| {
            outputs.iter().for_each(|output| output.write(0, &vec![0xff; BYTES]).unwrap());
            owner.run(&passes, &mut unsliced()).unwrap();
            for (to, output) in outputs.iter().enumerate() {
                let written = contents(output);
                for from in (0..3).filter(|from| (*from, to) != (1, 2)) {
                    let (words, at) = (block as usize / 4, from * block as usize / 4);
                    let expected = &values[from][to * words..(to + 1) * words];
                    assert!(written[at..at + words] == *expected, "from {from} to {to}");
                }
            }
        });
    }

    #[test]
    fn slices_sum_as_one_pass_does_with_helpers_and_without() {
        let sum = Sum::of(3);
        for bytes in [100_000, 256 << 10] {
            sum.clear();
            let turns = sum.pass(|pass| run_sliced(&mut PassSharing::default(), &[pass], bytes));
            assert!(sum.is_right() && turns >= 5 * BYTES / bytes, "{turns} turns of {bytes} bytes");
        }
        beside_a_helper(1, |owner| {
            sum.clear();
            sum.pass(|pass| run_sliced(owner, &[pass], 256 << 10));
            assert!(sum.is_right());
        });
    }

    /// A set that is one slice long is closed with pieces left where it was shared. Then nobody helps any more.
    #[test]
    fn what_is_left_of_a_short_set_is_not_summed_twice() {
        let (to, other) = (memory(&numbers(1)), memory(&numbers(2)));
        let bytes = 80_000;
        let (sources, destinations) = ([(&to, 0, bytes), (&other, 0, bytes)], [(&to, 0, bytes)]);
        let kernel = Kernel::Reduce { op: ReduceOp::Sum, dtype: Dtype::F32, divide: None };
        let pass = Pass { kernel: &kernel, whole: BYTES, sources: &sources, destinations: &destinations };
        let mut slices = unsliced();
        let (pieces, done) = (pass.pieces(slices.bytes()), pass.piece(slices.bytes()) / 4);
        assert!(pieces > 1 && pass.touched() <= slices.bytes());
        assert_eq!(slices.open(pieces), Some(0..pieces));
        assert!(!slices.close(1..pieces, 0));
        let progress = slices.stand_by(Action::CopyOut { channel: ChannelId(0) }).progress;
        let mut slices = Slicing::default().begin(Instant::now(), None, progress);
        assert!(PassSharing::default().run(&[pass], &mut slices).unwrap());
        let sum: Vec<f32> = numbers(1).iter().zip(numbers(2)).map(|(one, two)| one + two).collect();
        let (left, end) = (contents(&to), bytes as usize / 4);
        assert!(left[..done] == numbers(1)[..done], "a piece that was done is done again");
        assert!(left[done..end] == sum[done..end], "a piece that was left is not done");
    }

    #[test]
    fn blocks_in_tiny_slices_are_all_copied() {
        let (from, to) = (memory(&numbers(5)), Memory::private(BYTES).unwrap());
        let wanted = numbers(5);
        // Of lengths that pieces don't divide, and one of nothing.
        let ends = [0, 4, 4, 3000, 9996, 10_000];
        let blocks: Vec<[Located<'_>; 2]> =
            ends.windows(2).map(|of| [(&from, of[0], of[1] - of[0]), (&to, of[0], of[1] - of[0])]).collect();
        let passes = copies(&blocks);
        for bytes in [1, 64, 65, 1000, 7000] {
            to.write(0, &vec![0xff; BYTES]).unwrap();
            let turns = run_sliced(&mut PassSharing::default(), &passes, bytes);
            assert!(turns > 1 && contents(&to)[..2500] == wanted[..2500], "{turns} turns of {bytes} bytes");
            let mut behind = [0; 4];
            to.read(10_000, &mut behind).unwrap();
            assert_eq!(behind, [0xff; 4], "nothing is written behind the last");
        }
    }

    #[test]
    fn what_a_kernel_refuses_is_an_error_of_the_owner() {
        let (from, to) = (memory(&numbers(1)), memory(&numbers(2)));
        let kernel = Kernel::SumScaled { dtype: Dtype::F32, factors: ArrayVec::from_iter([1.0, 2.0]) };
        let bytes = BYTES as u64;
        beside_a_helper(0, |owner| {
            let (sources, destinations) = ([(&from, 0, bytes)], [(&to, 0, bytes)]);
            let pass = Pass { kernel: &kernel, whole: 0, sources: &sources, destinations: &destinations };
            assert!(matches!(owner.run(&[pass], &mut unsliced()), Err(ExecuteError::Kernel(_))));
            let short = [(&to, 0, bytes - 4)];
            let pass = Pass { kernel: &Kernel::Copy, whole: 0, sources: &sources, destinations: &short };
            assert!(matches!(owner.run(&[pass], &mut unsliced()), Err(ExecuteError::Kernel(_))));
            let left = owner.own().map(|own| own.offer().passes.len());
            assert_eq!(left, Some(0), "nothing is left open");
        });
    }

    #[test]
    fn who_has_work_of_its_own_is_left_alone() {
        let mut parts = PassSharing::among(2);
        let helper = parts.pop().unwrap();
        let mut owner = parts.pop().unwrap();
        assert!(!owner.wake_one(), "a thread is busy until it says otherwise");
        helper.quiet();
        assert!(!owner.wake_one(), "it has been quiet for a moment only");
        std::thread::sleep(2 * QUIET);
        assert!(owner.wake_one());
        helper.busy();
        assert!(!owner.wake_one());
        let (from, to) = (memory(&numbers(1)), memory(&numbers(2)));
        let bytes = BYTES as u64;
        let (sources, destinations) = ([(&from, 0, bytes)], [(&to, 0, bytes)]);
        let pass = Pass { kernel: &Kernel::Copy, whole: 0, sources: &sources, destinations: &destinations };
        owner.run(&[pass], &mut unsliced()).unwrap();
        assert!(owner.passes == 0 && contents(&to) == numbers(1), "alone");
    }
}
