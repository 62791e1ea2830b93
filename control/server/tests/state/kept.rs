//! What is kept of communicators that failed, over restarts of control. At whatever moment control died, members go on as was
//! agreed on.

use super::agreements::{agreed, formed};
use super::fabric::{Fabric, MS, two_by_two};
use super::policies::{failed, much_is_free, turned_away, with, within};
use super::world::{SECOND, settings_of};
use harmonaize_abi::session::OnFailure;
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::{self, JoinRefusedKind, from_agent};
use harmonaize_server::state::Controller;
use harmonaize_server::state::testing::Testing as _;
use harmonaize_store::Stored;

/// Control as it starts on what was stored, with the same clock.
fn again(mut stored: Stored) -> Controller {
    stored.boot = Some(stored.next_boot(77));
    let mut state = Controller::new(settings_of(&two_by_two()), [9; 32]);
    state.restore(stored, Nanos(0));
    state
}

/// Control dies and starts again; agents come back with what runs.
fn restart(fabric: &mut Fabric) {
    let running: Vec<u64> = fabric.ids().into_iter().collect();
    fabric.restarted(again(fabric.tenants.stored.clone()), &running);
    fabric.run(SECOND * 2);
}

/// The members on hosts 0 and 4 want to go on; the communicator that comes of it.
fn go_on(fabric: &mut Fabric, id: u64) -> u64 {
    let before = fabric.ids();
    fabric.regroup(0, "a", "c0", (id, 0));
    assert_eq!(fabric.ids(), before, "the other is there still, and is waited for");
    fabric.regroup(4, "a", "c0", (id, 1));
    *fabric.ids().difference(&before).next().expect("it went on")
}

fn leave(fabric: &mut Fabric, host: usize, communicator: u64, rank: u32) {
    let leave = v1::Leave { communicator, rank, request: 0 };
    fabric.ask(host, from_agent::Message::Leave(leave));
}

/// A communicator of `a` on hosts 0, 4 and 5, and one of `b`. The plan of the first is stored, as the actor has it done.
fn stored(policy: OnFailure) -> (Fabric, u64) {
    let (mut fabric, ids) = formed(9, &[("a", &[0, 4, 5]), ("b", &[0, 4])]);
    agreed(fabric.negotiate("a", "c0", Some(&with(policy))));
    fabric.run(SECOND * 3);
    let plan = fabric.state.plan_change(CommunicatorId(ids[0]));
    fabric.tenants.stored.apply(&plan);
    (fabric, ids[0])
}

#[test]
fn members_go_on_after_a_restart_of_control() {
    let wanted = within(SECOND * 60);
    let (mut fabric, id, _) = failed(&wanted);
    assert_eq!(fabric.tenants.stored.pasts.keys().copied().collect::<Vec<_>>(), [CommunicatorId(id)]);
    for _ in 0..2 {
        restart(&mut fabric);
        assert!(!much_is_free(&mut fabric), "it is kept for them");
    }
    let next = go_on(&mut fabric, id);
    fabric.run(SECOND * 3);
    let after = fabric.agreement("a", "c0");
    assert_eq!((after.number, &after.constraints), (2, &wanted));
    assert_eq!(fabric.recipe_of(0, next).participants.len(), 2);
    assert!(!much_is_free(&mut fabric) && fabric.tenants.stored.pasts.is_empty());
    assert_eq!(fabric.tenants.stored.agreements.keys().filter(|of| **of == CommunicatorId(next)).count(), 1);
}

#[test]
fn what_ended_stays_over_until_members_leave() {
    let (mut fabric, id) = stored(OnFailure::End);
    fabric.kill(5);
    fabric.run(SECOND);
    let late = |fabric: &mut Fabric, words: &str| {
        turned_away(fabric);
        fabric.regroup(0, "a", "c0", (id, 0));
        let refused = turned_away(fabric).remove(0);
        assert_eq!(refused.kind(), JoinRefusedKind::Over);
        assert!(refused.text.contains(words), "{refused:?}");
    };
    restart(&mut fabric);
    late(&mut fabric, "agreed on that it ends where it fails");
    assert!(much_is_free(&mut fabric));
    leave(&mut fabric, 0, id, 0);
    leave(&mut fabric, 4, id, 1);
    assert!(fabric.tenants.stored.pasts.is_empty() && fabric.state.keeps_no_past());
    // Nor do members get their time once more who have let it go by.
    let (mut fabric, id, _) = failed(&within(SECOND * 5));
    fabric.run(SECOND * 5);
    restart(&mut fabric);
    fabric.regroup(0, "a", "c0", (id, 0));
    let refused = turned_away(&mut fabric).pop().unwrap();
    assert!(refused.kind() == JoinRefusedKind::Over && refused.text.contains("had 5s"), "{refused:?}");
}

