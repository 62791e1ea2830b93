//! Operations in the order of CUDA's streams, on memory that CUDA knows.
//!
//! A stream copies the inputs into the arena, whose mappings are pinned at their first use, and then calls [`ready`] from the driver's
//! thread, which starts the operations. So no thread of the program waits for what it has asked its GPU for. How the outputs come back is the
//! caller's choice ([`Back`]).
//!
//! Ranks must start the operations of a communicator in one order, and streams are ready in any. So batches wait in [`WAITING`] in the
//! order of their calls: one starts once it is ready and no earlier one has a communicator of its.
//!
//! Architecture invariant: a function that the driver calls takes no lock that is held over a call of the driver's, and no interpreter's.

use crate::cuda::{CudaError, Driver, HostFunction, Stream, driver};
use crate::{Call, Staging};
use harmonaize_client as client;
use harmonaize_client::{Communicator, Error, ProtocolError, Receipt};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a start waits for an entry of the rings before it looks again.
const FULL: Duration = Duration::from_micros(50);

/// How often who waits looks whether the stream has failed.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Numbers for streams to wait for, in one allocation of pinned memory.
const FLAGS: usize = 1024;

/// What can go wrong.
#[derive(Clone, Debug)]
pub enum Failure {
    /// The operation, or its start.
    Client(Arc<Error>),
    /// The driver refused a call, or a stream has failed.
    Cuda(CudaError),
    /// A graph captures the stream, and would start the same operation again.
    Captured,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Client(error) => error.fmt(f),
            Self::Cuda(error) => error.fmt(f),
            Self::Captured => {
                f.write_str("a CUDA graph captures the stream; collectives go outside of the capture")
            }
        }
    }
}

impl std::error::Error for Failure {}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Client(Arc::new(error))
    }
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}

/// How a batch ended: with the receipt of its last operation.
pub type Outcome = Result<Receipt, Failure>;

/// The calls of one communicator, which start in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lane(u64);

impl Lane {
    /// One for a communicator.
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self(LAST.fetch_add(1, Ordering::Relaxed))
    }

    /// Whether all batches of the communicator have started, at little cost. It may say that they have not though they have.
    pub fn is_clear(self) -> bool {
        COUNT.load(Ordering::Acquire) == 0
    }

    /// Waits until all batches of the communicator have started: what is called next on the host's memory comes after them.
    pub fn wait(self) {
        if self.is_clear() {
            return;
        }
        let mut waiting = lock(&WAITING);
        while let Some(first) = waiting.iter().find(|batch| batch.lanes.contains(&self)).cloned() {
            waiting = MOVED.wait_timeout(waiting, CHECK_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
            if waiting.iter().any(|batch| Arc::ptr_eq(batch, &first)) {
                drop(waiting);
                first.check();
                waiting = lock(&WAITING);
            }
        }
    }
}

/// How outputs come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Back {
    /// In each call's own stream, which waits for the operations. Nobody else needs to.
    InOrder,
    /// In this stream, once the operations have ended: no stream waits for another rank. Who waits for the batch has the copies queued.
    AtEnd(Stream),
}

/// A call with staging memory and all that starts it.
#[derive(Debug)]
pub struct Submission {
    lane: Lane,
    members: Communicator,
    call: Call,
    staging: Staging,
    stream: Stream,
}

impl Submission {
    /// The stream with its context.
    fn ordered(&self, driver: &Driver) -> Result<Ordered, CudaError> {
        let mut pieces = self.call.inputs.iter().chain(&self.call.outputs);
        let address = pieces.next().map_or(0, |piece| piece.address);
        let context = driver.context(self.stream, address)?;
        Ok(Ordered { stream: self.stream, context })
    }

