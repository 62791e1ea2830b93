//! The tuner: what collectives would cost on a congested network.

use crate::{entry, ncclDebugLogger_t, ncclResult_t};
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering};

const ALGORITHMS: usize = 7;
const PROTOCOLS: usize = 3;
/// Most algorithms, and most protocols, that are believed of a table.
const MOST: usize = 64;

const TREE: usize = 0;
const RING: usize = 1;
const NVLS_TREE: usize = 5;
const PAT: usize = 6;

const ALL_REDUCE: c_int = 4;

/// Microseconds of each algorithm and protocol.
type Latencies = [[f64; PROTOCOLS]; ALGORITHMS];

/// NCCL's model of a machine.
#[repr(C)]
pub struct ncclTunerConstants_v6_t {
    base: Latencies,
    /// Of a step, by what it crosses: NVLink, PCI, the network.
    hardware: [Latencies; 3],
    _bandwidths: [[[f64; 3]; 4]; 5],
}

/// NCCL's table of functions.
#[repr(C)]
pub struct ncclTuner_v6_t {
    name: *const c_char,
    init: extern "C" fn(
        *mut *mut c_void,
        u64,
        usize,
        usize,
        ncclDebugLogger_t,
        *mut c_void,
        *const ncclTunerConstants_v6_t,
    ) -> ncclResult_t,
    get_coll_info: extern "C" fn(
        *mut c_void,
        c_int,
        usize,
        c_int,
        *mut f32,
        c_int,
        c_int,
        c_int,
        *mut c_int,
    ) -> ncclResult_t,
    finalize: extern "C" fn(*mut c_void) -> ncclResult_t,
    get_chunk_size: Option<extern "C" fn()>,
}

// SAFETY: the name is a constant of the program's, and nothing is ever written.
unsafe impl Sync for ncclTuner_v6_t {}

/// What NCCL looks for.
#[unsafe(no_mangle)]
pub static ncclTunerPlugin_v6: ncclTuner_v6_t =
    ncclTuner_v6_t { name: c"harmonaize".as_ptr(), init, get_coll_info, finalize, get_chunk_size: None };

/// The level that all ranks reckon with: 0 none, 1 mild, 2 severe.
static LEVEL: AtomicI32 = AtomicI32::new(0);

/// Has the tuner reckon with a level of congestion from the next collective on. 1 is mild, 2 severe; with any other number NCCL's table
/// is left alone. All ranks of all communicators must call it with the same level between the same collectives, or they may hang.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_nccl_tune(level: c_int) {
    LEVEL.store(level, Ordering::Relaxed);
}

/// How much longer bytes on the network take: a level begins at 80% and at 50% of the expected rate.
fn slowdown(level: i32) -> Option<f64> {
    match level {
        1 => Some(1.25),
        2 => Some(2.0),
        _ => None,
    }
}

/// What NCCL says of a communicator's machines.
struct Machines {
    nodes: usize,
    base: Latencies,
    network: Latencies,
}

impl Machines {
    /// Steps of an algorithm over the network, one after the other.
    fn steps(&self, all_reduce: bool, algorithm: usize) -> f64 {
        let others = self.nodes.saturating_sub(1);
        let depth = usize::BITS - others.leading_zeros();
        match (algorithm, all_reduce) {
            (RING, true) => 2.0 * others as f64,
            (RING, false) => others as f64,
            (TREE | NVLS_TREE, _) => 2.0 * f64::from(depth),
            (PAT, _) => f64::from(depth),
            _ => 2.0,
        }
    }

    /// Microseconds that no bandwidth shortens; 0 where nothing is known of the algorithm.
    fn latency(&self, all_reduce: bool, algorithm: usize, protocol: usize) -> f64 {
        let of = |all: &Latencies| all.get(algorithm).and_then(|row| row.get(protocol)).copied();
        let (base, step) = (of(&self.base).unwrap_or(0.0), of(&self.network).unwrap_or(0.0));
        base + step * self.steps(all_reduce, algorithm)
    }

