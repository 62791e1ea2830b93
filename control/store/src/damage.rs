//! What is wrong with a store that cannot be read.

use harmonaize_abi::CommunicatorId;

/// What was found in a store that is none, or damaged.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// A copy without a byte.
    #[error("it is empty")]
    Empty,
    /// The file is no database.
    #[error("{0}")]
    Database(redb::DatabaseError),
    /// A format that no control has written.
    #[error("format {0}")]
    Format(u32),
    /// A key of etcd's without a record.
    #[error("no record can be read there")]
    NoRecord,
    /// The topology as of the last start.
    #[error("the fabric cannot be read")]
    Fabric,
    /// A tenant, by name.
    #[error("tenant `{0}` cannot be read")]
    Tenant(String),
    /// What is withdrawn at a target.
    #[error("what is withdrawn at `{0}` cannot be read")]
    Withdrawal(String),
    /// A job of a tenant's.
    #[error("job `{name}` of tenant `{tenant}` cannot be read")]
    Job {
        /// The tenant.
        tenant: String,
        /// The job.
        name: String,
    },
    /// A communicator's plans.
    #[error("the plan of {0:016x} cannot be read")]
    Plan(CommunicatorId),
    /// What was agreed on a communicator.
    #[error("the agreement on {0:016x} cannot be read")]
    Agreement(CommunicatorId),
    /// What is kept of a communicator that failed.
    #[error("what is kept of {0:016x} cannot be read")]
    Past(CommunicatorId),
}