    /// Takes staging memory for a call on a communicator of the attachment.
    ///
    /// # Errors
    /// [`Error::NoRoom`] where the arena has no room for it.
    pub fn new(
        client: &client::Client,
        members: Communicator,
        lane: Lane,
        call: Call,
        stream: Stream,
    ) -> Result<Self, Error> {
        let staging = call.stage(client, &members)?;
        Ok(Self { lane, members, call, staging, stream })
    }
}

/// Calls back with how a batch ended.
type Callback = Box<dyn FnOnce(&Outcome) + Send>;

/// Calls in flight in the order of streams: they start together, and have ended when all have.
pub struct Batch {
    parts: Vec<Submission>,
    streams: Vec<Ordered>,
    lanes: BTreeSet<Lane>,
    /// Where outputs come back at the end.
    back: Option<Ordered>,
    /// What the streams wait for.
    flag: Option<Flag>,
    /// Streams whose inputs are not there yet.
    unready: AtomicUsize,
    state: Mutex<State>,
    ended: Condvar,
}

/// A stream and its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ordered {
    stream: Stream,
    context: usize,
}

struct State {
    /// Operations that have not ended.
    in_flight: usize,
    first: Option<Failure>,
    latest: Option<Receipt>,
    outcome: Option<Outcome>,
    callbacks: Vec<Callback>,
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("parts", &self.parts).field("back", &self.back).finish_non_exhaustive()
    }
}

/// Batches that have not started, in the order of their calls; how many; and what is notified when one has.
static WAITING: Mutex<Vec<Arc<Batch>>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);
static MOVED: Condvar = Condvar::new();

/// Mappings that are pinned, by their addresses.
static PINNED: Mutex<BTreeMap<usize, client::Pin>> = Mutex::new(BTreeMap::new());

/// Numbers in pinned memory that nobody waits for.
static FREE_FLAGS: Mutex<Vec<usize>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number in pinned memory that streams wait for.
struct Flag(usize);

impl Flag {
    fn take(driver: &Driver) -> Result<Self, CudaError> {
        let free = lock(&FREE_FLAGS).pop();
        let flag = match free {
            Some(address) => Self(address),
            // Without the lock: the driver may wait for streams here, and they for flags to be given back.
            None => {
                let memory = driver.allocate(FLAGS * size_of::<u32>())?.expose_provenance();
                lock(&FREE_FLAGS).extend((1..FLAGS).map(|at| memory + at * size_of::<u32>()));
                Self(memory)
            }
        };
        flag.set(0);
        Ok(flag)
    }

    fn pointer(&self) -> *mut u32 {
        std::ptr::with_exposed_provenance_mut(self.0)
    }

    fn set(&self, value: u32) {
        // SAFETY: it lies in memory that `take` allocated, aligned, for as long as the process lasts; the device reads it alone.
        unsafe { AtomicU32::from_ptr(self.pointer()) }.store(value, Ordering::Release);
    }
}

impl Drop for Flag {
    fn drop(&mut self) {
        lock(&FREE_FLAGS).push(self.0);
    }
}

/// Pins a tensor's mapping where it is not yet, and lets go of those that nobody uses.
fn pin(driver: &Driver, tensor: &client::Tensor) -> Result<(), CudaError> {
    let mut pinned = lock(&PINNED);
    let mapping = tensor.pin();
    let (address, bytes) = (mapping.memory().address() as usize, mapping.memory().bytes());
    if pinned.contains_key(&address) {
        return Ok(());
    }
    let unused: Vec<usize> = pinned.iter().filter(|(_, pin)| !pin.used()).map(|(at, _)| *at).collect();
    for address in unused {
        driver.unregister(address)?;
        pinned.remove(&address);
    }
    // SAFETY: the pin holds the mapping until it has been unregistered.
    unsafe { driver.register(std::ptr::with_exposed_provenance_mut(address), bytes)? };
    pinned.insert(address, mapping);
    Ok(())
}

