//! Who agents, aggregators, operators and control are to each other: certificates, and connections that check them.
//!
//! Each has a folder with three files, named as in a Kubernetes secret of type `tls`: `ca.crt`, `tls.crt` and `tls.key`, all
//! PEM. There may be `ca.crl` too, with lists of revoked certificates. Control's certificate has the DNS name `control`. That of
//! an agent or aggregator has the name that the topology gives it, that of an operator his own; a SPIFFE ID that ends in
//! `/host/NAME` or `/operator/NAME` says the same.
#![forbid(unsafe_code)]

#[cfg(feature = "authority")]
mod authority;
#[cfg(feature = "session")]
mod expiry;
mod folder;
#[cfg(feature = "session")]
mod limits;
#[cfg(feature = "session")]
mod material;
mod name;
#[cfg(feature = "session")]
mod remote;
#[cfg(feature = "session")]
mod session;
mod watched;

#[cfg(feature = "authority")]
pub use authority::{Authority, Issued, Use, write_file};
pub use folder::{Folder, Protection, ProtectionError};
#[cfg(feature = "session")]
pub use limits::{Place, Places, raise_open_files};
pub use name::Identity;
#[cfg(feature = "session")]
pub use remote::{Dial, Remote};
#[cfg(feature = "session")]
pub use session::{Connection, Peer, root_cause, serve};
pub use watched::Watched;

use std::path::PathBuf;

/// The DNS name in control's certificate.
pub const CONTROL: &str = "control";

/// The DNS name in the certificate of a member of etcd.
pub const ETCD: &str = "etcd";

/// Why there is no identity, or no connection by it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is there, and not what it should be.
    #[error("{}: {why}", path.display())]
    Content {
        /// Which file or folder.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The address cannot be connected to by anybody.
    #[error("bad address `{address}`: {why}")]
    Address {
        /// Which.
        address: String,
        /// What is wrong.
        why: String,
    },
}
