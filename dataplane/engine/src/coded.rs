//! Coded steps: encoding what is sent, adding and decoding what arrived, and what of it goes into the receipt.

use crate::context::Context;
use crate::feedback::account;
use crate::passes::{Kernel, Pass, PassSharing};
use crate::slices::Slices;
use crate::step::{CodedStep, ExecuteError, Located, MAX_DESTINATIONS, is_peer_operand};
use arrayvec::ArrayVec;
use harmonaize_abi::{ReduceOp, Signature, View, ViewMut};
use harmonaize_codec::{
    Codec, CodecError, Coded, ErrorFeedback, HEADER_BYTES, Passes, Squares, Sums, Terms, header,
};
use harmonaize_core::{CodingReport, Segment};
use harmonaize_plan::{Buffer, CODED_ROOM, Encoding, Operand, Stage, Step, StepKind};
use harmonaize_shm::Span;

/// The codec that a plan names so.
pub(crate) fn codec(number: u16) -> Option<Codec> {
    Codec::NAMED.get(usize::from(number)).map(|(_, codec)| *codec)
}

/// What a chunk that was written or read says for the receipt.
fn done(coded: &Coded) -> CodingReport {
    let number = Codec::NAMED.iter().position(|(_, known)| *known == coded.codec);
    let codec = number.map_or(CodingReport::MIXED, |number| number as u16);
    CodingReport { codec, uncompressed_chunks: coded.refused, ..CodingReport::default() }
}

/// A step in its segment, with what it is coded by.
struct Coder<'a, 'b> {
    context: &'a Context<'b>,
    segment: &'a Segment,
    size: u64,
    terms: Terms,
}

/// Executes a coded step's memory operands, or goes on with them; none: the turn is over in their midst. Cost: one pass over the source and
/// the first destination, half a pass more for an own part's first addition; encoding what the budget refuses costs another, or two with
/// a finer codec, error feedback three more, and of averages two over the own part. No allocation.
pub(crate) fn run(
    context: &Context<'_>,
    (passes, slices): (&mut PassSharing, &mut Slices),
    (segment, size): (&Segment, u64),
    step: &Step,
) -> Result<Option<CodedStep>, ExecuteError> {
    let (Some(from), Some(to)) = (step.sources.first(), step.destinations.first()) else {
        return Err(ExecuteError::NoSource);
    };
    if from.part.elements(segment.lo, segment.hi).1 == 0 {
        return Ok(Some(CodedStep::default()));
    }
    let coding = segment.coding.ok_or(ExecuteError::Operand(*from))?;
    let terms = Terms {
        codec: codec(coding.codec).ok_or(ExecuteError::Operand(*from))?,
        finer: coding.finer.and_then(codec),
        max_error: coding.max_error,
        participants: context.member.participants,
    };
    let coder = Coder { context, segment, size, terms };
    match (step.kind, from.encoding, to.encoding) {
        (StepKind::Move, Encoding::Exact, Encoding::Coded(stage)) => coder.encode(slices, from, step, stage),
        (StepKind::Move, Encoding::Coded(_), Encoding::Coded(_)) => coder.repeat(from).map(Some),
        (StepKind::Move, Encoding::Coded(_), Encoding::Exact) => coder.decode((passes, slices), from, step),
        (StepKind::Reduce { last }, ..) => coder.add((passes, slices), step, last),
        _ => Err(ExecuteError::Operand(*from)),
    }
}

