//! Tenants' processes that come over TCP, from other machines: each proves whose it is before anything else.

use super::SessionRequest;
use super::connection::{Connection, MAX_HELLO, MAX_OFFER, malformed, slow};
use super::log_limit::LogLimit;
use super::server::{BindError, serve_connections};
use super::stream::{ReadError, Stream};
use super::tenant::{Grant, Tenant};
use crate::counters::Counters;
use harmonaize_abi::session::{
    AuthConfirmation, AuthRequest, Challenge, MessageError, RefusalKind, Refused, Response, Secret, decode,
    decode_first, encode, encode_first,
};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc, watch};

/// Connections at once that have not proved anything: of each address that is a tenant's, and of all others together. Of one more the
/// oldest goes: who proves itself at once keeps its place, whoever else comes from its address.
const MAX_UNAUTHENTICATED: usize = 16;

/// Lines of the log about such connections in a minute.
const UNAUTHENTICATED_LINES: u32 = 60;

/// The address, listening.
#[derive(Debug)]
pub(super) struct NetworkServer {
    listener: TcpListener,
    address: SocketAddr,
    gate: Arc<Gate>,
}

/// Who may come in.
#[derive(Debug)]
pub(super) struct Gate {
    tenants: RwLock<Vec<Arc<Tenant>>>,
    limit: Duration,
    /// Of nobody: whoever names no tenant is asked to prove as much as the others.
    decoy: Secret,
    /// Connections that have not proved anything, by address (`None`: not a tenant's), the oldest first.
    unauthenticated: Mutex<HashMap<Option<IpAddr>, VecDeque<Arc<Notify>>>>,
    /// Lines about those, whoever they are.
    log: LogLimit,
}

/// A place among the unproven, given back when dropped.
#[derive(Debug)]
struct UnauthenticatedSlot {
    gate: Arc<Gate>,
    from: Option<IpAddr>,
    /// Called where the place is taken away.
    evicted: Arc<Notify>,
}

impl Drop for UnauthenticatedSlot {
    fn drop(&mut self) {
        let mut unproven = self.gate.unauthenticated.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut slots) = unproven.entry(self.from) {
            slots.get_mut().retain(|slot| !Arc::ptr_eq(slot, &self.evicted));
            if slots.get().is_empty() {
                slots.remove();
            }
        }
    }
}

fn random() -> std::io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(bytes)
}

impl NetworkServer {
    /// Listens for tenants that may come over TCP, which [`Gate::admit_only`] says. The listener is that of another process of the agent's,
    /// if it is there.
    pub(super) fn bind(
        listen: SocketAddr,
        inherited: Option<OwnedFd>,
        limit: Duration,
        counters: Counters,
    ) -> Result<Self, BindError> {
        let failed = |source| BindError::Network { listen, source };
        let decoy = Secret::new(&random().map_err(failed)?.map(|byte| byte | 0x80));
        let decoy = decoy.ok_or_else(|| failed(std::io::Error::other("no secret from random bytes")))?;
        let inherited = inherited.map(std::net::TcpListener::from);
        let there = |listener: &std::net::TcpListener| {
            listener
                .local_addr()
                .is_ok_and(|at| at == listen || (listen.port() == 0 && at.ip() == listen.ip()))
        };
        let listener = match inherited.filter(there) {
            Some(listener) => listener,
            // The standard library's listener takes an address again that an agent has just left.
            None => std::net::TcpListener::bind(listen).map_err(failed)?,
        };
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = TcpListener::from_std(listener).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (tenants, unauthenticated) = (RwLock::default(), Mutex::default());
        let log = LogLimit::new(counters);
        let gate = Arc::new(Gate { tenants, limit, decoy, unauthenticated, log });
        tracing::info!(%address, "tenants may connect over TCP");
        Ok(Self { listener, address, gate })
    }

    /// Another descriptor of its socket.
    pub(super) fn descriptor(&self) -> std::io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }

    pub(super) fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Who decides whom it lets in.
    pub(super) fn gate(&self) -> Arc<Gate> {
        Arc::clone(&self.gate)
    }

    /// Serves until `stop` becomes true (or its sender is dropped) and everybody has gone.
    pub(super) async fn run(
        self,
        requests: mpsc::Sender<SessionRequest>,
        (stop, frozen): (watch::Receiver<bool>, watch::Receiver<bool>),
    ) {
        let Self { listener, gate, .. } = self;
        let (own_stop, own_frozen) = (stop.clone(), frozen.clone());
        let admit = |(stream, from): (TcpStream, SocketAddr)| {
            let (from, watched) = (from.ip().to_canonical(), (own_stop.clone(), own_frozen.clone()));
            Some(visit(gate.admit(from), stream, from, requests.clone(), watched))
        };
        serve_connections("over TCP", move |cx| listener.poll_accept(cx), admit, (stop, frozen)).await;
    }
}

