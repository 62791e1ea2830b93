//! Tensor memory beside the arena, in the same space of offsets, and why some cannot be had.

use core::fmt;
use serde::{Deserialize, Serialize};

/// Where memory that was added lies in the attachment's space of offsets. No operand crosses its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AddedRegion {
    /// Offset of its first byte, a multiple of a page; never that of another region of the attachment again.
    pub base: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Why memory is not added to an attachment, or not let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RegionRefused {
    /// More bytes than the tenant has left of its quota, which its arenas and regions share.
    Bytes {
        /// Bytes asked for, in whole pages.
        asked: u64,
        /// Bytes that are left.
        left: u64,
        /// Bytes that the tenant may have in all.
        limit: u64,
    },
    /// The tenant has as many regions beside its arenas as it may have.
    Regions {
        /// How many those are.
        limit: u32,
    },
    /// The attachment has one region of fixed size: agent and process do not map the same memory.
    Access,
    /// No bytes, or more than any mapping can have.
    Size,
    /// The range does not begin and end at multiples of a page.
    Unaligned {
        /// Bytes of a page.
        page: u64,
    },
    /// The range ends after the file.
    Beyond {
        /// Bytes of the file.
        size: u64,
    },
    /// The range has bytes that this attachment has registered already.
    Overlap,
    /// No descriptor came with the request.
    NoDescriptor,
    /// The descriptor is of something else than a memfd.
    NotMemfd,
    /// The memfd has huge pages.
    HugePages,
    /// The memfd lacks the seal `F_SEAL_SHRINK`: it could be cut off under who has mapped it.
    Shrinkable,
    /// The memfd cannot be written: by a seal, or because the descriptor is for reading alone.
    ReadOnly,
    /// The attachment has no such region.
    Unknown,
    /// An operation in flight uses the region.
    InUse,
    /// The memory could not be made or mapped.
    Failed,
}

impl fmt::Display for RegionRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bytes { asked, left, limit } => {
                return write!(
                    f,
                    "{asked} bytes were asked for and {left} are left of the {limit} that this tenant may have in all"
                );
            }
            Self::Regions { limit } => {
                return write!(f, "this tenant has {limit} regions, as many as it may have; drop some");
            }
            Self::Unaligned { page } => {
                return write!(f, "the range does not begin and end at multiples of {page} bytes");
            }
            Self::Beyond { size } => return write!(f, "the range ends after the file of {size} bytes"),
            Self::Access => "this attachment's memory is one arena of fixed size; attach mapped",
            Self::Size => "a region has at least a byte, and no more than can be mapped",
            Self::Overlap => "the range has bytes that are registered already",
            Self::NoDescriptor => "no descriptor came along",
            Self::NotMemfd => "the descriptor is not of a memfd; make one with memfd_create",
            Self::HugePages => "the memfd has huge pages; make it without MFD_HUGETLB",
            Self::Shrinkable => {
                "the memfd lacks the seal F_SEAL_SHRINK; make it with MFD_ALLOW_SEALING and add that seal"
            }
            Self::ReadOnly => {
                "the memfd cannot be written; open it for both, without F_SEAL_WRITE and F_SEAL_FUTURE_WRITE"
            }
            Self::Unknown => "this attachment has no such region",
            Self::InUse => "an operation in flight uses the region; wait for it first",
            Self::Failed => "the memory could not be made or mapped",
        })
    }
}

impl core::error::Error for RegionRefused {}
