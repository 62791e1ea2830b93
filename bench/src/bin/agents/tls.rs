//! Both ends of a TLS connection in memory.

use anyhow::{Context, Result};
use harmonaize_identity::{CONTROL, Folder};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, ConnectionCommon, RootCertStore, ServerConfig, ServerConnection,
};

/// An agent's end and control's, of which control's is timed.
pub(crate) struct Ends {
    agent: ClientConnection,
    control: ServerConnection,
    /// What is on its way.
    wire: Vec<u8>,
}

impl Ends {
    /// Connects both, with the certificate for control in `folder`.
    pub(crate) fn shake_hands(folder: PathBuf) -> Result<Self> {
        let folder = Folder(folder);
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(folder.authorities())? {
            roots.add(certificate?)?;
        }
        let chain = CertificateDer::pem_file_iter(folder.certificate())?.collect::<Result<_, _>>()?;
        let key = PrivateKeyDer::from_pem_file(folder.key())?;
        let server = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key)?;
        let client = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let name = ServerName::try_from(CONTROL)?;
        let mut ends = Self {
            agent: ClientConnection::new(Arc::new(client), name)?,
            control: ServerConnection::new(Arc::new(server))?,
            wire: Vec::new(),
        };
        while ends.agent.is_handshaking() || ends.control.is_handshaking() || ends.control.wants_write() {
            send(&mut ends.agent, &mut ends.wire)?;
            receive(&mut ends.control, &mut ends.wire)?;
            send(&mut ends.control, &mut ends.wire)?;
            receive(&mut ends.agent, &mut ends.wire)?;
        }
        Ok(ends)
    }

    /// The agent sends a message to control: how long control took to open it.
    pub(crate) fn up(&mut self, message: &mut [u8]) -> Result<Duration> {
        self.agent.writer().write_all(message)?;
        send(&mut self.agent, &mut self.wire)?;
        let begun = Instant::now();
        receive(&mut self.control, &mut self.wire)?;
        self.control.reader().read_exact(message)?;
        Ok(begun.elapsed())
    }

    /// Control sends a message to the agent: how long control took to seal it.
    pub(crate) fn down(&mut self, message: &mut [u8]) -> Result<Duration> {
        let begun = Instant::now();
        self.control.writer().write_all(message)?;
        send(&mut self.control, &mut self.wire)?;
        let took = begun.elapsed();
        receive(&mut self.agent, &mut self.wire)?;
        self.agent.reader().read_exact(message)?;
        Ok(took)
    }
}

fn send<D>(end: &mut ConnectionCommon<D>, wire: &mut Vec<u8>) -> Result<()> {
    while end.wants_write() {
        end.write_tls(wire)?;
    }
    Ok(())
}

fn receive<D>(end: &mut ConnectionCommon<D>, wire: &mut Vec<u8>) -> Result<()> {
    let mut rest = wire.as_slice();
    while !rest.is_empty() {
        end.read_tls(&mut rest)?;
        end.process_new_packets().context("what one end sealed the other cannot open")?;
    }
    wire.clear();
    Ok(())
}
