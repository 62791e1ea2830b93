//! Which flows and findings a filter takes.

use crate::v1::{Congestion, CongestionCause, Finding, Flow, RowFilter, Straggler, finding};
use harmonaize_abi::StragglerCause;

/// The causes that a filter may name.
pub const CAUSES: &[&str] = &["own", "cross_traffic", "unknown", "compute", "network"];

fn any<T: PartialEq>(wanted: &[T], is: impl Fn(&T) -> bool) -> bool {
    wanted.is_empty() || wanted.iter().any(is)
}

impl Flow {
    /// When its last packet passed, either way, in nanoseconds since 1970; 0 where none did.
    pub fn last_packet_ns(&self) -> u64 {
        self.egress.iter().chain(&self.ingress).map(|way| way.last_ns).max().unwrap_or(0)
    }
}

impl RowFilter {
    /// Whether a flow is wanted.
    pub fn matches_flow(&self, flow: &Flow) -> bool {
        let owner = flow.owner.as_ref();
        let cause = if owner.is_some() { "own" } else { "cross_traffic" };
        let ways = || flow.egress.iter().chain(&flow.ingress);
        let first_ns = ways().map(|way| way.first_ns).filter(|first| *first > 0).min().unwrap_or(0);
        (self.interface.is_empty() || self.interface == flow.interface)
            && any(&self.tenants, |tenant| owner.is_some_and(|owner| owner.tenant == *tenant))
            && any(&self.communicators, |id| owner.is_some_and(|owner| owner.communicator == *id))
            && any(&self.peers, |peer| flow.remote == *peer)
            && any(&self.causes, |wanted| wanted == cause)
            && flow.last_packet_ns() >= self.since_ns
            && (self.until_ns == 0 || first_ns <= self.until_ns)
    }

    /// Whether a finding is wanted. How many were lost is, whatever the filter.
    pub fn matches_finding(&self, found: &Finding) -> bool {
        let (communicator, peer, cause, interface) = match &found.finding {
            Some(finding::Finding::Operation(one)) => (Some(one.communicator), None, None, None),
            Some(finding::Finding::Phase(one)) => (None, Some(one.delayed_host.as_str()), None, None),
            Some(finding::Finding::Congestion(one)) => {
                (None, one.path.split(' ').next(), Some(congestion_cause(one)), Some(&one.interface))
            }
            Some(finding::Finding::Straggler(one)) => {
                (Some(one.communicator), Some(one.host.as_str()), Some(straggler_cause(one)), None)
            }
            Some(finding::Finding::Lost(_)) | None => return true,
        };
        any(&self.communicators, |id| communicator == Some(*id))
            && any(&self.peers, |wanted| peer == Some(wanted.as_str()))
            && any(&self.causes, |wanted| cause == Some(wanted.as_str()))
            && (self.interface.is_empty() || interface == Some(&self.interface))
            && found.time_ns >= self.since_ns
            && (self.until_ns == 0 || found.time_ns <= self.until_ns)
    }
}

fn congestion_cause(one: &Congestion) -> &'static str {
    match one.cause() {
        CongestionCause::Own => "own",
        CongestionCause::CrossTraffic => "cross_traffic",
        CongestionCause::Unspecified => "unknown",
    }
}

fn straggler_cause(one: &Straggler) -> &'static str {
    one.cause().specified().map_or("unknown", StragglerCause::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::{FlowDirection, FlowOwner, Operation};

    fn flow() -> Flow {
        let egress = FlowDirection { first_ns: 10, last_ns: 20, ..FlowDirection::default() };
        let owner = FlowOwner { tenant: "a".to_owned(), communicator: 7, ..FlowOwner::default() };
        Flow {
            interface: "eth0".to_owned(),
            remote: "10.0.0.2".to_owned(),
            egress: Some(egress),
            owner: Some(owner),
            ..Flow::default()
        }
    }

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn each_field_takes_or_leaves_a_flow() {
        let all = RowFilter::default;
        let takes = [
            all(),
            RowFilter { tenants: texts(&["b", "a"]), ..all() },
            RowFilter { communicators: vec![7], causes: texts(&["own"]), ..all() },
            RowFilter { peers: texts(&["10.0.0.2"]), interface: "eth0".to_owned(), ..all() },
            RowFilter { since_ns: 20, until_ns: 10, ..all() },
        ];
        let leaves = [
            RowFilter { tenants: texts(&["b"]), ..all() },
            RowFilter { communicators: vec![8], ..all() },
            RowFilter { causes: texts(&["cross_traffic"]), ..all() },
            RowFilter { peers: texts(&["10.0.0.3"]), ..all() },
            RowFilter { interface: "eth1".to_owned(), ..all() },
            RowFilter { since_ns: 21, ..all() },
            RowFilter { until_ns: 9, ..all() },
        ];
        assert!(takes.iter().all(|filter| filter.matches_flow(&flow())));
        assert!(!leaves.iter().any(|filter| filter.matches_flow(&flow())));
    }

    #[test]
    fn each_field_takes_or_leaves_a_finding() {
        let found = |finding| Finding { time_ns: 10, finding: Some(finding) };
        let congestion = Congestion {
            path: "10.0.0.2 port 49152".to_owned(),
            interface: "eth0".to_owned(),
            cause: CongestionCause::CrossTraffic.into(),
            ..Congestion::default()
        };
        let congestion = found(finding::Finding::Congestion(congestion));
        let operation =
            found(finding::Finding::Operation(Operation { communicator: 7, ..Operation::default() }));
        let all = RowFilter::default;
        let cases = [
            (RowFilter { peers: texts(&["10.0.0.2"]), ..all() }, true, false),
            (RowFilter { causes: texts(&["cross_traffic"]), ..all() }, true, false),
            (RowFilter { communicators: vec![7], ..all() }, false, true),
            (RowFilter { since_ns: 11, ..all() }, false, false),
            (RowFilter { until_ns: 10, ..all() }, true, true),
        ];
        for (filter, first, second) in cases {
            assert_eq!(
                (filter.matches_finding(&congestion), filter.matches_finding(&operation)),
                (first, second),
                "{filter:?}"
            );
        }
    }
}
