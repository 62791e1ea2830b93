//! When a certificate ends.

use crate::{Error, Folder, Protection};
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use x509_parser::parse_x509_certificate;

impl Protection {
    /// Returns when the certificate ends that is shown, in seconds since 1970; none where none is. It may be renewed at any time: ask again.
    ///
    /// # Errors
    /// Where the file cannot be read, or holds no certificate.
    pub fn certificate_ends(&self) -> Result<Option<u64>, Error> {
        match self {
            Self::Mutual(folder) => folder.certificate_ends().map(Some),
            Self::InsecureLoopback => Ok(None),
        }
    }
}

impl Folder {
    fn certificate_ends(&self) -> Result<u64, Error> {
        let path = self.certificate();
        let content = |why: String| Error::Content { path: path.clone(), why };
        let der = CertificateDer::from_pem_file(&path).map_err(|error| content(error.to_string()))?;
        let (_, certificate) = parse_x509_certificate(&der).map_err(|error| content(error.to_string()))?;
        Ok(u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0))
    }
}
