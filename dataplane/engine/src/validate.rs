//! From a descriptor that a tenant wrote to a call that may be executed. The descriptor is a private copy.

use harmonaize_abi::{
    ABI_VERSION, Collective, Dtype, Rank, ReduceOp, Region, Signature, Status, Submission, flags,
};

/// A call that passed every check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checked {
    pub(crate) signature: Signature,
    pub(crate) in_place: bool,
    pub(crate) input: Region,
    pub(crate) output: Region,
    /// What is owed before and after.
    pub(crate) feedback: Option<[Region; 2]>,
}

/// Checks a descriptor against the attachment's memory and the communicator's size.
pub(crate) fn check(submission: &Submission, arena_bytes: u64, ranks: u32) -> Result<Checked, Status> {
    if submission.version != ABI_VERSION {
        return Err(Status::BadVersion);
    }
    let known = submission.flags & !flags::KNOWN == 0 && submission.reserved.iter().all(|word| *word == 0);
    let collective = Collective::from_code(submission.collective);
    let dtype = Dtype::from_code(submission.dtype);
    let reduce = ReduceOp::from_code(submission.reduce);
    let (Some(collective), Some(dtype), Some(reduce), true) = (collective, dtype, reduce, known) else {
        return Err(Status::BadKind);
    };
    if submission.root >= ranks {
        return Err(Status::BadRank);
    }
    let broadcast = collective == Collective::Broadcast;
    let signature = Signature {
        collective,
        dtype,
        reduce: if collective == Collective::AllReduce { reduce } else { ReduceOp::Sum },
        root: if broadcast { Rank(submission.root) } else { Rank(0) },
        count: submission.count,
    };
    let feedback =
        (submission.flags & flags::FEEDBACK != 0).then_some([submission.owed, submission.left_out]);
    let right = match feedback {
        Some(_) => collective == Collective::AllReduce && dtype == Dtype::F32,
        None => submission.owed == Region::default() && submission.left_out == Region::default(),
    };
    if !right {
        return Err(Status::BadKind);
    }
    if collective == Collective::Barrier {
        let signature = Signature { dtype: Dtype::U8, count: 0, ..signature };
        let none = Region::default();
        return Ok(Checked { signature, in_place: false, input: none, output: none, feedback });
    }
    let blocks = if collective == Collective::AllToAll { u64::from(ranks) } else { 1 };
    let size = dtype.size() as u64;
    let bytes = submission.count.checked_mul(blocks).and_then(|elements| elements.checked_mul(size));
    let bytes = bytes.ok_or(Status::OutOfRange)?;
    let tensors = [submission.input, submission.output];
    for region in tensors.iter().chain(feedback.iter().flatten()) {
        let end = region.offset.checked_add(bytes).ok_or(Status::OutOfRange)?;
        if region.bytes != bytes || end > arena_bytes || region.offset % size != 0 {
            return Err(Status::OutOfRange);
        }
    }
    let (input, output) = (submission.input, submission.output);
    let in_place = input.offset == output.offset && bytes > 0;
    let apart = |one: &Region, other: &Region| {
        one.offset + bytes <= other.offset || other.offset + bytes <= one.offset
    };
    if !(apart(&input, &output) || in_place) || (in_place && collective == Collective::AllToAll) {
        return Err(Status::Overlap);
    }
    if let Some([owed, left_out]) = &feedback {
        let free = tensors.iter().all(|tensor| apart(tensor, owed) && apart(tensor, left_out));
        if !(free && apart(owed, left_out)) {
            return Err(Status::Overlap);
        }
    }
    Ok(Checked { signature, in_place, input, output, feedback })
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
        Submission { flags: flags::FEEDBACK, owed, left_out, ..sum(8, 0, 0) }
    }

    #[test]
    fn feedback_passes_where_it_is_asked_for() {
        assert_eq!(check(&fed(), 128, 2).unwrap().feedback, Some([fed().owed, fed().left_out]));
        assert_eq!(check(&sum(8, 0, 0), 128, 2).unwrap().feedback, None);
    }

    #[test]
    fn right_calls_pass() {
        let checked = check(&sum(16, 0, 64), 128, 2).unwrap();
        assert!(!checked.in_place);
        assert_eq!(checked.signature.count, 16);
        assert!(check(&sum(16, 64, 64), 128, 2).unwrap().in_place);
        assert!(!check(&sum(0, 128, 128), 128, 2).unwrap().in_place);
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
            ("reserved", Submission { reserved: [0, 1], ..right }, Status::BadKind),
            ("root", Submission { root: 2, ..right }, Status::BadRank),
            ("count overflows", Submission { count: u64::MAX, ..right }, Status::OutOfRange),
            ("beyond the arena", sum(16, 0, 65), Status::OutOfRange),
            ("offset overflows", sum(16, 0, u64::MAX - 3), Status::OutOfRange),
            ("region of another size", Submission { count: 15, ..right }, Status::OutOfRange),
            ("misaligned", sum(8, 0, 66), Status::OutOfRange),
            ("overlap", sum(16, 0, 32), Status::Overlap),
            ("feedback without its flag", Submission { owed: right.input, ..right }, Status::BadKind),
            ("feedback of integers", Submission { dtype: Dtype::I32.code(), ..fed() }, Status::BadKind),
            (
                "feedback beyond",
                Submission { left_out: Region { offset: 100, bytes: 32 }, ..fed() },
                Status::OutOfRange,
            ),
            (
                "feedback of another size",
                Submission { owed: Region { offset: 0, bytes: 8 }, ..fed() },
                Status::OutOfRange,
            ),
            ("feedback on the input", Submission { owed: fed().input, ..fed() }, Status::Overlap),
            ("feedback on itself", Submission { left_out: fed().owed, ..fed() }, Status::Overlap),
        ];
        for (what, submission, status) in cases {
            assert_eq!(check(&submission, 128, 2), Err(status), "{what}");
        }
        let exchange = Submission { collective: Collective::AllToAll.code(), ..sum(8, 0, 0) };
        let exchange = Submission {
            input: Region { offset: 0, bytes: 64 },
            output: Region { offset: 0, bytes: 64 },
            ..exchange
        };
        assert_eq!(check(&exchange, 128, 2), Err(Status::Overlap), "alltoall in place");
    }
}
