//! Level and cause of congestion, between the house's enums and protobuf's.

use crate::v1;
use harmonaize_abi::{CongestionCause, CongestionLevel};

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
