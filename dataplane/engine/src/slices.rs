//! Long actions in slices: after each of them the turn may go to another communicator.
//!
//! What takes long in an action is its passes over memory. It runs them in order, a set at a time, each cut into numbered pieces.
//! After some [`SLICE_BYTES`] of them it looks at the time. Where its turn is over, it notes which pieces are left and stands by. In its
//! communicator's next turn it is begun again: it skips what is done and goes on with those. Its communicator does nothing else before,
//! so the order of actions is what it would be. Where the communicator fails meanwhile, the rest is never done.
//!
//! Steps of codecs are sliced alike, by the parts of their own passes ([`harmonaize_codec::Passes`]).

use arrayvec::ArrayVec;
use harmonaize_abi::{ChannelId, StepId};
use harmonaize_codec::{Cursor, Load, Passes};
use harmonaize_core::{Action, Nanos};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Bytes that an action reads and writes before it looks at the time: some 30 us of one core.
const SLICE_BYTES: usize = 256 << 10;

/// How an engine's actions are sliced.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slicing {
    bytes: usize,
    /// Whether the turn is over after each slice, whatever the time.
    each: bool,
}

impl Default for Slicing {
    fn default() -> Self {
        Self { bytes: SLICE_BYTES, each: false }
    }
}

impl Slicing {
    /// Slices of so many bytes, or of a piece if that has more; each ends the turn.
    pub(crate) fn each(bytes: usize) -> Self {
        Self { bytes: bytes.clamp(1, SLICE_BYTES), each: true }
    }

    /// The same where nothing ends the turn.
    pub(crate) fn unending(self) -> Self {
        Self { each: false, ..self }
    }

    /// Begins an action, or goes on with it. The turn is over `until` after `start`; none: it is not.
    pub(crate) fn begin(self, start: Instant, until: Option<Nanos>, progress: Progress) -> Slices {
        Slices { slicing: self, start, until, set: 0, since: 0, progress }
    }
}

/// How far an action is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress {
    /// Whether a turn has ended in its midst.
    begun: bool,
    /// Sets of passes that are done.
    sets: u32,
    /// The pieces of the next set that are left; none: all.
    open: Option<Range<usize>>,
    /// How far its codec is.
    coded: Cursor,
    /// Whether it is a step whose fetch has ended: what was fetched is to be scaled.
    fetched: bool,
    /// Bytes that its pieces, and parts, have read and written.
    touched: u64,
    /// How many of them its communicator has been charged for.
    charged: u64,
}

/// An action whose turn is over in its midst.
#[derive(Debug)]
pub(crate) struct Unfinished {
    pub(crate) action: Action,
    pub(crate) progress: Progress,
}

impl Unfinished {
    /// A step of which nothing is left but to scale what it has fetched.
    pub(crate) fn fetched((channel, step): (ChannelId, StepId)) -> Self {
        let action = Action::Step { channel, step, sources: ArrayVec::new(), sends: ArrayVec::new() };
        Self { action, progress: Progress { fetched: true, ..Progress::default() } }
    }
}

/// An action's passes in one turn.
#[derive(Debug)]
pub(crate) struct Slices {
    slicing: Slicing,
    start: Instant,
    until: Option<Nanos>,
    /// The number of the next set of passes.
    set: u32,
    /// Bytes since the last look at the time.
    since: usize,
    progress: Progress,
}

impl Slices {
    /// Bytes of a slice.
    pub(crate) fn bytes(&self) -> usize {
        self.slicing.bytes
    }

    /// Whether the action has begun in an earlier turn.
    pub(crate) fn is_resumed(&self) -> bool {
        self.progress.begun
    }

    /// Whether nothing is left of it but to scale what was fetched.
    pub(crate) fn is_fetched(&self) -> bool {
        self.progress.fetched
    }

    /// Which pieces of the next set are left, of so many. None: it was done in an earlier turn.
    pub(crate) fn open(&mut self, pieces: usize) -> Option<Range<usize>> {
        if self.set < self.progress.sets {
            self.set += 1;
            return None;
        }
        let Some(open) = self.progress.open.take() else { return Some(0..pieces) };
        debug_assert!(open.end <= pieces, "a set of passes has changed between two slices");
        Some(open.start.min(pieces)..open.end.min(pieces))
    }

    /// Whether the turn is over before so many bytes more. If not, they are counted. The first ones of a turn never are too many.
    pub(crate) fn ends_before(&mut self, bytes: usize) -> bool {
        if self.since > 0 && self.since.saturating_add(bytes) > self.slicing.bytes {
            let over = |until: Nanos| self.start.elapsed() >= Duration::from_nanos(until.0);
            if self.slicing.each || self.until.is_some_and(over) {
                return true;
            }
            self.since = 0;
        }
        self.count(bytes);
        false
    }

    /// How many bytes more the slice has room for.
    pub(crate) fn room(&self) -> usize {
        self.slicing.bytes.saturating_sub(self.since)
    }

