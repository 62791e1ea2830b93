//! The profiler: a collective goes into the process's journal from its first channel's start on the device to its last one's end.

use crate::{agent, entry, ncclDebugLogger_t, ncclResult_t};
use harmonaize_client::{
    Called, Collective, Dtype, ExternalCommunicator, ExternalOperation, Rank, ReduceOp, Signature,
};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::Write as _;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A collective, from when its kernel is launched.
const COLLECTIVE: u64 = 1 << 1;
/// A channel of a kernel, as the device works on it.
const CHANNEL: u64 = 1 << 6;

/// Collectives that have not ended, at most; the oldest is forgotten.
const MOST: usize = 4096;

/// A collective in NCCL's description of an event.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Coll {
    _sequence: u64,
    function: *const c_char,
    _input: *const c_void,
    _output: *mut c_void,
    count: usize,
    root: c_int,
    datatype: *const c_char,
    channels: u8,
    _warps: u8,
    _algorithm: *const c_char,
    _protocol: *const c_char,
    _group: *mut c_void,
}

/// NCCL's description of an event. Other kinds than collectives have other fields at its end, and no more of them.
#[repr(C)]
pub struct ncclProfilerEventDescr_v6_t {
    kind: u64,
    parent: *mut c_void,
    _rank: c_int,
    coll: Coll,
}

/// NCCL's table of functions.
#[repr(C)]
pub struct ncclProfiler_v6_t {
    name: *const c_char,
    init: extern "C" fn(
        *mut *mut c_void,
        u64,
        *mut c_int,
        *const c_char,
        c_int,
        c_int,
        c_int,
        ncclDebugLogger_t,
    ) -> ncclResult_t,
    start_event:
        extern "C" fn(*mut c_void, *mut *mut c_void, *const ncclProfilerEventDescr_v6_t) -> ncclResult_t,
    stop_event: extern "C" fn(*mut c_void) -> ncclResult_t,
    record_event_state: extern "C" fn(*mut c_void, c_int, *const c_void) -> ncclResult_t,
    finalize: extern "C" fn(*mut c_void) -> ncclResult_t,
}

// SAFETY: the name is a constant of the program's, and nothing is ever written.
unsafe impl Sync for ncclProfiler_v6_t {}

/// What NCCL looks for.
#[unsafe(no_mangle)]
pub static ncclProfiler_v6: ncclProfiler_v6_t = ncclProfiler_v6_t {
    name: c"harmonaize".as_ptr(),
    init,
    start_event,
    stop_event,
    record_event_state,
    finalize,
};

/// A collective that has not ended.
struct Pending {
    communicator: usize,
    called: Called,
    /// Channels that have not ended.
    channels: u8,
    /// From its first channel's start on.
    operation: Option<ExternalOperation>,
}

/// Communicators and collectives by number. NCCL uses a collective's handle after it has stopped its event, so handles are numbers and
/// never addresses: even ones are collectives, and the next one is any of its channels.
struct State {
    last: usize,
    communicators: BTreeMap<usize, ExternalCommunicator>,
    pending: BTreeMap<usize, Pending>,
}

static STATE: Mutex<State> =
    Mutex::new(State { last: 0, communicators: BTreeMap::new(), pending: BTreeMap::new() });

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn number(&mut self) -> usize {
        self.last += 2;
        self.last
    }

    /// A collective is launched. Its handle.
    fn launched(&mut self, communicator: usize, called: Called, channels: u8) -> Option<usize> {
        self.communicators.get(&communicator)?;
        if self.pending.len() >= MOST {
            self.pending.pop_first();
        }
        let number = self.number();
        let pending = Pending { communicator, called, channels: channels.max(1), operation: None };
        self.pending.insert(number, pending);
        Some(number)
    }

    /// A collective's channel starts. Its handle.
    fn started(&mut self, collective: usize) -> Option<usize> {
        let pending = self.pending.get_mut(&collective)?;
        if pending.operation.is_none() {
            let communicator = self.communicators.get(&pending.communicator)?;
            pending.operation = Some(communicator.begin(pending.called));
        }
        Some(collective + 1)
    }

    /// An event is over. That of a collective is so once it is launched, and says nothing.
    fn stopped(&mut self, handle: usize) {
        let Some(number) = handle.checked_sub(1).filter(|number| number % 2 == 0) else { return };
        let Some(pending) = self.pending.get_mut(&number) else { return };
        pending.channels = pending.channels.saturating_sub(1);
        if pending.channels == 0
            && let Some(Pending { operation: Some(operation), .. }) = self.pending.remove(&number)
        {
            operation.end();
        }
    }
}

