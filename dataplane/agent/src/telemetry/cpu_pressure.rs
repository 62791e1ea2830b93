//! Whether this machine's processors have time to spare, of which telemetry may take its usual shares.

/// Less than one part in so many of all processors' time idle is none to spare.
const MIN_IDLE_PART: u64 = 10;
/// Shorter spans say nothing: idle time is told in hundredths of a second.
const MIN_SPAN: u64 = 20;

/// What the kernel has told of the machine, in hundredths of a second since it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CpuSample {
    up: u64,
    /// Of all processors together.
    idle: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct CpuPressure {
    processors: u64,
    before: Option<CpuSample>,
    throttled: bool,
}

impl CpuPressure {
    /// Of this machine.
    pub(crate) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
        Self { processors, before: None, throttled: false }
    }

    /// Whether processors had no time to spare since the last call. Where the kernel does not report that, it is what
    /// it was before.
    pub(crate) fn is_throttled(&mut self) -> bool {
        let text = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
        parse(&text).map_or(self.throttled, |now| self.update(now))
    }

    fn update(&mut self, now: CpuSample) -> bool {
        let Some(before) = self.before else {
            self.before = Some(now);
            return self.throttled;
        };
        let passed = now.up.saturating_sub(before.up);
        if passed >= MIN_SPAN {
            let idle = now.idle.saturating_sub(before.idle);
            self.throttled = idle.saturating_mul(MIN_IDLE_PART) < passed.saturating_mul(self.processors);
            self.before = Some(now);
        }
        self.throttled
    }
}

/// Reads `3623.20 1356.82`: seconds since the machine began, and those that its processors were idle.
fn parse(text: &str) -> Option<CpuSample> {
    let mut words = text.split_whitespace().map(|word| {
        let (whole, hundredths) = word.split_once('.')?;
        whole.parse::<u64>().ok()?.checked_mul(100)?.checked_add(hundredths.parse::<u64>().ok()?.min(99))
    });
    Some(CpuSample { up: words.next()??, idle: words.next()?? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_tells_is_read() {
        assert_eq!(parse("3623.20 1356.82\n"), Some(CpuSample { up: 362_320, idle: 135_682 }));
        for odd in ["", "1.00", "x.00 1.00", "1 2", "99999999999999999999.00 1.00"] {
            assert_eq!(parse(odd), None, "{odd}");
        }
        assert!(parse(&std::fs::read_to_string("/proc/uptime").unwrap()).is_some());
    }

    #[test]
    fn a_tenth_of_the_processors_time_is_something_to_spare() {
        let mut spare = CpuPressure { processors: 2, before: None, throttled: false };
        let mut after = |up, idle| spare.update(CpuSample { up, idle });
        assert!(!after(1000, 500), "nothing is known yet");
        assert!(after(1100, 519), "19 of 200");
        assert!(after(1110, 529), "too short a span");
        assert!(!after(1200, 539), "20 of 200");
        assert!(after(1300, 500), "idle time that goes back is none");
    }
}
