//! The least, or the most, of what was measured lately.

/// The least, or the most, of the last while: between one and two ages.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct WindowedMinMax {
    now: Option<u64>,
    before: Option<u64>,
    since_ns: u64,
}

impl WindowedMinMax {
    fn merged(&self, choose: fn(u64, u64) -> u64) -> Option<u64> {
        match (self.now, self.before) {
            (Some(one), Some(other)) => Some(choose(one, other)),
            (one, other) => one.or(other),
        }
    }

    pub(super) fn min(&self) -> Option<u64> {
        self.merged(u64::min)
    }

    pub(super) fn max(&self) -> Option<u64> {
        self.merged(u64::max)
    }

    pub(super) fn update(&mut self, now_ns: u64, age_ns: u64, value: u64, choose: fn(u64, u64) -> u64) {
        if now_ns.saturating_sub(self.since_ns) >= age_ns {
            // Nothing is forgotten for want of news.
            *self = Self { now: None, before: self.now.or(self.before), since_ns: now_ns };
        }
        self.now = Some(self.now.map_or(value, |now| choose(now, value)));
    }
}
