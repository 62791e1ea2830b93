//! Who may ask what of control, and the log of what was asked.
//!
//! An agent or aggregator speaks for the host that its certificate names. An operator may do what his role says. Whatever
//! would change something, and whatever is refused, is logged with the target `audit`: who, from where, what, the outcome.

use crate::state::for_a_tenant;
use harmonaize_api::v1::{self, from_agent, to_agent};
use harmonaize_identity::{Identity, Peer, Protection};
use harmonaize_units::{Gcra, Quota};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tonic::{Request, Status};

/// What an operator may do. Each may do what those before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Look at everything.
    Viewer,
    /// Change plans, drain, and end communicators.
    Operator,
    /// Add and remove tenants.
    Admin,
}

/// Who may do what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// How sessions and calls are protected.
    pub protection: Protection,
    /// Operators by the names in their certificates.
    pub operators: BTreeMap<String, Role>,
    /// Hosts on which a tenant's processes may be; every one for a tenant that is not named.
    pub hosts: BTreeMap<String, BTreeSet<String>>,
    /// Tenants whose pods a namespace of Kubernetes may have; the one of its own name for a namespace that is not named.
    pub namespaces: BTreeMap<String, Vec<String>>,
}

impl Access {
    /// Nobody is named yet.
    pub(crate) fn new(protection: Protection) -> Self {
        let (operators, hosts, namespaces) = Default::default();
        Self { protection, operators, hosts, namespaces }
    }

    /// Anyone on this machine may do everything.
    pub fn insecure_loopback() -> Self {
        Self::new(Protection::InsecureLoopback)
    }

    /// Who calls, if a role of at least `least` is his.
    pub(crate) fn caller<T>(
        &self,
        request: &Request<T>,
        least: Role,
        what: &'static str,
    ) -> Result<Caller, Status> {
        let peer = peer(request)?;
        let role = match &peer.identity {
            Identity::Local => Some(Role::Admin),
            Identity::Certified { operators, .. } => {
                operators.iter().filter_map(|name| self.operators.get(name)).max().copied()
            }
        };
        let caller = Caller { peer, what };
        match role {
            Some(role) if role >= least => Ok(caller),
            Some(role) => Err(caller.refused(format!(
                "{} has the role of {}; {what} takes that of {}",
                caller.peer.identity,
                named(role),
                named(least)
            ))),
            None => {
                let who = &caller.peer.identity;
                Err(caller.refused(format!("{who} is no operator; those are in control's configuration")))
            }
        }
    }
}

/// How often an operator may call.
const CALLS: Quota = Quota { interval: Duration::from_millis(5), burst: 400 };

/// Who may do what now, and how often each operator has of late.
#[derive(Debug)]
pub(crate) struct Current {
    access: RwLock<Arc<Access>>,
    calls: Mutex<BTreeMap<String, Gcra>>,
    begin: Instant,
}

impl Current {
    pub(crate) fn new(access: Access) -> Self {
        let (access, calls) = (RwLock::new(Arc::new(access)), Mutex::default());
        Self { access, calls, begin: Instant::now() }
    }

