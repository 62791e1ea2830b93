//! The chunks in flight: from the lowest without a sum to the highest that is made.

use super::work::Flight;

/// What is known of each chunk in flight.
pub(super) struct Chunks {
    flights: Vec<Flight>,
    had: u64,
    next: u64,
    open: u64,
}

impl Chunks {
    /// For as many in flight as `capacity`, and at least one.
    pub(super) fn new(capacity: usize) -> Self {
        Self { flights: vec![Flight::default(); capacity.max(1)], had: 0, next: 0, open: 0 }
    }

    pub(super) fn clear(&mut self) {
        self.flights.fill(Flight::default());
        (self.had, self.next, self.open) = (0, 0, 0);
    }

    pub(super) fn capacity(&self) -> u64 {
        self.flights.len() as u64
    }

    /// All sums below this chunk are there.
    pub(super) fn had(&self) -> u64 {
        self.had
    }

    /// No chunk from here on has been made.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// How many are made and have no sum.
    pub(super) fn open(&self) -> u64 {
        self.open
    }

    fn place(&self, chunk: u64) -> usize {
        (chunk % self.capacity()) as usize
    }

    pub(super) fn flight(&self, chunk: u64) -> Flight {
        self.flights.get(self.place(chunk)).copied().unwrap_or_default()
    }

    pub(super) fn set(&mut self, chunk: u64, flight: Flight) {
        let at = self.place(chunk);
        if let Some(to) = self.flights.get_mut(at) {
            *to = flight;
        }
    }

    /// What is known of a chunk that is made and has no sum.
    pub(super) fn waiting(&self, chunk: u64) -> Option<Flight> {
        let flight = (self.had..self.next).contains(&chunk).then(|| self.flight(chunk));
        flight.filter(|flight| flight.made && !flight.done)
    }

    /// Those chunks, in ascending order.
    pub(super) fn all_waiting(&self) -> impl Iterator<Item = (u64, Flight)> {
        (self.had..self.next).filter_map(|chunk| Some((chunk, self.waiting(chunk)?)))
    }

    /// A chunk is made, for the first time.
    pub(super) fn make(&mut self, chunk: u64, flight: Flight) {
        debug_assert!((self.had..self.had + self.capacity()).contains(&chunk), "chunk {chunk} has no place");
        debug_assert!(!self.flight(chunk).made, "chunk {chunk} is made twice");
        self.set(chunk, Flight { made: true, ..flight });
        self.next = self.next.max(chunk + 1);
        self.open += 1;
        self.check();
    }

    /// The sum of a chunk is there.
    pub(super) fn finish(&mut self, chunk: u64, flight: Flight) {
        debug_assert!(self.waiting(chunk).is_some(), "chunk {chunk} waits for no sum");
        self.set(chunk, Flight { done: true, ..flight });
        self.open = self.open.saturating_sub(1);
        while self.had < self.next && self.flight(self.had).done {
            self.set(self.had, Flight::default());
            self.had += 1;
        }
        self.check();
    }

    /// Each chunk in flight has a place of its own, and those that wait are counted.
    fn check(&self) {
        debug_assert!(self.had <= self.next && self.next - self.had <= self.capacity());
        debug_assert_eq!(self.open, self.all_waiting().count() as u64);
    }
}
