//! Coded steps on real memory with real codecs, and what must hold of their results.

use super::execute::Context;
use super::memory::{self, Tensor};
use super::network::Location;
use super::scenario::{Scenario, generator};
use super::world::World;
use harmonaize_abi::{
    ChannelId, Collective, Dtype, OperationId, Rank, ReduceOp, SegmentId, Signature, View, ViewMut,
};
use harmonaize_codec::{Codec, CodecError, HEADER_BYTES, Sums, Terms, header, whole};
use harmonaize_core::{CodingReport, PeerMessage, Receipt, Segment};
use harmonaize_plan::{Buffer, CODED_ROOM, Coding, Encoding, Operand, Participant, Stage, Step, StepKind};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// What coded operations came to.
#[derive(Debug, Default)]
pub(crate) struct Books {
    /// By participant and channel: the segment, and the sum so far of the own part.
    sums: std::collections::HashMap<(u32, ChannelId), (SegmentId, Sums)>,
    /// By operation: the loosest budget that a part of it had.
    budgets: std::collections::HashMap<OperationId, Option<f64>>,
    /// By operation: what the first rank got.
    results: std::collections::HashMap<OperationId, Vec<u8>>,
}

fn any_coding(rng: &mut ChaCha8Rng) -> Option<Coding> {
    let codec = rng.random_range(0..Codec::NAMED.len()) as u16;
    let finer = rng.random_bool(0.5).then(|| rng.random_range(0..Codec::NAMED.len()) as u16);
    let most = [None, Some(1e-4), Some(1e-2), Some(0.3)][rng.random_range(0..4)];
    rng.random_bool(0.8).then_some(Coding { codec, finer, max_error: most })
}

impl Scenario {
    /// Most operations are AllReduces and AllToAlls that may be coded. With every plan the codec or its budget changes, or there is none.
    pub(crate) fn coding(mut self) -> Self {
        let mut rng = generator(self.seed, 20);
        self.plan.coding = any_coding(&mut rng);
        self.plan.tuning.copy_bytes /= 8;
        for (_, incident) in &mut self.incidents {
            if let super::scenario::Incident::Change(plan) = incident {
                plan.coding = any_coding(&mut rng);
                plan.tuning.copy_bytes /= 8;
            }
        }
        let acts = self.scripts[0].acts.len();
        for index in 0..acts {
            let before = self.scripts[0].acts[index].signature;
            if rng.random_bool(0.2) || !before.collective.has_data() {
                continue;
            }
            let reduce = [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Max][rng.random_range(0..100) % 3];
            let moves = before.collective.traits().compressible && !before.collective.reduces();
            let exchange = moves && rng.random_bool(0.7);
            let collective = if exchange { before.collective } else { Collective::AllReduce };
            let count = if before.collective == collective { before.count } else { 64 };
            let (reduce, root) = (if exchange { ReduceOp::Sum } else { reduce }, Rank(0));
            let signature = Signature { collective, dtype: Dtype::F32, reduce, root, count, uneven: false };
            self.scripts.iter_mut().filter(|script| index < script.acts.len()).for_each(|script| {
                script.acts[index].signature = signature;
            });
        }
        self
    }
}

fn is_peer(operand: &Operand) -> bool {
    matches!(operand.buffer, Buffer::Peer(_))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|each| f32::from_le_bytes(each.try_into().unwrap())).collect()
}

impl World {
    fn terms(&self, segment: &Segment) -> (Terms, Coding) {
        let coding = segment.coding.expect("coded steps without a codec");
        let (_, codec) = Codec::NAMED[usize::from(coding.codec)];
        (
            Terms {
                codec,
                finer: coding.finer.map(|finer| Codec::NAMED[usize::from(finer)].1),
                max_error: coding.max_error,
                participants: self.scenario.group.participants(),
            },
            coding,
        )
    }

