//! A transport that counts what landed where it was posted, and its links.

use crate::tap::{Hooks, Tap};
use harmonaize_transport::{Event, Transport};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The counts.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Bytes that lay where they had been posted for.
    pub(crate) posted: AtomicU64,
    /// Links opened.
    pub(crate) opened: AtomicU64,
    /// Links closed, by this end or by the other one.
    pub(crate) closed: AtomicU64,
}

/// Puts a counting transport around another, and returns its counts too.
pub(crate) fn counting(inner: Box<dyn Transport + Send>) -> (Box<dyn Transport + Send>, Arc<Counts>) {
    let counts = Arc::new(Counts::default());
    (Box::new(Tap { inner, hooks: Arc::clone(&counts) }), counts)
}

impl Hooks for Arc<Counts> {
    fn open(&mut self) {
        self.opened.fetch_add(1, Ordering::Relaxed);
    }

    fn close(&mut self) {
        self.closed.fetch_add(1, Ordering::Relaxed);
    }

    fn event(&mut self, event: &Event<'_>) {
        if let Event::Received { payload: Some((_, length)), posted: true, .. } = event {
            self.posted.fetch_add((*length).into(), Ordering::Relaxed);
        }
        self.closed.fetch_add(matches!(event, Event::Down { .. }).into(), Ordering::Relaxed);
    }
}
