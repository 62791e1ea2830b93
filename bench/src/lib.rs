//! What the demo's tenants and the bench's rank processes are made of. It is a data set, a training, payloads that
//! prove themselves, and the lines that they report on standard output.
#![forbid(unsafe_code)]

pub mod communicator;
pub mod digits;
pub mod direct;
pub mod elastic;
pub mod link;
pub mod measure;
pub mod model;
pub mod npy;
pub mod payload;
pub mod record;
pub mod report;
pub mod seeded;
pub mod statistics;
pub mod tenant;
pub mod training;
