//! All shortest paths from a host to another, which never change: found when they are first asked for.

use harmonaize_planner::{HostId, Path, Topology};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

type RouteCache = BTreeMap<(HostId, HostId), Rc<[Path]>>;

#[derive(Debug, Default)]
pub(super) struct Routes(RefCell<RouteCache>);

impl Routes {
    pub(super) fn between(&self, topology: &Topology, from: HostId, to: HostId) -> Rc<[Path]> {
        let mut known = self.0.borrow_mut();
        let paths = known.entry((from, to)).or_insert_with(|| topology.equal_cost_paths(from, to).into());
        Rc::clone(paths)
    }
}
