//! External jobs: their iterations, and when they communicate, inferred from bursts alone.
//!
//! [`Phases`] takes in records and goes four steps. Events and snapshots become *bursts* of connections (`flow`). Connections
//! whose bursts come and go together, and that meet at a host, are taken for one job (`activity`, `group`). A job is believed
//! once its traffic falls into groups of the same bytes at the same distances (`rhythm`), and some host both sends and
//! receives: single transfers, chatter and random traffic have no such rhythm. From then on each group is a [`Phase`]: bytes tell
//! where one ends whose rank stalls half way, and gaps tell the rest (`job`). What a phase's bursts say of hosts, edges, rings
//! and who was late is in `describe`.
//!
//! What ranks say beside their AllReduces (broadcasts of buffers, gathers, barriers) is part of an iteration, and of no phase: `sides`
//! tells it apart, by who is at an end of it and by its bytes. So are sends point to point over connections of their own: `sends`.
//! How long all that held up each host goes into who is late.
//!
//! An acknowledgement is traffic too: a host's own first bytes are told from its ACKs by their size, and by what comes in.

mod activity;
mod describe;
mod detector;
mod finding;
mod flow;
mod group;
mod iterations;
mod job;
mod sends;
mod sides;
mod table;

pub use detector::{Counts, Limits, Phases};
pub use finding::{Address, EdgePhase, HostPhase, Job, Late, Phase, RingSteps};
