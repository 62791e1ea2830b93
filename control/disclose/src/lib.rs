//! The only room that turns a provider's fact into something that a tenant may see. That is ranks, the tenant's own
//! calls, and text made of these alone.
//!
//! Prices are those of the tenant's own kind of hosts, coarsely.
//!
//! Architecture invariant: no host, address, link, path or other tenant enters a value that leaves here. Details for the
//! operator come in beside the facts and are dropped, never quoted.
#![forbid(unsafe_code)]

mod events;
mod failure;
mod join;
mod knobs;
mod prices;
mod ranks;
mod terms;
mod watch;

pub use events::{CurrentState, CursorError, Fact, Feed, Limits, Maintenance};
pub use failure::{Failure, TenantError, disclose};
pub use join::{JoinFailure, TenantRefusal, disclose_join};
pub use knobs::choose;
pub use prices::coarse_price;
pub use terms::{Outcome, ProviderState, negotiate, quarters};
pub use watch::{Call, Watch};
