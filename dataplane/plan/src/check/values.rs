//! Symbols for what memory holds. They are a rank's input, a reduction of symbols in an order, or a symbol that went
//! through a codec. The same symbol means the same bits.

use super::Fault;
use super::agreed::Sum;
use crate::program::{Participant, Stage};
use harmonaize_abi::Rank;
use std::collections::HashMap;

/// A symbol.
pub(super) type Value = u32;

/// All symbols of one check.
pub(super) struct Values {
    ranks: u32,
    /// Words of a set of ranks; 0 where nothing is reduced.
    set_len: usize,
    nodes: Vec<Node>,
    /// `set_len` words per node: which ranks are in it.
    sets: Vec<u64>,
    leaves: HashMap<(u32, u32, u32), Value>,
    reductions: HashMap<(bool, Box<[Value]>), Value>,
    encoded: HashMap<(Participant, Stage, Value), Value>,
    /// What others made, by where it belongs.
    made: HashMap<(Sum, u32), Value>,
}

/// What is known of a sum without its terms.
pub(super) struct Terms<'a> {
    /// Which ranks are in it.
    pub(super) set: &'a [u64],
    /// Whether it is complete.
    pub(super) last: bool,
    /// Most times that any of it was encoded.
    pub(super) encodings: u32,
}

#[derive(Clone, Copy)]
struct Node {
    block: u32,
    atom: u32,
    last: bool,
    encodings: u32,
    /// What was encoded, or the symbol itself.
    plain: Value,
}

impl Values {
    pub(super) fn new(ranks: u32, reduces: bool) -> Self {
        Self {
            ranks,
            set_len: if reduces { ranks.div_ceil(64) as usize } else { 0 },
            nodes: Vec::new(),
            sets: Vec::new(),
            leaves: HashMap::new(),
            reductions: HashMap::new(),
            encoded: HashMap::new(),
            made: HashMap::new(),
        }
    }

    /// A sum that somebody else made, of which no more is known than these terms. All of it that has one name is the same bits.
    pub(super) fn made(&mut self, sum: Sum, atom: u32, terms: &Terms<'_>) -> Value {
        if let Some(value) = self.made.get(&(sum, atom)) {
            return *value;
        }
        let (last, encodings, plain) = (terms.last, terms.encodings, self.nodes.len() as Value);
        let value = self.add(Node { block: sum.block, atom, last, encodings, plain }, terms.set);
        self.made.insert((sum, atom), value);
        value
    }

    /// Whether a symbol is a sum of just these terms, in this place.
    pub(super) fn has(&self, value: Value, place: (u32, u32), terms: &Terms<'_>) -> bool {
        let node = self.node(value);
        node.is_some_and(|node| {
            (node.block, node.atom) == place
                && (node.last, node.encodings, node.plain) == (terms.last, terms.encodings, value)
        }) && self.set(value) == terms.set
    }

    /// A rank's input.
    pub(super) fn leaf(&mut self, rank: Rank, block: u32, atom: u32) -> Value {
        if let Some(value) = self.leaves.get(&(rank.0, block, atom)) {
            return *value;
        }
        let word = (rank.0 / 64) as usize;
        let set: Vec<u64> =
            (0..self.set_len).map(|index| if index == word { 1 << (rank.0 % 64) } else { 0 }).collect();
        let value =
            self.add(Node { block, atom, last: false, encodings: 0, plain: self.nodes.len() as Value }, &set);
        self.leaves.insert((rank.0, block, atom), value);
        value
    }

    /// The reduction of `sources` in their order.
    pub(super) fn reduce(&mut self, sources: &[Value], last: bool) -> Result<Value, Fault> {
        let key = (last, Box::from(sources));
        if let Some(value) = self.reductions.get(&key) {
            return Ok(*value);
        }
        let mut set = vec![0; self.set_len];
        let first = sources.first().and_then(|value| self.node(*value)).ok_or(Fault::Sources)?;
        let mut encodings = 0;
        for value in sources {
            let node = self.node(*value).ok_or(Fault::Sources)?;
            if (node.block, node.atom) != (first.block, first.atom) {
                return Err(Fault::Mixed);
            }
            if node.last {
                return Err(Fault::AfterLast);
            }
            encodings = encodings.max(node.encodings);
            for ((word, more), index) in set.iter_mut().zip(self.set(*value)).zip(0..) {
                let twice = *word & more;
                if twice != 0 {
                    return Err(Fault::Twice(Rank(index * 64 + twice.trailing_zeros())));
                }
                *word |= more;
            }
        }
        if last && let Some(rank) = self.missing(&set) {
            return Err(Fault::Incomplete(rank));
        }
        let value = self.add(Node { last, encodings, plain: self.nodes.len() as Value, ..first }, &set);
        self.reductions.insert(key, value);
        Ok(value)
    }

    /// A symbol after a participant has encoded it: each rounds another way.
    pub(super) fn encode(&mut self, by: Participant, stage: Stage, value: Value) -> Result<Value, Fault> {
        if let Some(encoded) = self.encoded.get(&(by, stage, value)) {
            return Ok(*encoded);
        }
        let node = self.node(value).ok_or(Fault::Sources)?;
        let right = match stage {
            Stage::Contribution => !node.last && node.encodings == 0,
            Stage::Result => node.last && node.plain == value,
            Stage::Moved => self.set_len == 0 && node.encodings == 0,
        };
        if !right {
            return Err(Fault::Stage);
        }
        let set = self.set(value).to_vec();
        let encoded = self.add(Node { encodings: node.encodings + 1, ..node }, &set);
        self.encoded.insert((by, stage, value), encoded);
        Ok(encoded)
    }

    /// Whether a symbol holds every rank, and whether it was completed.
    pub(super) fn complete(&self, value: Value) -> (bool, bool) {
        (self.missing(self.set(value)).is_none(), self.node(value).is_some_and(|node| node.last))
    }

    /// Where a symbol belongs.
    pub(super) fn position(&self, value: Value) -> Option<(u32, u32)> {
        self.node(value).map(|node| (node.block, node.atom))
    }

    /// A symbol without the codecs that it went through since it was read or reduced.
    pub(super) fn plain(&self, value: Value) -> Value {
        self.node(value).map_or(value, |node| node.plain)
    }

    /// How often a codec was used on the way to a symbol.
    pub(super) fn encodings(&self, value: Value) -> u32 {
        self.node(value).map_or(0, |node| node.encodings)
    }

    fn add(&mut self, node: Node, set: &[u64]) -> Value {
        self.nodes.push(node);
        self.sets.extend_from_slice(set);
        (self.nodes.len() - 1) as Value
    }

    fn node(&self, value: Value) -> Option<Node> {
        self.nodes.get(value as usize).copied()
    }

    fn set(&self, value: Value) -> &[u64] {
        let start = value as usize * self.set_len;
        self.sets.get(start..start + self.set_len).unwrap_or(&[])
    }

    fn missing(&self, set: &[u64]) -> Option<Rank> {
        let mut full = self.ranks;
        for (word, index) in set.iter().zip(0..) {
            let missing = !word;
            let first = index * 64 + missing.trailing_zeros();
            if missing != 0 && first < self.ranks {
                return Some(Rank(first));
            }
            full = full.saturating_sub(64);
        }
        (full > 0).then_some(Rank(0))
    }
}
