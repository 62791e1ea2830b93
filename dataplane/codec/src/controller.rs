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
    /// Bytes of f32 that this participant puts on the wire, were they exact.
    pub wire: f64,
    /// Bytes of f32 that it encodes, and decodes, were they not.
    pub coded: f64,
    /// Bytes a second that the wire carried lately, while there was something to send.
    pub goodput: f64,
    /// Whether others congest the way: what it carried before is no guide then.
    pub congested: bool,
    /// Seconds that the operation may take before the tenant waits for it.
    pub hidden: f64,
    /// Chunks of an operation: coding one goes on beside sending another.
    pub chunks: f64,
}

/// A choice must save so much of the operation's time to be made.
const GAIN: f64 = 0.05;
/// A codec that broke the budget is not chosen for so many operations.
const BARRED: u32 = 32;
/// What the newest goodput weighs, in the absence of congestion.
const WEIGHT: f64 = 0.5;
/// What a loss that was measured weighs against those before, where it is less; a greater one is believed at once.
const LOSS_WEIGHT: f64 = 0.125;

/// Chooses one communicator's codec from operation to operation. The same words and levels give the same choices, so whoever
/// decides for all can be replayed.
#[derive(Clone, Debug)]
pub struct Controller {
    budget: Budget,
    levels: Vec<State>,
    current: Codec,
    goodput: Option<f64>,
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
        Self { budget, levels, current: Codec::EXACT, goodput: None }
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

    /// The codec for the next operation. Another than the last only where it saves at least a twentieth of the time that the
    /// tenant waits, or where the last is no longer allowed.
    pub fn choose(&mut self, outlook: &Outlook) -> Codec {
        let goodput = match self.goodput {
            Some(before) if !outlook.congested => before + (outlook.goodput - before) * WEIGHT,
            _ => outlook.goodput,
        };
        self.goodput = Some(goodput).filter(|goodput| goodput.is_finite());
        let outlook = Outlook { goodput, ..*outlook };
        let exact = (outlook.time(None), Codec::EXACT);
        let (mut best, mut stay) = (exact, exact);
        for state in &mut self.levels {
            let barred = state.barred > 0;
            state.barred = state.barred.saturating_sub(1);
            let within = self.budget.most().is_none_or(|most| state.loss <= most);
            if barred || !within || !self.budget.allows(state.level.codec) {
                continue;
            }
            let choice = (outlook.time(Some(&state.level)), state.level.codec);
            if choice.0 < best.0 {
                best = choice;
            }
            if state.level.codec == self.current {
                stay = choice;
            }
        }
        // Also back to exact: what is not gained is no reason to lose anything.
        let worth = best.0 < stay.0 * (1.0 - GAIN);
        let idle = exact.0 <= stay.0 * (1.0 + GAIN / 5.0);
        self.current = if worth {
            best.1
        } else if idle {
            Codec::EXACT
        } else {
            stay.1
        };
        self.current
    }
}

impl Outlook {
    /// Seconds that the tenant waits with a level, or with none: sending and coding go on side by side but for one chunk.
    pub fn time(&self, level: Option<&Level>) -> f64 {
        let (ratio, coding) = match level {
            Some(level) => (level.ratio, self.coded / level.encode + self.coded / level.decode),
            None => (1.0, 0.0),
        };
        let sending = self.wire * ratio / self.goodput.max(1.0);
        let whole = sending.max(coding) + sending.min(coding) / self.chunks.max(1.0);
        (whole - self.hidden).max(0.0)
    }
}
