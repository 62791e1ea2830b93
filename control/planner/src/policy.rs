//! What an epoch runs by beside order and paths: pure choices from what is measured and promised.

pub(crate) mod algorithm;
pub(crate) mod codec;
pub(crate) mod codes;
pub(crate) mod congestion_control;
pub(crate) mod rate_limits;
