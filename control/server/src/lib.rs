//! Control: knows hosts, agents and tenants, forms communicators, hands out recipes, and says how things stand.
//!
//! [`state`] decides, without socket or clock; [`Server`] is the thin layer that carries messages to it and from it.
#![forbid(unsafe_code)]

mod access;
mod actor;
mod config;
mod extender;
mod http;
mod keeper;
mod leader;
mod log;
mod metrics;
mod operators;
mod page;
mod relay;
mod reload;
mod requests;
mod service;
pub mod state;
mod thread;

pub use access::{Access, Role};
pub use config::{Config, ConfigError, ContentError, Place, Source, StoreConfig, ValueError};
#[cfg(feature = "testing")]
pub use service::Simulated;
pub use service::{RunError, Server, StartError};
pub use thread::count_panics;