#[test]
fn members_have_the_recovery_time_to_regroup() {
    let (mut fabric, id, _) = failed(&within(SECOND * 3));
    let stored = fabric.tenants.stored.clone();
    fabric.now += SECOND * 2;
    fabric.restarted(again(stored.clone()), &[]);
    go_on(&mut fabric, id);
    // But no longer.
    fabric.restarted(again(stored), &[]);
    fabric.run(SECOND * 40);
    turned_away(&mut fabric);
    fabric.regroup(0, "a", "c0", (id, 0));
    assert_eq!(turned_away(&mut fabric)[0].kind(), JoinRefusedKind::Over);
}

#[test]
fn nobody_waits_for_who_has_gone_meanwhile() {
    // A process has ended while control was away.
    let (mut fabric, id, _) = failed(&within(SECOND * 60));
    fabric.tenants.ended.remove(&(4, id));
    restart(&mut fabric);
    let before = fabric.ids();
    fabric.regroup(0, "a", "c0", (id, 0));
    assert_eq!(fabric.ids().difference(&before).count(), 1);
    // All have.
    let (mut fabric, _, _) = failed(&within(SECOND * 60));
    fabric.tenants.ended.clear();
    restart(&mut fabric);
    assert!(fabric.tenants.stored.pasts.is_empty() && fabric.state.keeps_no_past());
    // Its tenant is there no more.
    let (mut fabric, _, _) = failed(&within(SECOND * 60));
    for past in fabric.tenants.stored.pasts.values_mut() {
        past.tenant = "gone".to_owned();
    }
    restart(&mut fabric);
    assert!(fabric.tenants.stored.pasts.is_empty() && fabric.state.keeps_no_past());
}

#[test]
fn a_missing_agent_is_awaited_for_its_time() {
    let away = || {
        let (mut fabric, id, _) = failed(&within(SECOND * 60));
        let state = again(fabric.tenants.stored.clone());
        fabric.restarted_with(state, &[], &[0, 1, 2]);
        fabric.regroup_within(0, "a", "c0", (id, 0), SECOND * 50);
        fabric.run(SECOND * 5);
        assert!(fabric.ids().is_empty());
        (fabric, id)
    };
    let (mut fabric, id) = away();
    fabric.connect(4);
    fabric.regroup_within(4, "a", "c0", (id, 1), SECOND * 50);
    let [next] = fabric.ids().into_iter().collect::<Vec<_>>().try_into().unwrap();
    assert_eq!(fabric.communicator(next).ranks, 2);
    let (mut fabric, _) = away();
    fabric.run(SECOND * 30);
    let [next] = fabric.ids().into_iter().collect::<Vec<_>>().try_into().unwrap();
    assert_eq!(fabric.communicator(next).ranks, 1);
}

