//! From a descriptor that a tenant wrote to a call that may be executed. The descriptor is a private copy.

use harmonaize_abi::{
    ABI_VERSION, ANY_RANK, Collective, Direction, Dtype, P2pSignature, Rank, ReduceOp, Region, Signature,
    Status, Submission, flags,
};
use harmonaize_shm::{AgentEnd, Regions};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// A call that passed every check.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CheckedCall {
    pub(crate) signature: Signature,
    pub(crate) in_place: bool,
    pub(crate) input: Region,
    pub(crate) output: Region,
    /// What is owed before and after.
    pub(crate) feedback: Option<[Region; 2]>,
    /// What the input of a `PremulSum` is multiplied by.
    pub(crate) factor: f64,
}

/// A send or a receive that passed every check; the region that it does not have is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckedP2p {
    pub(crate) signature: P2pSignature,
    pub(crate) input: Region,
    pub(crate) output: Region,
}

/// Checks a rank's descriptor of a send or a receive against the attachment's memory and the communicator's number of ranks. The
/// region of the other direction is not looked at.
pub(crate) fn check_p2p(
    submission: &Submission,
    direction: Direction,
    memory: impl Extent,
    ranks: u32,
) -> Result<CheckedP2p, Status> {
    if submission.version != ABI_VERSION {
        return Err(Status::BadVersion);
    }
    let nothing = [submission.residual_in, submission.residual_out] == [Region::default(); 2];
    let known = submission.flags == 0 && submission.reduce == 0 && submission.factor == 0 && nothing;
    let Some(dtype) = Dtype::from_code(submission.dtype).filter(|_| known) else {
        return Err(Status::BadKind);
    };
    let peer = match submission.root {
        ANY_RANK if direction == Direction::Receive => None,
        peer if peer < ranks => Some(Rank(peer)),
        _ => return Err(Status::BadRank),
    };
    let signature = P2pSignature { direction, peer, dtype, count: submission.count };
    let tensor = match direction {
        Direction::Send => submission.input,
        Direction::Receive => submission.output,
    };
    let fits = signature.bytes() == Some(tensor.bytes) && memory.holds(tensor.offset, tensor.bytes);
    if !fits || tensor.offset % dtype.size() as u64 != 0 {
        return Err(Status::OutOfRange);
    }
    let (input, output) = match direction {
        Direction::Send => (tensor, Region::default()),
        Direction::Receive => (Region::default(), tensor),
    };
    Ok(CheckedP2p { signature, input, output })
}

/// Where a descriptor's tensors may lie.
pub(crate) trait Extent {
    /// How many bytes there are.
    fn bytes(&self) -> u64;

    /// Whether a tensor may lie there.
    fn holds(&self, offset: u64, bytes: u64) -> bool;
}

impl Extent for &dyn AgentEnd {
    fn bytes(&self) -> u64 {
        self.arena_bytes()
    }

    fn holds(&self, offset: u64, bytes: u64) -> bool {
        AgentEnd::holds(*self, offset, bytes)
    }
}

/// Where the counts of an uneven operation are, one of 8 bytes each; none of another.
pub(crate) fn region_of_counts(submission: &Submission, ranks: u32) -> Result<Option<Region>, Status> {
    if submission.version != ABI_VERSION || submission.flags & flags::UNEVEN == 0 {
        return Ok(None);
    }
    let collective = Collective::from_code(submission.collective).filter(|one| one.can_be_uneven());
    let said = collective.ok_or(Status::BadKind)?.said_counts(ranks);
    let region = submission.residual_in;
    match region.bytes == u64::from(said) * size_of::<u64>() as u64 {
        true => Ok(Some(region)),
        false => Err(Status::OutOfRange),
    }
}

/// Reads counts, which the tenant may change at any time, once.
pub(crate) fn read_counts(memory: &Regions, region: Region) -> Result<Arc<[u64]>, Status> {
    let mut counts = vec![0_u64; region.bytes as usize / size_of::<u64>()];
    memory.read(region.offset, counts.as_mut_bytes()).map_err(|_| Status::OutOfRange)?;
    Ok(counts.into())
}

