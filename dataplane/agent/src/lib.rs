//! The provider's agent: the daemon on an offload unit or hypervisor that runs tenants' collectives.
#![forbid(unsafe_code)]

pub mod session;
