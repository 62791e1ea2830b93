//! Messages of agents that name a tenant. Whoever does not let a host's agent speak for it, the file or an operator, the answer is the
//! same.

use crate::state::refusal::RequestRefusal;
use harmonaize_abi::session::{RecallReason, RunnerOrder, WorkerState};
use harmonaize_api::v1::{self, JoinRefusedKind, from_agent, to_agent};

/// How long a worker there has to end. It is less than its runner may be silent, after which its host may get others' workers.
const NOTICE_NS: u64 = 10_000_000_000;

/// The answer to a runner whose tenant may not be there. A worker that runs is to end, and without one it is refused. Nothing else of
/// the runner is taken in, so its job goes on without it.
pub(crate) fn turn_away(
    message: &v1::AwaitOrder,
    refusal: RequestRefusal,
) -> Result<RunnerOrder, RequestRefusal> {
    match message.report().state {
        WorkerState::Running { place, stopping: false } => {
            let (generation, reason) = (place.generation, RecallReason::Unknown);
            Ok(RunnerOrder::Recall { generation, reason, notice_ns: NOTICE_NS })
        }
        _ => Err(refusal),
    }
}

/// Returns which tenant a message names, what it asks, and the refusal to send. The refusal is for an agent that may not speak for that
/// tenant. There is none for all other messages: they name a communicator, and are for its members alone.
pub(crate) fn for_a_tenant(message: &from_agent::Message) -> Option<(&str, &'static str, to_agent::Message)> {
    use from_agent::Message;
    let why = RequestRefusal::Elsewhere;
    Some(match message {
        Message::Join(asked) => {
            let kind = JoinRefusedKind::UnknownTenant.into();
            let refused =
                v1::JoinRefused { request: asked.request, kind, text: why.to_string(), ranks: Vec::new() };
            (&asked.tenant, "join", to_agent::Message::JoinRefused(refused))
        }
        Message::ReadEvents(asked) => {
            let answer =
                v1::EventsRead { request: asked.request, refused: why.to_string(), ..Default::default() };
            (&asked.tenant, "events", to_agent::Message::EventsRead(answer))
        }
        Message::Negotiate(asked) => {
            let answer =
                v1::Negotiated { request: asked.request, refused: why.to_string(), ..Default::default() };
            (&asked.tenant, "negotiate", to_agent::Message::Negotiated(answer))
        }
        Message::BeginIteration(asked) => {
            let answer = v1::IterationChoice::answer(asked.request, Err(why.into()));
            (&asked.tenant, "begin an iteration", to_agent::Message::IterationChoice(answer))
        }
        Message::Hint(asked) => {
            let answer = v1::Hinted::answer(asked.request, Err(why.into()));
            (&asked.tenant, "hint", to_agent::Message::Hinted(answer))
        }
        Message::AwaitOrder(asked) => {
            let answer = turn_away(asked, why).map(Into::into).map_err(|why| why.to_string());
            let answer = v1::RunnerOrder::answer(asked.request, answer);
            (&asked.tenant, "run a job", to_agent::Message::RunnerOrder(answer))
        }
        Message::SetBid(asked) => {
            let answer = v1::BidSet::answer(asked.request, Err(why.to_string()));
            (&asked.tenant, "bid", to_agent::Message::BidSet(answer))
        }
        Message::Hello(_)
        | Message::Leave(_)
        | Message::Prepared(_)
        | Message::PrepareFailed(_)
        | Message::Switched(_)
        | Message::Failed(_)
        | Message::Closed(_)
        | Message::Report(_)
        | Message::Telemetry(_)
        | Message::CongestionReport(_)
        | Message::PathsTraced(_)
        | Message::PathProbed(_)
        | Message::SetBudget(_)
        | Message::AggregationGranted(_)
        | Message::Aggregator(_)
        | Message::RequestSlot(_)
        | Message::ReleaseSlot(_)
        | Message::TenantsServed(_)
        | Message::CancelRead(_)
        | Message::CancelOrder(_)
        | Message::LinksOverTcp(_) => return None,
    })
}
