//! One communicator at an aggregator: its session, its workers, and its chunks. A chunk is kept between its first part
//! and the word of all workers that they have the sum.

use crate::Pool;
use crate::aggregator::{Counters, Grant, Outbox, Recipient};
use crate::packet::{Content, HEADER_BYTES, Header, Key, Kind, seal};
use std::time::Duration;

mod parent;
mod part;

pub(crate) use parent::ParentSession;

/// Most chunks that a communicator has at once: two sets of 4096.
const MAX_CHUNKS: u32 = 8192;

/// Where a chunk stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The entry holds no chunk.
    Free,
    /// Some parts are in.
    Filling,
    /// All are, and the sum has gone to the parent.
    Up,
    /// The sum of all is here until all have it.
    Done,
}

#[derive(Clone, Copy)]
struct Entry {
    stage: Stage,
    chunk: u64,
    content: Content,
    elements: usize,
    /// Bytes of a part; of one worker's bytes for all, of these.
    bytes: usize,
    /// Whose bytes these are.
    root: u16,
    /// Workers that have sent their part.
    seen: u16,
    /// Hosts whose parts are in the sum.
    count: u16,
    /// When it last went to the parent.
    sent_up: Option<Duration>,
}

const FREE: Entry = Entry {
    stage: Stage::Free,
    chunk: 0,
    content: Content::Sum,
    elements: 0,
    bytes: 0,
    root: 0,
    seen: 0,
    count: 0,
    sent_up: None,
};

struct WorkerState {
    key: Key,
    had: u64,
}

pub(crate) struct Communicator {
    grant: Grant,
    grain: u32,
    members: Vec<WorkerState>,
    entries: Vec<Entry>,
    /// Of each entry, a bit for each worker whose part has come.
    bits: Vec<u64>,
    /// Of each entry, its units.
    units: Vec<u32>,
    bitmap_len: usize,
    /// 0 before the first.
    session: u64,
    lost: bool,
    /// All workers have the sums below this chunk.
    base: u64,
    /// Workers that have no more than these.
    lagging: u16,
    /// No chunk from here on has an entry.
    top: u64,
    active: bool,
    last_received: Duration,
    up: Option<ParentSession>,
    pub(crate) counters: Counters,
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator").field("session", &self.session).field("base", &self.base).finish()
    }
}

impl Communicator {
    pub(crate) fn new(grant: Grant, grain: u32) -> Self {
        let entries = (grant.share.most / grain.max(1)).clamp(2, MAX_CHUNKS) as usize;
        let bitmap_len = usize::from(grant.workers).div_ceil(64);
        let member =
            |worker| WorkerState { key: Key::derive(&grant.secret, grant.communicator, worker), had: 0 };
        let up = grant.parent.clone().map(ParentSession::new);
        Self {
            members: (0..grant.workers).map(member).collect(),
            entries: vec![FREE; entries],
            bits: vec![0; entries * bitmap_len],
            units: vec![0; entries * grain as usize],
            bitmap_len,
            session: 0,
            lost: false,
            base: 0,
            lagging: grant.workers,
            top: 0,
            active: false,
            last_received: Duration::ZERO,
            up,
            counters: Counters::default(),
            grant,
            grain,
        }
    }

    pub(crate) fn key(&self, worker: u16) -> Option<&Key> {
        self.members.get(usize::from(worker)).map(|member| &member.key)
    }

    pub(crate) fn up(&self) -> Option<&ParentSession> {
        self.up.as_ref()
    }

    /// Chunks that may have an entry at once.
    fn max_open(&self, pool: &Pool) -> u64 {
        let id = self.grant.communicator;
        let chunks = pool.owned(id).min(pool.quota(id)) / self.grain.max(1);
        u64::from(chunks).min(self.entries.len() as u64)
    }

    /// Half of them: while one set's sums are fetched, the other fills.
    fn window(&self, pool: &Pool) -> u16 {
        let own = u16::try_from(self.max_open(pool) / 2).unwrap_or(u16::MAX);
        self.up.as_ref().map_or(own, |up| own.min(up.window())).max(1)
    }

