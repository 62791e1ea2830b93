//! Control's end of sessions: who connects, and for how long.

use crate::limits::{Handshakes, Place, Places};
use crate::material::{Material, wrong};
use crate::watched::{Stamp, stamp};
use crate::{CONTROL, ETCD, Error, Folder, Identity, Protection};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::{CertificateDer, UnixTime};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

/// Connections whose handshake is over, and that nobody has taken yet.
const READY: usize = 16;
/// How long a handshake may take; without certificates, the first byte.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// The pause after the system gave no connection, as when there are too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How often it is looked whether the files have changed, by which connections' certificates are good.
const LOOK: Duration = Duration::from_secs(1);
/// How often certificates of connections are checked where nothing has changed: they may expire.
const RECHECK: Duration = Duration::from_secs(60);

/// The innermost cause of an error, which says most.
pub fn root_cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(next) = error.source() {
        error = next;
    }
    error.to_string()
}

/// Who connected, and from where. Each request's extensions have it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Who.
    pub identity: Identity,
    /// From where.
    pub address: SocketAddr,
    /// The serial number of its certificate, in hexadecimal digits; empty where it has shown none.
    pub serial: String,
    /// The most connections that the caller may have, if this is one too many. Whatever is asked through it is to be
    /// refused.
    pub surplus_of: Option<usize>,
}

/// A connection with somebody who is known.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    peer: Peer,
    /// Where connections are counted.
    place: Option<Place>,
    certificate: Option<Arc<Shown>>,
}

/// The certificate that a connection was made with, and those between it and an authority.
#[derive(Debug)]
struct Shown {
    chain: Vec<CertificateDer<'static>>,
    state: Mutex<Standing>,
}

/// Whether a certificate is good, and who waits for a connection's bytes meanwhile.
#[derive(Debug, Default)]
struct Standing {
    revoked: bool,
    reader: Option<Waker>,
}

impl Shown {
    fn state(&self) -> std::sync::MutexGuard<'_, Standing> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the certificate is good no longer; else who asks is woken once it is.
    fn is_revoked(&self, cx: &Context<'_>) -> bool {
        let mut state = self.state();
        if !state.revoked {
            state.reader = Some(cx.waker().clone());
        }
        state.revoked
    }

    fn revoke(&self) {
        let mut state = self.state();
        state.revoked = true;
        state.reader.take().into_iter().for_each(Waker::wake);
    }
}

