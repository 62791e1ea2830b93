//! By which TCP congestion control links go. It is each host's own, or an operator's choice by tenant and route, where hosts
//! have it.

use super::topology::leaf_spine;
use super::world::{World, hello, join_of, settings_of};
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1;
use harmonaize_planner::{CongestionOverride, RouteClass};
use harmonaize_server::state::{SessionId, Settings, TenantCongestion};

fn over(tenant: Option<&str>, route: Option<RouteClass>, name: &str) -> TenantCongestion {
    let choice = CongestionOverride { route, control: name.parse().unwrap() };
    TenantCongestion { tenant: tenant.map(str::to_owned), choice }
}

/// Hosts 0 and 1 in a rack, 2 in another.
fn settings(congestion_controls: Vec<TenantCongestion>) -> Settings {
    Settings { congestion_controls, ..settings_of(&leaf_spine(&[0, 0, 1], 1, || "50us".to_owned())) }
}

/// Control by these settings, and agents that say that their connections can have this.
fn world(settings: Settings, controls: &[&[&str]; 3]) -> (World, Vec<SessionId>) {
    let mut world = World::new(settings, 3);
    let sessions = world.connect((0..).zip(controls).map(|(host, controls)| {
        let congestion_controls = controls.iter().map(|&name| name.to_owned()).collect();
        let capabilities = v1::Capabilities { congestion_controls, ..v1::Capabilities::default() };
        v1::Hello { capabilities: Some(capabilities), ..hello(host, vec![]) }
    }));
    (world, sessions)
}

/// By participant and peer, as recipes say.
fn instructed(recipes: &[v1::Recipe]) -> Vec<Vec<&str>> {
    let mut instructed = Vec::new();
    for recipe in recipes {
        instructed.push(recipe.peers.iter().map(|peer| peer.congestion_control.as_str()).collect());
    }
    instructed
}

/// Route, name and code of the reason, as operators see them.
fn shown(world: &World, id: u64) -> Vec<[String; 3]> {
    let plan = world.state.queries(world.now).plans(CommunicatorId(id)).unwrap().plans.remove(0);
    plan.congestion_controls.into_iter().map(|one| [one.route, one.name, one.reason_code]).collect()
}

const BOTH: &[&str] = &["bbr", "dctcp"];

#[test]
fn links_have_the_host_s_own_where_nobody_chose() {
    let (mut world, sessions) = world(settings(Vec::new()), &[BOTH; 3]);
    let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
    assert_eq!(instructed(&recipes), [[""; 2]; 3]);
    world.prepare(&sessions, recipes[0].communicator, 1);
    let own = |route: &str| [route, "", "host_default"].map(str::to_owned);
    assert_eq!(shown(&world, recipes[0].communicator), [own("rack"), own("racks")]);
}

#[test]
fn an_operator_chooses_by_tenant_and_route() {
    let chosen = vec![over(None, None, "bbr"), over(Some("a"), Some(RouteClass::Rack), "dctcp")];
    let (mut world, sessions) = world(settings(chosen), &[BOTH; 3]);
    let own = world.join_all(&sessions, &join_of("a", "world", 0, 0));
    assert_eq!(instructed(&own), [["dctcp", "bbr"], ["dctcp", "bbr"], ["bbr", "bbr"]]);
    world.prepare(&sessions, own[0].communicator, 1);
    let line = |route: &str, name: &str| [route, name, "operator"].map(str::to_owned);
    assert_eq!(shown(&world, own[0].communicator), [line("rack", "dctcp"), line("racks", "bbr")]);
    let everybody = world.join_all(&sessions, &join_of("b", "world", 0, 0));
    assert_eq!(instructed(&everybody), [["bbr"; 2]; 3]);
}

#[test]
fn an_older_agents_links_keep_its_hosts_own() {
    let (mut world, sessions) = world(settings(vec![over(None, None, "bbr")]), &[BOTH, BOTH, &[]]);
    let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
    assert_eq!(instructed(&recipes), [["bbr", ""], ["bbr", ""], ["", ""]]);
    world.prepare(&sessions, recipes[0].communicator, 1);
    let plan = world.state.queries(world.now).plans(CommunicatorId(recipes[0].communicator)).unwrap();
    let far = &plan.plans[0].congestion_controls[1];
    assert_eq!(
        (far.reason.as_str(), far.reason_code.as_str()),
        ("an operator chose bbr, which h2 does not have", "unavailable")
    );
}

#[test]
fn a_reread_choice_holds_from_the_next_epoch() {
    let (mut world, sessions) = world(settings(Vec::new()), &[BOTH; 3]);
    let id = world.form(&sessions, "world");
    world.state.configure(world.now, settings(vec![over(None, None, "bbr")])).unwrap();
    world.run_until_quiet();
    assert!(world.is_quiet(&sessions));
    let epoch = world.reorder(id, &["h0", "h2", "h1"]).unwrap();
    let recipes = world.recipes(&sessions);
    assert_eq!(instructed(&recipes), [["bbr"; 2]; 3]);
    assert!(
        recipes.iter().flat_map(|recipe| &recipe.peers).any(|peer| peer.reused),
        "also of links that go on"
    );
    world.prepare(&sessions, id, epoch);
}

#[test]
fn names_that_are_none_are_not_kept() {
    let odd: &[&str] = &["b b r", "", "sixteen-letters-", "bbr\n"];
    let (mut world, sessions) = world(settings(vec![over(None, None, "bbr")]), &[odd; 3]);
    assert_eq!(instructed(&world.join_all(&sessions, &join_of("a", "world", 0, 0))), [[""; 2]; 3]);
}
