//! What a run came to.

use std::time::Duration;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Statistics {
    pub(crate) operations: u64,
    pub(crate) segments: u64,
    pub(crate) switches: u64,
    pub(crate) failures: u64,
    /// Ends because a peer asked more than it read.
    pub(crate) crowded: u64,
    pub(crate) frames: u64,
    /// Payloads that went straight to their place.
    pub(crate) posted: u64,
    /// Links that went over to a new plan, seen from one end.
    pub(crate) carried: u64,
    /// New links that were broken.
    pub(crate) cut: u64,
    /// Coded steps.
    pub(crate) coded: u64,
    /// Segments given to an aggregator, those that hosts did again, and sessions, each seen from one end.
    pub(crate) aggregated: u64,
    pub(crate) again: u64,
    /// Of these, those of which somebody had what they come to.
    pub(crate) restored: u64,
    /// Held sums that came to tensors that are not mapped.
    pub(crate) copied_late: u64,
    pub(crate) sessions: u64,
    /// How often it was asked whether one is back.
    pub(crate) probes: u64,
    /// Operations that completed in one shot and in two.
    pub(crate) one_two_shot: [u64; 2],
    /// By recursive doubling, by recursive halving, by a binomial tree, and by racks.
    pub(crate) recursive: [u64; 4],
    /// Turns that were asked for, and those that were given before they were over.
    pub(crate) slots: [u64; 2],
    /// Messages from rank to rank that were received, and pieces of them.
    pub(crate) messages: u64,
    pub(crate) pieces: u64,
    /// Turns that ended in the midst of an action.
    pub(crate) slices: u64,
    /// Words that went while all else waited.
    pub(crate) control_messages: u64,
    pub(crate) actions: u64,
    pub(crate) virtual_time: u64,
    pub(crate) core: Duration,
}

impl Statistics {
    pub(crate) fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.segments += other.segments;
        self.switches += other.switches;
        self.failures += other.failures;
        self.crowded += other.crowded;
        self.frames += other.frames;
        self.posted += other.posted;
        self.carried += other.carried;
        self.cut += other.cut;
        self.coded += other.coded;
        self.aggregated += other.aggregated;
        self.again += other.again;
        self.restored += other.restored;
        self.copied_late += other.copied_late;
        self.sessions += other.sessions;
        self.probes += other.probes;
        self.recursive = [0, 1, 2, 3].map(|index| self.recursive[index] + other.recursive[index]);
        self.one_two_shot = [0, 1].map(|index| self.one_two_shot[index] + other.one_two_shot[index]);
        self.slots = [0, 1].map(|index| self.slots[index] + other.slots[index]);
        self.messages += other.messages;
        self.pieces += other.pieces;
        self.slices += other.slices;
        self.control_messages += other.control_messages;
        self.actions += other.actions;
        self.virtual_time += other.virtual_time;
        self.core += other.core;
    }
}

impl std::fmt::Display for Statistics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let each = self.core.as_nanos() as f64 / self.actions.max(1) as f64;
        write!(
            f,
            "{} calls complete ({:?} in one shot and in two, {:?} by doubling, halving, tree and racks), {} segments, {} coded steps, {} aggregated in {} sessions ({} again by hosts, {} of them restored; {} copied out late), {} frames ({} posted), {} switches ({} links carried over, {} cut), {} failures, {:?} turns asked for and given, {} messages in {} pieces, {} turns in the midst, {} words beside, {:.3} s of virtual time; {} actions, {each:.0} ns of core each",
            self.operations,
            self.one_two_shot,
            self.recursive,
            self.segments,
            self.coded,
            self.aggregated,
            self.sessions,
            self.again,
            self.restored,
            self.copied_late,
            self.frames,
            self.posted,
            self.switches,
            self.carried,
            self.cut,
            self.failures,
            self.slots,
            self.messages,
            self.pieces,
            self.slices,
            self.control_messages,
            self.virtual_time as f64 / 1e9,
            self.actions,
        )
    }
}
