//! What there is to give: hosts by kind of accelerator.

use thiserror::Error;

/// A kind's place in its inventory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KindId(pub usize);

/// Hosts that are alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kind {
    /// The accelerator's name.
    pub name: String,
    /// How many hosts there are.
    pub hosts: u32,
    /// Accelerators of each host.
    pub accelerators: u32,
    /// The most hosts that one job can be predicted on: no allocation spans more.
    pub job_hosts: u32,
}

impl Kind {
    /// All accelerators of the kind.
    pub fn capacity(&self) -> u32 {
        self.hosts.saturating_mul(self.accelerators)
    }

    /// The most accelerators of one job: those of the hosts that it may span.
    pub fn job_capacity(&self) -> u32 {
        self.hosts.min(self.job_hosts).saturating_mul(self.accelerators)
    }

    /// The host of an accelerator.
    pub(crate) fn host(&self, accelerator: u32) -> u32 {
        accelerator / self.accelerators.max(1)
    }

    /// The hosts that so many workers fill.
    pub(crate) fn hosts_of(&self, workers: u32) -> u32 {
        workers.div_ceil(self.accelerators.max(1))
    }

    /// Workers on each host, where they fill hosts one by one.
    pub fn filled(&self, workers: u32) -> Vec<u32> {
        let full = workers / self.accelerators.max(1);
        let mut shape = vec![self.accelerators; full as usize];
        shape.extend(Some(workers - full * self.accelerators).filter(|rest| *rest > 0));
        shape
    }
}

/// Why there is no such inventory.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InventoryError {
    /// Nothing could ever run.
    #[error("an inventory needs at least one kind of accelerator")]
    Empty,
    /// A kind without hosts, or hosts without accelerators.
    #[error("kind {0} has no accelerators: leave it out, or give it hosts")]
    NoAccelerators(String),
    /// More than can be numbered.
    #[error("kind {0} has more accelerators than 4,294,967,295")]
    TooMany(String),
    /// Two kinds of one name.
    #[error("kind {0} stands in the inventory twice")]
    Twice(String),
}

/// All hosts, by kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    kinds: Vec<Kind>,
}

impl Inventory {
    /// An inventory of these kinds.
    ///
    /// # Errors
    ///
    /// No kinds, a kind without accelerators, or two of one name.
    pub fn new(kinds: Vec<Kind>) -> Result<Self, InventoryError> {
        if kinds.is_empty() {
            return Err(InventoryError::Empty);
        }
        for (place, kind) in kinds.iter().enumerate() {
            if kind.hosts.checked_mul(kind.accelerators).is_none() {
                return Err(InventoryError::TooMany(kind.name.clone()));
            }
            if kind.capacity() == 0 || kind.job_hosts == 0 {
                return Err(InventoryError::NoAccelerators(kind.name.clone()));
            }
            if kinds.iter().take(place).any(|earlier| earlier.name == kind.name) {
                return Err(InventoryError::Twice(kind.name.clone()));
            }
        }
        Ok(Self { kinds })
    }

    /// The kinds in order.
    pub fn kinds(&self) -> impl ExactSizeIterator<Item = (KindId, &Kind)> {
        self.kinds.iter().enumerate().map(|(place, kind)| (KindId(place), kind))
    }

    /// A kind, if there is one of that number.
    pub fn kind(&self, id: KindId) -> Option<&Kind> {
        self.kinds.get(id.0)
    }

    /// The accelerators of all kinds.
    pub fn capacity(&self) -> u64 {
        self.kinds.iter().map(|kind| u64::from(kind.capacity())).sum()
    }

    /// The same with so many times the hosts; what a job may span stays.
    ///
    /// # Errors
    ///
    /// More accelerators of a kind than can be numbered, or none.
    pub fn scaled(&self, times: u32) -> Result<Self, InventoryError> {
        let scale = |kind: &Kind| match kind.hosts.checked_mul(times) {
            Some(hosts) => Ok(Kind { hosts, ..kind.clone() }),
            None => Err(InventoryError::TooMany(kind.name.clone())),
        };
        Self::new(self.kinds.iter().map(scale).collect::<Result<_, _>>()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(name: &str, hosts: u32, accelerators: u32) -> Kind {
        Kind { name: name.to_owned(), hosts, accelerators, job_hosts: hosts.max(1) }
    }

    #[test]
    fn what_cannot_be_given_is_refused() {
        assert_eq!(Inventory::new(Vec::new()), Err(InventoryError::Empty));
        let none = Inventory::new(vec![kind("a", 0, 8)]);
        assert_eq!(none, Err(InventoryError::NoAccelerators("a".to_owned())));
        let twice = Inventory::new(vec![kind("a", 1, 8), kind("a", 2, 4)]);
        assert_eq!(twice, Err(InventoryError::Twice("a".to_owned())));
        let huge = Inventory::new(vec![kind("a", u32::MAX, 2)]);
        assert_eq!(huge, Err(InventoryError::TooMany("a".to_owned())));
    }

    #[test]
    fn workers_fill_hosts_one_by_one() {
        let kind = kind("a", 6, 4);
        assert_eq!((kind.filled(10), kind.filled(3), kind.hosts_of(9)), (vec![4, 4, 2], vec![3], 3));
        let inventory = Inventory::new(vec![kind]).unwrap().scaled(2).unwrap();
        assert_eq!((inventory.capacity(), inventory.kind(KindId(0)).unwrap().job_hosts), (48, 6));
    }
}
