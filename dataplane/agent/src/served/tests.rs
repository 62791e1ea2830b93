//! Which tenants of control's are served, and what a changed configuration changes.

use super::*;
use crate::counters::Counters;
use std::path::Path;
use tokio::sync::mpsc;

fn bounds(sockets: &Path) -> ControlTenants {
    let quota = Quota { arena_bytes: 1 << 30, attachments: 8, ..Quota::default() };
    ControlTenants { sockets: sockets.to_owned(), tenants: 2, least_uid: 1000, quota }
}

fn tenant(name: &str, uid: u32) -> v1::AddedTenant {
    v1::AddedTenant { name: name.to_owned(), uids: vec![uid], quota: None }
}

#[test]
fn the_agents_operator_has_the_last_word() {
    type Is = fn(&TenantRefused) -> bool;
    let bounds = bounds(Path::new("/run/t"));
    let own = within(&bounds, &tenant("own", 2000)).unwrap();
    let refusal = |bounds: Option<&ControlTenants>, told: v1::AddedTenant| {
        let [(_, rules)] = admitted(std::slice::from_ref(&own), bounds, &[told]).try_into().unwrap();
        rules.unwrap_err()
    };
    let quota = |quota: v1::TenantQuota| v1::AddedTenant { quota: Some(quota), ..tenant("b", 2000) };
    assert!(matches!(refusal(None, tenant("b", 2000)), TenantRefused::NoTable));
    let cases: [(v1::AddedTenant, Is); 7] = [
        (tenant("b", 0), |why| matches!(why, TenantRefused::User { uid: 0, least: 1000 })),
        (tenant("b", 999), |why| matches!(why, TenantRefused::User { uid: 999, least: 1000 })),
        (tenant("a/b", 2000), |why| matches!(why, TenantRefused::Name)),
        (v1::AddedTenant { uids: Vec::new(), ..tenant("b", 0) }, |why| matches!(why, TenantRefused::NoUser)),
        (quota(v1::TenantQuota { arena_bytes: 2 << 30, ..Default::default() }), |why| {
            why.to_string().starts_with("2GiB of memory is more than 1GiB")
                && matches!(why, TenantRefused::Arena { .. })
        }),
        (quota(v1::TenantQuota { attachments: 9, ..Default::default() }), |why| {
            matches!(why, TenantRefused::Count { key: "attachments", requested: 9, most: 8 })
        }),
        (
            quota(v1::TenantQuota { operation_timeout_ns: u64::MAX, ..Default::default() }),
            |why| matches!(why, TenantRefused::Timeout { most, .. } if most.as_secs() == 3600),
        ),
    ];
    for (told, expected) in cases {
        let why = refusal(Some(&bounds), told);
        assert!(expected(&why), "{why}");
    }
    // The configuration's own tenant stays as it is, twice the same is once, and no more than two are served.
    let told = ["own", "b", "b", "c", "d"].map(|name| tenant(name, 3000));
    let admitted = admitted(&[own], Some(&bounds), &told);
    let names: Vec<(&str, bool)> =
        admitted.iter().map(|(name, rules)| (name.as_str(), rules.is_ok())).collect();
    assert_eq!(names, [("b", true), ("c", true), ("d", false)]);
    let rules = admitted[0].1.as_ref().unwrap();
    assert_eq!(rules.quota, bounds.quota);
    assert_eq!(rules.socket.as_ref().unwrap().path, Path::new("/run/t/b.sock"));
}

#[tokio::test]
async fn files_and_control_change_what_is_served_and_nothing_by_halves() {
    let folder = tempfile::tempdir().unwrap();
    let uid = rustix::process::getuid().as_raw();
    let socket = |name: &str| folder.path().join(format!("{name}.sock"));
    let table =
        |name: &str| format!("[[tenant]]\nname = \"{name}\"\nsocket = {:?}\nuids = [{uid}]\n", socket(name));
    let head =
        "host = \"h0\"\ncontrol = \"127.0.0.1:7000\"\nlisten = \"127.0.0.1:0\"\ninsecure_loopback = true\n";
    let added = format!("[control_tenants]\nsockets = {:?}\n", folder.path());
    let file = folder.path().join("agent.toml");
    let write = |text: String| std::fs::write(&file, text).unwrap();
    write(format!("{head}{}", table("a")));
    let config = Config::read(&file).unwrap();
    let server = SessionServer::bind(None, mpsc::channel(1).0, Counters::default()).unwrap();
    let mut tenants = Tenants::serve(server, config.tenants, config.control_tenants, config.source).unwrap();
    let there = |names: &[&str]| {
        ["a", "b", "c"].map(|name| socket(name).exists()) == ["a", "b", "c"].map(|name| names.contains(&name))
    };
    assert!(there(&["a"]) && tenants.poll().is_none());

    // Who has no place says why, and does not keep others from theirs.
    let told = vec![tenant("c", 12345)];
    let served = tenants.set_added(told.clone()).tenants;
    assert!(served[1].added && served[1].refused.contains("[control_tenants]"), "{served:?}");
    write(format!("{head}{}{}{added}", table("a"), table("b")));
    assert!(tenants.poll().is_none(), "someone may be writing still");
    let served = tenants.poll().unwrap().tenants;
    assert!(there(&["a", "b", "c"]) || uid != 0, "{served:?}");
    assert_eq!(served.iter().map(|tenant| tenant.name.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
    std::fs::remove_dir_all(folder.path().join("none")).ok();

    // Refused as a whole: a key that must stay, a table that is wrong, a socket that cannot be had.
    for wrong in [
        format!("{}{}", head.replace("h0", "h1"), table("c")),
        format!("{head}{}nmae = 1\n", table("c")),
        format!("{head}{}", table("c").replace("c.sock", "none/c.sock")),
    ] {
        write(wrong);
        assert!(tenants.reload().is_none());
        assert!(socket("a").exists() && socket("b").exists());
    }
    write(format!("{head}{}", table("b")));
    tenants.reload().unwrap();
    assert!(there(&["b"]));
    tenants.stop();
    assert!(there(&[]));
}
