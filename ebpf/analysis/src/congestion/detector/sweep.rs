//! What is forgotten.

use super::{Detector, named};

/// Flows and links that were silent for so long are forgotten.
const FORGET_NS: u64 = 60_000_000_000;

impl Detector {
    /// Forgets flows and links of which nothing was heard for long.
    pub(super) fn sweep(&mut self) {
        self.swept_ns = self.now_ns;
        let now_ns = self.now_ns;
        let monitors = &mut self.monitors;
        self.flows.retain(|_, flow| {
            let keep = flow.memory.own || now_ns.saturating_sub(flow.memory.heard_ns) < FORGET_NS;
            if !keep {
                for place in [flow.out.path, flow.into.path] {
                    named(monitors, place, u32::saturating_sub);
                }
            }
            keep
        });
        let free = &mut self.free;
        self.places.retain(|_, place| {
            let Some(slot) = monitors.get_mut(*place as usize) else { return false };
            let keep = slot.as_ref().is_some_and(|monitor| {
                let silent = now_ns.saturating_sub(monitor.heard_ns) >= FORGET_NS;
                monitor.active || monitor.flows > 0 || monitor.is_whole() || !silent
            });
            if !keep {
                *slot = None;
                free.push(*place);
            }
            keep
        });
    }
}
