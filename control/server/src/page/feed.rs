//! How things stand, for all browsers together: asked of the state while somebody looks on, at a bounded rate.

use super::facts::{self, Sections};
use crate::actor::Command;
use crate::leader::Commands;
use axum::body::Bytes;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};

/// Time between two looks at the state, at least.
const INTERVAL: Duration = Duration::from_millis(250);

/// The pause after a slow sample, as a multiple of its duration. Samples take a fifth of the state's time at
/// most.
const PAUSE: u32 = 4;

/// Most who look on at a time.
const WATCHERS: usize = 64;

/// What browsers are sent.
#[derive(Debug)]
pub(super) struct Update {
    /// None before the first look, and after the last that somebody waited for.
    snapshot: Option<Snapshot>,
    /// Why nothing is known.
    problem: Option<String>,
}

#[derive(Debug)]
struct Snapshot {
    number: u64,
    sections: Arc<Sections>,
    all: OnceLock<Bytes>,
    change: Bytes,
}

impl Update {
    const fn nothing() -> Self {
        Self { snapshot: None, problem: None }
    }

    /// Its number, by which the next says what has changed.
    pub(super) fn number(&self) -> Option<u64> {
        self.snapshot.as_ref().map(|known| known.number)
    }

    /// Everything, as JSON; else why it is not known.
    pub(super) fn all(&self) -> Result<Bytes, &str> {
        let problem = || self.problem.as_deref().unwrap_or("control is going down");
        self.snapshot.as_ref().map(Snapshot::all).ok_or_else(problem)
    }

    /// The event for who has seen the update of this number last.
    pub(super) fn event(&self, seen: Option<u64>) -> Bytes {
        let (name, data) = match &self.snapshot {
            Some(known) if seen.is_some_and(|seen| seen + 1 == known.number) => {
                ("change", known.change.clone())
            }
            Some(known) => ("all", known.all()),
            None => {
                let problem = self.problem.as_deref().unwrap_or_default();
                ("problem", facts::text(&serde_json::Value::from(problem)).into())
            }
        };
        [format!("event: {name}\ndata: ").as_bytes(), &data, b"\n\n"].concat().into()
    }
}

impl Snapshot {
    fn all(&self) -> Bytes {
        let all = || facts::message(self.number, &facts::every(&self.sections), &BTreeMap::new());
        self.all.get_or_init(|| all().into()).clone()
    }
}

/// What all browsers are served from.
#[derive(Debug)]
pub(crate) struct Feed {
    latest: watch::Sender<Arc<Update>>,
    /// Somebody has begun to look on.
    begun: Notify,
    places: Arc<Semaphore>,
}

/// Somebody who looks on.
#[derive(Debug)]
pub(super) struct Watcher {
    latest: watch::Receiver<Arc<Update>>,
    _place: OwnedSemaphorePermit,
}

impl Watcher {
    /// The newest update that this one has not had; none where there will be no more.
    pub(super) async fn next(&mut self) -> Option<Arc<Update>> {
        loop {
            self.latest.changed().await.ok()?;
            let update = Arc::clone(&self.latest.borrow_and_update());
            if update.snapshot.is_some() || update.problem.is_some() {
                return Some(update);
            }
        }
    }
}

impl Feed {
    pub(crate) fn new() -> Arc<Self> {
        let latest = watch::Sender::new(Arc::new(Update::nothing()));
        Arc::new(Self { latest, begun: Notify::new(), places: Arc::new(Semaphore::new(WATCHERS)) })
    }

    /// One more who looks on; none where too many do.
    pub(super) fn watch(&self) -> Option<Watcher> {
        let place = Arc::clone(&self.places).try_acquire_owned().ok()?;
        let mut latest = self.latest.subscribe();
        // What is known already is new to this one.
        latest.mark_changed();
        let watcher = Watcher { latest, _place: place };
        self.begun.notify_one();
        Some(watcher)
    }

    /// Looks at the state while somebody looks on.
    pub(crate) async fn run(self: Arc<Self>, commands: Commands) {
        let mut number = 0;
        loop {
            while self.latest.receiver_count() == 0 {
                self.latest.send_replace(Arc::new(Update::nothing()));
                self.begun.notified().await;
            }
            let took = self.poll(&commands, &mut number).await;
            tokio::time::sleep(INTERVAL.max(took * PAUSE)).await;
        }
    }

