//! The programs in the kernel, loaded and run on packets that nobody sent: nothing here touches an interface.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod diagnosis;
mod flows;
mod hostile;
mod loading;
mod sockets;
#[path = "../support/mod.rs"]
mod support;
