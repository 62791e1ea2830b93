//! A server to connect to, and what its certificate must be.

use crate::material::{Material, wrong};
use crate::{Error, Protection, root_cause};
use hyper_util::rt::TokioIo;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::DuplexStream;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::ServerName;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};

/// A server, and how it is connected to.
#[derive(Clone, Debug)]
pub struct Remote {
    endpoint: Endpoint,
    connector: Connector,
}

/// What makes connections.
#[derive(Clone, Debug)]
enum Connector {
    Tcp,
    Tls(Tls),
    Memory(Dial),
}

type Connecting<T> = Pin<Box<dyn Future<Output = io::Result<T>> + Send>>;

/// Makes connections within this process, in place of TCP's: for simulations.
#[derive(Clone)]
pub struct Dial(Arc<dyn Fn(Uri) -> Connecting<DuplexStream> + Send + Sync>);

impl Dial {
    /// By this, which is given the address in its argument.
    pub fn new<F>(dial: impl Fn(Uri) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = io::Result<DuplexStream>> + Send + 'static,
    {
        Self(Arc::new(move |address| Box::pin(dial(address))))
    }
}

impl std::fmt::Debug for Dial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dial").finish_non_exhaustive()
    }
}

impl Service<Uri> for Dial {
    type Response = TokioIo<DuplexStream>;
    type Error = io::Error;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, address: Uri) -> Self::Future {
        let stream = (self.0)(address);
        Box::pin(async move { stream.await.map(TokioIo::new) })
    }
}

impl Remote {
    /// The server at an address, "host:port": its certificate must have the name `name`, as [`CONTROL`](crate::CONTROL), and not be
    /// revoked. The files are read now: who calls this for each connection has new ones as soon as they are there.
    ///
    /// # Errors
    /// If a file cannot be read or is none, or the address cannot be one.
    pub fn at(protection: &Protection, name: &str, address: &str) -> Result<Self, Error> {
        // What connects does TLS, where there is any.
        let endpoint = Endpoint::from_shared(format!("http://{address}"));
        let why = |error: tonic::transport::Error| root_cause(&error);
        let endpoint =
            endpoint.map_err(|error| Error::Address { address: address.to_owned(), why: why(error) })?;
        let connector = match protection {
            Protection::InsecureLoopback => Connector::Tcp,
            Protection::Mutual(folder) => {
                let Material { roots, chain, key, revoked } = Material::read(folder)?;
                let provider = Arc::new(default_provider());
                let verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
                    .with_crls(revoked)
                    .allow_unknown_revocation_status()
                    .build();
                let verifier = verifier.map_err(|error| wrong(&folder.authorities(), error))?;
                let config =
                    ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
                let config = config.map_err(|error| wrong(&folder.0, error))?.with_webpki_verifier(verifier);
                let mut config = config
                    .with_client_auth_cert(chain, key)
                    .map_err(|error| wrong(&folder.certificate(), error))?;
                config.alpn_protocols = vec![b"h2".to_vec()];
                let name = ServerName::try_from(name.to_owned()).map_err(|error| wrong(&folder.0, error))?;
                Connector::Tls(Tls { connector: TlsConnector::from(Arc::new(config)), name })
            }
        };
        Ok(Self { endpoint, connector })
    }

    /// The same over connections that somebody else makes.
    #[must_use]
    pub fn through(self, dial: Dial) -> Self {
        Self { connector: Connector::Memory(dial), ..self }
    }

    /// The same with other settings of its connections.
    #[must_use]
    pub fn with(self, settings: impl FnOnce(Endpoint) -> Endpoint) -> Self {
        Self { endpoint: settings(self.endpoint), ..self }
    }

    /// Connects.
    ///
    /// # Errors
    /// If nobody answers, or who does is not this server.
    pub async fn connect(&self) -> Result<Channel, tonic::transport::Error> {
        match &self.connector {
            Connector::Tcp => self.endpoint.connect().await,
            Connector::Tls(tls) => self.endpoint.connect_with_connector(tls.clone()).await,
            Connector::Memory(dial) => self.endpoint.connect_with_connector(dial.clone()).await,
        }
    }

    /// A channel that connects at the first call, and again when it has lost its connection.
    pub fn connect_lazy(&self) -> Channel {
        match &self.connector {
            Connector::Tcp => self.endpoint.connect_lazy(),
            Connector::Tls(tls) => self.endpoint.connect_with_connector_lazy(tls.clone()),
            Connector::Memory(dial) => self.endpoint.connect_with_connector_lazy(dial.clone()),
        }
    }
}

/// Makes connections with TLS.
#[derive(Clone)]
struct Tls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Service<Uri> for Tls {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let Self { connector, name } = self.clone();
        Box::pin(async move {
            let none = || io::Error::new(io::ErrorKind::InvalidInput, "the address has no port");
            let authority =
                uri.authority().filter(|authority| authority.port().is_some()).ok_or_else(none)?;
            let stream = TcpStream::connect(authority.as_str()).await?;
            stream.set_nodelay(true)?;
            connector.connect(name, stream).await.map(TokioIo::new)
        })
    }
}
