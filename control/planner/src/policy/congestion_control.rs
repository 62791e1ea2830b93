//! By which TCP congestion control a communicator's links go: each host's own, where no operator decided. No figures favor another yet.

use harmonaize_abi::CongestionControl;
use harmonaize_topology::{HostId, Node, Topology};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Which hosts a link joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RouteClass {
    /// Two of one rack.
    Rack,
    /// Two of different racks.
    Racks,
}

impl RouteClass {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Rack, Self::Racks];

    /// Returns its name: `rack` or `racks`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Rack => "rack",
            Self::Racks => "racks",
        }
    }

    /// Returns the class of the link between two hosts.
    pub fn of(topology: &Topology, one: HostId, other: HostId) -> Self {
        if Rack::of(topology, one) == Rack::of(topology, other) { Self::Rack } else { Self::Racks }
    }
}

/// Where a host stands: in the rack that the topology names. A host without a rack stands beside others without one on the same
/// switches.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Rack<'a> {
    Named(&'a str),
    Below(Vec<Node>),
}

impl<'a> Rack<'a> {
    fn of(topology: &'a Topology, host: HostId) -> Self {
        let named = topology.hosts().get(host.0).and_then(|host| host.rack.as_deref());
        named.map_or_else(|| Self::Below(topology.neighbours(host)), Self::Named)
    }
}

/// An operator's choice for links of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CongestionOverride {
    /// Which links; none: all.
    pub route: Option<RouteClass>,
    /// By which control they go.
    pub control: CongestionControl,
}

impl CongestionOverride {
    /// Whether it is for links of this class.
    pub fn covers(&self, route: RouteClass) -> bool {
        self.route.is_none_or(|own| own == route)
    }
}

/// By which congestion control links of a class go, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CongestionChoice {
    /// The control; none: each host's own.
    pub control: Option<CongestionControl>,
    /// Why.
    pub reason: CongestionReason,
}

impl CongestionChoice {
    /// What an operator decided, where no host lacks it.
    fn decided(topology: &Topology, control: CongestionControl, lacks: &[HostId]) -> Self {
        let Some(first) = lacks.first() else {
            return Self { control: Some(control), reason: CongestionReason::Operator };
        };
        let (host, others) = (topology.node_name(Node::Host(*first)).to_owned(), lacks.len() - 1);
        Self { control: None, reason: CongestionReason::Unavailable { control, host, others } }
    }
}

/// Why links go by a congestion control.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CongestionReason {
    /// Nobody chose another than each host's own.
    HostDefault,
    /// An operator chose it.
    Operator,
    /// An operator chose one that not all of the hosts have.
    Unavailable {
        /// What was chosen.
        control: CongestionControl,
        /// The first host that does not have it.
        host: String,
        /// How many others do not.
        others: usize,
    },
}

impl CongestionReason {
    /// Returns a name for programs that never changes with the text.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::HostDefault => "host_default",
            Self::Operator => "operator",
            Self::Unavailable { .. } => "unavailable",
        }
    }
}

impl fmt::Display for CongestionReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostDefault => f.write_str("nobody chose another"),
            Self::Operator => f.write_str("an operator chose it"),
            Self::Unavailable { control, host, others: 0 } => {
                write!(f, "an operator chose {control}, which {host} does not have")
            }
            Self::Unavailable { control, host, others } => {
                write!(f, "an operator chose {control}, which {host} and {others} more do not have")
            }
        }
    }
}

/// By which congestion control a communicator's links go, for each class that it has links of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CongestionChoices(BTreeMap<RouteClass, CongestionChoice>);

impl CongestionChoices {
    /// Chooses for a communicator over these hosts, of which each has these controls. For a class it is the first of an operator's
    /// choices, if all hosts with such links have it.
    pub fn new(
        topology: &Topology,
        hosts: &[(HostId, &BTreeSet<CongestionControl>)],
        overrides: &[CongestionOverride],
    ) -> Self {
        let mut racks: BTreeMap<Rack<'_>, Vec<&(HostId, &BTreeSet<CongestionControl>)>> = BTreeMap::new();
        for host in hosts {
            racks.entry(Rack::of(topology, host.0)).or_default().push(host);
        }
        let classes = RouteClass::ALL.into_iter().filter_map(|route| {
            let linked = |hosts: &&Vec<_>| match route {
                RouteClass::Rack => hosts.len() > 1,
                RouteClass::Racks => racks.len() > 1,
            };
            let mut of_class = racks.values().filter(linked).flatten().peekable();
            of_class.peek()?;
            let Some(CongestionOverride { control, .. }) = overrides.iter().find(|one| one.covers(route))
            else {
                return Some((
                    route,
                    CongestionChoice { control: None, reason: CongestionReason::HostDefault },
                ));
            };
            let lacks = of_class.filter(|(_, controls)| !controls.contains(control)).map(|(host, _)| *host);
            Some((route, CongestionChoice::decided(topology, *control, &lacks.collect::<Vec<_>>())))
        });
        Self(classes.collect())
    }

