//! Plans: known situations, properties from printed seeds, and the exact optimum as a yardstick.

mod exact;
mod preferred;
mod promised;
mod properties;
mod scenarios;
mod world;
