//! A timeline: tracks beneath tracks, each with slices, moments or a counter.

use harmonaize_planner::Nanos;

/// Something that took a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    /// When it began, CLOCK_REALTIME.
    pub begin: Nanos,
    /// When it ended; not before.
    pub end: Nanos,
    /// What it is called.
    pub name: String,
    /// What else is known of it.
    pub facts: Vec<(&'static str, Fact)>,
    /// Slices with the same number are joined by arrows.
    pub joined: Option<u64>,
}

/// Something that happened at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    /// When, CLOCK_REALTIME.
    pub time: Nanos,
    /// What it is called.
    pub name: &'static str,
    /// What else is known of it.
    pub facts: Vec<(&'static str, Fact)>,
}

/// What is known of a slice or moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fact {
    /// A number.
    Number(u64),
    /// A text.
    Text(String),
}

/// A quantity over time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Counter {
    /// Its unit.
    pub unit: &'static str,
    /// When it got which value, CLOCK_REALTIME.
    pub values: Vec<(Nanos, u64)>,
}

/// A row of a timeline, and those beneath it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Track {
    /// What it is called.
    pub name: String,
    /// Its slices.
    pub slices: Vec<Slice>,
    /// Its moments.
    pub moments: Vec<Moment>,
    /// Its counter; such a track has nothing else.
    pub counter: Option<Counter>,
    /// Beneath it.
    pub tracks: Vec<Track>,
}

impl Track {
    /// A track with only a name.
    pub(crate) fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Puts a track beneath, unless nothing is on it.
    pub(crate) fn add(&mut self, track: Self) {
        let empty = track.slices.is_empty() && track.moments.is_empty() && track.counter.is_none();
        if !(empty && track.tracks.is_empty()) {
            self.tracks.push(track);
        }
    }
}

/// Slices in lanes, so that within one none overlap: what a viewer can draw in a row.
pub(crate) fn lanes(slices: &[Slice]) -> Vec<Vec<&Slice>> {
    let mut sorted: Vec<&Slice> = slices.iter().collect();
    sorted.sort_by(|one, other| (one.begin, one.end, &one.name).cmp(&(other.begin, other.end, &other.name)));
    // By when they are free again; the lowest number first among those that are.
    let mut busy = std::collections::BinaryHeap::new();
    let mut free = std::collections::BTreeSet::new();
    let mut lanes: Vec<Vec<&Slice>> = Vec::new();
    for slice in sorted {
        while let Some(std::cmp::Reverse((end, lane))) = busy.peek().copied()
            && end <= slice.begin
        {
            busy.pop();
            free.insert(lane);
        }
        let lane = free.pop_first().unwrap_or_else(|| {
            lanes.push(Vec::new());
            lanes.len() - 1
        });
        if let Some(slices) = lanes.get_mut(lane) {
            slices.push(slice);
        }
        busy.push(std::cmp::Reverse((slice.end, lane)));
    }
    lanes
}
