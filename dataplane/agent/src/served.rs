//! The tenants that are served while the agent runs. They are those of its configuration, and those that control adds
//! within the bounds that the configuration sets. Either way they are what [`SessionServer::apply`] is given, all at
//! once.

use crate::config::{Config, ControlTenants, HANDSHAKE, Source};
use crate::session::{BindError, Quota, SessionServer, SocketRules, TenantRules};
use harmonaize_api::{is_tenant_name, v1};
use harmonaize_identity::Watched;
use harmonaize_units::Bytes;
use prost::Message;
use std::path::PathBuf;
use std::time::Duration;

/// Why a tenant of control's is not served. The text goes to control.
#[derive(Debug, thiserror::Error)]
enum TenantRefused {
    /// The configuration lets control add none.
    #[error("this agent takes no tenants of control's: its configuration has no [control_tenants]")]
    NoTable,
    /// As many are served as may be.
    #[error("this agent serves {0} tenants of control's, as many as `tenants` of [control_tenants] allows")]
    Full(usize),
    /// No socket could have the name.
    #[error("not a usable name: 1 to 63 visible ASCII characters, no slash")]
    Name,
    /// It has no users.
    #[error("no user may attach")]
    NoUser,
    /// A user of the system.
    #[error("user {uid} is below {least}, `least_uid` of [control_tenants] at this agent")]
    User {
        /// The user.
        uid: u32,
        /// The least that may be.
        least: u32,
    },
    /// A quota above the bound of this name.
    #[error("{requested} {key} are more than {most}, `{key}` of [control_tenants] at this agent")]
    Count {
        /// The key of both.
        key: &'static str,
        /// The quota.
        requested: u32,
        /// The bound.
        most: u32,
    },
    /// More memory than the bound.
    #[error("{requested} of memory is more than {most}, `arena` of [control_tenants] at this agent")]
    Arena {
        /// The quota.
        requested: Bytes,
        /// The bound.
        most: Bytes,
    },
    /// A longer time-out than the bound.
    #[error(
        "a time-out of {requested:?} is longer than {most:?}, `operation_timeout` of [control_tenants] at this agent"
    )]
    Timeout {
        /// The quota.
        requested: Duration,
        /// The bound.
        most: Duration,
    },
    /// Its socket cannot be had.
    #[error(transparent)]
    Bind(#[from] BindError),
}

/// Most of control's tenants that are looked at.
const MAX_ADDED: usize = 1024;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Tenants {
    server: SessionServer,
    /// Those of the configuration.
    own: Vec<TenantRules>,
    bounds: Option<ControlTenants>,
    /// Control's last word, in this process alone.
    added: Vec<v1::AddedTenant>,
    source: Option<Source>,
    watched: Watched,
}

impl Tenants {
    /// Serves the configuration's tenants.
    ///
    /// # Errors
    /// If a socket cannot be had; says which.
    pub(crate) fn serve(
        mut server: SessionServer,
        own: Vec<TenantRules>,
        bounds: Option<ControlTenants>,
        source: Option<Source>,
    ) -> Result<Self, BindError> {
        server.apply(&own)?;
        let watched = Watched::new(files(source.as_ref()));
        Ok(Self { server, own, bounds, added: Vec::new(), source, watched })
    }

    /// Reads the configuration again if its files have changed. What is served then; none where nothing changed.
    pub(crate) fn poll(&mut self) -> Option<v1::TenantsServed> {
        if self.watched.changed() { self.reload() } else { None }
    }

    /// Reads the configuration again: what is served then. What cannot be used is refused as a whole, and the log says why.
    pub(crate) fn reload(&mut self) -> Option<v1::TenantsServed> {
        let source = self.source.as_ref()?;
        let path = source.path.display().to_string();
        let again = match source.read_again() {
            Ok(again) => again,
            Err(error) => {
                tracing::error!(%error, "the configuration stays as it was");
                return None;
            }
        };
        let Config { tenants, control_tenants, source, .. } = again;
        match self.apply(&tenants, control_tenants.as_ref()) {
            Ok(served) => {
                tracing::info!(path, tenants = tenants.len(), "the configuration was read again");
                self.watched.watch(files(source.as_ref()));
                (self.own, self.bounds, self.source) = (tenants, control_tenants, source);
                Some(served)
            }
            Err(error) => {
                tracing::error!(path, %error, "the configuration stays as it was");
                None
            }
        }
    }

    /// Serves these tenants of control's, and no others of its: what is served then.
    pub(crate) fn set_added(&mut self, mut added: Vec<v1::AddedTenant>) -> v1::TenantsServed {
        added.truncate(MAX_ADDED);
        let before = std::mem::replace(&mut self.added, added);
        let (own, bounds) = (std::mem::take(&mut self.own), self.bounds.take());
        let served = self.apply(&own, bounds.as_ref());
        (self.own, self.bounds) = (own, bounds);
        served.unwrap_or_else(|error| {
            // Those of the configuration are served already, so that nothing can be wrong with them.
            tracing::error!(%error, "what control said of tenants has no effect");
            self.added = before;
            v1::TenantsServed::default()
        })
    }

