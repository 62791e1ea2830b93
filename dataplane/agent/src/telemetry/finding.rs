//! What was found, and who hears of it.

use harmonaize_abi::Nanos;
use harmonaize_analysis::congestion::Congestion;
use harmonaize_analysis::marks::Operation;
use harmonaize_analysis::phases::{Address, Phase};
use harmonaize_analysis::straggler::Straggler;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::broadcast;

/// Findings that are kept for those who ask later.
const MAX_RETAINED: usize = 4096;
/// Findings that may wait for a reader; a slower one is told how many it missed.
const WAITING: usize = 4096;

/// Something that was found. Times are CLOCK_MONOTONIC.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// An own operation has ended for all local ranks.
    Operation(Operation),
    /// An external job has communicated.
    Phase(Phase),
    /// A link's state has changed.
    Congestion(Congestion),
    /// A straggler was found, or is over.
    Straggler(LocatedStraggler),
}

/// A straggler, and where it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocatedStraggler {
    /// The finding.
    pub straggler: Straggler,
    /// Its host's address, of an external job.
    pub host: Option<Address>,
}

/// A finding, and when it was made.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// When, CLOCK_MONOTONIC.
    pub time: Nanos,
    /// What is to be added to its times to get CLOCK_REALTIME.
    pub offset_ns: i64,
    /// What.
    pub found: Found,
}

/// Where findings go. Clones share it.
#[derive(Clone, Debug)]
pub struct Findings {
    retained: Arc<Mutex<VecDeque<Arc<Finding>>>>,
    listeners: broadcast::Sender<Arc<Finding>>,
}

impl Default for Findings {
    fn default() -> Self {
        Self { retained: Arc::default(), listeners: broadcast::channel(WAITING).0 }
    }
}

impl Findings {
    /// Tells everybody.
    pub(crate) fn publish(&self, finding: Finding) {
        let finding = Arc::new(finding);
        let mut kept = self.retained.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == MAX_RETAINED {
            kept.pop_front();
        }
        kept.push_back(Arc::clone(&finding));
        // Nobody may be listening. Told under the lock, so that who begins to listen misses nothing and hears nothing twice.
        let _ = self.listeners.send(finding);
    }

    /// What is kept, oldest first, and everything from then on.
    pub fn listen(&self) -> (Vec<Arc<Finding>>, broadcast::Receiver<Arc<Finding>>) {
        let kept = self.retained.lock().unwrap_or_else(PoisonError::into_inner);
        (kept.iter().cloned().collect(), self.listeners.subscribe())
    }
}
