//! What tenants ask for, are promised and are told.

pub(crate) mod agreements;
pub(crate) mod batch;
pub(crate) mod budgets;
pub(crate) mod elsewhere;
pub(crate) mod events;
pub(crate) mod hints;
pub(crate) mod inherited;
pub(crate) mod joins;
pub(crate) mod limits;
pub(crate) mod past;
mod readers;
pub(crate) mod regroup;
pub(crate) mod served;
pub(crate) mod slowdown;
pub(crate) mod splits;
pub(crate) mod turns;
