//! How a process that reaches the agent over TCP proves which tenant's it is. The agent proves that it is the
//! provider's.
//!
//! ```text
//! process                                agent
//!   Knock (tenant, nonce)              ->
//!                                     <- Challenge (nonce)
//!   Response (proof)                   ->
//!                                     <- Result<Proven (proof), Refused>
//!   Hello ...
//! ```
//! A proof is HMAC-SHA256 (RFC 2104), keyed with the tenant's secret, over who speaks, the tenant's name, and both nonces: one
//! of either end is never one of the other, and none can be used again. The agent proves itself last, so a stranger gets
//! nothing to guess the secret by. What follows is neither encrypted nor authenticated.

use alloc::string::String;
use hmac::Mac;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// Fewest bytes of a [`Secret`].
pub const MIN_SECRET: usize = 32;

/// What a tenant and the provider's agents both know, as a key: SHA-256 of the secret's bytes. Not shown in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl core::fmt::Debug for Secret {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// A file's bytes, without white space at their end. Nothing if fewer than [`MIN_SECRET`] remain.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.trim_ascii_end();
        (bytes.len() >= MIN_SECRET).then(|| Self(Sha256::digest(bytes).into()))
    }

    fn proof(&self, speaker: &[u8; 8], request: &AuthRequest, challenge: &Challenge) -> [u8; 32] {
        let mut mac = crate::keyed(&self.0);
        mac.update(speaker);
        mac.update(&(request.tenant.len() as u64).to_le_bytes());
        mac.update(request.tenant.as_bytes());
        mac.update(&request.nonce);
        mac.update(&challenge.nonce);
        mac.finalize().into_bytes().into()
    }

    /// The process's proof.
    pub fn response(&self, request: &AuthRequest, challenge: &Challenge) -> Response {
        Response { proof: self.proof(b"process ", request, challenge) }
    }

    /// The agent's proof, if the process's is right.
    pub fn verify(
        &self,
        request: &AuthRequest,
        challenge: &Challenge,
        response: &Response,
    ) -> Option<AuthConfirmation> {
        let right: bool = self.proof(b"process ", request, challenge).ct_eq(&response.proof).into();
        right.then(|| AuthConfirmation { proof: self.proof(b"agent   ", request, challenge) })
    }

    /// Whether the agent's proof is right.
    pub fn verify_agent(
        &self,
        request: &AuthRequest,
        challenge: &Challenge,
        proven: &AuthConfirmation,
    ) -> bool {
        self.proof(b"agent   ", request, challenge).ct_eq(&proven.proof).into()
    }
}

/// The process's first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthRequest {
    /// Whose process it is.
    pub tenant: String,
    /// Random, for this connection alone.
    pub nonce: [u8; 32],
}

/// The agent's first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// Random, for this connection alone.
    pub nonce: [u8; 32],
}

/// That the process knows the secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Response {
    /// See [`Secret::response`].
    pub proof: [u8; 32],
}

/// That the agent knows it too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthConfirmation {
    /// See [`Secret::verify`].
    pub proof: [u8; 32],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_secret_nonces_and_tenant_prove_anything() {
        let secret = Secret::new(&[b'a'; 32]).unwrap();
        let request = AuthRequest { tenant: "blue".into(), nonce: [1; 32] };
        let challenge = Challenge { nonce: [2; 32] };
        let response = secret.response(&request, &challenge);
        let proven = secret.verify(&request, &challenge, &response).unwrap();
        assert!(secret.verify_agent(&request, &challenge, &proven));
        assert!(!secret.verify_agent(&request, &challenge, &AuthConfirmation { proof: response.proof }));
        let other = Secret::new(&[b'b'; 32]).unwrap();
        assert_eq!(other.verify(&request, &challenge, &response), None);
        assert!(!other.verify_agent(&request, &challenge, &proven));
        for (tenant, mine, theirs) in [("red", 1, 2), ("blue", 3, 2), ("blue", 1, 3)] {
            let request = AuthRequest { tenant: tenant.into(), nonce: [mine; 32] };
            let challenge = Challenge { nonce: [theirs; 32] };
            assert_eq!(secret.verify(&request, &challenge, &response), None);
            assert!(!secret.verify_agent(&request, &challenge, &proven));
        }
    }

    #[test]
    fn a_secret_is_long_and_not_shown() {
        assert_eq!(Secret::new(&[b'a'; 31]), None);
        assert_eq!(Secret::new(b"                                          \n"), None);
        let secret = Secret::new(&[&[b'a'; 32][..], b"\n"].concat()).unwrap();
        assert_eq!(Some(secret.clone()), Secret::new(&[b'a'; 32]));
        assert!(!alloc::format!("{secret:?}").contains('a'));
    }
}