    /// What is in force.
    pub(crate) fn get(&self) -> Arc<Access> {
        Arc::clone(&self.access.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Who calls, if a role of at least `least` is his and he has not called too often.
    pub(crate) fn caller<T>(
        &self,
        request: &Request<T>,
        least: Role,
        what: &'static str,
    ) -> Result<Caller, Status> {
        let caller = self.get().caller(request, least, what)?;
        let who = &caller.peer.identity;
        if *who != Identity::Local {
            let now = self.begin.elapsed();
            let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            calls.retain(|_, calls| !calls.is_idle(now));
            if let Err(next) = calls.entry(who.to_string()).or_default().take(now, CALLS) {
                let (most, wait) =
                    (1000 / CALLS.interval.as_millis(), next.saturating_sub(now).as_millis() + 1);
                let text = format!("{who} may call {most} times a second; call again in {wait} ms");
                return Err(Status::resource_exhausted(text));
            }
        }
        Ok(caller)
    }

    /// Whoever calls or joins from now on is judged by this.
    pub(crate) fn set(&self, access: Access) {
        *self.access.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(access);
    }
}

fn named(role: Role) -> &'static str {
    match role {
        Role::Viewer => "viewer",
        Role::Operator => "operator",
        Role::Admin => "admin",
    }
}

/// Who is at the other end of a request's connection.
pub(crate) fn peer<T>(request: &Request<T>) -> Result<Peer, Status> {
    let peer = request.extensions().get::<Peer>();
    let peer = peer.ok_or_else(|| Status::unauthenticated("nobody is known to be at the other end"))?;
    if let Some(most) = peer.surplus_of {
        let who = &peer.identity;
        let text = format!("{who} has {most} connections with control, as many as it may have; close some");
        return Err(Status::resource_exhausted(text));
    }
    Ok(peer.clone())
}

/// Logs that a peer may not do this, and returns its answer.
pub(crate) fn refused(peer: &Peer, what: &'static str, why: impl Into<String>) -> Status {
    let Peer { identity, address, .. } = peer;
    let why: String = why.into();
    tracing::warn!(target: "audit", who = %identity, from = %address, what, %why, "refused");
    Status::permission_denied(why)
}

/// An operator who may do what he asks for.
#[derive(Debug)]
pub(crate) struct Caller {
    peer: Peer,
    what: &'static str,
}

impl Caller {
    fn refused(&self, why: String) -> Status {
        refused(&self.peer, self.what, why)
    }

    /// Logs what came of a change. `about` is what it was to change.
    pub(crate) fn log<T>(&self, about: &impl Debug, outcome: Result<T, Status>) -> Result<T, Status> {
        let Peer { identity, address, .. } = &self.peer;
        let (who, from, what) = (identity, address, self.what);
        match &outcome {
            Ok(_) => tracing::info!(target: "audit", %who, %from, what, about = ?about, "done"),
            Err(status) => {
                let why = status.message();
                tracing::warn!(target: "audit", %who, %from, what, about = ?about, %why, "not done");
            }
        }
        outcome
    }
}

/// An agent's or aggregator's end of a session, and for whom it has spoken.
#[derive(Debug)]
pub(crate) struct Speaker {
    pub(crate) peer: Peer,
    host: Option<String>,
}

/// What is to become of a message.
#[derive(Debug)]
pub(crate) enum Decision {
    /// It goes on.
    Pass,
    /// It does not; its sender is told so, and may go on.
    Answer(Box<to_agent::Message>),
    /// It does not, and the session ends.
    End(Status),
}

impl Speaker {
    pub(crate) fn new(peer: Peer) -> Self {
        Self { peer, host: None }
    }

    /// Whether an agent may say this.
    pub(crate) fn admit(&mut self, access: &Access, message: &v1::FromAgent) -> Decision {
        let Peer { identity, address, serial, .. } = &self.peer;
        match &message.message {
            Some(from_agent::Message::Hello(hello)) => {
                if !identity.may_be_host(&hello.host) {
                    let why = format!("the certificate is of {identity}, and not of {}", hello.host);
                    tracing::warn!(target: "audit", who = %identity, from = %address, host = hello.host, "session refused");
                    return Decision::End(Status::permission_denied(why));
                }
                if !serial.is_empty() {
                    tracing::info!(who = %identity, from = %address, serial, "session with a certificate");
                }
                self.host = Some(hello.host.clone());
                Decision::Pass
            }
            Some(message) => {
                let Some((tenant, what, answer)) = for_a_tenant(message) else { return Decision::Pass };
                let allowed = access.hosts.get(tenant);
                let host = self.host.as_deref().unwrap_or_default();
                if allowed.is_none_or(|allowed| allowed.contains(host)) {
                    return Decision::Pass;
                }
                tracing::warn!(target: "audit", who = %identity, from = %address, what, tenant, "not for this host's agent");
                Decision::Answer(Box::new(answer))
            }
            None => Decision::Pass,
        }
    }
}