    /// A worker begins a session, or asks whether it has begun.
    pub(crate) fn begin(
        &mut self,
        now: Duration,
        incarnation: u64,
        header: &Header,
        pool: &mut Pool,
        out: &mut impl Outbox,
    ) {
        if header.session < self.session || header.session == 0 {
            self.counters.stale += 1;
            return;
        }
        if header.session > self.session {
            self.clear(pool);
            (self.session, self.lost) = (header.session, false);
        }
        self.wake(now, pool);
        self.lose_if_silent(now, pool);
        if self.lost {
            self.counters.lost += 1;
            self.answer(Kind::Lost, incarnation, header, 0, 0, pool, out);
        } else if self.up.as_ref().is_some_and(|up| !up.is_granted()) {
            self.send_to_parent(now, Kind::Begin, true, 0, (0, 0), &mut [0; HEADER_BYTES], out);
        } else {
            self.grant_to(incarnation, header, pool, out);
        }
    }

    /// Says that the session is open.
    fn grant_to(&mut self, incarnation: u64, header: &Header, pool: &Pool, out: &mut impl Outbox) {
        self.answer(Kind::Granted, incarnation, header, 0, 0, pool, out);
    }

    /// A worker's part, or its word on what it has.
    pub(crate) fn worker(
        &mut self,
        now: Duration,
        incarnation: u64,
        header: &Header,
        payload: &[u8],
        pool: &mut Pool,
        out: &mut impl Outbox,
    ) {
        if header.session < self.session {
            self.counters.stale += 1;
            return;
        }
        self.wake(now, pool);
        self.lose_if_silent(now, pool);
        let here = header.incarnation == incarnation && header.session == self.session;
        if !here || self.lost || self.session == 0 {
            self.counters.lost += 1;
            self.answer(Kind::Lost, incarnation, header, 0, 0, pool, out);
            return;
        }
        if header.had > self.top {
            self.counters.ahead += 1;
            return;
        }
        self.acknowledge(header.worker, header.had, pool);
        if header.kind == Kind::Contribution {
            self.part(now, incarnation, header, payload, pool, out);
        } else if header.note == 1 && header.chunk >= self.base {
            self.handle_request(now, incarnation, header, pool, out);
        } else if header.note == 0 {
            self.acknowledge_up(now, out);
        }
    }

    /// Cost: of each worker's packets, the one that lets the slowest go on looks at all workers.
    fn acknowledge(&mut self, worker: u16, had: u64, pool: &mut Pool) {
        let base = self.base;
        let Some(member) = self.members.get_mut(usize::from(worker)) else { return };
        if had <= member.had {
            return;
        }
        self.lagging -= u16::from(member.had == base);
        member.had = had;
        if self.lagging > 0 {
            return;
        }
        let least = self.members.iter().map(|member| member.had).min().unwrap_or(base);
        self.lagging = self.members.iter().filter(|member| member.had == least).count() as u16;
        for chunk in base..least {
            self.release(chunk, pool);
        }
        self.base = least;
        self.check();
        self.release_surplus(pool);
    }

    /// Checks that no worker is below the base or above the top. Those at the base must be counted, and all chunks lie between.
    fn check(&self) {
        debug_assert!(self.members.iter().all(|member| (self.base..=self.top).contains(&member.had)));
        debug_assert_eq!(
            usize::from(self.lagging),
            self.members.iter().filter(|member| member.had == self.base).count()
        );
        debug_assert!(self.top - self.base <= self.entries.len() as u64, "chunks share a place");
        let used = || self.entries.iter().enumerate().filter(|(_, entry)| entry.stage != Stage::Free);
        debug_assert!(used().all(|(at, entry)| {
            self.place(entry.chunk) == at
                && (self.base..self.top).contains(&entry.chunk)
                && entry.seen <= self.grant.workers
        }));
    }

    /// Tells the pool once nothing is above the quota.
    pub(crate) fn release_surplus(&self, pool: &mut Pool) {
        let id = self.grant.communicator;
        if pool.is_rebalancing() && self.top <= self.base + u64::from(pool.quota(id) / self.grain.max(1)) {
            pool.drained(id);
        }
    }

