//! Reading flows, in batches.

use crate::{Error, sys};
use harmonaize_events::{FlowKey, RoceCounters, TcpFlow};
use std::os::fd::BorrowedFd;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Entries that one call reads at first; more where a bucket holds more.
const BATCH: usize = 1024;

/// The flows that were in the tables at a reading. Each is read at once, not all of them together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flows {
    /// Connections of TCP.
    pub tcp: Vec<(FlowKey, TcpFlow)>,
    /// Queue pairs of RoCE v2, by direction.
    pub roce: Vec<(FlowKey, RoceCounters)>,
    /// Flows that have been evicted so far because a table was full: at least so many.
    pub evicted: u64,
}

/// What was counted of one flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "made on the stack and taken apart at once")]
pub enum Counters {
    /// A connection of TCP.
    Tcp(TcpFlow),
    /// What goes to a queue pair of RoCE v2.
    Roce(RoceCounters),
}

/// Buffers for the calls, kept from reading to reading.
#[derive(Debug)]
pub(crate) struct Buffers<K, V> {
    keys: Vec<K>,
    values: Vec<V>,
}

impl<K, V> Default for Buffers<K, V> {
    fn default() -> Self {
        Self { keys: Vec::new(), values: Vec::new() }
    }
}

impl<K, V> Buffers<K, V>
where
    K: FromBytes + IntoBytes + Immutable + KnownLayout + Copy,
    V: FromBytes + IntoBytes + Immutable + KnownLayout + Copy,
{
    /// Hands over all entries of a table.
    pub(crate) fn each(
        &mut self,
        map: BorrowedFd<'_>,
        table: &str,
        mut with: impl FnMut(K, V),
    ) -> Result<(), Error> {
        if self.keys.is_empty() {
            self.grow(BATCH);
        }
        let mut place = None;
        loop {
            let read = match sys::lookup_batch(map, &mut place, &mut self.keys, &mut self.values) {
                Ok(read) => read,
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                    self.grow(self.keys.len() * 2);
                    continue;
                }
                Err(error) => return Err(Error::call(format!("reading the table {table}"), error)),
            };
            let entries = self.keys.iter().copied().zip(self.values.iter().copied());
            entries.take(read.count).for_each(|(key, value)| with(key, value));
            if read.done {
                return Ok(());
            }
        }
    }

    fn grow(&mut self, length: usize) {
        self.keys.resize(length, K::new_zeroed());
        self.values.resize(length, V::new_zeroed());
    }
}
