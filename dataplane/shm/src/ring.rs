//! A single-producer, single-consumer ring between processes that do not trust each other. A handshake wakes a sleeping
//! consumer.
//!
//! Each side keeps its own index privately and publishes it; the other's published index is believed only as far as it
//! makes sense (at most a ring's length away). Indices count entries and never wrap within a machine's life. Entries are
//! read and written word by word with atomics, so a side that writes where it must not causes garbage at most.
//!
//! The algorithm is generic over the words so that loom can check the very code that runs on shared memory.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why a ring cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// No room: the other side has not taken as many entries as it should have.
    #[error("ring of {0} entries is full")]
    Full(u64),
    /// The other side's index makes no sense.
    #[error("ring of {capacity} entries is corrupt: own index {own}, the other side's {other}")]
    Corrupt {
        /// Entries.
        capacity: u64,
        /// Private index.
        own: u64,
        /// What the other side published.
        other: u64,
    },
}

/// A word in memory that the other side reads and writes too.
pub(crate) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    /// A full fence: earlier stores are visible before later loads are made.
    fn fence();
}

impl Word for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
    fn fence() {
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// Where a ring lies.
pub(crate) trait Cells {
    type Word: Word;
    /// Entries, a power of two.
    fn capacity(&self) -> u64;
    /// Entries taken so far, published by the consumer.
    fn head(&self) -> &Self::Word;
    /// Entries put so far, published by the producer.
    fn tail(&self) -> &Self::Word;
    /// 0 while the consumer is awake, else the number of its sleep. Written by the consumer alone.
    fn sleep_number(&self) -> &Self::Word;
    /// A word of the entry in which the entry of this index lies (modulo capacity).
    fn word(&self, index: u64, word: usize) -> &Self::Word;
}

/// The side that puts entries of `N` words.
#[derive(Debug)]
pub(crate) struct Producer<C, const N: usize> {
    cells: C,
    tail: u64,
    head_seen: u64,
    /// The sleep for which the consumer was last woken.
    woken_sleep: u64,
}

/// The side that takes entries of `N` words.
#[derive(Debug)]
pub(crate) struct Consumer<C, const N: usize> {
    cells: C,
    head: u64,
    tail_seen: u64,
    /// How often it has slept.
    sleeps: u64,
}

impl<C: Cells, const N: usize> Producer<C, N> {
    /// The producer of a fresh (zeroed) ring.
    pub(crate) fn new(cells: C) -> Self {
        Self { cells, tail: 0, head_seen: 0, woken_sleep: 0 }
    }

    /// The producer of a ring that another process was the producer of.
    pub(crate) fn resume(cells: C, [tail, head_seen, woken_sleep]: [u64; 3]) -> Self {
        Self { cells, tail, head_seen, woken_sleep }
    }

    /// What [`Producer::resume`] takes.
    pub(crate) fn position(&self) -> [u64; 3] {
        [self.tail, self.head_seen, self.woken_sleep]
    }

    /// Puts an entry. `N` stores and one release; reads the other side's line only when the ring seems full.
    pub(crate) fn push(&mut self, entry: &[u64; N]) -> Result<(), RingError> {
        let capacity = self.cells.capacity();
        if self.tail.wrapping_sub(self.head_seen) >= capacity {
            let head = self.cells.head().load(Ordering::Acquire);
            let distance = self.tail.wrapping_sub(head);
            if distance > capacity {
                return Err(RingError::Corrupt { capacity, own: self.tail, other: head });
            }
            self.head_seen = head;
            if distance == capacity {
                return Err(RingError::Full(capacity));
            }
        }
        for (word, value) in entry.iter().enumerate() {
            self.cells.word(self.tail, word).store(*value, Ordering::Relaxed);
        }
        self.tail = self.tail.wrapping_add(1);
        self.cells.tail().store(self.tail, Ordering::Release);
        Ok(())
    }

    /// Whether the consumer sleeps and must be woken for what was pushed. Says so once per sleep. One full fence.
    pub(crate) fn must_wake(&mut self) -> bool {
        // The store of `tail` before, the load of `asleep` after: pairs with `prepare_sleep`.
        C::Word::fence();
        let sleep = self.cells.sleep_number().load(Ordering::Relaxed);
        sleep != 0 && std::mem::replace(&mut self.woken_sleep, sleep) != sleep
    }
}

impl<C: Cells, const N: usize> Consumer<C, N> {
    /// The consumer of a fresh (zeroed) ring.
    pub(crate) fn new(cells: C) -> Self {
        Self { cells, head: 0, tail_seen: 0, sleeps: 0 }
    }

    /// The consumer of a ring that another process was the consumer of.
    pub(crate) fn resume(cells: C, [head, sleeps]: [u64; 2]) -> Self {
        Self { cells, head, tail_seen: head, sleeps }
    }

    /// What [`Consumer::resume`] takes.
    pub(crate) fn position(&self) -> [u64; 2] {
        [self.head, self.sleeps]
    }

    fn refresh_tail(&mut self) -> Result<bool, RingError> {
        if self.head == self.tail_seen {
            let (capacity, tail) = (self.cells.capacity(), self.cells.tail().load(Ordering::Acquire));
            if tail.wrapping_sub(self.head) > capacity {
                return Err(RingError::Corrupt { capacity, own: self.head, other: tail });
            }
            self.tail_seen = tail;
        }
        Ok(self.head != self.tail_seen)
    }

    /// Takes the next entry, copied. `N` loads and one release; reads the other side's line only when the ring seems
    /// empty.
    pub(crate) fn pop(&mut self) -> Result<Option<[u64; N]>, RingError> {
        if !self.refresh_tail()? {
            return Ok(None);
        }
        let entry = std::array::from_fn(|word| self.cells.word(self.head, word).load(Ordering::Relaxed));
        self.head = self.head.wrapping_add(1);
        self.cells.head().store(self.head, Ordering::Release);
        Ok(Some(entry))
    }

    /// Announces sleep, then looks once more. `false`: there is something (an entry, or an error to be had from `pop`),
    /// do not sleep. After `true` the producer's next `must_wake` says so.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        self.sleeps += 1;
        self.cells.sleep_number().store(self.sleeps, Ordering::Relaxed);
        // The store of `asleep` before, the load of `tail` after: pairs with `must_wake`.
        C::Word::fence();
        let quiet = matches!(self.refresh_tail(), Ok(false));
        if !quiet {
            self.wake();
        }
        quiet
    }

    /// Takes the announcement back.
    pub(crate) fn wake(&self) {
        self.cells.sleep_number().store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use std::sync::Arc;

    /// A ring in this process's memory.
    struct Local<W> {
        capacity: u64,
        control: [W; 3],
        words: Vec<W>,
    }

    impl<W: Word> Local<W> {
        fn new(capacity: u64, words: usize, word: impl Fn() -> W) -> Arc<Self> {
            let cells = (0..capacity as usize * words).map(|_| word()).collect();
            Arc::new(Self { capacity, control: [word(), word(), word()], words: cells })
        }
    }

    impl<W: Word> Cells for Arc<Local<W>> {
        type Word = W;
        fn capacity(&self) -> u64 {
            self.capacity
        }
        fn head(&self) -> &W {
            &self.control[0]
        }
        fn tail(&self) -> &W {
            &self.control[1]
        }
        fn sleep_number(&self) -> &W {
            &self.control[2]
        }
        fn word(&self, index: u64, word: usize) -> &W {
            let words = self.words.len() / self.capacity as usize;
            &self.words[(index % self.capacity) as usize * words + word]
        }
    }

    fn local(capacity: u64) -> Arc<Local<AtomicU64>> {
        Local::new(capacity, 2, || AtomicU64::new(0))
    }

    #[derive(Clone, Debug)]
    enum Action {
        Push,
        Pop,
        PrepareSleep,
    }

    proptest! {
        /// Against an oracle: a bounded queue and a flag.
        #[test]
        fn behaves_like_a_bounded_queue(
            exponent in 0u32..5,
            actions in prop::collection::vec(
                prop_oneof![3 => Just(Action::Push), 3 => Just(Action::Pop), 1 => Just(Action::PrepareSleep)], 0..200),
        ) {
            let capacity = 1u64 << exponent;
            let cells = local(capacity);
            let (mut producer, mut consumer) =
                (Producer::<_, 2>::new(cells.clone()), Consumer::<_, 2>::new(cells));
            let (mut oracle, mut asleep, mut next) = (VecDeque::new(), false, 0u64);
            for action in actions {
                match action {
                    Action::Push => {
                        let pushed = producer.push(&[next, !next]);
                        if oracle.len() as u64 == capacity {
                            prop_assert_eq!(pushed, Err(RingError::Full(capacity)));
                        } else {
                            prop_assert_eq!(pushed, Ok(()));
                            oracle.push_back([next, !next]);
                            next += 1;
                        }
                        prop_assert_eq!(producer.must_wake(), std::mem::take(&mut asleep));
                    }
                    Action::Pop => {
                        if asleep { consumer.wake(); asleep = false; }
                        prop_assert_eq!(consumer.pop(), Ok(oracle.pop_front()));
                    }
                    Action::PrepareSleep => {
                        asleep = oracle.is_empty();
                        prop_assert_eq!(consumer.prepare_sleep(), asleep);
                    }
                }
            }
        }

        /// Whatever the other side writes into control words and entries, each call ends with a value or an error.
        #[test]
        fn survives_any_bytes(writes in prop::collection::vec((0usize..3, any::<u64>(), any::<bool>()), 0..100)) {
            let cells = local(4);
            let (mut producer, mut consumer) =
                (Producer::<_, 2>::new(cells.clone()), Consumer::<_, 2>::new(cells.clone()));
            for (control, value, near) in writes {
                cells.control[control].store(if near { value % 8 } else { value }, Ordering::Relaxed);
                let _ = (producer.push(&[1, 2]), producer.must_wake(), consumer.pop(), consumer.prepare_sleep());
            }
        }
    }

    #[test]
    fn an_index_too_far_away_is_corrupt() {
        let cells = local(4);
        let mut consumer = Consumer::<_, 2>::new(cells.clone());
        for bad in [5, u64::MAX] {
            cells.control[1].store(bad, Ordering::Relaxed);
            assert_eq!(consumer.pop(), Err(RingError::Corrupt { capacity: 4, own: 0, other: bad }));
            assert!(!consumer.prepare_sleep());
        }
        let mut producer = Producer::<_, 2>::new(cells.clone());
        for _ in 0..4 {
            producer.push(&[0, 0]).unwrap();
        }
        assert_eq!(producer.push(&[0, 0]), Err(RingError::Full(4)));
        cells.control[0].store(5, Ordering::Relaxed);
        assert_eq!(producer.push(&[0, 0]), Err(RingError::Corrupt { capacity: 4, own: 4, other: 5 }));
    }

    #[test]
    fn two_threads_pass_a_million_entries_in_order() {
        const COUNT: u64 = 1_000_000;
        let cells = local(16);
        let (mut producer, mut consumer) =
            (Producer::<_, 2>::new(cells.clone()), Consumer::<_, 2>::new(cells));
        let sender = std::thread::spawn(move || {
            for value in 0..COUNT {
                while producer.push(&[value, value.wrapping_mul(0x9e37_79b9_7f4a_7c15)]).is_err() {
                    std::thread::yield_now();
                }
            }
        });
        let mut expected = 0;
        while expected < COUNT {
            match consumer.pop().unwrap() {
                Some(entry) => {
                    assert_eq!(entry, [expected, expected.wrapping_mul(0x9e37_79b9_7f4a_7c15)]);
                    expected += 1;
                }
                None => std::thread::yield_now(),
            }
        }
        sender.join().unwrap();
        assert_eq!(consumer.pop(), Ok(None));
    }

    mod model {
        use super::*;
        use loom::sync::atomic::AtomicU64 as LoomWord;

        impl Word for LoomWord {
            fn load(&self, order: Ordering) -> u64 {
                self.load(order)
            }
            fn store(&self, value: u64, order: Ordering) {
                self.store(value, order);
            }
            fn fence() {
                loom::sync::atomic::fence(Ordering::SeqCst);
            }
        }

        /// In no interleaving does the consumer sleep on an entry for which nobody wakes it. A lost wake-up would leave
        /// the consumer waiting for ever, which loom reports as a deadlock.
        #[test]
        fn no_wake_up_is_lost() {
            loom::model(|| {
                let cells = Local::new(2, 1, || LoomWord::new(0));
                let (bell, ear) = (Arc::new(loom::sync::Notify::new()), cells.clone());
                let ringer = Arc::clone(&bell);
                let mut producer = Producer::<_, 1>::new(cells);
                let sender = loom::thread::spawn(move || {
                    for value in 1..=2 {
                        producer.push(&[value]).unwrap();
                        if producer.must_wake() {
                            ringer.notify();
                        }
                    }
                });
                let mut consumer = Consumer::<_, 1>::new(ear);
                let mut expected = 1;
                while expected <= 2 {
                    match consumer.pop().unwrap() {
                        Some([value]) => {
                            assert_eq!(value, expected);
                            expected += 1;
                        }
                        None => {
                            if consumer.prepare_sleep() {
                                bell.wait();
                                consumer.wake();
                            }
                        }
                    }
                }
                sender.join().unwrap();
            });
        }

        /// Entries of several words come whole and in order, and none is overwritten before it was taken. A slot is handed over and
        /// back, again and again.
        fn hand_over(capacity: u64, entries: u64) {
            let mut builder = loom::model::Builder::new();
            // All interleavings of so many switches by force; more find nothing that fewer do not.
            builder.preemption_bound = Some(3);
            builder.check(move || {
                let cells = Local::new(capacity, 2, || LoomWord::new(0));
                let mut producer = Producer::<_, 2>::new(Arc::clone(&cells));
                let sender = loom::thread::spawn(move || {
                    for value in 1..=entries {
                        while let Err(error) = producer.push(&[value, !value]) {
                            assert_eq!(error, RingError::Full(capacity));
                            loom::thread::yield_now();
                        }
                    }
                });
                let mut consumer = Consumer::<_, 2>::new(cells);
                for expected in 1..=entries {
                    let entry = loop {
                        match consumer.pop().unwrap() {
                            Some(entry) => break entry,
                            None => loom::thread::yield_now(),
                        }
                    };
                    assert_eq!(entry, [expected, !expected]);
                }
                sender.join().unwrap();
                assert_eq!(consumer.pop(), Ok(None));
            });
        }

        #[test]
        fn one_slot_is_handed_over_and_back() {
            hand_over(1, 3);
        }

        #[test]
        fn slots_are_handed_over_beyond_the_end() {
            hand_over(2, 4);
        }
    }
}
