//! One step in its segment, and where its operands lie.

use crate::attachment::Attachment;
use crate::communicator_state::{CommunicatorState, ExtraStaging};
use crate::step::{ExecuteError, Located, tensor_range};
use crate::table::Table;
use arrayvec::ArrayVec;
use harmonaize_abi::{ChannelId, Epoch, Holders, Rank};
use harmonaize_core::{PeerMessage, Segment};
use harmonaize_plan::{Buffer, MAX_STEP_PEERS, Operand, Participant};

/// One step in its segment.
pub(crate) struct Context<'a> {
    pub(crate) member: &'a CommunicatorState,
    pub(crate) attachments: &'a Table<Attachment>,
    pub(crate) channel: ChannelId,
    pub(crate) sources: &'a ArrayVec<PeerMessage, MAX_STEP_PEERS>,
}

impl<'a> Context<'a> {
    /// Where an operand's bytes lie.
    pub(crate) fn place(
        &self,
        segment: &Segment,
        size: u64,
        operand: &Operand,
    ) -> Result<Located<'a>, ExecuteError> {
        let missing = || ExecuteError::Operand(*operand);
        let (offset, bytes) = tensor_range(segment, size, operand);
        match operand.buffer {
            Buffer::Input(rank) | Buffer::Output(rank) => {
                if let Some(kept) = self.resume_source(segment, operand.buffer) {
                    let start = segment.lo * size;
                    let memory = self.member.staging_of(self.channel).ok_or_else(missing)?;
                    let at = self.member.extra_offset(segment, size, kept).checked_add(offset);
                    let at = at.and_then(|at| at.checked_sub(start)).ok_or_else(missing)?;
                    return Ok((memory, at, bytes));
                }
                let local = self.member.local(rank).ok_or_else(missing)?;
                let call = self.member.pending(segment.operation, rank).ok_or_else(missing)?;
                let output = matches!(operand.buffer, Buffer::Output(_));
                let region = if output { &call.output } else { &call.input };
                let end = self.attachments.get(local.attachment).ok_or_else(missing)?;
                let regions = end.end.memory().ok_or_else(missing)?;
                let (memory, at) = regions.locate(region.offset, region.bytes)?;
                Ok((memory, at + offset, bytes))
            }
            Buffer::Staging(slot) => {
                let place = self.member.staging(self.channel, segment, size, (slot, operand));
                let (memory, at) = place.ok_or_else(missing)?;
                Ok((memory, at, bytes))
            }
            Buffer::Peer(peer) => self.landing(segment.epoch, peer, bytes).ok_or_else(missing),
        }
    }

    /// What stands for a tensor of a segment that is begun again although what it comes to is there.
    pub(crate) fn resume_source(&self, segment: &Segment, place: Buffer) -> Option<ExtraStaging> {
        let restored = segment.resume?;
        match place {
            // It is the root's where only that counts.
            Buffer::Input(rank) => {
                let of_root = segment.signature.collective.traits().input_of == Holders::Root;
                let gives = restored.source && (of_root || self.is_first(rank));
                Some(if gives { ExtraStaging::Result } else { ExtraStaging::Neutral })
            }
            Buffer::Output(_) if restored.completed => Some(ExtraStaging::Neutral),
            _ => None,
        }
    }

    fn is_first(&self, rank: Rank) -> bool {
        self.member.locals.first().is_some_and(|first| first.rank == rank)
    }

    /// The landing slot of the message that this step consumes from a peer.
    pub(crate) fn landing(&self, epoch: Epoch, peer: Participant, bytes: u64) -> Option<Located<'a>> {
        let message = self.sources.iter().find(|message| message.peer == peer)?;
        let memory = self.member.links(epoch)?.landing.get(peer.0 as usize)?.as_ref()?;
        let slot = u64::from(message.sequence.slot(self.member.landing_slots));
        let slot = u64::from(self.channel.0) * u64::from(self.member.landing_slots) + slot;
        Some((memory, slot * u64::from(self.member.slot_bytes), bytes))
    }
}
