//! The agent's task between engine, control and tenants' sessions. It takes in what each sends, one after another, and
//! hands over what waits for room there. Whoever drives it, the daemon or a simulation, does the rest.

use crate::agent::{Agent, Check, Checked};
use crate::backlog::Backlog;
use crate::control::Event;
use crate::session::SessionRequest;
use harmonaize_engine::Notice;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// How soon what waits for room at the engine or control is tried again.
const LATE: Duration = Duration::from_millis(1);

/// See the module's documentation.
pub struct Wiring {
    /// What it is taken in by.
    pub agent: Agent,
    notices: mpsc::UnboundedReceiver<Notice>,
    requests: mpsc::Receiver<SessionRequest>,
    /// Those that wait for room at control.
    backlog: Backlog,
    events: mpsc::Receiver<Event>,
    checks: JoinSet<Checked>,
}

/// What is left to whoever drives the wiring.
#[derive(Debug)]
pub enum Remainder {
    /// Of control's: for more than the agent. It is to be given to [`Wiring::handle_control`].
    Event(Event),
    /// Of the engine's: of a hand-over.
    Notice(Notice),
    /// A recipe is to be checked, by [`Wiring::check`] somewhere else.
    Check(Check),
}

impl Wiring {
    /// Joins an agent to what the engine's threads say, tenants want and control says. Within a tokio runtime.
    pub fn new(
        agent: Agent,
        notices: mpsc::UnboundedReceiver<Notice>,
        requests: mpsc::Receiver<SessionRequest>,
        events: mpsc::Receiver<Event>,
    ) -> Self {
        let (backlog, checks) = (Backlog::default(), JoinSet::new());
        Self { agent, notices, requests, backlog, events, checks }
    }

    /// Takes in the next that somebody says, once somebody does. What is not done with it then comes back. If the future is dropped, nothing
    /// is lost.
    pub async fn next(&mut self) -> Option<Remainder> {
        let Self { agent, notices, requests, backlog, events, checks } = self;
        agent.flush();
        while agent.has_room()
            && let Some(request) = backlog.pop()
        {
            agent.handle_request(request);
        }
        let due = agent.poll_timeout().map(|due| due.saturating_duration_since(Instant::now()));
        tokio::select! {
            () = tokio::time::sleep(LATE), if agent.is_late() || !backlog.is_empty() => {}
            Some(notice) = notices.recv() => match notice {
                notice @ (Notice::HandedOver { .. } | Notice::TakenOver { .. }) => {
                    return Some(Remainder::Notice(notice));
                }
                notice => agent.handle_notice(notice),
            },
            Some(request) = requests.recv(), if agent.accepts_requests() => take_request(agent, backlog, request),
            Some(event) = events.recv(), if agent.listens() => match event {
                Event::ServeTenants(_) | Event::Connected(_) | Event::Disconnected { .. } => {
                    return Some(Remainder::Event(event));
                }
                event => return agent.handle_control(event).map(Remainder::Check),
            },
            Some(checked) = checks.join_next() => agent.handle_checked(checked.ok()),
            () = tokio::time::sleep(due.unwrap_or_default()), if due.is_some() => {
                agent.handle_timeout(Instant::now());
            }
        }
        None
    }

    /// Gives the agent an event that came back from [`Wiring::next`].
    pub fn handle_control(&mut self, event: Event) {
        let check = self.agent.handle_control(event);
        debug_assert!(check.is_none(), "recipes are checked elsewhere");
    }

    /// Has the outcome of a check taken in, once it is there. Until then what control says waits.
    pub fn check(&mut self, checked: impl Future<Output = Checked> + Send + 'static) {
        self.checks.spawn(checked);
    }

    /// The same of one that takes a thread.
    pub fn check_blocking(&mut self, check: Check) {
        self.checks.spawn_blocking(move || check.run());
    }

    /// Whether neither control nor tenants nor a check have said what was not taken in.
    pub fn is_idle(&self) -> bool {
        let requests = self.requests.is_empty() && self.backlog.is_empty();
        self.events.is_empty() && self.checks.is_empty() && requests
    }

    /// Takes in what the engine has said, with the last words to control, and drops the agent. What control says is not taken in, but
    /// its session goes on until the queue that is returned is dropped, or all is said.
    pub fn end(mut self) -> mpsc::Receiver<Event> {
        while let Ok(notice) = self.notices.try_recv() {
            self.agent.handle_notice(notice);
        }
        self.agent.flush();
        self.events
    }
}

/// Gives the agent a tenant's request, or has it wait for room at control.
fn take_request(agent: &mut Agent, backlog: &mut Backlog, request: SessionRequest) {
    if let SessionRequest::Detached { attachment } = &request {
        backlog.forget(*attachment);
    }
    if !backlog.delays(&request, agent.has_room()) {
        return agent.handle_request(request);
    }
    let Some(tenant) = agent.tenant_of(request.attachment()) else { return agent.handle_request(request) };
    if let Some(request) = backlog.push(tenant, request) {
        agent.refuse_request(request);
    }
}