/// A text of NCCL's; empty where there is none.
fn text<'a>(from: *const c_char) -> std::borrow::Cow<'a, str> {
    if from.is_null() {
        return "".into();
    }
    // SAFETY: NCCL gives a text that lives at least as long as its call, and ends with a zero.
    unsafe { CStr::from_ptr(from) }.to_string_lossy()
}

/// A collective by NCCL's names for it and for its elements.
fn called(coll: &Coll) -> Option<Called> {
    let collective = match &*text(coll.function) {
        "AllReduce" => Collective::AllReduce,
        "AllGather" => Collective::AllGather,
        "AlltoAll" => Collective::AllToAll,
        "Broadcast" => Collective::Broadcast,
        "Gather" => Collective::Gather,
        "Reduce" => Collective::Reduce,
        "ReduceScatter" => Collective::ReduceScatter,
        "Scatter" => Collective::Scatter,
        _ => return None,
    };
    let dtype = match &*text(coll.datatype) {
        "ncclInt8" => Dtype::I8,
        // NCCL has no name for this type alone.
        "ncclUint8" | "Unknown" => Dtype::U8,
        "ncclInt32" => Dtype::I32,
        "ncclUint32" => Dtype::U32,
        "ncclInt64" => Dtype::I64,
        "ncclUint64" => Dtype::U64,
        "ncclFloat16" => Dtype::F16,
        "ncclFloat32" => Dtype::F32,
        "ncclFloat64" => Dtype::F64,
        "ncclBfloat16" => Dtype::Bf16,
        "ncclFloat8e4m3" => Dtype::F8E4M3,
        "ncclFloat8e5m2" => Dtype::F8E5M2,
        _ => return None,
    };
    let (root, count) = (u32::try_from(coll.root).unwrap_or(0), coll.count as u64);
    // By which reduction NCCL does not say.
    let reduce = ReduceOp::Sum;
    Some(Called::Collective(Signature { collective, dtype, reduce, root: Rank(root), count, uneven: false }))
}

extern "C" fn init(
    context: *mut *mut c_void,
    communicator: u64,
    mask: *mut c_int,
    name: *const c_char,
    _nodes: c_int,
    ranks: c_int,
    rank: c_int,
    _log: ncclDebugLogger_t,
) -> ncclResult_t {
    entry(|| {
        let (Ok(ranks), Ok(rank)) = (u32::try_from(ranks), u32::try_from(rank)) else { return };
        let mut name = text(name).into_owned();
        if name.is_empty() {
            name = format!("nccl-{communicator:016x}");
        }
        let noted = ExternalCommunicator::from_env(&name, Rank(rank), ranks).unwrap_or_else(|error| {
            // Whoever has closed standard error does not want it.
            let _ = writeln!(std::io::stderr(), "harmonaize: {error}; NCCL's collectives are not noted");
            None
        });
        agent::begin(communicator, Rank(rank), ranks);
        let Some(noted) = noted.filter(|_| !context.is_null() && !mask.is_null()) else { return };
        let mut state = state();
        let number = state.number();
        state.communicators.insert(number, noted);
        // SAFETY: NCCL gives a place for a pointer.
        unsafe { context.write(std::ptr::without_provenance_mut(number)) };
        // SAFETY: NCCL gives a place for the kinds of events that it shall tell of, of all communicators. Other threads read it as an atomic.
        unsafe { AtomicI32::from_ptr(mask) }.store((COLLECTIVE | CHANNEL) as c_int, Ordering::Relaxed);
    })
}

extern "C" fn start_event(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *const ncclProfilerEventDescr_v6_t,
) -> ncclResult_t {
    entry(|| {
        if handle.is_null() || event.is_null() {
            return;
        }
        // SAFETY: NCCL gives a description, which begins so.
        let (kind, parent) = unsafe { ((*event).kind, (*event).parent) };
        let number = match kind {
            COLLECTIVE => {
                // SAFETY: the description is a collective's.
                let coll = unsafe { (*event).coll };
                called(&coll).and_then(|called| state().launched(context.addr(), called, coll.channels))
            }
            CHANNEL => state().started(parent.addr()),
            _ => None,
        };
        // SAFETY: NCCL gives a place for a pointer.
        unsafe { handle.write(std::ptr::without_provenance_mut(number.unwrap_or(0))) };
    })
}

extern "C" fn stop_event(handle: *mut c_void) -> ncclResult_t {
    entry(|| state().stopped(handle.addr()))
}

extern "C" fn record_event_state(
    _handle: *mut c_void,
    _to: c_int,
    _arguments: *const c_void,
) -> ncclResult_t {
    0
}

