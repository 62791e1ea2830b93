//! The choice of a codec: the one that makes the tenant wait least, within its budget.

use crate::{Budget, Codec};
use std::collections::VecDeque;
use std::time::Duration;

/// A codec that may be chosen, and what it takes here. Speeds are in bytes of f32 a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// The codec.
    pub codec: Codec,
    /// Bytes on the wire for a byte of f32.
    pub ratio: f64,
    /// Speed of encoding, on the cores that do it.
    pub encode: f64,
    /// Speed of decoding and adding.
    pub decode: f64,
    /// What an operation is thought to lose by it, as [`crate::Squares::relative`].
    pub loss: f64,
}

/// What is known of the next operation and of the network when a codec is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Bytes of f32 that this participant puts on the wire, coded or not.
    pub wire: f64,
    /// Bytes of f32 that it encodes, where it does.
    pub encoded: f64,
    /// Bytes of f32 that it decodes, where it does.
    pub decoded: f64,
    /// Bytes a second of the wire for an operation that is not coded.
    pub rate: f64,
    /// The same for one that is: it may go other ways.
    pub coded_rate: f64,
    /// Seconds that the operation may take before the tenant waits for it.
    pub overlapped: f64,
    /// Chunks of an operation: coding one goes on beside sending another.
    pub chunks: f64,
}

/// A change must save so much of the operation's time to be made.
const GAIN: f64 = 0.05;
/// What makes less of a difference costs nothing.
const FREE: f64 = 0.01;
/// What saves so much of the time is worth a change at any time.
const WORTH: f64 = 0.35;
/// What saves less comes no sooner after the last change.
const DWELL: Duration = Duration::from_secs(5);
/// For how long a change makes the next one dearer: each doubles what it must gain.
const RECENT: Duration = Duration::from_secs(60);
const MAX_RECENT: usize = 5;
/// How far back what would have been best is looked at, where the codec has changed lately.
const HISTORY: Duration = Duration::from_secs(60);
const MAX_OUTLOOKS: usize = 128;
/// For how long what operations came to counts.
const LEARNED_LIFETIME: Duration = Duration::from_secs(600);
/// What an operation weighs against those before.
const WEIGHT: f64 = 0.125;
/// What differs by so much of what was written down is worth writing.
const NOTABLE: f64 = 0.25;
/// Bytes in blocks that are not zeros over all, below which anybody thinks of sending those alone.
const SPARSE: f64 = 0.9;
/// The most that a finer codec may be predicted to lose, as a part of the budget. It takes what loses too much by another. Each
/// contribution has a share alone.
const SAFE: f64 = 0.5;
/// The ratio of bytes on the wire to those expected above which chunks went exact in great numbers. What was lost then
/// says nothing of the codec.
const REFUSED: f64 = 1.25;

/// A codec, and what its operation takes by the outlook.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Which.
    pub codec: Codec,
    /// Seconds that the tenant waits.
    pub time: f64,
    /// The same were it exact.
    pub exact: f64,
}

impl Level {
    /// A codec with what it takes where nobody has measured it: one core of a server, tensors with heavy tails.
    pub fn typical(codec: Codec) -> Self {
        let bytes = codec.max_bytes(TYPICAL).unwrap_or(usize::MAX);
        let ratio = bytes as f64 / (TYPICAL * size_of::<f32>()) as f64;
        Self { codec, ratio, encode: 4e9, decode: 8e9, loss: codec.typical_loss() }
    }
}

/// Elements of a typical chunk.
const TYPICAL: usize = 1 << 15;

/// Chooses one communicator's codec again and again, by what its operations really lost and really sent. The same words and
/// times give the same choices, so whoever decides for all can be replayed.
#[derive(Clone, Debug, Default)]
pub struct Controller {
    learned: Vec<Learned>,
    /// When the codec changed lately, oldest first.
    changes: VecDeque<Duration>,
    /// Outlooks of the last time, and since when each held, oldest first.
    outlooks: VecDeque<(Duration, Outlook)>,
    barred: Vec<Codec>,
}

/// What operations with a codec came to.
#[derive(Clone, Copy, Debug)]
struct Learned {
    codec: Codec,
    /// What they lost over what was predicted.
    loss: f64,
    /// Bytes on the wire over those that were predicted: more where chunks went exact, or where fewer blocks are zeros.
    bytes: f64,
    last: Duration,
    /// Both as they were last worth writing down.
    written: (f64, f64),
}