    /// Counts bytes that the slice has room for.
    pub(crate) fn count(&mut self, bytes: usize) {
        self.since = self.since.saturating_add(bytes);
    }

    /// The set has these pieces left, and those done in this turn touched so many bytes. Whether the set is done.
    pub(crate) fn close(&mut self, rest: Range<usize>, touched: usize) -> bool {
        self.progress.touched = self.progress.touched.saturating_add(touched as u64);
        if !rest.is_empty() {
            self.progress.open = Some(rest);
            return false;
        }
        self.set += 1;
        self.progress.sets += 1;
        true
    }

    /// Runs a codec's passes, or goes on with them. To be called once in a turn: what `run` does has the same passes each time.
    pub(crate) fn code<T>(&mut self, run: impl FnOnce(&mut Passes<'_>) -> T) -> T {
        let cursor = self.progress.coded;
        let mut ends_before = |load: Load| {
            let over = self.ends_before(load.copied);
            if !over {
                self.progress.touched = self.progress.touched.saturating_add(load.bytes as u64);
            }
            over
        };
        let mut passes = Passes::resume(cursor, &mut ends_before);
        let done = run(&mut passes);
        self.progress.coded = passes.cursor();
        done
    }

    /// For how many bytes the communicator is to be charged now. `whole`: for so many in all, for the action is done.
    pub(crate) fn charge(&mut self, whole: Option<u64>) -> u64 {
        let due = whole.unwrap_or(self.progress.touched).saturating_sub(self.progress.charged);
        self.progress.charged = self.progress.charged.saturating_add(due);
        due
    }

    /// The action, to be taken up in a later turn.
    pub(crate) fn stand_by(self, action: Action) -> Unfinished {
        Unfinished { action, progress: Progress { begun: true, ..self.progress } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACTION: Action = Action::Aggregate { channel: ChannelId(0) };

    fn each(bytes: usize, progress: Progress) -> Slices {
        Slicing::each(bytes).begin(Instant::now(), None, progress)
    }

    #[test]
    fn what_is_one_slice_never_ends_the_turn() {
        let mut slices = each(1000, Progress::default());
        assert!(!slices.ends_before(600) && !slices.ends_before(400));
        assert!(slices.ends_before(1) && slices.ends_before(1), "it stays over");
        let mut slices = each(1000, Progress::default());
        assert!(!slices.ends_before(5000), "the first piece of a turn is done, however long");
    }

    #[test]
    fn time_ends_a_turn_after_a_slice_alone() {
        let past = Some(Nanos(0));
        let mut slices = Slicing::default().begin(Instant::now(), past, Progress::default());
        assert!(!slices.ends_before(SLICE_BYTES) && slices.ends_before(1));
        for (slicing, until) in [
            (Slicing::default(), None),
            (Slicing::default(), Some(Nanos(u64::MAX >> 1))),
            (Slicing::each(1000).unending(), None),
        ] {
            let mut slices = slicing.begin(Instant::now(), until, Progress::default());
            assert!((0..100).all(|_| !slices.ends_before(SLICE_BYTES)), "{slicing:?} until {until:?}");
        }
    }

    #[test]
    fn it_goes_on_where_it_stood() {
        let mut slices = each(100, Progress::default());
        assert!(!slices.is_resumed());
        assert_eq!(slices.open(3), Some(0..3));
        assert!(slices.close(0..0, 30));
        assert_eq!(slices.open(10), Some(0..10));
        assert!(!slices.close(4..9, 50));
        assert_eq!(slices.charge(None), 80);
        let mut slices = each(100, slices.stand_by(ACTION).progress);
        assert!(slices.is_resumed());
        assert_eq!((slices.open(3), slices.open(10)), (None, Some(4..9)));
        assert!(slices.close(0..0, 50));
        assert_eq!(slices.open(7), Some(0..7), "the next set begins");
        assert!(slices.close(0..0, 70));
        assert_eq!(
            (slices.charge(Some(210)), slices.charge(Some(210))),
            (130, 0),
            "each byte is charged once"
        );
    }

    #[test]
    fn a_codec_goes_on_where_it_stood_and_its_bytes_are_charged_once() {
        use harmonaize_abi::{View, ViewMut};
        use harmonaize_codec::{Codec, PART, Terms};
        let terms = Terms { codec: Codec::INT8, finer: None, max_error: None, participants: 2 };
        let values = vec![1.0_f32; 2 * PART + 1];
        let mut chunk = vec![0_u8; 4 * values.len() + 128];
        let to = ViewMut::from(&mut chunk[..]);
        let (mut progress, mut turns, mut charged) = (Progress::default(), 0, 0);
        loop {
            let mut slices = each(1, progress);
            let done =
                slices.code(|passes| terms.contribute(passes, 1, 1, View::from(&values[..]), to)).unwrap();
            (turns, charged) = (turns + 1, charged + slices.charge(None));
            if done.is_some() {
                break;
            }
            progress = slices.stand_by(ACTION).progress;
        }
        assert_eq!((turns, charged), (3, 8 * values.len() as u64));
    }
}