impl Batch {
    /// Queues calls in their streams.
    ///
    /// # Safety
    /// The calls' pieces are memory that CUDA knows, and stay so until the streams have done what is queued now, and with
    /// [`Back::AtEnd`] that stream what was queued when the batch has ended.
    ///
    /// # Errors
    /// Where the driver refuses something; nothing is started then, and the streams have done what was queued.
    pub unsafe fn submit(parts: Vec<Submission>, back: Back) -> Result<Arc<Self>, Failure> {
        let Some(driver) = driver() else {
            return Err(Failure::from(Error::Shape("CUDA is not loaded in this process".into())));
        };
        let places: Vec<Ordered> = parts.iter().map(|part| part.ordered(driver)).collect::<Result<_, _>>()?;
        let mut streams: Vec<Ordered> = Vec::new();
        for ordered in &places {
            if !streams.contains(ordered) {
                streams.push(*ordered);
            }
        }
        for Ordered { stream, context } in &streams {
            let _current = driver.enter(*context)?;
            if driver.is_capturing(*stream)? {
                return Err(Failure::Captured);
            }
        }
        let Some(first) = streams.first().copied() else {
            return Err(Failure::from(Error::Shape("a batch of no calls".into())));
        };
        let back = match back {
            Back::InOrder => None,
            Back::AtEnd(stream) if stream.is_default() => Some(Ordered { stream, context: first.context }),
            Back::AtEnd(stream) => Some(Ordered { stream, context: driver.context(stream, 0)? }),
        };
        let _current = driver.enter(first.context)?;
        for tensor in parts.iter().flat_map(|part| part.staging.tensors()) {
            pin(driver, tensor)?;
        }
        let flag = back.is_none().then(|| Flag::take(driver)).transpose()?;
        let state =
            State { in_flight: parts.len(), first: None, latest: None, outcome: None, callbacks: Vec::new() };
        let batch = Arc::new(Self {
            lanes: parts.iter().map(|part| part.lane).collect(),
            unready: AtomicUsize::new(streams.len()),
            parts,
            streams,
            back,
            flag,
            state: Mutex::new(state),
            ended: Condvar::new(),
        });
        lock(&WAITING).push(Arc::clone(&batch));
        COUNT.fetch_add(1, Ordering::Release);
        // SAFETY: the caller vouches for the pieces.
        match unsafe { batch.queue(driver, &places) } {
            Ok(()) => Ok(batch),
            Err(failure) => {
                batch.withdraw(failure.clone());
                for Ordered { stream, context } in &batch.streams {
                    // What was queued reads and writes staging memory, which is given back after this.
                    let _ = driver.enter(*context).and_then(|_current| driver.synchronize(*stream));
                }
                Err(failure)
            }
        }
    }

    /// Queues the copies and what starts the operations.
    ///
    /// # Safety
    /// As [`Self::submit`].
    unsafe fn queue(self: &Arc<Self>, driver: &Driver, places: &[Ordered]) -> Result<(), Failure> {
        let parts = |of: Ordered| self.parts.iter().zip(places).filter(move |(_, place)| **place == of);
        for ordered in self.streams.iter().copied() {
            let _current = driver.enter(ordered.context)?;
            for (part, _) in parts(ordered) {
                for (room, piece) in part.staging.inputs(&part.call)? {
                    // SAFETY: the caller vouches for the piece; the batch holds staging memory, which is pinned.
                    unsafe { driver.copy(room.addr(), piece.address, piece.bytes, ordered.stream)? };
                }
            }
            self.call_back(driver, ordered.stream, ready)?;
        }
        let Some(flag) = &self.flag else { return Ok(()) };
        for ordered in self.streams.iter().copied() {
            let _current = driver.enter(ordered.context)?;
            // SAFETY: the batch holds the number until the function at the stream's end has given it back.
            unsafe { driver.wait_for(ordered.stream, flag.pointer())? };
            // SAFETY: the caller vouches for the pieces.
            unsafe { self.queue_outputs(driver, ordered.stream, parts(ordered).map(|(part, _)| part))? };
        }
        Ok(())
    }