    /// A step with coded operands. `Err` names the peer whose chunk is none.
    pub(crate) fn coded(
        &mut self,
        context: &Context,
        step: &Step,
        sources: &[PeerMessage],
        sends: &[PeerMessage],
    ) -> Result<(), Participant> {
        let (at, operation) = (context.at, context.segment.operation);
        let (_, elements) = step.destinations[0].part.elements(context.segment.lo, context.segment.hi);
        let (terms, coding) = self.terms(&context.segment);
        let budget = self.books.budgets.entry(operation).or_insert(coding.max_error);
        *budget = budget.zip(coding.max_error).map(|(one, other)| one.max(other));
        let mut done = CodingReport { codec: coding.codec, ..CodingReport::default() };
        let peer = sources.first().map(|message| message.peer);
        let from = match sources.first() {
            Some(message) => self.landed(context, message),
            None => {
                let from = self.locate(context, &step.sources[0], false);
                let coded = step.sources[0].encoding != Encoding::Exact;
                Location { bytes: from.bytes + if coded { CODED_ROOM as usize } else { 0 }, ..from }
            }
        };
        let mut sent = None;
        if elements == 0 {
            sent = Some(Location { bytes: 0, ..from });
        } else if step.kind != StepKind::Move {
            let sum = self.locate(context, &step.destinations[0], false);
            self.add(context, &terms, step, &from, &sum).map_err(|_| peer.unwrap())?;
        } else if step.sources[0].encoding == Encoding::Exact {
            let (to, coded) = self.encode(context, &terms, step, &from);
            (done.uncompressed_chunks, sent) = (coded.refused, Some(to));
        } else if step.destinations.iter().all(is_peer) {
            let head = self.read(at, &Location { bytes: HEADER_BYTES, ..from });
            let chunk = header(View::from(&head[..])).unwrap();
            sent = Some(Location { bytes: HEADER_BYTES + chunk.payload as usize, ..from });
        } else {
            let chunk = self.read(at, &from);
            let mut values = vec![0.0_f32; elements as usize];
            let (from, to) = (View::from(&chunk[..]), ViewMut::from(&mut values[..]));
            let lost = whole(|passes| terms.take(passes, from, to));
            let lost = match (lost, peer) {
                (Ok(lost), _) => lost,
                (Err(_), Some(peer)) => return Err(peer),
                (Err(error), None) => panic!("an own chunk: {error}"),
            };
            (done.error, done.squares) = (lost.squares.error, lost.squares.signal);
            done.measured = lost.measured;
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            for operand in &step.destinations {
                let to = self.locate(context, operand, false);
                self.check_write(context, step, &to);
                self.write(at, &to, &bytes);
            }
        }
        if let Some(message) = sources.first() {
            let location = self.landed(context, message);
            self.free_landing(at, &location);
        }
        if !sends.is_empty() {
            done.wire_bytes = sent.map_or(0, |sent| sent.bytes as u64) * sends.len() as u64;
        }
        self.send_all(context, step, sends, sent);
        if elements > 0 {
            self.nodes[at.0 as usize].core.handle_coded(operation, &done);
            self.statistics.coded += 1;
        }
        if sends.is_empty() {
            self.step_complete(at, &context.segment, context.index);
        }
        Ok(())
    }

    fn ranks_at(&self, at: Participant) -> u32 {
        self.scenario.group.local(at).len() as u32
    }

    /// Decodes a contribution and adds it to the own part's sum.
    fn add(
        &mut self,
        context: &Context,
        terms: &Terms,
        step: &Step,
        from: &Location,
        sum: &Location,
    ) -> Result<(), CodecError> {
        let at = context.at;
        let mut values = floats(&self.read(at, sum));
        let own = (at.0, context.channel);
        let known = self.books.sums.get(&own).filter(|(segment, _)| *segment == context.segment.number);
        let mut sums = match known {
            Some((_, sums)) => *sums,
            None => {
                let (ranks, own) = (self.ranks_at(at), View::from(&values[..]));
                whole(|passes| terms.begin(passes, ranks, own))?
            }
        };
        let chunk = self.read(at, from);
        let (from, to) = (View::from(&chunk[..]), ViewMut::from(&mut values[..]));
        whole(|passes| terms.add(passes, &mut sums, from, to))?;
        self.books.sums.insert(own, (context.segment.number, sums));
        let mut bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        if step.kind == (StepKind::Reduce { last: true }) {
            bytes = memory::reduce(&context.signature, &[&bytes], Some(self.scenario.group.ranks()));
        }
        self.write(at, sum, &bytes);
        Ok(())
    }

