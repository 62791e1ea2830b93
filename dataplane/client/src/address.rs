//! Where the agent is.

use crate::Error;
use harmonaize_abi::session::{MIN_SECRET, Secret};
use std::fmt;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Most bytes of a secret's file.
const MAX_SECRET: u64 = 64 << 10;

/// Where the agent is. Whatever is a path stands for a socket.
///
/// ```no_run
/// use harmonaize_client::{Access, AgentAddress, AttachOptions, Client};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let unit = AgentAddress::tcp("192.168.7.1:7300".parse()?, "blue", "/etc/harmonaize/secret")?;
/// let client = Client::attach(unit, AttachOptions { access: Access::Rdma, ..AttachOptions::default() })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentAddress {
    /// A Unix socket on this host.
    Socket(PathBuf),
    /// An address that answers over TCP, such as an offload unit's. Attachments over RDMA alone are possible there.
    Tcp {
        /// Where the agent listens for tenants' processes.
        address: SocketAddr,
        /// Whose process this is.
        tenant: String,
        /// What tenant and agent know.
        secret: Secret,
    },
}

impl AgentAddress {
    /// An address over TCP, with the secret that the provider gave to the tenant in a file.
    ///
    /// # Errors
    /// [`Error::Secret`] if it cannot be read, or is too short or too long.
    pub fn tcp(
        address: SocketAddr,
        tenant: impl Into<String>,
        secret: impl AsRef<Path>,
    ) -> Result<Self, Error> {
        let path = secret.as_ref();
        let wrong = |reason: String| Error::Secret { path: path.to_owned(), reason };
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(MAX_SECRET + 1).read_to_end(&mut bytes))
            .map_err(|error| wrong(error.to_string()))?;
        if bytes.len() as u64 > MAX_SECRET {
            return Err(wrong(format!("more than {MAX_SECRET} bytes")));
        }
        let secret = Secret::new(&bytes).ok_or_else(|| wrong(format!("fewer than {MIN_SECRET} bytes")))?;
        Ok(Self::Tcp { address, tenant: tenant.into(), secret })
    }
}

impl fmt::Display for AgentAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => path.display().fmt(f),
            Self::Tcp { address, .. } => address.fmt(f),
        }
    }
}

impl<P: AsRef<Path>> From<P> for AgentAddress {
    fn from(path: P) -> Self {
        Self::Socket(path.as_ref().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secrets_file_is_read_whole_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let address = "10.0.0.1:7300".parse().unwrap();
        let refused = || AgentAddress::tcp(address, "blue", &path).unwrap_err().to_string();
        assert!(refused().contains("No such file"), "{}", refused());
        std::fs::write(&path, "short\n").unwrap();
        assert!(refused().contains("fewer than 32 bytes"), "{}", refused());
        std::fs::write(&path, vec![b'x'; 70_000]).unwrap();
        assert!(refused().contains("more than 65536"), "{}", refused());
        std::fs::write(&path, "0123456789abcdef0123456789abcdef\n").unwrap();
        let at = AgentAddress::tcp(address, "blue", &path).unwrap();
        assert_eq!(at.to_string(), "10.0.0.1:7300");
        assert!(!format!("{at:?}").contains("0123456789"));
    }

    #[test]
    fn paths_of_all_kinds_are_sockets() {
        let expected = AgentAddress::Socket("/run/a.sock".into());
        assert_eq!(AgentAddress::from("/run/a.sock"), expected);
        assert_eq!(AgentAddress::from(&PathBuf::from("/run/a.sock")), expected);
        assert_eq!(AgentAddress::from(String::from("/run/a.sock")), expected);
        assert_eq!(expected.to_string(), "/run/a.sock");
    }
}
