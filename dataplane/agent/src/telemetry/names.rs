//! Interfaces by index, as records name them.

use harmonaize_analysis::trace::Record;
use std::collections::BTreeMap;

/// Names of interfaces; those that are gone keep theirs, until another has their index.
#[derive(Clone, Debug, Default)]
pub struct Names(BTreeMap<u32, String>);

/// Interfaces that are remembered.
const MOST: usize = 1024;

impl Names {
    /// Takes in a name where the record has one.
    pub fn take(&mut self, record: &Record) {
        if let Record::Link(link) = record {
            self.insert(link.interface, link.name.as_str());
        }
    }

    /// Takes in a name.
    pub fn insert(&mut self, index: u32, name: &str) {
        if self.0.len() < MOST || self.0.contains_key(&index) {
            self.0.insert(index, name.to_owned());
        }
    }

    /// The name of an interface, or its index as text.
    pub fn get(&self, index: u32) -> String {
        self.0.get(&index).cloned().unwrap_or_else(|| format!("interface {index}"))
    }
}

/// A number that tells hosts apart (FNV-1a of the name).
pub(crate) fn number_of(host: &str) -> u64 {
    host.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
