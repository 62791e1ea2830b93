//! Source ports of links: from the operator's range, each at most once per connecting host, the longest unused first.

use harmonaize_planner::HostId;
use std::collections::{BTreeMap, BTreeSet};

/// Who has which port.
#[derive(Debug)]
pub(super) struct Ports {
    range: Option<(u16, u16)>,
    next: BTreeMap<HostId, u16>,
    used: BTreeSet<(HostId, u16)>,
}

impl Ports {
    pub(super) fn new(range: Option<(u16, u16)>) -> Self {
        Self { range, next: BTreeMap::new(), used: BTreeSet::new() }
    }

    /// A port for a link that `host` connects; 0, that is any, where none is free. `held` remembers it for
    /// [`Ports::release`].
    pub(super) fn take(&mut self, host: HostId, held: &mut Vec<(HostId, u16)>) -> u16 {
        let Some((first, last)) = self.range else { return 0 };
        let start = self.next.get(&host).copied().unwrap_or(first).clamp(first, last);
        let Some(port) = (start..=last).chain(first..start).find(|port| !self.used.contains(&(host, *port)))
        else {
            return 0;
        };
        self.next.insert(host, if port == last { first } else { port + 1 });
        self.used.insert((host, port));
        held.push((host, port));
        port
    }

    pub(super) fn release(&mut self, held: &mut Vec<(HostId, u16)>) {
        for port in held.drain(..) {
            self.used.remove(&port);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gives_each_once_and_round() {
        let (mut ports, mut held, mut later) = (Ports::new(Some((10, 12))), Vec::new(), Vec::new());
        let host = HostId(0);
        assert_eq!([10, 11].map(|_| ports.take(host, &mut held)), [10, 11]);
        assert_eq!(ports.take(HostId(1), &mut later), 10);
        ports.release(&mut held);
        assert_eq!([(); 4].map(|()| ports.take(host, &mut later)), [12, 10, 11, 0]);
        assert_eq!(Ports::new(None).take(host, &mut held), 0);
    }
}