    /// Queues the copies of outputs, and that the batch stays until they are done.
    ///
    /// # Safety
    /// As [`Self::submit`].
    unsafe fn queue_outputs<'a>(
        self: &Arc<Self>,
        driver: &Driver,
        stream: Stream,
        parts: impl Iterator<Item = &'a Submission>,
    ) -> Result<(), Failure> {
        for part in parts {
            for (room, piece) in part.staging.outputs(&part.call)? {
                // SAFETY: the caller vouches for the piece; the batch holds staging memory, which is pinned.
                unsafe { driver.copy(piece.address, room.addr(), piece.bytes, stream)? };
            }
        }
        self.call_back(driver, stream, release)
    }

    /// Has a stream call a function with a hold on the batch.
    fn call_back(
        self: &Arc<Self>,
        driver: &Driver,
        stream: Stream,
        function: HostFunction,
    ) -> Result<(), Failure> {
        let held = Arc::into_raw(Arc::clone(self)).cast_mut().cast::<c_void>();
        // SAFETY: both functions take such a hold, do not unwind, and call nothing of CUDA's.
        let launched = unsafe { driver.launch(stream, function, held) };
        if launched.is_err() {
            // SAFETY: nobody else takes the hold.
            drop(unsafe { Arc::from_raw(held.cast_const().cast::<Self>()) });
        }
        Ok(launched?)
    }

    /// Starts the operations.
    fn start(self: &Arc<Self>) {
        for (at, part) in self.parts.iter().enumerate() {
            let started = loop {
                match part.call.launch(&part.members, &part.staging) {
                    // The completion thread takes ends as they come.
                    Err(Error::TooMany { .. }) => std::thread::sleep(FULL),
                    started => break started,
                }
            };
            let batch = Arc::clone(self);
            let watched = started.and_then(|operation| {
                operation.on_completion(move |result| batch.end(1, result.map_err(Failure::from)))
            });
            if let Err(error) = watched {
                let (batch, left) = (Arc::clone(self), self.parts.len() - at);
                // Callbacks take locks that a thread of the driver's must not wait for.
                let ends = move || batch.end(left, Err(error.into()));
                let _ = std::thread::Builder::new().name("harmonaize-failure".into()).spawn(ends);
                return;
            }
        }
    }

    /// Notes the end of so many operations, the first of which ended so.
    fn end(self: &Arc<Self>, operations: usize, result: Outcome) {
        let mut state = lock(&self.state);
        state.in_flight = state.in_flight.saturating_sub(operations);
        match result {
            Ok(receipt) => state.latest = Some(receipt),
            Err(failure) => state.first = state.first.take().or(Some(failure)),
        }
        if state.in_flight > 0 || state.outcome.is_some() {
            return;
        }
        let outcome = match (state.first.take(), state.latest) {
            (None, Some(receipt)) => self.returned().map(|()| receipt),
            (Some(failure), _) => Err(failure),
            (None, None) => Err(Failure::from(Error::Protocol(ProtocolError::NoResult))),
        };
        self.finish(state, outcome);
    }

    /// Has the outputs come back where no stream waits for them.
    fn returned(self: &Arc<Self>) -> Result<(), Failure> {
        let (Some(Ordered { stream, context }), Some(driver)) = (self.back, driver()) else { return Ok(()) };
        let _current = driver.enter(context)?;
        // SAFETY: `submit`'s caller vouches for the pieces.
        let queued = unsafe { self.queue_outputs(driver, stream, self.parts.iter()) };
        if queued.is_err() {
            let _ = driver.synchronize(stream);
        }
        queued
    }

    fn finish(&self, mut state: MutexGuard<'_, State>, outcome: Outcome) {
        let callbacks = std::mem::take(&mut state.callbacks);
        state.outcome = Some(outcome.clone());
        drop(state);
        self.ended.notify_all();
        for callback in callbacks {
            callback(&outcome);
        }
        // Last: who waits for the stream alone finds what the callbacks have noted.
        if let Some(flag) = &self.flag {
            flag.set(1);
        }
    }

    /// Ends the batch without a start, if it has not started.
    fn withdraw(self: &Arc<Self>, failure: Failure) {
        let mut waiting = lock(&WAITING);
        let before = waiting.len();
        waiting.retain(|batch| !Arc::ptr_eq(batch, self));
        let removed = waiting.len() < before;
        drop(waiting);
        if removed {
            COUNT.fetch_sub(1, Ordering::Release);
            let state = lock(&self.state);
            self.finish(state, Err(failure));
            advance();
        }
    }

    /// Ends it where its streams can do nothing any more.
    fn check(self: &Arc<Self>) {
        let Some(driver) = driver() else { return };
        for Ordered { stream, context } in &self.streams {
            let looked = driver.enter(*context).and_then(|_current| driver.query(*stream));
            if let Err(error) = looked {
                return self.withdraw(error.into());
            }
        }
    }

    /// How it ended, if it has.
    pub fn poll(&self) -> Option<Outcome> {
        lock(&self.state).outcome.clone()
    }

    /// Waits for the end, at most so long. With [`Back::AtEnd`] the copies of the outputs are queued then.
    pub fn wait(self: &Arc<Self>, timeout: Duration) -> Option<Outcome> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let left = deadline.map_or(CHECK_INTERVAL, |at| at.saturating_duration_since(Instant::now()));
            let state = lock(&self.state);
            let open = |state: &mut State| state.outcome.is_none();
            let waited = self.ended.wait_timeout_while(state, left.min(CHECK_INTERVAL), open);
            let state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if let Some(outcome) = &state.outcome {
                return Some(outcome.clone());
            }
            drop(state);
            self.check();
            if left.is_zero() {
                return self.poll();
            }
        }
    }

    /// Has `callback` called at the end, now if that has been.
    pub fn on_end(&self, callback: impl FnOnce(&Outcome) + Send + 'static) {
        let mut state = lock(&self.state);
        match &state.outcome {
            None => state.callbacks.push(Box::new(callback)),
            Some(outcome) => {
                let outcome = outcome.clone();
                drop(state);
                callback(&outcome);
            }
        }
    }
}

