//! The least, or the most, of what was measured lately.

use harmonaize_abi::Nanos;
use std::time::Duration;

/// The least, or the most, of the last while: between one and two ages.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct WindowedMinMax<T> {
    now: Option<T>,
    before: Option<T>,
    since: Nanos,
}

impl<T: Copy + Ord> WindowedMinMax<T> {
    fn merged(&self, choose: fn(T, T) -> T) -> Option<T> {
        match (self.now, self.before) {
            (Some(one), Some(other)) => Some(choose(one, other)),
            (one, other) => one.or(other),
        }
    }

    pub(super) fn min(&self) -> Option<T> {
        self.merged(T::min)
    }

    pub(super) fn max(&self) -> Option<T> {
        self.merged(T::max)
    }

    pub(super) fn update(&mut self, now: Nanos, age: Duration, value: T, choose: fn(T, T) -> T) {
        if now.since(self.since) >= age {
            // Nothing is forgotten for want of news.
            *self = Self { now: None, before: self.now.or(self.before), since: now };
        }
        self.now = Some(self.now.map_or(value, |now| choose(now, value)));
    }
}
