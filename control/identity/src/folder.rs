//! The folder of an identity, and whether a session with control uses one.

use crate::Error;
use std::path::{Path, PathBuf};

/// Where an identity's files are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder(pub PathBuf);

impl Folder {
    /// Certificates of the authorities that are trusted.
    pub fn authorities(&self) -> PathBuf {
        self.0.join("ca.crt")
    }

    /// The certificate, with those between it and an authority.
    pub fn certificate(&self) -> PathBuf {
        self.0.join("tls.crt")
    }

    /// The certificate's private key.
    pub fn key(&self) -> PathBuf {
        self.0.join("tls.key")
    }

    /// Certificates of the authorities that are good no longer; need not be there.
    pub fn revoked(&self) -> PathBuf {
        self.0.join("ca.crl")
    }

    /// All of them.
    pub fn files(&self) -> [PathBuf; 4] {
        [self.authorities(), self.certificate(), self.key(), self.revoked()]
    }
}

/// How a session with control is protected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Both ends show a certificate.
    Mutual(Folder),
    /// Nobody shows anything, and all may do everything: on the loopback of one machine alone.
    InsecureLoopback,
}

/// Why the keys `tls` and `insecure_loopback` choose no protection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtectionError {
    /// No certificates, at an address that others could reach.
    #[error("`insecure_loopback` is for a loopback address alone, which {address} is not")]
    NotLoopback {
        /// Where control listens.
        address: String,
    },
    /// Both keys are given.
    #[error("give `tls` or `insecure_loopback`, not both")]
    Both,
    /// Neither key is given.
    #[error(
        "`tls` is missing: the folder with ca.crt, tls.crt and tls.key, which `harmonaize init` makes (or \
         `insecure_loopback`, for one machine alone)"
    )]
    Neither,
}

impl Protection {
    /// What a configuration's keys `tls` and `insecure_loopback` say. `address` is where control listens, "host:port".
    ///
    /// # Errors
    /// What to change, where they contradict each other, say nothing, or would have no protection on a network.
    pub fn choose(
        tls: Option<PathBuf>,
        insecure_loopback: bool,
        address: &str,
    ) -> Result<Self, ProtectionError> {
        match (tls, insecure_loopback) {
            (Some(folder), false) => Ok(Self::Mutual(Folder(folder))),
            (None, true) if is_loopback(address) => Ok(Self::InsecureLoopback),
            (None, true) => Err(ProtectionError::NotLoopback { address: address.to_owned() }),
            (Some(_), true) => Err(ProtectionError::Both),
            (None, false) => Err(ProtectionError::Neither),
        }
    }
}

/// Whether an address, "host:port", is of the loopback.
fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// A file's bytes.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|source| Error::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_protected_unless_it_stays_on_the_machine() {
        let folder = || Some(PathBuf::from("tls"));
        let mutual = Ok(Protection::Mutual(Folder("tls".into())));
        assert_eq!(Protection::choose(folder(), false, "10.0.0.1:7000"), mutual);
        for address in ["127.0.0.1:7000", "[::1]:7000", "localhost:7000", "127.9.9.9:1"] {
            assert_eq!(
                Protection::choose(None, true, address),
                Ok(Protection::InsecureLoopback),
                "{address}"
            );
        }
        for address in ["10.0.0.1:7000", "[fd00::1]:7000", "localhost.example:7000", "0.0.0.0:7000", ""] {
            let refused = ProtectionError::NotLoopback { address: address.to_owned() };
            assert_eq!(Protection::choose(None, true, address), Err(refused));
        }
        assert_eq!(Protection::choose(folder(), true, "127.0.0.1:7000"), Err(ProtectionError::Both));
        assert_eq!(Protection::choose(None, false, "127.0.0.1:7000"), Err(ProtectionError::Neither));
    }
}
