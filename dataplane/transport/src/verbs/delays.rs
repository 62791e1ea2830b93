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
    /// Payload bytes that the device may have carried out meanwhile, of all paths on it: what it had at any time of it. A device serves its
    /// queue pairs in turn, so that it has done most of a message whose completion is still to come.
    pub(super) bytes: u64,
}

/// Payload bytes of a device, for an endpoint's paths together. The endpoint's thread alone counts.
#[derive(Debug, Default)]
pub(super) struct DeviceBytes {
    posted: AtomicU64,
    completed: AtomicU64,
}

/// Adds to a counter, of which no other thread is a writer.
fn add(counter: &AtomicU64, bytes: u64) {
    if bytes != 0 {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(bytes), Ordering::Relaxed);
    }
}

/// A message that is timed.
#[derive(Debug)]
struct InFlight {
    number: u32,
    posted: Instant,
    /// Of the device, when it was posted.
    completed: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Delays {
    device: Arc<DeviceBytes>,
    /// Payload bytes of this path that the device has and has not carried out.
    unsettled: u64,
    in_flight: Option<InFlight>,
    begun: Option<Instant>,
    done: Option<Delay>,
}

impl Delays {
    /// Of a path on a device.
    pub(super) fn new(device: &Arc<DeviceBytes>) -> Self {
        Self { device: Arc::clone(device), unsettled: 0, in_flight: None, begun: None, done: None }
    }

    /// The device is given so many bytes of payload.
    pub(super) fn posted(&mut self, bytes: u32) {
        self.unsettled += u64::from(bytes);
        add(&self.device.posted, bytes.into());
    }

    /// A message is about to be posted, and gives a completion: it is timed where none is, and none was a moment ago.
    pub(super) fn begin(&mut self, number: u32, now: impl FnOnce() -> Instant) {
        if self.in_flight.is_some() {
            return;
        }
        let posted = now();
        if self.begun.is_none_or(|begun| posted.saturating_duration_since(begun) >= INTERVAL) {
            let completed = self.device.completed.load(Ordering::Relaxed);
            self.begun = Some(posted);
            self.in_flight = Some(InFlight { number, posted, completed });
        }
    }

    /// A message has been carried out, with as many bytes of payload as were posted.
    pub(super) fn settled(&mut self, number: u32, bytes: u32, now: impl FnOnce() -> Instant) {
        self.unsettled = self.unsettled.saturating_sub(bytes.into());
        add(&self.device.completed, bytes.into());
        if let Some(timed) = self.in_flight.take_if(|timed| timed.number == number) {
            let bytes = self.device.posted.load(Ordering::Relaxed).wrapping_sub(timed.completed);
            self.done = Some(Delay { took: now().saturating_duration_since(timed.posted), bytes });
        }
    }

    /// Takes what was found since this was last asked.
    pub(super) fn take(&mut self) -> Option<Delay> {
        self.done.take()
    }
}

impl Drop for Delays {
    /// What a path takes along with it, the device carries out for nobody.
    fn drop(&mut self) {
        add(&self.device.posted, self.unsettled.wrapping_neg());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_message_is_timed_with_its_devices_bytes() {
        let near = || AtomicU64::new(u64::MAX - 5);
        let device = Arc::new(DeviceBytes { posted: near(), completed: near() });
        let [mut one, mut other] = [Delays::new(&device), Delays::new(&device)];
        let begun = Instant::now();
        let after = |micros: u64| move || begun + Duration::from_micros(micros);
        [1000, 30].into_iter().for_each(|bytes| one.posted(bytes));
        other.posted(200);
        one.begin(7, after(0));
        one.begin(8, || panic!("one is timed already"));
        one.settled(6, 1000, || panic!("it is another"));
        other.settled(3, 200, || panic!("none is timed"));
        assert_eq!((one.take(), other.take()), (None, None));
        one.settled(7, 30, after(400));
        assert_eq!(one.take(), Some(Delay { took: Duration::from_micros(400), bytes: 1230 }));
        assert_eq!(one.take(), None);
        // Too soon; then again.
        one.posted(1);
        one.begin(9, after(999));
        one.settled(9, 1, || panic!("it is not timed"));
        one.posted(1);
        one.begin(10, after(1000));
        one.settled(10, 1, after(1100));
        assert_eq!(one.take(), Some(Delay { took: Duration::from_micros(100), bytes: 1 }));
    }

    #[test]
    fn paths_in_lock_step_count_what_the_device_did_for_all() {
        const PATHS: u64 = 8;
        const BYTES: u32 = 1 << 20;
        let device = Arc::new(DeviceBytes::default());
        let mut paths: Vec<_> = (0..PATHS).map(|_| Delays::new(&device)).collect();
        let begun = Instant::now();
        for round in 0..20_u32 {
            // The device takes 1 ms for a message, and a part of each path's in turn: all of them end at once, 8 ms later.
            let now = begun + Duration::from_millis(u64::from(round) * PATHS);
            for path in &mut paths {
                path.posted(BYTES);
                path.begin(round, || now);
            }
            let ended = now + Duration::from_millis(PATHS);
            for path in &mut paths {
                path.settled(round, BYTES, || ended);
                let all = PATHS * u64::from(BYTES);
                assert_eq!(path.take(), Some(Delay { took: ended - now, bytes: all }), "round {round}");
            }
        }
    }

    #[test]
    fn what_goes_with_a_path_counts_for_no_other() {
        let device = Arc::new(DeviceBytes::default());
        let mut one = Delays::new(&device);
        let mut lost = Delays::new(&device);
        lost.posted(5000);
        lost.settled(0, 2000, || panic!("none is timed"));
        drop(lost);
        one.posted(30);
        one.begin(1, Instant::now);
        one.settled(1, 30, Instant::now);
        assert_eq!(one.take().map(|delay| delay.bytes), Some(30));
    }
}
