//! Fetches and stores of a tenant's memory that is not mapped. Their tags identify what has ended.

use crate::table::Key;
use harmonaize_abi::{ChannelId, StepId, Tag};
use harmonaize_shm::Span;

/// A fetch or store that an attachment is to start.
#[derive(Debug)]
pub(crate) struct PendingTransfer {
    pub(crate) attachment: Key,
    pub(crate) tag: Tag,
    pub(crate) store: bool,
    pub(crate) offset: u64,
    pub(crate) span: Span,
}

/// The tag of a fetch of counts, of which an attachment has one at a time. No step has it: see [`MAX_CHANNELS`].
pub(crate) const COUNTS: Tag = Tag(u64::MAX);

/// Most channels of a communicator. One more is that of its messages, and in the last one that a tag can name nothing ever is.
pub const MAX_CHANNELS: u16 = 0xffe;

/// The tag of a step's part: channels fit in 12 bits and steps in 20.
pub(crate) fn tag(key: Key, channel: ChannelId, step: StepId) -> Tag {
    debug_assert!(channel.0 <= 0xfff && step.0 <= 0xf_ffff, "a tag of channel {channel} and step {step}");
    let place = u64::from(key.index) << 48 | u64::from(key.generation) << 32;
    Tag(place | u64::from(channel.0 & 0xfff) << 20 | u64::from(step.0 & 0xf_ffff))
}

/// The communicator, the channel and the step of a tag.
pub(crate) fn untag(Tag(tag): Tag) -> (Key, ChannelId, StepId) {
    let key = Key { index: (tag >> 48) as u16, generation: (tag >> 32) as u16 };
    (key, ChannelId((tag >> 20) as u16 & 0xfff), StepId(tag as u32 & 0xf_ffff))
}