impl Controller {
    /// An operation with `level`, as it was predicted, lost `loss` by its receipt. It took `ratio` bytes on the wire for a byte of
    /// f32. True where that is worth writing down: something new, or much else than was written last.
    pub fn handle_outcome(&mut self, now: Duration, level: &Level, loss: f64, ratio: f64) -> bool {
        let lossless = level.codec.is_lossless();
        let sound = loss.is_finite() && ratio.is_finite() && (level.loss > 0.0 || lossless);
        if !sound || level.ratio <= 0.0 {
            return false;
        }
        let (loss, bytes) = (if lossless { 1.0 } else { loss / level.loss }, ratio / level.ratio);
        self.learned.retain(|known| known.last + LEARNED_LIFETIME > now);
        match self.learned.iter_mut().find(|known| known.codec == level.codec) {
            Some(known) => {
                known.loss += (loss - known.loss) * WEIGHT;
                known.bytes += (bytes - known.bytes) * WEIGHT;
                known.last = now;
                let (loss, bytes) = known.written;
                let far = |one: f64, other: f64| (one - other).abs() > NOTABLE * other.max(1e-9);
                let notable = far(known.loss, loss) || far(known.bytes, bytes);
                if notable {
                    known.written = (known.loss, known.bytes);
                }
                notable
            }
            None => {
                let written = (loss, bytes);
                self.learned.push(Learned { codec: level.codec, loss, bytes, last: now, written });
                true
            }
        }
    }

    /// Whether anything is known of a codec from operations that still counts.
    pub fn has_learned(&self, now: Duration, codec: Codec) -> bool {
        self.learned.iter().any(|known| known.codec == codec && known.last + LEARNED_LIFETIME > now)
    }

    /// Whether to report as operations by [`Codec::NonzeroBlocks`] tensors that were sent otherwise. Of them `ratio` bytes for a byte are
    /// in blocks that are not zeros. Dense ones of which nothing else is known are not worth it.
    pub fn heeds_zeros(&self, now: Duration, ratio: f64) -> bool {
        ratio < SPARSE || self.has_learned(now, Codec::NonzeroBlocks)
    }

    /// What is known of codecs from operations. It is the loss over what was predicted, and bytes on the wire over those that were.
    pub fn learned(&self) -> impl Iterator<Item = (Codec, f64, f64)> {
        self.learned.iter().map(|known| (known.codec, known.loss, known.bytes))
    }

    /// The same from before a restart; holds as if it were told now. What makes no sense is left out.
    pub fn recall(&mut self, now: Duration, codec: Codec, loss: f64, bytes: f64) {
        let sound = |value: f64| value.is_finite() && value >= 0.0;
        if sound(loss) && sound(bytes) && self.learned.iter().all(|known| known.codec != codec) {
            self.learned.push(Learned { codec, loss, bytes, last: now, written: (loss, bytes) });
        }
    }

    /// A level as it is known now. What was not tried yet is taken to do as well as the last tried codec whose loss has the same
    /// reason, or else as well as it may: the budget holds anyway, and the first operations tell.
    fn adjusted(&self, now: Duration, level: &Level) -> Level {
        let learned = || self.learned.iter().filter(|known| known.last + LEARNED_LIFETIME > now);
        if let Some(known) = learned().find(|known| known.codec == level.codec) {
            return Level { loss: level.loss * known.loss, ratio: level.ratio * known.bytes, ..*level };
        }
        let alike = learned().filter(|known| known.codec.loses_as(level.codec));
        let loss = match alike.max_by_key(|known| known.last) {
            Some(known) if known.bytes > REFUSED => level.loss * known.loss.max(1.0),
            Some(known) => level.loss * known.loss,
            None => level.loss * level.codec.least_of_typical(),
        };
        Level { loss, ..*level }
    }

    /// Another codec is in use.
    pub fn handle_change(&mut self, now: Duration) {
        if self.changes.len() == MAX_RECENT {
            self.changes.pop_front();
        }
        self.changes.push_back(now);
    }

    /// A codec could not be used: it is not chosen until the budget changes.
    pub fn bar(&mut self, codec: Codec) {
        if !self.barred.contains(&codec) {
            self.barred.push(codec);
        }
    }

    /// Another budget: all may be tried again.
    pub fn unbar(&mut self) {
        self.barred.clear();
    }

    /// From now on this is the outlook.
    pub fn handle_outlook(&mut self, now: Duration, outlook: &Outlook) {
        while self.outlooks.len() == MAX_OUTLOOKS
            || self.outlooks.get(1).is_some_and(|(at, _)| *at + HISTORY <= now)
        {
            self.outlooks.pop_front();
        }
        self.outlooks.push_back((now, *outlook));
    }

    /// How many operations a level could have run lately, were there nothing else.
    fn operations(&self, now: Duration, level: Option<&Level>) -> f64 {
        let ends = self.outlooks.iter().skip(1).map(|(at, _)| *at).chain([now]);
        let phases = self.outlooks.iter().zip(ends).map(|((from, outlook), to)| {
            let from = (*from).max(now.saturating_sub(HISTORY));
            to.saturating_sub(from).as_secs_f64() / outlook.time(level).max(1e-9)
        });
        phases.sum()
    }

