//! Long passes over memory, which threads of one agent share: whose pass it is offers its pieces, who idles takes some of them.
//!
//! A large operation within a host is passes over memory and nothing else, and one core moves less than the memory can. A pass of an
//! operation that moves more than [`SHARE_ABOVE`] bytes is cut into pieces. The thread whose pass it is takes one after the other;
//! threads without work of their own for [`QUIET`] take pieces too. A sleeping one is woken by its bell, at most one a pass. The pass is over when every piece is done.
//!
//! A thread that serves a tenant's small operations is never quiet, so that nobody's large tensors hold those up. One that helps looks
//! for work of its own after [`LONGEST`]. Spans keep the memory mapped until the last piece is done, whatever becomes of the tenant.

use crate::step::{ExecuteError, Located, MAX_DESTINATIONS};
use arrayvec::ArrayVec;
use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use harmonaize_kernels::{KernelError, PassOptions};
use harmonaize_plan::MAX_SOURCES;
use harmonaize_shm::Span;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Operations that read and write more bytes than this share their passes: some 60 us of one core, of which waking another takes half.
/// AllReduces of 4 ranks are level at 2 MiB, and take 0.7 of the time from 4 MiB on.
const SHARE_ABOVE: usize = 2 << 20;
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
        self.kernel.run(PassOptions::part_of(self.whole), &sources, &destinations)
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
    /// Of the tensors, or of the pass if it has more: a piece streams where the pass would.
    whole: usize,
    bytes: usize,
    /// Bytes of a piece.
    piece: usize,
    sources: ArrayVec<Span, MAX_SOURCES>,
    destinations: ArrayVec<Span, MAX_DESTINATIONS>,
}

impl Shared {
    fn run(&self, piece: usize) -> Result<(), ExecuteError> {
        let from = piece.saturating_mul(self.piece);
        let bytes = self.piece.min(self.bytes.saturating_sub(from));
        let sources: ArrayVec<_, MAX_SOURCES> = self.sources.iter().map(located).collect();
        let destinations: ArrayVec<_, MAX_DESTINATIONS> = self.destinations.iter().map(located).collect();
        let (kernel, whole) = (&self.kernel, self.whole);
        let pass = Pass { kernel, whole, sources: &sources, destinations: &destinations };
        pass.run(from as u64, bytes as u64)
    }
}

/// A pass with pieces to take.
#[derive(Debug)]
struct Offer {
    pass: Shared,
    /// The first piece that nobody has taken, and how many there are.
    next: usize,
    pieces: usize,
}

impl Offer {
    /// The next piece, if one is left.
    fn take(&mut self) -> Option<usize> {
        let piece = self.next;
        (piece < self.pieces).then(|| {
            self.next += 1;
            piece
        })
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
    offer: Mutex<Option<Offer>>,
    /// Threads that do a piece of the offer.
    helping: AtomicUsize,
    /// Whether a piece of the offer failed on another thread.
    failed: AtomicBool,
}

impl Place {
    fn new() -> Self {
        Self {
            quiet_since: AtomicU64::new(BUSY),
            sleeps: AtomicBool::new(false),
            bell: OnceLock::new(),
            offered: AtomicBool::new(false),
            offer: Mutex::new(None),
            helping: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
        }
    }

    /// Whether it has had no work of its own for [`QUIET`].
    fn is_quiet(&self, now: u64) -> bool {
        // `BUSY` lies after any time.
        let quiet = now.checked_sub(self.quiet_since.load(Ordering::Relaxed));
        quiet.is_some_and(|ns| Duration::from_nanos(ns) >= QUIET)
    }

    fn offer(&self) -> MutexGuard<'_, Option<Offer>> {
        self.offer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next piece of the owner's own pass.
    fn take(&self) -> Option<usize> {
        self.offer().as_mut()?.take()
    }

