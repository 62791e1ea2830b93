//! A simulated world in words, for a seed that fails.

use super::world::World;

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{:?} after {:?}: {:?}", self.scenario, self.now, self.statistics)?;
        for (index, node) in self.nodes.iter().enumerate() {
            writeln!(
                f,
                "worker {index}: session {:#x} {:?} whole {} settled {} next {} {:?} {:?}",
                node.session,
                node.summation,
                node.done,
                node.done_everywhere,
                node.next,
                node.worker,
                node.worker.counters()
            )?;
        }
        writeln!(f, "{:?}", self.leader)?;
        writeln!(f, "{:?} {:?}", self.aggregators, self.counters())
    }
}