    fn encode(
        &mut self,
        context: &Context,
        terms: &Terms,
        step: &Step,
        from: &Location,
    ) -> (Location, harmonaize_codec::Coded) {
        let at = context.at;
        let values = floats(&self.read(at, from));
        let slot = step.destinations.iter().find(|operand| !is_peer(operand)).unwrap();
        let mut chunk = vec![0; from.bytes + CODED_ROOM as usize];
        let (source, to) = (View::from(&values[..]), ViewMut::from(&mut chunk[..]));
        let seed = self.scenario.seed
            ^ context.segment.number.0 << 20
            ^ u64::from(at.0) << 8
            ^ u64::from(slot.part.index);
        let coded = match slot.encoding {
            Encoding::Coded(Stage::Contribution) => {
                let ranks = self.ranks_at(at);
                whole(|passes| terms.contribute(passes, ranks, seed, source, to))
            }
            Encoding::Coded(Stage::Moved) => whole(|passes| terms.pass(passes, seed, source, to)),
            _ => {
                let (segment, sums) = self.books.sums[&(at.0, context.channel)];
                assert_eq!(segment, context.segment.number, "a sum to which nothing was added");
                let average = context.signature.reduce == ReduceOp::Average;
                let average_of = average.then_some(self.scenario.group.ranks());
                whole(|passes| terms.conclude(passes, &sums, average_of, !seed, source, to))
            }
        };
        let coded = coded.unwrap();
        let to = Location { bytes: coded.bytes, ..self.locate(context, slot, false) };
        self.write(at, &to, &chunk[..coded.bytes]);
        (to, coded)
    }

    /// The squared error of a rank's coded result, in the sum's units, and what squares it is of. Those are all ranks', or
    /// what it got.
    fn lost(&self, rank: Rank, operation: OperationId, signature: &Signature, output: &[u8]) -> (f64, f64) {
        let ranks = self.scenario.group.ranks();
        if !signature.collective.reduces() {
            let sent = floats(&memory::expected(self.scenario.seed, operation, rank, signature, ranks));
            let pairs =
                sent.into_iter().zip(floats(output)).map(|(sent, got)| (f64::from(sent), f64::from(got)));
            let (error, signal) = pairs.fold((0.0_f64, 0.0_f64), |(error, signal), (sent, got)| {
                (error + (sent - got).powi(2), signal + sent.powi(2))
            });
            // What is decoded is rounded to f32.
            return ((error.sqrt() - 6e-8 * signal.sqrt()).max(0.0).powi(2), signal);
        }
        let (mut sum, mut signal) = (vec![0.0; signature.count as usize], 0.0);
        for rank in (0..ranks).map(Rank) {
            let input = memory::input(self.scenario.seed, operation, rank, signature, ranks);
            for (sum, value) in sum.iter_mut().zip(floats(&input)) {
                *sum += f64::from(value);
                signal += f64::from(value).powi(2);
            }
        }
        let scale = if signature.reduce == ReduceOp::Average { f64::from(ranks) } else { 1.0 };
        let each = sum.iter().zip(floats(output));
        let error: f64 = each.map(|(sum, value)| (sum - f64::from(value) * scale).powi(2)).sum();
        // Each sum in f32 rounds, too.
        ((error.sqrt() - 1e-6 * signal.sqrt()).max(0.0).powi(2), signal)
    }

    /// A rank's result of an operation that was coded is within the budget, and the same as the others'. False if it was not.
    pub(crate) fn check_coded(
        &mut self,
        rank: Rank,
        operation: OperationId,
        signature: &Signature,
        tensor: &Tensor,
    ) -> bool {
        let Some(budget) = self.books.budgets.get(&operation).copied() else { return false };
        let first = self.books.results.entry(operation).or_insert_with(|| tensor.output().to_vec());
        let apart = !signature.collective.replicates();
        assert!(apart || first == tensor.output(), "rank {rank} has other bits of operation {operation}");
        let (error, signal) = self.lost(rank, operation, signature, tensor.output());
        let within = budget.is_none_or(|most| error <= most * signal * 1.0001);
        assert!(within, "rank {rank} lost {error} of {signal} in operation {operation}, not {budget:?}");
        true
    }

    /// What a receipt says of a coded operation is at least what was lost.
    pub(crate) fn check_receipt(&self, rank: Rank, receipt: &Receipt) {
        if self.scenario.hostile.is_some() {
            return;
        }
        let coded = self.books.budgets.contains_key(&receipt.operation) && receipt.signature.count > 0;
        assert_eq!(receipt.coded.is_some(), coded, "{receipt:?}");
        let Some(told) = receipt.coded else { return };
        assert!(told.wire_bytes <= receipt.wire_bytes && told.measured <= told.error, "{told:?}");
        let tensor = &self.tensors[&(rank.0, receipt.operation)];
        let (error, signal) = self.lost(rank, receipt.operation, &receipt.signature, tensor.output());
        // What is exchanged is told for all ranks of a participant.
        let moved = !receipt.signature.collective.replicates();
        let signal = if moved { f64::INFINITY } else { signal };
        assert!(error <= told.error * 1.0001, "rank {rank} lost {error} and was told {told:?}");
        assert!(told.squares <= signal * 1.0001, "rank {rank} was told of {told:?}, not {signal}");
    }
}
