//! Scenarios of the state machine, one at a time, and random ones from seeds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

/// The content of the only message, which is of a kind.
macro_rules! only {
    ($messages:expr, $kind:ident) => {
        match $messages.as_slice() {
            [harmonaize_api::v1::to_agent::Message::$kind(message)] => message.clone(),
            other => panic!("not one {} but {other:?}", stringify!($kind)),
        }
    };
}

/// The contents of all messages of a kind.
macro_rules! every {
    ($messages:expr, $kind:ident) => {
        $messages
            .into_iter()
            .filter_map(|message| match message {
                harmonaize_api::v1::to_agent::Message::$kind(message) => Some(message),
                _ => None,
            })
            .collect::<Vec<_>>()
    };
}

mod adversary;
mod aggregation;
mod aggregation_tree;
mod agreements;
mod candidates;
mod carried;
mod closed_loop;
mod coding;
mod congestion_control;
mod direct;
mod events;
mod fabric;
mod handovers;
mod hints;
mod jobs;
mod kept;
mod leases;
mod market;
mod noise;
mod operator;
mod paths;
mod places;
mod policies;
mod random;
mod recovered;
mod regroup;
mod retopology;
mod scale;
mod scenarios;
mod splits;
mod sums;
mod targets;
mod telemetry;
mod topology;
mod turns;
mod watched;
mod what_if;
mod world;
