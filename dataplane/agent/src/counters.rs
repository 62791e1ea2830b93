//! What the agent counts beside telemetry, for metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Something that the agent counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// A panic in work for one communicator, which ended it.
    CommunicatorPanic,
    /// A panic at an attachment's rings, which ended it.
    AttachmentPanic,
    /// A panic in a tenant's session, or in a request of one, which ended it.
    SessionPanic,
    /// A command that waited because a thread of the engine was late.
    CommandLate,
    /// A command that a thread of the engine did not take, since it has ended.
    CommandLost,
    /// A message that waited because control, or the session with it, was late.
    MessageLate,
    /// A message to control that was left out, since too many waited.
    MessageLost,
    /// A connection that came too early for the tenant's `attaches`.
    AttachRefused,
    /// A join that came too early for the tenant's `joins`.
    JoinRefused,
    /// Ring entries beyond the tenant's `operations`.
    OperationsRefused,
    /// Descriptors beyond the tenant's `descriptors`.
    DescriptorsRefused,
    /// Memory for links beyond the tenant's `landing`.
    LandingRefused,
    /// A wait of a session, since the tenant's took more processor time than its `session_percent`.
    SessionPaused,
    /// A line about a tenant that the log left out.
    LogLine,
}

/// A counter of a metric: its label's value, if the metric has one.
type Labelled = (Option<&'static str>, Counted);

/// Name and help of each metric, the name of its label, and its counters.
pub(crate) const METRICS: [(&str, &str, &str, &[Labelled]); 6] = [
    (
        "panics",
        "Panics that ended one communicator, attachment or session alone",
        "scope",
        &[
            (Some("communicator"), Counted::CommunicatorPanic),
            (Some("attachment"), Counted::AttachmentPanic),
            (Some("session"), Counted::SessionPanic),
        ],
    ),
    (
        "engine_commands",
        "Commands that a thread of the engine took late, or not at all since it has ended",
        "what",
        &[(Some("late"), Counted::CommandLate), (Some("lost"), Counted::CommandLost)],
    ),
    (
        "control_messages",
        "Messages to control that waited for room, or were left out since too many did",
        "what",
        &[(Some("late"), Counted::MessageLate), (Some("lost"), Counted::MessageLost)],
    ),
    (
        "quota_refusals",
        "What was refused to tenants, by the key of their quota",
        "quota",
        &[
            (Some("attaches"), Counted::AttachRefused),
            (Some("joins"), Counted::JoinRefused),
            (Some("operations"), Counted::OperationsRefused),
            (Some("descriptors"), Counted::DescriptorsRefused),
            (Some("landing"), Counted::LandingRefused),
        ],
    ),
    (
        "session_pauses",
        "Waits of tenants' sessions, which took more processor time than `session_percent`",
        "",
        &[(None, Counted::SessionPaused)],
    ),
    ("log_lines_left_out", "Lines about tenants that the log left out", "", &[(None, Counted::LogLine)]),
];

/// How often each happened since the agent's start. Clones count together.
#[derive(Clone, Debug, Default)]
pub struct Counters(Arc<[AtomicU64; Counted::LogLine as usize + 1]>);

impl Counters {
    /// Counts one.
    pub fn add(&self, what: Counted) {
        if let Some(counter) = self.0.get(what as usize) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How often it happened.
    pub fn get(&self, what: Counted) -> u64 {
        self.0.get(what as usize).map_or(0, |counter| counter.load(Ordering::Relaxed))
    }
}
