//! Fabrics and jobs for tests.

use super::super::*;
use harmonaize_abi::CommunicatorId;
use harmonaize_topology::DirectedLink;
use harmonaize_topology::Topology;

/// A rate of so many Mbit/s.
pub(super) fn mbit(rate: u64) -> Rate {
    Rate(rate * 1_000_000)
}

/// Leaves with `hosts` hosts each (h0, h1, .. on leaf0 first), every leaf joined to every spine; rates in Mbit/s.
pub(super) fn leaf_spine(leaves: usize, spines: usize, hosts: usize, access: u64, up: u64) -> Topology {
    let mut text = String::new();
    for spine in 0..spines {
        text += &format!("[[switch]]\nname = \"spine{spine}\"\nkind = \"spine\"\n");
    }
    for leaf in 0..leaves {
        text += &format!("[[switch]]\nname = \"leaf{leaf}\"\n");
        for spine in 0..spines {
            text +=
                &format!("[[link]]\nfrom = \"leaf{leaf}\"\nto = \"spine{spine}\"\nrate = \"{up}Mbit/s\"\n");
        }
        for host in leaf * hosts..(leaf + 1) * hosts {
            text += &format!("[[host]]\nname = \"h{host}\"\nrack = \"r{leaf}\"\n");
            text +=
                &format!("[[link]]\nfrom = \"h{host}\"\nto = \"leaf{leaf}\"\nrate = \"{access}Mbit/s\"\n");
        }
    }
    Topology::parse(&text).unwrap()
}

/// The directed link between two nodes by name.
pub(super) fn link(topology: &Topology, from: &str, to: &str) -> DirectedLink {
    let name = format!("{from} -> {to}");
    let both = (0..topology.links().len()).flat_map(|link| {
        [true, false].map(|forward| DirectedLink { link: harmonaize_topology::LinkId(link), forward })
    });
    both.into_iter()
        .find(|link| topology.link_name(*link) == name)
        .unwrap_or_else(|| panic!("no link {name}"))
}

/// A job that forms.
pub(super) fn job(communicator: u64, hosts: &[usize], connections: u32) -> Job {
    Job {
        communicator: CommunicatorId(communicator),
        hosts: hosts.iter().map(|host| HostId(*host)).collect(),
        connections,
        weight: 1,
        guaranteed: Rate(0),
        rate_limit: None,
        operation: Bytes(64 << 20),
        iteration_pattern: None,
        current: None,
        movable: true,
    }
}

/// The jobs as they run after a plan.
pub(super) fn run(jobs: &[Job], plan: &Plan) -> Vec<Job> {
    let each = jobs.iter().zip(&plan.assignments);
    let running = each.map(|(job, assignment)| {
        let recent = job.current.as_ref().map_or(0, |current| current.recent_changes);
        let current = Current {
            order: assignment.order.clone(),
            edges: assignment.edges.clone(),
            recent_changes: recent + u32::from(job.current.is_some() && assignment.changed),
        };
        Job { current: Some(current), ..job.clone() }
    });
    running.collect()
}

pub(super) fn request<'a>(
    topology: &'a Topology,
    conditions: &'a Conditions,
    jobs: &'a [Job],
) -> Request<'a> {
    Request { topology, conditions, jobs, routes: Routes::All, policy: Policy::default() }
}

/// Plans, and has the plan checked.
pub(super) fn planned(request: &Request<'_>) -> Plan {
    let plan = plan(request);
    assert_eq!(check(request, &plan), Ok(()), "{plan:#?}");
    plan
}

/// What each job sends, in Mbit/s.
pub(super) fn shares(plan: &Plan) -> Vec<u64> {
    plan.assignments.iter().map(|part| part.share.0 / 1_000_000).collect()
}

/// What each job is held to, in Mbit/s.
pub(super) fn limits(plan: &Plan) -> Vec<Option<u64>> {
    plan.assignments.iter().map(|part| part.rate_limit.map(|pace| pace.0 / 1_000_000)).collect()
}

/// How many connections cross a switch, each way of a pair counted.
pub(super) fn crossing(topology: &Topology, assignment: &Assignment, switch: &str) -> usize {
    let switch = topology.switch(switch).unwrap();
    let paths = assignment.edges.iter().flat_map(|hop| &hop.paths);
    paths.filter(|path| topology.switches_of(path).contains(&switch)).count()
}