    /// Serves the configuration's tenants, and those of control's that its bounds allow.
    fn apply(
        &mut self,
        own: &[TenantRules],
        bounds: Option<&ControlTenants>,
    ) -> Result<v1::TenantsServed, BindError> {
        let mut added = admitted(own, bounds, &self.added);
        loop {
            let rules = added.iter().filter_map(|(_, rules)| rules.as_ref().ok());
            let desired: Vec<TenantRules> = own.iter().chain(rules).cloned().collect();
            let Err(error) = self.server.apply(&desired) else { break };
            let at = |(name, rules): &&mut (String, Result<_, _>)| {
                rules.is_ok() && error.tenant() == Some(name.as_str())
            };
            match added.iter_mut().find(at) {
                Some((_, rules)) => *rules = Err(error.into()),
                None => return Err(error),
            }
        }
        for (tenant, why) in
            added.iter().filter_map(|(name, rules)| rules.as_ref().err().map(|why| (name, why)))
        {
            tracing::warn!(tenant, %why, "control's tenant is not served");
        }
        let own = own.iter().map(|rules| served(&rules.tenant, Ok(rules), false));
        let added = added.iter().map(|(name, rules)| served(name, rules.as_ref(), true));
        Ok(v1::TenantsServed { tenants: own.chain(added).collect() })
    }

    /// The server, for a hand-over.
    pub(crate) fn server(&mut self) -> &mut SessionServer {
        &mut self.server
    }

    /// Control's last word, encoded.
    pub(crate) fn added(&self) -> Vec<Vec<u8>> {
        self.added.iter().map(Message::encode_to_vec).collect()
    }

    /// Serves control's tenants of that word.
    ///
    /// # Errors
    /// If it is none.
    pub(crate) fn inherit(&mut self, added: &[Vec<u8>]) -> Result<(), prost::DecodeError> {
        let added = added.iter().map(|tenant| v1::AddedTenant::decode(tenant.as_slice()));
        self.set_added(added.collect::<Result<_, _>>()?);
        Ok(())
    }

    /// Begins the end: sockets go, and everybody is detached.
    pub(crate) fn stop(&mut self) {
        self.server.stop();
    }

    /// Completes once everybody is detached.
    pub(crate) async fn ended(mut self) {
        self.server.stop();
        self.server.ended().await;
    }
}

fn files(source: Option<&Source>) -> Vec<PathBuf> {
    source.map(|source| source.files.clone()).unwrap_or_default()
}

fn served(name: &str, rules: Result<&TenantRules, &TenantRefused>, added: bool) -> v1::TenantServed {
    let socket = rules.ok().and_then(|rules| rules.socket.as_ref());
    let socket = socket.map_or_else(String::new, |socket| socket.path.display().to_string());
    let refused = rules.err().map(ToString::to_string).unwrap_or_default();
    v1::TenantServed { name: name.to_owned(), socket, refused, added }
}

/// How each of control's tenants is served, or why it is not. Those that the configuration has are left out: it decides.
fn admitted(
    own: &[TenantRules],
    bounds: Option<&ControlTenants>,
    from_control: &[v1::AddedTenant],
) -> Vec<(String, Result<TenantRules, TenantRefused>)> {
    let mut admitted: Vec<(String, Result<TenantRules, TenantRefused>)> = Vec::new();
    for tenant in from_control {
        let there = own.iter().any(|rules| rules.tenant == tenant.name)
            || admitted.iter().any(|(name, _)| *name == tenant.name);
        if there {
            continue;
        }
        let count = admitted.iter().filter(|(_, rules)| rules.is_ok()).count();
        let rules = match bounds {
            None => Err(TenantRefused::NoTable),
            Some(bounds) if count >= bounds.tenants => Err(TenantRefused::Full(count)),
            Some(bounds) => within(bounds, tenant),
        };
        admitted.push((tenant.name.clone(), rules));
    }
    admitted
}

/// A tenant's rules, or which bound they break.
fn within(bounds: &ControlTenants, tenant: &v1::AddedTenant) -> Result<TenantRules, TenantRefused> {
    if !is_tenant_name(&tenant.name) {
        return Err(TenantRefused::Name);
    }
    if tenant.uids.is_empty() {
        return Err(TenantRefused::NoUser);
    }
    if let Some(uid) = tenant.uids.iter().find(|uid| **uid < bounds.least_uid) {
        return Err(TenantRefused::User { uid: *uid, least: bounds.least_uid });
    }
    let asked = tenant.quota.unwrap_or_default();
    let most = &bounds.quota;
    let timeout = most.operation_timeout.as_nanos().try_into().unwrap_or(u64::MAX);
    for (key, asked, most) in [
        ("attachments", asked.attachments, most.attachments),
        ("regions", asked.regions, most.regions),
        ("communicators", asked.communicators, most.communicators),
    ] {
        if asked > most {
            return Err(TenantRefused::Count { key, requested: asked, most });
        }
    }
    if asked.arena_bytes > most.arena_bytes {
        let (asked, most) = (Bytes(asked.arena_bytes), Bytes(most.arena_bytes));
        return Err(TenantRefused::Arena { requested: asked, most });
    }
    if asked.operation_timeout_ns > timeout {
        let (asked, most) = (Duration::from_nanos(asked.operation_timeout_ns), most.operation_timeout);
        return Err(TenantRefused::Timeout { requested: asked, most });
    }
    let or = |asked: u32, most: u32| if asked == 0 { most } else { asked };
    let quota = Quota {
        attachments: or(asked.attachments, most.attachments),
        arena_bytes: if asked.arena_bytes == 0 { most.arena_bytes } else { asked.arena_bytes },
        regions: or(asked.regions, most.regions),
        communicators: or(asked.communicators, most.communicators),
        operation_timeout: match asked.operation_timeout_ns {
            0 => most.operation_timeout,
            asked => Duration::from_nanos(asked),
        },
        ..*most
    };
    let path = bounds.sockets.join(format!("{}.sock", tenant.name));
    Ok(TenantRules {
        tenant: tenant.name.clone(),
        socket: Some(SocketRules { path, uids: tenant.uids.clone() }),
        secret: None,
        addresses: Vec::new(),
        quota,
        remote: false,
        rdma: false,
        handshake: HANDSHAKE,
    })
}

#[cfg(test)]
mod tests;