    /// A piece for another thread, which knows the pass already or gets it; it counts as helping until it says that it is done.
    fn take_for_other(&self, known: Option<Shared>) -> Option<(Shared, usize)> {
        let mut offer = self.offer();
        let offer = offer.as_mut()?;
        let piece = offer.take()?;
        let pass = known.filter(|known| known.number == offer.pass.number);
        let pass = pass.unwrap_or_else(|| offer.pass.clone());
        self.helping.fetch_add(1, Ordering::AcqRel);
        Some((pass, piece))
    }
}

/// Closes an offer, however its pass ends, and waits for who works on its pieces.
struct Closing<'a>(&'a Place);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.offered.store(false, Ordering::Release);
        let offer = self.0.offer().take();
        let mut spins = 0;
        while self.0.helping.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        drop(offer);
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
        for place in open {
            let mut known = None;
            while begun.elapsed() < LONGEST
                && let Some((pass, piece)) = place.take_for_other(known.take())
            {
                let result = catch_unwind(AssertUnwindSafe(|| pass.run(piece)));
                if !matches!(result, Ok(Ok(()))) {
                    place.failed.store(true, Ordering::Relaxed);
                }
                place.helping.fetch_sub(1, Ordering::Release);
                known = Some(pass);
                done += 1;
            }
        }
        done
    }

    /// Runs a pass: alone if it is short or nobody is quiet, else with who is. Nothing is allocated.
    pub(crate) fn run(&mut self, pass: &Pass<'_, '_>) -> Result<(), ExecuteError> {
        let bytes = pass.bytes();
        let mut operands = pass.sources.iter().chain(pass.destinations);
        if operands.any(|(.., other)| *other != bytes as u64) {
            return Err(ExecuteError::Kernel("its operands differ in length".to_owned()));
        }
        let operands = (pass.sources.len() + pass.destinations.len()).max(1);
        let touched = bytes.saturating_mul(operands);
        // A pass may be one block of many: four ranks read and write the eightfold of what each has.
        let long = touched.max(pass.whole.saturating_mul(8)) > SHARE_ABOVE && touched >= 2 * PIECE;
        if !long || !self.wake_one() {
            return pass.run(0, bytes as u64);
        }
        self.share(pass, bytes, (PIECE / operands).next_multiple_of(GRAIN))
    }

    /// Whether a thread is there that helps; one that sleeps is woken if all that help do.
    fn wake_one(&self) -> bool {
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

    fn share(&mut self, pass: &Pass<'_, '_>, bytes: usize, piece: usize) -> Result<(), ExecuteError> {
        let spans = |located: &Located<'_>| Span::new(located.0, located.1, located.2);
        self.passes += 1;
        let whole = pass.whole.max(bytes);
        let mut shared = Shared {
            number: self.passes,
            kernel: pass.kernel.clone(),
            whole,
            bytes,
            piece,
            sources: ArrayVec::new(),
            destinations: ArrayVec::new(),
        };
        for source in pass.sources.iter().take(MAX_SOURCES) {
            shared.sources.push(spans(source)?);
        }
        for destination in pass.destinations.iter().take(MAX_DESTINATIONS) {
            shared.destinations.push(spans(destination)?);
        }
        let Some(own) = self.own() else { return pass.run(0, bytes as u64) };
        own.failed.store(false, Ordering::Relaxed);
        *own.offer() = Some(Offer { pass: shared, next: 1, pieces: bytes.div_ceil(piece) });
        let closing = Closing(own);
        own.offered.store(true, Ordering::SeqCst);
        let part = Pass { whole, ..*pass };
        let mut next = Some(0);
        while let Some(number) = next {
            let from = number * piece;
            part.run(from as u64, piece.min(bytes.saturating_sub(from)) as u64)?;
            next = own.take();
        }
        drop(closing);
        match own.failed.load(Ordering::Relaxed) {
            true => Err(ExecuteError::Kernel("a piece of it failed on another thread".to_owned())),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_shm::Memory;
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

    /// Runs what it is given while another thread helps; the pieces that it did.
    fn beside_a_helper(run: impl FnOnce(&mut PassSharing)) -> u64 {
        let mut parts = PassSharing::among(2);
        let helper = parts.pop().unwrap();
        let mut owner = parts.pop().unwrap();
        let (end, ended) = channel::<()>();
        let (begin, begun) = channel();
        let helping = std::thread::spawn(move || {
            let mut pieces = 0;
            helper.quiet();
            std::thread::sleep(2 * QUIET);
            begin.send(()).unwrap();
            while ended.try_recv().is_err() {
                match helper.help() {
                    0 => std::thread::yield_now(),
                    some => pieces += some,
                }
            }
            pieces
        });
        begun.recv().unwrap();
        run(&mut owner);
        end.send(()).unwrap();
        helping.join().unwrap()
    }

    #[test]
    fn a_shared_pass_sums_as_one_thread_does() {
        let tensors: Vec<_> = (0..4).map(|seed| memory(&numbers(seed))).collect();
        let expected: Vec<f32> =
            (0..BYTES / 4).map(|index| (0..4).map(|seed| numbers_at(seed, index)).sum()).collect();
        let kernel = Kernel::Reduce { op: ReduceOp::Sum, dtype: Dtype::F32, divide: None };
        let outputs: Vec<_> = (0..2).map(|_| Memory::private(BYTES).unwrap()).collect();
        let whole = |memory| (memory, 0, BYTES as u64);
        let helped = beside_a_helper(|owner| {
            let sources: Vec<Located<'_>> = tensors.iter().map(whole).collect();
            let destinations: Vec<Located<'_>> = outputs.iter().map(whole).collect();
            for _ in 0..200 {
                outputs.iter().for_each(|output| output.write(0, &vec![0xff; BYTES]).unwrap());
                let pass = Pass { kernel: &kernel, whole: 0, sources: &sources, destinations: &destinations };
                owner.run(&pass).unwrap();
                assert!(contents(&outputs[0]) == expected && contents(&outputs[1]) == expected);
                if owner.passes > 20 {
                    break;
                }
            }
        });
        assert!(helped > 0, "the other thread did nothing");
    }

    #[test]
    fn what_a_kernel_refuses_is_an_error_of_the_owner() {
        let (from, to) = (memory(&numbers(1)), memory(&numbers(2)));
        let kernel = Kernel::SumScaled { dtype: Dtype::F32, factors: ArrayVec::from_iter([1.0, 2.0]) };
        beside_a_helper(|owner| {
            let bytes = BYTES as u64;
            for _ in 0..20 {
                let (sources, destinations) = ([(&from, 0, bytes)], [(&to, 0, bytes)]);
                let pass = Pass { kernel: &kernel, whole: 0, sources: &sources, destinations: &destinations };
                assert!(matches!(owner.run(&pass), Err(ExecuteError::Kernel(_))));
                let short = [(&to, 0, bytes - 4)];
                let pass = Pass { kernel: &Kernel::Copy, whole: 0, sources: &sources, destinations: &short };
                assert!(matches!(owner.run(&pass), Err(ExecuteError::Kernel(_))));
            }
            let offered = owner.own().map(|own| own.offer().is_some());
            assert_eq!(offered, Some(false), "nothing is left open");
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
        owner
            .run(&Pass { kernel: &Kernel::Copy, whole: 0, sources: &sources, destinations: &destinations })
            .unwrap();
        assert!(owner.passes == 0 && contents(&to) == numbers(1), "alone");
    }
}