/// One connection, from its first byte to its end.
async fn visit(
    place: UnauthenticatedSlot,
    stream: TcpStream,
    from: IpAddr,
    requests: mpsc::Sender<SessionRequest>,
    (mut stop, frozen): (watch::Receiver<bool>, watch::Receiver<bool>),
) {
    let stream = match Stream::accepted(stream) {
        Ok(stream) => stream,
        Err(error) => return place.gate.log(|| tracing::warn!(%from, "closed: {error}")),
    };
    let gate = Arc::clone(&place.gate);
    let mut visitor = UnauthenticatedClient { gate, stream, from, challenge: None, frozen };
    let proved = tokio::select! {
        proved = visitor.authenticate() => proved,
        _ = stop.wait_for(|stop| *stop) => return,
        () = place.evicted.notified() => {
            let why = "closed: too many connections from there have proved nothing, and this was the oldest";
            return place.gate.log(|| tracing::warn!(%from, "{why}"));
        }
    };
    match proved {
        Ok((tenant, grant)) => {
            drop(place);
            Connection::new(tenant, visitor.stream, grant).run(requests).await;
        }
        // It keeps its place until it has heard.
        Err(Some(refused)) => visitor.refuse(&refused).await,
        Err(None) => {}
    }
}

impl Gate {
    /// Logs a line about somebody who has proved nothing, unless there are too many of them.
    fn log(&self, line: impl FnOnce()) {
        self.log.log(UNAUTHENTICATED_LINES, "processes over TCP that have proved nothing", line);
    }

    /// From now on these may come in, and no others.
    pub(super) fn admit_only(&self, tenants: Vec<Arc<Tenant>>) {
        *self.tenants.write().unwrap_or_else(PoisonError::into_inner) = tenants;
    }

    fn find(&self, fits: impl Fn(&Tenant) -> bool) -> Option<Arc<Tenant>> {
        let tenants = self.tenants.read().unwrap_or_else(PoisonError::into_inner);
        tenants.iter().find(|tenant| fits(tenant)).cloned()
    }

    /// A place among the unproven for who comes from there.
    fn admit(self: &Arc<Self>, from: IpAddr) -> UnauthenticatedSlot {
        let of_tenant = |tenant: &Tenant| {
            let rules = tenant.rules();
            rules.secret.is_some() && rules.addresses.contains(&from)
        };
        let from = self.find(of_tenant).map(|_| from);
        let mut unproven = self.unauthenticated.lock().unwrap_or_else(PoisonError::into_inner);
        let (slots, evicted) = (unproven.entry(from).or_default(), Arc::new(Notify::new()));
        if slots.len() >= MAX_UNAUTHENTICATED
            && let Some(oldest) = slots.pop_front()
        {
            oldest.notify_one();
        }
        slots.push_back(Arc::clone(&evicted));
        UnauthenticatedSlot { gate: Arc::clone(self), from, evicted }
    }

    /// Whose process it is, and the agent's own proof; else why not, for the operator alone.
    fn authenticate(
        &self,
        from: IpAddr,
        request: &AuthRequest,
        challenge: &Challenge,
        response: &Response,
    ) -> Result<(Arc<Tenant>, AuthConfirmation), AuthError> {
        let named = self.find(|tenant| tenant.name == request.tenant);
        let in_force = named.as_ref().map(|tenant| tenant.rules());
        let rules = in_force.as_ref().filter(|rules| rules.secret.is_some());
        let secret = rules.and_then(|rules| rules.secret.as_ref()).unwrap_or(&self.decoy);
        let proven = secret.verify(request, challenge, response);
        match (named, rules, proven) {
            (Some(_), Some(rules), _) if !rules.addresses.contains(&from) => Err(AuthError::Address),
            (Some(tenant), Some(_), Some(proven)) => Ok((tenant, proven)),
            (Some(_), Some(_), None) => Err(AuthError::Proof),
            _ => Err(AuthError::Tenant),
        }
    }
}

/// Why a process is not let in, for the operator alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum AuthError {
    #[error("the address is not one of the tenant's")]
    Address,
    #[error("the proof is wrong: another secret")]
    Proof,
    #[error("no such tenant over TCP")]
    Tenant,
}

/// Someone who has proved nothing yet. Whoever is refused hears as many messages as whoever is let in, and not why.
#[derive(Debug)]
struct UnauthenticatedClient {
    gate: Arc<Gate>,
    stream: Stream,
    from: IpAddr,
    /// Once it has been sent.
    challenge: Option<Challenge>,
    /// Whether the agent is about to have a successor, and nobody becomes a connection.
    frozen: watch::Receiver<bool>,
}

impl UnauthenticatedClient {
    async fn authenticate(&mut self) -> Result<(Arc<Tenant>, Grant), Option<Refused>> {
        let limit = self.gate.limit;
        let proved = tokio::time::timeout(limit, self.exchange()).await;
        proved.unwrap_or_else(|_| Err(Some(slow("proof", limit))))
    }

