//! Scenarios of the state machine, one at a time, and random ones from seeds.

mod adversary;
mod aggregation;
mod aggregation_tree;
mod agreements;
mod carried;
mod closed_loop;
mod coding;
mod direct;
mod events;
mod fabric;
mod hints;
mod noise;
mod operator;
mod paths;
mod policies;
mod random;
mod recovered;
mod regroup;
mod scenarios;
mod sums;
mod targets;
mod telemetry;
mod turns;
mod watched;
mod world;