impl<'a> Coder<'a, '_> {
    fn exact(&self, operand: &Operand) -> Result<Located<'a>, ExecuteError> {
        self.context.place(self.segment, self.size, operand)
    }

    /// Where a chunk lies: a message as long as it is, a slot with all its room.
    fn chunk(&self, operand: &Operand) -> Result<Located<'a>, ExecuteError> {
        let missing = || ExecuteError::Operand(*operand);
        if let Buffer::Peer(peer) = operand.buffer {
            let mut messages = self.context.sources.iter();
            let message = messages.find(|message| message.peer == peer).ok_or_else(missing)?;
            let bytes = u64::from(message.bytes);
            return self.context.landing(self.segment.epoch, peer, bytes).ok_or_else(missing);
        }
        let (memory, at, bytes) = self.exact(operand)?;
        Ok((memory, at, bytes + u64::from(CODED_ROOM)))
    }

    fn view(&self, operand: &Operand) -> Result<View<'a>, ExecuteError> {
        let (memory, at, bytes) =
            if operand.encoding == Encoding::Exact { self.exact(operand)? } else { self.chunk(operand)? };
        Ok(memory.view(at, bytes)?)
    }

    fn view_mut(&self, operand: &Operand) -> Result<ViewMut<'a>, ExecuteError> {
        let (memory, at, bytes) = self.exact(operand)?;
        Ok(memory.view_mut(at, bytes)?)
    }

    fn ranks(&self) -> u32 {
        self.context.member.locals.len() as u32
    }

    fn encode(
        &self,
        slices: &mut Slices,
        from: &Operand,
        step: &Step,
        stage: Stage,
    ) -> Result<Option<CodedStep>, ExecuteError> {
        let slot = step.destinations.iter().find(|operand| !is_peer_operand(operand));
        let slot = slot.ok_or(ExecuteError::NoSource)?;
        let (memory, at, room) = self.chunk(slot)?;
        let (source, to) = (self.view(from)?, memory.view_mut(at, room)?);
        let seed = self.seed(slot, stage);
        let account = account(self.context, self.segment, slot.part)?;
        let coded = slices.code(|passes| match stage {
            Stage::Contribution => self.contribute(passes, account, seed, source, to).map_err(own),
            Stage::Moved => self.terms.pass(passes, seed, source, to).map_err(own),
            Stage::Result => self.conclude(passes, account, seed, source, to),
        })?;
        let Some(coded) = coded else { return Ok(None) };
        let from = Some(Span::new(memory, at, coded.bytes as u64)?);
        let done = Some(done(&coded));
        let settled = account.filter(|_| stage != Stage::Moved).map(|_| slot.part);
        Ok(Some(CodedStep { from, done, residual_part: settled, sums: None }))
    }

    fn contribute(
        &self,
        passes: &mut Passes<'_>,
        account: Option<ErrorFeedback<'_>>,
        seed: u64,
        source: View<'_>,
        to: ViewMut<'_>,
    ) -> Result<Option<Coded>, CodecError> {
        let (terms, ranks) = (&self.terms, self.ranks());
        let Some(account) = account else { return terms.contribute(passes, ranks, seed, source, to) };
        let Some(owing) = account.contribution(passes, source)? else { return Ok(None) };
        let Some(coded) = terms.contribute(passes, ranks, seed, owing, to)? else { return Ok(None) };
        Ok(account.record_contribution(passes, &coded, to.as_view())?.map(|()| coded))
    }

    fn conclude(
        &self,
        passes: &mut Passes<'_>,
        account: Option<ErrorFeedback<'_>>,
        seed: u64,
        source: View<'_>,
        to: ViewMut<'_>,
    ) -> Result<Option<Coded>, ExecuteError> {
        let sums = self.context.member.sums(self.context.channel, self.segment.number);
        let sums = sums.ok_or(ExecuteError::NoSource)?;
        let average_of = self.average_of();
        let coded = self.terms.conclude(passes, &sums, average_of, seed, source, to).map_err(own)?;
        let (Some(coded), Some(account)) = (coded, account) else { return Ok(coded) };
        let recorded = account.record_result(passes, &coded, average_of, to.as_view()).map_err(own)?;
        Ok(recorded.map(|()| coded))
    }

    /// The ranks of which the operation gives the average, if it does.
    fn average_of(&self) -> Option<u32> {
        (self.segment.signature.reduce == ReduceOp::Average).then_some(self.context.member.ranks)
    }

    /// Sends what was encoded once more.
    fn repeat(&self, from: &Operand) -> Result<CodedStep, ExecuteError> {
        let (memory, at, room) = self.chunk(from)?;
        let chunk = header(memory.view(at, room)?).map_err(own)?;
        let bytes = HEADER_BYTES as u64 + u64::from(chunk.payload);
        Ok(CodedStep {
            from: Some(Span::new(memory, at, bytes)?),
            done: Some(CodingReport::default()),
            ..CodedStep::default()
        })
    }

    fn decode(
        &self,
        (passes, slices): (&mut PassSharing, &mut Slices),
        from: &Operand,
        step: &Step,
    ) -> Result<Option<CodedStep>, ExecuteError> {
        let (first, others) = step.destinations.split_first().ok_or(ExecuteError::NoSource)?;
        let (source, to) = (self.view(from)?, self.view_mut(first)?);
        let taken = slices.code(|passes| self.terms.take(passes, source, to));
        let Some(taken) = taken.map_err(|error| blame(from, error))? else { return Ok(None) };
        let first = [self.exact(first)?];
        for some in others.chunks(MAX_DESTINATIONS) {
            let mut destinations = ArrayVec::<Located<'_>, MAX_DESTINATIONS>::new();
            for operand in some {
                destinations.push(self.exact(operand)?);
            }
            let (kernel, whole) = (&Kernel::Copy, 0);
            let pass = Pass { kernel, whole, sources: &first, destinations: &destinations };
            if !passes.run(&[pass], slices)? {
                return Ok(None);
            }
        }
        let Squares { error, signal } = taken.squares;
        let done = CodingReport { error, measured: taken.measured, squares: signal, ..done(&taken) };
        Ok(Some(CodedStep { done: Some(done), ..CodedStep::default() }))
    }

    fn add(
        &self,
        (passes, slices): (&mut PassSharing, &mut Slices),
        step: &Step,
        last: bool,
    ) -> Result<Option<CodedStep>, ExecuteError> {
        let ([_, added], [sum]) = (step.sources.as_slice(), step.destinations.as_slice()) else {
            return Err(ExecuteError::NoSource);
        };
        let (from, to) = (self.view(added)?, self.view_mut(sum)?);
        let account = account(self.context, self.segment, sum.part)?;
        let done = slices.code(|passes| -> Result<_, ExecuteError> {
            let Some(mut sums) = self.begin_sum(passes, account, to).map_err(own)? else { return Ok(None) };
            let read = self.terms.add(passes, &mut sums, from, to);
            let Some(read) = read.map_err(|error| blame(added, error))? else { return Ok(None) };
            let complete = account.filter(|_| last);
            let complete = complete.map_or(Ok(Some(())), |account| account.complete(passes, to.as_view()));
            Ok(complete.map_err(own)?.map(|()| (sums, read)))
        })?;
        let Some((sums, read)) = done else { return Ok(None) };
        if last && let Some(ranks) = self.average_of() {
            let Signature { reduce: op, dtype, .. } = self.segment.signature;
            let kernel = Kernel::Reduce { op, dtype, divide: Some(ranks) };
            let sum = [self.exact(sum)?];
            let pass = Pass { kernel: &kernel, whole: 0, sources: &sum, destinations: &sum };
            if !passes.run(&[pass], slices)? {
                return Ok(None);
            }
        }
        Ok(Some(CodedStep { sums: Some(sums), done: Some(self::done(&read)), ..CodedStep::default() }))
    }

    /// The own part's sum so far, which the first contribution begins.
    fn begin_sum(
        &self,
        passes: &mut Passes<'_>,
        account: Option<ErrorFeedback<'_>>,
        to: ViewMut<'_>,
    ) -> Result<Option<Sums>, CodecError> {
        if let Some(sums) = self.context.member.sums(self.context.channel, self.segment.number) {
            return Ok(Some(sums));
        }
        if let Some(account) = account
            && account.begin(passes, to)?.is_none()
        {
            return Ok(None);
        }
        self.terms.begin(passes, self.ranks(), to.as_view())
    }

    /// From where the encoder's random choices come. It is another place for every chunk that a participant adds or reports of a sum, and
    /// the same when that is encoded again. What is only moved is added to nothing: its blocks share one.
    fn seed(&self, slot: &Operand, stage: Stage) -> u64 {
        let member = self.context.member;
        let place = u64::from(member.core.me().0) << 33 | u64::from(slot.part.index) << 1;
        let place = place | u64::from(stage != Stage::Contribution);
        let words = [member.id.0, self.segment.operation.0, self.segment.number.0, place];
        words.into_iter().fold(0x6861_726d_6f6e_6169, |seed, word| mix(seed ^ word))
    }
}

/// SplitMix64's next number (Steele, Lea and Flood, OOPSLA 2014).
pub(crate) fn mix(seed: u64) -> u64 {
    let seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let seed = (seed ^ seed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let seed = (seed ^ seed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    seed ^ seed >> 31
}

/// An error that nobody else can be the reason of.
fn own(error: CodecError) -> ExecuteError {
    ExecuteError::Kernel(error.to_string())
}

/// A chunk that is none is its sender's fault.
fn blame(from: &Operand, error: CodecError) -> ExecuteError {
    match from.buffer {
        Buffer::Peer(peer) => ExecuteError::Chunk { peer, error },
        _ => own(error),
    }
}

/// The most that the error of an operation is, and what encoders measured, over all ranks' squares.
pub(crate) fn vnmse(coded: &CodingReport) -> [f32; 2] {
    let CodingReport { error, measured, squares: signal, .. } = *coded;
    [error, measured].map(|error| Squares { error, signal }.relative() as f32)
}
