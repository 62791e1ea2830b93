//! Error feedback: where what sums are owed lies, and what of it a segment leaves as it is.

use crate::coded::is_coded;
use crate::execute::{Context, ExecuteError, tensor_range};
use harmonaize_codec::Account;
use harmonaize_core::Segment;
use harmonaize_plan::Part;

impl<'a> Context<'a> {
    /// The accounts of a part of the segment, in the order of the local ranks, of those that have one: the first is the participant's.
    fn accounts(
        &self,
        segment: &'a Segment,
        part: Part,
    ) -> impl Iterator<Item = Result<Account<'a>, ExecuteError>> {
        let (member, attachments) = (self.member, self.attachments);
        let given = member
            .locals
            .iter()
            .filter_map(move |local| Some((local, member.pending(segment.operation, local.rank)?.feedback?)));
        given.map(move |(local, [owed, left_out])| {
            let signature = segment.signature;
            let (offset, bytes) = tensor_range(segment, signature.dtype.size() as u64, &signature, part);
            let end = attachments.get(local.attachment).ok_or(ExecuteError::NoSource)?;
            let memory = end.end.memory().ok_or(ExecuteError::NoSource)?;
            Ok(Account {
                owed: memory.view(owed.offset + offset, bytes)?,
                left_out: memory.view_mut(left_out.offset + offset, bytes)?,
            })
        })
    }

    /// This participant's account of a part of the segment, if a local rank gave one.
    pub(crate) fn account(
        &self,
        segment: &'a Segment,
        part: Part,
    ) -> Result<Option<Account<'a>>, ExecuteError> {
        self.accounts(segment, part).next().transpose()
    }
}

/// A segment begins, perhaps once more, by another plan: what its program does not settle stays owed. Without feedback it costs a
/// look at each local rank's call; with it a copy of the segment where that is not coded.
pub(crate) fn begin(context: &Context<'_>) -> Result<(), ExecuteError> {
    let (segment, _) = context.member.segment_and_size(context.channel).ok_or(ExecuteError::NoSource)?;
    let mut accounts = context.accounts(segment, Part::whole(0)).peekable();
    if accounts.peek().is_none() {
        return Ok(());
    }
    let coded = segment.aggregated.is_none() && segment.program.steps.iter().any(is_coded);
    for account in accounts.skip(usize::from(coded)) {
        account?.carry().map_err(|error| ExecuteError::Kernel(error.to_string()))?;
    }
    Ok(())
}
