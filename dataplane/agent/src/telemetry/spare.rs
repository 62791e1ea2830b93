//! Whether this machine's processors have time to spare, of which telemetry may take its usual shares.

/// Less than one part in so many of all processors' time idle is none to spare.
const PART: u64 = 10;
/// Shorter spans say nothing: idle time is told in hundredths of a second.
const SPAN: u64 = 20;

/// What the kernel has told of the machine, in hundredths of a second since it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Told {
    up: u64,
    /// Of all processors together.
    idle: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Spare {
    processors: u64,
    before: Option<Told>,
    scarce: bool,
}

impl Spare {
    /// Of this machine.
    pub(crate) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
        Self { processors, before: None, scarce: false }
    }

    /// Whether processors had no time to spare since this was last asked; what it was before, where the kernel does not tell.
    pub(crate) fn is_scarce(&mut self) -> bool {
        let text = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
        parse(&text).map_or(self.scarce, |now| self.take(now))
    }

    fn take(&mut self, now: Told) -> bool {
        let Some(before) = self.before else {
            self.before = Some(now);
            return self.scarce;
        };
        let passed = now.up.saturating_sub(before.up);
        if passed >= SPAN {
            let idle = now.idle.saturating_sub(before.idle);
            self.scarce = idle.saturating_mul(PART) < passed.saturating_mul(self.processors);
            self.before = Some(now);
        }
        self.scarce
    }
}

/// Reads `3623.20 1356.82`: seconds since the machine began, and those that its processors were idle.
fn parse(text: &str) -> Option<Told> {
    let mut words = text.split_whitespace().map(|word| {
        let (whole, hundredths) = word.split_once('.')?;
        whole.parse::<u64>().ok()?.checked_mul(100)?.checked_add(hundredths.parse::<u64>().ok()?.min(99))
    });
    Some(Told { up: words.next()??, idle: words.next()?? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_tells_is_read() {
        assert_eq!(parse("3623.20 1356.82\n"), Some(Told { up: 362_320, idle: 135_682 }));
        for odd in ["", "1.00", "x.00 1.00", "1 2", "99999999999999999999.00 1.00"] {
            assert_eq!(parse(odd), None, "{odd}");
        }
        assert!(parse(&std::fs::read_to_string("/proc/uptime").unwrap()).is_some());
    }

    #[test]
    fn a_tenth_of_the_processors_time_is_something_to_spare() {
        let mut spare = Spare { processors: 2, before: None, scarce: false };
        let mut after = |up, idle| spare.take(Told { up, idle });
        assert!(!after(1000, 500), "nothing is known yet");
        assert!(after(1100, 519), "19 of 200");
        assert!(after(1110, 529), "too short a span");
        assert!(!after(1200, 539), "20 of 200");
        assert!(after(1300, 500), "idle time that goes back is none");
    }
}
