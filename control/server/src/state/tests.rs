//! Scenarios of the state machine, one at a time, and random ones from seeds.

mod random;
mod scenarios;
mod telemetry;
mod world;
