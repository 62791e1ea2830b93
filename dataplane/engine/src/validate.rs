//! From a descriptor that a tenant wrote to a call that may be executed. The descriptor is a private copy.

use harmonaize_abi::{
    ABI_VERSION, Collective, Dtype, Rank, ReduceOp, Region, Signature, Status, Submission, flags,
};

/// A call that passed every check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckedCall {
    pub(crate) signature: Signature,
    pub(crate) in_place: bool,
    pub(crate) input: Region,
    pub(crate) output: Region,
    /// What is owed before and after.
    pub(crate) feedback: Option<[Region; 2]>,
}

/// Checks a rank's descriptor against the attachment's memory and the communicator's number of ranks.
pub(crate) fn check(
    submission: &Submission,
    arena_bytes: u64,
    (rank, ranks): (Rank, u32),
) -> Result<CheckedCall, Status> {
    if submission.version != ABI_VERSION {
        return Err(Status::BadVersion);
    }
    let known = submission.flags & !flags::ALL == 0 && submission.reserved == 0;
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
    };
    let feedback = (submission.flags & flags::FEEDBACK != 0)
        .then_some([submission.residual_in, submission.residual_out]);
    let right = match feedback {
        Some(_) => collective.takes_feedback() && dtype == Dtype::F32,
        None => submission.residual_in == Region::default() && submission.residual_out == Region::default(),
    };
    if !right {
        return Err(Status::BadKind);
    }
    if !collective.has_data() {
        let signature = Signature { dtype: Dtype::U8, count: 0, ..signature };
        let none = Region::default();
        return Ok(CheckedCall { signature, in_place: false, input: none, output: none, feedback });
    }
    let size = dtype.size() as u64;
    let block = submission.count.checked_mul(size).ok_or(Status::OutOfRange)?;
    let blocks = collective.blocks(ranks, rank, signature.root);
    // What is not there is not looked at.
    let there = |region: Region, blocks: u32| if blocks > 0 { region } else { Region::default() };
    let [inputs, outputs] = blocks;
    let tensors @ [input, output] = [there(submission.input, inputs), there(submission.output, outputs)];
    // What takes feedback has tensors of one block.
    let fed = feedback.iter().flatten().map(|region| (region, 1));
    for (region, blocks) in [(&input, inputs), (&output, outputs)].into_iter().chain(fed) {
        let bytes = block.checked_mul(blocks.into()).ok_or(Status::OutOfRange)?;
        let end = region.offset.checked_add(bytes).ok_or(Status::OutOfRange)?;
        if region.bytes != bytes || end > arena_bytes || region.offset % size != 0 {
            return Err(Status::OutOfRange);
        }
    }
    // Both offsets are those of blocks that are there.
    let shared = |[of_input, of_output]: [u32; 2]| {
        input.offset + block * u64::from(of_input) == output.offset + block * u64::from(of_output)
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
    Ok(CheckedCall { signature, in_place, input, output, feedback })
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("reserved", Submission { reserved: 1, ..right }, Status::BadKind),
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
    fn a_tensor_that_a_rank_does_not_have_is_not_looked_at() {
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