extern "C" fn finalize(context: *mut c_void) -> ncclResult_t {
    entry(|| {
        let number = context.addr();
        let ended = {
            let mut state = state();
            state.pending.retain(|_, pending| pending.communicator != number);
            state.communicators.remove(&number)
        };
        // It waits until all is written, as the process may end next. Other communicators' threads do not wait with it.
        drop(ended);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;
    use std::path::Path;
    use std::process::Command;
    use std::ptr::{null, null_mut};

    const OPERATIONS: &str = "HARMONAIZE_OPERATIONS";

    #[test]
    fn structures_are_laid_out_as_nccls() {
        assert_eq!(size_of::<ncclProfilerEventDescr_v6_t>(), 112);
        assert_eq!(offset_of!(ncclProfilerEventDescr_v6_t, coll), 24);
        assert_eq!(offset_of!(Coll, count), 32);
        assert_eq!(offset_of!(Coll, datatype), 48);
        assert_eq!(offset_of!(Coll, channels), 56);
        assert_eq!(size_of::<Coll>(), 88);
        assert_eq!(size_of::<ncclProfiler_v6_t>(), 48);
    }

    fn event(kind: u64, parent: *mut c_void) -> ncclProfilerEventDescr_v6_t {
        let coll = Coll {
            _sequence: 0,
            function: c"AllReduce".as_ptr(),
            _input: null(),
            _output: null_mut(),
            count: 1024,
            root: 0,
            datatype: c"ncclFloat32".as_ptr(),
            channels: 2,
            _warps: 0,
            _algorithm: null(),
            _protocol: null(),
            _group: null_mut(),
        };
        ncclProfilerEventDescr_v6_t { kind, parent, _rank: 1, coll }
    }

    /// Starts an event as NCCL does. Its handle.
    fn start(context: *mut c_void, event: &ncclProfilerEventDescr_v6_t) -> *mut c_void {
        let mut handle = null_mut();
        assert_eq!((ncclProfiler_v6.start_event)(context, &mut handle, event), 0);
        handle
    }

    fn lines(file: &Path) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// A communicator with a journal in `file`, if the environment asks for one.
    fn with_a_journal(file: &Path) {
        let profiler = &ncclProfiler_v6;
        let (mut context, mut mask) = (null_mut(), 0);
        assert_eq!((profiler.init)(&mut context, 7, &mut mask, null(), 1, 2, 1, None), 0);
        assert_eq!((mask, context.is_null()), (0x42, false));
        let collective = start(context, &event(COLLECTIVE, null_mut()));
        let stop = |handle| assert_eq!((profiler.stop_event)(handle), 0);
        let first = start(context, &event(CHANNEL, collective));
        stop(collective);
        let second = start(context, &event(CHANNEL, collective));
        assert_eq!((profiler.record_event_state)(first, 22, null()), 0);
        stop(first);
        stop(second);
        // Handles of what is over, or never was, and events that nobody has asked for.
        stop(second);
        stop(null_mut());
        for parent in [collective, null_mut(), std::ptr::without_provenance_mut(usize::MAX)] {
            assert!(start(context, &event(CHANNEL, parent)).is_null());
        }
        assert!(start(context, &event(1 << 3, collective)).is_null());
        assert!(start(null_mut(), &event(COLLECTIVE, null_mut())).is_null());
        // One that never ends is noted at the end of its communicator.
        let unfinished = start(context, &event(COLLECTIVE, null_mut()));
        start(context, &event(CHANNEL, unfinished));
        assert_eq!((profiler.finalize)(context), 0);
        assert_eq!(lines(file).len(), 2);
    }

    /// The environment's variables are read once in a process, so another one has them.
    #[test]
    fn a_collective_is_a_line_of_the_journal() {
        if let Some(file) = std::env::var_os(OPERATIONS) {
            return with_a_journal(Path::new(&file));
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("operations.jsonl");
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "profiler::tests::a_collective_is_a_line_of_the_journal"]);
        assert!(child.env(OPERATIONS, &file).status().unwrap().success());
        let lines = lines(&file);
        let outcomes: Vec<_> = lines.iter().map(|line| line["outcome"].as_str().unwrap()).collect();
        assert_eq!(outcomes, ["ok", "unfinished"]);
        let first = &lines[0];
        assert_eq!(first["communicator"], "nccl-0000000000000007");
        assert_eq!((&first["collective"], &first["bytes"]), (&"allreduce".into(), &4096.into()));
        assert_eq!((&first["rank"], &first["ranks"]), (&1.into(), &2.into()));
    }

    #[test]
    fn without_a_journal_nccl_tells_nothing() {
        if std::env::var_os(OPERATIONS).is_some() {
            return;
        }
        let (mut context, mut mask) = (null_mut(), 0);
        assert_eq!((ncclProfiler_v6.init)(&mut context, 7, &mut mask, null(), 1, 2, 0, None), 0);
        assert_eq!((mask, context.is_null()), (0, true));
        assert_eq!((ncclProfiler_v6.finalize)(context), 0);
    }
}