    fn place(&self, chunk: u64) -> usize {
        // No chunk is so far from another with an entry that they meet: see `max_open`.
        (chunk % self.entries.len().max(1) as u64) as usize
    }

    fn entry(&self, chunk: u64) -> Option<Entry> {
        let entry = self.entries.get(self.place(chunk)).copied();
        entry.filter(|entry| entry.stage != Stage::Free && entry.chunk == chunk)
    }

    fn set(&mut self, entry: Entry) {
        let place = self.place(entry.chunk);
        if let Some(to) = self.entries.get_mut(place) {
            *to = entry;
        }
    }

    fn units_of(&self, chunk: u64) -> &[u32] {
        let (from, grain) = (self.place(chunk) * self.grain as usize, self.grain as usize);
        self.units.get(from..from + grain).unwrap_or_default()
    }

    fn unit_of(&self, chunk: u64, at: usize) -> u32 {
        self.units_of(chunk).get(at).copied().unwrap_or(u32::MAX)
    }

    fn bit(&mut self, chunk: u64, worker: u16) -> Option<(&mut u64, u64)> {
        let at = self.place(chunk) * self.bitmap_len + usize::from(worker) / 64;
        self.bits.get_mut(at).map(|word| (word, 1 << (worker % 64)))
    }

    fn has(&mut self, chunk: u64, worker: u16) -> bool {
        self.bit(chunk, worker).is_some_and(|(word, mask)| *word & mask != 0)
    }

    fn mark(&mut self, chunk: u64, worker: u16) {
        if let Some((word, mask)) = self.bit(chunk, worker) {
            *word |= mask;
        }
    }

    fn release(&mut self, chunk: u64, pool: &mut Pool) {
        let Some(entry) = self.entry(chunk) else { return };
        for unit in self.units_of(chunk) {
            pool.give_back(self.grant.communicator, *unit);
        }
        self.set(Entry { stage: Stage::Free, ..entry });
    }

    /// Forgets the session.
    pub(crate) fn clear(&mut self, pool: &mut Pool) {
        for chunk in self.base..self.top {
            self.release(chunk, pool);
        }
        for member in &mut self.members {
            member.had = 0;
        }
        (self.base, self.top, self.lagging) = (0, 0, self.grant.workers);
        self.check();
        if let Some(up) = &mut self.up {
            up.forget();
        }
        self.release_surplus(pool);
    }

    fn lose(&mut self, pool: &mut Pool) {
        self.clear(pool);
        self.lost = true;
    }

    fn wake(&mut self, now: Duration, pool: &mut Pool) {
        self.last_received = now;
        if !self.active {
            self.active = true;
            pool.set_active(self.grant.communicator, true);
        }
    }

    /// Lets go what is borrowed, if nothing was heard for `idle`.
    pub(crate) fn release_if_idle(&mut self, now: Duration, idle: Duration, pool: &mut Pool) {
        if self.active && now.saturating_sub(self.last_received) > idle {
            self.active = false;
            pool.set_active(self.grant.communicator, false);
        }
        self.release_surplus(pool);
    }

    /// All parts are in.
    fn complete(
        &mut self,
        now: Duration,
        incarnation: u64,
        mut entry: Entry,
        pool: &mut Pool,
        out: &mut impl Outbox,
    ) {
        self.counters.sums += 1;
        if self.grant.ordered && entry.content.adds() {
            self.add_in_order(entry, pool);
        }
        if self.up.is_some() {
            entry.stage = Stage::Up;
            self.set(entry);
            self.send_up(now, entry, pool, out);
        } else {
            self.finish(incarnation, entry, pool, out);
        }
    }