#[derive(Debug)]
enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    Memory(DuplexStream),
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.certificate.as_ref().is_some_and(|shown| shown.is_revoked(cx)) {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, "certificate revoked")));
        }
        match &mut this.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Memory(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Memory(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Memory(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Memory(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// Accepts connections until the stream is dropped. Handshakes run beside each other, 64 from an address; one that fails or
/// takes longer than five seconds is logged, and nobody else waits for it. Certificates are read again when their files have
/// changed, and connections end whose certificates are good no longer. An identity may have `most` connections; through as many again it is told so, and more are closed.
///
/// # Errors
/// If a file cannot be read or is not what it should be.
pub fn serve(
    listener: TcpListener,
    protection: &Protection,
    most: usize,
) -> Result<ReceiverStream<io::Result<Connection>>, Error> {
    let acceptor = match protection {
        Protection::Mutual(folder) => Some(Arc::new(Acceptor::new(folder.clone())?)),
        Protection::InsecureLoopback => None,
    };
    let (sink, stream) = mpsc::channel(READY);
    let identities = (Places::default(), most);
    tokio::spawn(accept(listener, acceptor, identities, sink));
    Ok(ReceiverStream::new(stream))
}

async fn accept(
    listener: TcpListener,
    acceptor: Option<Arc<Acceptor>>,
    (places, most): (Places, usize),
    sink: mpsc::Sender<io::Result<Connection>>,
) {
    let mut handshakes = Handshakes::default();
    let mut look = tokio::time::interval(LOOK);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = sink.closed() => return,
            _ = look.tick() => {
                acceptor.iter().for_each(|acceptor| acceptor.end_revoked());
                continue;
            }
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "no connection could be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (from, now) = (address.ip().to_canonical(), Instant::now());
        if !handshakes.room(from, now) {
            continue;
        }
        let (acceptor, places, sink) = (acceptor.clone(), places.clone(), sink.clone());
        let task = tokio::spawn(async move {
            let made = tokio::time::timeout(HANDSHAKE, shake_hands(acceptor.as_deref(), stream, address));
            let made = made.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
            match made.and_then(|connection| connection.counted(&places, most)) {
                Ok(connection) => drop(sink.send(Ok(connection)).await),
                Err(error) => tracing::warn!(target: "audit", from = %address, %error, "handshake refused"),
            }
        });
        handshakes.begun(from, now, task.abort_handle());
    }
}

async fn shake_hands(
    acceptor: Option<&Acceptor>,
    stream: TcpStream,
    address: SocketAddr,
) -> io::Result<Connection> {
    stream.set_nodelay(true)?;
    let peer = |identity, serial| Peer { identity, address, serial, surplus_of: None };
    let Some(acceptor) = acceptor else {
        // Who says nothing has no connection yet.
        stream.peek(&mut [0]).await?;
        let (stream, peer) = (Stream::Plain(stream), peer(Identity::Local, String::new()));
        return Ok(Connection { stream, peer, place: None, certificate: None });
    };
    let stream = acceptor.current().accept(stream).await?;
    let (_, session) = stream.get_ref();
    let chain = session.peer_certificates().unwrap_or_default();
    let none = || io::Error::new(io::ErrorKind::InvalidData, "no certificate");
    let (identity, serial) = identity(chain.first().ok_or_else(none)?)?;
    // Those serve, and connect with etcd alone.
    if let Some(name) = [CONTROL, ETCD].into_iter().find(|name| identity.may_be_host(name)) {
        let text = format!("the certificate of `{name}` is nobody's who connects here");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let chain = chain.iter().cloned().map(CertificateDer::into_owned).collect();
    let certificate = Some(acceptor.watch(chain));
    let (stream, peer) = (Stream::Tls(Box::new(stream)), peer(identity, serial));
    Ok(Connection { stream, peer, place: None, certificate })
}

impl Connection {
    /// A connection within this process, with somebody of this machine who is said to be at an address: for simulations.
    pub fn in_memory(stream: DuplexStream, address: SocketAddr) -> Self {
        let peer = Peer { identity: Identity::Local, address, serial: String::new(), surplus_of: None };
        Self { stream: Stream::Memory(stream), peer, place: None, certificate: None }
    }

    /// The same, as one of those that its identity has.
    fn counted(mut self, places: &Places, most: usize) -> io::Result<Self> {
        if self.peer.identity == Identity::Local {
            return Ok(self);
        }
        let who = self.peer.identity.to_string();
        let too_many = || io::Error::other(format!("{who} has {} connections already", most * 2));
        let place = places.take(&who, most * 2).ok_or_else(too_many)?;
        self.peer.surplus_of = (place.number > most).then_some(most);
        self.place = Some(place);
        Ok(self)
    }
}

/// Whose a certificate is, and its serial number.
fn identity(certificate: &CertificateDer<'_>) -> io::Result<(Identity, String)> {
    let parsed = webpki::EndEntityCert::try_from(certificate);
    let parsed = parsed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    let serial = parsed.serial().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok((Identity::new(parsed.valid_dns_names(), parsed.valid_uri_names()), serial))
}

/// How each file was when it was read.
type Stamps = [Stamp; 4];

/// Control's end of handshakes.
struct Acceptor {
    folder: Folder,
    current: Mutex<(Stamps, Checks)>,
    /// Of connections that may be there still; and by which files they were checked last, and when.
    shown: Mutex<Vec<Weak<Shown>>>,
    checked: Mutex<(Stamps, Instant)>,
}

/// By the files as they were read.
#[derive(Clone)]
struct Checks {
    acceptor: TlsAcceptor,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl Acceptor {
    fn new(folder: Folder) -> Result<Self, Error> {
        let stamps = stamps(&folder);
        let current = Mutex::new((stamps, load(&folder)?));
        let checked = Mutex::new((stamps, Instant::now()));
        Ok(Self { folder, current, shown: Mutex::default(), checked })
    }

    /// From now on the connection that this chain was shown for ends when it is good no longer.
    fn watch(&self, chain: Vec<CertificateDer<'static>>) -> Arc<Shown> {
        let shown = Arc::new(Shown { chain, state: Mutex::default() });
        let mut all = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(&shown));
        shown
    }

    /// Ends connections whose certificates are good no longer: expired, revoked, or of an authority that is trusted no more.
    fn end_revoked(&self) {
        let (stamps, now) = (stamps(&self.folder), Instant::now());
        {
            let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
            if checked.0 == stamps && now.saturating_duration_since(checked.1) < RECHECK {
                return;
            }
            *checked = (stamps, now);
        }
        let (Checks { verifier, .. }, now) = (self.checks(), UnixTime::now());
        let mut all = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|shown| {
            let Some(shown) = shown.upgrade() else { return false };
            let Some((own, between)) = shown.chain.split_first() else { return false };
            let Err(error) = verifier.verify_client_cert(own, between, now) else { return true };
            let (who, serial) =
                identity(own).map_or_else(|_| Default::default(), |(who, serial)| (who.to_string(), serial));
            tracing::warn!(target: "audit", who, serial, %error, "a connection ends with its certificate");
            shown.revoke();
            false
        });
    }

    fn current(&self) -> TlsAcceptor {
        self.checks().acceptor
    }

    /// By the files as they are now, or by those before where these are no good.
    fn checks(&self) -> Checks {
        let stamps = stamps(&self.folder);
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.0 != stamps {
            match load(&self.folder) {
                Ok(checks) => {
                    tracing::info!(folder = %self.folder.0.display(), "certificates were read again");
                    *current = (stamps, checks);
                }
                Err(error) => tracing::warn!(%error, "certificates stay as they were"),
            }
        }
        current.1.clone()
    }
}

fn stamps(folder: &Folder) -> Stamps {
    folder.files().map(|file| stamp(&file))
}

fn load(folder: &Folder) -> Result<Checks, Error> {
    let Material { roots, chain, key, revoked } = Material::read(folder)?;
    let provider = Arc::new(default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
        .with_crls(revoked)
        .allow_unknown_revocation_status()
        .build();
    let verifier = verifier.map_err(|error| wrong(&folder.authorities(), error))?;
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config =
        config.map_err(|error| wrong(&folder.0, error))?.with_client_cert_verifier(Arc::clone(&verifier));
    let mut config =
        config.with_single_cert(chain, key).map_err(|error| wrong(&folder.certificate(), error))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Checks { acceptor: TlsAcceptor::from(Arc::new(config)), verifier })
}
