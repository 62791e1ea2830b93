//! Level and cause of congestion, and why ranks are late, between the house's enums and protobuf's.

use crate::v1;
use harmonaize_abi::{CongestionCause, CongestionLevel, StragglerCause};

/// Converts both ways; what protobuf has in addition becomes the first variant.
macro_rules! converts {
    ($ours:ident, $theirs:path, $($one:ident = $other:ident),+ $(; also $also:ident)?) => {
        impl From<$ours> for $theirs {
            fn from(value: $ours) -> Self {
                match value { $($ours::$one => Self::$other),+ }
            }
        }

        impl From<$theirs> for $ours {
            fn from(value: $theirs) -> Self {
                use $theirs as Theirs;
                match value {
                    $(Theirs::$other => Self::$one,)+
                    $(Theirs::$also => Self::default(),)?
                }
            }
        }
    };
}

converts!(CongestionLevel, v1::CongestionLevel, None = None, Mild = Mild, Severe = Severe; also Unspecified);
converts!(
    CongestionCause,
    v1::CongestionCause,
    Unknown = Unspecified,
    Own = Own,
    CrossTraffic = CrossTraffic
);

impl From<StragglerCause> for v1::StragglerCause {
    fn from(value: StragglerCause) -> Self {
        match value {
            StragglerCause::Compute => Self::Compute,
            StragglerCause::Network => Self::Network,
        }
    }
}

impl v1::StragglerCause {
    /// The cause; none where it is unspecified, or of a later release.
    pub const fn specified(self) -> Option<StragglerCause> {
        match self {
            Self::Compute => Some(StragglerCause::Compute),
            Self::Network => Some(StragglerCause::Network),
            Self::Unspecified => None,
        }
    }
}
