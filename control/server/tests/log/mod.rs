//! What a thread logs, for tests of the audit.

use std::sync::{Arc, Mutex};
use tracing::subscriber::{DefaultGuard, set_default};

/// What is logged while it is the default.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// What this thread logs until the guard goes.
    pub(crate) fn begin() -> (Self, DefaultGuard) {
        let log = Self::default();
        let writer = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        (log, set_default(subscriber))
    }

    /// The lines of the audit so far, which are no longer here then.
    pub(crate) fn audit(&self) -> Vec<String> {
        let text = String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap();
        text.lines().filter(|line| line.contains(" audit: ")).map(str::to_owned).collect()
    }
}
