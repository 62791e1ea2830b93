//! The keys of a quota, which several tables have.

use crate::session::{ATTACHMENT_DESCRIPTORS, Quota};

/// A key of a quota that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// Nobody could do anything.
    #[error("`{key}` is 0, nobody could {what}")]
    Nobody {
        /// The key.
        key: &'static str,
        /// What nobody could do.
        what: &'static str,
    },
    /// An operation would have no time.
    #[error("`operation_timeout` is 0, no operation could end well")]
    OperationTimeout,
    /// Less than anybody needs.
    #[error("`{key}` is {value}; it must be at least {least}")]
    TooLittle {
        /// The key.
        key: &'static str,
        /// What it is.
        value: u32,
        /// What it must be.
        least: u32,
    },
    /// More of a core than there is.
    #[error("`session_percent` is {0}; sessions have one core, so it must be at most 100")]
    SessionPercent(u32),
}

/// A table with the keys of a quota behind its own. Keys that serde flattens would lose the lines of what is wrong with them.
macro_rules! table_with_quota {
    (struct $name:ident { $($own:tt)* }) => {
        #[derive(serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(super) struct $name {
            $($own)*
            arena: Option<harmonaize_units::Bytes>,
            regions: Option<u32>,
            attachments: Option<u32>,
            communicators: Option<u32>,
            operation_timeout: Option<harmonaize_units::Nanos>,
            operations: Option<u32>,
            descriptors: Option<u32>,
            landing: Option<harmonaize_units::Bytes>,
            attaches: Option<u32>,
            joins: Option<u32>,
            log_lines: Option<u32>,
            session_percent: Option<u32>,
        }

        impl $name {
            /// What a tenant may have by this table, or which key of it makes no sense.
            fn quota(&self) -> Result<$crate::session::Quota, $crate::config::quota::QuotaError> {
                let usual = $crate::session::Quota::default();
                $crate::config::quota::checked($crate::session::Quota {
                    attachments: self.attachments.unwrap_or(usual.attachments),
                    arena_bytes: self.arena.map_or(usual.arena_bytes, |bytes| bytes.0),
                    regions: self.regions.unwrap_or(usual.regions),
                    communicators: self.communicators.unwrap_or(usual.communicators),
                    operation_timeout: self.operation_timeout.map_or(usual.operation_timeout, Into::into),
                    operations: self.operations.unwrap_or(usual.operations),
                    descriptors: self.descriptors.unwrap_or(usual.descriptors),
                    landing_bytes: self.landing.map_or(usual.landing_bytes, |bytes| bytes.0),
                    attaches: self.attaches.unwrap_or(usual.attaches),
                    joins: self.joins.unwrap_or(usual.joins),
                    log_lines: self.log_lines.unwrap_or(usual.log_lines),
                    session_percent: self.session_percent.unwrap_or(usual.session_percent),
                    ..usual
                })
            }
        }
    };
}

pub(super) use table_with_quota;

/// This quota, or which key of it makes no sense.
pub(super) fn checked(quota: Quota) -> Result<Quota, QuotaError> {
    let nobody =
        [("attachments", quota.attachments, "attach"), ("communicators", quota.communicators, "join any")];
    if let Some((key, _, what)) = nobody.into_iter().find(|(_, value, _)| *value == 0) {
        return Err(QuotaError::Nobody { key, what });
    }
    if quota.operation_timeout.is_zero() {
        return Err(QuotaError::OperationTimeout);
    }
    for (key, value, least) in [
        ("operations", quota.operations, 1),
        ("descriptors", quota.descriptors, ATTACHMENT_DESCRIPTORS),
        ("attaches", quota.attaches, 1),
        ("joins", quota.joins, 1),
        ("log_lines", quota.log_lines, 1),
        ("session_percent", quota.session_percent, 1),
    ] {
        if value < least {
            return Err(QuotaError::TooLittle { key, value, least });
        }
    }
    if quota.session_percent > 100 {
        return Err(QuotaError::SessionPercent(quota.session_percent));
    }
    Ok(quota)
}
