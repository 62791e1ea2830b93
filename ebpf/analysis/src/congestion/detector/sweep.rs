//! What is forgotten.

use super::{Detector, count_flow};
use std::time::Duration;

/// Flows and links that were silent for so long are forgotten.
const FORGET: Duration = Duration::from_secs(60);

impl Detector {
    /// Forgets flows and links of which nothing was heard for long.
    pub(super) fn sweep(&mut self) {
        self.last_sweep = self.now;
        let now = self.now;
        let monitors = &mut self.monitors;
        self.flows.retain(|_, flow| {
            let keep = flow.history.own || now.since(flow.history.last_seen) < FORGET;
            if !keep {
                for place in [flow.egress.path, flow.ingress.path] {
                    count_flow(monitors, place, u32::saturating_sub);
                }
            }
            keep
        });
        let free = &mut self.free;
        self.monitor_by_link.retain(|_, place| {
            let Some(slot) = monitors.get_mut(*place as usize) else { return false };
            let keep = slot.as_ref().is_some_and(|monitor| {
                let silent = now.since(monitor.last_seen) >= FORGET;
                monitor.active || monitor.flows > 0 || monitor.is_interface() || !silent
            });
            if !keep {
                *slot = None;
                free.push(*place);
            }
            keep
        });
    }
}
