//! How long a path's device takes to carry out what it is given: one message in a while is timed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The shortest time between the beginnings of two measurements on a path.
const INTERVAL: Duration = Duration::from_millis(1);

/// What a measurement found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Delay {
    /// From posting to completion.
    pub(super) took: Duration,
    /// Payload bytes that the device carried out meanwhile, of all paths on it.
    pub(super) bytes: u64,
}

/// A message that is timed.
#[derive(Debug)]
struct UnderWay {
    number: u32,
    posted: Instant,
    /// Of the device, when it was posted.
    completed: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Delays {
    /// Payload bytes that the device has carried out, for this endpoint's paths together.
    completed: Arc<AtomicU64>,
    under_way: Option<UnderWay>,
    begun: Option<Instant>,
    done: Option<Delay>,
}

impl Delays {
    /// Of a path on a device that has carried out so many bytes.
    pub(super) fn new(completed: &Arc<AtomicU64>) -> Self {
        Self { completed: Arc::clone(completed), under_way: None, begun: None, done: None }
    }

    /// A message is about to be posted, and gives a completion: it is timed where none is, and none was a moment ago.
    pub(super) fn begin(&mut self, number: u32, now: impl FnOnce() -> Instant) {
        if self.under_way.is_some() {
            return;
        }
        let posted = now();
        if self.begun.is_none_or(|begun| posted.saturating_duration_since(begun) >= INTERVAL) {
            let completed = self.completed.load(Ordering::Relaxed);
            self.begun = Some(posted);
            self.under_way = Some(UnderWay { number, posted, completed });
        }
    }

    /// A message has been carried out, with so many bytes of payload.
    pub(super) fn settled(&mut self, number: u32, bytes: u32, now: impl FnOnce() -> Instant) {
        let before = self.completed.fetch_add(bytes.into(), Ordering::Relaxed);
        if let Some(timed) = self.under_way.take_if(|timed| timed.number == number) {
            let bytes = before.wrapping_add(bytes.into()).wrapping_sub(timed.completed);
            self.done = Some(Delay { took: now().saturating_duration_since(timed.posted), bytes });
        }
    }

    /// Takes what was found since this was last asked.
    pub(super) fn take(&mut self) -> Option<Delay> {
        self.done.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_message_in_a_while_is_timed_with_what_the_device_did_meanwhile() {
        let device = Arc::new(AtomicU64::new(u64::MAX - 5));
        let [mut one, mut other] = [Delays::new(&device), Delays::new(&device)];
        let begun = Instant::now();
        let after = |micros: u64| move || begun + Duration::from_micros(micros);
        one.begin(7, after(0));
        one.begin(8, || panic!("one is timed already"));
        one.settled(6, 1000, || panic!("it is another"));
        other.settled(3, 200, || panic!("none is timed"));
        assert_eq!((one.take(), other.take()), (None, None));
        one.settled(7, 30, after(400));
        assert_eq!(one.take(), Some(Delay { took: Duration::from_micros(400), bytes: 1230 }));
        assert_eq!(one.take(), None);
        // Too soon; then again.
        one.begin(9, after(999));
        one.settled(9, 1, || panic!("it is not timed"));
        one.begin(10, after(1000));
        one.settled(10, 1, after(1100));
        assert_eq!(one.take(), Some(Delay { took: Duration::from_micros(100), bytes: 1 }));
    }
}