    /// Scales what of each cost, in microseconds, is for bytes: a row for each algorithm. What NCCL has ruled out, or forced, stays so.
    fn scale(&self, costs: &mut [f32], protocols: usize, all_reduce: bool, slowdown: f64) {
        if self.nodes < 2 {
            return;
        }
        for (algorithm, row) in costs.chunks_mut(protocols.max(1)).enumerate() {
            for (protocol, cost) in row.iter_mut().enumerate() {
                let all = f64::from(*cost);
                if all > 0.0 && all.is_finite() {
                    let latency = self.latency(all_reduce, algorithm, protocol).clamp(0.0, all);
                    *cost = (latency + (all - latency) * slowdown) as f32;
                }
            }
        }
    }
}

extern "C" fn init(
    context: *mut *mut c_void,
    _communicator: u64,
    _ranks: usize,
    nodes: usize,
    _log: ncclDebugLogger_t,
    _domains: *mut c_void,
    constants: *const ncclTunerConstants_v6_t,
) -> ncclResult_t {
    entry(|| {
        if context.is_null() {
            return;
        }
        // SAFETY: NCCL gives its constants, or nothing.
        let constants = unsafe { constants.as_ref() };
        let machines = constants.map(|constants| {
            let [_, _, network] = constants.hardware;
            Box::into_raw(Box::new(Machines { nodes, base: constants.base, network }))
        });
        // SAFETY: NCCL gives a place for a pointer.
        unsafe { context.write(machines.unwrap_or(std::ptr::null_mut()).cast()) };
    })
}

extern "C" fn get_coll_info(
    context: *mut c_void,
    function: c_int,
    _bytes: usize,
    _operations: c_int,
    costs: *mut f32,
    algorithms: c_int,
    protocols: c_int,
    _registered: c_int,
    _channels: *mut c_int,
) -> ncclResult_t {
    entry(|| {
        let size = |count: c_int| usize::try_from(count).ok().filter(|count| (1..=MOST).contains(count));
        let (Some(slowdown), Some(algorithms), Some(protocols)) =
            (slowdown(LEVEL.load(Ordering::Relaxed)), size(algorithms), size(protocols))
        else {
            return;
        };
        // SAFETY: the context is what `init` has given, and NCCL has not finalized it.
        let machines = unsafe { context.cast::<Machines>().as_ref() };
        let Some(machines) = machines.filter(|_| !costs.is_null()) else { return };
        // SAFETY: NCCL gives a table of so many rows and columns, which nobody else has during the call.
        let costs = unsafe { std::slice::from_raw_parts_mut(costs, algorithms * protocols) };
        machines.scale(costs, protocols, function == ALL_REDUCE, slowdown);
    })
}