    fn add_in_order(&mut self, entry: Entry, pool: &mut Pool) {
        let (chunk, form) = (entry.chunk, self.format_of(entry.content));
        let Some(first) = (0..self.grant.workers).find(|worker| self.has(chunk, *worker)) else { return };
        let (from, words) = (self.place(chunk) * self.grain as usize, self.place(chunk) * self.bitmap_len);
        // The sum's unit is the first; whose part lay there, if any, has not come.
        self.units.get_mut(from..).unwrap_or_default().swap(0, usize::from(first));
        let sum = self.unit_of(chunk, 0);
        let mut memory = pool.lift(sum);
        let bits = self.bits.get(words..).unwrap_or_default();
        let is_in =
            |worker: &usize| bits.get(worker / 64).is_some_and(|word| word & (1 << (worker % 64)) != 0);
        let others = (usize::from(first) + 1..usize::from(self.grant.workers)).filter(is_in);
        let range = HEADER_BYTES..HEADER_BYTES + entry.bytes;
        let parts = others
            .map(|worker| pool.unit(self.unit_of(chunk, worker)).get(range.clone()).unwrap_or_default());
        let added = memory.get_mut(range.clone()).is_some_and(|sum| form.add_all(parts, sum));
        debug_assert!(added, "lengths were looked at");
        pool.put(sum, memory);
    }

    /// The sum is there: to all workers. One worker's bytes go to those that have asked, and it is told that they are in.
    fn finish(&mut self, incarnation: u64, mut entry: Entry, pool: &mut Pool, out: &mut impl Outbox) {
        entry.stage = Stage::Done;
        self.set(entry);
        let all = entry.content != Content::Spread;
        for worker in 0..self.grant.workers {
            if all || self.has(entry.chunk, worker) {
                self.send_sum(incarnation, entry, worker, pool, out);
            }
        }
        self.advance_up();
    }

    /// What goes out with a sum.
    fn result(&self, incarnation: u64, entry: Entry, worker: u16, pool: &Pool) -> Header {
        Header {
            kind: Kind::Result,
            worker,
            count: entry.count,
            communicator: self.grant.communicator,
            session: self.session,
            incarnation,
            sequence: 0,
            chunk: entry.chunk,
            had: self.base,
            window: self.window(pool),
            note: entry.content.note(),
        }
    }

    fn send_sum(
        &mut self,
        incarnation: u64,
        entry: Entry,
        worker: u16,
        pool: &mut Pool,
        out: &mut impl Outbox,
    ) {
        let owner = entry.content == Content::Spread && entry.root == worker;
        let bytes = if owner { 0 } else { self.sum_bytes(&entry) };
        let mut header = self.result(incarnation, entry, worker, pool);
        if owner {
            (header.kind, header.note) = (Kind::Waiting, 1);
        }
        let unit = pool.unit_mut(self.unit_of(entry.chunk, 0));
        let Some(key) = self.key(worker) else { return };
        if let Some(packet) = unit.get_mut(..HEADER_BYTES + bytes) {
            seal(&header, key, packet);
            self.counters.sent += 1;
            out.send(Recipient::Worker { communicator: self.grant.communicator, worker }, packet);
        }
    }

    /// A worker asks for a chunk, by sending its part again or outright.
    fn handle_request(
        &mut self,
        now: Duration,
        incarnation: u64,
        header: &Header,
        pool: &mut Pool,
        out: &mut impl Outbox,
    ) {
        let Some(entry) = self.entry(header.chunk) else {
            self.answer(Kind::Waiting, incarnation, header, 0, 0, pool, out);
            return;
        };
        if entry.stage == Stage::Up {
            self.send_up(now, entry, pool, out);
        }
        if entry.stage == Stage::Done && (entry.content != Content::Spread || entry.root != header.worker) {
            self.send_sum(incarnation, entry, header.worker, pool, out);
        } else {
            let note = u8::from(self.has(header.chunk, header.worker));
            let missing = self.grant.workers - entry.seen.min(self.grant.workers);
            self.answer(Kind::Waiting, incarnation, header, note, missing, pool, out);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "two of the answer, the rest as everywhere")]
    fn answer(
        &mut self,
        kind: Kind,
        incarnation: u64,
        to: &Header,
        note: u8,
        count: u16,
        pool: &Pool,
        out: &mut impl Outbox,
    ) {
        let (window, had) = (self.window(pool), self.base);
        let Some(key) = self.key(to.worker) else { return };
        let mut packet = [0; HEADER_BYTES];
        let header = Header { kind, count, incarnation, window, note, had, ..*to };
        seal(&header, key, &mut packet);
        self.counters.sent += 1;
        out.send(Recipient::Worker { communicator: self.grant.communicator, worker: to.worker }, &packet);
    }
}
