//! The keyed hash by which ends that share a secret know each other.

use hmac::{Hmac, KeyInit};
use sha2::Sha256;

/// HMAC-SHA256 with a key of 32 bytes. Source: RFC 2104.
pub fn keyed(key: &[u8; 32]) -> Hmac<Sha256> {
    // A key of the hash's block size is what a shorter one is padded to (section 2).
    let mut block = [0; 64];
    block.iter_mut().zip(key).for_each(|(to, from)| *to = *from);
    Hmac::new(&block.into())
}