    async fn exchange(&mut self) -> Result<(Arc<Tenant>, Grant), Option<Refused>> {
        let bad = |error: MessageError| Some(malformed("proof", error));
        let unread = |why| match why {
            ReadError::Gone => None,
            ReadError::Bad(error) => bad(error),
        };
        let message = self.stream.read_message(MAX_HELLO).await.map_err(unread)?;
        let knock: AuthRequest = decode_first(&message).map_err(bad)?;
        let challenge = self.challenge().await.map_err(|_| None)?;
        let message = self.stream.read_message(MAX_OFFER).await.map_err(unread)?;
        let response: Response = decode(&message).map_err(bad)?;
        // A hand-over waits for connections, and for nobody who becomes one meanwhile.
        let _ = self.frozen.wait_for(|frozen| !frozen).await;
        match self.gate.authenticate(self.from, &knock, &challenge, &response) {
            Ok((tenant, proven)) => {
                let grant = tenant.connection(Instant::now()).map_err(Some)?;
                self.stream.send(&Ok::<_, Refused>(proven)).await.map_err(|_| None)?;
                Ok((tenant, grant))
            }
            Err(why) => {
                self.gate
                    .log(|| tracing::warn!(from = %self.from, tenant = ?knock.tenant, "not let in: {why}"));
                let text = "this process did not prove to be the tenant's: name, secret and address must be those that \
                            the provider has registered";
                Err(Some(Refused { kind: RefusalKind::User, text: text.into() }))
            }
        }
    }

    async fn challenge(&mut self) -> std::io::Result<Challenge> {
        let challenge = Challenge { nonce: random()? };
        let message = encode_first(&challenge).map_err(std::io::Error::other)?;
        self.challenge = Some(challenge.clone());
        self.stream.write_all(&message).await?;
        Ok(challenge)
    }

    async fn refuse(mut self, refused: &Refused) {
        if refused.kind != RefusalKind::User {
            self.gate.log(|| tracing::warn!(from = %self.from, "refused: {}", refused.text));
        }
        // A process of another version learns it from the challenge.
        if self.challenge.is_none() && self.challenge().await.is_err() {
            return;
        }
        if let Ok(message) = encode(&Err::<AuthConfirmation, _>(refused)) {
            self.stream.close_with(&message).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::handover::Freeze;
    use super::super::{Quota, TenantRules};
    use super::*;
    use harmonaize_abi::session::length;
    use std::net::Ipv4Addr;
    use tokio::io::AsyncReadExt;
    use tokio::net::UnixStream;
    use tokio::task::JoinHandle;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    type Exchanged = Result<(Arc<Tenant>, Grant), Option<Refused>>;

    fn secret() -> Secret {
        Secret::new(&[b'a'; 32]).unwrap()
    }

    /// A process that has sent all by which it proves whose it is.
    async fn proves(gate: &Arc<Gate>, frozen: watch::Receiver<bool>) -> (UnixStream, JoinHandle<Exchanged>) {
        let (mut process, stream) = UnixStream::pair().unwrap();
        let (gate, stream) = (Arc::clone(gate), Stream::Unix(stream));
        let mut visitor = UnauthenticatedClient { gate, stream, from: HERE, challenge: None, frozen };
        let exchange = tokio::spawn(async move { visitor.exchange().await });
        let knock = AuthRequest { tenant: "a".into(), nonce: [7; 32] };
        process.write_all(&encode_first(&knock).unwrap()).await.unwrap();
        let mut prefix = [0; 4];
        process.read_exact(&mut prefix).await.unwrap();
        let mut challenge = vec![0; length(prefix).unwrap()];
        process.read_exact(&mut challenge).await.unwrap();
        let challenge: Challenge = decode_first(&challenge).unwrap();
        let response = secret().response(&knock, &challenge);
        process.write_all(&encode(&response).unwrap()).await.unwrap();
        (process, exchange)
    }

    #[tokio::test]
    async fn nobody_becomes_a_connection_while_sessions_stand_still() {
        let counters = Counters::default();
        let rules = TenantRules {
            tenant: "a".into(),
            socket: None,
            secret: Some(secret()),
            addresses: vec![HERE],
            quota: Quota::default(),
            remote: false,
            rdma: true,
            handshake: Duration::from_secs(60),
        };
        let tenant = Tenant::new(rules, None, &counters, Arc::new(Freeze::new(false).0));
        let gate = Arc::new(Gate {
            tenants: RwLock::new(vec![Arc::clone(&tenant)]),
            limit: Duration::from_secs(60),
            decoy: Secret::new(&[b'b'; 32]).unwrap(),
            unauthenticated: Mutex::default(),
            log: LogLimit::new(counters),
        });
        let (hold, frozen) = watch::channel(true);
        let (_first, waits) = proves(&gate, frozen).await;
        // All that the first has sent was there before the second's challenge was.
        let (_free, free) = watch::channel(false);
        let (_second, proven) = proves(&gate, free).await;
        let _grant = proven.await.unwrap().unwrap();
        assert!(!waits.is_finished(), "it is a connection that no hand-over has waited for");
        assert_eq!(tenant.connections(), 1);
        hold.send_replace(false);
        let _grant = waits.await.unwrap().unwrap();
        assert_eq!(tenant.connections(), 2);
    }
}
