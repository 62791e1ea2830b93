//! What an identity's files hold, as both ends of a session use it.

use crate::folder::read;
use crate::{Error, Folder};
use std::path::Path;
use std::sync::Arc;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

/// The files as they are now.
pub(crate) struct Material {
    /// The authorities.
    pub(crate) roots: Arc<RootCertStore>,
    /// The certificate, and those between it and an authority.
    pub(crate) chain: Vec<CertificateDer<'static>>,
    /// Its key.
    pub(crate) key: PrivateKeyDer<'static>,
    /// Lists of revoked certificates. An authority without a list has revoked nothing.
    pub(crate) revoked: Vec<CertificateRevocationListDer<'static>>,
}

impl Material {
    pub(crate) fn read(folder: &Folder) -> Result<Self, Error> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&folder.authorities())? {
            roots.add(certificate).map_err(|error| wrong(&folder.authorities(), error))?;
        }
        let (key, list) = (folder.key(), folder.revoked());
        Ok(Self {
            roots: Arc::new(roots),
            chain: certificates(&folder.certificate())?,
            key: PrivateKeyDer::from_pem_slice(&read(&key)?).map_err(|error| wrong(&key, error))?,
            revoked: if list.exists() { lists(&list)? } else { Vec::new() },
        })
    }
}

fn lists(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, Error> {
    let found: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(&read(path)?).collect();
    some(path, found, "there is no list of revoked certificates in it")
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    some(path, found, "there is no certificate in it")
}

fn some<T, E: std::fmt::Display>(path: &Path, found: Result<Vec<T>, E>, none: &str) -> Result<Vec<T>, Error> {
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(wrong(path, none)),
        Err(error) => Err(wrong(path, error)),
    }
}

pub(crate) fn wrong(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::Content { path: path.to_owned(), why: why.to_string() }
}