    /// Returns by which control links of a class go; none: each host's own.
    pub fn control(&self, route: RouteClass) -> Option<CongestionControl> {
        self.0.get(&route)?.control
    }

    /// Returns the choice for each class that there are links of.
    pub fn iter(&self) -> impl Iterator<Item = (RouteClass, &CongestionChoice)> {
        self.0.iter().map(|(route, choice)| (*route, choice))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_topology::text::star_text;

    /// Hosts 0 and 1 in a rack, 2 in another, 3 and 4 in none, all on one switch.
    fn topology() -> Topology {
        let mut text = star_text(5, "1Gbit/s", "0us");
        for (host, rack) in [("h0", "r0"), ("h1", "r0"), ("h2", "r1")] {
            text =
                text.replace(&format!("name = \"{host}\""), &format!("name = \"{host}\"\nrack = \"{rack}\""));
        }
        Topology::parse(&text).unwrap()
    }

    fn control(name: &str) -> CongestionControl {
        name.parse().unwrap()
    }

    fn controls(names: &[&str]) -> BTreeSet<CongestionControl> {
        names.iter().map(|name| control(name)).collect()
    }

    fn over(route: Option<RouteClass>, name: &str) -> CongestionOverride {
        CongestionOverride { route, control: control(name) }
    }

    fn choices(hosts: &[(usize, &[&str])], overrides: &[CongestionOverride]) -> CongestionChoices {
        let hosts: Vec<_> = hosts.iter().map(|(host, names)| (HostId(*host), controls(names))).collect();
        let hosts: Vec<_> = hosts.iter().map(|(host, controls)| (*host, controls)).collect();
        CongestionChoices::new(&topology(), &hosts, overrides)
    }

    fn found(choices: &CongestionChoices) -> Vec<(&'static str, Option<CongestionControl>, &'static str)> {
        choices.iter().map(|(route, one)| (route.as_str(), one.control, one.reason.code())).collect()
    }

    #[test]
    fn links_go_by_the_host_s_own_unless_an_operator_decides() {
        let hosts: [(usize, &[&str]); 3] =
            [(0, &["bbr", "cubic"]), (1, &["bbr", "cubic"]), (2, &["bbr", "cubic"])];
        let own = choices(&hosts, &[]);
        assert_eq!(found(&own), [("rack", None, "host_default"), ("racks", None, "host_default")]);
        let both = choices(&hosts, &[over(Some(RouteClass::Racks), "bbr"), over(None, "cubic")]);
        assert_eq!(
            found(&both),
            [("rack", Some(control("cubic")), "operator"), ("racks", Some(control("bbr")), "operator")],
            "the first that covers a class decides"
        );
        let far = choices(&hosts, &[over(Some(RouteClass::Racks), "bbr")]);
        assert_eq!(far.control(RouteClass::Rack), None);
        assert_eq!(far.control(RouteClass::Racks), Some(control("bbr")));
    }

    #[test]
    fn a_control_that_a_host_lacks_is_not_chosen_there() {
        let hosts: [(usize, &[&str]); 3] = [(0, &["dctcp", "cubic"]), (1, &["dctcp"]), (2, &["cubic"])];
        let found = choices(&hosts, &[over(None, "dctcp")]);
        assert_eq!(
            found.control(RouteClass::Rack),
            Some(control("dctcp")),
            "the host alone in its rack has no such link"
        );
        let far = found.iter().find(|(route, _)| *route == RouteClass::Racks).unwrap().1;
        assert_eq!((far.control, far.reason.code()), (None, "unavailable"));
        assert_eq!(far.reason.to_string(), "an operator chose dctcp, which h2 does not have");
        let nobody = choices(&[(0, &[]), (1, &[])], &[over(None, "bbr")]);
        let why: Vec<String> = nobody.iter().map(|(_, one)| one.reason.to_string()).collect();
        assert_eq!(why, ["an operator chose bbr, which h0 and 1 more do not have"]);
    }

    #[test]
    fn classes_without_links_have_no_choice() {
        assert_eq!(found(&choices(&[(0, &[])], &[over(None, "bbr")])), []);
        assert_eq!(found(&choices(&[(0, &[]), (1, &[])], &[])), [("rack", None, "host_default")]);
        assert_eq!(found(&choices(&[(0, &[]), (2, &[])], &[])), [("racks", None, "host_default")]);
    }

    #[test]
    fn hosts_without_a_rack_share_one_below_the_same_switch() {
        let topology = topology();
        let of = |one, other| RouteClass::of(&topology, HostId(one), HostId(other));
        assert_eq!([of(0, 1), of(3, 4)], [RouteClass::Rack; 2]);
        assert_eq!([of(0, 2), of(0, 3), of(2, 4)], [RouteClass::Racks; 3]);
    }
}
