//! The choice of a codec: the one that makes the tenant wait least, within its budget.

use crate::{Budget, Codec, Squares};

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
    /// What it is thought to lose until it is measured, as [`Squares::relative`].
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
    pub hidden: f64,
    /// Chunks of an operation: coding one goes on beside sending another.
    pub chunks: f64,
}

/// A choice must save so much of the operation's time to be made.
pub const GAIN: f64 = 0.05;
/// A codec that broke the budget is not chosen for so many operations.
const BARRED: u32 = 32;
/// What a loss that was measured weighs against those before, where it is less; a greater one is believed at once.
const LOSS_WEIGHT: f64 = 0.125;

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
        let bytes = codec.most_bytes(TYPICAL).unwrap_or(usize::MAX);
        let ratio = bytes as f64 / (TYPICAL * size_of::<f32>()) as f64;
        Self { codec, ratio, encode: 4e9, decode: 8e9, loss: codec.typical_loss() }
    }
}

/// Elements of a typical chunk.
const TYPICAL: usize = 1 << 15;

/// The codec that makes the tenant wait least, of those that the budget allows and that are thought to keep it. Another than
/// `current` only where that saves at least the part `gain` of the time, or where `current` is no longer allowed; back to exact
/// also where next to nothing is gained.
pub fn choose(budget: &Budget, levels: &[Level], current: Codec, outlook: &Outlook, gain: f64) -> Choice {
    let waits = outlook.time(None);
    let exact = Choice { codec: Codec::EXACT, time: waits, exact: waits };
    let (mut best, mut stay) = (exact, exact);
    for level in levels.iter().filter(|level| level.codec != Codec::EXACT) {
        let within = budget.most_by(level.codec).is_none_or(|most| level.loss <= most);
        if !within || !budget.allows(level.codec) {
            continue;
        }
        let choice = Choice { codec: level.codec, time: outlook.time(Some(level)), exact: waits };
        if choice.time < best.time {
            best = choice;
        }
        if level.codec == current {
            stay = choice;
        }
    }
    if best.time < stay.time * (1.0 - gain) {
        best
    } else if exact.time <= stay.time * (1.0 + GAIN / 5.0) {
        // What is not gained is no reason to lose anything.
        exact
    } else {
        stay
    }
}

/// Chooses one communicator's codec from operation to operation. The same words and levels give the same choices, so whoever
/// decides for all can be replayed.
#[derive(Clone, Debug)]
pub struct Controller {
    budget: Budget,
    levels: Vec<State>,
    current: Codec,
}

#[derive(Clone, Debug)]
struct State {
    level: Level,
    loss: f64,
    barred: u32,
}

impl Controller {
    /// Begins exact. `levels` are those that this participant can encode and decode.
    pub fn new(budget: Budget, levels: &[Level]) -> Self {
        let state = |level: &Level| State { level: *level, loss: level.loss, barred: 0 };
        let levels = levels.iter().filter(|level| level.codec != Codec::EXACT).map(state).collect();
        Self { budget, levels, current: Codec::EXACT }
    }

    /// Changes the budget while operations run; the next choice is within it.
    pub fn set_budget(&mut self, budget: Budget) {
        self.budget = budget;
        for state in &mut self.levels {
            state.barred = 0;
        }
    }

    /// Takes what an encoder lost with `codec`; to be told of every operation that was coded, refused ones too.
    pub fn lost(&mut self, codec: Codec, squares: Squares) {
        let holds = self.budget.holds(squares);
        for state in self.levels.iter_mut().filter(|state| state.level.codec == codec) {
            let loss = squares.relative();
            state.loss =
                if loss > state.loss { loss } else { state.loss + (loss - state.loss) * LOSS_WEIGHT };
            if !holds {
                state.barred = BARRED;
            }
        }
    }

    /// The codec for the next operation: [`choose`] among the levels that did not break the budget lately.
    pub fn choose(&mut self, outlook: &Outlook) -> Codec {
        let mut levels = Vec::with_capacity(self.levels.len());
        for state in &mut self.levels {
            if state.barred == 0 {
                levels.push(Level { loss: state.loss, ..state.level });
            }
            state.barred = state.barred.saturating_sub(1);
        }
        self.current = choose(&self.budget, &levels, self.current, outlook, GAIN).codec;
        self.current
    }
}

impl Outlook {
    /// Seconds that the tenant waits with a level, or with none: sending and coding go on side by side but for one chunk.
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
        (whole - self.hidden).max(0.0)
    }
}