/// Checks a rank's descriptor, and the counts that came with it. It checks them against the attachment's memory and the communicator's
/// number of ranks.
pub(crate) fn check(
    submission: &Submission,
    memory: impl Extent,
    (rank, ranks): (Rank, u32),
    counts: Option<&[u64]>,
) -> Result<CheckedCall, Status> {
    if submission.version != ABI_VERSION {
        return Err(Status::BadVersion);
    }
    let known = submission.flags & !flags::ALL == 0;
    let collective = Collective::from_code(submission.collective);
    let dtype = Dtype::from_code(submission.dtype);
    let reduce = ReduceOp::from_code(submission.reduce);
    let (Some(collective), Some(dtype), Some(reduce), true) = (collective, dtype, reduce, known) else {
        return Err(Status::BadKind);
    };
    if submission.root >= ranks {
        return Err(Status::BadRank);
    }
    let signature = Signature {
        collective,
        dtype,
        reduce: if collective.reduces() { reduce } else { ReduceOp::Sum },
        root: if collective.is_rooted() { Rank(submission.root) } else { Rank(0) },
        count: submission.count,
        uneven: counts.is_some(),
    };
    let feedback = (submission.flags & flags::FEEDBACK != 0)
        .then_some([submission.residual_in, submission.residual_out]);
    let right = match feedback {
        Some(_) => collective.takes_feedback() && dtype == Dtype::F32,
        None => {
            let counted = counts.is_some() || submission.residual_in == Region::default();
            counted && submission.residual_out == Region::default()
        }
    };
    let right = right && (counts.is_none() || feedback.is_none());
    let scaled = signature.reduce == ReduceOp::PremulSum;
    let right = right && signature.reduce.takes(dtype) && (scaled || submission.factor == 0);
    if !right {
        return Err(Status::BadKind);
    }
    let factor = f64::from_bits(submission.factor);
    if !collective.has_data() {
        let signature = Signature { dtype: Dtype::U8, count: 0, ..signature };
        let none = Region::default();
        return Ok(CheckedCall { signature, in_place: false, input: none, output: none, feedback, factor });
    }
    let size = dtype.size() as u64;
    let block = submission.count.checked_mul(size).ok_or(Status::OutOfRange)?;
    let blocks = collective.blocks(ranks, rank, signature.root);
    // What is not there is not looked at.
    let there = |region: Region, blocks: u32| if blocks > 0 { region } else { Region::default() };
    let [inputs, outputs] = blocks;
    let tensors @ [input, output] = [there(submission.input, inputs), there(submission.output, outputs)];
    // The most of all is cut into segments: more than there can be would be endlessly many of nothing.
    if let Some(largest) = counts.map(|counts| counts.iter().copied().max().unwrap_or(0)) {
        let right = match collective.is_pairwise() {
            true => largest <= submission.count && block <= memory.bytes(),
            false => largest == submission.count,
        };
        if !right {
            return Err(Status::OutOfRange);
        }
    }
    // Bytes of the first blocks of a tensor.
    let before = |output: bool, blocks: u32| {
        let Some(counts) = counts else { return block.checked_mul(blocks.into()) };
        let index = |block| match (collective.is_pairwise(), output) {
            (true, false) => block,
            (true, true) => ranks.saturating_add(block),
            (false, false) => collective.count_of_input(rank, block, ranks),
            (false, true) => collective.count_of_output(rank, block, ranks),
        };
        let mut said = (0..blocks).map(|block| counts.get(index(block) as usize).copied());
        said.try_fold(0_u64, |sum, count| sum.checked_add(count?))?.checked_mul(size)
    };
    // What takes feedback has tensors of one block.
    let fed = feedback.iter().flatten().map(|region| (region, Some(block)));
    let given = [(&input, before(false, inputs)), (&output, before(true, outputs))];
    for (region, bytes) in given.into_iter().chain(fed) {
        let bytes = bytes.ok_or(Status::OutOfRange)?;
        if region.bytes != bytes || !memory.holds(region.offset, bytes) || region.offset % size != 0 {
            return Err(Status::OutOfRange);
        }
    }
    // Both offsets are those of blocks that are there.
    let shared = |[of_input, of_output]: [u32; 2]| {
        let [from, to] = [before(false, of_input), before(true, of_output)];
        from.map(|from| input.offset + from) == to.map(|to| output.offset + to)
    };
    let in_place = block > 0 && collective.shared_block(rank, signature.root).is_some_and(shared);
    let apart = |one: &Region, other: &Region| {
        one.offset + one.bytes <= other.offset || other.offset + other.bytes <= one.offset
    };
    if !(apart(&input, &output) || in_place) {
        return Err(Status::Overlap);
    }
    if let Some([owed, left_out]) = &feedback {
        let free = tensors.iter().all(|tensor| apart(tensor, owed) && apart(tensor, left_out));
        if !(free && apart(owed, left_out)) {
            return Err(Status::Overlap);
        }
    }
    Ok(CheckedCall { signature, in_place, input, output, feedback, factor })
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_shm::{MappedEnd, Memory};

    /// One arena of so many bytes.
    impl Extent for u64 {
        fn bytes(&self) -> u64 {
            *self
        }

        fn holds(&self, offset: u64, bytes: u64) -> bool {
            offset.checked_add(bytes).is_some_and(|end| end <= *self)
        }
    }

    /// Of even calls.
    fn check(submission: &Submission, arena: u64, of: (Rank, u32)) -> Result<CheckedCall, Status> {
        super::check(submission, arena, of, None)
    }

    #[test]
    fn a_tensor_lies_in_one_region() {
        let (mut end, _doorbell) = MappedEnd::create(4096, 4, Box::new(())).unwrap();
        end.add_region(4096, Memory::private(4096).unwrap()).unwrap();
        end.add_region(16384, Memory::private(8192).unwrap()).unwrap();
        let of = |end: &MappedEnd, input, output| {
            let region = |offset| Region { offset, bytes: 64 };
            let submission = Submission { input: region(input), output: region(output), ..sum(16, 0, 0) };
            super::check(&submission, end as &dyn AgentEnd, (Rank(0), 2), None).map(|call| call.in_place)
        };
        assert_eq!(of(&end, 0, 4096), Ok(false));
        assert_eq!(of(&end, 4096, 4096), Ok(true));
        assert_eq!(of(&end, 16384 + 4096 - 32, 4032), Ok(false), "across pages");
        for offset in [4096 - 32, 8192 - 32, 8192, 16384 - 8, 16384 + 8192 - 56, u64::MAX - 7] {
            assert_eq!(of(&end, offset, 0), Err(Status::OutOfRange), "{offset}");
            assert_eq!(of(&end, 0, offset), Err(Status::OutOfRange), "{offset}");
        }
        assert!(end.remove_region(4096).is_some());
        assert_eq!(of(&end, 0, 4096), Err(Status::OutOfRange));
    }

    #[test]
    fn counts_are_read_once_and_fit_the_tensors() {
        let memory = Regions::new(Memory::private(4096).unwrap());
        let counts = [2_u64, 0, 3, 1];
        memory.write(1024, counts.as_bytes()).unwrap();
        let right = Submission {
            version: ABI_VERSION,
            collective: Collective::AllGather.code(),
            dtype: Dtype::U64.code(),
            flags: flags::UNEVEN,
            count: 3,
            input: Region { offset: 0, bytes: 24 },
            output: Region { offset: 64, bytes: 48 },
            residual_in: Region { offset: 1024, bytes: 32 },
            ..Submission::default()
        };
        let of = |submission: &Submission, rank| {
            let region = region_of_counts(submission, 4)?;
            let counts = region.map(|region| read_counts(&memory, region)).transpose()?;
            super::check(submission, 4096, (Rank(rank), 4), counts.as_deref())
        };
        let checked = of(&right, 2).unwrap();
        assert!(checked.signature.uneven && !checked.in_place);
        let place = |offset| Submission { input: Region { offset, ..right.input }, ..right };
        assert!(of(&place(64 + 16), 2).unwrap().in_place);
        assert_eq!(of(&place(64 + 8), 2), Err(Status::Overlap));
        assert_eq!(of(&right, 0), Err(Status::OutOfRange), "another rank's input");
        let counts_at = |offset, bytes| Submission { residual_in: Region { offset, bytes }, ..right };
        for (submission, status) in [
            (counts_at(1024, 24), Status::OutOfRange),
            (counts_at(4080, 32), Status::OutOfRange),
            (counts_at(u64::MAX, 32), Status::OutOfRange),
            (Submission { count: 2, ..right }, Status::OutOfRange),
            (Submission { count: 4, ..right }, Status::OutOfRange),
            (Submission { output: right.input, ..right }, Status::OutOfRange),
            (Submission { flags: 3, ..right }, Status::BadKind),
            (Submission { residual_out: right.input, ..right }, Status::BadKind),
            (Submission { collective: Collective::Broadcast.code(), ..right }, Status::BadKind),
        ] {
            assert_eq!(of(&submission, 2), Err(status), "{submission:?}");
        }
        memory.write(1024, [u64::MAX; 4].as_bytes()).unwrap();
        assert_eq!(of(&Submission { count: u64::MAX, ..right }, 2), Err(Status::OutOfRange));
    }

    #[test]
    fn of_a_message_the_own_end_alone_is_looked_at() {
        let nowhere = Region { offset: u64::MAX, bytes: 3 };
        let right = Submission {
            version: ABI_VERSION,
            dtype: Dtype::F32.code(),
            root: 3,
            count: 4,
            input: Region { offset: 112, bytes: 16 },
            output: nowhere,
            ..Submission::default()
        };
        let send = |submission: &Submission| check_p2p(submission, Direction::Send, 128_u64, 4);
        let receive = |submission: &Submission| check_p2p(submission, Direction::Receive, 128_u64, 4);
        let checked = send(&right).unwrap();
        assert_eq!((checked.input, checked.output), (right.input, Region::default()));
        assert_eq!(checked.signature.peer, Some(Rank(3)));
        let received = Submission { input: nowhere, output: right.input, ..right };
        assert_eq!(receive(&received).unwrap().output, right.input);
        let any = Submission { root: ANY_RANK, ..received };
        assert_eq!(receive(&any).unwrap().signature.peer, None);
        let at = |offset, bytes| Submission { input: Region { offset, bytes }, ..right };
        for (submission, status) in [
            (Submission { version: 1, ..right }, Status::BadVersion),
            (Submission { dtype: 200, ..right }, Status::BadKind),
            (Submission { flags: flags::UNEVEN, ..right }, Status::BadKind),
            (Submission { reduce: 1, ..right }, Status::BadKind),
            (Submission { residual_in: right.input, ..right }, Status::BadKind),
            (Submission { root: 4, ..right }, Status::BadRank),
            (Submission { root: ANY_RANK, ..right }, Status::BadRank),
            (Submission { count: 5, ..right }, Status::OutOfRange),
            (Submission { count: u64::MAX, ..right }, Status::OutOfRange),
            (at(116, 16), Status::OutOfRange),
            (at(u64::MAX, 16), Status::OutOfRange),
            (at(2, 16), Status::OutOfRange),
        ] {
            assert_eq!(send(&submission), Err(status), "{submission:?}");
        }
    }

    fn sum(count: u64, input: u64, output: u64) -> Submission {
        let bytes = count.saturating_mul(4);
        Submission {
            version: ABI_VERSION,
            collective: Collective::AllReduce.code(),
            dtype: Dtype::F32.code(),
            reduce: ReduceOp::Sum.code(),
            count,
            input: Region { offset: input, bytes },
            output: Region { offset: output, bytes },
            ..Submission::default()
        }
    }

    /// Eight elements in place, with feedback.
    fn fed() -> Submission {
        let (owed, left_out) = (Region { offset: 32, bytes: 32 }, Region { offset: 64, bytes: 32 });
        Submission { flags: flags::FEEDBACK, residual_in: owed, residual_out: left_out, ..sum(8, 0, 0) }
    }

    #[test]
    fn feedback_passes_where_it_is_asked_for() {
        assert_eq!(
            check(&fed(), 128, (Rank(0), 2)).unwrap().feedback,
            Some([fed().residual_in, fed().residual_out])
        );
        assert_eq!(check(&sum(8, 0, 0), 128, (Rank(0), 2)).unwrap().feedback, None);
    }

    #[test]
    fn right_calls_pass() {
        let checked = check(&sum(16, 0, 64), 128, (Rank(0), 2)).unwrap();
        assert!(!checked.in_place);
        assert_eq!(checked.signature.count, 16);
        assert!(check(&sum(16, 64, 64), 128, (Rank(0), 2)).unwrap().in_place);
        assert!(!check(&sum(0, 128, 128), 128, (Rank(0), 2)).unwrap().in_place);
    }

    #[test]
    fn each_wrong_field_is_refused_with_its_own_status() {
        let right = sum(16, 0, 64);
        let cases: Vec<(&str, Submission, Status)> = vec![
            ("version", Submission { version: 9, ..right }, Status::BadVersion),
            ("collective", Submission { collective: 200, ..right }, Status::BadKind),
            ("dtype", Submission { dtype: 200, ..right }, Status::BadKind),
            ("reduction", Submission { reduce: 200, ..right }, Status::BadKind),
            ("flags", Submission { flags: 0x80, ..right }, Status::BadKind),
            ("factor", Submission { factor: 1, ..right }, Status::BadKind),
            ("root", Submission { root: 2, ..right }, Status::BadRank),
            ("count overflows", Submission { count: u64::MAX, ..right }, Status::OutOfRange),
            ("beyond the arena", sum(16, 0, 65), Status::OutOfRange),
            ("offset overflows", sum(16, 0, u64::MAX - 3), Status::OutOfRange),
            ("region of another size", Submission { count: 15, ..right }, Status::OutOfRange),
            ("misaligned", sum(8, 0, 66), Status::OutOfRange),
            ("overlap", sum(16, 0, 32), Status::Overlap),
            ("feedback without its flag", Submission { residual_in: right.input, ..right }, Status::BadKind),
            ("feedback of integers", Submission { dtype: Dtype::I32.code(), ..fed() }, Status::BadKind),
            (
                "feedback beyond",
                Submission { residual_out: Region { offset: 100, bytes: 32 }, ..fed() },
                Status::OutOfRange,
            ),
            (
                "feedback of another size",
                Submission { residual_in: Region { offset: 0, bytes: 8 }, ..fed() },
                Status::OutOfRange,
            ),
            ("feedback on the input", Submission { residual_in: fed().input, ..fed() }, Status::Overlap),
            ("feedback on itself", Submission { residual_out: fed().residual_in, ..fed() }, Status::Overlap),
        ];
        for (what, submission, status) in cases {
            assert_eq!(check(&submission, 128, (Rank(0), 2)), Err(status), "{what}");
        }
        let exchange = Submission { collective: Collective::AllToAll.code(), ..sum(8, 0, 0) };
        let exchange = Submission {
            input: Region { offset: 0, bytes: 64 },
            output: Region { offset: 0, bytes: 64 },
            ..exchange
        };
        assert_eq!(check(&exchange, 128, (Rank(0), 2)), Err(Status::Overlap), "alltoall in place");
    }

    /// Among four ranks, with the one tensor of 2 elements and the other of 8.
    fn blocks(collective: Collective, input: u64, output: u64) -> Submission {
        let [inputs, outputs] = collective.blocks(4, Rank(0), Rank(0)).map(|blocks| u64::from(blocks) * 8);
        Submission {
            collective: collective.code(),
            input: Region { offset: input, bytes: inputs },
            output: Region { offset: output, bytes: outputs },
            ..sum(2, 0, 0)
        }
    }

    #[test]
    fn tensors_that_a_rank_lacks_are_ignored() {
        let nowhere = Region { offset: u64::MAX, bytes: 3 };
        for collective in Collective::ALL.iter().copied().filter(|one| one.is_rooted()) {
            let of = |submission: Submission, root| {
                check(&Submission { root, ..submission }, 128, (Rank(1), 4)).map(|call| (call, call.in_place))
            };
            let region = |blocks: u32, offset| match blocks {
                0 => nowhere,
                _ => Region { offset, bytes: u64::from(blocks) * 8 },
            };
            let [inputs, outputs] = collective.blocks(4, Rank(1), Rank(0));
            assert_eq!([inputs, outputs].iter().filter(|blocks| **blocks == 0).count(), 1, "{collective}");
            let submission = Submission {
                input: region(inputs, 0),
                output: region(outputs, 64),
                ..blocks(collective, 0, 64)
            };
            let (checked, in_place) = of(submission, 0).unwrap();
            assert!(!in_place && checked.signature.root == Rank(0));
            let there = |region| if region == nowhere { Region::default() } else { region };
            assert_eq!((checked.input, checked.output), (there(submission.input), there(submission.output)));
            assert_eq!(of(submission, 1).map(|_| ()), Err(Status::OutOfRange), "{collective}'s root");
            assert_eq!(of(submission, 4).map(|_| ()), Err(Status::BadRank), "{collective}");
            let [input, output] =
                collective.shared_block(Rank(1), Rank(1)).unwrap().map(|at| u64::from(at) * 8);
            let shared = blocks(collective, output, input);
            assert!(of(shared, 1).unwrap().1, "{collective} in place at its root");
            assert!(!of(submission, 0).unwrap().1, "{collective} in place elsewhere");
        }
    }

    #[test]
    fn of_allgather_and_reducescatter_the_own_block_alone_is_shared() {
        let of = |submission, rank| check(&submission, 128, (Rank(rank), 4));
        let gather = |input, output| blocks(Collective::AllGather, input, output);
        let scatter = |input, output| blocks(Collective::ReduceScatter, input, output);
        for rank in 0..4 {
            let own = 32 + 8 * u64::from(rank);
            for (right, shared) in [
                (gather(own, 32), true),
                (gather(24, 32), false),
                (gather(64, 32), false),
                (scatter(32, own), true),
                (scatter(32, 24), false),
                (scatter(32, 64), false),
            ] {
                let checked = of(right, rank).unwrap();
                assert_eq!((checked.in_place, checked.signature.count), (shared, 2), "{right:?}");
            }
            let other = 32 + 8 * u64::from((rank + 1) % 4);
            for offset in [other, own + 4, own - 4, 28, 60] {
                assert_eq!(of(gather(offset, 32), rank).map(|_| ()), Err(Status::Overlap), "{offset}");
                assert_eq!(of(scatter(32, offset), rank).map(|_| ()), Err(Status::Overlap), "{offset}");
            }
        }
        let average = Submission { reduce: ReduceOp::Average.code(), ..scatter(0, 64) };
        assert_eq!(of(average, 0).unwrap().signature.reduce, ReduceOp::Average);
        let gathered = Submission { reduce: ReduceOp::Average.code(), ..gather(64, 0) };
        assert_eq!(of(gathered, 0).unwrap().signature.reduce, ReduceOp::Sum);
        for collective in [Collective::AllGather, Collective::ReduceScatter] {
            let right = blocks(collective, 0, 64);
            let wrong = [
                Submission { count: 3, ..right },
                // The blocks together, or one alone, are more than can be counted.
                Submission { count: u64::MAX / 8, ..right },
                Submission { count: u64::MAX, ..right },
                Submission { input: right.output, output: right.input, ..right },
                Submission { input: Region { offset: u64::MAX - 3, ..right.input }, ..right },
            ];
            for submission in &wrong {
                assert_eq!(of(*submission, 1).map(|_| ()), Err(Status::OutOfRange), "{submission:?}");
            }
            let beyond = blocks(collective, 100, 4);
            assert_eq!(check(&beyond, 104, (Rank(1), 4)).map(|_| ()), Err(Status::OutOfRange));
            let fed = Submission { flags: flags::FEEDBACK, ..right };
            assert_eq!(of(fed, 1).map(|_| ()), Err(Status::BadKind), "feedback");
            let nothing = Region::default();
            let empty = Submission { count: 0, input: nothing, output: nothing, ..right };
            assert!(!of(empty, 1).unwrap().in_place);
        }
    }
}