extern "C" fn finalize(context: *mut c_void) -> ncclResult_t {
    entry(|| {
        if !context.is_null() {
            // SAFETY: the context is what `init` has given, and NCCL finalizes it once.
            drop(unsafe { Box::from_raw(context.cast::<Machines>()) });
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    const BROADCAST: c_int = 0;

    /// A ring's step over the network takes 10 us, a tree's too; their beginnings 5.
    fn constants() -> ncclTunerConstants_v6_t {
        let all = |microseconds| [[microseconds; PROTOCOLS]; ALGORITHMS];
        let hardware = [all(1.0), all(2.0), all(10.0)];
        ncclTunerConstants_v6_t { base: all(5.0), hardware, _bandwidths: [[[0.0; 3]; 4]; 5] }
    }

    /// A table where all but the simple protocol of trees and rings is ruled out.
    fn table(tree: f32, ring: f32) -> [f32; ALGORITHMS * PROTOCOLS] {
        let mut costs = [-1.0; ALGORITHMS * PROTOCOLS];
        (costs[TREE * PROTOCOLS + 2], costs[RING * PROTOCOLS + 2]) = (tree, ring);
        costs
    }

    /// What NCCL's calls make of a table, of a communicator of so many nodes.
    fn tuned(nodes: usize, function: c_int, costs: &mut [f32]) {
        let tuner = &ncclTunerPlugin_v6;
        let (constants, mut context) = (constants(), std::ptr::null_mut());
        assert_eq!(
            (tuner.init)(&mut context, 7, nodes * 8, nodes, None, std::ptr::null_mut(), &constants),
            0
        );
        let mut channels = 0;
        let called =
            (tuner.get_coll_info)(context, function, 1 << 20, 1, costs.as_mut_ptr(), 7, 3, 0, &mut channels);
        assert_eq!((called, channels, (tuner.finalize)(context)), (0, 0, 0));
    }

    #[test]
    fn structures_are_laid_out_as_nccls() {
        assert_eq!(size_of::<ncclTunerConstants_v6_t>(), 1152);
        assert_eq!(offset_of!(ncclTunerConstants_v6_t, hardware), 168);
        assert_eq!(offset_of!(ncclTunerConstants_v6_t, _bandwidths), 672);
        assert_eq!(size_of::<ncclTuner_v6_t>(), 40);
        assert_eq!(offset_of!(ncclTuner_v6_t, get_coll_info), 16);
        assert_eq!(offset_of!(ncclTuner_v6_t, get_chunk_size), 32);
    }

    /// In one test, because the level is the process's.
    #[test]
    fn bytes_cost_more_on_a_congested_network_and_nothing_else_changes() {
        // Of 16 nodes: a ring's latency is 5 + 30 * 10 us, a tree's 5 + 8 * 10.
        let before = table(1000.0, 800.0);
        let mut costs = before;
        tuned(16, ALL_REDUCE, &mut costs);
        assert_eq!(costs, before, "without a word of the program's the table is NCCL's");
        harmonaize_nccl_tune(2);
        tuned(16, ALL_REDUCE, &mut costs);
        assert_eq!(costs, table(85.0 + 915.0 * 2.0, 305.0 + 495.0 * 2.0));
        let mut costs = before;
        tuned(16, BROADCAST, &mut costs);
        assert_eq!(costs, table(85.0 + 915.0 * 2.0, 155.0 + 645.0 * 2.0));
        let mut costs = before;
        tuned(1, ALL_REDUCE, &mut costs);
        assert_eq!(costs, before, "one node has no network");
        // A tree that is a little faster for its few steps is no more where bytes count twice.
        let mut costs = table(800.0, 810.0);
        tuned(16, ALL_REDUCE, &mut costs);
        assert!(costs[TREE * PROTOCOLS + 2] > costs[RING * PROTOCOLS + 2], "{costs:?}");
        harmonaize_nccl_tune(1);
        let mut costs = before;
        tuned(16, ALL_REDUCE, &mut costs);
        assert_eq!(costs, table(85.0 + 915.0 * 1.25, 305.0 + 495.0 * 1.25));
        harmonaize_nccl_tune(-1);
        let mut costs = before;
        tuned(16, ALL_REDUCE, &mut costs);
        assert_eq!(costs, before, "what is not known changes nothing");
    }

    #[test]
    fn nonsense_changes_nothing() {
        let tuner = &ncclTunerPlugin_v6;
        let (nothing, mut channels) = (std::ptr::null_mut(), 0);
        assert_eq!((tuner.init)(std::ptr::null_mut(), 7, 8, 2, None, nothing, &constants()), 0);
        let mut context = std::ptr::without_provenance_mut(1);
        assert_eq!((tuner.init)(&mut context, 7, 8, 2, None, nothing, std::ptr::null()), 0);
        assert!(context.is_null());
        let none = std::ptr::null_mut();
        assert_eq!((tuner.get_coll_info)(context, ALL_REDUCE, 8, 1, none, -1, 1000, 0, &mut channels), 0);
        assert_eq!((tuner.finalize)(context), 0);
        // Costs that are no numbers, or lower than the latency.
        let [_, _, network] = constants().hardware;
        let machines = Machines { nodes: 16, base: constants().base, network };
        let mut costs = [f32::INFINITY, 0.0, 3.0];
        machines.scale(&mut costs, 3, true, 2.0);
        assert_eq!(costs, [f32::INFINITY, 0.0, 3.0]);
    }
}
