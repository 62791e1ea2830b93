//! What programs that were built for diagnosis tell of rare things, from aya-log to tracing.

use crate::Error;
use aya::Ebpf;
use aya_log::EbpfLogger;
use log::{Level, Log, Metadata, Record};

/// The records of one loaded object.
pub(crate) struct Diagnosis(EbpfLogger<Forward>);

impl Diagnosis {
    /// Takes the ring of records out of a loaded object.
    pub(crate) fn of(ebpf: &mut Ebpf) -> Result<Self, Error> {
        let logger = EbpfLogger::init_with_logger(ebpf, Forward);
        logger.map(Self).map_err(|error| Error::object(format!("it tells nothing of rare things: {error}")))
    }

    /// Hands on what was told so far: few records, for each processor tells one in 10 ms.
    pub(crate) fn forward(&mut self) {
        self.0.flush();
    }
}

/// Hands records to tracing, whose levels are constants of the place that calls it.
struct Forward;

impl Log for Forward {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let (program, line, told) = (record.target(), record.line(), record.args());
        match record.level() {
            Level::Error => tracing::error!(program, line, "{told}"),
            Level::Warn => tracing::warn!(program, line, "{told}"),
            Level::Info => tracing::info!(program, line, "{told}"),
            Level::Debug => tracing::debug!(program, line, "{told}"),
            Level::Trace => tracing::trace!(program, line, "{told}"),
        }
    }

    fn flush(&self) {}
}
