//! Facts as lines of the operator's log.

use crate::state::Fact;
use harmonaize_abi::CommunicatorId;
use harmonaize_api::communicator_text;

/// Writes a fact.
pub(crate) fn log(fact: &Fact) {
    let id = |id: CommunicatorId| communicator_text(id.0);
    match fact {
        Fact::AgentConnected { host, listen } => tracing::info!(%host, %listen, "agent connected"),
        Fact::AgentGone { host, communicators, lease } => {
            tracing::warn!(%host, communicators, ?lease, "agent without a session; its communicators go on");
        }
        Fact::AgentLacks { host, what } => tracing::warn!(%host, %what, "agent lacks abilities"),
        Fact::UnknownHop { host, address } => {
            tracing::warn!(%host, %address, "no switch of the topology has the address of a hop: ways over it stay unknown");
        }
        Fact::TenantElsewhere { host, tenant, what } => {
            tracing::warn!(target: "audit", who = %host, what, %tenant, "not for this host's agent");
        }
        Fact::SessionRefused { reason } => tracing::warn!(%reason, "session refused"),
        Fact::Formed { communicator, tenant, name, ranks, hosts } => {
            let (communicator, hosts) = (id(*communicator), hosts.join(","));
            tracing::info!(%tenant, %communicator, %name, ranks, %hosts, "communicator formed");
        }
        Fact::EpochCurrent { communicator, tenant, name, epoch, reason } => {
            tracing::info!(%tenant, communicator = %id(*communicator), %name, %epoch, reason_code = reason.code(), %reason, "epoch in use");
        }
        Fact::EpochAbandoned { communicator, tenant, name, epoch, why } => {
            tracing::warn!(%tenant, communicator = %id(*communicator), %name, %epoch, %why, "epoch given up");
        }
        Fact::OrderFreed { communicator, tenant, name } => {
            tracing::info!(%tenant, communicator = %id(*communicator), %name, "control chooses the order again");
        }
        Fact::Closed { communicator, tenant, name } => {
            tracing::info!(%tenant, communicator = %id(*communicator), %name, "communicator closed");
        }
        Fact::TelemetryRefused { host, count, why } => {
            tracing::warn!(%host, count, %why, "what an agent said was refused or dropped");
        }
        Fact::Decided { decision, trigger, reason, changes } => {
            let changes: Vec<String> = changes
                .iter()
                .map(|(communicator, epoch)| format!("{}:{epoch}", id(*communicator)))
                .collect();
            tracing::info!(decision, %trigger, reason_code = reason.code(), %reason, changes = %changes.join(","), "new plan");
        }
        Fact::PlanUnfit { count, why } => tracing::error!(count, %why, "a plan did not pass the check"),
        Fact::AggregatorConnected { name, address } => {
            tracing::info!(%name, %address, "aggregator connected");
        }
        Fact::AggregatorGone { name } => tracing::warn!(%name, "an aggregator's session ended"),
        Fact::GrantRefused { name, communicator, why } => {
            tracing::warn!(%name, communicator = %id(*communicator), %why, "an aggregator refuses a communicator");
        }
        Fact::LossLearned { communicator, codec } => {
            tracing::debug!(communicator = %id(*communicator), codec, "operations lose or send otherwise than was known");
        }
        Fact::TakesTurns { communicator, tenant, name, with, reason } => {
            let with: Vec<String> = with.iter().map(|other| id(*other).to_string()).collect();
            tracing::info!(%tenant, communicator = %id(*communicator), %name, with = %with.join(","), reason_code = reason.code(), %reason, "takes turns");
        }
        Fact::TurnsOver { communicator, tenant, name, why } => {
            tracing::info!(%tenant, communicator = %id(*communicator), %name, %why, "takes no turns any more");
        }
        Fact::Hinted { communicator, tenant, name, hints } => {
            tracing::info!(%tenant, communicator = %id(*communicator), %name, %hints, "a tenant says what it expects");
        }
        Fact::HintsDropped { communicator, tenant, name, hints } => {
            tracing::info!(%tenant, communicator = %id(*communicator), %name, %hints, "not as the tenant expected");
        }
        Fact::Agreed { communicator, tenant, name, number, promise } => {
            let communicator = id(*communicator);
            tracing::info!(%tenant, %communicator, %name, number, %promise, "agreed on with a tenant");
        }
        Fact::AgreementLost { communicator, tenant, name, lost } => {
            let communicator = id(*communicator);
            tracing::warn!(%tenant, %communicator, %name, ?lost, "an agreement ended when its communicator went on as another");
        }
        Fact::AgreementBroken { communicator, tenant, name, number, broken } if broken.is_empty() => {
            let communicator = id(*communicator);
            tracing::info!(%tenant, %communicator, %name, number, "an agreement is kept again");
        }
        Fact::AgreementBroken { communicator, tenant, name, number, broken } => {
            let (communicator, broken) = (id(*communicator), broken.join(","));
            tracing::warn!(%tenant, %communicator, %name, number, %broken, "an agreement is not kept");
        }
        Fact::Kept { communicator, tenant, name, within } => {
            tracing::info!(%tenant, communicator = %id(*communicator), %name, ?within, "kept for its members to regroup");
        }
        Fact::NotRegrouped { communicator, tenant, name, within } => {
            tracing::warn!(%tenant, communicator = %id(*communicator), %name, ?within, "its members have not regrouped in time");
        }
        Fact::JobStarted { tenant, name, generation, hosts, why } => {
            tracing::info!(%tenant, job = %name, generation, hosts = %hosts.join(","), %why, "job has workers");
        }
        Fact::JobResized { tenant, name, generation, hosts, why } => {
            tracing::info!(%tenant, job = %name, generation, hosts = %hosts.join(","), %why, "job is resized");
        }
        Fact::JobRecalled { tenant, name, generation, reason } => {
            tracing::info!(%tenant, job = %name, generation, ?reason, "job's workers are to end");
        }
        Fact::JobOver { tenant, name, generation, succeeded } => {
            tracing::info!(%tenant, job = %name, generation, succeeded, "job is over");
        }
        Fact::JobsUndecided { why } => tracing::error!(%why, "no round of jobs"),
        Fact::Ended { communicator, tenant, name, kind, ranks, detail } => {
            let communicator = id(*communicator);
            tracing::warn!(%tenant, %communicator, %name, ?kind, ?ranks, %detail, "communicator ended");
        }
    }
}
