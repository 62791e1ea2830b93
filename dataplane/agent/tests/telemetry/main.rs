//! Telemetry of an agent: on a made-up source, with real traffic between whole agents, and on its own (`observe`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod made_up;
mod observed;
mod own;
mod shown;
#[path = "../whole/mod.rs"]
mod whole;

use std::time::Instant;

/// Waits until something holds.
pub(crate) fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + whole::LIMIT;
    while !done() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

/// Runs what needs tokio.
pub(crate) fn block<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}