/// Starts what is ready, in order.
fn advance() {
    let mut waiting = lock(&WAITING);
    let mut taken: BTreeSet<Lane> = BTreeSet::new();
    let mut at = 0;
    while let Some(batch) = waiting.get(at) {
        let ready = batch.unready.load(Ordering::Acquire) == 0;
        if ready && batch.lanes.is_disjoint(&taken) {
            let batch = waiting.remove(at);
            // Under the lock: so they start in order, whoever starts them. Counted until then, so that no lane is clear before.
            batch.start();
            COUNT.fetch_sub(1, Ordering::Release);
        } else {
            taken.extend(&batch.lanes);
            at += 1;
        }
    }
    drop(waiting);
    MOVED.notify_all();
}

/// The inputs of a batch are there, of one more of its streams.
///
/// # Safety
/// `batch` is a hold on a [`Batch`], which this takes.
unsafe extern "C" fn ready(batch: *mut c_void) {
    // SAFETY: the caller gives the hold.
    let batch = unsafe { Arc::from_raw(batch.cast_const().cast::<Batch>()) };
    let _ = catch_unwind(AssertUnwindSafe(|| {
        if batch.unready.fetch_sub(1, Ordering::AcqRel) == 1 {
            advance();
        }
        drop(batch);
    }));
}

/// A stream has copied a batch's outputs.
///
/// # Safety
/// As [`ready`].
unsafe extern "C" fn release(batch: *mut c_void) {
    // SAFETY: the caller gives the hold.
    let batch = unsafe { Arc::from_raw(batch.cast_const().cast::<Batch>()) };
    let _ = catch_unwind(AssertUnwindSafe(|| drop(batch)));
}