    /// The codec, of `levels` with what is predicted of them, that makes the tenant wait least. The budget must allow it, and it
    /// must be thought to keep the budget. Another than `current` only where that saves some of the time now, or would have saved
    /// some of it lately, or where `current` is no longer allowed; back to exact also where next to nothing is gained.
    pub fn choose(
        &self,
        now: Duration,
        budget: &Budget,
        current: Codec,
        levels: &[Level],
        outlook: &Outlook,
    ) -> Choice {
        let usable = levels.iter().filter(|level| {
            level.codec != Codec::EXACT && budget.allows(level.codec) && !self.barred.contains(&level.codec)
        });
        let known = usable.map(|level| self.adjusted(now, level));
        let kept = |level: &Level| budget.max_error_of(level.codec).is_none_or(|most| level.loss <= most);
        let levels: Vec<Level> = known.filter(kept).collect();
        let of = |level: Option<&Level>| {
            let codec = level.map_or(Codec::EXACT, |level| level.codec);
            Choice { codec, time: outlook.time(level), exact: outlook.time(None) }
        };
        let all = || std::iter::once(None).chain(levels.iter().map(Some));
        let used = levels.iter().find(|level| level.codec == current);
        let (stay, exact) = (of(used), of(None));
        let (gain, _) = self.gain(now);
        let best = all().map(of).min_by(|one, other| one.time.total_cmp(&other.time)).unwrap_or(exact);
        if best.time < stay.time * (1.0 - gain) {
            return best;
        }
        if gain >= WORTH {
            return stay;
        }
        let lately = all().map(|level| (self.operations(now, level), level));
        let most = lately.max_by(|(one, _), (other, _)| one.total_cmp(other));
        match most.filter(|(most, _)| self.operations(now, used) < most * (1.0 - GAIN)) {
            Some((_, level)) if gain > GAIN => of(level),
            // What is not gained is no reason to lose anything. Where nothing is lost, zeros may come back.
            _ if exact.time <= stay.time * (1.0 + if current.is_lossless() { -FREE } else { FREE }) => exact,
            _ => stay,
        }
    }

    /// In what chunks go that lose too much by the codec that was chosen. It is as unbiased, is thought to keep the bound whatever the
    /// tensor, and is faster than exact. Of such it sends the fewest bytes, though no fewer than that codec.
    pub fn finer(
        &self,
        budget: &Budget,
        chosen: Codec,
        levels: &[Level],
        outlook: &Outlook,
    ) -> Option<Codec> {
        let &Budget::Vnmse(most) = budget else { return None };
        let ratio = levels.iter().find(|level| level.codec == chosen)?.ratio;
        let finer = levels.iter().filter(|level| {
            let alike = level.codec.is_unbiased() == chosen.is_unbiased();
            let lossy = !level.codec.is_lossless() && !chosen.is_lossless();
            let usable = alike && lossy && level.codec != chosen && !self.barred.contains(&level.codec);
            usable && level.ratio >= ratio && level.loss <= SAFE * most
        });
        // Of bfloat16 and binary16 the first, whose range holds all.
        let least = finer.min_by(|one, other| one.ratio.total_cmp(&other.ratio))?;
        (outlook.time(Some(least)) < outlook.time(None) * (1.0 - GAIN)).then_some(least.codec)
    }

    /// When another choice may come out of the same words, for a change weighs less then.
    pub fn retry_at(&self, now: Duration) -> Option<Duration> {
        self.gain(now).1
    }

    /// What another codec must gain now, and until when that holds.
    fn gain(&self, now: Duration) -> (f64, Option<Duration>) {
        let recent = || self.changes.iter().filter(|at| **at + RECENT > now);
        let gain = GAIN * 2_f64.powi(recent().count() as i32);
        let until = recent().next().map(|at| *at + RECENT);
        match self.changes.back().map(|at| *at + DWELL).filter(|at| *at > now) {
            Some(until) => (WORTH, Some(until)),
            None => (gain.min(WORTH), until),
        }
    }
}

impl Outlook {
    /// Seconds that the tenant waits with a level, or with none. Sending and coding go on side by side but for one chunk.
    pub fn time(&self, level: Option<&Level>) -> f64 {
        let (bytes, rate, coding) = match level {
            Some(level) => (
                self.wire * level.ratio,
                self.coded_rate,
                self.encoded / level.encode + self.decoded / level.decode,
            ),
            None => (self.wire, self.rate, 0.0),
        };
        let sending = bytes / rate.max(1.0);
        let whole = sending.max(coding) + sending.min(coding) / self.chunks.max(1.0);
        (whole - self.overlapped).max(0.0)
    }
}