/// The moment between: members know that it has failed, and control dies before that is on disk.
#[test]
fn an_unstored_failure_is_known_by_its_agreement() {
    for heard in [true, false] {
        let (mut fabric, id) = stored(OnFailure::Regroup { within: SECOND * 60 });
        fabric.tenants.disk_slow = true;
        let part = fabric.recipe_of(4, id);
        fabric.kill(5);
        assert!(
            fabric.tenants.stored.pasts.is_empty()
                && fabric.tenants.stored.agreements.contains_key(&CommunicatorId(id))
        );
        fabric.tenants.disk_slow = false;
        let stored = fabric.tenants.stored.clone();
        // The agent on host 4 has heard it too, or not: then it says that it runs, before the other's word or after it.
        for hosts in [[0, 5, 4], [4, 5, 0], [5, 4, 0], [5, 0, 4]] {
            if !heard {
                fabric.tenants.ended.remove(&(4, id));
                fabric.runs(4, &part);
            }
            fabric.tenants.stored = stored.clone();
            fabric.restarted_with(again(stored.clone()), &[id], &hosts);
            fabric.run(SECOND * 2);
            assert!(!fabric.ids().contains(&id), "it has ended");
            assert!(fabric.tenants.ended.contains_key(&(4, id)), "{heard} {hosts:?}");
        }
        let next = go_on(&mut fabric, id);
        fabric.run(SECOND * 3);
        assert_eq!(fabric.agreement("a", "c0").number, 2, "{heard}");
        assert_eq!(fabric.communicator(next).ranks, 2);
        assert!(fabric.tenants.stored.pasts.is_empty());
    }
    let (mut fabric, id) = stored(OnFailure::End);
    fabric.tenants.disk_slow = true;
    fabric.kill(5);
    fabric.tenants.disk_slow = false;
    restart(&mut fabric);
    turned_away(&mut fabric);
    fabric.regroup(0, "a", "c0", (id, 0));
    assert_eq!(turned_away(&mut fabric)[0].kind(), JoinRefusedKind::Over);
}

/// The next moment: the one that goes on is in use. Control dies before it is on disk what was promised for it.
#[test]
fn an_unstored_passed_agreement_is_kept() {
    let wanted = within(SECOND * 60);
    let (mut fabric, id, _) = failed(&wanted);
    let stored = fabric.tenants.stored.clone();
    let next = go_on(&mut fabric, id);
    fabric.run(MS * 50);
    assert!(fabric.agreement("a", "c0").number == 2 && fabric.recipe_of(0, next).epoch == 1);
    let running: Vec<u64> = fabric.ids().into_iter().collect();
    fabric.tenants.stored = stored.clone();
    fabric.restarted(again(stored), &running);
    fabric.run(SECOND * 3);
    let after = fabric.agreement("a", "c0");
    assert_eq!((after.number, &after.constraints), (2, &wanted));
    assert!(
        fabric.tenants.stored.pasts.is_empty()
            && fabric.tenants.stored.agreements.contains_key(&CommunicatorId(next))
    );
}

#[test]
fn a_forged_end_ends_nothing() {
    let (mut fabric, id) = stored(OnFailure::Regroup { within: SECOND * 60 });
    let mut forged = fabric.recipe_of(0, id);
    forged.peers.clear();
    forged.participants[0].host = "h7".to_owned();
    forged.me = 0;
    fabric.tenants.ended.insert((7, id), forged);
    let running: Vec<u64> = fabric.ids().into_iter().collect();
    let state = again(fabric.tenants.stored.clone());
    fabric.restarted_with(state, &running, &[7, 0, 4, 5]);
    fabric.run(SECOND * 3);
    assert!(fabric.ids().contains(&id) && fabric.state.keeps_no_past());
    assert_eq!(fabric.agreement("a", "c0").number, 1);
}

#[test]
fn failed_stores_are_repeated() {
    let (mut fabric, id) = stored(OnFailure::Regroup { within: SECOND * 60 });
    fabric.tenants.disk_full = true;
    fabric.kill(5);
    fabric.run(SECOND * 5);
    let is_stored = |fabric: &Fabric| {
        let stored = &fabric.tenants.stored;
        (stored.pasts.contains_key(&CommunicatorId(id)), stored.agreements.contains_key(&CommunicatorId(id)))
    };
    assert_eq!(is_stored(&fabric), (false, true), "as if it ran still");
    fabric.tenants.disk_full = false;
    fabric.run(SECOND * 2);
    assert_eq!(is_stored(&fabric), (true, false));
    restart(&mut fabric);
    let next = go_on(&mut fabric, id);
    // What is over is no longer kept, nor does it come back.
    fabric.tenants.disk_full = true;
    fabric.run(SECOND * 3);
    assert!(fabric.ids().contains(&next) && is_stored(&fabric).0);
    fabric.tenants.disk_full = false;
    fabric.run(SECOND * 2);
    assert_eq!(is_stored(&fabric), (false, false));
}
