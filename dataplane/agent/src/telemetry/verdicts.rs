//! What control hears at once: verdicts on the paths of own connections, the newest of each, no more than it wants.

use crate::telemetry::analysis::Analysis;
use crate::telemetry::finding::Found;
use crate::telemetry::names::Names;
use crate::telemetry::own::Own;
use crate::telemetry::words::{self, Clock};
use harmonaize_analysis::congestion::{Congestion, Link, Path, State};
use harmonaize_analysis::trace::Owner;
use harmonaize_api::v1;
use harmonaize_api::v1::from_agent::Message;
use harmonaize_events::Direction;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

const SECOND_NS: u64 = 1_000_000_000;
/// However many control wants, no more in a second.
const MOST: u32 = 100;
/// So many of a second's may go at once.
const AT_ONCE: u64 = 10;
/// How often a verdict is said again while it stands.
const AGAIN_NS: u64 = SECOND_NS;
/// How long the end of a congestion waits for own traffic that shows it.
const OWED_NS: u64 = 60 * SECOND_NS;
/// Paths that are kept in mind.
const PATHS: usize = 4096;

/// Where verdicts go, and how many in a second at most.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) to: mpsc::WeakSender<Message>,
    pub(crate) per_second: u32,
    /// Where other agents connect: of two ports, this is not the one that chooses the path.
    pub(crate) listen: u16,
}

/// A path of which something was found.
#[derive(Clone, Copy, Debug)]
struct Known {
    newest: Congestion,
    /// Since when control has not heard the newest.
    news_ns: Option<u64>,
    told_ns: Option<u64>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Verdicts {
    wanted: Option<Wanted>,
    known: BTreeMap<Link, Known>,
    /// In thousandths of a verdict: what may go now.
    credit: u64,
    credited_ns: u64,
}

impl Verdicts {
    /// Control wants verdicts from now on, or none; it hears anew of every own path that is congested.
    pub(crate) fn want(&mut self, now_ns: u64, wanted: Wanted, analysis: &Analysis) {
        self.wanted = Some(wanted).filter(|wanted| wanted.per_second > 0);
        self.known.clear();
        (self.credit, self.credited_ns) = (AT_ONCE * 1000, now_ns);
        let congested = analysis.links().filter(|link| link.state > State::None);
        congested.for_each(|congestion| self.take(now_ns, &Found::Congestion(congestion)));
    }

    /// Takes a finding in.
    pub(crate) fn take(&mut self, now_ns: u64, found: &Found) {
        let Found::Congestion(found) = found else { return };
        let link = found.link;
        let own = matches!(link.path, Path::Connection { .. }) && link.direction == Direction::Egress;
        if self.wanted.is_none() || !own {
            return;
        }
        let full = self.known.len() >= PATHS;
        match self.known.get_mut(&link) {
            Some(known) => {
                known.newest = *found;
                known.news_ns.get_or_insert(now_ns);
            }
            // Of what control never heard to be congested, it need not hear that it is not.
            None if found.state == State::None || full => {}
            None => {
                let known = Known { newest: *found, news_ns: Some(now_ns), told_ns: None };
                self.known.insert(link, known);
            }
        }
    }

    /// Tells what is news, and what stands, as far as it may now.
    ///
    /// Cost: nothing without a path that is, or was until now, congested; else a look at each of those.
    pub(crate) fn tell(
        &mut self,
        now_ns: u64,
        offset_ns: i64,
        (own, analysis): (&Own, &Analysis),
        names: &Mutex<Names>,
    ) {
        let Some(wanted) = self.wanted.clone().filter(|_| !self.known.is_empty()) else { return };
        let passed_ns = now_ns.saturating_sub(self.credited_ns).min(SECOND_NS);
        let rate = u64::from(wanted.per_second.min(MOST));
        self.credit = (self.credit + passed_ns * rate / 1_000_000).min(AT_ONCE * 1000);
        // What is too little to count waits for the next time.
        if passed_ns * rate >= 1_000_000 {
            self.credited_ns = now_ns;
        }
        let mut due: Vec<(u64, Link)> = Vec::new();
        self.known.retain(|link, known| {
            let stands = known.newest.state > State::None;
            let again = known.told_ns.is_some_and(|told_ns| now_ns.saturating_sub(told_ns) >= AGAIN_NS);
            if stands
                && again
                && let Some(current) = analysis.link(link)
            {
                known.newest = Congestion { state: known.newest.state, cause: known.newest.cause, ..current };
                known.news_ns.get_or_insert(now_ns);
            }
            let Some(news_ns) = known.news_ns else { return true };
            let waited_ns = now_ns.saturating_sub(news_ns);
            if !stands && (waited_ns >= OWED_NS || known.told_ns.is_none()) {
                return false;
            }
            // That nothing of ours is held up says something only where something of ours passes.
            let passes = stands || analysis.link(link).is_some_and(|current| current.own_rate > 0);
            due.extend(passes.then_some((news_ns, *link)));
            true
        });
        due.sort_unstable();
        for (_, link) in due {
            if self.credit < 1000 || !self.tell_one(now_ns, offset_ns, &link, own, names, &wanted) {
                return;
            }
        }
    }

    /// False if there is no room.
    fn tell_one(
        &mut self,
        now_ns: u64,
        offset_ns: i64,
        link: &Link,
        own: &Own,
        names: &Mutex<Names>,
        wanted: &Wanted,
    ) -> bool {
        let Some(known) = self.known.get_mut(link) else { return true };
        let Some(owner) = own.owner_of(link.path) else {
            // The connection is gone.
            self.known.remove(link);
            return true;
        };
        let newest = known.newest;
        let congestion = {
            let names = names.lock().unwrap_or_else(PoisonError::into_inner);
            words::congestion(&newest, &names, Clock(offset_ns))
        };
        let message = message(congestion, &owner, wanted.listen);
        let Some(sender) = wanted.to.upgrade() else { return false };
        match sender.try_send(Message::PathCongestion(message)) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Closed(_)) => return false,
        }
        self.credit -= 1000;
        (known.news_ns, known.told_ns) = (None, Some(now_ns));
        if newest.state == State::None {
            self.known.remove(link);
        }
        true
    }
}

fn message(congestion: v1::Congestion, owner: &Owner, listen: u16) -> v1::PathCongestion {
    let (local, remote) = (owner.flow.local_port, owner.flow.remote_port);
    v1::PathCongestion {
        congestion: Some(congestion),
        communicator: owner.communicator,
        epoch: owner.epoch.into(),
        peer: owner.to,
        source_port: if local == listen { remote } else { local }.into(),
    }
}
