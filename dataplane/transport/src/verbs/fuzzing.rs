//! What fuzzers call: readers of the exchange and of mailboxes, which are private otherwise.

use super::exchange::Control;
use super::mailbox::{Credits, HEAD, Message, SLOT};
use crate::MAX_HEADER;
use zerocopy::IntoBytes;

/// Reads a frame of the exchange, and the messages of a mailbox.
///
/// # Panics
/// Where what was read is not written as it was, or a message is longer than its slot.
pub fn exchange(bytes: &[u8]) {
    let frame = bytes.get(..bytes.len().min(MAX_HEADER)).unwrap_or_default();
    if let Ok(control) = Control::decode(frame) {
        let mut again = Vec::new();
        control.encode(&mut again);
        assert_eq!(Control::decode(&again).as_ref(), Ok(&control));
    }
    let mut credits = Credits::new(8, 8);
    for (slot, number) in bytes.chunks(SLOT).zip(0..) {
        let Ok(message) = Message::read(slot, number) else { return };
        assert!(message.bytes() <= SLOT, "{message:?}");
        let head = message.head();
        assert_eq!(Message::read(head.as_bytes(), number), Ok(message), "of {HEAD} bytes");
        if credits.read(message.credits).is_err() {
            return;
        }
        while credits.frame() {
            credits.spend();
        }
    }
}