    /// Looks once. Returns how long that took of the state's time.
    async fn poll(&self, commands: &Commands, number: &mut u64) -> Duration {
        let ask = |answer: tokio::sync::oneshot::Sender<_>| {
            Command::Look(Box::new(move |state, now| {
                let began = Instant::now();
                let facts = facts::Facts::of(&state.queries(now));
                drop(answer.send((facts, began.elapsed())));
            }))
        };
        let before = Arc::clone(&self.latest.borrow());
        let (facts, took) = match commands.ask(ask).await {
            Ok(found) => found,
            Err(status) => {
                if before.problem.as_deref() != Some(status.message()) {
                    let problem = Some(status.message().to_owned());
                    self.latest.send_replace(Arc::new(Update { snapshot: None, problem }));
                }
                return Duration::ZERO;
            }
        };
        let next = *number + 1;
        let known = before.snapshot.as_ref().map(|known| Arc::clone(&known.sections));
        // Writing very much takes a while; nobody who is served waits for it.
        let written = tokio::task::spawn_blocking(move || {
            let nothing = Sections::new();
            let sections = facts.sections(known.as_deref().unwrap_or(&nothing));
            let (changed, gone) = match &known {
                Some(known) => facts::difference(known, &sections),
                None => Default::default(),
            };
            let same = known.is_some() && changed.is_empty() && gone.is_empty();
            let change = facts::message(next, &changed, &gone).into();
            (!same).then(|| Snapshot {
                number: next,
                all: OnceLock::new(),
                change,
                sections: Arc::new(sections),
            })
        });
        if let Ok(Some(known)) = written.await {
            *number = next;
            self.latest.send_replace(Arc::new(Update { snapshot: Some(known), problem: None }));
        }
        took
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::leader::Leader;
    use crate::state::{Controller, Settings};
    use harmonaize_planner::Topology;
    use tokio::sync::mpsc;
    use tokio::time::timeout;

    /// One host.
    fn settings() -> Settings {
        let text = "listen = \"127.0.0.1:0\"\ntopology = \"\"\ninsecure_loopback = true\n";
        let topology = Topology::parse("[[host]]\nname = \"h0\"\n").unwrap();
        Config::parse(text, topology).unwrap().settings
    }

    #[tokio::test]
    async fn many_watchers_share_each_look_and_none_takes_none() {
        let (leads, commands) = Commands::new();
        let (queue, mut asked) = mpsc::channel(16);
        leads.send_replace(Leader::Here(queue));
        let (feed, mut state) = (Feed::new(), Controller::new(settings(), [0; 32]));
        tokio::spawn(Arc::clone(&feed).run(commands));
        let mut watchers: Vec<Watcher> = (0..WATCHERS).map(|_| feed.watch().unwrap()).collect();
        assert!(feed.watch().is_none(), "one too many looks on");
        let began = Instant::now();
        for round in 1..=3 {
            let Some(Command::Look(look)) = asked.recv().await else { panic!("no look") };
            let mut settings = settings();
            settings.tenants.push(format!("tenant{round}"));
            state.configure(Duration::from_secs(round), settings).unwrap();
            look(&mut state, Duration::from_secs(round));
            for watcher in &mut watchers {
                let update = watcher.next().await.unwrap();
                assert_eq!(update.number(), Some(round));
                let event = update.event(Some(round - 1));

                assert!(event.starts_with(b"event: change\n"), "{event:?}");
                assert!(update.event(None).starts_with(b"event: all\n"));
            }
            assert!(asked.try_recv().is_err(), "another look at once");
        }
        assert!(began.elapsed() >= INTERVAL * 2);
        drop(watchers);
        assert!(timeout(INTERVAL * 3, asked.recv()).await.is_err(), "a look for nobody");
        let mut late = feed.watch().unwrap();
        let Some(Command::Look(look)) = asked.recv().await else { panic!("no look") };
        look(&mut state, Duration::from_secs(600));
        assert_eq!(late.next().await.unwrap().number(), Some(4));
        // Where another control leads, it says so, and asks nobody.
        leads.send_replace(Leader::Elsewhere(Some("10.0.0.2:7000".to_owned())));
        let update = late.next().await.unwrap();
        assert!(update.all().unwrap_err().contains("10.0.0.2:7000"));
        assert!(update.event(Some(4)).starts_with(b"event: problem\ndata: \""));
    }
}
